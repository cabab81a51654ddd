"""Drift since a release: which run is the release, how large the change is, and what the exit code says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from scipy import stats

from kvbench.common.errors import UsageError
from kvbench.history.drift import MARGINS
from tests.support.git_repo import git, make_repo
from tests.support.stored_runs import repeat, write_run
from tests.unit.history.test_history_show import show, shown

STEADY = [99.9, 100.0, 100.1]


def scaled(factor: float, base: list[float] = STEADY) -> list[float]:
    return [factor * value for value in base]


def drift(folder: Path, *options: str) -> dict:
    [series] = shown(folder, "--metric", "output_throughput", *options)["series"]
    return series["drift"]


def mark(run: Path, name: str) -> None:
    (run / "release.json").write_text(json.dumps({"release": name}))


def test_many_small_slips_add_up(tmp_path: Path) -> None:
    """Ten runs, each 0.7 % slower than the last: no step is near the margin of 4 %, the sum, 6.1 %, is beyond it."""
    for day in range(10):
        run = write_run(tmp_path, day, {"a-c3": scaled(0.993**day)})
        if day == 0:
            mark(run, "v1")
    [series] = shown(tmp_path, "--metric", "output_throughput")["series"]
    assert series["change"] == pytest.approx(-0.007)
    assert series["drift"]["change"] == pytest.approx(0.993**9 - 1)
    assert (series["drift"]["outcome"], series["drift"]["release"]) == ("drifted", "v1")
    code, table, _ = show(tmp_path, "--fail-on-drift")
    assert code == 1 and "-6.1 % !" in table
    assert show(tmp_path)[0] == 0


def test_the_interval_is_welchs_on_logarithms(tmp_path: Path) -> None:
    old, new = [100.0, 104.0, 97.0], [93.0, 99.0, 95.0, 90.0]
    mark(write_run(tmp_path, 0, {"a-c3": old}), "v1")
    write_run(tmp_path, 1, {"a-c3": new})
    found = drift(tmp_path)
    expected = stats.ttest_ind([*map(math.log, new)], [*map(math.log, old)], equal_var=False).confidence_interval(0.95)
    assert found["interval"] == pytest.approx([math.expm1(end) for end in expected])
    assert found["change"] == pytest.approx(stats.gmean(new) / stats.gmean(old) - 1)


@pytest.mark.parametrize(
    ("metric", "factor", "base", "outcome", "code"),
    [
        ("output_throughput", 0.94, STEADY, "drifted", 1),
        ("output_throughput", 0.98, STEADY, "within", 0),
        ("output_throughput", 1.30, STEADY, "within", 0),  # for the better
        ("output_throughput", 0.98, [96.0, 100.0, 104.0], "unclear", 3),
        # beyond the margin, yet the repeats cannot tell it from none
        ("output_throughput", 0.94, [90.0, 100.0, 110.0], "unclear", 3),
        ("output_throughput", 0.90, [100.0], "unclear", 3),  # one repeat has no spread
        ("p95_ttft_ms", 1.12, STEADY, "drifted", 1),
        ("p95_ttft_ms", 1.08, STEADY, "within", 0),
        ("p95_ttft_ms", 0.80, STEADY, "within", 0),
    ],
)
def test_what_a_change_is_called(tmp_path, metric, factor, base, outcome, code) -> None:
    for day, scale in enumerate((1.0, factor)):
        numbers = enumerate(scaled(scale, base), 1)
        repeats = [repeat(i, *((x, 100.0) if metric == "output_throughput" else (100.0, x))) for i, x in numbers]
        run = write_run(tmp_path, day, {"a-c3": repeats})
        if day == 0:
            mark(run, "v1")
    [series] = shown(tmp_path, "--metric", metric)["series"]
    assert series["drift"]["outcome"] == outcome
    assert show(tmp_path, "--metric", metric, "--fail-on-drift")[0] == code


@pytest.mark.parametrize(("steady_then", "steady_now"), [(False, True), (True, False)])
@pytest.mark.parametrize(("factor", "code"), [(1.2, 1), (1.0, 0)])
def test_sides_of_different_windows_are_compared_over_the_whole_run(
    tmp_path: Path, steady_then: bool, steady_now: bool, factor: float, code: int
) -> None:
    """A cell as an older `history add` kept it has no steady latencies, and a drift of TTFT is seen all the same."""
    for day, (scale, steady) in enumerate(((1.0, steady_then), (1.0, True), (factor, steady_now))):
        repeats = [repeat(i, x, scale * x) for i, x in enumerate(STEADY, 1)]
        for each in repeats:
            each["metrics"]["steady_output_throughput"] = each["metrics"]["output_throughput"]
            if steady:
                each["metrics"]["steady_latency"] = {"ttft_ms": {"p95": 50.0, "n": 8}, "itl_ms": {"p95": 5.0}}
        run = write_run(tmp_path, day, {"a-c3": repeats})
        if day == 0:
            mark(run, "v1")
    drifts = {one["metric"]: one["drift"]["outcome"] for one in shown(tmp_path)["series"] if one["drift"]}
    outcome = "drifted" if code else "within"
    assert drifts == {"steady_output_throughput": "within", "p95_ttft_ms": outcome, "p95_itl_ms": "within"}
    assert show(tmp_path, "--fail-on-drift")[0] == code


def test_sides_that_both_have_a_steady_window_are_compared_there_only(tmp_path: Path) -> None:
    for day, (ttft, requests) in enumerate(((50.0, 8), (50.0, 7), (60.0, 8))):
        repeats = [repeat(i, x, x) for i, x in enumerate(STEADY, 1)]
        for each in repeats:
            each["metrics"]["steady_output_throughput"] = each["metrics"]["output_throughput"]
            each["metrics"]["steady_latency"] = {"ttft_ms": {"p95": ttft, "n": requests}, "itl_ms": {"p95": 5.0}}
        run = write_run(tmp_path, day, {"a-c3": repeats})
        if day == 0:
            mark(run, "v1")
    drifts = {one["metric"]: one["drift"]["outcome"] for one in shown(tmp_path)["series"] if one["drift"]}
    assert drifts["steady_p95_ttft_ms"] == "drifted" and "p95_ttft_ms" not in drifts


def test_margins_are_the_gates() -> None:
    assert MARGINS == {"output_throughput": 0.04, "p95_ttft_ms": 0.10, "p95_itl_ms": 0.06}


def test_the_release_is_the_newest_that_is_marked_and_counts(tmp_path: Path) -> None:
    mark(write_run(tmp_path, 0, {"a-c3": scaled(1.0)}), "v1")
    mark(write_run(tmp_path, 1, {"a-c3": scaled(0.8)}), "v2")
    mark(write_run(tmp_path, 2, {"a-c3": scaled(0.5)}, invalid=["a-c3"]), "v3")
    write_run(tmp_path, 3, {"a-c3": scaled(0.8)})
    write_run(tmp_path, 4, {"a-c3": scaled(0.1)}, invalid=["a-c3"])
    newest = drift(tmp_path)
    assert (newest["release"], newest["outcome"]) == ("v2", "within")
    assert drift(tmp_path, "--release", "v1")["change"] == pytest.approx(-0.2)
    assert drift(tmp_path, "--last", "1")["release"] == "v2"  # --last changes what is shown, not what is compared
    assert drift(tmp_path, "--release", "0000000")["release_run"].endswith("-0000000")
    for wrong in ("v7", "000", "--all"):
        with pytest.raises(UsageError, match=f"'{wrong}'.* v2"):
            show(tmp_path, f"--release={wrong}")


def test_where_every_run_is_a_release_the_newest_is_compared_with_the_one_before(tmp_path: Path) -> None:
    mark(write_run(tmp_path, 0, {"a-c3": scaled(1.0)}), "v1")
    assert show(tmp_path, "--fail-on-drift")[0] == 5  # the first release has nothing before it
    mark(write_run(tmp_path, 1, {"a-c3": scaled(0.9)}), "v2")
    found = drift(tmp_path)
    assert (found["release"], found["outcome"]) == ("v1", "drifted")
    assert found["change"] == pytest.approx(-0.1)
    assert show(tmp_path, "--fail-on-drift")[0] == 1
    mark(write_run(tmp_path, 2, {"a-c3": scaled(0.89)}), "v2")  # v2 measured again is no release after v2
    again = drift(tmp_path)
    assert (again["release"], again["change"]) == ("v1", pytest.approx(-0.11))
    mark(write_run(tmp_path, 3, {"a-c3": scaled(0.89)}), "v3")
    after = drift(tmp_path)
    assert (after["release"], after["outcome"]) == ("v2", "within")


def test_without_a_release_of_the_same_machine_nothing_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no repository, no tags
    write_run(tmp_path, 0, {"a-c3": STEADY})
    code, output, _ = show(tmp_path, "--fail-on-drift")
    assert code == 5 and "kvbench history add" in output
    mark(write_run(tmp_path, 1, {"a-c3": scaled(0.5)}, device="cuda"), "v1")
    assert [series["drift"] for series in shown(tmp_path)["series"]] == [None] * 12
    assert show(tmp_path, "--fail-on-drift")[0] == 5


def test_without_a_mark_it_is_the_newest_tag_of_the_repository_that_has_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = make_repo(tmp_path / "repository", {})
    monkeypatch.chdir(repository)
    shas = []
    for number in range(4):
        date = {"GIT_COMMITTER_DATE": f"2026-01-0{number + 1}T00:00:00Z"}
        git(repository, "commit", "-q", "--allow-empty", "-m", str(number), **date)
        git(repository, "tag", f"v1.{number}", *(() if number % 2 else ("-a", "-m", "annotated")), **date)
        shas.append(git(repository, "rev-parse", "HEAD"))
    git(repository, "tag", "nightly")
    for day, (sha, factor) in enumerate(zip(shas[:3], (1.0, 0.9, 0.5), strict=True)):
        write_run(tmp_path / "results", day, {"a-c3": scaled(factor)}, sha=sha)  # no run of v1.3
    dirty = {"git": {"sha": shas[3], "dirty": True}}
    write_run(tmp_path / "results", 3, {"a-c3": scaled(0.1)}, **dirty)
    write_run(tmp_path / "results", 4, {"a-c3": scaled(0.49)}, sha="f" * 40)
    newest, named = drift(tmp_path / "results"), drift(tmp_path / "results", "--release", "v1.1")
    assert (newest["release"], newest["change"]) == ("v1.2", pytest.approx(-0.02))
    assert named["change"] == pytest.approx(0.49 / 0.9 - 1)
    write_run(tmp_path / "results", 5, {"a-c3": scaled(0.45)}, sha=shas[2])  # v1.2 itself: compared with the tag before
    tagged = drift(tmp_path / "results")
    assert (tagged["release"], tagged["change"]) == ("v1.1", pytest.approx(-0.5))


def test_the_page_draws_the_release_and_its_margin_whatever_is_shown(tmp_path: Path) -> None:
    mark(write_run(tmp_path, 0, {"a-c3": scaled(1.0)}), "v1")
    for day in (1, 2):
        write_run(tmp_path, day, {"a-c3": scaled(0.9)})
    page = tmp_path / "page.html"
    for options, marks in (((), [[0.0]]), (("--last", "1"), [])):
        show(tmp_path, "--metric", "output_throughput", "--html", page, *options)
        [figure] = json.loads(page.read_text().split('id="figures">')[1].split("</script>")[0])
        levels = {trace["name"]: trace["y"][0] for trace in figure["data"] if trace["mode"] == "lines"}
        assert (levels["level of the release"], levels["margin"]) == (100.0, pytest.approx(96.0))
        assert [trace["x"] for trace in figure["data"] if trace["name"] == "release"] == marks
        assert "-10.0 % since the release" in figure["layout"]["annotations"][0]["text"]
