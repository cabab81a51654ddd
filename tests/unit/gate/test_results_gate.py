"""`kvbench gate RESULTS` on run folders of every kind: exit codes, files, what is said. None is a measurement."""

from __future__ import annotations

import functools
import json
import operator
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.cli.gate import gate
from kvbench.cli.run_guarded import guarded
from kvbench.gate.compare.folder import CompareFolder
from kvbench.gate.policy import load_policy
from kvbench.runs.quality import QUALITY
from kvbench.runs.results import GitState
from tests.support import verdicts
from tests.support.compare_folders import noisy_pairs, stored_comparison
from tests.support.quality_results import figures, outside, result
from tests.support.synthetic_run import PAIR, make_run
from tests.support.toy_engine import CONFIGS, Scenario

INT8 = next(config for config in CONFIGS if config.kv_cache_dtype != "auto")
SMALL = Scenario(configs=(*PAIR, INT8), concurrencies=(3,), repeats=2, num_requests=8)
RUN = {"sha": "0123456789abcdef"}  # as make_run's manifest has it


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "mixed" / "now", SMALL)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def command(*words: object) -> int:
    return guarded(lambda: gate.main([str(word) for word in words], standalone_mode=False))


@pytest.fixture
def gated(tmp_path: Path):
    """(exit code, verdict) of the command on a folder, with a policy of this text."""

    def gated(folder: Path, text: str, *words: str):
        policy, out = tmp_path / "gates.yaml", tmp_path / "out"
        policy.write_text(text)
        code = command(folder, "--policy", policy, "--output-dir", out, *words)
        return code, verdicts.read(out) if (out / "verdict.json").is_file() else None

    return gated


def changed(folder: Path, path: str, **entries: object) -> None:
    """Some entries of a JSON file in the folder, set anew."""
    file = folder / path
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


KEPT = "limits: [{metric: failure_rate, max: 0}]"


def test_limits_that_hold_pass_and_none_at_all_is_exit_code_5(run, gated, tmp_path, capsys):
    (tmp_path / "here.yaml").write_text(KEPT)
    assert command(run, "--policy", tmp_path / "here.yaml") == 0
    assert {"verdict.json", "junit.xml", "summary.md"} <= {path.name for path in run.iterdir()}
    code, verdict = gated(run, KEPT)
    assert (code, verdict.outcome, verdict.kind) == (0, "pass", "limits") and "PASS" in capsys.readouterr().out
    assert [f.outcome for f in verdict.findings] == ["pass"] * 3 and verdict.candidate["sha"] == RUN["sha"]
    assert verdict.reproduce.startswith("kvbench gate ") and verdict.reproduce.endswith("gates.yaml")
    for text in ("", "timing: {metrics: {p95_itl_ms: off}}", KEPT):
        if text == KEPT:
            shutil.rmtree(run / "cells")
        code, verdict = gated(run, text)
        assert (code, verdict.outcome, verdict.findings) == (5, "empty", ())


def test_a_broken_limit_is_a_regression_whatever_else_is_invalid(run, gated):
    broken = "limits: [{metric: p95_ttft_ms, max: 0.001}, {metric: server.nothing, max: 0}]"
    code, verdict = gated(run, broken)
    assert (code, verdict.outcome) == (1, "fail") and {f.outcome for f in verdict.findings} == {"fail", "invalid"}
    assert "3 of 6 limits of mixed" in verdict.sentence and "0.00100 ms" in verdict.sentence
    cell = next(run.glob("cells/layout-contiguous*")).name
    changed(run, f"cells/{cell}/summary.json", valid=False, invalid_reasons=["repeat 1: late"])
    code, verdict = gated(run, KEPT)
    assert (code, verdict.outcome) == (4, "invalid") and "late" in verdict.sentence
    assert [f.id for f in verdict.of("invalid")] == [f"limit/mixed/{cell}/failure_rate"]
    code, verdict = gated(run, "limits: [{metric: failure_rate, max: 0, cells: 'baseline*'}]")
    assert code == 0 and cell in " ".join(verdict.notes)  # it is not judged, and not hidden


