"""From a comparison's folder to its verdict."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.common.errors import EXIT_INCONCLUSIVE, EXIT_OK, EXIT_REGRESSION, UsageError
from kvbench.gate.compare.conclude import conclude, judge_again, look_points, read_values, write_pairs
from kvbench.gate.compare.folder import FailedAttempt, GivenUp
from kvbench.gate.policy import load_policy
from kvbench.gate.timing.plan import SIDES
from kvbench.gate.verdict.pairs import pair_page
from tests.support.compare_folders import noisy_pairs, stored_comparison, write_load

CELLS = ("mixed/a-c4", "mixed/b-c4", "uniform/a-c4")
POLICY = load_policy(None)


def verdict_of(tmp_path, base, candidate, cells=CELLS, **options):
    folder = stored_comparison(tmp_path, base, candidate, cells)
    return conclude(folder, folder.state(), POLICY, **options)


def test_a_slower_candidate_fails_at_the_first_look_and_the_numbers_are_those_of_the_loads(tmp_path):
    base, candidate = noisy_pairs(16, 3, 1, (-0.10, 0.0, 0.10))
    verdict = verdict_of(tmp_path, base, candidate)
    assert verdict.exit_code == EXIT_REGRESSION
    assert verdict.facts["pairs"] == 8  # the rest is not looked at: the first look decided
    overall = next(f for f in verdict.findings if f.id == "overall/p95_itl_ms")
    expected = np.exp(np.log(candidate[:8, :, 2] / base[:8, :, 2]).mean()) - 1
    assert overall.change == pytest.approx(expected, rel=1e-9)
    assert overall.base == pytest.approx(np.exp(np.log(base[:8, :, 2]).mean()))
    assert {f.suite for f in verdict.findings} == {"overall", "class", "cell"}
    few = verdict_of(tmp_path / "few", base[:5], candidate[:5])
    assert (few.exit_code, few.facts["pairs"]) == (EXIT_INCONCLUSIVE, 5)
    faster = verdict_of(tmp_path / "faster", *noisy_pairs(16, 3, 4, (0.2, -0.2, -0.2)))
    assert (faster.exit_code, faster.facts["pairs"]) == (EXIT_OK, 8)
    base[3, 0, 2] = np.nan
    with pytest.raises(UsageError, match="in pair 4 is missing"):
        verdict_of(tmp_path / "missing", base, candidate)


def test_a_pair_counts_only_with_all_its_cells_valid_on_both_sides(tmp_path):
    folder = stored_comparison(tmp_path, *noisy_pairs(9, 3, 5), CELLS)
    manifest = folder.state()
    assert folder.whole_pairs(manifest.cells) == 9
    path = folder.run("candidate", "uniform").load("a-c4", 6)
    write_load(path, "a-c4", (1.0, 1.0, 1.0), valid=False)
    assert folder.whole_pairs(manifest.cells) == 5
    (path / "done.json").unlink()
    assert conclude(folder, manifest, POLICY).facts["pairs"] == 5


def failed(attempt, pair=9, base=(), candidate=(), machine=(), resume=0):
    reasons = {"base": [*base, *machine], "candidate": [*candidate, *machine]}
    faults = {"base": list(base), "candidate": list(candidate)}
    return FailedAttempt(pair, attempt, "mixed/a", SIDES[attempt % 2], reasons, faults, resume)


DIED = {"candidate": ["died"]}


@pytest.mark.parametrize(
    ("voids", "given_up", "outcome", "words"),
    [
        ([failed(n, **DIED) for n in range(1, 9)], True, "fail", "failed alone in 8 attempts and base's in 0"),
        ([failed(1, pair=p, **DIED) for p in range(1, 9)], False, "fail", "failed alone in 8 attempts"),
        ([failed(1, **DIED), failed(2, **DIED)], False, "inconclusive", "too few to tell it from chance"),
        ([failed(1, **DIED), failed(2, base=["died"])], False, "pass", None),
        ([failed(n, base=["died"]) for n in (1, 2, 3)], True, "invalid", "could not be measured in 3 attempts"),
        ([failed(n, machine=["others used it"]) for n in (1, 2, 3)], True, "invalid", "others used it"),
        ([failed(1, machine=["noise"]), failed(2, **DIED), failed(3, **DIED)], True, "invalid", "in 3 attempts"),
        ([failed(n, base=["died"], **DIED) for n in (1, 2, 3)], True, "invalid", "in 3 attempts"),
    ],
)
def test_a_server_that_fails_alone_is_a_regression_once_chance_is_ruled_out(tmp_path, voids, given_up, outcome, words):
    folder = stored_comparison(tmp_path, *noisy_pairs(8, 3, 8), CELLS)  # which passes by itself
    given = GivenUp(9, "mixed/a") if given_up else None
    folder.write(folder.state().model_copy(update={"voids": tuple(voids), "void": given}))
    verdict, _ = judge_again(tmp_path, POLICY)
    assert verdict.outcome == outcome
    assert words is None or words in verdict.sentence
    assert verdict == conclude(folder, folder.state(), POLICY)


def test_what_else_the_state_of_a_comparison_says_is_in_its_verdict(tmp_path):
    folder = stored_comparison(tmp_path, *noisy_pairs(8, 3, 8), CELLS)

    def verdict(**changes):
        return conclude(folder, folder.state().model_copy(update=changes), POLICY)

    for method, running in (("launched", False), ("twins", True)):  # figures in running time are called so
        assert ("running time" in pair_page(verdict(method=method))) == running
    for apart, notes in ((["base"], 1), (["base", "candidate"], 0)):  # whose loads alone had a server each
        found = verdict(apart={"mixed/a": apart}).notes
        assert sum("prefix cache of base" in note for note in found) == notes
    voids = [failed(n, machine=["others used it"], resume=r) for r, n in ((0, 1), (0, 2), (1, 1), (1, 2), (1, 3))]
    (gave_up, *_) = verdict(voids=tuple(voids), void=GivenUp(9, "mixed/a")).findings
    assert "in 3 attempts" in gave_up.sentence  # those before it went on were not what gave it up
    named = [f"pair 9, attempt {n} after resume 1" for n in (1, 2, 3)]
    assert [words.split(" (")[0] for words in gave_up.details] == named


def test_the_pairs_are_written_as_a_table(tmp_path):
    base, candidate = noisy_pairs(3, 3, 11)
    folder = stored_comparison(tmp_path, base, candidate, CELLS)
    lines = write_pairs(folder, folder.state(), POLICY.timing.metrics).read_text().splitlines()
    assert len(lines) == 1 + 3 * 3 * 3
    assert lines[0] == "pair,cell,first,metric,unit,base,candidate,log_ratio"
    row = lines[1].split(",")
    assert float(row[-1]) == pytest.approx(np.log(candidate[0, 0, 0] / base[0, 0, 0]), rel=1e-4)
    values = read_values(folder, folder.state().cells, POLICY.timing.metrics, [2])
    np.testing.assert_allclose(values["base"][0], base[1])


def test_a_look_that_the_clock_brought_forward_is_not_taken_again(tmp_path):
    assert look_points(POLICY.timing) == [8, 12, 16]
    assert look_points(POLICY.timing, [10]) == [8, 10, 16]
    assert look_points(POLICY.timing, [6, 10]) == [6, 10, 16]
    assert look_points(POLICY.timing, [3, 5, 10]) == [8, 10, 16]  # 2^-5 = 0.031 is more than any look may spend
    base, candidate = noisy_pairs(12, 1, 12)
    base[:, :, 2] *= np.linspace(1, 2, 12)[:, None]  # too wide to pass
    candidate[:, :, 0] *= np.where(np.arange(12) < 10, np.where(np.arange(12) % 2, 1.3, 0.7), 0.2)[:, None]
    folder = stored_comparison(tmp_path, base, candidate, CELLS[:1])
    manifest = folder.state()
    assert conclude(folder, manifest, POLICY).facts["pairs"] == 12
    assert conclude(folder, manifest.model_copy(update={"early_looks": (10,)}), POLICY).facts["pairs"] == 10
    early = stored_comparison(tmp_path / "early", *noisy_pairs(4, 1, 13), CELLS[:1])  # too early to decide anything
    assert conclude(early, early.state().model_copy(update={"early_looks": (1, 4)}), POLICY).facts["pairs"] == 4
