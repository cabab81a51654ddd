"""What moved with a timing that failed: the servers' own counters and times, pair by pair.

Per cell and figure: the value of each load, normalised (time a step, time a request, events per 1,000 output tokens),
candidate against base within each pair, with the 95 % Student t interval of the mean over the pairs. What is listed
lies beyond that interval and changed by more than the floor. Dozens of figures are looked at, so one in twenty of those
that did not change can be listed all the same: this explains a verdict and is never one.

Where the time went is told in means, since times add up and percentiles do not: the mean time between tokens against
the mean step and its phases (schedule, prepare, execute, sample, output), the mean time to the first token against its
two parts, queue and prefill (exact: the server takes all three at the same moments). A step's phases make up the time
between tokens only nearly: a long step with many sequences counts once among the steps, and once for each of them
among the gaps; and a preempted sequence waits outside its steps. So shares need not add up to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from kvbench.common.text import listing
from kvbench.gate.timing.plan import BASE, CANDIDATE
from kvbench.gate.verdict.verdict import FAIL, Finding, Moved

FLOOR = 0.01  # of a change that is listed
CONFIDENCE = 0.95
_MOST_NAMED = 3
_NAMED_FROM = 0.1  # of the difference: what is named in the sentence

Counters = Mapping[str, Any]
_Value = Callable[[Counters], float | None]

ITL, TTFT, E2E = "inter_token_latency", "time_to_first_token", "e2e_request_latency"
_LATENCIES = {ITL: "between tokens", TTFT: "to the first token", E2E: "from arrival to the last token"}
_PHASES = ("schedule", "prepare", "execute", "sample", "output")
_STEP_PARTS = {
    **{f"step_time_seconds_total_{phase}": phase for phase in _PHASES},
    "swap_seconds_total": "swap",
    "hash_seconds_total": "page hashes",
}
_INSIDE = {"swap": "prepare: copies and swaps", "page hashes": "hashing pages for the prefix cache"}
_REQUEST_PARTS = {"request_queue_time": "queue", "request_prefill_time": "prefill", "request_decode_time": "decode"}
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
    """One normalised figure. ``part_of``: the latency that it is a part of, in the same unit."""

    name: str
    title: str
    unit: str
    value: _Value
    part_of: str | None = None
    event: bool = False


@dataclass(frozen=True)
class _Paired:
    """One figure's values over the pairs that both sides tell."""

    figure: _Figure
    base: np.ndarray
    candidate: np.ndarray

    @property
    def difference(self) -> float:
        return float(np.mean(self.candidate - self.base))

    @property
    def always(self) -> bool:
        """An event that base never has and the candidate has in every pair, or the same difference in every pair."""
        apart = self.candidate - self.base
        whole = bool(np.all(apart == apart[0])) and apart[0] != 0
        return self.figure.event and (whole or (not self.base.any() and bool(np.all(self.candidate > 0))))


def moved_between(
    counters: Mapping[str, Mapping[str, Sequence[Counters]]], findings: Sequence[Finding] = (), floor: float = FLOOR
) -> tuple[Moved, ...]:
    """What moved in the cells that failed (all, where none did alone): what differs in every pair first, then what
    explains most of the latency's difference.

    ``counters``: counters.json of each load, by cell, side (base, candidate) and pair. ``floor``: least relative change
    of what is listed. Empty for fewer than two pairs, and for a server that tells nothing.
    """
    found = []
    for cell in _cells(counters, findings):
        paired = _paired(counters[cell])
        latencies = {p.figure.name: p for p in paired if p.figure.name in _LATENCIES and _moved(p, 0.0)}
        judged = _judged(findings)
        for each in paired:
            if each.always or _moved(each, floor):
                whole = latencies.get(each.figure.part_of or "")
                share = each.difference / whole.difference if whole and whole.figure.name in judged else None
                found.append((each.always, _as_moved(each, cell, share)))
    found.sort(key=lambda one: (not one[0], -(one[1].share or 0.0), -_size(one[1]), one[1].where, one[1].name))
    return tuple(moved for _, moved in found)


