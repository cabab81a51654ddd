"""Reads the loads of a stored run with every request, in the arrays that other tools' formats are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.common.errors import UsageError
from kvbench.common.files import read_json
from kvbench.metrics.rows import chunk_times, gaps_within, stored
from kvbench.runs.folder import REQUESTS, RunFolder
from kvbench.runs.results import LoadResult, Manifest

if TYPE_CHECKING:
    import pandas as pd

_TOP = ("summary.json", "metrics.json")  # with vLLM's fields: of a cell, and of `kvbench load`


@dataclass(frozen=True)
class ExportedLoad:
    """One load of a run. ``fields``: what was asked for, in vLLM's names; ``rows``: a row for each request sent."""

    manifest: Manifest
    cell: str
    repeat: int
    fields: dict[str, Any]
    result: LoadResult
    rows: pd.DataFrame

    @property
    def name(self) -> str:
        return f"{self.cell}-{self.repeat}"

    @property
    def workload(self) -> str:
        return str(self.manifest.workload.get("name") or "load")

    @property
    def invalid(self) -> str:
        """Says why the load may not be compared; empty for a valid one."""
        return "; ".join(self.result.not_comparable)

    @property
    def settings(self) -> dict[str, Any]:
        """The workload, without the settings of an engine that another program launched."""
        theirs = () if self.manifest.is_built_in else ("engine", "model")
        return {name: section for name, section in self.manifest.workload.items() if name not in theirs}

    @property
    def began(self) -> datetime:
        return datetime.fromisoformat(self.result.started_at)

    @property
    def ended(self) -> datetime:
        return datetime.fromisoformat(self.result.ended_at)

    @property
    def version(self) -> str:
        return self.manifest.versions.get("kvbench", "unknown")

    @cached_property
    def rates(self) -> dict[str, float]:
        """The requests, output tokens and all tokens of successful requests, per second of the whole run."""
        seconds, output = self.result.metrics.duration_s or math.nan, int(self.tokens.sum())
        totals = {"requests": int(self.ok.sum()), "output": output, "tokens": self.prompt_tokens + output}
        return {name: total / seconds for name, total in totals.items()}

    @property
    def prompt_tokens(self) -> int:
        """The prompt tokens of successful requests."""
        return int(self.rows["prompt_tokens"][self.ok].sum())

    @cached_property
    def ok(self) -> np.ndarray:
        """The requests that succeeded. bool [requests]"""
        return self.rows["ok"].to_numpy(dtype=bool)

    @cached_property
    def start(self) -> np.ndarray:
        """The moments of sending [s] since the load's start. [requests]"""
        return stored(self.rows, "ts")

    @cached_property
    def ttft(self) -> np.ndarray:
        """The times from sending to the first token [s], 0 where none came. [requests]"""
        return np.nan_to_num(stored(self.rows, "first") - self.start)

    @cached_property
    def latency(self) -> np.ndarray:
        """The times from sending to the last token [s], 0 of failed requests as vLLM writes them. [requests]"""
        return np.where(self.ok, np.nan_to_num(stored(self.rows, "last") - self.start), 0.0)

    @cached_property
    def gaps(self) -> list[np.ndarray]:
        """The gaps between the chunks of each sequence of a request [s]. [requests] of float64 [gaps]"""
        choices = self.rows["chunk_choices"] if "chunk_choices" in self.rows else [None] * len(self.rows)
        return [gaps_within(times, own) for times, own in zip(chunk_times(self.rows), choices, strict=True)]

    @cached_property
    def tokens(self) -> np.ndarray:
        """The output tokens of each request, 0 of failed ones. int64 [requests]"""
        return np.where(self.ok, np.nan_to_num(stored(self.rows, "output_tokens")), 0.0).astype(np.int64)

    @cached_property
    def latencies(self) -> dict[str, np.ndarray]:
        """The samples of each latency [s] of successful requests, by vLLM's definitions."""
        several = self.ok & (self.tokens > 1)
        tpot = (self.latency[several] - self.ttft[several]) / (self.tokens[several] - 1)
        itl = np.concatenate([np.empty(0), *(gaps for gaps, ok in zip(self.gaps, self.ok, strict=True) if ok)])
        return {"ttft": self.ttft[self.ok], "tpot": tpot, "itl": itl, "e2el": self.latency[self.ok]}


def read_loads(folder: Path) -> list[ExportedLoad]:
    """Reads every finished load that was served. Raises UsageError where the folder is no run, or has none."""
    import pandas as pd

    run, loads = RunFolder(folder), []
    manifest = run.manifest()
    for cell in sorted(folder.glob("cells/*")):
        for repeat in run.done_repeats(cell.name):
            files = [path for path in (cell / _TOP[0], folder / _TOP[1]) if path.is_file()]
            fields = read_json(files[0]) if files else {}
            path, result = run.load(cell.name, repeat) / REQUESTS, run.result(cell.name, repeat)
            if not result.ended_at or not path.is_file():
                raise UsageError(f"{path.parent} is of an older kvbench, or has no {path.name}: measure it again")
            loads.append(ExportedLoad(manifest, cell.name, repeat, fields, result, pd.read_parquet(path)))
    if not loads:
        raise UsageError(f"{folder} has no finished load: give the folder of a run, results/<workload>/<run>")
    return loads


def quantiles(samples: np.ndarray, shares: Sequence[float]) -> list[float]:
    return [float(value) for value in np.quantile(samples, shares)] if len(samples) else []
