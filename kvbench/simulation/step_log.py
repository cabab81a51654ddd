"""Fits a cost model to the step log of the built-in engine (``kvbench serve --step-log FILE``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from engine.execution.simulated_executor import StepWork
from kvbench.common.errors import UsageError
from kvbench.simulation.cost_model import Calibration, CostModel
from kvbench.simulation.machine import Machine
from kvbench.simulation.unit_costs import robust_nnls

_COLUMNS = ("time_s", "prefill_tokens", "decode_tokens", "running", "waiting", "kv_slots_used")
_HELD_OUT = 1 / 3  # of the steps, the last ones
NAMES = ("host_s", "prompt_layer_s", "kernels")


@dataclass(frozen=True)
class LoggedSteps:
    """``works``: what each step computed, as far as the log says; ``seconds``: from the end of the one before."""

    works: Sequence[StepWork]
    seconds: np.ndarray


def read_step_log(path: Path) -> LoggedSteps:
    """Steps that follow another one at once; the log's contexts are taken as alike.

    Raises UsageError for a file that is no step log, or has too few steps.
    """
    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a step log: {error}") from None
    if missing := [name for name in _COLUMNS if name not in frame]:
        raise UsageError(f"{path} is no step log: it has no column {', '.join(missing)}")
    seconds = frame["time_s"].diff().to_numpy()
    busy = ((frame["running"] + frame["waiting"]).shift(fill_value=0) > 0).to_numpy()
    kept = busy & np.isfinite(seconds) & ((frame["prefill_tokens"] + frame["decode_tokens"]) > 0).to_numpy()
    if kept.sum() < 10:
        raise UsageError(f"{path} has {kept.sum()} steps that follow another one at once: at least 10 are needed")
    return LoggedSteps([_work(row) for row in frame[kept].itertuples()], seconds[kept])


def _work(row: Any) -> StepWork:
    """All tokens of prompts as one prompt from its beginning; decodes share what else the KV holds."""
    prompt, decodes = int(row.prefill_tokens), int(row.decode_tokens)
    context = max(decodes, int(row.kv_slots_used) - prompt) if decodes else 0
    mean = -(-context // decodes) if decodes else 0
    return StepWork(((prompt, 0),) if prompt else (), decodes, context, mean, decodes + bool(prompt))


def fit_steps(
    log: LoggedSteps, machine: Machine, settings: Mapping[str, Any], names: Sequence[str]
) -> tuple[Calibration, dict[str, float]]:
    """The calibration, and the errors on the last third of the steps, to which nothing is fitted.

    names: of NAMES. A step takes its kernels times ``kernels``, plus ``host_s``, plus in steps with prompts
    ``prompt_layer_s`` a layer: non-negative least squares, in which disturbed steps count less (Huber's weights).
    """
    known = machine.known
    bare = dataclasses.replace(known, **{name: 1.0 if name == "kernels" else 0.0 for name in names})
    config, _ = machine.settle(settings)
    model = dataclasses.replace(machine, calibration=bare).step_timer(config)
    kernels = np.array([model(work).total for work in log.works])
    prompts = np.array([bool(work.prefills) for work in log.works], float) * layers_of(machine)
    columns = {"host_s": np.ones(len(kernels)), "prompt_layer_s": prompts, "kernels": kernels}
    matrix = np.column_stack([columns[name] for name in names])
    seconds = log.seconds if "kernels" in names else np.maximum(log.seconds - kernels, 0.0)
    cut = round(len(kernels) * (1 - _HELD_OUT))
    found = dict(zip(names, robust_nnls(matrix[:cut], seconds[:cut]).tolist(), strict=True))
    fitted = dataclasses.replace(known, **found)
    timer = dataclasses.replace(machine, calibration=fitted).step_timer(config)
    return fitted, _errors(timer, log, cut)


def layers_of(machine: Machine) -> int:
    return sum(group.count for group in machine.model.layers)


def _errors(timer: CostModel, log: LoggedSteps, cut: int) -> dict[str, float]:
    """Of the steps from ``cut`` on: predicted over measured total - 1, and the median step's distance."""
    predicted = np.array([timer(work).total for work in log.works[cut:]])
    measured = log.seconds[cut:]
    return {
        "total": float(predicted.sum() / measured.sum() - 1),
        "median_step": float(np.median(np.abs(predicted / measured - 1))),
        "steps": float(len(measured)),
    }
