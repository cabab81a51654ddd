"""Which machine of a cluster runs which block of a sweep, and what happens when one is lost, busy or unlike."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.files import pack, read_json, write_json
from kvbench.common.git import code_sha256
from kvbench.common.machine import environment
from kvbench.measure.http import HttpInstrument
from kvbench.measure.instrument import Job
from kvbench.ray import machines as ray_machines
from kvbench.ray.cluster import MAX_LOST, MachineFacts
from kvbench.ray.machines import CellNeeds, RayMachines, machines_for, needs_of
from kvbench.runs.folder import DONE, RunFolder
from kvbench.runs.manifest import StoredManifest
from kvbench.runs.results import LoadResult, Manifest
from kvbench.sweep.block import BlockRunner
from kvbench.sweep.block_task import BlockEnded, BlockTask, LoadDone, StatusText
from kvbench.sweep.order import Measured, blocks_left
from kvbench.sweep.requests import SweepRequest
from kvbench.workload.design import make_design, plan_blocks
from kvbench.workload.load_section import load_point
from tests.support.fake_ray import FakeCluster, node

LOADS = [load_point("closed", concurrency=c, rate=None, num_requests=8) for c in (1, 4)]
DESIGN = make_design({"layout": "paged", "page_size": 16}, {"page_size": [8]}, LOADS, "one_at_a_time")
BLOCKS = plan_blocks(DESIGN, 3, 0)
FACTS = MachineFacts(code_sha256(), environment(), "2.60.0")
METRICS: dict[str, Any] = {"completed": 8, "failed": 0}
OPTIONS = SweepRequest(no_calibration=True)


class Silent:
    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None


def block_of(tmp_path: Path, tried: Counter, refused: str | None = None) -> Any:
    """In the place of ``run_block_task``: every load of the block is done, without a server."""

    def run(task: BlockTask):
        yield StatusText("starting")
        for cell in task.block.cells:
            tried[cell.cell_id, task.block.repeat] += 1
            there = RunFolder(tmp_path / "there" / str(sum(tried.values())))
            done = LoadResult.parse({"cell_id": cell.cell_id, "wall_s": 1.0, "metrics": METRICS})
            write_json(there.load(cell.cell_id, task.block.repeat) / DONE, done.to_json())
            yield LoadDone(cell, done, pack(there.path, [there.load(cell.cell_id, task.block.repeat)]))
        yield BlockEnded(refused is None, (), (), pack(tmp_path, []), refused)

    return run


def sweep(tmp_path: Path, monkeypatch: Any, cluster: FakeCluster, **how: Any) -> Any:
    """Runs all blocks as ``Sweep`` does; the manifest's record, the run and how often each load was tried."""
    tried: Counter = Counter()
    monkeypatch.setattr(ray_machines, "run_block_task", block_of(tmp_path, tried, how.pop("refused", None)))
    run, failures = RunFolder(tmp_path / "run"), []
    run.path.mkdir(parents=True)
    stored = StoredManifest(run.path, Manifest())
    job = Job(None, run, None)  # type: ignore[arg-type]
    runner = BlockRunner(HttpInstrument(job), failures, **how.pop("runner", {}))
    facts = {each.node_id: FACTS for each in cluster.members}
    parts, wait_s = (Silent(), OPTIONS, Manifest()), how.pop("wait_s", 9.0)
    machines = RayMachines(cluster, CellNeeds(0), *parts, cluster.members, facts, wait_s)
    machines.begin(runner, stored)
    measured = Measured({})
    while True:
        left = blocks_left(BLOCKS, measured)
        if block := machines.next_block(left):
            machines.submit(block)
        elif finished := machines.next_finished():
            measured.attempts.update((cell.cell_id, finished.block.repeat) for cell in finished.block.cells)
        else:
            break
    return SimpleNamespace(record=stored.manifest.executor.to_json(), run=run, tried=tried, failures=failures)


def every_load() -> set[tuple[str, int]]:
    return {(cell.cell_id, block.repeat) for block in BLOCKS for cell in block.cells}


