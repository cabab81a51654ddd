"""Combines the repeats of a cell in cells/<cell id>/: pooled raw data and summary.json.

Throughput is aggregated over repeats (each a fresh server; the unit of any comparison); latency percentiles are also
given over the pooled raw samples, for display.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.common.files import write_atomically, write_json, write_text
from kvbench.common.records import Record, read_record, write_record
from kvbench.metrics.canaries import WRONG_ANSWERS, counted
from kvbench.metrics.latency import in_steady
from kvbench.metrics.latency import pooled as pool_samples
from kvbench.metrics.model import Figures, LoadMetrics, LoadOutcome, PooledLatencies, flatten
from kvbench.runs.folder import RunFolder, read_table
from kvbench.runs.results import (
    Capacity,
    CellLoad,
    CellSummary,
    LoadResult,
    Manifest,
    RepeatSummary,
    ServerCounters,
    Spread,
)
from kvbench.workload.design import Cell, LoadPoint

if TYPE_CHECKING:
    import pandas as pd

_SAMPLES = 8
_OF_CANARIES = ("canary", "canary_wrong")
_SAMPLE_COLUMNS = (
    "index", "class", "prompt_tokens", "output_tokens", "finish_reason", "ok", *_OF_CANARIES, "text",
)  # fmt: skip
_OF_ONE_LOAD = "canaries"  # a note that only says which draw a load's canaries are of
_OF_A_REPEAT = ("machine", "prefix_cache", "prefix_cache_bounds", "endpoint", "template_tokens", "prompt_tokens_added")
_TOTALS = ("completed", "failed", "total_input_tokens", "total_output_tokens")
_RATES = ("request_throughput", "output_throughput", "total_token_throughput")
_VLLM_STATISTICS = (("mean", "mean"), ("median", "p50"), ("std", "std"), ("p99", "p99"))  # vLLM's name, ours


def spread(values: Sequence[float]) -> Spread:
    """The spread of a figure over repeats."""
    return Spread(
        median=statistics.median(values),
        mean=statistics.fmean(values),
        min=min(values),
        max=max(values),
        sd=statistics.stdev(values) if len(values) > 1 else None,
        n=len(values),
        values=tuple(values),
    )


def aggregate_cell(run: RunFolder, cell: Cell, manifest: Manifest) -> CellSummary | None:
    """Writes the cell's files from its finished loads; None when there is none yet.

    Disturbed loads are left out if others are valid: ``invalid_repeats`` has their reasons. A load that is invalid for
    another reason, or a cell without a valid load, makes the cell invalid; then all its loads are combined.
    """
    results = {repeat: run.result(cell.cell_id, repeat) for repeat in run.done_repeats(cell.cell_id)}
    if not results:
        return None
    invalid = {repeat: result.invalid_reasons for repeat, result in results.items() if result.invalid_reasons}
    if len(invalid) == len(results) or not all(results[repeat].is_disturbed for repeat in invalid):
        invalid = {}
    results = {repeat: result for repeat, result in results.items() if repeat not in invalid}
    loads = {repeat: run.load(cell.cell_id, repeat) for repeat in results}
    folder = run.cell(cell.cell_id)
    requests = _pool_table(folder, loads, "requests.parquet")
    _pool_table(folder, loads, "server.parquet")
    logs = [
        f"=== {folder.name}, repeat {repeat}\n{(path / 'server.log').read_text(errors='replace')}"
        for repeat, path in loads.items()
        if (path / "server.log").is_file()
    ]
    write_text(folder / "server.log", "\n".join(logs))
    _write_samples(folder / "samples.jsonl", requests)
    wrong_files = [path / WRONG_ANSWERS for path in loads.values()]
    if wrong := "".join(path.read_text(encoding="utf-8") for path in wrong_files if path.is_file()):
        write_text(folder / WRONG_ANSWERS, wrong)
    counters = {}
    for repeat, path in loads.items():
        again = f"remove {path}, and `kvbench sweep --resume` measures it again"
        counters[repeat] = read_record(ServerCounters, path / "counters.json", again).model_extra or {}
    summary = _summary(cell, loads, results, counters, requests, manifest)
    section = manifest.load_section
    load = cell.load if cell.load.request_rate is not None else replace(cell.load, request_rate=_mean_rate(requests))
    vllm = vllm_fields(
        _vllm_metrics(summary),
        load,
        date=summary.repeats[0].started_at or "",
        backend=manifest.backend,
        model=(manifest.model or {}).get("name"),
        burstiness=section.get("burstiness"),
        max_concurrency=section.get("max_concurrency"),
    )
    invalid_repeats = {str(repeat): reasons for repeat, reasons in invalid.items()}
    summary = CellSummary(**summary.fields() | {"invalid_repeats": invalid_repeats} | vllm)
    write_json(folder / "counters.json", {"cell_id": cell.cell_id, "repeats": {str(r): c for r, c in counters.items()}})
    write_record(folder / "summary.json", summary)
    return summary


def _pool_table(folder: Path, loads: Mapping[int, Path], name: str) -> pd.DataFrame:
    """Pools one table of all repeats, with the column ``repeat``; it is written when it has rows."""
    import pandas as pd

    frames = [
        read_table(path / name).assign(repeat=repeat) for repeat, path in loads.items() if (path / name).is_file()
    ]
    pooled = pd.concat([f for f in frames if len(f)] or frames[:1], ignore_index=True) if frames else pd.DataFrame()
    if len(pooled):
        with write_atomically(folder / name) as scratch:
            pooled.to_parquet(scratch, index=False)
    return pooled


def _write_samples(path: Path, requests: pd.DataFrame) -> None:
    """Writes outputs of the first repeat, spread over the load, for a person to read."""
    text = ""
    if "text" in requests:
        first = requests[requests["repeat"] == requests["repeat"].min()]
        shown = first.iloc[:: max(1, len(first) // _SAMPLES)].head(_SAMPLES)
        shown = shown[[c for c in _SAMPLE_COLUMNS if c in shown and not (c in _OF_CANARIES and shown[c].isna().all())]]
        rows = json.loads(shown.to_json(orient="records"))
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_text(path, text)


def pooled_latencies(requests: pd.DataFrame, metrics: Mapping[int, LoadMetrics]) -> PooledLatencies:
    """Pools the latencies of all repeats; ``steady_latency``: those of requests of each repeat's steady window."""
    if not len(requests):
        return PooledLatencies()
    windows = {repeat: (load.steady_start_s, load.steady_end_s) for repeat, load in metrics.items()}
    inside = [
        in_steady(rows, windows[int(repeat)])
        for repeat, rows in requests.groupby("repeat")
        if windows[int(repeat)][0] is not None
    ]
    return pool_samples([requests], inside)


