"""A results folder as a Run: file names, tolerance for what is missing, names for configurations."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.common.stats import time_mean
from kvbench.runs import kv_ledger as ledger
from kvbench.runs.folder import RunFolder
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Repeat, Run, number, read_gauges
from kvbench.workload.settings import IN_LAYOUT, phrase


def read_run(folder: Path | str) -> Run:
    """Read a results folder.

    Raises:
        ValueError: the folder does not exist, has neither a manifest.json nor a cells/ folder, or its manifest cannot
            be read or is no sweep's.
    """
    folder = Path(folder)
    if not (folder / "manifest.json").is_file() and not (folder / "cells").is_dir():
        raise ValueError(
            f"{folder} is not a results folder: it has no manifest.json; "
            "give the folder that `kvbench sweep` printed (results/<workload>/<time>-<sha>)"
        )
    run = RunFolder(folder)
    manifest = run.manifest() if run.manifest_path.is_file() else {}
    problems: list[str] = []
    summaries = []
    for path in sorted((folder / "cells").glob("*/summary.json")):
        summary = _read_json(path, problems)
        if summary.get("repeats"):
            summaries.append((path.parent, summary))
    names = _config_names([summary for _, summary in summaries])
    sessions = _of_sessions(manifest)
    cells = [_cell(where, summary, names, sessions=sessions) for where, summary in summaries]
    order = {
        name: (rank, i)
        for i, (name, rank) in enumerate(sorted(((c.name, _rank(c)) for c in cells), key=lambda pair: pair[1]))
    }
    cells.sort(key=lambda c: (order[c.name], c.load))
    planned = planned_cells(manifest.get("plan") or [])
    finished = {cell.cell_id: len(cell.repeats) for cell in cells}
    short = [
        f"{cell}: {finished[cell]} of {wanted} repeats"
        for cell, wanted in planned.items()
        if 0 < finished.get(cell, 0) < wanted
    ]
    problems += [
        f"{f.get('cell_id')} repeat {f.get('repeat')} failed: {f.get('reason')}"
        for f in manifest.get("failures") or ()
        if isinstance(f, Mapping)
    ]
    return Run(
        folder,
        manifest,
        tuple(cells),
        tuple(p for p in planned if p not in finished),
        tuple(short),
        tuple(problems),
    )


def planned_cells(plan: Any) -> dict[str, int]:
    """Cell id -> repeats planned: how often a manifest's plan (a list of blocks) names the cell."""
    found: dict[str, int] = {}

    def walk(node: Any, key: str = "") -> None:
        if isinstance(node, Mapping):
            for name, value in node.items():
                walk(value, str(name))
        elif isinstance(node, (list, tuple)):
            for value in node:
                walk(value, key)
        elif isinstance(node, str) and key in ("cell_id", "cell_ids", "cells", ""):
            found[node] = found.get(node, 0) + 1

    walk(plan)
    return found


def _rank(cell: MeasuredCell) -> tuple:
    size = number(cell.settings.get("page_size")) or 0
    extras = sum(key not in IN_LAYOUT for key in cell.varied)
    knows = {"max": 0, "pow2": 1, "oracle": 2}.get(str(cell.settings.get("reservation")), 0)  # of the output's length
    return (not cell.is_contiguous, extras, knows if cell.is_contiguous else size, cell.name)


def _of_sessions(manifest: Mapping[str, Any]) -> bool:
    workload = manifest.get("workload")
    load = workload.get("load") if isinstance(workload, Mapping) else None
    return isinstance(load, Mapping) and bool(load.get("sessions"))