def where_it_went(
    moved: Sequence[Moved],
    findings: Sequence[Finding] = (),
    counters: Mapping[str, Mapping[str, Sequence[Counters]]] | None = None,
) -> str:
    """One sentence on where the time went; empty where nothing can be said.

    ``counters``: as ``moved_between`` took them; with them it also says what did not move, and what is not told.
    """
    words = [text for name in _judged(findings) if (text := _latency_words(name, moved, counters))]
    new = [m for m in moved if m.change is None]
    if new:
        each = ", ".join(f"{m.title} ({m.candidate:.3g} {m.unit})" for m in new[:_MOST_NAMED])
        words.append(f"new in the candidate: {each}")
    if words:
        return "; ".join(words)
    if counters is None:
        return ""
    told = {p.figure.name for cell in _cells(counters, findings) for p in _paired(counters[cell])}
    if not told & {*_LATENCIES, *_STEP_PARTS}:
        return "the server's /metrics tell no times in two pairs or more, so where the time went is not known"
    return (
        "the server's own mean times did not move beyond chance: what was judged moved in its tail, or outside the "
        "server"
    )


def _latency_words(
    name: str, moved: Sequence[Moved], counters: Mapping[str, Mapping[str, Sequence[Counters]]] | None
) -> str:
    """``98 % of the +2.1 ms between tokens ...``, of the cell where that latency changed most."""
    rows = [m for m in moved if m.name == name]
    if not rows:
        return ""
    row = max(rows, key=_size)
    difference = row.candidate - row.base
    parts = {_short(m.name): m.share for m in moved if m.where == row.where and m.share is not None}
    ours = (_STEP_PARTS if name == ITL else _REQUEST_PARTS).values()
    named = sorted(
        ((s, p) for p in ours if p not in _INSIDE and (s := parts.get(p) or 0.0) >= _NAMED_FROM), reverse=True
    )
    several = f" in {row.where}" if len({m.where for m in moved}) > 1 else ""
    whole = f"the {difference:+.3g} ms {_LATENCIES[name]} (mean){several}"
    if named:
        moving = parts.get("swap") or 0.0  # copies and swaps are a part of prepare
        said = {"prepare": "prepare (copies and swaps)"} if 2 * moving >= (parts.get("prepare") or 0.0) > 0 else {}
        shares = " and ".join(f"{100 * share:.0f} % in {said.get(part, part)}" for share, part in named[:_MOST_NAMED])
        text = f"of {whole}, {shares}"
    else:
        text = f"no part of the server's steps explains {whole}"
    still = _still(row.where, moved, counters)
    return f"{text}; {listing(still)} did not move" if still else text


def _still(
    cell: str, moved: Sequence[Moved], counters: Mapping[str, Mapping[str, Sequence[Counters]]] | None
) -> list[str]:
    """Of the usual suspects, those that the server tells and that are not listed as moved."""
    if counters is None or cell not in counters:
        return []
    suspects = {**_REQUEST_PARTS, **_STEP_PARTS, "num_preemptions_total": "preemption"}
    gone = {m.name for m in moved if m.where == cell}
    told = {p.figure.name for p in _paired(counters[cell])}
    return [title for name, title in suspects.items() if name in told and name not in gone and title != "page hashes"]


def _cells(counters: Mapping[str, Any], findings: Sequence[Finding]) -> list[str]:
    """The cells that failed by themselves, else all."""
    failed = [f for f in findings if f.outcome == FAIL and f.suite == "cell"]
    return [cell for cell in counters if any(_is_of(f, cell) for f in failed)] or list(counters)


def _is_of(finding: Finding, cell: str) -> bool:
    """Whether a finding is of that cell: its id names the cell as a whole, not as the beginning of another's name."""
    before, sign, after = finding.id.partition(cell)
    return bool(sign) and before[-1:] in ("", "/", " ", ":") and after[:1] in ("", "/", " ", ":")


