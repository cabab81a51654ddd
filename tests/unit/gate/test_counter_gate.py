"""The gate turns red for one preemption, page or copy too many, and says which; and never green for anything else."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from engine.kv.page_pool import PagePool
from engine.kv.paged import PagedKVManager
from engine.scheduling.scheduler import Scheduler
from kvbench.common.errors import UsageError
from kvbench.gate.counters.accept import accept
from kvbench.gate.counters.first_difference import is_sum
from kvbench.gate.counters.lock_file import digest, read_lock
from kvbench.gate.counters.second_run import replay_all
from kvbench.gate.verdict.verdict import FAIL, PASS, Verdict
from tests.support.counter_files import NAMES, Gate


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path)


def failed(verdict: Verdict) -> dict[str, str]:
    """Scenario -> everything that is said of it."""
    return {f.id.removeprefix("counters/"): "\n".join((f.sentence, *f.details)) for f in verdict.of(FAIL)}


def test_the_same_engine_passes(gate):
    verdict = gate.judge()
    assert (verdict.outcome, verdict.exit_code) == (PASS, 0)
    assert [finding.id for finding in verdict.findings] == [f"counters/{name}" for name in NAMES]
    assert verdict.base["reason"] == "as it was" and not verdict.moved and verdict.accept is None
    assert json.loads(json.dumps(verdict.to_json()))["sentence"] == verdict.sentence


def test_one_preemption_more(gate, monkeypatch):
    real = Scheduler._schedule_running

    def schedule_running(self, plan, budget):
        self.times = getattr(self, "times", 0) + 1
        if self.times == 9 and len(self.running) > 1:
            self._preempt(self.running.pop(), plan)
        return real(self, plan, budget)

    monkeypatch.setattr(Scheduler, "_schedule_running", schedule_running)
    verdict = gate.judge()
    assert verdict.exit_code == 1
    told = failed(verdict)
    assert set(told) == set(NAMES)
    assert "preempted 0 -> 1 (+1)" in told["forks/paged-p4-noprefix"]
    assert "first difference at step 9: preempted 1, was 0" in told["grow/paged-p4-recompute"]
    assert "the same until then; step 8: " in told["grow/paged-p4-recompute"]
    assert "at step 9: preempted 1, was 0" in verdict.sentence and "5 of 5 scenarios differ" in verdict.sentence
    assert "5 of them begin with the same counter, preempted up, at step 9; the earliest is " in verdict.sentence
    assert f"kvbench gate counters {gate.workload_path} --lock {gate.lock_path}" in verdict.reproduce
    assert '--reason "..."' in verdict.accept and verdict.accept.startswith("kvbench accept counters")
    assert {m.name for m in verdict.moved} >= {"preempted", "recomputed_tokens", "swapped_out_slots"}
    order = [(is_sum(m.name), -int(m.where.partition(" ")[0])) for m in verdict.moved]
    assert order == sorted(order) and verdict.moved[0].where == "5 of 5 scenarios"


def test_what_begins_with_one_counter_at_other_steps_is_not_said_to_be_alike_in_more(gate, monkeypatch):
    real = Scheduler._schedule_running

    def schedule_running(self, plan, budget):
        self.times = getattr(self, "times", 0) + 1
        if self.times == (9 if self.config.layout == "paged" else 12):
            self._preempt(self.running.pop(), plan)
        return real(self, plan, budget)

    monkeypatch.setattr(Scheduler, "_schedule_running", schedule_running)
    verdict = gate.judge()
    told = failed(verdict)
    begins = {
        name: int(re.search(r"first difference at step (\d+): preempted 1, was 0", told[name])[1]) for name in told
    }
    low, high = min(begins.values()), max(begins.values())
    assert (low, high) == (9, 12)
    first = next(name for name in NAMES if begins.get(name) == low)
    alike = f"begin with the same counter, preempted up, at steps {low} to {high}"
    assert f"{len(told)} of them {alike}; the earliest is {first} at step {low}: preempted 1" in verdict.sentence
    assert verdict.notes[0].endswith(f" ({len(told) - 1} more {alike})")


def test_one_page_leaked(gate, monkeypatch):
    real = PagePool.release

    def release(self, page):
        if self.ref_count[page] == 1 and not hasattr(self, "leaked"):
            self.leaked = page
        else:
            real(self, page)

    monkeypatch.setattr(PagePool, "release", release)
    verdict = gate.judge()
    assert verdict.exit_code == 1 and verdict.accept is None  # nobody may accept that
    told = failed(verdict)
    assert set(told) == {name for name in NAMES if "paged" in name}
    for words in told.values():
        assert "1 page is owned by nobody's sequence at the end" in words
        assert re.search(r"freed pages (\d+) -> ", words)
    assert "1 page is owned by nobody's sequence at the end" in verdict.sentence


def test_one_page_copied_too_many(gate, monkeypatch):
    """Done right, so that nothing but the count shows it: the copy is right and the page is given back."""
    real = PagedKVManager.grow

    def grow(self, seq, num_tokens):
        at = seq.num_computed
        if seq.request_id == "w0-1" and seq.index == 0 and at % 4 == 2 and at > 16 and not hasattr(self, "copied"):
            self.copied = True
            self._copy_on_write(seq, at // 4, 2)
            self._used_slots -= 2
        return real(self, seq, num_tokens)

    monkeypatch.setattr(PagedKVManager, "grow", grow)
    verdict = gate.judge()
    assert verdict.exit_code == 1
    told = failed(verdict)
    assert "forks/paged-p4-noprefix" in told and "grow/contiguous-oracle" not in told
    words = told["forks/paged-p4-noprefix"]
    assert "copied pages 4 -> 5 (+25.0 %)" in words and "at the end" not in words
    assert re.search(r"first difference at step \d+: copied pages 1, was 0; allocated pages ", words)
    (moved,) = [m for m in verdict.moved if m.name == "copied_pages"]
    assert moved.candidate - moved.base == len(told)


def test_a_second_run_that_differs_is_no_regression(gate):
    runs = dict(gate.runs)
    name = "grow/paged-p4-swap"
    history = {**runs[name].history, "running": (*runs[name].history["running"][:-1], 9)}
    other = {**runs, name: dataclasses.replace(runs[name], history=history)}
    verdict = gate.judge(runs, other)
    assert (verdict.outcome, verdict.exit_code) == ("invalid", 4)
    (finding,) = verdict.of("invalid")
    assert finding.sentence.startswith(f"{name}: two runs of this very code differ, first at step 56: running 9")
    assert "not deterministic" in verdict.sentence and verdict.accept is None


def test_nondeterminism_outweighs_a_difference_from_the_lock(gate):
    first = {**gate.runs, NAMES[0]: dataclasses.replace(gate.runs[NAMES[0]], outputs="other")}
    second = {**first, NAMES[1]: dataclasses.replace(gate.runs[NAMES[1]], outputs="another")}
    verdict = gate.judge(first, second)
    assert verdict.exit_code == 4 and len(verdict.of(FAIL)) == 1


def test_other_tokens_alone_fail(gate):
    changed = {**gate.runs, NAMES[0]: dataclasses.replace(gate.runs[NAMES[0]], outputs="0123456789abcdef")}
    verdict = gate.judge(changed)
    assert verdict.exit_code == 1 and "the output tokens differ" in failed(verdict)[NAMES[0]]


def test_the_same_totals_in_other_steps_fail(gate):
    run = gate.runs[NAMES[0]]
    column = list(run.history["waiting"])
    place = column.index(max(column))
    column[place], column[place + 30] = column[place + 30], column[place]
    changed = dataclasses.replace(run, history={**run.history, "waiting": tuple(column)})
    words = failed(gate.judge({**gate.runs, NAMES[0]: changed}))[NAMES[0]]
    assert "the totals are the same and the steps are not" in words and f"step {place + 1}: waiting" in words


def test_a_changed_workload_is_told_as_such(gate):
    text = gate.workload_path.read_text().replace("output: 12", "output: 13")
    gate.workload_path.write_text(text.replace("reservation: [oracle]", "reservation: [max]"))
    verdict = gate.judge()
    assert verdict.exit_code == 1
    told = failed(verdict)
    assert "defines another scenario than the accepted one" in told["forks/paged-p4-prefix"]
    assert "new in the workload file" in told["grow/contiguous-max"]
    assert "no longer in the workload file" in told["grow/contiguous-oracle"]
    assert {name for name in NAMES if name.startswith("grow/paged")}.isdisjoint(told)
    assert not verdict.moved


def test_nothing_compared_is_no_pass(gate, tmp_path):
    gate.lock_path.rename(tmp_path / "away.json")
    verdict = gate.judge()
    assert (verdict.outcome, verdict.exit_code) == ("empty", 5)
    assert "there is no" in verdict.sentence and verdict.accept.startswith("kvbench accept counters")
    (tmp_path / "away.json").rename(gate.lock_path)
    text = gate.workload_path.read_text().replace("\n  grow:\n    stream", "\n  g:\n    stream")
    gate.workload_path.write_text(text.replace("\n  forks:\n    stream", "\n  f:\n    stream"))
    verdict = gate.judge()
    assert (verdict.outcome, verdict.exit_code) == ("empty", 5)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: "[]", "not a mapping"),
        (lambda text: text.replace("kvbench-counters/1", "kvbench-counters/9"), "has the format 'kvbench-counters/9'"),
        (lambda text: re.sub(r'"preempted": \d+', '"preempted": 7', text, count=1), "changed by hand"),
        (lambda text: text.replace('"1:0 ', '"1:0 2:9 ', 1), "changed by hand"),
        (lambda text: text.replace('"counters": {', '"counts": {', 1), "counts"),
        (lambda text: text.replace('"reason": "as it was"', '"reason": ""'), "reason"),
        (lambda text: text.replace('"steps": 56', '"steps": "many"', 1), "many"),
        (lambda text: "<<<<<<< HEAD\n" + text, "cannot be read"),
    ],
)
def test_a_garbled_lock_is_one_sentence(gate, damage, complaint):
    text = gate.lock_path.read_text()
    assert damage(text) != text
    gate.lock_path.write_text(damage(text))
    with pytest.raises(UsageError, match=re.escape(complaint)) as caught:
        gate.judge()
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value) and str(gate.lock_path) in str(caught.value)


def test_a_history_that_cannot_be_read_is_named(gate):
    data = json.loads(gate.lock_path.read_text())
    data["scenarios"][NAMES[0]]["history"]["running"] = "1:1 99:2"
    data["scenarios_digest"] = digest(data["scenarios"])
    gate.lock_path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match=f"{NAMES[0]}: the history cannot be read: '99:2' does not follow"):
        gate.judge()


def test_a_counter_that_one_side_does_not_know_is_told_apart(gate, monkeypatch):
    run = gate.runs[NAMES[0]]
    fresh = {**gate.runs, NAMES[0]: dataclasses.replace(run, counters={**run.counters, "peak_dreams": 3})}
    assert (
        "peak dreams 0 -> 3 (+3), which was not counted when this was accepted" in failed(gate.judge(fresh))[NAMES[0]]
    )
    monkeypatch.setattr("kvbench.gate.counters.judge.COUNTERS", [name for name in run.counters if name != "steps"])
    less = {key: value for key, value in run.counters.items() if key != "steps"}
    fewer = {**gate.runs, NAMES[0]: dataclasses.replace(run, counters=less)}
    assert "steps 56 -> 0 (-100 %), which is not counted any more" in failed(gate.judge(fewer))[NAMES[0]]


def _accept_now(gate: Gate, reason: str = "meant") -> list[str]:
    workload = gate.read()
    return accept(workload, replay_all(workload.scenarios), gate.lock_path, reason)


def test_what_is_accepted_is_the_new_baseline_and_the_reasons_stay(gate, monkeypatch):
    assert _accept_now(gate)[0].startswith("nothing to accept")
    monkeypatch.setattr("engine.kv.paged.SPARE_TOKENS", 4)
    assert gate.judge().exit_code == 1
    lines = _accept_now(gate, "less room is kept")
    assert lines[0].startswith("accepted: 2 of 5 scenarios: ") and "reason: less room is kept" in lines
    assert gate.judge().exit_code == 0
    log = read_lock(gate.lock_path).accepted
    assert [entry.reason for entry in log] == ["as it was", "less room is kept"]
    assert all(entry.git and re.match(r"20\d\d-\d\d-\d\dT", entry.date) for entry in log)
    assert log[0].changed == "the first lock file, 5 scenarios"


def test_the_record_says_what_is_guarded_no_more(gate):
    text = gate.workload_path.read_text().replace("output: 12", "output: 13")
    gate.workload_path.write_text(text.replace("reservation: [oracle]", "reservation: [max]"))
    lines = _accept_now(gate)
    changed = read_lock(gate.lock_path).accepted[-1].changed
    assert lines[0] == f"accepted: {changed}"
    assert "1 removed and guarded no more (grow/contiguous-oracle)" in changed
    assert "1 new (grow/contiguous-max)" in changed
    assert "2 defined anew (forks/paged-p4-noprefix, forks/paged-p4-prefix)" in changed
    assert changed.startswith("4 of 6 scenarios: ")


def test_the_record_says_what_counts_otherwise(gate, monkeypatch):
    monkeypatch.setattr("engine.kv.paged.SPARE_TOKENS", 4)
    names = sorted(failed(gate.judge()))
    _accept_now(gate)
    changed = read_lock(gate.lock_path).accepted[-1].changed
    assert re.match(r"2 of 5 scenarios: 2 counted otherwise \((.*)\): \w", changed)[1].split(", ") == names


def test_a_lock_that_is_a_folder_is_not_to_be_restored(gate):
    with pytest.raises(UsageError, match=r"Is a directory; give the file, such as .*/counters\.lock\.json") as caught:
        read_lock(gate.lock_path.parent)
    assert "git checkout" not in str(caught.value)


def test_a_lock_that_cannot_be_read_is_not_written_over(gate):
    gate.lock_path.write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        _accept_now(gate)
    assert gate.lock_path.read_text() == "{"


def test_a_killed_acceptance_leaves_the_old_lock(gate, monkeypatch):
    before = gate.lock_path.read_bytes()
    monkeypatch.setattr("engine.kv.paged.SPARE_TOKENS", 4)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvbench.runs.folder.os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        _accept_now(gate)
    assert gate.lock_path.read_bytes() == before
