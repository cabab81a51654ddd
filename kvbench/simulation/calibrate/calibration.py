"""Fits what operator tables and data sheets lack, and checks it on other runs: ``kvbench dev calibrate-model``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from kvbench.common.console import make_table, print_plain, print_table
from kvbench.common.errors import UsageError, as_usage_error
from kvbench.common.files import write_text
from kvbench.common.parsing import parse_yaml
from kvbench.common.text import shorten
from kvbench.metrics.definitions import METRICS
from kvbench.runs.model import Run
from kvbench.runs.predictions import METRICS as PREDICTED
from kvbench.runs.predictions import Predicted
from kvbench.runs.read import read_run
from kvbench.simulation.calibrate import measured_run
from kvbench.simulation.calibrate.measured_run import MeasuredRun, RunPrediction, predict, series_errors
from kvbench.simulation.calibrate.predict import predicted_cells, unit_costs_of
from kvbench.simulation.choose import gpu_machine
from kvbench.simulation.cost import cost_model
from kvbench.simulation.cost.cost_model import Checked, CostCalibration, Provenance
from kvbench.simulation.cost.machine import Machine, SettingsByName
from kvbench.simulation.cost.unit_costs import robust_nnls, write_unit_costs
from kvbench.simulation.wording import sentence
from kvbench_engine.execution.simulated_executor import StepWork

_POINTS = 4
"""Simulations of a field. Under a queue a figure jumps a little from one value to the next, since other requests meet
in a step; a line through several points is not misled by that."""
LOG_NAMES = ("host_s", "prompt_layer_s", "kernels")
"""What can be fitted to a step log."""
_LOG_COLUMNS = ("time_s", "prefill_tokens", "decode_tokens", "running", "waiting", "kv_slots_used")
_LEAST_STEPS = 10
_HELD_OUT = 1 / 3  # of the steps of a log, the last ones


_RANGES = {
    "prompt_layer_s": (0.0, 300e-6),
    "host_s": (0.0, 20e-3),
    "all_reduce_s": (0.0, 60e-6),
    "kernels": (0.85, 1.15),
}
"""The values between which a field is fitted."""
NAMES = tuple(_RANGES)


def _figure(run: MeasuredRun | RunPrediction, name: str, *, from_prefill: bool) -> float:
    """Computes the figure of a run that depends most on the field ``name``.

    Of the time from scheduling to the first token it is the median: which prompts meet in a step is chance, and makes
    its tail. TTFT stands in for that time where it is not measured.
    """
    if name != "prompt_layer_s":
        return float(np.nanmean(run.tpot))
    return float(np.median(run.prefill if from_prefill else run.ttft))


def fitted_by_default(machine: Machine, run: MeasuredRun) -> list[str]:
    """Names what a run can tell: launches, and the host's time where it does not overlap, or the GPUs' exchange."""
    names = ["prompt_layer_s"]
    if machine.gpus > 1:
        names.append("all_reduce_s")
    elif run.settings.get("async_scheduling") is False:
        names.append("host_s")
    return names


def fit_run(run: MeasuredRun, machine: Machine, names: Sequence[str]) -> CostCalibration:
    """Fits the fields ``names`` of the calibration of ``machine``, so that ``run`` comes out as measured.

    As many figures of the run are met as there are fields: each figure is taken as linear in all of them, from
    simulations along each one; of several fields once more, nearer to what that gave.
    """
    from_prefill = run.prefill is not None

    def figures(source: MeasuredRun | RunPrediction) -> np.ndarray:
        return np.array([_figure(source, name, from_prefill=from_prefill) for name in names])

    calibration, wanted = machine.corrections, figures(run)
    for round_number in range(min(2, len(names))):
        tried, results = [], []
        for name in names:
            low, high = _RANGES[name]
            if round_number:
                middle, reach = getattr(calibration, name), (high - low) / 4
                low, high = max(low, middle - reach), max(low, middle - reach) + 2 * reach
            for value in np.linspace(low, high, _POINTS):
                other = calibration.model_copy(update={name: float(value)})
                tried.append([*(getattr(other, field) for field in names), 1.0])
                results.append(figures(predict(run, dataclasses.replace(machine, calibration=other))))
        plane, *_ = np.linalg.lstsq(np.array(tried), np.array(results), rcond=None)
        best, *_ = np.linalg.lstsq(plane[:-1].T, wanted - plane[-1], rcond=None)
        values = {}
        for name, value in zip(names, best, strict=True):
            low, high = _RANGES[name]
            values[name] = float(np.clip(value, low, 2 * high))
        calibration = calibration.model_copy(update=values)
    source = {"run": run.name, "requests": len(run.requests), "engine": run.engine}
    return calibration.model_copy(update={"provenance": provenance_of(machine, names, **source)})


def provenance_of(machine: Machine, names: Sequence[str], **source: object) -> Provenance:
    """Notes what a calibration came from; ``source``: the run or the step log."""
    return Provenance(
        fitted=list(names),
        device=machine.gpu.name,
        gpus=machine.gpus,
        model=machine.model.name,
        cost_model=dataclasses.replace(machine, calibration=None).cost_model,
        **source,
    )


def latencies(run: MeasuredRun | RunPrediction) -> dict[str, float]:
    """Computes the mean and the 95th percentile of TTFT and TPOT [s]."""
    figures = {}
    for name, seconds in (("ttft", run.ttft), ("tpot", run.tpot)):
        figures |= {f"{name}_mean": float(np.nanmean(seconds)), f"{name}_p95": float(np.nanpercentile(seconds, 95))}
    return figures


def errors(run: MeasuredRun, predicted: RunPrediction) -> dict[str, float]:
    """Computes predicted over measured - 1 of each of ``latencies``."""
    measured = latencies(run)
    return {name: value / measured[name] - 1 for name, value in latencies(predicted).items()}


@dataclass(frozen=True)
class LoggedSteps:
    """A step log (``kvbench serve --step-log FILE``).

    works: what each step computed, as far as the log says; seconds: from the end of the step before
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
        raise UsageError(sentence("calibration.no_log", path=path, error=error)) from None
    if missing := [name for name in _LOG_COLUMNS if name not in frame]:
        raise UsageError(sentence("calibration.no_columns", path=path, columns=", ".join(missing)))
    seconds = frame["time_s"].diff().to_numpy()
    busy = ((frame["running"] + frame["waiting"]).shift(fill_value=0) > 0).to_numpy()
    kept = busy & np.isfinite(seconds) & ((frame["prefill_tokens"] + frame["decode_tokens"]) > 0).to_numpy()
    if kept.sum() < _LEAST_STEPS:
        raise UsageError(sentence("calibration.few_steps", path=path, steps=kept.sum(), least=_LEAST_STEPS))
    columns = frame.loc[kept, ["prefill_tokens", "decode_tokens", "kv_slots_used"]].astype(int)
    works = [logged_work(*row) for row in columns.itertuples(index=False, name=None)]
    return LoggedSteps(path.name, works, seconds[kept])