def test_each_load_is_measured_once_and_a_repeat_keeps_to_one_machine(tmp_path, monkeypatch):
    turns, clock = {}, itertools.count()

    class InTurns(FakeCluster):  # side by side, the machine that began last first
        def next_of(self, tasks):
            latest_first = tasks[::-1]
            came = super().next_of(sorted(latest_first, key=lambda task: turns.setdefault(task, next(clock))))
            turns[came[0]] = next(clock)
            return came

    done = sweep(tmp_path, monkeypatch, InTurns([node(name) for name in ("aa", "bb", "cc")]))
    assert done.tried == Counter(dict.fromkeys(every_load(), 1))
    for cell_id, repeat in every_load():
        assert read_json(done.run.load(cell_id, repeat) / DONE)["cell_id"] == cell_id
    by_repeat = {n: {loads[str(n)] for loads in done.record["loads"].values()} for n in (1, 2, 3)}
    assert all(len(where) == 1 for where in by_repeat.values())
    assert set.union(*by_repeat.values()) == done.record["machines"].keys()

    done = sweep(tmp_path / "five", monkeypatch, FakeCluster([node(name) for name in ("aa", "bb", "cc", "dd", "ee")]))
    assert len({name for loads in done.record["loads"].values() for name in loads.values()}) == 5  # the others help


def test_a_load_without_an_answer_is_told_and_ends_what_runs(tmp_path, monkeypatch):
    def on_sent(cell, unanswered):
        raise InterruptedError(unanswered.reason)

    monkeypatch.setitem(METRICS, "completed", 0)
    with pytest.raises(InterruptedError, match="requests failed"):
        sweep(tmp_path, monkeypatch, FakeCluster([node("aa")]), runner={"on_sent": on_sent})


def test_of_a_lost_machine_only_what_was_not_measured_runs_again(tmp_path, monkeypatch):
    cluster = FakeCluster([node("aa"), node("bb")], dies={"aaaaaaaa": 2})  # after its first load
    done = sweep(tmp_path, monkeypatch, cluster)
    assert done.tried == Counter(dict.fromkeys(every_load(), 1)) and not done.failures
    (entry,) = done.record["lost"]
    assert entry["machine"] == "aaaaaaaa" and entry["loads_kept"] == 1 and entry["reason"] == "NodeDiedError"
    assert sum(name == "aaaaaaaa" for loads in done.record["loads"].values() for name in loads.values()) == 1


@pytest.mark.parametrize("kept", [0, 1])
def test_a_block_that_costs_too_many_machines_fails_and_the_others_are_measured(tmp_path, monkeypatch, kept):
    """``kept``: loads of the block that the first of the machines has measured."""
    first = BLOCKS[0].configuration.config_id
    values: list[Any] = []

    class Deadly(FakeCluster):
        def _next(self, task):
            if task.block == (first, 1) and task.began and len(values) > kept:
                self.dies[task.node.name] = 0
            if task.block == (first, 1):
                values.append(None)
            return super()._next(task)

        def start(self, where, needs, function, *arguments):
            task = super().start(where, needs, function, *arguments)
            task.block = (arguments[0].block.configuration.config_id, arguments[0].block.repeat)
            return task

    done = sweep(tmp_path, monkeypatch, Deadly([node(letter * 2) for letter in "abcdefgh"]))
    failed = [(cell.cell_id, 1) for cell in BLOCKS[0].cells[kept:]]
    assert [(each.cell_id, each.repeat) for each in done.failures] == failed
    assert [entry["loads_kept"] for entry in done.record["lost"]] == [kept] * MAX_LOST
    assert set(done.tried) == every_load() - set(failed)


def test_a_busy_machine_is_left_out_and_a_sweep_ends_where_none_is_left(tmp_path, monkeypatch):
    done = sweep(tmp_path, monkeypatch, FakeCluster([node("aa"), node("bb")], busy=["aaaaaaaa"]), wait_s=0.0)
    assert done.tried == Counter(dict.fromkeys(every_load(), 1))
    assert {name for loads in done.record["loads"].values() for name in loads.values()} == {"bbbbbbbb"}
    for how in ({"busy": ["aaaaaaaa"]}, {"dies": {"aaaaaaaa": 5}}):
        with pytest.raises(MeasurementError, match="no machine"):
            sweep(tmp_path / str(len(how)) / next(iter(how)), monkeypatch, FakeCluster([node("aa")], **how), wait_s=0.0)


def test_settings_that_a_server_refuses_end_the_sweep(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="page size"):
        sweep(tmp_path, monkeypatch, FakeCluster([node("aa")]), refused="page size 3 is not a power of two")


