"""Run folders with the values that a test says, in the layout of a sweep: what a history is read from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd

FIRST = datetime(2026, 1, 1, 3, tzinfo=UTC)
MACHINE = {"cpu": {"model": "synthetic", "cores": 2}, "gpus": [], "device": "synthetic", "profile": "cpu"}

ROWS = pd.DataFrame({"ok": [True], "t0": [0.0], "ts": [0.0], "class": ["a"], "chunk_times": [[0.1]]})


def repeat(number: int, throughput: float, ttft: float = 100.0, itl: float = 10.0) -> dict[str, Any]:
    """One repeat of a summary.json; ``ttft`` and ``itl``: p95 in ms."""
    metrics = {"output_throughput": throughput, "ttft_ms": {"p95": ttft}, "itl_ms": {"p95": itl}}
    server = {
        "kv_cache_usage_perc_peak": 0.9, "kv_waste_slots_mean": 30.0, "kv_slots_reserved_mean": 1000.0,
        "prefix_cache_hits_total": 300.0, "prefix_cache_queries_total": 1200.0,
    }  # fmt: skip
    return {"repeat": number, "metrics": metrics, "server": server}


def write_run(
    results: Path,
    day: int,
    cells: Mapping[str, Sequence[float | Mapping[str, Any]]],
    *,
    sha: str | None = None,
    name: str = "mixed",
    invalid: Sequence[str] = (),
    load: Mapping[str, Any] | None = None,
    **manifest: Any,
) -> Path:
    """A run that started ``day`` days after FIRST. ``cells``: cell id -> throughputs of its repeats, or repeats."""
    started = FIRST + timedelta(days=day)
    sha = sha or f"{day:07x}".ljust(40, "0")
    folder = results / name / f"{started:%Y%m%dT%H%M%SZ}-{sha[:7]}"
    said = {
        "format": 1,
        "status": "complete",
        "workload": {"name": name, "seed": 0, "load": {"mode": "closed"}},
        "workload_name": name,
        "plan": [],
        "git": {"sha": sha, "short_sha": sha[:7], "dirty": False},
        "versions": {"kvbench": "0.1.0", "torch": "2.13.0"},
        "started": started.isoformat(),
        **MACHINE,
        **manifest,
    }
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(said))
    (folder / "summary.csv").write_text("cell_id\n" + "".join(f"{cell}\n" for cell in cells))
    for cell, values in cells.items():
        place = folder / "cells" / cell
        (place / "loads" / "1").mkdir(parents=True)
        (place / "loads" / "1" / "done.json").write_text("{}")
        ROWS.to_parquet(place / "requests.parquet")
        summary = {
            "cell_id": cell,
            "config_id": cell.rsplit("-", 1)[0],
            "settings": {"layout": "paged"},
            "load": {"mode": "closed", "concurrency": 3, **(load or {})},
            "repeats": [
                value if isinstance(value, Mapping) else repeat(number, value) for number, value in enumerate(values, 1)
            ],
            "pooled": {"text": "what the model said"},
            "valid": cell not in invalid,
            "invalid_reasons": ["timestamp lag"] if cell in invalid else [],
        }
        (place / "summary.json").write_text(json.dumps(summary))
    return folder


def write_reportable(results: Path, day: int, cells: Mapping[str, Sequence[Any]], **more: Any) -> Path:
    """As ``write_run``, without raw samples, which are of one request there: a report can be made of it."""
    folder = write_run(results, day, cells, **more)
    for path in folder.rglob("requests.parquet"):
        path.unlink()
    return folder
