"""Sweeps and simulations on a real Ray cluster of three machines, all of them on this one."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.support.loads import FAKE
from tests.support.sweep_parts import Bench, alive, complaints, end, finished, manifest, wait_until

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'kvbench[ray]'")
pytestmark = pytest.mark.full

CELLS = ("paged-p16-c2", "contiguous-c2")
EITHER = (0, 4)  # cells that run side by side on this one machine disturb each other
NOTICE = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 6}


class Machines:
    """The cluster, and where its machines note which servers they launched."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self.launches_file = folder / "launches.jsonl"
        head = {**self.settings, "include_dashboard": False, "_system_config": NOTICE}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.others = [self.cluster.add_node(**self.settings) for _ in range(2)]

    @property
    def settings(self) -> dict:
        env = {"FAKE_LAUNCHES": str(self.launches_file), "TMPDIR": str(self.launches_file.parent)}
        return {"num_cpus": 1, "node_ip_address": "127.0.0.1", "object_store_memory": 80 << 20, "env_vars": env}

    @property
    def arguments(self) -> list[str]:
        return ["--executor", "ray", "--ray-address", self.cluster.address, "--no-calibration"]

    def servers(self) -> list[int]:
        """Pids of the servers launched so far."""
        lines = self.launches_file.read_text().splitlines() if self.launches_file.exists() else []
        return [json.loads(line)["pid"] for line in lines]

    def servers_of(self, node) -> list[int]:
        """Pids of the servers that run on a machine now."""
        (raylet,) = [each[0].process.pid for kind, each in node.all_processes.items() if kind == "raylet"]
        below = {child.pid for child in psutil.Process(raylet).children(recursive=True)}
        return [pid for pid in self.servers() if pid in below]


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # 127.0.0.1 is a machine's address, in new processes
        patch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)  # and in this one
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        found = Machines(tmp_path_factory.mktemp("cluster"))
        yield found
        found.cluster.shutdown()


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def serve(seconds_a_token: float) -> list[str]:
    return ["--serve-cmd", f"env FAKE_TOKEN_S={seconds_a_token} {sys.executable} {FAKE}"]


def test_ctrl_c_stops_the_servers_on_all_machines_and_the_run_can_go_on(machines, bench):
    path = bench.write(load={"num_requests": [200], "repeats": 3})
    before = machines.servers()
    process = bench.start(str(path), *machines.arguments, *serve(0.05))
    wait_until(lambda: len(machines.servers()) >= len(before) + 3)
    code, output = end(process, signal.SIGINT)
    assert code == 130 and "--executor ray" in output, output
    wait_until(lambda: not any(map(alive, machines.servers())), 10)
    assert manifest(bench.only_run())["status"] == "incomplete"


def test_where_no_cluster_answers_or_no_machine_has_a_resource_is_said(machines, bench, monkeypatch):
    monkeypatch.setattr("kvbench.ray.cluster._REACH_S", 0.5)
    path = str(bench.write())
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()  # and says nothing
        address = f"127.0.0.1:{other.getsockname()[1]}"
        done = bench.sweep(path, "--executor", "ray", "--ray-address", address)
    assert done.returncode == 2 and address in done.stderr
    for wanted in (["--device-resource", "tpu"], ["-o", "engine.device=cuda"]):
        done = bench.sweep(path, *machines.arguments, *wanted, "--ray-wait", "0.5")
        assert done.returncode == 2 and "no machine of the Ray cluster has" in done.stderr
    assert not bench.results.exists()


def test_the_cell_of_a_machine_that_is_lost_runs_again_on_another(machines, bench):
    (victim, _), lost = machines.others, []

    def kill():
        wait_until(lambda: machines.servers_of(victim))
        lost.extend(machines.servers_of(victim))
        machines.cluster.remove_node(victim, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    done = bench.sweep(str(bench.write()), *machines.arguments, *serve(0.01))
    killer.join()
    assert done.returncode in EITHER, done.stdout + done.stderr
    run = bench.only_run()
    assert set(finished(run)) == {(cell, repeat) for cell in CELLS for repeat in ("1", "2")}
    assert complaints(run) == [] and (run / "report.html").exists()
    record = manifest(run)["executor"]
    (entry,) = record["lost"]
    assert entry["machine"] == victim.node_id[:8] and manifest(run)["status"] == "complete"
    ran_on = {name for loads in record["loads"].values() for name in loads.values()}
    assert ran_on and victim.node_id[:8] not in ran_on and ran_on < record["machines"].keys()
    for name in ran_on:
        assert record["machines"][name]["versions"]["ray"] == ray.__version__ and record["machines"][name]["device"]
    assert "127.0.0.1" not in json.dumps(record)
    assert lost and not any(map(alive, machines.servers()))

    shutil.rmtree(run / "cells" / CELLS[1] / "loads" / "2")
    times = finished(run)
    again = bench.sweep("--resume", str(run), *machines.arguments, fake=False)
    assert again.returncode in EITHER, again.stdout + again.stderr
    assert finished(run) == times | {(CELLS[1], "2"): finished(run)[CELLS[1], "2"]}
    assert manifest(run)["executor"]["lost"] == [entry] and complaints(run) == []


def test_simulations_of_a_cluster_have_the_figures_and_files_of_this_machine(machines, bench):
    words = ["simulate", str(bench.write()), "--device", "L4", "--model", "llama-3.1-8b", "--max-concurrency", "2,4"]
    words += ["-o", "engine.kv_budget=null", "--json", "--output-dir"]
    here = bench.kvbench(*words, str(bench.folder / "here"), "--processes", "1")
    there = bench.kvbench(*words, str(bench.folder / "there"), *machines.arguments[:4])
    assert (here.returncode, there.returncode) == (0, 0), here.stderr + there.stderr
    assert json.loads(here.stdout) == json.loads(there.stdout)
    files = [
        {p.relative_to(f): p.read_bytes() for p in f.rglob("*.*")}
        for f in map(bench.folder.joinpath, ("here", "there"))
    ]
    assert files[0] == files[1] and len(files[0]) == 4
