"""Reads a results folder as a Run, tolerant of what is missing, and names its configurations."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.common.errors import UsageError
from kvbench.common.stats import time_mean
from kvbench.runs import kv_ledger
from kvbench.runs.engine_time import read_engine_time
from kvbench.runs.folder import DONE, RunFolder, damaged_file
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Repeat, Run, number, read_gauges
from kvbench.runs.predictions import PREDICTIONS, read_predictions
from kvbench.runs.quality import QUALITY, read_quality
from kvbench.runs.repeats import left_out_repeats, planned_repeats
from kvbench.workload.settings import IN_LAYOUT, effective, phrase


def read_run(folder: Path | str) -> Run:
    """Read a results folder.

    Raises:
        ValueError: it has neither a manifest.json nor a cells/ folder, or its manifest is not a sweep's.
    """
    folder = Path(folder)
    if not (folder / "manifest.json").is_file() and not (folder / "cells").is_dir():
        raise ValueError(
            f"{folder} is not a results folder: it has no manifest.json; "
            "give the folder that `kvbench sweep` printed (results/<workload>/<time>-<sha>)"
        )
    run = RunFolder(folder)
    manifest = run.manifest() if run.manifest_path.is_file() else {}
    summaries, damaged = [], {}
    for cell in sorted((folder / "cells").glob("*")):
        path = cell / "summary.json"
        bad, measured = damaged_file(cell), any(cell.glob(f"loads/*/{DONE}"))
        summary = json.loads(path.read_text()) if path.is_file() and not bad else {}
        if bad or (measured and not summary.get("repeats")):
            damaged[cell.name] = (
                f"{bad or path} is missing or damaged, so its cell is left out: `kvbench sweep --resume {folder}` "
                "writes it again"
            )
        elif summary.get("repeats"):
            summaries.append((cell, summary))
    names = _unique_names([summary for _, summary in summaries])
    sessions = bool(((manifest.get("workload") or {}).get("load") or {}).get("sessions"))
    cells = [_cell(where, summary, names, sessions) for where, summary in summaries]
    cells.sort(key=lambda cell: (display_rank(cell), cell.load))
    planned = planned_repeats(manifest) - left_out_repeats(manifest)
    finished = {cell.cell_id: len(cell.repeats) + len(cell.invalid_repeats) for cell in cells}
    failures = manifest.get("failures") or ()
    try:
        quality = read_quality(folder)
    except UsageError as error:
        quality, damaged[QUALITY] = None, str(error)
    try:
        predictions = read_predictions(folder)
    except UsageError as error:
        predictions, damaged[PREDICTIONS] = None, str(error)
    return Run(
        folder,
        manifest,
        tuple(cells),
        missing=tuple(cell for cell in planned if cell not in finished and cell not in damaged),
        short=tuple(
            f"{cell}: {finished[cell]} of {wanted} repeats"
            for cell, wanted in planned.items()
            if 0 < finished.get(cell, 0) < wanted
        ),
        failures=tuple(f"{f.get('cell_id')} repeat {f.get('repeat')} failed: {f.get('reason')}" for f in failures),
        damaged=tuple(damaged.values()),
        engine_time=read_engine_time(folder),
        quality=quality,
        predictions=predictions,
    )


def display_rank(cell: MeasuredCell) -> tuple:
    """Sorts configurations: contiguous ones by what they know of the output's length, then paged ones by page size."""
    extras = sum(key not in IN_LAYOUT for key in cell.varied)
    knows = {"max": 0, "pow2": 1, "oracle": 2}.get(str(cell.settings.get("reservation")), 0)
    size = knows if cell.is_contiguous else number(cell.settings.get("page_size")) or 0
    return not cell.is_contiguous, extras, size, cell.name


def _cell(where: Path, summary: Mapping[str, Any], names: Mapping[str, str], sessions: bool) -> MeasuredCell:
    load = summary.get("load") or {}
    mode = "open" if load.get("mode") == "open" else "closed"
    value = load.get("request_rate" if mode == "open" else "concurrency")
    gauges = read_gauges(where)
    repeats = []
    for entry in summary["repeats"]:
        metrics = entry.get("metrics") or {}
        polls = gauges[gauges["repeat"] == entry["repeat"]]
        observed = _observe(polls, metrics, summary.get("settings") or {}, _share_of_a_request(summary, metrics))
        cache = {**(entry.get("prefix_cache") or {}), **(entry.get("prefix_cache_bounds") or {})}
        server, machine = entry.get("server") or {}, entry.get("machine") or {}
        sent = str(entry.get("requests_sha256") or "")
        repeats.append(Repeat(int(entry["repeat"]), metrics, server, observed, machine, cache, sent))
    config_id = str(summary.get("config_id"))
    return MeasuredCell(
        cell_id=str(summary.get("cell_id", where.name)),
        config_id=config_id,
        name=names[config_id],
        is_baseline=bool(summary.get("is_baseline")),
        varied=summary.get("varied") or {},
        settings=summary.get("settings") or {},
        load=MeasuredLoad(
            mode, math.inf if value == "inf" else number(value) or 0.0, load.get("arrivals") or "", sessions
        ),
        capacity=summary.get("capacity") or {},
        repeats=tuple(sorted(repeats, key=lambda r: r.repeat)),
        pooled=summary.get("pooled") or {},
        valid=bool(summary.get("valid", True)),
        invalid_reasons=tuple(map(str, summary.get("invalid_reasons") or ())),
        folder=where,
        notes=summary.get("notes") or {},
        invalid_repeats=summary.get("invalid_repeats") or {},
        refused=tuple(map(str, summary.get("refused") or ())),
        wrong_answers=tuple(map(str, summary.get("wrong_answers") or ())),
        canaries=summary.get("canaries") or {},
        simulated=bool(summary.get("simulated")),
    )