@pytest.mark.parametrize(
    ("demand", "resources", "cells", "needs"),
    [
        (CellNeeds(0), {"CPU": 8.0, "GPU": 4.0}, 1, {"CPU": 8.0}),
        (CellNeeds(0), {"CPU": 0.0}, 0, None),
        (CellNeeds(0, "bench"), {"CPU": 8.0, "bench": 2.0}, 1, {"CPU": 8.0, "bench": 1.0}),
        (CellNeeds(1), {"CPU": 8.0, "GPU": 4.0}, 4, {"CPU": 2.0, "GPU": 1.0}),
        (CellNeeds(2), {"CPU": 8.0, "GPU": 5.0}, 2, {"CPU": 4.0, "GPU": 2.0}),
        (CellNeeds(1), {"CPU": 8.0}, 0, None),
        (CellNeeds(1, "tpu"), {"CPU": 8.0, "tpu": 2.0}, 2, {"CPU": 4.0, "tpu": 1.0}),
        (CellNeeds(1, "accelerator_type:H100"), {"CPU": 8.0, "GPU": 2.0, "accelerator_type:H100": 1.0}, 2,
         {"CPU": 4.0, "GPU": 1.0, "accelerator_type:H100": 0.001}),
        (CellNeeds(1, "accelerator_type:H100"), {"CPU": 8.0, "GPU": 2.0, "accelerator_type:L4": 1.0}, 0, None),
    ],
)  # fmt: skip
def test_what_a_cell_takes_of_a_machine(demand, resources, cells, needs):
    machine = node("aa", **resources)
    assert demand.cells(machine) == cells and demand.needs(machine) == needs


@pytest.mark.parametrize(
    ("profile", "device", "options", "gpus"),
    [
        ("cpu", "auto", {}, 0),
        ("gpu", "auto", {}, 1),
        ("cpu", "cuda", {}, 1),
        ("gpu", "auto", {"target_args": "--tensor-parallel-size 4 --pipeline-parallel-size=2"}, 8),
        ("gpu", "auto", {"serve_cmd": "sglang --tp 2 --port {port}"}, 2),
    ],
)
def test_how_many_gpus_a_cell_asks_for(profile, device, options, gpus):
    design = SimpleNamespace(configurations=[SimpleNamespace(settings={"device": device})])
    assert needs_of(SimpleNamespace(profile=profile), design, SweepRequest(**options)).gpus == gpus


def facts(**changes: Any) -> MachineFacts:
    return replace(FACTS, **changes | {"environment": {**FACTS.environment, **changes.get("environment", {})}})


def chosen(monkeypatch: Any, by_name: dict[str, Any], cluster: FakeCluster | None = None) -> RayMachines:
    """``machines_for`` on machines that say ``by_name`` of themselves."""
    cluster = cluster or FakeCluster([node(name[:2]) for name in by_name])
    start = cluster.start

    def start_with_facts(where, needs, function, *arguments):
        def say():
            if isinstance(by_name[where.name], Exception):
                raise by_name[where.name]
            yield by_name[where.name]

        return start(where, needs, say, *arguments)

    monkeypatch.setattr(cluster, "start", start_with_facts)
    return machines_for(cluster, CellNeeds(0), (Silent(), OPTIONS, Manifest()), 0.2, lambda text: None)


def test_machines_that_run_other_code_or_none_are_left_out_by_name(monkeypatch):
    said = {"aaaaaaaa": facts(), "bbbbbbbb": facts(code="0" * 64), "cccccccc": ModuleNotFoundError("no kvbench")}
    found = chosen(monkeypatch, said)
    assert [each.name for each in found.nodes] == ["aaaaaaaa"]
    assert ["bbbbbbbb" in found.notes[1], "cccccccc" in found.notes[2]] == [True, True]
    del said["aaaaaaaa"]
    with pytest.raises(UsageError, match=r"other code.*no kvbench"):
        chosen(monkeypatch, said)


def test_machines_that_are_not_alike_are_refused(monkeypatch):
    other = facts(environment={"cpu": {**FACTS.environment["cpu"], "model": "another processor"}})
    with pytest.raises(UsageError, match="another processor on bbbbbbbb"):
        chosen(monkeypatch, {"aaaaaaaa": facts(), "bbbbbbbb": other})


def test_a_cluster_whose_machines_stay_busy_is_given_up(monkeypatch):
    with pytest.raises(UsageError, match="not free"):
        chosen(monkeypatch, {"aaaaaaaa": facts()}, FakeCluster([node("aa")], busy=["aaaaaaaa"]))
    with pytest.raises(UsageError, match=r"has a CPU .*bench 1"):
        chosen(monkeypatch, {"aaaaaaaa": facts()}, FakeCluster([node("aa", CPU=0.0, bench=1.0)]))
