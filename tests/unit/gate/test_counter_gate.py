"""The gate fails for one preemption, page or copy too many, and names counter and step; it never passes otherwise."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.common.errors import UsageError
from kvbench.gate.counters.judge import Change, accept, changed_counters, first_difference
from kvbench.gate.counters.lock import LockedScenario, changes_of, digest, read_lock
from kvbench.gate.counters.replay import Replayed, replay_all
from kvbench.gate.verdict.verdict import FAIL, PASS, Finding, Verdict
from kvbench_engine.kv.page_pool import PagePool
from kvbench_engine.kv.paged import PagedKVManager
from kvbench_engine.scheduling.scheduler import Scheduler
from tests.support.counter_files import NAMES, Gate


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        (
            {"free_pages": (4, 4, 4), "decode_tokens": (3, 3, 3), "preempted": (0, 0, 0)},
            {"free_pages": (4, 3, 4), "decode_tokens": (3, 2, 9), "preempted": (0, 1, 0)},
            "step 2: preempted 1 (was 0), decode tokens 2 (was 3), free pages 3 (was 4)",  # causes first
        ),
        ({"running": (1, 1)}, {"running": (0, 1, 1)}, "step 1: running 0 (was 1)"),
        ({"running": (1, 1)}, {"running": (1, 1), "preempted": (0, 0)}, "None"),
        ({}, {}, "None"),
    ],
)
def test_the_first_difference_names_its_step_and_its_cause(was, now, words):
    assert str(first_difference(was, now)) == words
    for was, now, longer in (((1, 1), (1, 1, 5), True), ((1, 1), (1,), False), ((), (1,), True)):
        difference = first_difference({"running": was}, {"running": now})
        shorter = min(len(was), len(now))  # histories of different lengths differ where the shorter one ends
        assert (difference.step, difference.longer, difference.changes) == (shorter + 1, longer, ())
        assert difference.before == ({"running": 1} if shorter else {})


def test_counters_that_moved_most_come_first_and_sums_over_steps_last():
    was = {"steps": 100, "preempted": 4, "slot_steps_free": 10, "forks": 7}
    now = {"steps": 101, "preempted": 5, "slot_steps_free": 90, "forks": 7, "copied_pages": 2}
    moved = [Change("copied_pages", 0, 2), Change("preempted", 4, 5), Change("steps", 100, 101)]
    assert changed_counters(was, now) == [*moved, Change("slot_steps_free", 10, 90)]
    assert [str(change) for change in moved[:2]] == ["copied pages 0 -> 2 (+2)", "preempted 4 -> 5 (+25.0 %)"]


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path)


def failed(verdict: Verdict) -> dict[str, Finding]:
    """Scenario -> its finding."""
    assert (verdict.outcome, verdict.exit_code) == (FAIL, 1)
    return {finding.id.removeprefix("counters/"): finding for finding in verdict.of(FAIL)}


def text_of(finding: Finding) -> str:
    return "\n".join((finding.sentence, *finding.details))


def changed(gate: Gate, **parts) -> dict[str, Replayed]:
    """The accepted runs with parts of the first one replaced."""
    return {**gate.runs, NAMES[0]: dataclasses.replace(gate.runs[NAMES[0]], **parts)}


def test_one_preemption_more(gate, monkeypatch):
    verdict = gate.judge()
    assert (verdict.outcome, verdict.exit_code) == (PASS, 0)
    assert [finding.id for finding in verdict.findings] == [f"counters/{name}" for name in NAMES]
    assert verdict.base["reason"] == "as it was" and not verdict.moved and not verdict.notes and verdict.accept is None
    steps = (9, 12)  # of the extra preemption, in paged and in contiguous scenarios
    real = Scheduler._schedule_steady

    def schedule_steady(self, plan):
        self.times = getattr(self, "times", 0) + 1
        if self.times == steps[self.config.layout != "paged"] and len(self.running) > 1:
            self._preempt(self.running.pop(), plan)
        return real(self, plan)

    monkeypatch.setattr(Scheduler, "_schedule_steady", schedule_steady)
    verdict = gate.judge()
    found = failed(verdict)
    assert set(found) == set(NAMES)
    for name, finding in found.items():
        assert finding.figures["first_different_step"] == steps["contiguous" in name]
        assert "preempted 1 (was 0)" in finding.sentence
    assert "preempted 0 -> 1 (+1)" in found["forks/paged-p4-noprefix"].details
    assert f"preempted up, at steps {steps[0]} to {steps[1]}" in verdict.sentence and not verdict.notes
    assert f"kvbench gate counters {gate.workload_path} --lock {gate.lock_path}" in verdict.reproduce
    assert '--reason "..."' in verdict.accept and verdict.accept.startswith("kvbench accept counters")
    assert {m.name for m in verdict.moved} >= {"preempted", "recomputed_tokens", "swapped_out_slots"}
    assert {m.where for m in verdict.moved} >= {"5 of 5 scenarios"}


def test_one_page_leaked(gate, monkeypatch):
    real = PagePool.release

    def release(self, page):
        if self.ref_count[page] == 1 and not hasattr(self, "leaked"):
            self.leaked = page
        else:
            real(self, page)

    monkeypatch.setattr(PagePool, "release", release)
    verdict = gate.judge()
    found = failed(verdict)
    assert set(found) == {name for name in NAMES if "paged" in name}
    for finding in found.values():
        assert re.search(r"1 page\b.* leaked", finding.sentence) and "freed pages" in text_of(finding)
    assert "leaked" in verdict.sentence and verdict.accept is None  # a leak cannot be accepted


def test_one_page_copied_too_many(gate, monkeypatch):
    """The copy is right and the page is given back: only the count shows it."""
    real = PagedKVManager.grow

    def grow(self, seq, num_tokens):
        at = seq.num_computed
        if seq.request_id == "w0-1" and seq.index == 0 and at % 4 == 2 and at > 16 and not hasattr(self, "copied"):
            self.copied = True
            self._copy_on_write(seq, 0, at // 4, 2)
            self._used_slots -= 2
        return real(self, seq, num_tokens)

    monkeypatch.setattr(PagedKVManager, "grow", grow)
    monkeypatch.setattr(Scheduler, "reuses_batches", False)  # else it is not called for a page that is there
    verdict = gate.judge()
    found = failed(verdict)
    assert "grow/contiguous-oracle" not in found
    words = text_of(found["forks/paged-p4-noprefix"])
    assert "copied pages 4 -> 5 (+25.0 %)" in words and "leaked" not in words
    assert re.search(r"step \d+: copied pages 1 \(was 0\), allocated pages ", words)


def test_a_second_run_that_differs_is_no_regression(gate):
    name = "grow/paged-p4-swap"
    history = {**gate.runs[name].history, "running": (*gate.runs[name].history["running"][:-1], 9)}
    first = changed(gate, outputs="other")
    verdict = gate.judge(first, {**first, name: dataclasses.replace(gate.runs[name], history=history)})
    assert (verdict.outcome, verdict.exit_code) == ("invalid", 4)
    (finding,) = verdict.of("invalid")
    assert name in finding.sentence and "step 56: running 9" in finding.sentence and verdict.accept is None
    assert len(verdict.of(FAIL)) == 1  # the difference from the lock
    for change in ({"outputs": "another"}, {"error": "leak"}, {"counters": {"steps": 1}}):
        assert gate.judge(gate.runs, changed(gate, **change)).exit_code == 4


def test_other_tokens_the_same_totals_in_other_steps_and_counters_of_one_side_alone_fail(gate, monkeypatch):
    assert "output tokens" in failed(gate.judge(changed(gate, outputs="0123456789abcdef")))[NAMES[0]].sentence
    history, counters = gate.runs[NAMES[0]].history, gate.runs[NAMES[0]].counters
    column = list(history["waiting"])
    place = column.index(max(column))
    column[place], column[place + 30] = column[place + 30], column[place]
    finding = failed(gate.judge(changed(gate, history={**history, "waiting": tuple(column)})))[NAMES[0]]
    assert finding.figures["first_different_step"] == place + 1 and "0 of 49 counters" in finding.sentence
    more = failed(gate.judge(changed(gate, counters={**counters, "peak_dreams": 3})))[NAMES[0]]
    assert "peak dreams 0 -> 3 (+3), which was not counted" in text_of(more)
    less = {key: value for key, value in counters.items() if key != "steps"}
    monkeypatch.setattr("kvbench.gate.counters.judge.COUNTERS", list(less))
    fewer = failed(gate.judge(changed(gate, counters=less)))[NAMES[0]]
    assert "steps 56 -> 0 (-100 %), which is not counted" in text_of(fewer)


def test_nothing_compared_is_no_pass(gate):
    lock = gate.lock_path.read_bytes()
    gate.lock_path.unlink()
    verdict = gate.judge()
    assert (verdict.outcome, verdict.exit_code) == ("empty", 5) and verdict.accept.startswith("kvbench accept counters")
    gate.lock_path.write_bytes(lock)
    for name in ("grow", "forks"):
        text = gate.workload_path.read_text()
        gate.workload_path.write_text(text.replace(f"\n  {name}:\n    stream", f"\n  other-{name}:\n    stream"))
    assert gate.judge().exit_code == 5


def test_a_changed_workload_is_told_as_such_and_logged_when_accepted(gate):
    for old, new in (("output: 12", "output: 13"), ("reservation: [oracle]", "reservation: [max]")):
        gate.workload_path.write_text(gate.workload_path.read_text().replace(old, new))
    verdict = gate.judge()
    found = failed(verdict)
    defined, new, removed = "forks/paged-p4-prefix", "grow/contiguous-max", "grow/contiguous-oracle"
    assert set(found) == {defined, "forks/paged-p4-noprefix", new, removed} and not verdict.moved
    assert len({found[name].sentence.partition(": ")[2] for name in (defined, new, removed)}) == 3
    lines = accept_now(gate)
    said = read_lock(gate.lock_path).accepted[-1].changed
    assert lines[0] == f"accepted: {said}"
    assert all(part in said for part in ("4 of 6", *found))


@given(st.lists(st.integers(-3, 3)), st.integers(0, 3))
def test_a_history_is_written_and_read_again(values, rest):
    values = [*values, *[values[-1]] * rest] if values else []
    text = changes_of(values)
    locked = LockedScenario(definition="", steps=len(values), outputs="", counters={}, history={"a": text})
    assert locked.columns == {"a": tuple(values)}
    assert changes_of((0, 0, 4, 4, 6, 0)) == "3:4 5:6 6:0"


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (r"(?s)\n.*", "", "cannot be read"),
        ("kvbench-counters/2", "kvbench-counters/1", "'kvbench-counters/1'"),
        (r'"preempted": \d+', '"preempted": 7', "scenarios_digest"),
        (r'"counters": \{', '"counts": {', "counts"),
        ('"steps": 56', '"steps": "many"', "many"),
    ],
)
def test_a_damaged_lock_is_one_sentence_and_is_not_overwritten(gate, old, new, named):
    damaged = re.sub(old, new, gate.lock_path.read_text(), count=1)
    assert damaged != gate.lock_path.read_text()
    gate.lock_path.write_text(damaged)
    for use in (gate.judge, lambda: accept_now(gate)):
        with pytest.raises(UsageError, match=re.escape(named)) as caught:
            use()
        assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
        assert str(gate.lock_path) in str(caught.value)
        assert ("git checkout" in str(caught.value)) == (not new.endswith("/1"))  # an old format is accepted anew
    assert gate.lock_path.read_text() == damaged


@pytest.mark.parametrize("history", ["1:1 99:2", "3:1 3:2", "1:x"])
def test_a_lock_with_an_unreadable_history_or_that_is_a_folder_is_named(gate, history):
    data = json.loads(gate.lock_path.read_text())
    data["scenarios"][NAMES[0]]["history"]["running"] = history
    data["scenarios_digest"] = digest(data["scenarios"])
    gate.lock_path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match=str(gate.lock_path)):
        gate.judge(gate.runs)


def accept_now(gate: Gate, reason: str = "meant") -> list[str]:
    workload = gate.read()
    return accept(workload, replay_all(workload.scenarios), gate.lock_path, reason)


def _killed(*_):
    raise KeyboardInterrupt


def test_what_is_accepted_is_the_new_baseline_and_the_reasons_stay(gate, monkeypatch):
    before = gate.lock_path.read_bytes()
    accept_now(gate)
    assert gate.lock_path.read_bytes() == before  # nothing to accept
    monkeypatch.setattr("kvbench_engine.kv.paged.SPARE_TOKENS", 4)
    names = sorted(failed(gate.judge()))
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", _killed)
        with pytest.raises(KeyboardInterrupt):
            accept_now(gate)
    assert gate.lock_path.read_bytes() == before
    assert "reason: less room is kept" in accept_now(gate, "less room is kept")
    assert gate.judge().exit_code == 0
    log = read_lock(gate.lock_path).accepted
    assert [entry.reason for entry in log] == ["as it was", "less room is kept"]
    assert all(entry.git and re.match(r"20\d\d-\d\d-\d\dT", entry.date) for entry in log)
    assert all(name in log[1].changed for name in names)
