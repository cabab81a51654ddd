"""``kvbench calibrate-model``: fit, check on what it was not fitted to, store, show."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console

from kvbench.common.console import make_table, print_plain, print_table
from kvbench.common.errors import UsageError
from kvbench.common.files import write_text
from kvbench.common.parsing import parse_yaml
from kvbench.common.text import shorten
from kvbench.runs.model import Run
from kvbench.runs.predictions import METRICS, Predicted
from kvbench.runs.read import read_run
from kvbench.simulation.calibration import (
    LOG_NAMES,
    NAMES,
    errors,
    fit,
    fit_steps,
    fitted_by_default,
    latencies,
    read_calibration,
    read_step_log,
    write_calibration,
)
from kvbench.simulation.choose import gpu_machine
from kvbench.simulation.cost_model import Calibration, Checked
from kvbench.simulation.machine import Machine
from kvbench.simulation.measured_run import (
    MeasuredRun,
    RunPrediction,
    machine_for,
    predict,
    read_measured_run,
    series_errors,
)
from kvbench.simulation.predict import predicted_cells, unit_costs_of
from kvbench.simulation.replica import SettingsByName
from kvbench.simulation.unit_costs import write_unit_costs

_FIGURES = {"ttft_mean": "mean TTFT", "ttft_p95": "p95 TTFT", "tpot_mean": "mean TPOT", "tpot_p95": "p95 TPOT"}
_FITTED_TO_A_LOG = ("host_s", "prompt_layer_s")


@dataclass(frozen=True)
class _Prediction:
    """A run predicted with a calibration; ``how``: what that has to do with the run."""

    run: MeasuredRun
    how: str
    predicted: RunPrediction

    @property
    def errors(self) -> dict[str, float]:
        return errors(self.run, self.predicted)

    @property
    def distances(self) -> dict[str, float]:
        return series_errors(self.run, self.predicted)

    def as_dict(self) -> dict[str, Any]:
        return {
            "run": self.run.name,
            "how": self.how,
            "measured_s": latencies(self.run),
            "predicted_s": latencies(self.predicted),
            "errors": self.errors,
            "mean_distance": self.distances,
            "preemptions": self.predicted.preemptions,
            "gpu_seconds": dict(self.predicted.seconds),
            "notes": list(self.predicted.notes),
        }


@dataclass(frozen=True)
class _Runs:
    """How measured runs are read: with what the options say that a run does not state."""

    device: str | None
    model: str | None
    gpus: int | None
    ops: Path | None
    settings: SettingsByName

    def read(self, folder: Path) -> tuple[MeasuredRun, Machine]:
        run = read_measured_run(folder)
        run = dataclasses.replace(run, settings={**run.settings, **self.settings})
        device, model, gpus = machine_for(run, self.device, self.model, self.gpus)
        return run, gpu_machine(device, model, gpus, self.ops)

    def of_log(self, path: Path) -> Machine:
        if not self.device or not self.model:
            raise UsageError(f"{path} does not say where it was written: give --device and --model")
        return gpu_machine(self.device, self.model, self.gpus, self.ops)

    def predict(self, folder: Path, calibration: Calibration, how: str) -> list[_Prediction]:
        run, machine = self.read(folder)
        ways = {"no calibration": None, how: calibration}
        return [
            _Prediction(run, way, predict(run, dataclasses.replace(machine, calibration=c))) for way, c in ways.items()
        ]


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
    """Runs ``kvbench calibrate-model``. Raises UsageError."""
    if run is None and calibration is None:
        raise UsageError("nothing to fit: give the folder of a measured run, or a step log")
    if run is not None and calibration is not None:
        raise UsageError("--calibration is one that is fitted already, and RUN is fitted anew: give one of the two")
    if run is None and not check:
        raise UsageError("--calibration alone says nothing new: add --check RUN")
    if run is not None and (run / "manifest.json").is_file() and (run / "cells").is_dir():
        return _calibrate_sweep(run, check, output, as_json=as_json)
    runs, console = _Runs(device, model, tensor_parallel, ops, _settings(engine)), Console()
    predictions: list[_Prediction] = []
    if run is not None and run.is_file():
        fitted = _fit_log(run, fit, runs, console)
        predictions = [p for folder in check for p in runs.predict(folder, fitted, "not fitted to it")]
    else:
        with Console(stderr=True).status("simulating"):
            if run is not None:
                fitted = _fit_run(run, fit, runs)
                predictions = runs.predict(run, fitted, "fitted to it")
            else:
                assert calibration is not None
                fitted = read_calibration(calibration)
            predictions += [p for folder in check for p in runs.predict(folder, fitted, "not fitted to it")]
    held_out = [p for p in predictions if p.how == "not fitted to it"]
    if held_out:
        checked = [Checked(run=p.run.name, errors=p.errors) for p in held_out]
        provenance = fitted.provenance.model_copy(update={"checked": checked})
        fitted = fitted.model_copy(update={"provenance": provenance})
    if output is not None:
        write_calibration(output, fitted)
    if figure is not None and predictions:
        _draw(predictions[-1], figure)
    if as_json:
        facts = {"calibration": fitted.model_dump(exclude_none=True), "runs": [p.as_dict() for p in predictions]}
        print(json.dumps(facts, indent=2))
        return 0
    values = ", ".join(f"{name} {getattr(fitted, name):.4g}" for name in NAMES)
    print_plain(console, f"calibration: {values}" + (f" -> {output}" if output else ""))
    if predictions:
        print_table(console, _table(predictions))
    if predictions and not held_out:
        print_plain(console, "note: nothing was held out: --check RUN tells how well it predicts another run")
    for note in dict.fromkeys(note for p in predictions for note in p.predicted.notes):
        print_plain(console, f"note: {note}")
    return 0


def _settings(words: Sequence[str]) -> SettingsByName:
    """The settings of --engine. Raises UsageError."""
    settings = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"--engine {word!r} is not KEY=VALUE: write for example --engine max_num_seqs=128")
        try:
            settings[name.strip()] = parse_yaml(value)
        except ValueError as error:
            raise UsageError(f"--engine {shorten(word, 60)}: not a YAML value: {error}") from None
    return settings


def _fit_run(folder: Path, names: Sequence[str], runs: _Runs) -> Calibration:
    run, machine = runs.read(folder)
    return fit(run, machine, names or fitted_by_default(machine, run))


def _fit_log(path: Path, names: Sequence[str], runs: _Runs, console: Console) -> Calibration:
    if wrong := [name for name in names if name not in LOG_NAMES]:
        raise UsageError(f"--fit {wrong[0]} cannot be told from a step log: it has {', '.join(LOG_NAMES)}")
    machine = runs.of_log(path)
    fitted = fit_steps(read_step_log(path), machine, runs.settings, names or _FITTED_TO_A_LOG)
    held_out = fitted.provenance.held_out_last_third or {}
    print_plain(
        console,
        f"{path.name}: the last third of its steps, which nothing was fitted to, is predicted "
        f"{held_out['total']:+.1%} in all; the median step is off by {held_out['median_step']:.1%}",
    )
    return fitted


def _table(predictions: Sequence[_Prediction]) -> Any:
    lines = []
    for p in predictions:
        distances = p.distances
        running = f"{distances['running']:.1f}" if "running" in distances else "-"
        kv = f"{distances['kv_cache_pct']:.1f} points" if "kv_cache_pct" in distances else "-"
        lines.append((p.run.name, p.how, *(f"{p.errors[name]:+.1%}" for name in _FIGURES), running, kv))
    heads = ("run", "calibration", *_FIGURES.values(), "running", "KV use")
    table = make_table(heads, lines, numbers_from=2, title="predicted over measured")
    table.caption = "running, KV use: mean distance over the measured seconds"
    return table


def _draw(prediction: _Prediction, path: Path) -> None:
    from kvbench.report.predictions import predicted_figure

    title = f"{prediction.run.name}: simulated over measured ({prediction.how})"
    figure = predicted_figure(prediction.run.series, prediction.predicted.series, title)
    write_text(path, figure.to_html(include_plotlyjs=True))


def _calibrate_sweep(folder: Path, check: Sequence[Path], output: Path | None, *, as_json: bool) -> int:
    """Unit costs of a sweep of the built-in engine on a CPU, and how well they predict other sweeps."""
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
    print_plain(console, f"unit costs of {run.folder.name} [us]" + (f" -> {output}" if output else ""))
    print_plain(console, ", ".join(f"{name} {1e6 * seconds:.4g}" for name, seconds in values.items() if seconds))
    for name, predicted in checked.items():
        rows = [
            (cell, *(f"{figures[m].error:+.1%}" if m in figures else "-" for m in METRICS))
            for cell, figures in predicted.items()
        ]
        print_table(console, make_table(("cell", *METRICS), rows, title=f"predicted over measured: {name}"))
    return 0


def _read_sweep(folder: Path) -> Run:
    try:
        run = read_run(folder)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if run.manifest.get("gpus"):
        raise UsageError(f"{folder} was measured on a GPU: unit costs are for CPUs, whose steps do not overlap")
    return run
