"""Reads and interpolates measured operator times of one model on one kind of GPU.

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

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from kvbench.common.errors import UsageError
from kvbench.common.parsing import read_yaml
from kvbench.common.text import listing
from kvbench.simulation.cost.cost_model import LONGEST_SHARE, CostCalibration, CostModel, GpuShare, Kernels
from kvbench.simulation.wording import sentence
from kvbench_engine.execution.simulated_executor import StepWork

_GEMMS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_ONCE_A_STEP = ("embedding", "final_layernorm")
_TWICE_A_LAYER = ("layernorm",)  # before attention and before the MLP
_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_LIMITS = (
    "tokens a step", "sequences that draw a token in a step", "decoding sequences", "tokens of their context",
    "prompt tokens in a step", "tokens before those of a prompt",
)  # fmt: skip
"""What of a step may lie beyond the tables."""


class Curve:
    """A piecewise linear function of one number; below its least point that one counts."""

    def __init__(self, points: Mapping[float, float]) -> None:
        self.x = sorted(points)
        self.y = [points[x] for x in self.x]

    @property
    def last(self) -> float:
        return self.x[-1]

    def __call__(self, x: float) -> float:
        if x <= self.x[0] or len(self.x) == 1:
            return self.y[0]
        at = min(bisect_right(self.x, x), len(self.x) - 1)
        x0, x1, y0, y1 = self.x[at - 1], self.x[at], self.y[at - 1], self.y[at]
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
    """Makes a grid of points that need not fill it: of two sweeps with other steps, or without what had no room.

    A hole between known values of a line is interpolated, along the last axis first. Where a line only begins or
    ends too early, its first value holds before it, and its last two are continued.
    """
    axes = [sorted(set(values)) for values in zip(*points, strict=True)]
    values = np.full([len(axis) for axis in axes], np.nan)
    index = [{x: i for i, x in enumerate(axis)} for axis in axes]
    for where, value in points.items():
        values[tuple(place[x] for x, place in zip(where, index, strict=True))] = value
    for fill in (_interpolate, _extend):
        for axis in reversed(range(len(axes))):
            fill(np.moveaxis(values, axis, -1), np.asarray(axes[axis]))
    return Grid(axes, values)


def _interpolate(values: np.ndarray, x: np.ndarray) -> None:
    """Fills NaN between known values of each line along the last axis, in place."""
    missing = np.isnan(values)
    for where in np.argwhere(missing.any(axis=-1) & ((~missing).sum(axis=-1) >= 2)):
        line, hole = values[tuple(where)], missing[tuple(where)]
        measured = x[~hole]
        inside = hole & (x > measured[0]) & (x < measured[-1])
        line[inside] = np.interp(x[inside], measured, line[~hole])


def _extend(values: np.ndarray, x: np.ndarray) -> None:
    """Fills NaN before and behind the known values of each line along the last axis, in place; no line falls."""
    missing = np.isnan(values)
    for where in np.argwhere(missing.any(axis=-1) & ~missing.all(axis=-1)):
        line, measured = values[tuple(where)], np.flatnonzero(~missing[tuple(where)])
        first, last = measured[0], measured[-1]
        line[:first] = line[first]
        if last + 1 < len(x):
            before = measured[-2] if len(measured) > 1 else last
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
    """Finds the tables: ``root``, or in a collection its GPU/MODEL/tpN; names are compared without case and dashes.

    Raises UsageError where there is none, with what is there.
    """
    if not root.is_dir():
        raise UsageError(f"{root} is no folder: give one with operator tables (dense.csv, attention.csv ...)")
    if (root / "dense.csv").is_file():
        _require_same(root / "meta.yaml", gpu, model)
        return root
    folders = sorted(path.parent for path in root.glob("*/*/tp*/dense.csv"))
    for folder in folders:
        device, name = map(plain_name, folder.parts[-3:-1])
        if device == plain_name(gpu) and name.startswith(plain_name(model)) and folder.name == f"tp{gpus}":
            return folder
    tables = ", ".join(str(folder.relative_to(root)) for folder in folders) or "no operator tables"
    raise UsageError(sentence("tables.none", root=root, model=model, gpu=gpu, gpus=gpus, tables=tables))


def _require_same(meta: Path, gpu: str, model: str) -> None:
    """Raises UsageError where the tables say that they are of another GPU or model; they need not say."""
    try:
        stated = read_yaml(meta) if meta.is_file() else None
    except (OSError, ValueError) as error:
        raise UsageError(f"{meta} cannot be read: {error}") from None
    for what, key, wanted in (("GPU", "hardware", gpu), ("model", "model", model)):
        other = stated[key] if isinstance(stated, dict) and key in stated else None
        if other and not plain_name(str(other)).startswith(plain_name(wanted)):
            raise UsageError(sentence("tables.of_another", folder=meta.parent, what=what, other=other, wanted=wanted))


def plain_name(name: str) -> str:
    """Returns a GPU's or model's name without its organisation, in lower case, without what separates words."""
    return name.rsplit("/", 1)[-1].lower().replace("-", "").replace("_", "").replace(" ", "").removeprefix("meta")


def read_tables(folder: Path) -> Tables:
    """Reads the tables of a folder.

    Raises UsageError for a file, a column or an operator that is missing, and for what is no number.
    """
    dense = _read(folder / "dense.csv", ("tokens", "time_us"), "layer")
    sequences = _read(folder / "per_sequence.csv", ("sequences", "time_us"), "layer")
    experts = None
    if (folder / "moe.csv").is_file():
        rows = _read(folder / "moe.csv", ("tokens", "activated_experts", "time_us")).itertuples(index=False, name=None)
        experts = grid_of({(tokens, active): time for tokens, active, time in rows})
    layers = {*dense["layer"], *sequences["layer"]}
    if missing := [name for name in _GEMMS[: 2 if experts else 4] if name not in set(dense["layer"])]:
        raise UsageError(sentence("tables.no_times", path=folder / "dense.csv", what=", ".join(missing)))
    kinds = dict.fromkeys(_ONCE_A_STEP, "once") | dict.fromkeys(_GEMMS, "gemm")
    times: dict[str, dict[float, float]] = {name: defaultdict(float) for name in ("gemm", "elementwise", "once")}
    for tokens, time, layer in dense.itertuples(index=False, name=None):
        times[kinds.get(layer, "elementwise")][tokens] += time * (1 + (layer in _TWICE_A_LAYER))
    head: dict[float, float] = defaultdict(float)
    for count, time, _ in sequences.itertuples(index=False, name=None):
        head[count] += time
    if len(times["gemm"]) < 2:
        raise UsageError(f"{folder / 'dense.csv'} has times of one number of tokens: at least two are needed")
    decode, prefill, mixed = _attention(folder / "attention.csv")
    return Tables(
        folder=folder,
        gemm=Curve(times["gemm"]),
        elementwise=Curve(times["elementwise"] or {1.0: 0.0}),
        once=Curve(times["once"] or {1.0: 0.0}),
        head=Curve(head),
        decode=decode,
        prefill=prefill,
        mixed=mixed,
        experts=experts,
        absent=tuple(name for name in ("layernorm", "lm_head", "sampler") if name not in layers),
    )


def _attention(path: Path) -> tuple[Grid, Grid, Grid | None]:
    """Reads the times of decodes alone, of prompts alone, and of both together, where that was measured."""
    rows = _read(path, (*_ATTENTION, "time_us")).itertuples(index=False, name=None)
    times = {(chunk, before, n, kv): time for chunk, before, n, kv, time in rows}
    decode = {(n, kv): time for (chunk, _, n, kv), time in times.items() if not chunk and n}
    prefill = {(chunk, before): time for (chunk, before, n, _), time in times.items() if chunk and not n}
    mixed = {where: time for where, time in times.items() if where[0] and where[2]}
    for points, what in ((decode, "decode alone (prefill_chunk 0)"), (prefill, "prefill alone (n_decode 0)")):
        if not points:
            raise UsageError(sentence("tables.no_times", path=path, what=what))
    return grid_of(decode), grid_of(prefill), grid_of(mixed) if mixed else None


def _read(path: Path, numbers: Sequence[str], *texts: str) -> pd.DataFrame:
    """Reads the columns ``numbers``, finite and at least 0, then ``texts`` of a CSV. Raises UsageError."""
    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read ({reason}): an operator table needs this file") from None
    if missing := [name for name in (*numbers, *texts) if name not in frame]:
        raise UsageError(f"{path} has no column {', '.join(missing)}: an operator table needs it")
    if frame.empty:
        raise UsageError(f"{path} has no rows: an operator table needs them")
    try:
        frame = frame.astype(dict.fromkeys(numbers, float))
    except ValueError as error:
        raise UsageError(f"{path}: {', '.join(numbers)} must be numbers ({error})") from None
    for name in numbers:
        wrong = frame[name][~frame[name].between(0, math.inf, inclusive="left")]
        if len(wrong):
            raise UsageError(f"{path} has {name} {wrong.iloc[0]}: give a number of at least 0")
    return frame[[*numbers, *texts]]


class MeasuredOperators(CostModel):
    """The cost model of ``tables``."""

    def __init__(self, tables: Tables, calibration: CostCalibration, share: GpuShare) -> None:
        super().__init__(calibration, share)
        self.tables, self._layer_s = tables, share.layers * 1e-6
        # Sequences that keep all processors busy once: a decode step has a block of threads for each KV head of a
        # sequence, a step with prompts for each query head.
        self._decode_wave = LONGEST_SHARE * share.processors / share.kv_heads
        self._mixed_wave = LONGEST_SHARE * share.processors / share.heads
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
        chunk, before = _as_one(work.prefills)
        for i, value in enumerate((tokens, work.drawn, work.decodes, context, chunk, before)):
            if value > last[i] and value > most[i]:
                most[i] = value
        experts = head = 0.0
        if tables.experts is not None:
            experts = tables.experts(tokens, self.active_experts(tokens))
        if work.drawn:
            head = tables.head(work.drawn) * 1e-6
        return Kernels(
            gemm=tables.gemm(tokens) * layer_s,
            experts=experts * layer_s,
            attention=self._attention(work, context, chunk, before) * layer_s,
            elementwise=tables.elementwise(tokens) * layer_s + tables.once(tokens) * 1e-6,
            head=head,
        )

    def _attention(self, work: StepWork, context: float, chunk: float, before: float) -> float:
        """Computes the microseconds of a layer. ``chunk``, ``before``: of all prompts as one.

        Decodes take as long as ones of their mean context, or as the longest sequence alone: no other can take over
        its work.
        """
        tables, decodes, longest = self.tables, work.decodes, work.longest_decode
        if not work.prefills:
            return max(tables.decode(decodes, context), tables.decode(min(decodes, self._decode_wave), longest))
        prefill = alone = tables.prefill(chunk, before)
        if len(work.prefills) > 1:
            # Prompts do not attend to one another, which is less work than one chunk of all their tokens. They share
            # the GPU as well as that chunk, and take at least as long as the longest of them alone.
            share = min(1.0, _attended(work.prefills) / (chunk * (before + chunk / 2)))
            prefill = max(alone * share, max(tables.prefill(count, held) for count, held in work.prefills))
        if not decodes:
            return prefill
        if tables.mixed is None:
            return prefill + tables.decode(decodes, context)
        mixed = tables.mixed(chunk, before, decodes, context)
        if longest > 2 * context:  # else the mean of all is within what the grid's steps of two tell
            mixed = max(mixed, tables.mixed(chunk, before, min(decodes, self._mixed_wave), longest))
        return mixed + prefill - alone

    def notes(self) -> list[str]:
        name, absent, notes = "/".join(self.tables.folder.parts[-3:]), list(self.tables.absent), []
        if self.tables.mixed is None:
            absent.append("steps with both prompts and decodes")
        if absent:
            notes.append(sentence("tables.absent", name=name, absent=listing(absent)))
        for what, most, last in zip(_LIMITS, self._most, self._last, strict=True):
            if most:
                notes.append(sentence("tables.beyond", what=what, most=most, name=name, last=last, ratio=most / last))
        return [*notes, *super().notes()]


def _as_one(prefills: Sequence[tuple[int, int]]) -> tuple[int, float]:
    """Counts the tokens of all chunks, and those before one chunk of that size that attends as much."""
    if not prefills:
        return 0, 0.0
    if len(prefills) == 1:
        return prefills[0]
    chunk = sum(count for count, _ in prefills)
    return chunk, max(0.0, _attended(prefills) / chunk - chunk / 2)


def _attended(prefills: Sequence[tuple[int, int]]) -> float:
    """Counts the pairs of a token of a chunk and a token that it attends to."""
    return sum(count * (before + count / 2) for count, before in prefills)
