"""Repeats of a cell into cells/<cell id>/: pooled raw data and summary.json.

Throughput is aggregated over repeats (each a fresh server; the unit of any comparison); latency percentiles are also
given over the pooled raw samples, for display.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.common.files import read_json, write_json, write_text
from kvbench.metrics.latency import in_steady
from kvbench.metrics.latency import pooled as pool_samples
from kvbench.runs.folder import DONE, RunFolder
from kvbench.workload.design import Cell

MAX_SAMPLES = 8
_TIMES = ("ttft", "tpot", "itl", "e2el")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers of a nested mapping under dotted names; texts, lists and what is not finite are left out."""
    flat: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            flat[f"{prefix}{key}"] = float(value)
    return flat


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, mean, extremes and sample standard deviation (None for one value) over repeats."""
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "min": min(values),
        "max": max(values),
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "n": len(values),
        "values": list(values),
    }


def aggregate_cell(run: RunFolder, cell: Cell, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Write the cell's files from its finished loads; None when there is none yet.

    ``facts``: ``model``, ``backend`` and ``capacity`` by configuration id, for the summary.
    """
    repeats = run.done_repeats(cell.cell_id)
    if not repeats:
        return None
    folder = run.cell(cell.cell_id)
    done = {r: read_json(run.load(cell.cell_id, r) / DONE) for r in repeats}
    counters = {r: read_json(run.load(cell.cell_id, r) / "counters.json") for r in repeats}
    requests = _pool(run, cell, repeats, "requests.parquet")
    _pool(run, cell, repeats, "server.parquet")
    _join_logs(run, cell, repeats)
    _write_samples(folder / "samples.jsonl", requests)
    loads = {r: _read_load(run.load(cell.cell_id, r)) for r in repeats}
    pooled = pooled_latencies(requests, {r: d["metrics"] for r, d in done.items()})
    summary = _summary(cell, done, counters, loads, pooled, facts)
    summary |= _vllm_fields(summary, facts, _load_section(run), _mean_rate(requests))
    write_json(folder / "counters.json", {"cell_id": cell.cell_id, "repeats": {str(r): c for r, c in counters.items()}})
    write_json(folder / "summary.json", summary)
    return summary


def _pool(run: RunFolder, cell: Cell, repeats: Sequence[int], name: str) -> pd.DataFrame:
    """All repeats of one table, with the column ``repeat``; written when it has rows."""
    frames = []
    for repeat in repeats:
        path = run.load(cell.cell_id, repeat) / name
        if path.is_file():
            frame = pd.read_parquet(path)
            frame["repeat"] = repeat
            frames.append(frame)
    pooled = pd.concat([f for f in frames if len(f)] or frames[:1], ignore_index=True) if frames else pd.DataFrame()
    if len(pooled):
        path = run.cell(cell.cell_id) / name
        scratch = path.with_name(f".{name}.tmp")
        pooled.to_parquet(scratch, index=False)
        scratch.replace(path)
    return pooled


def _read_load(folder: Path) -> Mapping[str, Any]:
    path = folder / "load.json"
    return read_json(path) if path.is_file() else {}


