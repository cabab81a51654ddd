"""`kvbench dev predict` and `calibrate-model` on a run with known step times: a simulated one, taken for measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from kvbench.cli.main import main
from kvbench.cli.sweep import _predict_and_show
from kvbench.common.errors import UsageError
from kvbench.runs.predictions import read_predictions
from kvbench.simulation.cost.unit_costs import UNITS

COSTS = {"step": 5e-3, "token": 2e-4, "token beyond 64": 1e-4, "prefill pair": 2e-7, "drawn token": 3e-5}
KNOWN = {
    "format": "kvbench-unit-costs/1", "model": "llama-32m", "dtype": "float32", "cpu": "a CPU", "num_threads": 1,
    "run": "none", "units": {name: COSTS.get(name, 0.0) for name in UNITS},
    "context": {"auto": 1.5e-6, "int8_per_token_head": 6e-7},
}  # fmt: skip
WORKLOAD: dict[str, Any] = {
    "name": "tiny",
    "model": {"config": "llama-32m", "load_format": "dummy"},
    "engine": {"page_size": 16, "max_num_seqs": 16, "max_model_len": 512, "kv_budget": "20MiB"},
    "sweep": {"kv_cache_dtype": ["auto", "int8_per_token_head"]},
    "load": {
        "concurrency": [2, 12],
        "num_requests": [8, 24],
        "repeats": 1,
        "prompts": {
            "kind": "synthetic",
            "classes": [{"name": "any", "share": 1.0, "prompt_tokens": [16, 300], "output_tokens": [8, 40]}],
        },
    },
}


def kvbench(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep with the known costs, without the marks of a simulation."""
    folder = tmp_path_factory.mktemp("predict")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(WORKLOAD))
    (folder / "known.json").write_text(json.dumps(KNOWN))
    how = ("--simulate", "--device", "this-cpu", "--calibration", folder / "known.json", "--no-report")
    assert kvbench("sweep", folder / "tiny.yaml", *how, "--output-dir", folder) == 0
    actual = next((folder / "tiny").iterdir())
    assert kvbench("dev", "predict", actual) == 2  # it is simulated itself
    manifest = json.loads((actual / "manifest.json").read_text()) | {"backend": "kvbench", "num_threads": 1}
    del manifest["simulated"]
    (actual / "manifest.json").write_text(json.dumps(manifest))
    return actual


def test_every_cell_is_predicted_from_the_others_as_it_was(run: Path) -> None:
    assert kvbench("dev", "predict", run) == 0
    actual = read_predictions(run)
    assert actual is not None and set(actual.cells) == {
        f"{configuration}-c{users}"
        for configuration in ("paged-p16", "paged-p16-int8_per_token_head")
        for users in (2, 12)
    }
    for cell, figures in actual.cells.items():
        for metric, figure in figures.items():
            assert figure.error == pytest.approx(0.0, abs=0.02), (cell, metric)
    assert "Predicted by simulation" in (run / "report.md").read_text()


def test_the_costs_are_found_and_simulate_the_same_machine_again(run: Path, tmp_path: Path, capsys: Any) -> None:
    assert kvbench("dev", "calibrate-model", run, "--check", run, "--output", tmp_path / "found.json") == 0
    capsys.readouterr()
    assert kvbench("dev", "calibrate-model", run, "--check", run, "--json") == 0
    (cells,) = json.loads(capsys.readouterr().out)["checked"].values()
    assert len(cells) == 4 and all(
        set(figure) == {"predicted", "measured"} for figure in cells["paged-p16-c2"].values()
    )
    actual = json.loads((tmp_path / "found.json").read_text())
    assert actual["context"] == pytest.approx(KNOWN["context"], rel=0.03)
    assert {name: actual["units"][name] for name in COSTS} == pytest.approx(COSTS, rel=0.03)
    figures = {}
    for path in (tmp_path / "found.json", run.parents[1] / "known.json"):
        capsys.readouterr()
        load = ("--input-len", 90, "--output-len", 30, "--concurrency", 6, "--num-prompts", 20)
        assert kvbench("simulate", "--device", "this-cpu", "--model", "llama-32m", "--calibration", path, *load,
                       "--json") == 0  # fmt: skip
        figures[path.name] = json.loads(capsys.readouterr().out)
    ours, real = (figures[name] for name in ("found.json", "known.json"))
    assert ours["output_throughput"] == pytest.approx(real["output_throughput"], rel=0.02)


@pytest.mark.parametrize("damage", ["none", "of another model", "without a unit"])
def test_this_cpu_without_its_unit_costs_is_bad_input(run: Path, tmp_path: Path, damage: str) -> None:
    path, expected = tmp_path / "costs.json", json.loads(json.dumps(KNOWN))
    if damage == "of another model":
        expected["model"] = "llama-3.1-8b"
    if damage == "without a unit":
        del expected["units"]["step"]
    path.write_text(json.dumps(expected))
    given = () if damage == "none" else ("--calibration", path)
    load = ("--input-len", 90, "--output-len", 30, "--concurrency", 6)
    assert kvbench("simulate", "--device", "this-cpu", "--model", "llama-32m", *given, *load) == 2


def test_what_cannot_be_predicted_is_bad_input(run: Path, tmp_path: Path) -> None:
    assert kvbench("dev", "predict", tmp_path) == 2
    assert kvbench("dev", "predict", "results/reference/vllm-cpu/sweep") == 2  # another engine
    assert kvbench("dev", "predict", "results/reference/mixed-cpu") == 2  # raw samples of single loads are not kept


def changed(run: Path, folder: Path, **engine: Any) -> Path:
    """A copy of the run whose servers of INT8 said that they had other settings."""
    shutil.copytree(run, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["servers"]["paged-p16-int8_per_token_head"]["engine"] |= engine
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_cells_are_predicted_only_from_cells_whose_steps_cost_the_same(run: Path, tmp_path: Path) -> None:
    assert kvbench("dev", "predict", changed(run, tmp_path / "run", num_threads=7), "--no-report") == 0
    actual = read_predictions(tmp_path / "run")
    assert actual is not None and len(actual.cells) == 4
    assert kvbench("dev", "calibrate-model", tmp_path / "run") == 2  # there is no one cost of a step


def test_nothing_is_fitted_to_a_load_whose_server_took_other_steps(run: Path, tmp_path: Path) -> None:
    folder = changed(run, tmp_path / "run")
    for summary in (folder / "cells").glob("*-c12/summary.json"):
        stored = json.loads(summary.read_text())
        for repeat in stored["repeats"]:
            repeat["server"]["steps_total"] *= 2
        summary.write_text(json.dumps(stored))
    assert kvbench("dev", "predict", folder, "--no-report") == 0
    actual = read_predictions(folder)
    assert actual is not None and len([note for note in actual.notes if note.startswith("nothing is fitted to")]) == 2


@pytest.mark.parametrize("error", [UsageError("no other cell"), ValueError("a mistake")])
def test_a_prediction_that_fails_costs_a_sweep_no_report(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, error: Exception
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr("kvbench.simulation.calibrate.predict.predict_run", fail)
    folder = changed(run, tmp_path / "run")
    _predict_and_show(folder, Console())
    assert str(error) in capsys.readouterr().out and (folder / "report.md").is_file()
