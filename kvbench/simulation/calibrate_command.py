"""``kvbench calibrate-model``: fit, check on what it was not fitted to, store, show."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench.common.console import make_table, print_plain, print_table
from kvbench.common.errors import UsageError
from kvbench.common.files import write_text
from kvbench.common.parsing import parse_yaml
from kvbench.common.text import shorten
from kvbench.simulation import step_log
from kvbench.simulation.calibrate_sweep import calibrate_sweep, is_sweep
from kvbench.simulation.calibration import (
    NAMES,
    errors,
    fit,
    fitted_by_default,
    latencies,
    provenance_of,
    read_calibration,
    write_calibration,
)
from kvbench.simulation.choose import gpu_machine
from kvbench.simulation.cost_model import Calibration
from kvbench.simulation.machine import Machine
from kvbench.simulation.measured_run import (
    MeasuredRun,
    RunPrediction,
    machine_for,
    predict,
    read_measured_run,
    series_errors,
)

_FIGURES = ("ttft_mean", "ttft_p95", "tpot_mean", "tpot_p95")


@dataclasses.dataclass(frozen=True)
class _Row:
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


def calibrate_command(
    run: Path | None, check: Sequence[Path], calibration: Path | None, output: Path | None, **options: Any
) -> int:
    """Raises UsageError."""
    if run is None and calibration is None:
        raise UsageError("nothing to fit: give the folder of a measured run, or a step log")
    if run is not None and calibration is not None:
        raise UsageError("--calibration is one that is fitted already, and RUN is fitted anew: give one of the two")
    if run is None and not check:
        raise UsageError("--calibration alone says nothing new: add --check RUN")
    console = Console()
    if run is not None and is_sweep(run):
        return calibrate_sweep(run, check, output, as_json=options["as_json"])
    if run is not None and run.is_file():
        return _fit_log(run, check, output, console, options)
    rows: list[_Row] = []
    with Console(stderr=True).status("simulating"):
        if run is not None:
            measured = _read(run, options)
            machine = _machine(measured, options)
            names = list(options["fit"]) or fitted_by_default(machine, measured)
            known = fit(measured, machine, names)
            known = dataclasses.replace(known, provenance=provenance_of(measured, machine, names))
            rows += _rows(measured, machine, known, "fitted to it")
        else:
            assert calibration is not None
            known = read_calibration(calibration)
        rows += _checked(check, known, options)
    _finish(rows, known, output, console, options)
    return 0


def _fit_log(path: Path, check: Sequence[Path], output: Path | None, console: Console, options: Any) -> int:
    names = list(options["fit"]) or ["host_s", "prompt_layer_s"]
    if bad := [name for name in names if name not in step_log.NAMES]:
        raise UsageError(f"--fit {bad[0]} cannot be told from a step log: it has {', '.join(step_log.NAMES)}")
    if not options["device"] or not options["model"]:
        raise UsageError(f"{path} does not say where it was written: give --device and --model")
    settings = _settings(options)
    machine = gpu_machine(options["device"], options["model"], options["tensor_parallel"], options["ops"])
    known, held_out = step_log.fit_steps(step_log.read_step_log(path), machine, settings, names)
    provenance = {"fitted": names, "step_log": path.name, "held_out_last_third": held_out}
    machine_facts = {"device": machine.gpu.name, "gpus": machine.gpus, "model": machine.model.name}
    known = dataclasses.replace(known, provenance={**provenance, **machine_facts, "cost_model": machine.cost_model})
    print_plain(
        console,
        f"{path.name}: the last third of its steps, which nothing was fitted to, is predicted "
        f"{held_out['total']:+.1%} in all; the median step is off by {held_out['median_step']:.1%}",
    )
    _finish(_checked(check, known, options), known, output, console, options)
    return 0


def _checked(check: Sequence[Path], known: Calibration, options: Mapping[str, Any]) -> list[_Row]:
    rows = []
    for folder in check:
        measured = _read(folder, options)
        rows += _rows(measured, _machine(measured, options), known, "not fitted to it")
    return rows


def _rows(run: MeasuredRun, machine: Machine, known: Calibration, how: str) -> list[_Row]:
    plain = predict(run, dataclasses.replace(machine, calibration=None))
    return [
        _Row(run, "no calibration", plain),
        _Row(run, how, predict(run, dataclasses.replace(machine, calibration=known))),
    ]


def _read(folder: Path, options: Mapping[str, Any]) -> MeasuredRun:
    run = read_measured_run(folder)
    return dataclasses.replace(run, settings={**run.settings, **_settings(options)})


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for each in options["engine"]:
        name, equals, value = each.partition("=")
        if not equals:
            raise UsageError(f"--engine {each!r} is not KEY=VALUE: write for example --engine max_num_seqs=128")
        try:
            found[name.strip()] = parse_yaml(value)
        except ValueError as error:
            raise UsageError(f"--engine {shorten(each, 60)}: not a YAML value: {error}") from None
    return found


def _machine(run: MeasuredRun, options: Mapping[str, Any]) -> Machine:
    device, model, gpus = machine_for(run, options["device"], options["model"], options["tensor_parallel"])
    return gpu_machine(device, model, gpus, options["ops"])


def _finish(
    rows: Sequence[_Row], known: Calibration, output: Path | None, console: Console, options: Mapping[str, Any]
) -> None:
    held_out = [row.as_dict() for row in rows if row.how == "not fitted to it"]
    checked = {"checked": [{key: each[key] for key in ("run", "errors")} for each in held_out]} if held_out else {}
    known = dataclasses.replace(known, provenance={**known.provenance, **checked})
    if output is not None:
        write_calibration(output, known)
    if options["figure"] is not None and rows:
        _draw(rows[-1], options["figure"])
    if options["as_json"]:
        print(json.dumps({"calibration": dataclasses.asdict(known), "runs": [row.as_dict() for row in rows]}, indent=2))
        return
    values = ", ".join(f"{name} {getattr(known, name):.4g}" for name in NAMES)
    print_plain(console, f"calibration: {values}" + (f" -> {output}" if output else ""))
    if rows:
        print_table(console, _table(rows))
    if rows and not held_out:
        print_plain(console, "note: nothing was held out: --check RUN tells how well it predicts another run")
    for note in dict.fromkeys(note for row in rows for note in row.predicted.notes):
        print_plain(console, f"note: {note}")


def _table(rows: Sequence[_Row]) -> Any:
    heads = ("run", "calibration", "mean TTFT", "p95 TTFT", "mean TPOT", "p95 TPOT", "running", "KV use")
    lines = []
    for row in rows:
        found, near = errors(row.run, row.predicted), series_errors(row.run, row.predicted)
        running = f"{near['running']:.1f}" if "running" in near else "-"
        kv = f"{near['kv_cache_pct']:.1f} points" if "kv_cache_pct" in near else "-"
        lines.append((row.run.name, row.how, *(f"{found[name]:+.1%}" for name in _FIGURES), running, kv))
    table = make_table(heads, lines, numbers_from=2, title="predicted over measured")
    table.caption = "running, KV use: mean distance over the measured seconds"
    return table


def _draw(row: _Row, path: Path) -> None:
    from kvbench.report.predictions import predicted_figure

    title = f"{row.run.name}: simulated over measured ({row.how})"
    figure = predicted_figure(row.run.series, row.predicted.series, title)
    write_text(path, figure.to_html(include_plotlyjs=True))
