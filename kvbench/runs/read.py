"""Reads a results folder as a Run, tolerant of what is missing, and names its configurations."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.common.errors import UsageError
from kvbench.common.records import read_record
from kvbench.common.stats import time_mean
from kvbench.metrics.model import LoadMetrics
from kvbench.runs import kv_ledger
from kvbench.runs.engine_time import EFFECTS, read_engine_time
from kvbench.runs.folder import DONE, RunFolder, damaged_file
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Repeat, Run, number, read_gauges
from kvbench.runs.predictions import PREDICTIONS, read_predictions
from kvbench.runs.quality import QUALITY, read_quality
from kvbench.runs.results import CellSummary, Manifest, RepeatSummary
from kvbench.workload.settings import IN_LAYOUT, effective, phrase


def read_run(folder: Path | str) -> Run:
    """Reads a results folder.

    Raises ValueError where it has neither a manifest.json nor a cells/ folder, or its manifest is not a sweep's.
    """
    folder = Path(folder)
    if not (folder / "manifest.json").is_file() and not (folder / "cells").is_dir():
        raise ValueError(
            f"{folder} is not a results folder: it has no manifest.json; "
            "give the folder that `kvbench sweep` printed (results/<workload>/<time>-<sha>)"
        )
    run = RunFolder(folder)
    manifest = run.manifest() if os.path.lexists(run.manifest_path) else Manifest()
    summaries: list[tuple[Path, CellSummary]] = []
    damaged: dict[str, str] = {}
    for cell in sorted((folder / "cells").glob("*")):
        try:
            summary = _summary(cell)
        except UsageError as error:
            damaged[cell.name] = f"{error}, so its cell is left out: `kvbench sweep --resume {folder}` writes it again"
            continue
        if summary is not None:
            summaries.append((cell, summary))
    names = _unique_names([summary for _, summary in summaries])
    sessions = bool(manifest.load_section.get("sessions"))
    cells = [_cell(where, summary, names, sessions) for where, summary in summaries]
    cells.sort(key=lambda cell: (display_rank(cell), cell.load))
    planned = manifest.planned_repeats - manifest.left_out_repeats
    finished = {cell.cell_id: len(cell.repeats) + len(cell.invalid_repeats) for cell in cells}

    def beside(name: str, read: Callable[[Path], Any]) -> Any:
        try:
            return read(folder)
        except UsageError as error:
            damaged[name] = str(error)
            return None

    quality, predictions = beside(QUALITY, read_quality), beside(PREDICTIONS, read_predictions)
    engine_time = beside(EFFECTS, read_engine_time)
    return Run(
        folder,
        manifest,
        tuple(cells),
        missing=tuple(cell for cell in planned if cell not in finished and cell not in damaged),
        short=tuple(
            f"{cell}: {finished[cell]} of {wanted} repeats"
            for cell, wanted in planned.items()
            if cell in finished and finished[cell] < wanted
        ),
        failures=tuple(f"{f.cell_id} repeat {f.repeat} failed: {f.reason}" for f in manifest.failures),
        damaged=tuple(damaged.values()),
        unread=tuple(damaged[name] for name in (PREDICTIONS, EFFECTS) if name in damaged),
        engine_time=engine_time,
        quality=quality,
        predictions=predictions,
    )


def _summary(cell: Path) -> CellSummary | None:
    """Reads the summary of a cell; None where nothing of it was measured. Raises UsageError for a damaged file."""
    path = cell / "summary.json"
    if bad := damaged_file(cell):
        raise UsageError(f"{bad} is missing or damaged")
    summary = read_record(CellSummary, path) if path.is_file() else CellSummary()
    if summary.repeats:
        return summary
    if any(cell.glob(f"loads/*/{DONE}")):
        raise UsageError(f"{path} is missing or damaged")
    return None


def display_rank(cell: MeasuredCell) -> tuple:
    """Sorts configurations: contiguous ones by what they know of the output's length, then paged ones by page size."""
    extras = sum(key not in IN_LAYOUT for key in cell.varied)
    knows = {"max": 0, "pow2": 1, "oracle": 2}.get(str(cell.settings.get("reservation")), 0)
    size = knows if cell.is_contiguous else number(cell.page_size) or 0
    return not cell.is_contiguous, extras, size, cell.name


