"""Fits what operator tables and data sheets lack to a measured run, and stores it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvbench.common.errors import UsageError
from kvbench.common.files import read_json, write_json
from kvbench.common.schema import explain
from kvbench.simulation.cost_model import Calibration
from kvbench.simulation.experts import EVENNESS
from kvbench.simulation.machine import Machine
from kvbench.simulation.measured_run import MeasuredRun, RunPrediction, predict

FORMAT = 1

# What is fitted: between which values, and to what of the run's requests, which depends on it most. Of the time from
# scheduling to the first token the median: which prompts meet in a step is chance, and makes its tail.
_FITTED: dict[str, tuple[tuple[float, float], str, Callable[[np.ndarray], float]]] = {
    "prompt_layer_s": ((0.0, 300e-6), "prefill", np.median),
    "host_s": ((0.0, 20e-3), "tpot", np.nanmean),
    "all_reduce_s": ((0.0, 60e-6), "tpot", np.nanmean),
    "kernels": ((0.85, 1.15), "tpot", np.nanmean),
}
NAMES = tuple(_FITTED)
_POINTS = 4
"""Simulations of a name. Under a queue a figure jumps a little from one value to the next, since other requests meet in
a step; a line through several points is not misled by that."""


class _File(BaseModel):
    """A calibration as JSON. Fields as in ``Calibration``."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    format: int = Field(ge=FORMAT, le=FORMAT)
    host_s: float = Field(default=0.0, ge=0, le=1)
    host_per_sequence_s: float = Field(default=0.0, ge=0, le=0.1)
    prompt_layer_s: float = Field(default=0.0, ge=0, le=0.1)
    kernels: float = Field(default=1.0, gt=0, le=100)
    all_reduce_s: float = Field(default=Calibration.all_reduce_s, ge=0, le=0.1)
    evenness: float = Field(default=EVENNESS, gt=0)
    provenance: dict[str, Any] = Field(default_factory=dict)


def read_calibration(path: Path) -> Calibration:
    """Raises UsageError for a file that is none."""
    try:
        stored = read_json(path)
        if isinstance(stored, dict) and isinstance(stored.get("format"), str):
            raise UsageError(f"{path} has unit costs, which are for --device this-cpu: give a calibration of a GPU")
        found = _File.model_validate(stored)
    except UsageError:
        raise
    except ValidationError as error:
        raise UsageError(f"{path} is no calibration of a cost model: {explain(error, '')[0]}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"no calibration can be read: {error}") from None
    return Calibration(**found.model_dump(exclude={"format"}))


def write_calibration(path: Path, calibration: Calibration) -> None:
    write_json(path, {"format": FORMAT, **dataclasses.asdict(calibration)})


def fitted_by_default(machine: Machine, run: MeasuredRun) -> list[str]:
    """What a run can tell: launches, and the host's time where it does not overlap, or else the GPUs' exchange."""
    names = ["prompt_layer_s"]
    if machine.gpus > 1:
        names.append("all_reduce_s")
    elif run.settings.get("async_scheduling") is False:
        names.append("host_s")
    return names


def fit(run: MeasuredRun, machine: Machine, names: Sequence[str]) -> Calibration:
    """The calibration of ``machine`` with which ``run`` comes out as measured; ``names``: of its fields.

    As many figures of the run are met as there are names: each figure is taken as linear in all of them, from
    simulations along each one; of several names once more, nearer to what that gave.
    """
    known = machine.known
    wanted = _figures(run, names, run)
    for round_number in range(min(2, len(names))):
        tried, found = [], []
        for name in names:
            low, high = _FITTED[name][0]
            if round_number:
                middle, reach = getattr(known, name), (high - low) / 4
                low, high = max(low, middle - reach), max(low, middle - reach) + 2 * reach
            for value in np.linspace(low, high, _POINTS):
                other = dataclasses.replace(known, **{name: float(value)})
                tried.append([getattr(other, each) for each in names] + [1.0])
                found.append(_figures(run, names, predict(run, dataclasses.replace(machine, calibration=other))))
        plane, *_ = np.linalg.lstsq(np.array(tried), np.array(found), rcond=None)
        best, *_ = np.linalg.lstsq(plane[:-1].T, wanted - plane[-1], rcond=None)
        limits = [_FITTED[name][0] for name in names]
        values = {
            name: float(np.clip(value, low, 2 * high))
            for name, value, (low, high) in zip(names, best, limits, strict=True)
        }
        known = dataclasses.replace(known, **values)
    return known


def _figures(run: MeasuredRun, names: Sequence[str], of: MeasuredRun | RunPrediction) -> np.ndarray:
    """What each of ``names`` is fitted to. Where ``run`` does not tell when requests were scheduled, TTFT stands in."""
    found = []
    for name in names:
        _, samples, figure = _FITTED[name]
        found.append(figure(getattr(of, "ttft" if samples == "prefill" and run.prefill is None else samples)))
    return np.array(found)


def latencies(of: MeasuredRun | RunPrediction) -> dict[str, float]:
    """Mean and 95th percentile of TTFT and TPOT [s]."""
    found = {}
    for name in ("ttft", "tpot"):
        found[f"{name}_mean"] = float(np.nanmean(getattr(of, name)))
        found[f"{name}_p95"] = float(np.nanpercentile(getattr(of, name), 95))
    return found


def errors(run: MeasuredRun, predicted: RunPrediction) -> dict[str, float]:
    """RunPrediction over measured - 1 of each of ``latencies``."""
    measured = latencies(run)
    return {name: value / measured[name] - 1 for name, value in latencies(predicted).items()}


def provenance_of(run: MeasuredRun, machine: Machine, names: Sequence[str]) -> dict[str, Any]:
    """What a calibration came from."""
    return {
        "fitted": list(names),
        "run": run.name,
        "requests": len(run.requests),
        "engine": run.engine,
        "device": machine.gpu.name,
        "gpus": machine.gpus,
        "model": machine.model.name,
        "cost_model": dataclasses.replace(machine, calibration=None).cost_model,
    }
