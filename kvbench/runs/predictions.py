"""predictions.json: what the simulator predicted of each cell, calibrated on the run's other cells."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kvbench.common.records import Record, read_record

PREDICTIONS = "predictions.json"

METRICS = {
    "output tok/s": "output_throughput",
    "mean TTFT": "ttft_ms.mean",
    "p95 TTFT": "ttft_ms.p95",
    "mean TPOT": "tpot_ms.mean",
    "p95 ITL": "itl_ms.p95",
    "p95 E2EL": "e2el_ms.p95",
}
"""The predicted figures: the name in the file -> where LoadMetrics has it. All are of the whole run."""


class Predicted(Record):
    """One figure of one cell."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The relative error of the prediction: 0.05 is 5 % too much."""
        return self.predicted / self.measured - 1.0


class Predictions(Record):
    """The predictions of a run. ``cells``: by cell id and metric; ``unit_costs_s`` [s]: fitted to all cells."""

    FORMAT: ClassVar[str] = "kvbench-predictions/1"

    cells: Mapping[str, Mapping[str, Predicted]] = {}
    unit_costs_s: Mapping[str, Any] = {}
    notes: tuple[str, ...] = ()

    def errors(self, metric: str) -> list[float]:
        """The errors of all cells that have the metric."""
        return [figures[metric].error for figures in self.cells.values() if metric in figures]


def read_predictions(folder: Path) -> Predictions | None:
    """Reads the predictions; None where there are none. Raises UsageError for a damaged or newer file."""
    path = folder / PREDICTIONS
    again = f"write it again with `kvbench dev predict {folder}`"
    return read_record(Predictions, path, again) if os.path.lexists(path) else None
