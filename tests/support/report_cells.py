"""Cells with hand-set numbers, for findings and sentences that can be computed on paper."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.metrics.model import CanaryCounts, LoadMetrics, PooledLatencies
from kvbench.runs.engine_time import EngineEffect, EngineTime
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Repeat, Run
from kvbench.runs.results import CacheBounds, CacheCounts, Capacity, MachineReport, Manifest
from tests.support.records import put

MIB = 1024 * 1024

# tokens/s of three repeats, where others have 100; WIDE is not told apart
FAST, FASTER, SLOW, WIDE = (150.0, 151.0, 152.0), (200.0, 201.0, 202.0), (50.0, 51.0, 49.0), (50.0, 100.0, 250.0)
LATE, SOON = (900.0, 910.0, 905.0), (100.0, 101.0, 102.0)  # p95 TTFT in ms, where others have 500


def cell(
    layout: str = "paged",
    *,
    load: float = 24,
    mode: str = "closed",
    throughput: tuple[float, ...] = (100.0, 100.0, 100.0),
    tpot: tuple[float, ...] = (20.0, 20.0, 20.0),
    ttft: tuple[float, ...] = (500.0, 500.0, 500.0),
    running: float | None = None,
    preemptions: int = 0,
    failed: int = 0,
    budget: int | None = 128 * MIB,
    reasons: tuple[str, ...] = (),
    baseline: bool | None = None,
    client: dict[str, Any] | None = None,
    machine: dict[str, Any] | None = None,
    notes: dict[str, Any] | None = None,
    observed: dict[str, float] | tuple[dict[str, float], ...] = (),
    server: dict[str, float] | None = None,
    capacity: dict[str, Any] | None = None,
    **settings: Any,
) -> MeasuredCell:
    """One cell; `throughput`, `tpot` (p50, ms) and `ttft` (p95, ms) have one value a repeat.

    ``observed``: gauges of every repeat, or one mapping a repeat; ``server``: further counters of each.
    """
    every: dict[str, Any] = {"layout": layout, **({"page_size": 16} if layout == "paged" else {}), **settings}
    every = {key: value for key, value in every.items() if value is not None}
    counted = {"num_preemptions_total": preemptions, "recomputed_tokens_total": preemptions * 100, **(server or {})}
    known = {} if running is None else {"running_mean": running}
    repeats = tuple(
        Repeat(
            repeat=i,
            metrics=LoadMetrics.model_validate(
                {"completed": 48 - failed, "failed": failed, "client": client or {}, **_measured(*figures)}
            ),
            server=counted,
            observed=known | (observed if isinstance(observed, dict) else observed[i] if observed else {}),
            machine=MachineReport.model_validate(machine or {}),
        )
        for i, figures in enumerate(zip(throughput, tpot, ttft, strict=False))
    )
    name = f"paged (page {every.get('page_size')})" if layout == "paged" else layout
    extra = "".join(f" + {key} {value}" for key, value in settings.items() if key != "page_size")
    return MeasuredCell(
        cell_id=f"{name}{extra}-{load:g}",
        config_id=name + extra,
        name=name + extra,
        is_baseline=(layout == "paged" and not settings) if baseline is None else baseline,
        varied=settings,
        settings=every,
        load=MeasuredLoad(mode, load),
        capacity=Capacity.model_validate(({} if budget is None else {"kv_budget_bytes": budget}) | (capacity or {})),
        repeats=repeats,
        pooled=PooledLatencies.model_validate(_pooled(sorted(tpot)[len(tpot) // 2], sorted(ttft)[len(ttft) // 2])),
        valid=not reasons,
        invalid_reasons=reasons,
        folder=Path("/nonexistent"),
        notes=notes or {},
    )


def stored(one: MeasuredCell, folder: Path, requests: Any = None, gauges: Any = None) -> MeasuredCell:
    """The cell with a folder that holds its requests.parquet and server.parquet (frames; None: no such file)."""
    where = folder / one.cell_id
    where.mkdir(parents=True)
    for frame, name in ((requests, "requests.parquet"), (gauges, "server.parquet")):
        if frame is not None:
            frame.to_parquet(where / name)
    return replace(one, folder=where)


def refused(served: int = 20, message: str = "Context size has been exceeded.", **how: Any) -> MeasuredCell:
    """A cell of one repeat whose server answered ``served`` of 48 requests and the others with ``message``."""
    failed = 48 - served
    one = cell(failed=failed, throughput=(60.0,), **how)
    put(one.repeats[0].metrics, output_throughput=40.0)
    put(one.repeats[0].metrics, failure_messages={"server_error": {"message": message, "requests": failed}})
    told = f'repeat 0: served {served} of 48 requests; {failed} of 48: "{message}"'
    return replace(one, valid=False, refused=(told,))


def wrong(**how: Any) -> MeasuredCell:
    """A cell that answered 2 of 40 canaries wrongly."""
    counts = {"sent": 41, "answered": 40, "wrong": 2, "distinct": 20, "first_wrong": "passkey-7 (request 12), differs"}
    told = ("repeat 1: 2 of 40 canaries were answered wrongly, first passkey-7 (request 12), differs",)
    return replace(cell(**how), valid=False, wrong_answers=told, canaries=CanaryCounts(**counts))


def mark_few(one: MeasuredCell, latency: str) -> None:
    """Marks the p95 of a latency as one of too few samples."""
    for figures in (one.pooled, one.pooled.steady_latency):
        put(figures.distribution(latency), uncertain=("p95",))


def with_cache(repeat: Repeat, counts: Mapping[str, Any]) -> Repeat:
    """``repeat`` with these counts of the prefix cache; ``low`` and ``high``: the possible hits."""
    cache, bounds = CacheCounts.model_validate(counts), None
    if "high" in counts:
        bounds = CacheBounds(low=counts["low"], high=counts["high"])
    return repeat.model_copy(update={"prefix_cache": cache, "prefix_cache_bounds": bounds})


def _measured(*figures: float) -> dict[str, Any]:
    throughput, tpot, ttft = map(_stored, figures)
    times = {"tpot_ms": {"p50": tpot}, "ttft_ms": {"p95": ttft, "n": 40}, "itl_ms": {"p95": tpot}}
    window = {"steady_start_s": -1.0, "steady_end_s": 1e9}
    return {"steady_output_throughput": throughput, **times, "steady_latency": times, **window}


def _stored(figure: float) -> float | None:
    """NaN is null in a file."""
    return None if math.isnan(figure) else figure


def _pooled(*figures: float) -> dict[str, Any]:
    tpot, ttft = map(_stored, figures)
    latencies = {"tpot_ms": {"p50": tpot}, "ttft_ms": {"p95": ttft}, "itl_ms": {"p95": tpot}}
    pooled = {name: {**values, "uncertain": ()} for name, values in latencies.items()}
    return pooled | {"steady_latency": pooled}


def run(
    *cells: MeasuredCell,
    status: str = "complete",
    missing: tuple[str, ...] = (),
    engine_time: EngineTime | None = None,
    **manifest: Any,
) -> Run:
    """A run of these cells; `manifest`: further entries of its manifest."""
    known = {"status": status, "workload": {}, "plan": (), **manifest}
    folder, stored = Path("/nonexistent/mixed/now"), Manifest.model_validate(known)
    return Run(folder, stored, cells, missing, (), (), (), engine_time=engine_time)


def in_engine_time(
    *effects: tuple[MeasuredCell, str, float, float, float, str], smallest_seen: float = 0.01, **facts: Any
) -> EngineTime:
    """(cell, metric, ratio, low, high, call) of each effect, of three launches."""
    stored = tuple(engine_effect(*effect, smallest_seen) for effect in effects)
    return EngineTime.model_validate({"finished": True, "effects": stored, **facts})


def engine_effect(
    one: MeasuredCell, metric: str, ratio: float, low: float, high: float, call: str, smallest_seen: float | None
) -> EngineEffect:
    """An effect of three launches, its call in today's words or those of older files."""
    return EngineEffect.model_validate(
        {"cell": one.cell_id, "metric": metric, "ratio": ratio, "low": low, "high": high, "call": call,
         "smallest_seen": smallest_seen, "launches": 3}
    )  # fmt: skip