def pooled_latencies(requests: pd.DataFrame, metrics: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Latencies over the raw samples of all repeats; ``steady_latency``: of requests that came in the steady windows.

    Each repeat has its own window. The first requests of a closed loop are all sent at once; their time to first
    token is mostly the wait for one another, and the steady window leaves them out.
    """
    if not len(requests):
        return {}
    inside = [
        in_steady(rows, (metrics[int(repeat)]["steady_start_s"], metrics[int(repeat)]["steady_end_s"]))
        for repeat, rows in requests.groupby("repeat")
        if metrics[int(repeat)].get("steady_start_s") is not None
    ]
    steady = pool_samples(inside)
    for part in ("per_class", "per_turn"):
        steady.pop(part, None)
    return pool_samples([requests]) | {"steady_latency": steady}


def _notes(loads: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """What the maker of the requests had to say; where repeats differ, a list of what they say, in their order."""
    every = [load.get("notes") or {} for load in loads.values()]
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for notes in every for name in notes):
        values = [notes[name] for notes in every if name in notes]
        found[name] = values[0] if all(v == values[0] for v in values) else values
    return found


def _load_section(run: RunFolder) -> Mapping[str, Any]:
    """``load:`` of the workload; empty where no manifest tells."""
    manifest = read_json(run.manifest_path) if run.manifest_path.is_file() else {}
    return (manifest.get("workload") or {}).get("load") or {}


def _mean_rate(requests: pd.DataFrame) -> float | None:
    """Requests/s between the first and the last intended start, median over repeats; None where no time passed."""
    rates = []
    for _, rows in requests.groupby("repeat") if len(requests) else ():
        span = float(rows["t0"].max() - rows["t0"].min())
        if span > 0:
            rates.append((len(rows) - 1) / span)
    return statistics.median(rates) if rates else None


def _summary(
    cell: Cell,
    done: Mapping[int, Mapping[str, Any]],
    counters: Mapping[int, Mapping[str, Any]],
    loads: Mapping[int, Mapping[str, Any]],
    pooled: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    configuration, load = cell.configuration, cell.load
    flat = [flatten({**d["metrics"], "server": counters[r]}) for r, d in done.items()]
    names = sorted({name for values in flat for name in values})
    aggregate = {name: spread([v[name] for v in flat if name in v]) for name in names}
    reasons = [f"repeat {r}: {reason}" for r, d in done.items() for reason in d["invalid_reasons"]]
    return {
        "cell_id": cell.cell_id,
        "config_id": configuration.config_id,
        "label": configuration.label,
        "is_baseline": configuration.is_baseline,
        "varied": dict(configuration.varied),
        "settings": dict(configuration.settings),
        "load": {
            "load_id": load.load_id,
            "mode": load.mode,
            "concurrency": load.concurrency,
            "request_rate": "inf" if load.request_rate == math.inf else load.request_rate,
            "num_requests": load.num_requests,
            "arrivals": load.arrivals if load.mode == "open" else None,
        },
        "notes": _notes(loads),
        "capacity": facts.get("capacity", {}).get(configuration.config_id, {}),
        "repeats": [
            {
                "repeat": r,
                "started_at": d["started_at"],
                "requests_sha256": d.get("requests_sha256"),
                "metrics": d["metrics"],
                "server": counters[r],
                **{key: d[key] for key in ("machine", "prefix_cache", "prefix_cache_bounds") if d.get(key)},
            }
            for r, d in done.items()
        ],
        "aggregate": aggregate,
        "pooled": pooled,
        "valid": not reasons,
        "invalid_reasons": reasons,
    }


def _vllm_fields(
    summary: Mapping[str, Any], facts: Mapping[str, Any], section: Mapping[str, Any], mean_rate: float | None
) -> dict[str, Any]:
    """The field names of a ``vllm bench serve`` result, so that scripts that read those read this.

    Counts and duration are sums over the repeats, rates their median, times come from the pooled samples.
    ``request_rate``: "inf" in closed loop (vLLM's word for: as fast as ``max_concurrency`` lets), the rate asked
    for in open loop, the mean where the arrivals have no one rate. ``burstiness``, the shape of the gamma distribution
    of the gaps: 1 for poisson, "inf" for constant gaps, null for a trace and in closed loop, which draw none.
    """
    is_open = summary["load"]["mode"] == "open"
    arrivals = (section.get("arrivals") or summary["load"]["arrivals"]) if is_open else None
    aggregate, pooled, load = summary["aggregate"], summary["pooled"], summary["load"]
    rate = load["request_rate"] if load["request_rate"] is not None else mean_rate

    def total(name: str) -> float | int | None:
        values = aggregate.get(name, {}).get("values")
        if values is None:
            return None
        return int(sum(values)) if all(v.is_integer() for v in values) else sum(values)

    fields: dict[str, Any] = {
        "date": summary["repeats"][0]["started_at"],
        "backend": facts.get("backend"),
        "model_id": facts.get("model"),
        "tokenizer_id": facts.get("model"),
        "num_prompts": (total("completed") or 0) + (total("failed") or 0),
        "request_rate": rate if is_open else "inf",
        "burstiness": vllm_burstiness(arrivals, section.get("burstiness")),
        "max_concurrency": section.get("max_concurrency") if is_open else load["concurrency"],
        "duration": total("duration_s"),
        "completed": total("completed"),
        "failed": total("failed"),
        "total_input_tokens": total("total_input_tokens"),
        "total_output_tokens": total("total_output_tokens"),
        "request_goodput": aggregate.get("goodput", {}).get("median"),
    }
    for name in ("request_throughput", "output_throughput", "total_token_throughput"):
        fields[name] = aggregate.get(name, {}).get("median")
    for name in _TIMES:
        values = pooled.get(f"{name}_ms") or {}
        for theirs, ours in (("mean", "mean"), ("median", "p50"), ("std", "std"), ("p99", "p99")):
            fields[f"{theirs}_{name}_ms"] = values.get(ours)
    return fields


def vllm_burstiness(arrivals: str | None, given: float | None) -> float | str | None:
    """vLLM's ``burstiness`` of arrivals of ours; None for those that draw no gaps."""
    if arrivals in ("gamma", "ramp", "step"):
        return 1.0 if given is None else given
    return {"poisson": 1.0, "constant": "inf"}.get(arrivals or "")


def _join_logs(run: RunFolder, cell: Cell, repeats: Sequence[int]) -> None:
    parts = []
    for repeat in repeats:
        path = run.load(cell.cell_id, repeat) / "server.log"
        if path.is_file():
            parts.append(f"=== {cell.cell_id}, repeat {repeat}\n{path.read_text(errors='replace')}")
    write_text(run.cell(cell.cell_id) / "server.log", "\n".join(parts))


def _write_samples(path: Path, requests: pd.DataFrame) -> None:
    """Up to 8 outputs of the first repeat, spread over the load, for a person to read."""
    rows = []
    if len(requests) and "text" in requests:
        first = requests[requests["repeat"] == requests["repeat"].min()]
        step = max(1, len(first) // MAX_SAMPLES)
        columns = [
            c for c in ("index", "class", "prompt_tokens", "output_tokens", "finish_reason", "ok", "text") if c in first
        ]
        rows = json.loads(first.iloc[::step].head(MAX_SAMPLES)[columns].to_json(orient="records"))
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
