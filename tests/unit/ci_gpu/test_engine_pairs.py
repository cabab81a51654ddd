"""Engines in turns: who is asked when, what is kept, and what a side that fails costs."""

from __future__ import annotations

import json
import sys

import pytest

from ci.gpu import turns
from ci.gpu.part import PartReport
from ci.gpu.turns import EngineSide, Launch, Pair
from tests.support.sweep_parts import alive, wait_until

MODULE = "tests.support.turn_sides"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The report after ``launches`` of two turns each, the second side being of ``kind``; no process is left."""
    monkeypatch.setenv("PYTHONPATH", str(turns.REPOSITORY))

    def measured(kind: str, launches: int = 1, seconds: float = 120.0) -> PartReport:
        pair = Pair((EngineSide("first", MODULE, "base"), EngineSide("second", MODULE, kind)), launches)
        monkeypatch.setitem(turns.PAIRS, "tested", pair)
        out = tmp_path / "part.json"
        arguments = ["--out", str(out), "--device", "cpu", "--seconds", "60", "--scratch", str(tmp_path), "--tiny"]
        report = PartReport(out, seconds)
        for number in range(launches):
            Launch(pair, report, arguments, number).run(2)
        processes = [int(path.name.rpartition("-")[2]) for path in tmp_path.glob("*-*")]
        assert len(processes) == 2 * launches + (kind == "hangs")  # which has started another
        wait_until(lambda: not any(map(alive, processes)))
        return report

    return measured


def test_sides_take_turns_and_who_begins_changes(run):
    report = run("other", launches=2)
    rows = sorted(report.data["rows"], key=lambda row: row["at"])
    assert [(row["launch"], row["turn"], row["side"]) for row in rows] == [
        (1, 1, "first"), (1, 1, "second"), (1, 2, "second"), (1, 2, "first"),
        (2, 1, "second"), (2, 1, "first"), (2, 2, "first"), (2, 2, "second"),
    ]  # fmt: skip
    assert {row["case"] for row in rows} == {"job"}  # the only one that both sides have
    assert len({row["process"] for row in rows}) == 4  # one a side and launch, alive from turn to turn
    loaded = [report.data[f"{name}: loaded_at"] for name in ("first", "second")]
    assert max(loaded) < rows[4]["at"] and not report.data["failures"]
    assert [report.data[f"{name}: imports_from"] for name in ("first", "second")] == ["base", "other"]
    (table,) = report.data["tables"]
    assert table["rows"] == [["job", "output tokens/s", "150", "75", "0.500 (0.500 to 0.500)", "4"]]
    assert table["columns"][2:4] == ["first", "second"]


def test_ratios_are_of_one_turn_and_one_launch():
    measured = [("a", 1, 1, 4.0), ("b", 1, 1, 2.0), ("a", 2, 1, 10.0), ("b", 2, 1, 40.0), ("b", 2, 2, 7.0)]
    rows = [dict(zip(("side", "launch", "turn", "rate"), values, strict=True)) for values in measured]
    assert turns.ratios(rows, "rate", "a", "b") == [0.5, 4.0]


def test_a_side_that_dies_costs_its_own_turns(run):
    report = run("dies")
    (failure,) = report.data["failures"]
    assert failure["what"] == "second: job" and "SIGKILL" in failure["reason"]
    assert [row["turn"] for row in report.data["rows"] if row["side"] == "first"] == [1, 2]
    assert [row["turn"] for row in report.data["rows"] if row["side"] == "second"] == [1]


def test_a_warning_while_loading_is_told_and_costs_nothing(run):
    report = run("warns")
    assert [failure["what"] for failure in report.data["failures"]] == ["second: engine.x"]
    assert [row["side"] for row in report.data["rows"]] == ["first", "second", "second", "first"]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "reason"), [("refuses", "no memory for the KV cache"), ("hangs", "stopped after")])
def test_a_side_that_does_not_load_leaves_the_other_measured_alone(run, kind, reason):
    report = run(kind, seconds=10.0)
    (failure,) = report.data["failures"]
    assert failure["what"] == "second: load" and reason in failure["reason"]
    assert [(row["case"], row["turn"]) for row in report.data["rows"]] == [
        ("job", 1), ("steps", 1), ("job", 2), ("steps", 2)
    ]  # fmt: skip


def test_no_turn_begins_that_the_time_does_not_hold(run, monkeypatch):
    monkeypatch.setattr(PartReport, "time_left", property(lambda self: 60.0 if not self.data["rows"] else -1.0))
    report = run("other")
    assert [row["side"] for row in report.data["rows"]] == ["first", "second"]
    assert [skipped["what"] for skipped in report.data["skipped"]] == ["job, launch 1, turn 2"]


@pytest.fixture
def before_after(tmp_path, monkeypatch):
    """The part in a repository of which neither side can load: its exit code and JSON."""
    monkeypatch.setattr(turns, "REPOSITORY", tmp_path)
    monkeypatch.setattr(turns, "_command", lambda side, arguments: [sys.executable, "-c", "raise SystemExit(3)"])
    out = tmp_path / "part.json"

    def of(*words: str):
        argv = ["turns", "--pair", "before-after", "--out", str(out), "--device", "cuda", "--seconds", "60"]
        monkeypatch.setattr(sys, "argv", [*argv, "--scratch", str(tmp_path), *words])
        return turns.main(), json.loads(out.read_text())

    return of


def test_the_commit_that_was_brought_along_is_recorded(before_after, tmp_path):
    """Neither side can load here; who they were is on disk all the same."""
    before = tmp_path / ".bring" / "before"
    before.mkdir(parents=True)
    (before / "COMMIT").write_text("abc123\n")
    code, told = before_after()
    assert code == 1 and told["before: commit"] == "abc123"


def test_another_commit_that_was_not_brought_along_is_said(before_after):
    code, told = before_after()
    assert code == 0 and "ci/gpu/bring.sh before-after" in told["not_run"]
    code, told = before_after("--tiny")  # a dry run goes on with this tree's engine, and says so
    assert code == 1 and "stands in for it" in told["skipped"][0]["reason"]
