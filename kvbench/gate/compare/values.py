"""What the loads of a comparison measured, as arrays: from its folder and manifest alone."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.common.files import read_json, write_text
from kvbench.gate.compare.folder import CompareFolder
from kvbench.gate.timing.plan import BASE, SIDES
from kvbench.gate.timing.rules import MetricRule
from kvbench.runs.aggregate import flatten
from kvbench.runs.folder import DONE
from kvbench.runs.metric_names import value_of


def load_folder(folder: CompareFolder, cell: Mapping[str, Any], side: str, pair: int) -> Path:
    """``cell``: a row of the manifest's ``cells`` (name, workload, turn, base, candidate: the sides' cell ids)."""
    return folder.run(side, cell["workload"]).load(cell[side], pair)


def whole_pairs(folder: CompareFolder, manifest: Mapping[str, Any]) -> int:
    """How many pairs are there from the first on, with every cell of both sides valid."""
    places = list(itertools.product(manifest["cells"], SIDES))
    pair = 0
    while places and all(folder.is_measured(s, cell["workload"], cell[s], pair + 1) for cell, s in places):
        pair += 1
    return pair


def no_first_pair(folder: CompareFolder, manifest: Mapping[str, Any]) -> str:
    """What is missing of the first pair of a comparison without one."""
    for side, cell in itertools.product(SIDES, manifest["cells"]):
        done = load_folder(folder, cell, side, 1) / DONE
        if side in folder.stored and not done.is_file():
            return (
                f"{side} has no {done}: the loads of each repeat are compared, and a summary of them does not do; give "
                "runs whose folders are whole"
            )
    return "no pair was measured"


def read_values(
    folder: CompareFolder, manifest: Mapping[str, Any], metrics: Sequence[MetricRule], pairs: Sequence[int]
) -> dict[str, np.ndarray]:
    """By side, [pairs, cells, metrics] in the metrics' units; NaN where a load has no such metric."""
    values = {side: np.full((len(pairs), len(manifest["cells"]), len(metrics)), np.nan) for side in SIDES}
    for side, (i, pair), (j, cell) in itertools.product(SIDES, enumerate(pairs), enumerate(manifest["cells"])):
        measured = flatten(read_json(load_folder(folder, cell, side, pair) / DONE)["metrics"])
        for k, metric in enumerate(metrics):
            value = value_of(measured, metric.name)
            values[side][i, j, k] = np.nan if value is None else value
    return values


def read_counters(folder: CompareFolder, manifest: Mapping[str, Any], pairs: int) -> dict[str, dict[str, list[Any]]]:
    """counters.json of each load: by cell name and side, in the order of the pairs."""
    return {
        cell["name"]: {
            side: [read_json(load_folder(folder, cell, side, p) / "counters.json") for p in range(1, pairs + 1)]
            for side in SIDES
        }
        for cell in manifest["cells"]
    }


def write_pairs(folder: CompareFolder, manifest: Mapping[str, Any], metrics: Sequence[MetricRule]) -> Path:
    """pairs.csv: one row a pair, cell and metric, with the side that went first, all pairs that are whole."""
    orders = manifest["order"]
    values = read_values(folder, manifest, metrics, range(1, whole_pairs(folder, manifest) + 1))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["pair", "cell", "first", "metric", "unit", *SIDES, "log_ratio"])
    for i, j in itertools.product(range(len(values[BASE])), range(len(manifest["cells"]))):
        cell = manifest["cells"][j]
        first = orders.get(str(i + 1), {}).get(cell["turn"], "")  # stored runs were not measured in turn
        for k, metric in enumerate(metrics):
            base, candidate = (values[side][i, j, k] for side in SIDES)
            ratio = np.log(candidate / base) if base > 0 and candidate > 0 else np.nan
            row = [i + 1, cell["name"], first, metric.name, metric.unit]
            writer.writerow([*row, *(f"{x:.6g}" for x in (base, candidate, ratio))])
    path = folder.path / "pairs.csv"
    write_text(path, out.getvalue())
    return path
