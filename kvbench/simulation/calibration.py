"""Fits what operator tables and data sheets lack to a measured run or a step log, and stores it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from pydantic import Field, ValidationError

from engine.execution.simulated_executor import StepWork
from kvbench.common.errors import UsageError
from kvbench.common.files import read_json, write_json
from kvbench.common.schema import explain
from kvbench.simulation.cost_model import Calibration, CostModel, Provenance
from kvbench.simulation.machine import Machine
from kvbench.simulation.measured_run import MeasuredRun, RunPrediction, predict
from kvbench.simulation.replica import SettingsByName
from kvbench.simulation.unit_costs import robust_nnls

FORMAT = 1
_POINTS = 4
"""Simulations of a name. Under a queue a figure jumps a little from one value to the next, since other requests meet in
a step; a line through several points is not misled by that."""
LOG_NAMES = ("host_s", "prompt_layer_s", "kernels")
"""What can be fitted to a step log."""
_LOG_COLUMNS = ("time_s", "prefill_tokens", "decode_tokens", "running", "waiting", "kv_slots_used")
_LEAST_STEPS = 10
_HELD_OUT = 1 / 3  # of the steps of a log, the last ones


@dataclass(frozen=True)
class _Fitted:
    """Between which values a field is fitted, and to what of the run's requests, which depends on it most."""

    low: float
    high: float
    samples: str
    figure: Callable[[np.ndarray], float]

    def of(self, run: MeasuredRun | RunPrediction, *, from_prefill: bool) -> float:
        """The figure of ``run``; TTFT stands in where it is not measured when requests were scheduled."""
        return self.figure(getattr(run, "ttft" if self.samples == "prefill" and not from_prefill else self.samples))


# Of the time from scheduling to the first token the median: which prompts meet in a step is chance, and makes its tail.
_FITTED = {
    "prompt_layer_s": _Fitted(0.0, 300e-6, "prefill", np.median),
    "host_s": _Fitted(0.0, 20e-3, "tpot", np.nanmean),
    "all_reduce_s": _Fitted(0.0, 60e-6, "tpot", np.nanmean),
    "kernels": _Fitted(0.85, 1.15, "tpot", np.nanmean),
}
NAMES = tuple(_FITTED)


class _File(Calibration):
    """A calibration as JSON."""

    format: int = Field(ge=FORMAT, le=FORMAT)


def read_calibration(path: Path) -> Calibration:
    """Raises UsageError for a file that is none."""
    stored = read_json(path)
    if isinstance(stored, dict) and "format" in stored and isinstance(stored["format"], str):
        raise UsageError(f"{path} has unit costs, which are for --device this-cpu: give a calibration of a GPU")
    try:
        return Calibration.model_validate(_File.model_validate(stored).model_dump(exclude={"format"}))
    except ValidationError as error:
        raise UsageError(f"{path} is no calibration of a cost model: {explain(error, '')[0]}") from None


def write_calibration(path: Path, calibration: Calibration) -> None:
    write_json(path, {"format": FORMAT, **calibration.model_dump(exclude_none=True)})


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
    fields, from_prefill = [_FITTED[name] for name in names], run.prefill is not None

    def figures(of: MeasuredRun | RunPrediction) -> np.ndarray:
        return np.array([field.of(of, from_prefill=from_prefill) for field in fields])

    calibration, wanted = machine.corrections, figures(run)
    for round_number in range(min(2, len(names))):
        tried, results = [], []
        for name, field in zip(names, fields, strict=True):
            low, high = field.low, field.high
            if round_number:
                middle, reach = getattr(calibration, name), (high - low) / 4
                low, high = max(low, middle - reach), max(low, middle - reach) + 2 * reach
            for value in np.linspace(low, high, _POINTS):
                other = calibration.model_copy(update={name: float(value)})
                tried.append([getattr(other, each) for each in names] + [1.0])
                results.append(figures(predict(run, dataclasses.replace(machine, calibration=other))))
        plane, *_ = np.linalg.lstsq(np.array(tried), np.array(results), rcond=None)
        best, *_ = np.linalg.lstsq(plane[:-1].T, wanted - plane[-1], rcond=None)
        values = {
            name: float(np.clip(value, field.low, 2 * field.high))
            for name, value, field in zip(names, best, fields, strict=True)
        }
        calibration = calibration.model_copy(update=values)
    source = {"run": run.name, "requests": len(run.requests), "engine": run.engine}
    return calibration.model_copy(update={"provenance": provenance_of(machine, names, **source)})


def provenance_of(machine: Machine, names: Sequence[str], **source: object) -> Provenance:
    """What a calibration came from; ``source``: the run or the step log."""
    return Provenance(
        fitted=list(names),
        device=machine.gpu.name,
        gpus=machine.gpus,
        model=machine.model.name,
        cost_model=dataclasses.replace(machine, calibration=None).cost_model,
        **source,
    )