def test_a_disturbed_repeat_and_damaged_files_that_no_limit_reads_are_notes(run, gated):
    cell = next(run.glob("cells/baseline*")).name
    planned = json.loads((run / "manifest.json").read_text())["plan"]
    block = next(block for block in planned if cell in block["cells"])
    changed(run, "manifest.json", plan=[*planned, block])
    changed(run, f"cells/{cell}/summary.json", invalid_repeats={"9": ["others ran"]})
    damaged = ("predictions.json", "lockstep/effects.json")
    for name in damaged:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("{")
    code, verdict = gated(run, KEPT)
    assert (code, verdict.outcome) == (0, "pass")
    assert all(each in " ".join(verdict.notes) for each in (cell, *damaged))


def test_mistakes_are_usage_errors(run, gated, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for folder, text, said in (
        (run, "limits: [{metric: p95_tftt_ms, max: 1}]", "p95_ttft_ms?"),
        (tmp_path / "nowhere", KEPT, "nowhere"),
        (tmp_path / "empty", KEPT, "not a results folder"),
    ):
        assert gated(folder, text) == (2, None) and said in capsys.readouterr().err
    for words, said in (((run,), "--policy"), ((run, "--polcy", "x"), "--polcy")):
        assert command(*words) == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("how", ["status", "missing", "short", "damaged"])
def test_a_run_that_is_not_whole_is_exit_code_4(run, gated, how):
    plan = json.loads((run / "manifest.json").read_text())["plan"]
    if how == "status":
        changed(run, "manifest.json", status="incomplete")
    elif how == "missing":
        shutil.rmtree(next(run.glob("cells/baseline*")))
    elif how == "short":
        changed(run, "manifest.json", plan=[*plan, plan[0]])
    else:
        next(run.glob("cells/baseline*/summary.json")).write_text("{")
        changed(run, "manifest.json", plan=[block for block in plan if "baseline" not in block["block_id"]])
    code, verdict = gated(run, KEPT)
    assert (code, verdict.outcome) == (4, "invalid")
    assert ("summary.json" if how == "damaged" else "--resume") in verdict.sentence


MEASURED = result({INT8.config_id: figures(0.01)}, git=RUN, note="Random.")
KLD = "limits: [{kld: mean, max: 0.02, cells: '*int8*'}]"


def test_the_kld_of_the_run_and_of_other_code_which_needs_force(run, gated, capsys):
    code, verdict = gated(run, KLD)
    assert code == 4 and f"kvbench quality {run}" in verdict.sentence and RUN["sha"] in verdict.sentence
    (run / QUALITY).write_text(json.dumps(MEASURED.to_json()))
    code, verdict = gated(run, KLD)
    assert code == 0 and "Random." in verdict.notes
    assert gated(run, KLD.replace("0.02", "0.009"))[0] == 1
    versions = {"torch": "1.0", "transformers": "not told by the run"}
    other = MEASURED.model_copy(update={"git": GitState(sha="fedcba"), "versions": versions})
    (run / QUALITY).write_text(json.dumps(other.to_json()))
    code, verdict = gated(run, KLD)
    ran = json.loads((run / "manifest.json").read_text())["versions"]["torch"]
    assert code == 4 and "fedcba" in verdict.sentence and f"torch 1.0, of the run {ran}" in verdict.sentence
    assert gated(run, KLD, "--force")[0] == 0
    for text in ("{}", '{"format": "kvbench-quality/1", "of": 3}', "{"):
        (run / QUALITY).write_text(text)
        assert gated(run, KLD)[0] == 2 and QUALITY in capsys.readouterr().err
    for int8, code in ((figures(0.0004), 0), (outside(), 1), (None, 4)):  # every configuration is held to its limits
        known = dict.fromkeys((config.config_id for config in PAIR), figures())
        known |= {INT8.config_id: int8} if int8 else {}
        (run / QUALITY).write_text(json.dumps(result(known, git=RUN, beside=True, model="kvbench-tiny").to_json()))
        assert gated(run, "limits: [{quality: within}]")[0] == code


STRICT = "timing: {metrics: {output_throughput: {floor: 1%}}}"
LOOSE = "timing: {metrics: {output_throughput: {floor: 30%, margins: {overall: 40%, class: 40%, cell: 40%}}}}"


@pytest.fixture
def compared(tmp_path) -> Path:
    """A finished comparison, measured by STRICT, whose candidate has lost 10 % of its throughput."""
    folder = tmp_path / "compared"
    stored_comparison(folder, *noisy_pairs(8, 2, 5, (-0.1, 0.0, 0.0)), ("mixed/a-c4", "mixed/b-c4"))
    (tmp_path / "strict.yaml").write_text(STRICT)
    changed(folder, "manifest.json", status="complete", policy=load_policy(tmp_path / "strict.yaml").stored().to_json())
    return folder


def test_a_comparison_is_judged_by_its_own_policy_and_anothers_verdict_lies_beside(compared, tmp_path):
    (tmp_path / "strict.yaml").unlink()  # what it held is in the manifest
    assert command(compared) == 1
    verdict = verdicts.read(compared)
    assert verdict.facts["policy"].endswith("strict.yaml") and verdict.reproduce == "kvbench compare main topic"
    (tmp_path / "copy.yaml").write_text(STRICT)  # the same rules in another file are the same policy
    assert command(compared, "--policy", tmp_path / "copy.yaml") == 1
    assert verdicts.read(compared).facts["policy_digest"] == verdict.facts["policy_digest"]
    assert not list(compared.glob("judged-*"))
    (tmp_path / "loose.yaml").write_text(LOOSE)
    assert command(compared, "--policy", tmp_path / "loose.yaml") == 0
    assert verdicts.read(compared).outcome == "fail"
    judged = verdicts.read(compared / "judged-loose")
    assert judged.outcome == "pass" and judged.facts["policy"].endswith("loose.yaml")
    assert judged.reproduce == f"kvbench gate {compared} --policy {tmp_path / 'loose.yaml'}"
    assert any("loose.yaml" in note for note in judged.notes)


def test_sides_that_differ_in_what_must_be_equal_are_judged_with_force_only(compared, capsys):
    changed(compared, "manifest.json", differences=["dtype (float32 and bfloat16)"])
    assert command(compared) == 2 and "bfloat16" in capsys.readouterr().err
    assert command(compared, "--force") == 1
    assert any("bfloat16" in note for note in verdicts.read(compared).notes)


def test_a_comparison_that_is_not_finished_is_not_looked_at(compared, capsys):
    """A look at the pairs so far would spend what a later look may err."""
    with CompareFolder(compared).locked():  # somebody measures
        assert command(compared) == 2
    assert "another kvbench" in capsys.readouterr().err
    changed(compared, "manifest.json", status="incomplete", subcommand="compare")
    assert command(compared) == 2
    assert "kvbench compare --resume" in capsys.readouterr().err
    assert not (compared / "verdict.json").exists()


def places(data: object, before: tuple = ()) -> Iterator[tuple]:
    """The keys and indices that lead to each value of JSON data."""
    entries = data.items() if isinstance(data, dict) else enumerate(data[:2]) if isinstance(data, list) else ()
    for key, value in entries:
        yield (*before, key)
        yield from places(value, (*before, key))


WRONG = (None, [], {}, "text", -1.5, [None], {"x": None}, 1e30, [[]])


def test_a_damaged_comparison_ends_in_one_sentence(compared, capsys):
    latencies = {side: {"ttft_ms": 40.0, "e2e_ms": 50.0} for side in ("base", "candidate")}
    rounds = [{"first": "base", **latencies}] * 20
    (compared / "served.json").write_text(json.dumps({"format": 1, "checks": {"mixed/a": [rounds]}}))
    for path in compared.rglob("counters.json"):
        path.write_text(json.dumps({"steps_total": 10.0, "swap_seconds_total": 1.0}))
    rng = random.Random(3)
    for path in (compared / "manifest.json", compared / "served.json", *sorted(compared.rglob("a-c4/loads/1/*.json"))):
        kept = path.read_text()
        cases = [(place, wrong) for place in places(json.loads(kept)) for wrong in WRONG]
        for place, wrong in rng.sample(cases, min(len(cases), 12)):
            data = json.loads(kept)
            node = functools.reduce(operator.getitem, place[:-1], data)
            node[place[-1]] = wrong
            path.write_text(json.dumps(data))
            code = command(compared, "--output-dir", compared / "out")
            said = capsys.readouterr().err
            assert code in (0, 1, 2, 3, 5) and "unexpected" not in said, (path.name, place, wrong, said)
            assert code != 2 or len(said.strip().splitlines()) == 1, said
        path.write_text(kept)
