"""Measured operator times of one model on one kind of GPU, read and interpolated.

A folder has, each with a header and times in microseconds, of one GPU of those that share the model:
    dense.csv         layer, tokens, time_us: operators on all tokens of a step. ``embedding`` and ``final_layernorm``
                      run once a step, ``layernorm`` twice a layer, the others once a layer.
    per_sequence.csv  layer, sequences, time_us: what runs once a step on the last token of each sequence, such as
                      ``lm_head`` and ``sampler``.
    attention.csv     prefill_chunk, kv_prefill, n_decode, kv_decode, time_us: attention of one layer in a step of one
                      chunk of a prompt with kv_prefill tokens before it, and of n_decode sequences of kv_decode tokens
                      each. Either part may be 0.
    moe.csv           tokens, activated_experts, time_us: router and experts of one layer, for a model that has them.
Communication between GPUs is not in them.

Between the points of a grid all is interpolated linearly. Beyond it the last two points are continued, and
``MeasuredOperators.notes`` says how far the simulation went.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.execution.simulated_executor import StepWork
from kvbench.common.errors import UsageError
from kvbench.common.parsing import read_yaml
from kvbench.common.text import listing
from kvbench.simulation.cost_model import LONGEST_SHARE, Calibration, CostModel, GpuShare, Kernels
from kvbench.simulation.experts import active_experts

_GEMMS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_ONCE_A_STEP = ("embedding", "final_layernorm")
_TWICE_A_LAYER = ("layernorm",)  # before attention and before the MLP


class Curve:
    """A piecewise linear function of one number; below its least point that one counts."""

    def __init__(self, points: Mapping[float, float]) -> None:
        self.x = sorted(points)
        self.y = [points[x] for x in self.x]

    @property
    def last(self) -> float:
        return self.x[-1]

    def __call__(self, x: float) -> float:
        known = self.x
        if x <= known[0] or len(known) == 1:
            return self.y[0]
        at = min(bisect_right(known, x), len(known) - 1)
        x0, x1, y0, y1 = known[at - 1], known[at], self.y[at - 1], self.y[at]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


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
            if not share:
                corners = [(base + low, weight) for base, weight in corners]
                continue
            high, rest = low + stride, 1.0 - share
            corners = [(base + low, weight * rest) for base, weight in corners] + [
                (base + high, weight * share) for base, weight in corners
            ]
        values = self._values
        return sum([values[base] * weight for base, weight in corners])


def grid_of(points: Mapping[tuple[float, ...], float]) -> Grid:
    """From points that need not fill a grid: those of two sweeps with steps of their own, say, or without what the
    GPU's memory had no room for.

    A hole between known values of a line is interpolated, along the last axis first. Where a line only begins or
    ends too early, its first value holds before it, and its last two are continued.
    """
    axes = [sorted(set(values)) for values in zip(*points, strict=True)]
    values = np.full([len(axis) for axis in axes], np.nan)
    index = [{x: i for i, x in enumerate(axis)} for axis in axes]
    for where, value in points.items():
        values[tuple(known[x] for x, known in zip(where, index, strict=True))] = value
    for fill in (_interpolate, _extend):
        for axis in reversed(range(len(axes))):
            fill(np.moveaxis(values, axis, -1), np.asarray(axes[axis]))
    return Grid(axes, values)


def _interpolate(values: np.ndarray, x: np.ndarray) -> None:
    """Fills NaN between known values of each line along the last axis, in place."""
    missing = np.isnan(values)
    for where in np.argwhere(missing.any(axis=-1) & ((~missing).sum(axis=-1) >= 2)):
        line, hole = values[tuple(where)], missing[tuple(where)]
        known = x[~hole]
        inside = hole & (x > known[0]) & (x < known[-1])
        line[inside] = np.interp(x[inside], known, line[~hole])


def _extend(values: np.ndarray, x: np.ndarray) -> None:
    """Fills NaN before and behind the known values of each line along the last axis, in place; no line falls."""
    missing = np.isnan(values)
    for where in np.argwhere(missing.any(axis=-1) & ~missing.all(axis=-1)):
        line, known = values[tuple(where)], np.flatnonzero(~missing[tuple(where)])
        first, last = known[0], known[-1]
        line[:first] = line[first]
        if last + 1 < len(x):
            before = known[-2] if len(known) > 1 else last
            slope = (line[last] - line[before]) / (x[last] - x[before]) if before != last else 0.0
            line[last + 1 :] = line[last] + max(slope, 0.0) * (x[last + 1 :] - x[last])


@dataclass(frozen=True)
class Tables:
    """Microseconds by operator; those of attention, experts, ``gemm`` and ``elementwise`` are of one layer."""

    folder: Path
    gemm: Curve
    elementwise: Curve
    once: Curve
    head: Curve
    decode: Grid
    prefill: Grid
    mixed: Grid | None
    experts: Grid | None = None
    absent: tuple[str, ...] = ()


def find_tables(root: Path, gpu: str, model: str, gpus: int) -> Path:
    """``root`` itself, or of a collection the folder GPU/MODEL/tpN, whose names are compared without case and dashes.

    Raises UsageError where there is none, with what is there.
    """
    if not root.is_dir():
        raise UsageError(f"{root} is no folder: give one with operator tables (dense.csv, attention.csv ...)")
    if (root / "dense.csv").is_file():
        _require_same(root / "meta.yaml", gpu, model)
        return root
    found = sorted(path.parent for path in root.glob("*/*/tp*/dense.csv"))
    for folder in found:
        device, name, split = folder.parts[-3:]
        if _plain(device) == _plain(gpu) and _plain(name).startswith(_plain(model)) and split == f"tp{gpus}":
            return folder
    known = ", ".join(str(folder.relative_to(root)) for folder in found) or "no operator tables"
    raise UsageError(
        f"{root} has no tables of {model} on {gpu} with tensor parallelism {gpus}: it has {known}. Measure them, or "
        "leave --ops out for the data sheet"
    )


def _require_same(meta: Path, gpu: str, model: str) -> None:
    """Raises UsageError where the tables say that they are of another GPU or model; they need not say."""
    try:
        known = read_yaml(meta) if meta.is_file() else None
    except (OSError, ValueError) as error:
        raise UsageError(f"{meta} cannot be read: {error}") from None
    known = known if isinstance(known, dict) else {}
    for what, wanted, found in (("GPU", gpu, known.get("hardware")), ("model", model, known.get("model"))):
        if found and not _plain(str(found)).startswith(_plain(wanted)):
            raise UsageError(
                f"{meta.parent} has operator times of the {what} {found}, and {wanted} is to be simulated: give the "
                "tables of that one, or leave --ops out for the data sheet"
            )


def _plain(name: str) -> str:
    return name.rsplit("/", 1)[-1].lower().replace("-", "").replace("_", "").replace(" ", "").removeprefix("meta")


def read_tables(folder: Path) -> Tables:
    """Raises UsageError for a file, a column or an operator that is missing, and for what is no number."""
    rows = _rows(folder / "dense.csv", ("tokens", "time_us"), "layer")
    experts = (
        _rows(folder / "moe.csv", ("tokens", "activated_experts", "time_us")) if (folder / "moe.csv").is_file() else []
    )
    needed = _GEMMS[: 2 if experts else 4]
    if missing := [name for name in needed if name not in {row["layer"] for row in rows}]:
        raise UsageError(
            f"{folder / 'dense.csv'} has no times of {', '.join(missing)}: measure them, or leave --ops out"
        )
    curves: dict[str, dict[float, float]] = {name: defaultdict(float) for name in ("gemm", "elementwise", "once")}
    for row in rows:
        layer = row["layer"]
        target = "once" if layer in _ONCE_A_STEP else "gemm" if layer in _GEMMS else "elementwise"
        curves[target][row["tokens"]] += row["time_us"] * (2 if layer in _TWICE_A_LAYER else 1)
    head: dict[float, float] = defaultdict(float)
    of_sequences = _rows(folder / "per_sequence.csv", ("sequences", "time_us"), "layer")
    for row in of_sequences:
        head[row["sequences"]] += row["time_us"]
    if len(curves["gemm"]) < 2:
        raise UsageError(f"{folder / 'dense.csv'} has times of one number of tokens: at least two are needed")
    named = {row["layer"] for row in rows} | {row["layer"] for row in of_sequences}
    absent = [name for name in ("layernorm", "lm_head", "sampler") if name not in named]
    none = {1.0: 0.0}
    return Tables(
        folder=folder,
        gemm=Curve(curves["gemm"]),
        elementwise=Curve(curves["elementwise"] or none),
        once=Curve(curves["once"] or none),
        head=Curve(head or none),
        experts=grid_of({(row["tokens"], row["activated_experts"]): row["time_us"] for row in experts})
        if experts
        else None,
        absent=tuple(absent),
        **_attention(folder / "attention.csv"),
    )


def _attention(path: Path) -> dict[str, Grid | None]:
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    at = {tuple(row[name] for name in names): row["time_us"] for row in _rows(path, (*names, "time_us"))}
    decode = {(n, kv): time for (chunk, _, n, kv), time in at.items() if not chunk and n}
    prefill = {(chunk, kv): time for (chunk, kv, n, _), time in at.items() if chunk and not n}
    mixed = {where: time for where, time in at.items() if where[0] and where[2]}
    for points, what in ((decode, "decode alone (prefill_chunk 0)"), (prefill, "prefill alone (n_decode 0)")):
        if not points:
            raise UsageError(f"{path} has no times of {what}: measure them, or leave --ops out for the data sheet")
    return {"decode": grid_of(decode), "prefill": grid_of(prefill), "mixed": grid_of(mixed) if mixed else None}


def _rows(path: Path, numbers: Sequence[str], text: str | None = None) -> list[dict[str, Any]]:
    """The rows of a CSV: of ``numbers`` finite and at least 0, with the column ``text`` as it is."""
    columns = (*numbers, text) if text else tuple(numbers)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
                raise UsageError(f"{path} has no column {', '.join(missing)}: an operator table needs it")
            rows: list[dict[str, Any]] = []
            for row in reader:
                try:
                    rows.append({name: float(row[name]) for name in numbers} | ({text: row[text]} if text else {}))
                except (TypeError, ValueError):
                    raise UsageError(f"{path}, line {reader.line_num}: {', '.join(numbers)} must be numbers") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise UsageError(f"{path} cannot be read ({reason}): an operator table needs this file") from None
    if not rows:
        raise UsageError(f"{path} has no rows: an operator table needs them")
    for row in rows:
        if bad := [name for name in numbers if not 0 <= row[name] < float("inf")]:
            raise UsageError(f"{path} has {bad[0]} {row[bad[0]]}: give a number of at least 0")
    return rows


class MeasuredOperators(CostModel):
    """The cost model of ``tables``."""

    def __init__(self, tables: Tables, calibration: Calibration, around: GpuShare) -> None:
        super().__init__(calibration, around)
        self.tables, self._layer_s, self._experts = tables, around.layers * 1e-6, around.experts
        # Sequences that keep all processors busy once: a decode step has a block of threads for each KV head of a
        # sequence, a step with prompts for each query head.
        self._decode_wave = LONGEST_SHARE * around.processors / around.kv_heads
        self._mixed_wave = LONGEST_SHARE * around.processors / around.heads
        of_prompts, of_decodes = [tables.prefill.axes], [tables.decode.axes]
        if tables.mixed is not None:
            of_prompts.append(tables.mixed.axes[:2])
            of_decodes.append(tables.mixed.axes[2:])
        ends = [min(axes[i][-1] for axes in grids) for grids in (of_decodes, of_prompts) for i in (0, 1)]
        self._last = (tables.gemm.last, tables.head.last, *ends)
        self._most = [0.0] * len(self._last)  # met so far, beyond the tables, of what ``notes`` names

    def kernels(self, work: StepWork) -> Kernels:
        tables, layer_s, tokens = self.tables, self._layer_s, work.tokens
        context = work.decode_context / work.decodes if work.decodes else 0.0
        most, last = self._most, self._last
        chunk, before = _as_one(work.prefills) if work.prefills else (0, 0.0)
        for i, value in enumerate((tokens, work.drawn, work.decodes, context, chunk, before)):
            if value > last[i] and value > most[i]:
                most[i] = value
        experts = 0.0
        if tables.experts is not None:
            assert self._experts is not None
            experts = tables.experts(tokens, active_experts(tokens, *self._experts, self.calibration.evenness))
        return Kernels(
            gemm=tables.gemm(tokens) * layer_s,
            experts=experts * layer_s,
            attention=self._attention(work, context, chunk, before) * layer_s,
            elementwise=tables.elementwise(tokens) * layer_s + tables.once(tokens) * 1e-6,
            head=tables.head(work.drawn) * 1e-6 if work.drawn else 0.0,
        )

    def _attention(self, work: StepWork, context: float, chunk: float, before: float) -> float:
        """Microseconds a layer. ``chunk``, ``before``: of all prompts as one.

        Decodes take as long as ones of their mean context, or as the longest sequence alone: no other can take over
        its work.
        """
        tables, decodes, longest = self.tables, work.decodes, work.longest_decode
        if not work.prefills:
            return max(tables.decode(decodes, context), tables.decode(min(decodes, self._decode_wave), longest))
        alone = tables.prefill(chunk, before)
        prefill = alone if len(work.prefills) == 1 else self._several(work.prefills, chunk, before, alone)
        if not decodes:
            return prefill
        if tables.mixed is None:
            return prefill + tables.decode(decodes, context)
        mixed = tables.mixed(chunk, before, decodes, context)
        if longest > 2 * context:  # else the mean of all is within what the grid's steps of two tell
            mixed = max(mixed, tables.mixed(chunk, before, min(decodes, self._mixed_wave), longest))
        return mixed + prefill - alone

    def _several(self, prefills: Sequence[tuple[int, int]], chunk: int, before: float, alone: float) -> float:
        """Prompts beside each other do not attend to one another: less work than one chunk of all their tokens.

        They share the GPU as well as that chunk, and take at least as long as the longest of them alone.
        """
        work = sum(count * (known + count / 2) for count, known in prefills)
        share = min(1.0, work / (chunk * (before + chunk / 2)))
        return max(alone * share, max(self.tables.prefill(count, known) for count, known in prefills))

    def notes(self) -> list[str]:
        names = ("tokens a step", "sequences that draw a token in a step", "decoding sequences", "tokens of their "
                 "context", "prompt tokens in a step", "tokens before those of a prompt")  # fmt: skip
        of = "/".join(self.tables.folder.parts[-3:])
        absent = [*self.tables.absent, *(["steps with both prompts and decodes"] if self.tables.mixed is None else [])]
        beyond = [
            f"{name} went up to {met:,.0f} and the tables of {of} end at {last:,.0f} ({met / last:.1f}x): continued "
            "from their last two points"
            for name, met, last in zip(names, self._most, self._last, strict=True)
            if met
        ]
        lacking = [f"the tables of {of} have no times of {listing(absent)}"] if absent else []
        return [*lacking, *beyond, *super().notes()]


def _as_one(prefills: Sequence[tuple[int, int]]) -> tuple[int, float]:
    """Tokens of all chunks, and the tokens before one chunk of that size that attends as much, at least 0."""
    if len(prefills) == 1:
        return prefills[0]
    chunk = sum(count for count, _ in prefills)
    work = sum(count * (before + count / 2) for count, before in prefills)
    return chunk, max(0.0, work / chunk - chunk / 2)