def logged_work(prompt: int, decodes: int, kv_slots: int) -> StepWork:
    """Returns a step's work: its prompts as one from its beginning, decodes that share what else the KV holds."""
    prompts = ((prompt, 0),) if prompt else ()
    if not decodes:
        return StepWork(prompts, 0, 0, 0, bool(prompt))
    context = max(decodes, kv_slots - prompt)
    return StepWork(prompts, decodes, context, -(-context // decodes), decodes + bool(prompt))


def fit_steps(log: LoggedSteps, machine: Machine, settings: SettingsByName, names: Sequence[str]) -> CostCalibration:
    """Fits a calibration to a step log. Its provenance has the errors on the last third, which the fit leaves out.

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
    timer = dataclasses.replace(machine, calibration=fitted).step_timer(config)
    predicted, taken = np.array([timer(work).total for work in log.works[cut:]]), log.seconds[cut:]
    held_out = {
        "total": float(predicted.sum() / taken.sum() - 1),
        "median_step": float(np.median(np.abs(predicted / taken - 1))),
        "steps": float(len(taken)),
    }
    source = provenance_of(machine, names, step_log=log.name, held_out_last_third=held_out)
    return fitted.model_copy(update={"provenance": source})


_HELD_OUT_RUN = "not fitted to it"


@dataclass(frozen=True)
class _Prediction:
    """A run predicted with a calibration; ``how``: what the calibration has to do with the run."""

    run: MeasuredRun
    how: str
    predicted: RunPrediction

    def as_dict(self) -> dict[str, Any]:
        return {
            "run": self.run.name,
            "how": self.how,
            "measured_s": latencies(self.run),
            "predicted_s": latencies(self.predicted),
            "errors": errors(self.run, self.predicted),
            "mean_distance": series_errors(self.run, self.predicted),
            "preemptions": self.predicted.preemptions,
            "gpu_seconds": dict(self.predicted.seconds),
            "notes": list(self.predicted.notes),
        }


@dataclass(frozen=True)
class _Runs:
    """Reads measured runs, with what the options say that a run does not state."""

    device: str | None
    model: str | None
    gpus: int | None
    ops: Path | None
    settings: SettingsByName

    def read(self, folder: Path) -> tuple[MeasuredRun, Machine]:
        run = measured_run.read_measured_run(folder)
        run = dataclasses.replace(run, settings={**run.settings, **self.settings})
        device, model, gpus = measured_run.machine_for(run, self.device, self.model, self.gpus)
        return run, gpu_machine(device, model, gpus, self.ops)

    def predict(self, folder: Path, calibration: CostCalibration, how: str) -> Iterator[_Prediction]:
        run, machine = self.read(folder)
        for way, applied in (("no calibration", None), (how, calibration)):
            yield _Prediction(run, way, predict(run, dataclasses.replace(machine, calibration=applied)))

    def fit(self, path: Path, names: Sequence[str], console: Console) -> CostCalibration:
        """Fits the fields ``names`` to the run, or to the step log, at ``path``."""
        if path.is_dir():
            run, machine = self.read(path)
            return fit_run(run, machine, names or fitted_by_default(machine, run))
        if wrong := [name for name in names if name not in LOG_NAMES]:
            raise UsageError(sentence("calibration.not_in_log", name=wrong[0], names=", ".join(LOG_NAMES)))
        if not self.device or not self.model:
            raise UsageError(sentence("calibration.log_of_what", path=path))
        machine = gpu_machine(self.device, self.model, self.gpus, self.ops)
        fitted = fit_steps(read_step_log(path), machine, self.settings, names or LOG_NAMES[:2])
        held_out = fitted.provenance.held_out_last_third or {}
        print_plain(console, sentence("calibration.log_held_out", name=path.name, **held_out))
        return fitted


def calibrate_command(
    run: Path | None,
    *,
    check: Sequence[Path],
    ops: Path | None,
    device: str | None,
    model: str | None,
    tensor_parallel: int | None,
    engine: Sequence[str],
    fit: Sequence[str],
    calibration: Path | None,
    output: Path | None,
    figure: Path | None,
    as_json: bool,
) -> int:
    """Runs ``kvbench dev calibrate-model``. Raises UsageError."""
    if run is None and calibration is None:
        raise UsageError(sentence("calibration.nothing"))
    if run is not None and calibration is not None:
        raise UsageError(sentence("calibration.both"))
    if run is None and not check:
        raise UsageError(sentence("calibration.no_check"))
    if run is not None and (run / "manifest.json").is_file() and (run / "cells").is_dir():
        return _calibrate_sweep(run, check, output, as_json=as_json)
    runs, console = _Runs(device, model, tensor_parallel, ops, _settings(engine)), Console()
    predictions: list[_Prediction] = []
    with Console(stderr=True).status("simulating"):
        if run is not None:
            fitted = runs.fit(run, fit, console)
            predictions += runs.predict(run, fitted, "fitted to it") if run.is_dir() else ()
        else:
            assert calibration is not None
            fitted = cost_model.read_calibration(calibration)
        for folder in check:
            predictions += runs.predict(folder, fitted, _HELD_OUT_RUN)
    held_out = [p for p in predictions if p.how == _HELD_OUT_RUN]
    if held_out:
        checked = [Checked(run=p.run.name, errors=errors(p.run, p.predicted)) for p in held_out]
        provenance = fitted.provenance.model_copy(update={"checked": checked})
        fitted = fitted.model_copy(update={"provenance": provenance})
    if output is not None:
        cost_model.write_calibration(output, fitted)
    if figure is not None and predictions:
        _draw(predictions[-1], figure)
    if as_json:
        facts = {"calibration": fitted.model_dump(exclude_none=True), "runs": [p.as_dict() for p in predictions]}
        print(json.dumps(facts, indent=2))
        return 0
    values = ", ".join(f"{name} {getattr(fitted, name):.4g}" for name in NAMES)
    print_plain(console, sentence("calibration.fitted", values=values, file=_arrow(output)))
    if predictions:
        print_table(console, _table(predictions))
    if predictions and not held_out:
        print_plain(console, sentence("calibration.not_held_out"))
    for note in dict.fromkeys(note for p in predictions for note in p.predicted.notes):
        print_plain(console, sentence("calibration.note", note=note))
    return 0


def _arrow(file: Path | None) -> str:
    return "" if file is None else sentence("calibration.file", path=file)


def _settings(words: Sequence[str]) -> SettingsByName:
    """Reads the settings of --engine. Raises UsageError."""
    settings = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UsageError(sentence("calibration.not_a_setting", word=word))
        try:
            settings[name.strip()] = parse_yaml(value)
        except ValueError as error:
            raise UsageError(sentence("calibration.bad_value", word=shorten(word, 60), error=error)) from None
    return settings


def _table(predictions: Sequence[_Prediction]) -> Table:
    titles = {
        f"{name}_{which}": f"{which} {METRICS[name].short}" for name in ("ttft", "tpot") for which in ("mean", "p95")
    }
    distances = {"running": "{:.1f}", "kv_cache_pct": "{:.1f} points"}
    lines = []
    for prediction in predictions:
        off = errors(prediction.run, prediction.predicted)
        apart = series_errors(prediction.run, prediction.predicted)
        shown = [form.format(apart[name]) if name in apart else "-" for name, form in distances.items()]
        lines.append((prediction.run.name, prediction.how, *(f"{off[name]:+.1%}" for name in titles), *shown))
    heads = ("run", "calibration", *titles.values(), "running", "KV use")
    table = make_table(heads, lines, numbers_from=2, title=sentence("calibration.table"))
    table.caption = sentence("calibration.caption")
    return table


def _draw(prediction: _Prediction, path: Path) -> None:
    from kvbench.report.predictions import predicted_figure

    title = sentence("calibration.figure", name=prediction.run.name, how=prediction.how)
    figure = predicted_figure(prediction.run.series, prediction.predicted.series, title)
    write_text(path, figure.to_html(include_plotlyjs=True))


def _calibrate_sweep(folder: Path, check: Sequence[Path], output: Path | None, *, as_json: bool) -> int:
    """Fits unit costs to a sweep on a CPU, and tells how well they predict other sweeps."""
    run, console = _read_sweep(folder), Console()
    costs = unit_costs_of(run)
    if output is not None:
        write_unit_costs(output, costs, run)
    checked = {other.name: predicted_cells(_read_sweep(other), costs) for other in check}
    if as_json:
        cells = TypeAdapter(dict[str, dict[str, dict[str, Predicted]]]).dump_python(checked)
        print(json.dumps({"unit_costs_s": dataclasses.asdict(costs), "checked": cells}, indent=2))
        return 0
    values = {**costs.units, **{f"context in {dtype}": seconds for dtype, seconds in costs.context.items()}}
    print_plain(console, sentence("calibration.costs", name=run.folder.name, file=_arrow(output)))
    print_plain(console, ", ".join(f"{name} {1e6 * seconds:.4g}" for name, seconds in values.items() if seconds))
    for name, predicted in checked.items():
        rows = [
            (cell, *(f"{figures[m].error:+.1%}" if m in figures else "-" for m in PREDICTED))
            for cell, figures in predicted.items()
        ]
        print_table(console, make_table(("cell", *PREDICTED), rows, title=sentence("calibration.cells", name=name)))
    return 0


def _read_sweep(folder: Path) -> Run:
    with as_usage_error():
        run = read_run(folder)
    if run.manifest.gpus:
        raise UsageError(sentence("calibration.on_gpu", folder=folder))
    return run
