"""The servers' own counters and times that moved with a timing that failed, pair by pair.

Each figure of a cell (time a step, time a request, events per 1,000 output tokens) is compared within each pair. It is
listed if the 95 % Student t interval of its mean change excludes 0 and the change is above the floor. With dozens of
figures, one in twenty that did not change may be listed too: the list explains a verdict and decides nothing.

Where the time went is shown in means, because times add up and percentiles do not. The mean time to the first token is
exactly queue plus prefill. The mean time between tokens is nearly the mean step with its phases (schedule, prepare,
execute, sample, output): a step with many sequences counts once among the steps and many times among the gaps, and a
preempted sequence waits outside its steps. So shares need not add up to 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvbench.common.stats import bounded_log, t_interval
from kvbench.common.text import listing
from kvbench.gate.sentences import say
from kvbench.gate.timing.plan import BASE, CANDIDATE
from kvbench.gate.verdict.verdict import FAIL, Finding, Moved

FLOOR = 0.01  # of a change that is listed
_MOST_NAMED = 3
_NAMED_FROM = 0.1  # of the difference: what is named in the sentence

Counters = Mapping[str, float | None]
ByCell = Mapping[str, Mapping[str, Sequence[Counters]]]
"""counters.json of each load, by cell, side (base, candidate) and pair."""

ITL, TTFT, E2E = "inter_token_latency", "time_to_first_token", "e2e_request_latency"
_LATENCIES = {ITL: "between tokens", TTFT: "to the first token", E2E: "from arrival to the last token"}
_STEP_PARTS = {
    "step_time_seconds_total_schedule": "schedule",
    "step_time_seconds_total_prepare": "prepare",
    "step_time_seconds_total_execute": "execute",
    "step_time_seconds_total_sample": "sample",
    "step_time_seconds_total_output": "output",
    "swap_seconds_total": "swap",
    "hash_seconds_total": "prefix cache",
}
_INSIDE = {"swap": "prepare: copies and swaps", "prefix cache": "finding and storing pages in the prefix cache"}
_REQUEST_PARTS = {"request_queue_time": "queue", "request_prefill_time": "prefill", "request_decode_time": "decode"}
_PARTS = {ITL: _STEP_PARTS, TTFT: _REQUEST_PARTS}
_EVENTS = {
    "num_preemptions_total": "preemptions",
    "recomputed_tokens_total": "recomputed tokens",
    "swapped_out_slots_total": "slots swapped out",
    "swapped_in_slots_total": "slots swapped in",
    "swap_lost_slots_total": "slots that found no swap space",
    "copied_pages_total": "pages copied on write",
    "copied_slots_total": "slots copied on write",
    "allocated_pages_total": "pages allocated",
    "prefix_cache_hits_total": "prompt tokens from the prefix cache",
    "prefix_cache_evictions_total": "pages evicted from the prefix cache",
    "refused_fragmented_total": "waits for want of one free piece",
    "forks_total": "forks",
    "steps_total": "steps",
    "replayed_steps_total": "steps replayed as a CUDA graph",
    "scheduled_tokens_total_prefill": "prefill tokens computed",
    "scheduled_tokens_total_decode": "decode tokens computed",
    "request_failure_total_engine_error": "engine errors",
}
_LEVELS = {
    "num_requests_running_mean": ("sequences running, mean", ""),
    "num_requests_waiting_mean": ("sequences waiting, mean", ""),
    "kv_cache_usage_perc_mean": ("KV pages in use, mean", ""),
    "kv_waste_slots_mean": ("slots reserved and empty, mean", ""),
    "page_table_bytes_peak": ("page table, peak", "bytes"),
    "process_resident_bytes_peak": ("memory of the server, peak", "bytes"),
}


@dataclass(frozen=True)
class _Figure:
    """A figure: ``scale`` times the counter ``part``, divided by the counter ``whole`` if there is one.

    ``part_of``: the latency that it is a part of, in the same unit.
    """

    name: str
    title: str
    unit: str
    part: str
    whole: str | None
    scale: float = 1000.0
    part_of: str | None = None
    event: bool = False

    def value(self, counters: Counters) -> float | None:
        part, whole = counters.get(self.part), 1.0
        if self.whole is not None:
            whole = counters.get(self.whole)
        return self.scale * part / whole if part is not None and whole else None


def _mean_ms(name: str, title: str, part_of: str | None = None) -> _Figure:
    return _Figure(name, title, "ms", f"{name}_seconds_sum", f"{name}_seconds_count", part_of=part_of)


_PER_TOKEN = ("per 1,000 output tokens", "generation_tokens_total")
_FIGURES = (
    *(_mean_ms(name, f"time {words}, mean") for name, words in _LATENCIES.items()),
    *(
        _Figure(name, f"{_INSIDE.get(part, part)}, a step", "ms", name, "steps_total", part_of=ITL)
        for name, part in _STEP_PARTS.items()
    ),
    *(_mean_ms(n, f"{p}, a request", None if p == "decode" else TTFT) for n, p in _REQUEST_PARTS.items()),
    *(_Figure(n, title, _PER_TOKEN[0], n, _PER_TOKEN[1], event=True) for n, title in _EVENTS.items()),
    *(_Figure(name, title, unit, name, None, scale=1.0) for name, (title, unit) in _LEVELS.items()),
)


class _Paired:
    """A figure over the pairs in which both sides report it.

    ``change``: candidate / base - 1 with its ``interval``, from the log ratios, or from the differences where a value
    is 0; None where the base is 0. ``always``: an event that differs by the same number in every pair, or that only
    the candidate has, in every pair.
    """

    def __init__(self, figure: _Figure, base: np.ndarray, candidate: np.ndarray) -> None:
        self.figure, self.base, self.candidate = figure, float(base.mean()), float(candidate.mean())
        apart = candidate - base
        self.difference = float(apart.mean())
        self.change: float | None = None
        self.interval: tuple[float, float] | None = None
        low, high = t_interval(apart)
        if np.all(base > 0) and np.all(candidate > 0):
            ratios = np.log(candidate / base)
            low, high = (float(np.expm1(bounded_log(end))) for end in t_interval(ratios))
            self.change, self.interval = float(np.expm1(bounded_log(ratios.mean()))), (low, high)
        elif self.base > 0:
            self.change, self.interval = self.difference / self.base, (low / self.base, high / self.base)
        self._beyond_chance = low > 0 or high < 0
        equal = bool(np.all(apart == apart[0])) and apart[0] != 0
        self.always = figure.event and (equal or (not base.any() and bool(np.all(candidate > 0))))

    def moved(self, floor: float) -> bool:
        return self._beyond_chance and (self.change is None or abs(self.change) > floor)


def moved_between(counters: ByCell, findings: Sequence[Finding] = ()) -> tuple[Moved, ...]:
    """Lists what moved in the cells that failed, or in all cells if no cell failed by itself.

    What differs in every pair comes first, then what explains most of the latency's difference. Empty for fewer than
    two pairs.
    """
    rows, judged = [], _judged(findings)
    for cell in _cells(counters, findings):
        paired = _paired(counters[cell])
        differences = {p.figure.name: p.difference for p in paired if p.figure.name in judged and p.moved(0.0)}
        for p in paired:
            if p.always or p.moved(FLOOR):
                figure, whole = p.figure, differences.get(p.figure.part_of or "")
                share = p.difference / whole if whole else None
                what = (figure.name, figure.title, cell, figure.unit)
                row = Moved(*what, p.base, p.candidate, p.change, p.interval, share)
                rows.append((not p.always, -(share or 0.0), -_size(row), cell, p.figure.name, row))
    return tuple(row for *_, row in sorted(rows, key=lambda entry: entry[:-1]))


def where_it_went(moved: Sequence[Moved], findings: Sequence[Finding], counters: ByCell) -> str:
    """Writes one sentence on where the time went, from what ``moved_between`` returned for these counters."""
    words = [text for name in _judged(findings) if (text := _latency_words(name, moved, counters))]
    rows = [row for row in moved if row.change is None]
    if new := [say("explain.new_figure", title=r.title, value=r.candidate, unit=r.unit) for r in rows]:
        words.append(say("explain.new", figures=", ".join(new[:_MOST_NAMED])))
    if words:
        return "; ".join(words)
    reported = {p.figure.name for cell in _cells(counters, findings) for p in _paired(counters[cell])}
    return say("explain.nothing_moved", bool(reported & {*_LATENCIES, *_STEP_PARTS}))


def _latency_words(name: str, moved: Sequence[Moved], counters: ByCell) -> str:
    """Writes ``of the +2.1 ms between tokens (mean), 98 % in execute`` of the cell where it changed most."""
    rows = [m for m in moved if m.name == name]
    if not rows:
        return ""
    row = max(rows, key=_size)
    shares = {_PARTS[name][m.name]: m.share or 0.0 for m in moved if m.where == row.where and m.name in _PARTS[name]}
    named = sorted(((s, p) for p, s in shares.items() if p not in _INSIDE and s >= _NAMED_FROM), reverse=True)
    swapping = 2 * shares.get("swap", 0.0) >= shares.get("prepare", 0.0)  # copies and swaps are a part of prepare
    names = {"prepare": "prepare (copies and swaps)"} if swapping else {}
    text = say(
        "explain.difference",
        bool(named),
        difference=row.candidate - row.base,
        latency=_LATENCIES[name],
        cell=say("explain.cell", len({m.where for m in moved}) > 1, where=row.where),
        shares=" and ".join(say("explain.share", share=100 * s, part=names.get(p, p)) for s, p in named[:_MOST_NAMED]),
    )
    suspects = {**_REQUEST_PARTS, **_STEP_PARTS, "num_preemptions_total": "preemption"}
    changed = {m.name for m in moved if m.where == row.where}
    reported = {p.figure.name for p in _paired(counters[row.where])}
    still = [p for n, p in suspects.items() if n in reported and n not in changed and p != "prefix cache"]
    return text + say("explain.still", bool(still), parts=listing(still))


def _cells(counters: ByCell, findings: Sequence[Finding]) -> list[str]:
    """The cells that failed by themselves, else all."""
    failed = {f.id for f in findings if f.outcome == FAIL and f.suite == "cell"}
    return [cell for cell in counters if any(f"/{cell}/" in f"/{name}/" for name in failed)] or list(counters)


def _judged(findings: Sequence[Finding]) -> list[str]:
    """The latencies to explain: those that failed, both for a throughput."""
    failed = " ".join(f.metric or "" for f in findings if f.outcome == FAIL)
    names = {ITL: ("itl", "tpot"), TTFT: ("ttft",)}
    return [latency for latency, parts in names.items() if any(part in failed for part in parts)] or [ITL, TTFT]


def _paired(loads: Mapping[str, Sequence[Counters]]) -> list[_Paired]:
    paired = []
    for figure in _FIGURES:
        values = [(figure.value(b), figure.value(c)) for b, c in zip(loads[BASE], loads[CANDIDATE], strict=True)]
        pairs = [pair for pair in values if None not in pair]
        if len(pairs) >= 2:
            paired.append(_Paired(figure, *np.array(pairs, dtype=np.float64).T))
    return paired


def _size(moved: Moved) -> float:
    return float("inf") if moved.change is None else abs(moved.change)
