"""The folder of a comparison with chosen figures, as kvbench compare leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.common.files import write_json
from kvbench.gate.compare.folder import KIND, CompareFolder, CompareState
from kvbench.gate.timing.plan import SIDES, PairedCell
from kvbench.workload.design import make_design

BASE_VALUES = (400.0, 100.0, 20.0)  # tokens/s, ms, ms
POLICY = """
timing:
  looks: [{pairs: 10, alpha: 1%}]
  metrics: {p95_ttft_ms: {floor: 2%}}
  classes: {b: ['*b*'], a: '*'}
"""
HERE = {
    "git": {"sha": "1" * 40, "short_sha": "1111111", "dirty": False},
    "versions": {"torch": "2"},
    "cpu": {"model": "a processor", "architecture": "x86_64", "cores": 2},
    "gpus": [{"name": "a GPU", "driver_version": "1"}],
}


def write_load(path: Path, cell: str, values: Sequence[float], **more: Any) -> None:
    """``values``: output throughput, p95 TTFT, p95 ITL; None: the load has none."""
    throughput, ttft, itl = values
    metrics = {"output_throughput": throughput, "ttft_ms": {"p95": ttft}, "itl_ms": {"p95": itl}}
    done = {"cell_id": cell, "valid": True, "invalid_reasons": [], "server_faults": [], "metrics": metrics, **more}
    write_json(path / "counters.json", more.get("counters", {}))
    write_json(path / "done.json", {key: value for key, value in done.items() if key != "counters"})


def stored_comparison(path: Path, base: np.ndarray, candidate: np.ndarray, cells: Sequence[str]) -> CompareFolder:
    """``base``, ``candidate`` [pairs, cells, 3]; ``cells``: names such as ``mixed/paged-c4``."""
    folder = CompareFolder(path)
    rows = [PairedCell(name, *name.split("/")[:1], name, *[name.split("/")[1]] * 2) for name in cells]
    manifest = {
        "format": CompareState.FORMAT, "kind": KIND, "subcommand": "compare", "base": {"name": "main"},
        "candidate": {"name": "topic"}, "reproduce": "kvbench compare main topic", "cells": list(map(asdict, rows)),
        "order": {}, "order_seed": 1, "early_looks": [], "voids": [], "void": None, "notes": [], "differences": [],
        "cpu": {"model": "a processor", "cores": 2},
        "started": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:10:00+00:00",
    }  # fmt: skip
    write_json(folder.path / "manifest.json", manifest)
    for side, values in zip(SIDES, (base, candidate), strict=True):
        for pair, of_pair in enumerate(values, 1):
            for row, of_cell in zip(rows, of_pair, strict=True):
                write_load(folder.load(row, side, pair), row.on(side), of_cell)
    return folder


def noisy_pairs(pairs: int, cells: int, seed: int, change: Sequence[float] = (0.0, 0.0, 0.0)) -> tuple[np.ndarray, ...]:
    """Base and candidate [pairs, cells, 3] that scatter by 1 % a load; the candidate's changed by these shares."""
    rng = np.random.default_rng(seed)
    base, candidate = np.exp(rng.normal(0, 0.01, (2, pairs, cells, 3))) * BASE_VALUES
    return base, candidate * (1 + np.array(change))


def stored_run(
    folder: Path, of: Any, values: Sequence[float], *, resolved=(), invalid=(), cells=None, **manifest: Any
) -> Path:
    """A sweep's run of the workload ``of`` with these output throughputs, a repeat each.

    ``resolved``: what its servers said; ``invalid``: repeats; ``cells``: part of the ids of those that were measured.
    """
    design = make_design(of.engine, of.sweep, of.load_points, of.design)
    ids = [cell.cell_id for cell in design.cells if cells is None or cells in cell.cell_id]
    plan = [
        {"configuration": c.config_id, "cells": [i for i in ids if i.startswith(f"{c.config_id}-c")]}
        for c in reversed(design.configurations)  # in a run their order is random
    ]
    servers = {c.config_id: {"resolved": dict(resolved)} for c in design.configurations}
    facts = {"format": 1, "status": "complete", "workload": dict(of.resolved), "profile": "cpu", **HERE}
    facts |= {"plan": [block for block in plan if block["cells"]], "servers": servers, "command": ["kvbench", "sweep"]}
    write_json(folder / "manifest.json", facts | manifest)
    for repeat, value in enumerate(values, 1):
        for cell_id in ids:
            why = {"valid": False, "invalid_reasons": ["others used the machine"]} if repeat in invalid else {}
            write_load(folder / "cells" / cell_id / "loads" / str(repeat), cell_id, (value, 100.0, 10.0), **why)
    return folder
