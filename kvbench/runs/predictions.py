"""predictions.json: what the simulator predicted of each cell, calibrated on the run's other cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.files import read_json, write_json

PREDICTIONS, FORMAT = "predictions.json", "kvbench-predictions/1"

METRICS = {
    "output tok/s": "output_throughput",
    "mean TTFT": "ttft_ms.mean",
    "p95 TTFT": "ttft_ms.p95",
    "mean TPOT": "tpot_ms.mean",
    "p95 ITL": "itl_ms.p95",
    "p95 E2EL": "e2el_ms.p95",
}
"""The predicted figures: name -> where a load's metrics have it. All are of the whole run."""


@dataclass(frozen=True)
class Predicted:
    """One figure of one cell."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative to what was measured: 0.05 is 5 % too much."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True)
class Predictions:
    """``cells``: cell id -> name of a metric -> figure; ``costs``: unit costs fitted to all cells [s]."""

    cells: Mapping[str, Mapping[str, Predicted]]
    costs: Mapping[str, Any]
    notes: Sequence[str]

    def errors(self, metric: str) -> list[float]:
        """Of all cells that have the metric."""
        return [found[metric].error for found in self.cells.values() if metric in found]


def write_predictions(
    folder: Path, cells: Mapping[str, Mapping[str, Predicted]], costs: Any, notes: Sequence[str]
) -> Path:
    """The path of what was written. ``costs``: a dataclass."""
    path = folder / PREDICTIONS
    found = {cell: {name: dataclasses.asdict(each) for name, each in of.items()} for cell, of in cells.items()}
    stored = {"format": FORMAT, "cells": found, "unit_costs_s": dataclasses.asdict(costs), "notes": list(notes)}
    write_json(path, stored)
    return path


def read_predictions(folder: Path) -> Predictions | None:
    """None where nothing was predicted. Raises UsageError for a damaged file, or one of another format."""
    path = folder / PREDICTIONS
    if not path.is_file():
        return None
    try:
        stored = read_json(path)
        if stored["format"] != FORMAT:
            raise ValueError(f"its format is {stored['format']!r}")
        cells = {
            cell: {name: Predicted(float(pair["predicted"]), float(pair["measured"])) for name, pair in found.items()}
            for cell, found in stored["cells"].items()
        }
        return Predictions(cells, stored["unit_costs_s"], stored["notes"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} cannot be read ({error}): write it again with `kvbench predict {folder}`") from None
