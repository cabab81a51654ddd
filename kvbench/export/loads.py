"""Reads the loads of a stored run with every request, in the arrays that other tools' formats are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.common.errors import UsageError
from kvbench.common.files import read_json
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

    @cached_property
    def ok(self) -> np.ndarray:
        """The requests that succeeded. bool [requests]"""
        return self.rows["ok"].to_numpy(dtype=bool)

    @cached_property
    def start(self) -> np.ndarray:
        """The moments of sending [s] since the load's start. [requests]"""
        return self.rows["ts"].to_numpy(dtype=float)

    @cached_property
    def ttft(self) -> np.ndarray:
        """The times from sending to the first token [s], 0 where none came. [requests]"""
        return np.nan_to_num(self.rows["first"].to_numpy(dtype=float) - self.start)

    @cached_property
    def latency(self) -> np.ndarray:
        """The times from sending to the last token [s], 0 of failed requests as vLLM writes them. [requests]"""
        return np.where(self.ok, np.nan_to_num(self.rows["last"].to_numpy(dtype=float) - self.start), 0.0)

    @cached_property
    def gaps(self) -> list[np.ndarray]:
        """The gaps between the chunks of each request [s]. [requests] of float64 [chunks - 1]"""
        return [
            np.diff(times) if times is not None and len(times) else np.empty(0) for times in self.rows["chunk_times"]
        ]

    @cached_property
    def tokens(self) -> np.ndarray:
        """The output tokens of each request, 0 of failed ones. int64 [requests]"""
        return np.where(self.ok, self.rows["output_tokens"].to_numpy(dtype=np.int64), 0)

    @cached_property
    def tpot(self) -> np.ndarray:
        """The times a token after the first [s] of successful requests with several tokens."""
        several = self.ok & (self.tokens > 1)
        return (self.latency[several] - self.ttft[several]) / (self.tokens[several] - 1)

    def latencies(self) -> dict[str, np.ndarray]:
        """The samples of each latency [s], by vLLM's definitions."""
        every = [gaps for gaps, ok in zip(self.gaps, self.ok, strict=True) if ok]
        itl = np.concatenate([np.empty(0), *every])
        return {"ttft": self.ttft[self.ok], "tpot": self.tpot, "itl": itl, "e2el": self.latency[self.ok]}


def read_loads(folder: Path) -> list[ExportedLoad]:
    """Reads every finished load that was served. Raises UsageError where the folder is no run, or has none."""
    import pandas as pd

    run, loads = RunFolder(folder), []
    manifest = run.manifest()
    for cell in sorted(folder.glob("cells/*")):
        for repeat in run.done_repeats(cell.name):
            files = [path for path in (cell / _TOP[0], folder / _TOP[1]) if path.is_file()]
            fields = read_json(files[0]) if files else {}
            rows = pd.read_parquet(run.load(cell.name, repeat) / REQUESTS)
            loads.append(ExportedLoad(manifest, cell.name, repeat, fields, run.result(cell.name, repeat), rows))
    if not loads:
        raise UsageError(f"{folder} has no finished load: give the folder of a run, results/<workload>/<run>")
    return loads


def quantiles(samples: np.ndarray, shares: Sequence[float]) -> list[float]:
    return [float(value) for value in np.quantile(samples, shares)] if len(samples) else []
