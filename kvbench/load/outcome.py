"""What a load leaves behind: requests.parquet and load.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvbench.load.probe import client_report, invalid_reasons
from kvbench.load.requests import RequestList
from kvbench.load.samples import write_samples
from kvbench.load.session import LoadSession
from kvbench.load.spec import LoadSpec
from kvbench.metrics import steady_window_of


@dataclass(frozen=True)
class Measured:
    """The process's own measurements of one load. ``lags`` [s]; ``cpu_s`` of this process over ``wall_s``."""

    started_unix: float
    cpu_s: float
    wall_s: float
    priority: str
    lags: list[float]


def write_outcome(
    spec: LoadSpec,
    requests: RequestList,
    session: LoadSession,
    measured: Measured,
    locust_totals: tuple[int, int],
    ended_well: bool = True,
) -> dict[str, Any]:
    """Writes both files into ``spec.out_dir`` and returns load.json's content.

    ``locust_totals``: requests and failures that Locust counted, for comparison. Requests that were never
    finished make the load incomplete, as does ``ended_well`` False.
    """
    samples, zero = session.samples, session.zero
    client = client_report(samples, measured.lags, measured.cpu_s, measured.wall_s, spec.mode)
    client["priority"] = measured.priority
    missing = len(requests) - sum(s.completion.error_kind != "interrupted" for s in samples)
    window = steady_window_of(
        [s.t0 - zero for s in samples],
        [s.ts - zero for s in samples],
        [s.end - zero for s in samples],
        spec.mode,
        spec.concurrency,
    )
    load = {
        "started_at": datetime.fromtimestamp(measured.started_unix, UTC).isoformat(),
        "start_unix": measured.started_unix,
        "duration_s": measured.wall_s,
        "zero_perf_counter": zero,
        "mode": spec.mode,
        "concurrency": spec.concurrency,
        "request_rate": spec.request_rate,
        "num_requests": len(requests),
        "completed": sum(s.completion.ok for s in samples),
        "failed": sum(not s.completion.ok for s in samples),
        "incomplete": missing > 0 or not ended_well,
        "target_start_s": window[0] if window else None,
        "target_end_s": window[1] if window else None,
        "max_in_flight": session.max_in_flight,
        "client": client,
        "invalid_reasons": invalid_reasons(client, missing),
        "notes": requests.notes,
        "locust": {"num_requests": locust_totals[0], "num_failures": locust_totals[1]},
    }
    out = Path(spec.out_dir)
    write_samples(out / "requests.parquet", samples, zero)
    part = out / "load.json.part"
    part.write_text(json.dumps(load, indent=2) + "\n", encoding="utf-8")
    part.replace(out / "load.json")
    return load
