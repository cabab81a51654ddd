"""What a load leaves behind: requests.parquet and load.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvbench.load.samples import Sample, unknown_answers, write_samples
from kvbench.load.session import LoadSession
from kvbench.load.spec import LoadSpec
from kvbench.load.validity import client_report, invalid_reasons, other_prompts, percentile_ms, short_outputs
from kvbench.metrics.steady_window import steady_state
from kvbench.requests.request import RequestList

MAX_WALL_STEP_S = 0.05
_MAX_UNSTAMPED_SHARE = 0.01


@dataclass
class Clocked:
    """What a process measured of itself. ``cpu_s`` over ``wall_s``; ``wall_step_s``: how far the wall clock jumped.

    Both are over the streaming; ``parse_cpu_s`` is what it took to parse what was left when the last stream returned.
    ``reads``: from streams, of which the kernel did not stamp ``unstamped_reads`` as the bytes arrived; ``reopened``:
    kept connections that turned out to be closed and were opened anew.
    """

    started_unix: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    wall_step_s: float = 0.0
    priority: str = "normal"
    reads: int = 0
    unstamped_reads: int = 0
    reopened: int = 0
    parse_cpu_s: float = 0.0

    @property
    def kernel_stamps(self) -> bool:
        """Whether times are of the bytes' arrival, not of their reading: at least 99 % of the reads had a stamp."""
        return self.reads > 0 and self.unstamped_reads <= _MAX_UNSTAMPED_SHARE * self.reads


@dataclass(frozen=True)
class Outcome:
    """What came of a load. Times of ``samples`` and ``zero`` [s, perf_counter of this process].

    ``client``: the client's own figures; ``reasons``: what speaks against the load beside them. ``locust_totals``:
    requests and failures that Locust counted, for comparison.
    """

    samples: Sequence[Sample]
    zero: float
    max_in_flight: int
    clocked: Clocked
    client: dict[str, Any]
    reasons: list[str] = field(default_factory=list)
    locust_totals: tuple[int, int] = (0, 0)


def outcome_of(
    session: LoadSession, clocked: Clocked, lags: Sequence[float], locust_totals: tuple[int, int]
) -> Outcome:
    """The outcome of a load that this process drove alone. ``lags``: the probe's [s]."""
    samples = session.samples
    client = client_report(samples, lags, clocked.cpu_s, clocked.wall_s, session.spec.mode, clocked.kernel_stamps)
    client |= {"priority": clocked.priority, "reopened_connections": clocked.reopened}
    client |= {"unstamped_share": clocked.unstamped_reads / clocked.reads if clocked.reads else None}
    client |= own_costs(samples, client["chunks"], [clocked])
    return Outcome(samples, session.zero, session.presence.most_open, clocked, client, [], locust_totals)


def own_costs(samples: Sequence[Sample], chunks: int, clocked: Sequence[Clocked]) -> dict[str, Any]:
    """What the client's own work took, of all its processes (``clocked``).

    ``cpu_s``: CPU seconds during the streaming, ``parse_cpu_s``: of the parsing that was left after it;
    ``cpu_us_per_chunk`` is of both. ``read_delay_p99_ms``: by how much later turns were due than their users had
    thought, because the answer before had first to be parsed (``converse``); None without such turns.
    """
    cpu_s, parse_cpu_s = sum(c.cpu_s for c in clocked), sum(c.parse_cpu_s for c in clocked)
    return {
        "cpu_s": cpu_s,
        "parse_cpu_s": parse_cpu_s,
        "cpu_us_per_chunk": (cpu_s + parse_cpu_s) / chunks * 1e6 if chunks else None,
        "read_delay_p99_ms": percentile_ms(read_delays(samples), 99),
    }


def read_delays(samples: Sequence[Sample]) -> list[float]:
    """Seconds from the end of each later turn's thinking to its intended start; 0 where thinking took longer."""
    ends = {(s.request.session, s.request.turn): s.end for s in samples if s.request.session is not None}
    later = [s for s in samples if s.request.session is not None and s.request.turn and s.sent]
    due = [ends.get((s.request.session, s.request.turn - 1), s.t0) + s.request.think_s for s in later]
    return [max(0.0, s.t0 - when) for s, when in zip(later, due, strict=True)]


def write_outcome(spec: LoadSpec, requests: RequestList, outcome: Outcome, ended_well: bool = True) -> dict[str, Any]:
    """Writes both files into ``spec.out_dir`` and returns load.json's content.

    Requests that were never finished make the load incomplete, as does ``ended_well`` False.
    """
    samples, zero, clocked = outcome.samples, outcome.zero, outcome.clocked
    short, too_short = short_outputs(samples, spec.ignore_eos)
    of_server = too_short + other_prompts(samples, spec.dialect)
    missing = len(requests) - sum(s.completion.error_kind != "interrupted" for s in samples)
    load = {
        "started_at": datetime.fromtimestamp(clocked.started_unix, UTC).isoformat(),
        "start_unix": clocked.started_unix,
        "duration_s": clocked.wall_s,
        "zero_perf_counter": zero,
        "wall_clock_step_s": clocked.wall_step_s,
        "mode": spec.mode,
        "concurrency": spec.concurrency,
        "max_concurrency": spec.max_concurrency,
        "request_rate": spec.request_rate,
        "num_requests": len(requests),
        "completed": sum(s.completion.ok for s in samples),
        "failed": sum(s.sent and not s.completion.ok for s in samples),
        "incomplete": missing > 0 or not ended_well,
        "max_in_flight": outcome.max_in_flight,
        "client": {**outcome.client, "short_outputs": short},
        "invalid_reasons": invalid_reasons(outcome.client, missing) + outcome.reasons + of_server,
        "notes": {**requests.notes, **_clock_note(clocked), **_history_note(samples)},
        "locust": {"num_requests": outcome.locust_totals[0], "num_failures": outcome.locust_totals[1]},
    }
    window = steady_state(
        [s.t0 - zero for s in samples],
        [s.ts - zero for s in samples],
        [s.end - zero for s in samples],
        load,
        [s.request.session for s in samples],
    ).window
    load |= {"target_start_s": window[0] if window else None, "target_end_s": window[1] if window else None}
    out = Path(spec.out_dir)
    write_samples(out / "requests.parquet", samples, zero)
    part = out / "load.json.part"
    part.write_text(json.dumps(load, indent=2) + "\n", encoding="utf-8")
    part.replace(out / "load.json")
    return load


def _history_note(samples: Sequence[Sample]) -> dict[str, str]:
    said = unknown_answers(samples)
    return {} if said is None else {"history": said}


def _clock_note(clocked: Clocked) -> dict[str, str]:
    """No measured time depends on the wall clock; a step of it is noted for whoever compares with other logs."""
    if abs(clocked.wall_step_s) <= MAX_WALL_STEP_S:
        return {}
    return {
        "wall_clock": f"the wall clock was set by {clocked.wall_step_s:+.3f} s during the load; times of day of other "
        "logs do not match this load's beyond that, its own times are of a clock that is never set."
    }
