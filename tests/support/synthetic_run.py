"""Run folders for tests of whatever reads them. Nothing here is a measurement.

``make_run`` steps a toy engine with a paged and a contiguous layout in virtual time and stores its requests and gauges
as the loads of a sweep, aggregated as a sweep does; equal seeds give equal folders. ``write_run`` writes summaries with
the values that a test says, in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.common.files import write_json
from kvbench.metrics.latency import summarise
from kvbench.runs.aggregate import aggregate_cell
from kvbench.runs.folder import DONE, RunFolder
from kvbench.runs.quality import QUALITY, QualityResult
from kvbench.runs.results import Manifest
from kvbench.workload.design import Cell, Configuration, LoadPoint
from tests.support.quality_results import figures, outside, result
from tests.support.toy_engine import (
    BYTES_PER_TOKEN,
    CONFIGS,
    INT4,
    INT8,
    MAX_MODEL_LEN,
    PAGE_TABLE_BYTES,
    Config,
    Scenario,
    simulate,
)


def make_run(folder: Path, scenario: Scenario | None = None) -> Path:
    """Write the run folder of ``scenario`` at ``folder`` and return it."""
    sc, run = scenario or Scenario(), RunFolder(folder)
    loads = [LoadPoint(f"r{rate:g}", "open", None, rate, sc.num_requests) for rate in sc.rates] or [
        LoadPoint(f"c{users}", "closed", users, None, sc.num_requests) for users in sc.concurrencies
    ]
    plan = [
        {"block_id": f"{c.config_id}-{r}", "repeat": r, "cells": [f"{c.config_id}-{load.load_id}" for load in loads]}
        for c in sc.configs
        for r in range(1, sc.repeats + 1)
    ]
    manifest = {
        "format": 1,
        "status": "incomplete" if sc.missing else "complete",
        "shared_machine": True,
        "workload": {
            "name": sc.workload_name,
            "description": "Short chats, questions and long documents.",
            "model": {"config": "llama-32m", "load_format": "dummy", "dtype": "float32"},
        },
        "command": ["kvbench", "sweep", "workloads/mixed.yaml", "--profile", "cpu"],
        "git": {"sha": "0123456789abcdef", "dirty": False},
        "versions": {"python": "3.11.2", "torch": "2.13.0"},
        "device": "cpu",
        "cpu": {"model": "synthetic", "cores": 2},
        "seeds": {"workload": sc.seed},
        "started": "2026-01-01T10:00:00+00:00",
        "ended": "2026-01-01T10:06:42+00:00",
        "plan": plan,
    }
    write_json(run.manifest_path, manifest)
    if sc.quality:
        write_json(folder / QUALITY, _quality(sc).to_json())
    for config in sc.configs:
        if config.config_id not in sc.missing:
            for load in loads:
                _write_cell(run, config, load, sc)
    return folder


def _write_cell(run: RunFolder, config: Config, load: LoadPoint, sc: Scenario) -> None:
    label = config.config_id.replace("-", "=")
    configuration = Configuration(config.config_id, label, config.settings, config.varied, not config.varied)
    cell = Cell(f"{config.config_id}-{load.load_id}", configuration, load)
    for repeat in range(1, sc.repeats + 1):
        value = load.concurrency if load.mode == "closed" else load.request_rate
        requests, server, counters = simulate(config, load.mode, float(value or 0), repeat, sc)
        folder = run.load(cell.cell_id, repeat)
        folder.mkdir(parents=True)
        requests.to_parquet(folder / "requests.parquet")
        if sc.server_metrics:
            server.to_parquet(folder / "server.parquet")
        write_json(folder / "counters.json", counters if sc.server_metrics else {})
        done = {
            "started_at": f"2026-01-01T10:0{repeat}:00+00:00",
            "metrics": summarise(requests, {"mode": load.mode, "concurrency": load.concurrency}),
            "invalid_reasons": sc.invalid.get(config.config_id, ()),
        }
        write_json(folder / DONE, done)
    slots = sc.slots * BYTES_PER_TOKEN // config.bytes_per_slot
    capacity = {
        "kv_budget_bytes": sc.slots * BYTES_PER_TOKEN + PAGE_TABLE_BYTES,
        "capacity_tokens": slots,
        "bytes_per_token": config.bytes_per_slot,
        "num_pages": slots // config.page_size,
        "max_concurrency_at_max_len": slots // MAX_MODEL_LEN,
    }
    manifest = Manifest(capacity={config.config_id: capacity}, **run.manifest().fields())
    aggregate_cell(run, cell, manifest)


def _quality(sc: Scenario) -> QualityResult:
    """Every configuration within the limits but INT4, which has lost some passkeys."""
    known = {INT8: figures(0.0004, more=0.0006, greedy=44), INT4: outside()}
    of = {c.config_id: known.get(c.kv_cache_dtype, figures()) for c in sc.configs}
    beside = sc.quality == "beside"
    return result(of, beside=beside, model="kvbench-tiny" if beside else "llama-32m", git={"sha": "0123456789abcdef"})


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
    sha: str = "",
    name: str = "mixed",
    invalid: Sequence[str] = (),
    load: Mapping[str, Any] | None = None,
    samples: bool = True,
    **manifest: Any,
) -> Path:
    """A run that started ``day`` days after FIRST. ``cells``: cell id -> throughputs of its repeats, or repeats.

    ``samples``: with raw samples, of one request only: a report can be made of a run without them.
    """
    started, sha = FIRST + timedelta(days=day), sha or f"{day:07x}".ljust(40, "0")
    folder = results / name / f"{started:%Y%m%dT%H%M%SZ}-{sha[:7]}"
    said = {
        "format": 1, "status": "complete", "workload": {"name": name, "seed": 0, "load": {"mode": "closed"}},
        "workload_name": name, "plan": [], "git": {"sha": sha, "short_sha": sha[:7], "dirty": False},
        "versions": {"kvbench": "0.1.0", "torch": "2.13.0"}, "started": started.isoformat(), **MACHINE,
    }  # fmt: skip
    write_json(folder / "manifest.json", said | manifest)
    (folder / "summary.csv").write_text("cell_id\n" + "".join(f"{cell}\n" for cell in cells))
    for cell, values in cells.items():
        place = folder / "cells" / cell
        write_json(place / "loads" / "1" / DONE, {})
        if samples:
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
        write_json(place / "summary.json", summary)
    return folder


BASELINE, CONTIGUOUS = CONFIGS[0], CONFIGS[1]
PAIR = (BASELINE, CONTIGUOUS)
VARIANTS: dict[str, Scenario] = {
    "normal": Scenario(repeats=2, quality="beside"),
    "incomplete": Scenario(configs=(*PAIR, CONFIGS[3]), repeats=1, missing=("page_size-64",)),
    "open_loop": Scenario(configs=CONFIGS[2:4], repeats=1, rates=(2.0, 12.0), failures={"page_size-8": 3}),
    "one_cell": Scenario(configs=(BASELINE,), concurrencies=(24,)),
    "foreign": Scenario(configs=(replace(BASELINE, config_id="vllm"),), repeats=1, server_metrics=False),
    "nothing": Scenario(missing=tuple(c.config_id for c in CONFIGS)),
}