def _cell(where: Path, summary: CellSummary, names: Mapping[str, str], sessions: bool) -> MeasuredCell:
    gauges, repeats = read_gauges(where), sorted(summary.repeats, key=lambda repeat: repeat.repeat)
    return MeasuredCell(
        cell_id=summary.cell_id or where.name,
        config_id=summary.config_id,
        name=names[summary.config_id],
        is_baseline=summary.is_baseline,
        varied=summary.varied,
        settings=summary.settings,
        load=MeasuredLoad(summary.load.mode, summary.load.value, summary.load.arrivals or "", sessions),
        capacity=summary.capacity,
        repeats=tuple(Repeat(**stored.fields(), observed=_observe(gauges, stored, summary)) for stored in repeats),
        pooled=summary.pooled,
        valid=summary.is_valid,
        invalid_reasons=summary.invalid_reasons,
        folder=where,
        notes=summary.notes,
        invalid_repeats=summary.invalid_repeats,
        refused=summary.refused,
        wrong_answers=summary.wrong_answers,
        canaries=summary.canaries,
        simulated=bool(summary.simulated),
    )


def _kv_full(polls: pd.DataFrame, metrics: LoadMetrics, cell: CellSummary) -> pd.Series | None:
    """The polls at which requests waited though the batch had room, because the KV had none for another request.

    One more request needs a reservation, or the mean request's tokens without cached ones. Reservations by length leave
    holes, so there the wait alone tells. None where that cannot be known.
    """
    settings, held, done = cell.settings, cell.capacity.capacity_tokens, metrics.completed
    layout, most = settings.get("layout"), number(settings.get("max_num_seqs"))
    if most is None:
        most = (effective(settings, "max_num_seqs") if layout else None) or math.inf
    waits = (polls["num_requests_waiting"] > 0) & (polls["num_requests_running"] < most)
    tokens = metrics.total_input_tokens + metrics.total_output_tokens
    if layout == "contiguous":
        if effective(settings, "reservation") != "max":
            return waits
        tokens, done = number(settings.get("max_model_len")) or cell.capacity.max_model_len or 0.0, 1
    if not held or not done:
        return None
    return waits & (polls["kv_cache_usage_perc"] + (tokens - (metrics.total_cached_tokens or 0)) / done / held > 1)


def _observe(polls: pd.DataFrame, repeat: RepeatSummary, cell: CellSummary) -> dict[str, float]:
    """Means and peaks of one repeat's gauges over its steady window (the whole load if that holds no poll).

    ``kv_full``: the share of the time in which requests waited for KV; missing where that cannot be known.
    """
    gauges, metrics = polls[polls["repeat"] == repeat.repeat], repeat.metrics
    if gauges.empty:
        return {}
    start = metrics.steady_start_s or 0.0
    end = math.inf if metrics.steady_end_s is None else metrics.steady_end_s
    inside = gauges[gauges["t"].between(start, end)]
    steady = gauges if inside.empty else inside
    mean = {
        name: time_mean(steady["t"].to_numpy(), steady[name].to_numpy(dtype=float))
        for name in steady.columns
        if name.startswith(("num_requests_", "kv_")) and "_total_" not in name
    }
    full = _kv_full(steady, metrics, cell)
    observed = {
        "kv_full": math.nan if full is None else time_mean(steady["t"].to_numpy(), full.to_numpy(dtype=float)),
        "running_mean": mean["num_requests_running"],
        "waiting_mean": mean["num_requests_waiting"],
        "usage_mean": mean["kv_cache_usage_perc"],
        "usage_max": gauges["kv_cache_usage_perc"].max(),
        "page_table_bytes": gauges["page_table_bytes"].max(),
        **kv_ledger.observe(gauges, mean, start, end),
    }
    by_gauges = {"use_waste": mean["kv_waste_slots"], "use_tokens": mean["kv_slots_used"]}
    slots = by_gauges | observed
    if (held := slots["use_waste"] + slots["use_tokens"]) > 0:
        observed["waste_share"] = slots["use_waste"] / held
    if mean["kv_slots_total"] > 0:
        observed["used_share"] = mean["kv_slots_used"] / mean["kv_slots_total"]
    return {name: float(value) for name, value in observed.items() if math.isfinite(value)}


def _unique_names(summaries: list[CellSummary]) -> dict[str, str]:
    """Names each config_id for people; the id is added where two configurations would have the same name."""
    names: dict[str, str] = {}
    for summary in summaries:
        config_id, name = summary.config_id, configuration_name(summary)
        taken = name in names.values() and names.get(config_id) != name
        names[config_id] = f"{name} [{config_id}]" if taken else name
    return names


def configuration_name(summary: CellSummary) -> str:
    """Names layout and page size, then whatever else differs from the baseline: "paged (page 8) + swap"."""
    settings = summary.settings
    name = settings.get("layout")
    if name is None:
        return summary.label or summary.config_id
    if name == "paged" and settings.get("page_size") is not None:
        name = f"paged (page {settings['page_size']})"
    elif name == "contiguous" and settings.get("reservation") is not None:
        name = f"contiguous ({settings['reservation']})"
    return " + ".join([name, *(phrase(key, value) for key, value in summary.varied.items() if key not in IN_LAYOUT)])