def _notes(loads: Mapping[int, Path]) -> dict[str, Any]:
    """Reads how the requests were made, from load.json; where repeats differ, a list with a value for each."""
    files = [path / "load.json" for path in loads.values() if (path / "load.json").is_file()]
    every = [read_record(LoadOutcome, file, "measure that load again").notes for file in files]
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for notes in every for name in notes if name != _OF_ONE_LOAD):
        values = [notes[name] for notes in every if name in notes]
        merged[name] = values[0] if all(v == values[0] for v in values) else values
    return merged


def _mean_rate(requests: pd.DataFrame) -> float | None:
    """The median over repeats of requests/s from the first to the last intended start; None where no time passed."""
    starts = [rows["t0"] for _, rows in requests.groupby("repeat")] if len(requests) else []
    rates = [(len(t0) - 1) / (t0.max() - t0.min()) for t0 in starts if t0.max() > t0.min()]
    return float(statistics.median(rates)) if rates else None


def _summary(
    cell: Cell,
    loads: Mapping[int, Path],
    results: Mapping[int, LoadResult],
    counters: Mapping[int, Mapping[str, Any]],
    requests: pd.DataFrame,
    manifest: Manifest,
) -> CellSummary:
    configuration, load = cell.configuration, cell.load
    flat = [flatten({**result.metrics.to_json(), "server": counters[r]}) for r, result in results.items()]
    names = sorted({name for values in flat for name in values})
    reasons = tuple(f"repeat {r}: {reason}" for r, result in results.items() for reason in result.invalid_reasons)
    refused = tuple(f"repeat {r}: {result.refused}" for r, result in results.items() if result.refused)
    wrong = tuple(f"repeat {r}: {result.wrong_answers}" for r, result in results.items() if result.wrong_answers)
    canaries = counted(requests)
    return CellSummary(
        **({"simulated": manifest.simulated.to_json()} if manifest.simulated else {}),
        cell_id=cell.cell_id,
        config_id=configuration.config_id,
        label=configuration.label,
        is_baseline=configuration.is_baseline,
        varied=dict(configuration.varied),
        settings=dict(configuration.settings),
        load=CellLoad.of(load, arrivals=load.arrivals if load.mode == "open" else None),
        notes=_notes(loads),
        capacity=manifest.capacity.get(configuration.config_id, Capacity()),
        repeats=tuple(_repeat(r, result, counters[r]) for r, result in results.items()),
        aggregate={name: spread([v[name] for v in flat if name in v]) for name in names},
        pooled=pooled_latencies(requests, {r: result.metrics for r, result in results.items()}),
        valid=not (reasons or refused or wrong),
        invalid_reasons=reasons,
        refused=refused,
        wrong_answers=wrong,
        **({} if canaries is None else {"canaries": canaries}),
    )


