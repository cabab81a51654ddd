"""Measured operator times of one model on one kind of GPU, read and interpolated.

A folder has, each with a header and times in microseconds:
    dense.csv         layer, tokens, time_us: operators on all tokens of a step. ``embedding`` and ``final_layernorm``
                      run once a step, the others once a layer.
    per_sequence.csv  layer, sequences, time_us: what runs once a step on the last token of each sequence, such as
                      ``lm_head`` and ``sampler``.
    attention.csv     prefill_chunk, kv_prefill, n_decode, kv_decode, time_us: attention of one layer in a step of one
                      chunk of a prompt with kv_prefill tokens before it, and of n_decode sequences of kv_decode tokens
                      each. Either part may be 0.
All are of one rank under tensor parallelism; communication is not in them.

Between the points of a grid all is interpolated linearly. Beyond it the last two points are continued, and
``Tables.beyond`` says how far the simulation went.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvbench.common.errors import UsageError

_ONCE_A_STEP = ("embedding", "final_layernorm")
_TWICE_A_LAYER = ("layernorm",)  # before attention and before the MLP
_NEEDED = ("qkv_proj", "o_proj", "gate_up_proj", "act_fn", "down_proj")


class Curve:
    """A piecewise linear function of one number."""

    def __init__(self, points: Mapping[float, float]) -> None:
        self.x = sorted(points)
        self.y = [points[x] for x in self.x]

    def __call__(self, x: float) -> float:
        at = min(max(bisect_right(self.x, x), 1), len(self.x) - 1)
        if len(self.x) == 1:
            return self.y[0]
        x0, x1, y0, y1 = self.x[at - 1], self.x[at], self.y[at - 1], self.y[at]
        return y0 + (y1 - y0) * (max(x, self.x[0]) - x0) / (x1 - x0)


class Grid:
    """A multilinear function of several numbers, given on a grid; below it the least point counts."""

    def __init__(self, axes: Sequence[Sequence[float]], values: np.ndarray) -> None:
        self.axes = [list(map(float, axis)) for axis in axes]
        self._values = values.ravel().tolist()
        self._strides = [int(np.prod(values.shape[i + 1 :])) for i in range(values.ndim)]

    def __call__(self, *where: float) -> float:
        corners = [(0, 1.0)]
        for axis, stride, x in zip(self.axes, self._strides, where, strict=True):
            if len(axis) == 1 or x <= axis[0]:
                continue
            at = min(bisect_right(axis, x), len(axis) - 1) - 1
            share = (x - axis[at]) / (axis[at + 1] - axis[at])
            low = at * stride
            corners = [
                (base + offset, weight * part)
                for base, weight in corners
                for offset, part in ((low, 1.0 - share), (low + stride, share))
                if part
            ]
        values = self._values
        return sum(values[base] * weight for base, weight in corners)


def grid_of(points: Mapping[tuple[float, ...], float]) -> Grid:
    """From points that fill most of a grid: values on few of its lines are left out, holes continued from their line.

    A hole is where the GPU's memory was too small: the last axis is continued first.
    """
    axes = [_common(values) for values in zip(*points, strict=True)]
    values = np.full([len(axis) for axis in axes], np.nan)
    index = [{x: i for i, x in enumerate(axis)} for axis in axes]
    for where, value in points.items():
        if all(x in known for x, known in zip(where, index, strict=True)):
            values[tuple(known[x] for x, known in zip(where, index, strict=True))] = value
    for axis in reversed(range(len(axes))):
        _continue(values, axes[axis], axis)
    return Grid(axes, values)


def _common(values: Sequence[float]) -> list[float]:
    """The values that occur at least a quarter as often as the most frequent one."""
    found, counts = np.unique(np.asarray(values), return_counts=True)
    return found[counts >= counts.max() / 4].tolist()


def _continue(values: np.ndarray, x: Sequence[float], axis: int) -> None:
    """Fills NaN behind the last known values of each line along ``axis``, in place."""
    lines = np.moveaxis(values, axis, -1)
    for at in range(2, len(x)):
        share = (x[at] - x[at - 1]) / (x[at - 1] - x[at - 2])
        line, last, before = lines[..., at], lines[..., at - 1], lines[..., at - 2]
        hole = np.isnan(line)
        line[hole] = np.maximum(last + (last - before) * share, last)[hole]


@dataclass
class Tables:
    """Seconds a step, by part. ``beyond``: by what was out of a grid, the largest value met and the grid's last."""

    name: str
    layers: int
    dense: Curve
    once: Curve
    head: Curve
    decode: Grid
    prefill: Grid
    mixed: Grid
    beyond: dict[str, tuple[float, float]] = field(default_factory=dict)


def read_tables(folder: Path, layers: int) -> Tables:
    """Of a model with ``layers`` layers. Raises UsageError for a file or an operator that is missing."""
    dense, once = defaultdict(float), defaultdict(float)
    rows = _rows(folder / "dense.csv", ("layer", "tokens", "time_us"))
    if missing := [name for name in _NEEDED if name not in {row["layer"] for row in rows}]:
        raise UsageError(f"{folder / 'dense.csv'} has no times of {', '.join(missing)}: measure them, or use roofline")
    for row in rows:
        target = once if row["layer"] in _ONCE_A_STEP else dense
        target[float(row["tokens"])] += float(row["time_us"]) * (2 if row["layer"] in _TWICE_A_LAYER else 1)
    head = defaultdict(float)
    for row in _rows(folder / "per_sequence.csv", ("layer", "sequences", "time_us")):
        head[float(row["sequences"])] += float(row["time_us"])
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    attention = {
        tuple(float(row[name]) for name in names): float(row["time_us"])
        for row in _rows(folder / "attention.csv", (*names, "time_us"))
    }
    return Tables(
        name=str(folder),
        layers=layers,
        dense=Curve(dense),
        once=Curve(once),
        head=Curve(head),
        decode=grid_of({(n, kv): t for (chunk, _, n, kv), t in attention.items() if not chunk and n}),
        prefill=grid_of({(chunk, kv): t for (chunk, kv, n, _), t in attention.items() if chunk and not n}),
        mixed=grid_of({where: t for where, t in attention.items() if where[0] and where[2]}),
    )


def _rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
                raise UsageError(f"{path} has no column {', '.join(missing)}: an operator table needs it")
            return list(reader)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): an operator table needs this file") from None
