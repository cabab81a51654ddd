"""Replays scenarios and records what the engine did: its counters, and a row of numbers for each step.

A step is one call of ``Engine.step``, numbered from 1, and requests arrive at step numbers, so nothing depends on time.
The gate replays everything a second time in another process with another hash seed
(``python -m kvbench.gate.counters.replay WORKLOAD SCENARIOS``), so that code which depends on the order of a set, on an
address or on what ran before gives two different results.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import kvbench
from kvbench.common.errors import MeasurementError
from kvbench.common.text import plural
from kvbench.gate.counters.workload import CounterWorkload, Scenario, read_counter_workload
from kvbench_engine.counters import EngineStats
from kvbench_engine.engine import Engine
from kvbench_engine.execution.null_executor import ReplayExecutor
from kvbench_engine.kv.layouts import make_kv_manager
from kvbench_engine.kv.manager import KVStats
from kvbench_engine.scheduling.scheduler import QueueFull
from kvbench_engine.scheduling.step_plan import StepPlan

COUNTERS = (
    "steps", "prefill_steps", "decode_steps", "mixed_steps", "empty_steps", "prefill_tokens", "decode_tokens",
    "mixed_step_tokens", "prompt_tokens", "generation_tokens", "preempted", "recomputed_tokens", "allocated_pages",
    "freed_pages", "peak_pages_owned", "peak_slots_reserved", "copied_pages", "copied_slots", "swapped_out_slots",
    "swapped_in_slots", "swap_lost_slots", "peak_host_slots", "peak_swapped", "prefix_hits", "prefix_queries",
    "prefix_evictions", "refused_fragmented", "refused_queue_full", "refused_never_fits", "forks", "finished_length",
    "finished_stop", "finished_abort", "peak_running", "running_steps", "peak_waiting", "waiting_steps",
    "slot_steps_tokens", "slot_steps_waste", "slot_steps_cached", "slot_steps_pinned", "slot_steps_free",
    "slot_steps_fragmented", "shared_slot_steps", "total_pages", "total_slots", "total_host_slots",
    "page_table_bytes", "bytes_per_slot",
)  # fmt: skip
"""Every counter that is compared."""

# Counters that only grow: their increase in each step is a column of the history.
_OF_THE_KV = (
    "allocated_pages", "freed_pages", "copied_pages", "copied_slots", "swapped_out_slots", "swapped_in_slots",
    "swap_lost_slots", "prefix_hits", "prefix_queries", "prefix_evictions", "refused_fragmented",
)  # fmt: skip
_STEP_KINDS = {  # with a prefill, with a decode -> the counter of such steps
    (True, True): "mixed_steps", (True, False): "prefill_steps", (False, True): "decode_steps",
    (False, False): "empty_steps",
}  # fmt: skip
_NO_COLUMN = ("prefix_queries", "copied_slots")  # other columns show the step
_IDLE_STEPS = 64  # steps without any work after which a replay ends with an error
_STEPS_A_TOKEN = 8  # most steps of a replay, for each token of all requests
_TIMEOUT_S = 300


@dataclass(frozen=True)
class Replayed:
    """A run of a scenario. ``history``: column -> its value at each step. ``outputs``: digest of all tokens.

    ``error``: a crash, a leak or no progress, in one sentence.
    """

    counters: Mapping[str, int]
    history: Mapping[str, Sequence[int]]
    outputs: str
    error: str | None

    @property
    def steps(self) -> int:
        return max(map(len, self.history.values()), default=0)


def replay_all(scenarios: Iterable[Scenario]) -> dict[str, Replayed]:
    return {scenario.name: replay(scenario) for scenario in scenarios}


def replay_twice(workload: CounterWorkload) -> tuple[dict[str, Replayed], dict[str, Replayed]]:
    """Replays all scenarios in this process and in another one at the same time. Raises MeasurementError."""
    root = str(Path(kvbench.__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    other_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    module = ("-m", "kvbench.gate.counters.replay")
    other = subprocess.Popen(
        [sys.executable, *module, str(workload.path), *(s.name for s in workload.scenarios)],
        env={**os.environ, "PYTHONHASHSEED": other_seed, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        first = replay_all(workload.scenarios)
        printed, errors = other.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise MeasurementError(f"the second run of the scenarios took more than {_TIMEOUT_S} s") from None
    finally:
        if other.poll() is None:
            other.kill()
            other.communicate()
    if other.returncode:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        raise MeasurementError(f"the second run of the scenarios failed with exit code {other.returncode}: {last}")
    return first, {name: Replayed(**run) for name, run in json.loads(printed).items()}


def replay(scenario: Scenario) -> Replayed:
    """Replays ``scenario`` to its end, or until its engine raises or makes no progress."""
    return _Replay(scenario).run()


class _Replay:
    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        executor = ReplayExecutor(scenario.seed, scenario.vocab_size, scenario.num_eos)
        executor.on_launch = self._on_launch
        self.kv = make_kv_manager(scenario.config, scenario.capacity)
        self.engine = Engine(scenario.config, executor, self.kv, clock=lambda: 0.0)
        self.step = 0
        self.rows: list[dict[str, int]] = []
        self.counters: Counter[str] = Counter()
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], str] = {}
        self._arrivals = list(reversed(scenario.arrivals))  # the next one is the last
        aborts = [(a.abort_step, i) for i, a in enumerate(scenario.arrivals) if a.abort_step is not None]
        self._aborts = sorted(aborts, reverse=True)
        self._launched: KVStats | None = None  # the memory as the step now running needs it
        self._running = self._waiting = 0
        self._last = _growing(self.engine.stats())

    def run(self) -> Replayed:
        try:
            error = self._play() or self._leak()
        except Exception as raised:  # whatever an engine under test raises is what the gate is to report
            error = f"the engine broke at step {self.step}: {_where(raised)}"
        columns = {name: tuple(row[name] for row in self.rows) for name in (self.rows or [{}])[0]}
        history = {name: values for name, values in columns.items() if name not in _NO_COLUMN}
        text = "\n".join(f"{key} {self.ends.get(key)} {tokens}" for key, tokens in sorted(self.tokens.items()))
        return Replayed(self._totals(), history, hashlib.sha256(text.encode()).hexdigest()[:16], error)

    def _play(self) -> str | None:
        requests = [arrival.request for arrival in self.scenario.arrivals]
        work = sum(len(r.prompt_token_ids) + r.params.max_tokens * r.params.width for r in requests)
        limit = _STEPS_A_TOKEN * work + (self._arrivals[0].step if self._arrivals else 0)
        idle = 0
        while self._arrivals or self._aborts or self.engine.has_work():
            self.step += 1
            self._arrive_and_abort()
            outputs = self.engine.step() if self.engine.has_work() else []
            for output in outputs:
                key = (output.request_id, output.index)
                self.tokens.setdefault(key, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    self.ends[key] = output.finish_reason
            row = self._record()
            idle += 1
            if row["prefill_tokens"] or row["decode_tokens"] or outputs or self._arrivals:
                idle = 0
            if (idle > _IDLE_STEPS and not self._aborts) or self.step > limit:
                return f"no progress at step {self.step}: {self._waiting} sequences wait and {self._running} run"
        return None

    def _arrive_and_abort(self) -> None:
        while self._arrivals and self._arrivals[-1].step <= self.step:
            request = self._arrivals.pop().request
            try:
                self.engine.add_request(request)
            except QueueFull:
                self.counters["refused_queue_full"] += 1
            except ValueError:
                self.counters["refused_never_fits"] += 1
        while self._aborts and self._aborts[-1][0] <= self.step:
            arrival = self.scenario.arrivals[self._aborts.pop()[1]]
            self.engine.abort(arrival.request.request_id, index=arrival.abort_index)

    def _on_launch(self, plan: StepPlan) -> None:
        self._launched = self.kv.stats()
        self._count_sequences()

    def _count_sequences(self) -> None:
        scheduler = self.engine.scheduler
        self._running, self._waiting = len(scheduler.running), scheduler.num_waiting + scheduler.num_parked

    def _record(self) -> dict[str, int]:
        """Records what this step did, with the memory in use when it was launched and the waste at its end."""
        stats = self.engine.stats()
        growing, before = _growing(stats), self._last
        if self._launched is None:
            self._count_sequences()
        kv = self._launched or stats.kv
        row = {name: now - before[name] for name, now in growing.items()}
        row["running"], row["waiting"] = self._running, self._waiting
        if self.scenario.config.layout == "paged":
            row["free_pages"], row["cached_pages"] = kv.pages_free, kv.pages_cached
        else:
            row["free_slots"] = kv.slots_free
        row["wasted_slots"] = stats.kv_waste_slots
        row["host_slots"] = kv.host_slots_used
        self.rows.append(row)
        self._add(row, kv, stats)
        self._last, self._launched = growing, None
        return row

    def _add(self, row: Mapping[str, int], kv: KVStats, stats: EngineStats) -> None:
        counters = self.counters
        prefill, decode = bool(row["prefill_tokens"]), bool(row["decode_tokens"])
        counters[_STEP_KINDS[prefill, decode]] += 1
        if prefill and decode:
            counters["mixed_step_tokens"] += row["prefill_tokens"] + row["decode_tokens"]
        counters["running_steps"] += row["running"]
        counters["waiting_steps"] += row["waiting"]
        counters["shared_slot_steps"] += stats.kv.slots_shared
        peaks = {
            "peak_running": row["running"],
            "peak_waiting": row["waiting"],
            "peak_swapped": stats.num_requests_swapped,
            "peak_pages_owned": kv.pages_owned,
            "peak_slots_reserved": kv.slots_reserved,
            "peak_host_slots": kv.host_slots_used,
        }
        for name, value in peaks.items():
            counters[name] = max(counters[name], value)

    def _totals(self) -> dict[str, int]:
        stats = self.engine.stats()
        totals = dict.fromkeys(COUNTERS, 0) | _growing(stats) | self.counters
        totals |= {f"finished_{reason}": count for reason, count in stats.finished.items()}
        totals |= {f"slot_steps_{use}": slots for use, slots in stats.slot_steps.items()}
        totals |= {
            "steps": stats.steps,
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "total_pages": stats.kv.pages_total,
            "total_slots": stats.kv.slots_total,
            "total_host_slots": stats.kv.host_slots_total,
            "page_table_bytes": stats.kv.page_table_bytes,
            "bytes_per_slot": stats.bytes_per_slot,
        }
        del totals["finished"]
        return totals

    def _leak(self) -> str | None:
        """Says what the idle engine still owns, as an error; None if nothing."""
        kv = self.engine.stats().kv
        thing = "page" if self.scenario.config.layout == "paged" else "reservation"
        owned = {thing: kv.pages_owned, f"pinned {thing}": kv.pages_pinned, "host slot": kv.host_slots_used}
        if leaked := [plural(count, what) for what, count in owned.items() if count]:
            return f"{' and '.join(leaked)} leaked: still owned at the end, with no sequence left"
        if missing := kv.slots_total - kv.slots_free - kv.slots_cached:
            return f"{plural(missing, 'slot')} neither free nor cached at the end, with no sequence left"
        try:
            self.engine.check_integrity()
        except AssertionError as error:
            return f"the idle engine's bookkeeping is wrong: {_where(error)}"
        return None


def _growing(stats: EngineStats) -> dict[str, int]:
    return {
        "prefill_tokens": stats.prefill_tokens_scheduled,
        "decode_tokens": stats.decode_tokens_scheduled,
        "preempted": stats.num_preemptions,
        "recomputed_tokens": stats.recomputed_tokens,
        **{name: getattr(stats.counters, name) for name in _OF_THE_KV},
        "forks": stats.forks,
        "finished": sum(stats.finished.values()),
    }


def _where(error: BaseException) -> str:
    """An exception in one line, with the function it came from."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{f': {text}' if text else ''} ({Path(frame.filename).name}, {frame.name})"


if __name__ == "__main__":
    wanted = set(sys.argv[2:])
    chosen = [s for s in read_counter_workload(Path(sys.argv[1])).scenarios if s.name in wanted]
    json.dump({name: dataclasses.asdict(run) for name, run in replay_all(chosen).items()}, sys.stdout)