def _judged(findings: Sequence[Finding]) -> list[str]:
    """The latencies whose difference is to be explained; a throughput's is the time of a whole request."""
    failed = [f.metric or "" for f in findings if f.outcome == FAIL] or ["itl", "ttft"]
    found = [ITL] if any("itl" in m or "tpot" in m for m in failed) else []
    found += [TTFT] if any("ttft" in m for m in failed) else []
    return found or [ITL, TTFT]


def _paired(loads: Mapping[str, Sequence[Counters]]) -> list[_Paired]:
    """Every figure that both sides tell in at least two pairs."""
    found = []
    for figure in _FIGURES:
        values = [(figure.value(b), figure.value(c)) for b, c in zip(loads[BASE], loads[CANDIDATE], strict=True)]
        known = [(b, c) for b, c in values if b is not None and c is not None]
        if len(known) >= 2:
            base, candidate = np.array(known, dtype=np.float64).T
            found.append(_Paired(figure, base, candidate))
    return found


def _moved(paired: _Paired, floor: float) -> bool:
    change, interval = _change(paired)
    if interval is None:  # nothing to set it against: by the difference alone
        low, high = _t_interval(paired.candidate - paired.base)
        return low > 0 or high < 0
    low, high = interval
    return (low > 0 or high < 0) and change is not None and abs(change) > floor


def _change(paired: _Paired) -> tuple[float | None, tuple[float, float] | None]:
    """candidate / base - 1 and its interval: of the log ratios, or of the differences where a value is 0."""
    base, candidate = paired.base, paired.candidate
    if np.all(base > 0) and np.all(candidate > 0):
        ratios = np.log(candidate / base)
        low, high = _t_interval(ratios)
        return float(np.expm1(ratios.mean())), (float(np.expm1(low)), float(np.expm1(high)))
    mean = float(base.mean())
    if mean <= 0:
        return None, None
    low, high = _t_interval(candidate - base)
    return paired.difference / mean, (low / mean, high / mean)


def _t_interval(values: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of the mean (Student). Of equal values: that value."""
    n, mean = len(values), float(values.mean())
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * float(values.std(ddof=1)) / np.sqrt(n)
    return mean - half, mean + half


def _as_moved(paired: _Paired, cell: str, share: float | None) -> Moved:
    figure = paired.figure
    change, interval = _change(paired)
    base, candidate = float(paired.base.mean()), float(paired.candidate.mean())
    return Moved(figure.name, figure.title, cell, figure.unit, base, candidate, change, interval, share)


def _size(moved: Moved) -> float:
    return float("inf") if moved.change is None else abs(moved.change)


def _short(name: str) -> str:
    return _STEP_PARTS.get(name) or _REQUEST_PARTS.get(name) or name


def _ratio(part: str, whole: str, scale: float) -> _Value:
    def value(counters: Counters) -> float | None:
        known = counters.get(part) is not None and counters.get(whole)
        return scale * counters[part] / counters[whole] if known else None

    return value


def _figures() -> Iterable[_Figure]:
    for name, words in _LATENCIES.items():
        yield _Figure(name, f"time {words}, mean", "ms", _mean_ms(name))
    for name, phase in _STEP_PARTS.items():
        title = f"{_INSIDE.get(phase, phase)}, a step"
        yield _Figure(name, title, "ms", _ratio(name, "steps_total", 1000.0), ITL)
    for name, part in _REQUEST_PARTS.items():
        yield _Figure(name, f"{part}, a request", "ms", _mean_ms(name), None if part == "decode" else TTFT)
    for name, title in _EVENTS.items():
        per_token = _ratio(name, "generation_tokens_total", 1000.0)
        yield _Figure(name, title, "per 1,000 output tokens", per_token, event=True)
    for name, (title, unit) in _LEVELS.items():
        yield _Figure(name, title, unit, lambda counters, name=name: counters.get(name))


def _mean_ms(name: str) -> _Value:
    return _ratio(f"{name}_seconds_sum", f"{name}_seconds_count", 1000.0)


_FIGURES = tuple(_figures())
