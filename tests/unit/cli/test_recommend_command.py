"""``kvbench recommend``: which run it takes, its exit codes, and JSON that says the same as the text."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.main import main
from tests.support.synthetic_run import BASELINE, PAIR, make_run, write_run
from tests.support.toy_engine import Scenario

write_reportable = partial(write_run, samples=False)


@pytest.fixture
def recommend(capsys: pytest.CaptureFixture[str]) -> Any:
    """(exit code, stdout, stderr) of ``kvbench recommend arguments``."""

    def command(*arguments: object) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["recommend", *map(str, arguments)])
        return ended.value.code, *capsys.readouterr()

    return command


def test_a_run_is_answered_as_text_and_as_json(recommend: Any, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", Scenario(configs=PAIR, concurrencies=(3,), num_requests=20))
    code, text, notes = recommend(folder)
    assert code == 0 and "\nengine: {layout: paged," in text and not notes
    code, out, _ = recommend(folder, "--json")
    said = json.loads(out)
    assert code == 0 and said["settings"] == BASELINE.settings and said["changed"] == {}
    whole = " ".join(text.split())
    assert said["verdict"] in whole and all(line in whole for line in said["paging"])


def test_a_folder_of_runs_means_its_newest_complete_one_with_a_valid_load(recommend: Any, tmp_path: Path) -> None:
    first, second = (write_reportable(tmp_path, day, {"paged-p16-c3": [100.0] * 3}) for day in (1, 2))
    unfinished = write_reportable(tmp_path, 3, {"paged-p16-c3": [100.0]}, status="incomplete")
    invalid = write_reportable(tmp_path, 4, {"paged-p16-c3": [100.0]}, invalid=("paged-p16-c3",))
    code, out, notes = recommend(tmp_path, "--json")
    assert code == 0 and json.loads(out)["run"] == str(second) and second.name in notes
    passed_over = notes.splitlines()[0]
    assert unfinished.name in passed_over and invalid.name in passed_over and first.name not in notes
    assert recommend(first, "--json")[0] == 0


def test_an_own_run_that_failed_does_not_hide_those_that_came_along(recommend: Any, tmp_path: Path) -> None:
    shipped = write_reportable(tmp_path / "reference", 1, {"paged-p16-c3": [100.0] * 3})
    failed = write_reportable(tmp_path, 2, {"paged-p16-c3": [100.0]}, invalid=("paged-p16-c3",))
    code, out, notes = recommend(tmp_path, "--json")
    assert code == 0 and json.loads(out)["run"] == str(shipped) and failed.name in notes


def test_of_runs_of_several_workloads_or_engines_none_is_taken(recommend: Any, tmp_path: Path) -> None:
    ours = write_reportable(tmp_path, 1, {"paged-p16-c3": [100.0] * 3})
    theirs = write_reportable(tmp_path, 2, {"paged-p16-c3": [100.0] * 3}, backend="vllm")
    code, out, error = recommend(tmp_path)
    assert code == 2 and not out and ours.name in error and theirs.name in error and "vLLM" in error
    assert recommend(ours, "--json")[0] == 0
    code, _, error = recommend("results/reference")
    assert code == 2 and "results/reference/four-engines" in error and "llama.cpp" in error
    code, out, notes = recommend("results/reference/vllm-cpu", "--json")
    assert code == 0 and json.loads(out)["run"].endswith("vllm-cpu/sweep") and "vllm-cpu/sweep" in notes


def test_a_folder_without_a_run_is_bad_input(recommend: Any, tmp_path: Path) -> None:
    assert recommend(tmp_path / "none")[0] == 2 and recommend(tmp_path)[0] == 2
    folder = write_reportable(tmp_path / "results", 1, {"paged-p16-c3": [100.0]}, status="incomplete")
    code, _, error = recommend(tmp_path / "results")
    assert code == 2 and folder.name in error
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text("{}")
    assert recommend(tmp_path / "damaged")[0] == 2


def test_a_run_without_a_valid_load_says_so_and_exits_with_4(recommend: Any, tmp_path: Path) -> None:
    reasons = {config.config_id: ("timestamp lag p99 3.1 ms",) for config in PAIR}
    invalid = Scenario(configs=PAIR, repeats=1, num_requests=20, invalid=reasons)
    code, text, _ = recommend(make_run(tmp_path / "run", invalid))
    assert code == 4 and "timestamp lag" in text.splitlines()[0]
    nothing = Scenario(configs=PAIR, missing=tuple(config.config_id for config in PAIR))
    assert recommend(make_run(tmp_path / "nothing", nothing))[0] == 4
