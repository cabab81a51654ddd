"""``kvbench bisect`` from its command line to its verdict, with simulated pairs in the place of engines."""

from __future__ import annotations

import inspect
import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import yaml

from kvbench.bisect import questions
from kvbench.cli import main as cli
from kvbench.common.errors import MeasurementError
from kvbench.common.files import read_json, write_json
from kvbench.gate.compare.series import PairQuestion
from kvbench.gate.counters import lock
from kvbench.gate.verdict.outputs import write_outputs
from kvbench.gate.verdict.verdict import Finding, Verdict
from kvbench.workload.file import load_workload
from tests.support.compare_folders import stored_comparison, stored_run
from tests.support.git_repo import commit_all, git, make_tiny_kvbench, write
from tests.support.sweep_parts import TINY

FILLER = [0] * 5


@pytest.fixture
def bisect(tmp_path, monkeypatch, capfd):
    """Runs the command in tmp_path; returns the exit code, the verdict (None without one) and the output."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))

    def command(*words):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("results/bisect/*/verdict.json")}
        with pytest.raises(SystemExit) as left:
            cli.main(["bisect", *map(str, words)])
        written = [p for p in tmp_path.glob("results/bisect/*/verdict.json") if before.get(p) != p.stat().st_mtime_ns]
        return left.value.code, read_json(written[0]) if written else None, "".join(capfd.readouterr())

    return command


def words(history, bad="HEAD", *more):
    named = ["--metric", "mean_tpot_ms", "--workload", "tiny.yaml", "--profile", "cpu"]
    return [history.good, git(history.repo, "rev-parse", bad), "--repo", history.repo, *named, *more]


def culprits(verdict):
    return [finding["id"].removeprefix("culprit/") for finding in verdict["findings"] if finding["outcome"] == "fail"]


def test_the_commit_is_named_whatever_lies_around_it(slowing, bisect):
    # One is reverted, three cannot be measured, one made it faster by a little.
    entries = [0, 0.03, *FILLER, ("revert", 1), *FILLER, "broken", 0, 0.02, 0, "broken", *FILLER, "broken", -0.002, 0]
    history = slowing(entries)
    code, verdict, said = bisect(*words(history))
    assert code == 1, said
    assert verdict["facts"]["skipped"] <= 3 and "cannot take that out" not in said
    assert culprits(verdict) == [history.shas[entries.index(0.02)]]
    (finding,) = verdict["findings"]
    low, high = finding["interval"]
    assert low < 0.0202 < high and high - low < 0.01 and len(finding["series"]) == 8
    assert verdict["facts"]["commits"] == len(entries) and verdict["facts"]["tested"] <= 9
    assert f"of {len(entries)} commits" in verdict["sentence"] and "1 %" in verdict["sentence"]
    folder = next(path.parent for path in (history.repo.parent / "results/bisect").glob("*/verdict.json"))
    assert ET.parse(folder / "junit.xml").getroot().get("failures") == "1"
    log = (folder / "bisect-1.log").read_text()
    assert f"# first bad commit: [{culprits(verdict)[0]}]" in log


@pytest.mark.parametrize("at", [0, 4])
def test_the_first_commit_and_the_last_are_named(slowing, bisect, at):
    entries = [0] * 5
    entries[at] = 0.02
    history = slowing(entries)
    code, verdict, said = bisect(*words(history))
    assert code == 1 and culprits(verdict) == [history.shas[at]], said


@pytest.mark.parametrize("costs", [(0.03, 0.015), (0.015, 0.03), (0.02, 0.02)])
def test_two_culprits_are_found_the_larger_one_first(slowing, bisect, costs):
    entries = [*FILLER, costs[0], *FILLER, costs[1], *FILLER]
    history = slowing(entries, sd=0.001)
    code, verdict, said = bisect(*words(history))
    shas = [history.shas[5], history.shas[11]]
    assert code == 1 and sorted(culprits(verdict)) == sorted(shas), said
    changes = [finding["change"] for finding in verdict["findings"]]
    assert changes == sorted(changes, reverse=True)
    if costs[0] != costs[1]:
        assert culprits(verdict)[0] == shas[costs.index(max(costs))]
    assert "2 pieces" in verdict["sentence"]


def test_a_history_without_a_change_is_refused_with_the_interval(slowing, bisect):
    history = slowing([0.0001, *FILLER], sd=0.003)
    code, verdict, said = bisect(*words(history))
    assert code == 3 and not verdict["findings"] and "[" in verdict["sentence"], said
    assert len(history.measured) == 1  # nothing was searched
    better = slowing([-0.05, *FILLER], folder="better")
    code, verdict, said = bisect(*words(better))
    assert code == 3 and "better" in verdict["sentence"], said


def test_pairs_that_scatter_too_much_are_no_search(slowing, bisect, monkeypatch):
    history = slowing([0.02, *FILLER])
    monkeypatch.setattr(questions, "resolves", lambda effect: False)
    code, verdict, said = bisect(*words(history))
    assert code == 4 and verdict["outcome"] == "invalid" and "scatter" in verdict["sentence"], said
    assert len(history.measured) == 1


def test_a_second_range_that_cannot_be_measured_leaves_what_was_found(slowing, bisect, monkeypatch):
    entries = [*FILLER, 0.03, *FILLER, 0.015, *FILLER]
    history = slowing(entries, sd=0.001)
    measure = PairQuestion.measure

    def failing(question, request, *how):
        if request.candidate == history.shas[-1] and request.base != history.good:
            raise MeasurementError("the disk is gone")
        return measure(question, request, *how)

    monkeypatch.setattr(PairQuestion, "measure", failing)
    code, verdict, said = bisect(*words(history))
    assert code == 1 and culprits(verdict) == [history.shas[5]], said
    (rest,) = [finding for finding in verdict["findings"] if finding["outcome"] == "inconclusive"]
    assert "the disk is gone" in rest["sentence"] and history.shas[-1][:10] in rest["sentence"]


def test_a_reverted_commit_is_taken_out_of_each_part_of_the_range(slowing, bisect):
    # The revert lies behind the larger culprit, so the part before it does not hold the revert.
    entries = [0, 0.02, *FILLER, 0.015, *FILLER, 0.03, 0, ("revert", 1), 0]
    history = slowing(entries, sd=0.001)
    code, verdict, said = bisect(*words(history))
    assert code == 1, said
    assert sorted(culprits(verdict)) == sorted(history.shas[entries.index(cost)] for cost in (0.03, 0.015))


def test_neighbouring_skips_end_in_a_range(slowing, bisect):
    history = slowing([*FILLER, "broken", "broken 0.02", 0, *FILLER])
    code, verdict, said = bisect(*words(history))
    assert code == 3 and verdict["outcome"] == "inconclusive", said
    (finding,) = verdict["findings"]
    listed = " ".join(finding["details"])
    assert all(sha[:10] in listed for sha in history.shas[5:8]) and len(finding["details"]) == 3


def test_a_culprit_that_its_parent_does_not_confirm_is_not_named(slowing, bisect, monkeypatch):
    history = slowing([*FILLER, 0.02, *FILLER])
    monkeypatch.setattr(questions, "is_worse", _only_for_bad(questions.is_worse))
    code, verdict, said = bisect(*words(history))
    assert code == 3 and not culprits(verdict), said
    assert history.shas[5][:10] in verdict["sentence"]


def _only_for_bad(is_worse):
    asked = []

    def once(harms):
        answer = is_worse(harms)
        if answer is not None:
            asked.append(tuple(harms))
        return answer if not asked or tuple(harms) == asked[0] or (len(harms) < 16 and answer is None) else False

    return once


def test_minutes_end_a_search_which_goes_on_where_it_was(slowing, bisect, monkeypatch):
    history = slowing([*FILLER, 0.02, *FILLER, *FILLER])
    now = [0.0]
    monkeypatch.setattr(questions.time, "monotonic", lambda: now.__setitem__(0, now[0] + 20.0) or now[0])
    code, verdict, said = bisect(*words(history), "--max-minutes", "5")
    assert code == 3 and "--resume" in said, said
    taken = list(history.measured)
    assert 1 < len(taken) < 6
    folder = next((history.repo.parent / "results/bisect").glob("*/bisect.json")).parent
    code, verdict, said = bisect("--resume", folder)
    assert code == 1 and culprits(verdict) == [history.shas[5]], said
    assert history.measured[: len(taken)] == taken
    assert len({pair[:2] for pair in history.measured}) == len(history.measured)  # nothing was measured twice
    measured = len(history.measured)
    assert bisect("--resume", folder)[0] == 1 and len(history.measured) == measured
    code, _, said = bisect("--resume", folder, "--metric", "p95_itl_ms")
    assert code == 2 and "--metric" in said


def test_ends_and_metric_are_taken_from_runs_and_verdicts(slowing, bisect, tmp_path):
    history = slowing([*FILLER, 0.02, *FILLER])
    for bad, sentence in (
        (["no-such-ref"], "no-such-ref"),
        ([history.good], "same commit"),
        (["."], "working tree"),
        ([], "GOOD and BAD"),
    ):
        code, _, said = bisect(history.good, *bad, *words(history)[2:])
        assert code == 2 and (sentence in said or not bad), said
    code, _, said = bisect(*words(history)[:4])
    assert code == 2 and "--workload" in said
    code, _, said = bisect(*words(history, "HEAD"), "--metric", "p95_nothing")
    assert code == 2 and "p95_nothing" in said
    passed = tmp_path / "passed"
    passed.mkdir()
    write_outputs(Verdict("compare", "pass", "all pass"), passed)
    code, _, said = bisect(passed)
    assert code == 2 and "no failed finding" in said


def failed(metric="mean_tpot_ms", cell="tiny/contiguous-c2", suite="cell", p=0.001):
    return Finding(f"{suite}/{cell}/{metric}", suite, f"{metric} of {cell}", "fail", "it is slower", metric=metric, p=p)


def test_sides_metric_and_cell_are_taken_from_a_comparison(slowing, bisect, tmp_path):
    history = slowing([*FILLER, 0.02, *FILLER])
    folder = tmp_path / "comparison"
    values = np.ones((1, 2, 3))
    stored_comparison(folder, values, values, ["tiny/contiguous-c2", "tiny/contiguous-c23"])
    sides = {
        side: {"name": side, "sha": sha} for side, sha in (("base", history.good), ("candidate", history.shas[-1]))
    }
    given = [{"workload": load_workload(tmp_path / "tiny.yaml").resolved, "profile": "cpu"}]
    options = {"repo": str(history.repo), "max_minutes": 5.0, "policy": "gates.yaml"}
    manifest = read_json(folder / "manifest.json") | sides | {"given": given, "options": options}
    write_json(folder / "manifest.json", manifest)
    served = failed("ttft_ms", "tiny/contiguous", "served", 0.0)
    findings = (served, failed(), failed("p95_itl_ms", "tiny/contiguous-c23", p=0.002))
    write_outputs(Verdict("compare", "fail", "slower", findings), folder)
    code, verdict, said = bisect(folder)
    assert code == 1 and culprits(verdict) == [history.shas[5]], said
    assert verdict["findings"][0]["metric"] == "mean_tpot_ms"
    state = read_json(next(tmp_path.glob("results/bisect/*/bisect.json")))
    assert state["request"]["only"] == ["contiguous-c2"]
    assert state["request"]["max_minutes"] is None and state["request"]["policy"] is None
    code, _, said = bisect(folder, "--workload", "tiny.yaml")
    assert code == 2 and "--workload" in said
    write_outputs(Verdict("compare", "fail", "slower", (served,)), folder)
    code, _, said = bisect(folder)
    assert code == 2 and "no timing" in said


def test_a_run_tells_its_commit_and_workload_unless_it_was_changed(slowing, bisect, tmp_path):
    history = slowing([0, 0.02, 0])
    workload = load_workload(tmp_path / "tiny.yaml", profile="cpu")
    runs = []
    for name, sha in (("a", history.good), ("b", history.shas[-1])):
        git_state = {"sha": sha, "short_sha": sha[:7], "dirty": False}
        runs.append(stored_run(tmp_path / name, workload, [1.0], git=git_state))
    code, verdict, said = bisect(*runs, "--repo", history.repo, "--metric", "mean_tpot_ms")
    assert code == 1 and culprits(verdict) == [history.shas[1]], said
    manifest = read_json(runs[0] / "manifest.json")
    write_json(runs[0] / "manifest.json", manifest | {"git": manifest["git"] | {"dirty": True}})
    code, _, said = bisect(*runs, "--repo", history.repo)
    assert code == 2 and "with changes" in said


def test_a_side_that_cannot_be_measured_is_invalid(slowing, bisect):
    history = slowing([0, "broken"])
    code, verdict, said = bisect(*words(history))
    assert code == 4 and verdict["outcome"] == "invalid" and "does not start" in verdict["sentence"], said


# --- exact values


COUNTING = """
import json, pathlib, sys
words = sys.argv[1:]
assert words[:2] == ["accept", "counters"], words
lock = pathlib.Path(words[words.index("--lock") + 1])
counters = json.loads(pathlib.Path("counters.json").read_text())
scenarios = {name: {"definition": "d", "steps": 2, "outputs": "o", "counters": values, "history": {}}
             for name, values in counters.items()}
