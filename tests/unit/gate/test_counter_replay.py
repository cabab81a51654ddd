"""A replay counts what can be counted by hand, says what is wrong with an engine, and leaves no counter unguarded."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kvbench.common.errors import UsageError
from kvbench.gate.counters.judge import GateCommands, judge
from kvbench.gate.counters.lock import read_lock
from kvbench.gate.counters.replay import COUNTERS, replay, replay_all
from kvbench.gate.counters.workload import read_counter_workload
from kvbench_engine.scheduling.scheduler import Scheduler
from kvbench_engine.scheduling.step_plan import StepPlan
from tests.support.counter_files import SMALL

ROOT = Path(__file__).resolve().parents[3]
WORKLOAD, LOCK = ROOT / "workloads" / "ci_counters.yaml", ROOT / "ci" / "counters.lock.json"

ONE = """
name: one
vocab_size: 64
num_eos: 0
engine: {model: llama-32m, max_model_len: 32, max_num_seqs: 4, max_num_batched_tokens: 24, kv_budget: 1MiB}
streams: {only: [%s]}
scenarios:
  only: {stream: only, matrix: [{layout: [paged], page_size: [4]}]}
"""


@pytest.fixture
def replayed(tmp_path):
    def one(*waves: str):
        path = tmp_path / "one.yaml"
        path.write_text(ONE % ", ".join(waves))
        (scenario,) = read_counter_workload(path).scenarios
        return replay(scenario)

    return one


def test_one_request_counted_by_hand(replayed):
    """6 tokens of prompt fill a page and a half; the third token ends it and is not computed, so there is no page 3."""
    run = replayed("{start: 2, prompt: 6, output: 3}")
    assert run.error is None
    assert {name: values for name, values in run.history.items() if any(values)} == {
        "prefill_tokens": (0, 6, 0, 0),
        "decode_tokens": (0, 0, 1, 1),
        "allocated_pages": (0, 2, 0, 0),
        "freed_pages": (0, 0, 0, 2),
        "finished": (0, 0, 0, 1),
        "running": (0, 1, 1, 1),
        "free_pages": (15, 13, 13, 13),  # 1 MiB less the page table, in pages of 64 KiB
        "wasted_slots": (0, 2, 1, 0),
    }
    counted = {name: value for name, value in run.counters.items() if value}
    assert counted == {
        "steps": 3, "prefill_steps": 1, "decode_steps": 2, "empty_steps": 1, "prefill_tokens": 6, "decode_tokens": 2,
        "prompt_tokens": 6, "generation_tokens": 3, "allocated_pages": 2, "freed_pages": 2, "peak_pages_owned": 2,
        "peak_slots_reserved": 8, "finished_length": 1, "peak_running": 1, "running_steps": 3,
        "slot_steps_tokens": 13, "slot_steps_waste": 3, "slot_steps_free": 52 + 52 + 60, "total_pages": 15,
        "total_slots": 60, "page_table_bytes": 4 * 8 * 8, "bytes_per_slot": 16384,
    }  # fmt: skip


def test_a_fork_that_is_abandoned_and_a_request_that_never_fits(replayed):
    """The two siblings share a page and a half; who writes first copies the half. One client leaves before step 4."""
    run = replayed("{prompt: 6, output: 9, n: 2, abort_after: 3, abort_index: 1}", "{start: 2, prompt: 40, output: 1}")
    assert run.error is None
    names = ("forks", "copied_pages", "copied_slots", "finished_abort", "finished_length", "refused_never_fits")
    assert [run.counters[name] for name in names] == [1, 1, 2, 1, 1, 1]
    assert run.history["copied_pages"][:3] == (0, 1, 0)
    assert run.history["running"][:5] == (1, 2, 2, 1, 1)
    assert run.history["finished"][3] == 1


def test_a_request_gives_the_same_tokens_however_often_it_is_preempted_or_moved(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    runs = {scenario.name: replay(scenario) for scenario in read_counter_workload(path).scenarios}
    grown = {name: run for name, run in runs.items() if name.startswith("grow/")}
    assert [run.counters["preempted"] > 0 for run in grown.values()] == [True, True, False]
    assert len({run.outputs for run in grown.values()}) == 1
    assert len({run.outputs for run in runs.values()}) == 2


def test_the_engine_counts_what_was_accepted_and_every_counter_moves_in_some_scenario():
    """If this is red and the change is meant: kvbench accept counters --reason "..."."""
    workload = read_counter_workload(WORKLOAD)
    runs = replay_all(workload.scenarios)
    verdict = judge(workload, read_lock(LOCK), runs, runs, GateCommands(), {})
    assert verdict.exit_code == 0, "\n".join((verdict.sentence, *verdict.notes))
    assert not verdict.notes and len(verdict.findings) == len(workload.scenarios) >= 90
    assert LOCK.stat().st_size < 450_000 and max(map(len, LOCK.read_text().splitlines())) < 4_000  # readable in a diff
    runs = list(runs.values())
    assert [run.error for run in runs if run.error] == [] and all(set(run.counters) == set(COUNTERS) for run in runs)
    # what is 0 everywhere would guard nothing
    assert [name for name in COUNTERS if not any(run.counters[name] for run in runs)] == []
    columns = {name for run in runs for name in run.history}
    assert [name for name in sorted(columns) if not any(any(run.history.get(name, ())) for run in runs)] == []
    for name in ("preempted", "copied_pages", "swapped_in_slots", "recomputed_tokens", "swap_lost_slots"):
        assert sum(run.counters[name] > 0 for run in runs) >= 5, name
    configs = [scenario.config for scenario in workload.scenarios]
    paged = {(c.page_size, c.preemption_mode, c.enable_prefix_caching) for c in configs if c.layout == "paged"}
    assert paged >= set(itertools.product((1, 8, 16, 64), ("recompute", "swap"), (False, True)))
    contiguous = {(c.reservation, c.preemption_mode) for c in configs if c.layout == "contiguous"}
    assert contiguous == set(itertools.product(("max", "pow2", "oracle"), ("recompute", "swap")))
    assert {c.async_scheduling for c in configs} == {False, True}
    assert {c.scheduling_policy for c in configs} == {"fcfs", "priority"}


def test_an_engine_that_stands_still_or_breaks_is_reported_with_its_step(replayed, monkeypatch):
    real = Scheduler.schedule

    def schedule(self):
        assert len(self.running) < 2, "two are too many"
        return real(self)

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    run = replayed("{count: 2, every: 3, prompt: 6, output: 9}")
    assert run.error.startswith("the engine broke at step 5: AssertionError: two are too many") and run.steps == 4
    monkeypatch.setattr(Scheduler, "schedule", lambda self: StepPlan())
    assert "2 sequences wait and 0 run" in replayed("{count: 2, prompt: 6, output: 3}").error


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("stream: forks", "stream: frocks", "'frocks' is none of the streams grow, forks"),
        ("every: 1, prompt", "evry: 1, prompt", "did you mean `every`?"),
        ("prompt: [4, 8]", "prompt: [8, 4]", r"\[8, 4\] is not a range of lengths"),
        ("page_size: [4], preemption", "page_size: [4, 4], preemption", "the same scenario 'grow/paged-p4-recompute'"),
        (", kv_budget: 2064KiB", "", "kv_budget is missing"),
        ("reservation: [oracle]", "reservation: [guess]", "reservation cannot be 'guess'"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence(tmp_path, old, new, complaint):
    path = tmp_path / "small.yaml"
    assert old in SMALL
    path.write_text(SMALL.replace(old, new))
    with pytest.raises(UsageError, match=complaint) as caught:
        read_counter_workload(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="kvbench sweep"):
        read_counter_workload(ROOT / "workloads" / "mixed.yaml")  # a workload of another command


def test_the_digest_is_of_what_the_file_says(tmp_path):
    path = tmp_path / "small.yaml"
    digests = []
    for text in (SMALL, SMALL + "\n# a comment\n", SMALL.replace("output: 12", "output: 13")):
        path.write_text(text)
        workload = read_counter_workload(path)
        digests.append((workload.digest, *(scenario.digest for scenario in workload.scenarios)))
    assert digests[0] == digests[1]
    same = [a == b for a, b in zip(digests[0], digests[2], strict=True)]
    assert same == [False, True, True, True, False, False]  # the file, and the scenarios of that stream
