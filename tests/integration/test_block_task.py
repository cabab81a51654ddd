"""A block of a sweep as a task of another machine: what it sends back, and that it leaves no server behind."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import pytest

from kvbench.common.files import unpack
from kvbench.runs.folder import RunFolder
from kvbench.runs.results import Manifest
from kvbench.sweep.block_task import BlockEnded, BlockTask, LoadDone, LoadFailed, ServerUp, StatusText, run_block_task
from kvbench.targets.choose import choose
from kvbench.targets.options import TargetOptions
from kvbench.workload.file import load_workload
from tests.support.loads import FAKE
from tests.support.sweep_parts import Bench, alive, wait_until


@pytest.fixture
def task(tmp_path, monkeypatch):
    """Makes a task of one block with two loads; ``env`` is the fake server's."""
    monkeypatch.setenv("FAKE_LAUNCHES", str(tmp_path / "launches.jsonl"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def make(**env: str) -> BlockTask:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        bench = Bench(tmp_path)
        workload = load_workload(bench.write(load={"concurrency": [1, 2]}), profile="cpu")
        options = TargetOptions(serve_cmd=f"{sys.executable} {FAKE}")
        block = choose(workload, options).plan()[1][0]
        return BlockTask(block, workload, options, Manifest(), {}, False, (), None)

    return make


def servers(tmp_path: Any) -> list[int]:
    path = tmp_path / "launches.jsonl"
    return [json.loads(line)["pid"] for line in path.read_text().splitlines()] if path.exists() else []


def test_each_load_comes_back_with_its_files_and_then_the_log(task, tmp_path):
    task = task()
    killed = tmp_path / "kvbench-block-killed"  # of a task that could not remove it
    killed.mkdir()
    os.utime(killed, (1, 1))
    events = list(run_block_task(task))
    done, end, run = [each for each in events if isinstance(each, LoadDone)], events[-1], RunFolder(tmp_path / "run")
    assert [each.cell for each in done] == list(task.block.cells) and isinstance(end, BlockEnded) and end.started
    for files in (*(each.files for each in done), end.files):
        unpack(files, run.path)
    assert all(run.is_done(cell.cell_id, task.block.repeat) for cell in task.block.cells)
    assert all((run.path / each.done.requests_file).is_file() for each in done)
    assert run.server_log(task.block.block_id).is_file()
    (up,) = [each for each in events if isinstance(each, ServerUp)]
    assert up.model.vocab_size == 8192 and up.info is not None
    assert not any(map(alive, servers(tmp_path))) and not list(tmp_path.glob("kvbench-block-*"))


@pytest.mark.parametrize("fault", ["exit_at_start", "refuse"])
def test_a_server_that_does_not_start_is_told(task, fault):
    task = task(FAKE_FAULT=fault)
    *events, end = run_block_task(task)
    failed = [each.failure for each in events if isinstance(each, LoadFailed)]
    assert isinstance(end, BlockEnded) and not end.started
    if fault == "refuse":
        assert end.refused is not None and "kv_budget" in end.refused and not failed
    else:
        assert [each.cell_id for each in failed] == [cell.cell_id for cell in task.block.cells]
        assert end.refused is None and all(each.of_server for each in failed)


@pytest.mark.full
@pytest.mark.parametrize("env", [{"FAKE_FAULT": "never_ready"}, {"FAKE_TOKEN_S": "0.5"}])
def test_an_interrupted_task_stops_its_server_while_it_starts_and_while_a_load_runs(task, tmp_path, env, monkeypatch):
    monkeypatch.setattr("kvbench.sweep.block_task._END_S", 2.0)
    block_task = task(**env)
    run = run_block_task(block_task)
    awaited = "starting the server" if "FAKE_FAULT" in env else f"{block_task.block.cells[0].cell_id} repeat"
    next(each for each in run if isinstance(each, StatusText) and awaited in each.text)
    wait_until(lambda: servers(tmp_path), 20)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run.throw(KeyboardInterrupt())
    assert not any(map(alive, servers(tmp_path))) and not list(tmp_path.glob("kvbench-block-*"))
    assert time.monotonic() - began < 60