from kvbench_lock import digest
lock.write_text(json.dumps({"format": "kvbench-counters/2", "workload": "w", "workload_digest": "d",
    "accepted": [{"reason": "r", "git": "g", "date": "d", "changed": "c"}], "counters": ["preempted", "copied"],
    "scenarios": scenarios, "scenarios_digest": digest(scenarios)}))
"""


@pytest.fixture
def counting(tmp_path, monkeypatch):
    """A repository whose commits count what a file says: counters.json, or fail where it is none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    repo = make_tiny_kvbench(tmp_path / "repo")
    source = inspect.getsource(lock.digest)
    shared = {"kvbench_lock.py": f"import hashlib, json\nfrom typing import Any\n\n{source}"}
    write(repo, shared | {"kvbench/__main__.py": COUNTING, "counters.json": '{"full": {"preempted": 3, "copied": 1}}'})
    return repo, commit_all(repo, "good")


def test_counters_are_exact_and_each_change_that_lasts_is_found(counting, bisect):
    repo, good = counting
    shas = []
    for preempted, copied in ((3, 1), (3, 2), (0, 0), (4, 2), (4, 2), (4, 1), (5, 1), (5, 1)):
        values = {"full": {"preempted": preempted, "copied": copied}}
        write(repo, {"counters.json": json.dumps(values) if preempted else "not JSON", "n": str(len(shas))})
        shas.append(commit_all(repo, f"preempted {preempted}, copied {copied}"))
    code, verdict, said = bisect(good, shas[-1], "--repo", repo, "--by", "counters")
    assert code == 1, said
    # `copied` is again what it was, so it is not looked for; 3 to 4 may have been made by the commit that cannot count.
    found = [finding for finding in verdict["findings"] if finding["outcome"] == "fail"]
    assert [finding["id"] for finding in found] == [f"culprit/{shas[6]}"]
    assert found[0]["details"] == ["full: preempted 4 -> 5"]
    (left,) = [finding for finding in verdict["findings"] if finding["outcome"] == "inconclusive"]
    assert [sha[:10] in " ".join(left["details"]) for sha in shas] == [False, False, True, True, *[False] * 4]
    code, verdict, said = bisect(good, shas[-1], "--repo", repo, "--by", "counters", "--metric", "cop*")
    assert code == 3 and "there is nothing to search for" in verdict["sentence"], said
    for more, said in (
        (["--metric", "nosuch*"], "nosuch*"),
        (["--method", "launched"], "--method"),
        (["--path", "no"], "no commit"),
    ):
        code, _, output = bisect(good, shas[-1], "--repo", repo, "--by", "counters", *more)
        assert code == 2 and said in output
    code, _, output = bisect(shas[-1], good, "--repo", repo, "--by", "counters")
    assert code == 2 and "swap" in output
    code, verdict, said = bisect(shas[3], shas[-1], "--repo", repo, "--by", "counters", "--metric", "cop*")
    assert code == 1 and culprits(verdict) == [shas[5]], said