def _share_of_a_request(summary: Mapping[str, Any], metrics: Mapping[str, Any]) -> float | None:
    """Of the KV, what one more request needs: a reservation, or the mean request's tokens without cached ones.

    None where the size of the KV is not known.
    """
    capacity, settings = summary.get("capacity") or {}, summary.get("settings") or {}
    held, done = number(capacity.get("capacity_tokens")), number(metrics.get("completed"))
    tokens, cached = (
        sum(number(metrics.get(name)) or 0.0 for name in names)
        for names in (("total_input_tokens", "total_output_tokens"), ("total_cached_tokens",))
    )
    if settings.get("layout") == "contiguous":
        tokens, done = number(settings.get("max_model_len") or capacity.get("max_model_len")) or 0.0, 1.0
    return (tokens - cached) / done / held if held and done else None


def _kv_full(polls: pd.DataFrame, settings: Mapping[str, Any], share_of_a_request: float | None) -> pd.Series | None:
    """At which polls requests waited, a seat in the batch was free, and the KV had no room for another request.

    Reservations by length leave holes, so there the wait alone tells. None where that cannot be known.
    """
    most = number(settings.get("max_num_seqs"))
    if most is None:
        known = None if settings.get("layout") is None else effective(settings, "max_num_seqs")
        most = math.inf if known is None else known
    waits = (polls["num_requests_waiting"] > 0) & (polls["num_requests_running"] < most)
    if settings.get("layout") == "contiguous" and effective(settings, "reservation") != "max":
        return waits
    if share_of_a_request is None:
        return None
    return waits & (polls["kv_cache_usage_perc"] + share_of_a_request > 1)


def _observe(
    gauges: pd.DataFrame, metrics: Mapping[str, Any], settings: Mapping[str, Any], share_of_a_request: float | None
) -> dict[str, float]:
    """Means and peaks of one repeat's gauges over its steady window (the whole load if that holds no poll).

    ``kv_full``: the share of the time in which requests waited for KV; missing where that cannot be known.
    """
    if gauges.empty:
        return {}
    start, end = number(metrics.get("steady_start_s")) or 0.0, number(metrics.get("steady_end_s"))
    end = math.inf if end is None else end
    inside = gauges[gauges["t"].between(start, end)]
    steady = gauges if inside.empty else inside
    mean = {
        name: time_mean(steady["t"].to_numpy(), steady[name].to_numpy(dtype=float))
        for name in steady.columns
        if name.startswith(("num_requests_", "kv_")) and "_total_" not in name
    }
    full = _kv_full(steady, settings, share_of_a_request)
    found = {
        "kv_full": math.nan if full is None else time_mean(steady["t"].to_numpy(), full.to_numpy(dtype=float)),
        "running_mean": mean["num_requests_running"],
        "waiting_mean": mean["num_requests_waiting"],
        "usage_mean": mean["kv_cache_usage_perc"],
        "usage_max": gauges["kv_cache_usage_perc"].max(),
        "page_table_bytes": gauges["page_table_bytes"].max(),
        **kv_ledger.observe(gauges, mean, start, end),
    }
    waste, tokens = (
        found.get(f"use_{use}", mean[name]) for use, name in (("waste", "kv_waste_slots"), ("tokens", "kv_slots_used"))
    )
    if waste + tokens > 0:
        found["waste_share"] = waste / (waste + tokens)
    if mean["kv_slots_total"] > 0:
        found["used_share"] = mean["kv_slots_used"] / mean["kv_slots_total"]
    return {name: float(value) for name, value in found.items() if number(float(value)) is not None}


def _unique_names(summaries: list[Mapping[str, Any]]) -> dict[str, str]:
    """A name for people per config_id; the id is added where two configurations would have the same name."""
    names: dict[str, str] = {}
    for summary in summaries:
        config_id, name = str(summary.get("config_id")), configuration_name(summary)
        taken = name in names.values() and names.get(config_id) != name
        names[config_id] = f"{name} [{config_id}]" if taken else name
    return names


def configuration_name(summary: Mapping[str, Any]) -> str:
    """Layout and page size, then whatever else differs from the baseline: "paged (page 8) + swap"."""
    settings, varied = summary.get("settings") or {}, summary.get("varied") or {}
    name = settings.get("layout")
    if name is None:
        return str(summary.get("label") or summary.get("config_id"))
    if name == "paged" and settings.get("page_size") is not None:
        name = f"paged (page {settings['page_size']})"
    elif name == "contiguous" and settings.get("reservation") is not None:
        name = f"contiguous ({settings['reservation']})"
    return " + ".join([name, *(phrase(key, value) for key, value in varied.items() if key not in IN_LAYOUT)])