def _repeat(repeat: int, result: LoadResult, counters: Mapping[str, Any]) -> RepeatSummary:
    values = {name: getattr(result, name) for name in _OF_A_REPEAT}
    reported = {k: v for k, v in values.items() if (v.model_fields_set if isinstance(v, Record) else v is not None)}
    return RepeatSummary(
        repeat=repeat,
        started_at=result.started_at,
        requests_sha256=result.requests_sha256,
        metrics=result.metrics,
        server=counters,
        **reported,
    )


def _vllm_metrics(summary: CellSummary) -> Figures:
    """The figures of all repeats: sums of counts and durations, medians of rates, latencies of the pooled samples."""
    aggregate = summary.aggregate
    sums = {name: sum(aggregate[name].values) for name in (*_TOTALS, "duration_s") if name in aggregate}
    whole = {name: int(value) if value.is_integer() else value for name, value in sums.items()}
    rates = {name: aggregate[name].median for name in (*_RATES, "goodput") if name in aggregate}
    return Figures(
        **whole, **rates, **{name: getattr(summary.pooled, name) for name in summary.pooled.model_fields_set}
    )


def vllm_fields(
    metrics: Figures,
    load: LoadPoint,
    *,
    date: str,
    backend: str | None,
    model: str | None,
    burstiness: float | None,
    max_concurrency: int | None,
) -> dict[str, Any]:
    """A load in the field names of a ``vllm bench serve`` result; times in ms, rates per second.

    ``request_rate`` is "inf" in closed loop (vLLM's word for: as fast as ``max_concurrency`` lets). ``burstiness``: the
    shape of the gaps' gamma distribution, 1 for poisson, "inf" for constant gaps, None for a trace and in closed loop.
    """
    is_open = load.mode == "open"
    drawn = 1.0 if burstiness is None else burstiness
    shapes = {"poisson": 1.0, "constant": "inf", "gamma": drawn, "ramp": drawn, "step": drawn}
    fields: dict[str, Any] = {
        "date": date,
        "backend": backend,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": (metrics.at("completed") or 0) + (metrics.at("failed") or 0),
        "request_rate": "inf" if not is_open or load.request_rate == math.inf else load.request_rate,
        "burstiness": shapes.get(load.arrivals) if is_open else None,
        "max_concurrency": max_concurrency if is_open else load.concurrency,
        "duration": metrics.at("duration_s"),
        "request_goodput": metrics.at("goodput"),
        **{name: metrics.at(name) for name in (*_TOTALS, *_RATES)},
    }
    for latency, (theirs, ours) in itertools.product(("ttft", "tpot", "itl", "e2el"), _VLLM_STATISTICS):
        fields[f"{theirs}_{latency}_ms"] = metrics.value(f"{latency}_ms.{ours}")
    return fields
