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
from tests.support.synthetic_run import repeat, write_run
from tests.unit.history.test_history_show import show, shown

STEADY = [99.9, 100.0, 100.1]


def scaled(factor: float, base: list[float] = STEADY) -> list[float]:
    return [factor * value for value in base]


def drift(folder: Path, *options: str) -> dict:
    [series] = shown(folder, "--metric", "output_throughput", *options)["series"]
    return series["drift"]


def mark(run: Path, name: str) -> None:
    (run / "release.json").write_text(json.dumps({"release": name}))


def write_days(results: Path, *days: list) -> None:
    """A run a day of one cell with these repeats; the first is the release v1."""
    for day, repeats in enumerate(days):
        run = write_run(results, day, {"a-c3": repeats})
        if day == 0:
            mark(run, "v1")


def test_many_small_slips_add_up(tmp_path):
    """Ten runs, each 0.7 % slower than the last: no step is near the margin of 4 %, the sum, 6.1 %, is beyond it."""
    write_days(tmp_path, *(scaled(0.993**day) for day in range(10)))
    [series] = shown(tmp_path, "--metric", "output_throughput")["series"]
    assert series["change"] == pytest.approx(-0.007)
    assert series["drift"]["change"] == pytest.approx(0.993**9 - 1)
    assert (series["drift"]["outcome"], series["drift"]["release"]) == ("drifted", "v1")
    code, table, _ = show(tmp_path, "--fail-on-drift")
    assert code == 1 and "-6.1 % !" in table
    assert show(tmp_path)[0] == 0


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
    ],
)
def test_what_a_change_is_called(tmp_path, metric, factor, base, outcome, code):
    days = [scaled(scale, base) for scale in (1.0, factor)]
    if metric == "p95_ttft_ms":
        days = [[repeat(n, 100.0, x) for n, x in enumerate(values, 1)] for values in days]
    write_days(tmp_path, *days)
    [series] = shown(tmp_path, "--metric", metric)["series"]
    assert series["drift"]["outcome"] == outcome and show(tmp_path, "--metric", metric, "--fail-on-drift")[0] == code
    assert MARGINS == {"output_throughput": 0.04, "p95_ttft_ms": 0.10, "p95_itl_ms": 0.06}  # the gate's
    if len(base) > 1 and metric == "output_throughput":  # Welch's, on logarithms
        new, old = (list(map(math.log, day)) for day in (days[1], days[0]))
        expected = stats.ttest_ind(new, old, equal_var=False).confidence_interval(0.95)
        assert series["drift"]["interval"] == pytest.approx([math.expm1(end) for end in expected])


@pytest.mark.parametrize(
    ("steady", "requests", "factor", "judged"),
    [
        ((False, True), (8, 8), 1.2, "p95_ttft_ms"),  # as an older `history add` kept it
        ((True, False), (8, 8), 1.2, "p95_ttft_ms"),
        ((True, False), (8, 8), 1.0, "p95_ttft_ms"),
        ((True, True), (8, 8), 1.2, "steady_p95_ttft_ms"),  # there only
    ],
)
def test_sides_of_different_windows_are_compared_over_the_whole_run(tmp_path, steady, requests, factor, judged):
    def repeats(scale, has_steady, n):
        found = [repeat(i, x, scale * x) for i, x in enumerate(STEADY, 1)]
        for metrics in (each["metrics"] for each in found):
            metrics["steady_output_throughput"] = metrics["output_throughput"]
            if has_steady:
                metrics["steady_latency"] = {"ttft_ms": {"p95": scale * 50.0, "n": n}, "itl_ms": {"p95": 5.0}}
        return found

    days = [(1.0, steady[0], requests[0]), (1.0, True, 7), (factor, steady[1], requests[1])]
    write_days(tmp_path, *(repeats(*day) for day in days))
    drifts = {one["metric"]: one["drift"]["outcome"] for one in shown(tmp_path)["series"] if one["drift"]}
    outcome = "drifted" if factor > 1 else "within"
    assert drifts.pop(judged) == outcome and set(drifts.values()) == {"within"}
    assert {"steady_p95_ttft_ms", "p95_ttft_ms"}.isdisjoint(drifts)  # one of the two
    assert show(tmp_path, "--fail-on-drift")[0] == int(factor > 1)


def test_the_release_is_the_newest_that_is_marked_and_counts(tmp_path):
    mark(write_run(tmp_path, 0, {"a-c3": scaled(1.0)}), "v1")
    assert show(tmp_path, "--fail-on-drift")[0] == 5  # the first release has nothing before it
    mark(write_run(tmp_path, 1, {"a-c3": scaled(0.8)}), "v2")
    newest = drift(tmp_path)  # where every run is a release: the one before
    assert (newest["release"], newest["outcome"], newest["change"]) == ("v1", "drifted", pytest.approx(-0.2))
    mark(write_run(tmp_path, 2, {"a-c3": scaled(0.79)}), "v2")  # v2 measured again is no release after v2
    assert (drift(tmp_path)["release"], drift(tmp_path)["change"]) == ("v1", pytest.approx(-0.21))
    mark(write_run(tmp_path, 3, {"a-c3": scaled(0.5)}, invalid=["a-c3"]), "v3")
    write_run(tmp_path, 4, {"a-c3": scaled(0.79)})
    write_run(tmp_path, 5, {"a-c3": scaled(0.1)}, invalid=["a-c3"])
    newest = drift(tmp_path)
    assert (newest["release"], newest["outcome"]) == ("v2", "within")
    assert drift(tmp_path, "--release", "v1")["change"] == pytest.approx(-0.21)
    assert drift(tmp_path, "--last", "1")["release"] == "v2"  # --last changes what is shown, not what is compared
    assert drift(tmp_path, "--release", "0000000")["release_run"].endswith("-0000000")
    for wrong in ("v7", "000", "--all"):
        with pytest.raises(UsageError, match=f"'{wrong}'.* v2"):
            show(tmp_path, f"--release={wrong}")


def test_without_a_release_of_the_same_machine_nothing_is_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no repository, no tags
    write_run(tmp_path, 0, {"a-c3": STEADY})
    code, output, _ = show(tmp_path, "--fail-on-drift")
    assert code == 5 and "kvbench history add" in output
    mark(write_run(tmp_path, 1, {"a-c3": scaled(0.5)}, device="cuda"), "v1")
    assert [series["drift"] for series in shown(tmp_path)["series"]] == [None] * 12

def test_without_a_mark_it_is_the_newest_tag_of_the_repository_that_has_a_run(tmp_path, monkeypatch):
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


def test_the_page_draws_the_release_and_its_margin_whatever_is_shown(tmp_path):
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