def latencies(run: MeasuredRun | RunPrediction) -> dict[str, float]:
    """Mean and 95th percentile of TTFT and TPOT [s]."""
    figures = {}
    for name in ("ttft", "tpot"):
        figures[f"{name}_mean"] = float(np.nanmean(getattr(run, name)))
        figures[f"{name}_p95"] = float(np.nanpercentile(getattr(run, name), 95))
    return figures


def errors(run: MeasuredRun, predicted: RunPrediction) -> dict[str, float]:
    """RunPrediction over measured - 1 of each of ``latencies``."""
    measured = latencies(run)
    return {name: value / measured[name] - 1 for name, value in latencies(predicted).items()}


@dataclass(frozen=True)
class LoggedSteps:
    """A step log (``kvbench serve --step-log FILE``).

    works: what each step computed, as far as the log says; seconds: from the end of the one before
    """

    name: str
    works: Sequence[StepWork]
    seconds: np.ndarray


def read_step_log(path: Path) -> LoggedSteps:
    """Reads the steps that follow another one at once; the log's contexts are taken as alike.

    Raises UsageError for a file that is no step log, or has too few steps.
    """
    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a step log: {error}") from None
    if missing := [name for name in _LOG_COLUMNS if name not in frame]:
        raise UsageError(f"{path} is no step log: it has no column {', '.join(missing)}")
    seconds = frame["time_s"].diff().to_numpy()
    busy = ((frame["running"] + frame["waiting"]).shift(fill_value=0) > 0).to_numpy()
    kept = busy & np.isfinite(seconds) & ((frame["prefill_tokens"] + frame["decode_tokens"]) > 0).to_numpy()
    if kept.sum() < _LEAST_STEPS:
        raise UsageError(
            f"{path} has {kept.sum()} steps that follow another one at once: at least {_LEAST_STEPS} are needed"
        )
    columns = frame.loc[kept, ["prefill_tokens", "decode_tokens", "kv_slots_used"]].astype(int)
    works = [logged_work(*row) for row in columns.itertuples(index=False, name=None)]
    return LoggedSteps(path.name, works, seconds[kept])


def logged_work(prompt: int, decodes: int, kv_slots: int) -> StepWork:
    """All tokens of prompts as one prompt from its beginning; decodes share what else the KV holds."""
    context = max(decodes, kv_slots - prompt) if decodes else 0
    mean = -(-context // decodes) if decodes else 0
    return StepWork(((prompt, 0),) if prompt else (), decodes, context, mean, decodes + bool(prompt))


def fit_steps(log: LoggedSteps, machine: Machine, settings: SettingsByName, names: Sequence[str]) -> Calibration:
    """The calibration, and in its provenance the errors on the last third of the steps, to which nothing is fitted.

    names: of LOG_NAMES. A step takes its kernels times ``kernels``, plus ``host_s``, plus in steps with prompts
    ``prompt_layer_s`` a layer: non-negative least squares, in which disturbed steps count less (Huber's weights).
    """
    bare = machine.corrections.model_copy(update={name: 1.0 if name == "kernels" else 0.0 for name in names})
    config, _ = machine.settle(settings)
    model = dataclasses.replace(machine, calibration=bare).step_timer(config)
    kernels = np.array([model(work).total for work in log.works])
    prompts = np.array([bool(work.prefills) for work in log.works], float) * machine.num_layers
    columns = {"host_s": np.ones(len(kernels)), "prompt_layer_s": prompts, "kernels": kernels}
    matrix = np.column_stack([columns[name] for name in names])
    seconds = log.seconds if "kernels" in names else np.maximum(log.seconds - kernels, 0.0)
    cut = round(len(kernels) * (1 - _HELD_OUT))
    values = dict(zip(names, robust_nnls(matrix[:cut], seconds[:cut]).tolist(), strict=True))
    fitted = machine.corrections.model_copy(update=values)
    held_out = _log_errors(dataclasses.replace(machine, calibration=fitted).step_timer(config), log, cut)
    source = provenance_of(machine, names, step_log=log.name, held_out_last_third=held_out)
    return fitted.model_copy(update={"provenance": source})


def _log_errors(timer: CostModel, log: LoggedSteps, cut: int) -> dict[str, float]:
    """Of the steps from ``cut`` on: predicted over measured total - 1, and the median step's distance."""
    predicted = np.array([timer(work).total for work in log.works[cut:]])
    measured = log.seconds[cut:]
    return {
        "total": float(predicted.sum() / measured.sum() - 1),
        "median_step": float(np.median(np.abs(predicted / measured - 1))),
        "steps": float(len(measured)),
    }