def _cell(where: Path, summary: Mapping[str, Any], names: Mapping[str, str], *, sessions: bool) -> MeasuredCell:
    load = summary.get("load") or {}
    is_open = load.get("mode") == "open"
    asked = load.get("request_rate" if is_open else "concurrency")
    value = math.inf if asked == "inf" else number(asked) or 0.0
    gauges = read_gauges(where)
    repeats = []
    for entry in summary["repeats"]:
        metrics = entry.get("metrics") or {}
        mine = gauges[gauges["repeat"] == entry["repeat"]] if len(gauges) else gauges
        server, machine = entry.get("server") or {}, entry.get("machine") or {}
        cache = {**(entry.get("prefix_cache") or {}), **(entry.get("prefix_cache_bounds") or {})}
        repeats.append(Repeat(int(entry["repeat"]), metrics, server, _observe(mine, metrics), machine, cache))
    config_id = str(summary.get("config_id", where.name))
    return MeasuredCell(
        cell_id=str(summary.get("cell_id", where.name)),
        config_id=config_id,
        name=names[config_id],
        is_baseline=bool(summary.get("is_baseline")),
        varied=summary.get("varied") or {},
        settings=summary.get("settings") or {},
        load=MeasuredLoad("open" if is_open else "closed", value, str(load.get("arrivals") or ""), sessions),
        capacity=summary.get("capacity") or {},
        repeats=tuple(sorted(repeats, key=lambda r: r.repeat)),
        pooled=summary.get("pooled") or {},
        valid=bool(summary.get("valid", True)),
        invalid_reasons=tuple(str(r) for r in summary.get("invalid_reasons") or ()),
        folder=where,
        notes=summary.get("notes") or {},
    )


def _observe(gauges: pd.DataFrame, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Means and peaks of one repeat's gauges over its steady window (the whole load if that holds no poll)."""
    if gauges.empty:
        return {}
    start, end = number(metrics.get("steady_start_s")), number(metrics.get("steady_end_s"))
    steady = gauges[(gauges["t"] >= (start or 0.0)) & (gauges["t"] <= (math.inf if end is None else end))]
    steady = gauges if steady.empty else steady

    def mean(name: str) -> float:
        return time_mean(steady["t"].to_numpy(), steady[name].to_numpy(dtype=float))

    found = {
        "running_mean": mean("num_requests_running"),
        "running_max": gauges["num_requests_running"].max(),
        "waiting_mean": mean("num_requests_waiting"),
        "usage_mean": mean("kv_cache_usage_perc"),
        "usage_max": gauges["kv_cache_usage_perc"].max(),
        "page_table_bytes": gauges["page_table_bytes"].max(),
    }
    if (reserved := mean("kv_slots_reserved")) > 0:
        found["waste_share"] = mean("kv_waste_slots") / reserved
    if (total := mean("kv_slots_total")) > 0:
        found["used_share"] = mean("kv_slots_used") / total
    found |= ledger.observe(gauges, start or 0.0, math.inf if end is None else end)
    return {name: float(value) for name, value in found.items() if number(float(value)) is not None}


def _config_names(summaries: list[Mapping[str, Any]]) -> dict[str, str]:
    """A name for people per config_id: layout and page size, then whatever else differs from the baseline."""
    names: dict[str, str] = {}
    for summary in summaries:
        config_id = str(summary.get("config_id"))
        name = _config_name(summary)
        taken = name in names.values() and names.get(config_id) != name
        names[config_id] = f"{name} [{config_id}]" if taken else name
    return names


def _config_name(summary: Mapping[str, Any]) -> str:
    settings, varied = summary.get("settings") or {}, summary.get("varied") or {}
    layout = settings.get("layout")
    if layout is None:
        return str(summary.get("label") or summary.get("config_id"))
    page, reservation = settings.get("page_size"), settings.get("reservation")
    name = str(layout)
    if layout == "paged" and page is not None:
        name = f"paged (page {page})"
    elif layout == "contiguous" and reservation is not None:
        name = f"contiguous ({reservation})"
    extras = [phrase(key, value) for key, value in varied.items() if key not in IN_LAYOUT]
    return " + ".join([name, *extras])


def _read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        problems.append(f"{path.name} in {path.parent.name} is not readable JSON ({error})")
        return {}
    return loaded if isinstance(loaded, dict) else {}
