"""A synthetic run folder, made by a small simulated engine, for tests of whatever reads run folders.

Nothing here is a measurement: a toy engine with a paged and a contiguous layout is stepped in virtual time and
its requests and gauges are written in the layout that a sweep writes. Seeded, so two calls give equal folders.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvbench.metrics.latency import summarise
from kvbench.runs.aggregate import pooled_latencies
from tests.support.toy_engine import (
    BYTES_PER_TOKEN,
    CONFIGS,
    MAX_MODEL_LEN,
    PAGE_TABLE_BYTES,
    Config,
    Scenario,
    simulate,
)


def make_run(folder: Path, scenario: Scenario | None = None) -> Path:
    """Write the run folder of `scenario` at `folder` and return it."""
    scenario = scenario or Scenario()
    folder.mkdir(parents=True, exist_ok=True)
    loads = (
        [("open", r) for r in scenario.rates]
        if scenario.rates
        else [("closed", float(c)) for c in scenario.concurrencies]
    )
    plan: list[dict[str, Any]] = []
    for config in scenario.configs:
        for mode, value in loads:
            cell_id = f"{config.config_id}-{'r' if mode == 'open' else 'c'}{value:g}"
            plan += [
                {"block_id": f"{config.config_id}-{r}", "repeat": r, "cells": [cell_id]}
                for r in range(1, scenario.repeats + 1)
            ]
            if config.config_id not in scenario.missing:
                _write_cell(folder / "cells" / cell_id, cell_id, config, mode, value, scenario)
    manifest = {
        "status": "incomplete" if scenario.missing else "complete",
        "shared_machine": True,
        "workload": {
            "name": scenario.workload_name,
            "description": "Short chats, questions and long documents.",
            "model": {"config": "llama-32m", "load_format": "dummy", "dtype": "float32"},
        },
        "command": ["kvbench", "sweep", "workloads/mixed.yaml", "--profile", "cpu"],
        "git": {"sha": "0123456789abcdef", "dirty": False},
        "versions": {"python": "3.11.2", "torch": "2.13.0"},
        "device": "cpu",
        "cpu": {"model": "synthetic", "cores": 2},
        "seeds": {"workload": scenario.seed},
        "started": "2026-01-01T10:00:00+00:00",
        "ended": "2026-01-01T10:06:42+00:00",
        "plan": plan,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return folder


def _write_cell(folder: Path, cell_id: str, config: Config, mode: str, value: float, sc: Scenario) -> None:
    folder.mkdir(parents=True)
    frames, gauges, repeats = [], [], []
    for repeat in range(1, sc.repeats + 1):
        requests, server, counters = simulate(config, mode, value, repeat, sc)
        metrics = summarise(requests, {"mode": mode, "concurrency": int(value) if mode == "closed" else None})
        frames.append(requests.assign(repeat=repeat))
        gauges.append(server.assign(repeat=repeat))
        repeats.append(
            {
                "repeat": repeat,
                "started_at": f"2026-01-01T10:0{repeat}:00+00:00",
                "metrics": metrics,
                "server": counters if sc.server_metrics else {},
            }
        )
    pooled_requests = pd.concat(frames, ignore_index=True)
    pooled_requests.to_parquet(folder / "requests.parquet")
    if sc.server_metrics:
        pd.concat(gauges, ignore_index=True).to_parquet(folder / "server.parquet")
    with (folder / "samples.jsonl").open("w") as out:
        for row in pooled_requests[pooled_requests.ok].head(3).itertuples():
            out.write(
                json.dumps(
                    {
                        "index": int(row.index),
                        "class": row[pooled_requests.columns.get_loc("class") + 1],
                        "prompt_tokens": int(row.prompt_tokens),
                        "text": row.text,
                    }
                )
                + "\n"
            )
    slots = sc.slots * BYTES_PER_TOKEN // config.bytes_per_slot
    reasons = list(sc.invalid.get(config.config_id, ()))
    summary = {
        "cell_id": cell_id,
        "config_id": config.config_id,
        "label": config.config_id.replace("-", "="),
        "is_baseline": not config.varied,
        "varied": config.varied,
        "settings": config.settings,
        "load": {
            "mode": mode,
            "concurrency": int(value) if mode == "closed" else None,
            "request_rate": value if mode == "open" else None,
            "num_requests": sc.num_requests,
        },
        "capacity": {
            "kv_budget_bytes": sc.slots * BYTES_PER_TOKEN + PAGE_TABLE_BYTES,
            "capacity_tokens": slots,
            "bytes_per_token": config.bytes_per_slot,
            "num_pages": slots // config.page_size,
            "max_concurrency_at_max_len": slots // MAX_MODEL_LEN,
        },
        "repeats": repeats,
        "aggregate": aggregate([r["metrics"] for r in repeats]),
        "pooled": pooled_latencies(pooled_requests, {r["repeat"]: r["metrics"] for r in repeats}),
        "valid": not reasons,
        "invalid_reasons": reasons,
    }
    (folder / "summary.json").write_text(json.dumps(summary))


def aggregate(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, spread and values over the repeats of every scalar and every percentile."""
    flat: dict[str, list[float]] = {}
    for one in metrics:
        for name, value in one.items():
            if isinstance(value, (int, float)):
                flat.setdefault(name, []).append(float(value))
            elif isinstance(value, dict) and name.endswith("_ms"):
                for stat in ("p50", "p90", "p95", "p99", "mean"):
                    if value.get(stat) is not None:
                        flat.setdefault(f"{name}.{stat}", []).append(value[stat])
    return {
        name: {
            "median": float(np.median(v)),
            "mean": float(np.mean(v)),
            "min": min(v),
            "max": max(v),
            "sd": float(np.std(v, ddof=1)) if len(v) > 1 else None,
            "n": len(v),
            "values": v,
        }
        for name, v in flat.items()
    }


BASELINE, CONTIGUOUS = CONFIGS[0], CONFIGS[1]
PAIR = (BASELINE, CONTIGUOUS)
VARIANTS: dict[str, Scenario] = {
    "normal": Scenario(),
    "failures": Scenario(configs=PAIR, failures={"baseline": 3}),
    "invalid": Scenario(configs=PAIR, invalid={"layout-contiguous": ("timestamp lag p99 3.1 ms is over 1.0 ms",)}),
    "incomplete": Scenario(missing=("page_size-64", "enable_prefix_caching-true")),
    "single_repeat": Scenario(repeats=1),
    "open_loop": Scenario(configs=PAIR, rates=(2.0, 12.0)),
    "no_contiguous": Scenario(configs=tuple(c for c in CONFIGS if c.layout == "paged")),
    "one_cell": Scenario(configs=(BASELINE,), concurrencies=(24,)),
    "foreign": Scenario(configs=(replace(BASELINE, config_id="vllm"),), server_metrics=False),
    "nothing": Scenario(missing=tuple(c.config_id for c in CONFIGS)),
    "paged_slower": Scenario(configs=PAIR, slowdown={c.config_id: 3.2 for c in CONFIGS if c.layout == "paged"}),
}
