"""``kvbench compare --method twins``: two live servers in turns, through the command line and at its core."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml

from kvbench.common.errors import UsageError
from kvbench.common.freezer import SignalFreezer
from kvbench.gate.compare import twin_pairs
from kvbench.gate.compare.builds import Builds
from kvbench.gate.compare.sides import open_workloads, parse_side
from kvbench.gate.compare.twin_pairs import TwinPairs
from kvbench.gate.timing.plan import SIDES, turns
from kvbench.runs.folder import RunFolder
from kvbench.sweep.block import BlockRunner
from kvbench.targets import launched
from kvbench.workload.file import load_workload
from tests.integration.test_compare import STREAMS
from tests.support.loads import FAKE
from tests.support.sweep_parts import ROOT, alive, wait_until

TOKEN_S = {"base": 0.01, "candidate": 0.02}  # the server sleeps so long before each token, whenever it runs
LOAD = STREAMS["load"] | {"num_requests": [20]}


def command(side, **env):
    words = " ".join(f"{name}={value}" for name, value in ({"FAKE_TOKEN_S": TOKEN_S[side]} | env).items())
    return f"env {words} {sys.executable} {FAKE} --port {{port}}"


@pytest.fixture
def launches(tmp_path, monkeypatch):
    """The process ids of all servers so far. A folder with a workload is the current one."""
    path = tmp_path / "launches.jsonl"
    monkeypatch.setenv("FAKE_LAUNCHES", str(path))
    monkeypatch.setenv("KVBENCH_NO_CALIBRATION", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "no-git"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "streams.yaml").write_text(yaml.safe_dump(STREAMS | {"load": LOAD}))
    return lambda: [json.loads(line)["pid"] for line in path.read_text().splitlines()] if path.exists() else []


class Pair:
    """One pair of both servers, without a verdict. ``run()`` measures it; ``failures`` by side."""

    def __init__(self, folder, **env):
        self.folder, self.env = folder, env
        self.pids, self.targets = {}, {}

    def run(self):
        sides = {side: parse_side(command(side, **self.env.get(side, {}))) for side in SIDES}
        options = {"port": 0, "only": (), "no_calibration": True, "start_timeout": 60.0}
        with ExitStack() as held:
            (opened,) = open_workloads(sides, [load_workload("streams.yaml")], options, Builds(), held)
            runners = {}
            for side in SIDES:
                choice = opened.sides[side].choice
                quiet = SimpleNamespace(**dict.fromkeys(("status", "load_started", "load_failed"), lambda *_: None))
                (self.folder / side).mkdir()
                runners[side, "streams"] = BlockRunner(
                    choice.workload,
                    RunFolder(self.folder / side),
                    choice.new_target,
                    quiet,
                    lambda *_: None,
                    lambda: None,
                )
            (turn,) = turns(opened.matches, 1, 5)
            self.failures = TwinPairs(runners, 5).measure(turn, turn.sides, 1)
        return self

    def load(self, side):
        (found,) = (self.folder / side).glob("cells/*/loads/1")
        return found

    def done(self, side):
        return json.loads((self.load(side) / "done.json").read_text())


def test_both_are_measured_in_their_own_running_time(tmp_path, launches):
    pair = Pair(tmp_path).run()
    assert pair.failures == {"base": [], "candidate": []}
    base, candidate = (pair.done(side) for side in SIDES)
    assert not any(map(alive, launches())) and len(launches()) == 2
    for side, done in zip(SIDES, (base, candidate), strict=True):
        assert done["clock"] == "running" and done["metrics"]["completed"] == 20
        turn = done["turns"]
        assert turn["slices"] >= 2 and turn["running_s"] < 0.75 * turn["wall_s"]
        # No server sends a token sooner than it can, and none is charged for the time that it was frozen.
        assert done["metrics"]["itl_ms"]["p50"] >= TOKEN_S[side] * 900
        wall = pd.read_parquet(pair.load(side) / "requests-wall.parquet")
        mapped = pd.read_parquet(pair.load(side) / "requests.parquet")
        assert mapped["end"].max() == pytest.approx(turn["running_s"], abs=0.2)
        assert wall["end"].max() == pytest.approx(turn["wall_s"], abs=0.2)
        frozen = json.loads((pair.load(side) / "freezes.json").read_text())["frozen"]
        inside = sum(max(0.0, min(thaw, turn["wall_s"]) - max(freeze, 0.0)) for freeze, thaw in frozen)
        assert turn["running_s"] == pytest.approx(turn["wall_s"] - inside)
    rates = [done["metrics"]["output_throughput"] for done in (base, candidate)]
    assert 0.3 < rates[1] / rates[0] < 0.8  # 0.5 where nobody else runs

    # Never did two run at once: what a server sends arrives in its own turns, or is read a moment after them.
    logs = {side: json.loads((pair.load(side) / "freezes.json").read_text()) for side in SIDES}
    runs = {}
    for side, log in logs.items():
        edges = [log["zero_perf_counter"] + moment for moments in log["frozen"] for moment in moments]
        runs[side] = list(zip(edges[1:-1:2], edges[2:-1:2], strict=True))  # from each thaw to the next freeze
    assert all(runs.values())
    assert len(runs["base"]) == len(runs["candidate"])
    for side, other in (SIDES, SIDES[::-1]):
        lists = pd.read_parquet(pair.load(side) / "requests-wall.parquet")["chunk_times"]
        chunks = logs[side]["zero_perf_counter"] + np.concatenate(lists.to_numpy())
        stray = [at for at in chunks for thaw, freeze in runs[other] if thaw + 0.02 < at < freeze]
        assert len(stray) <= 0.02 * len(chunks)


def test_a_server_that_dies_while_it_is_frozen_is_its_sides_fault(tmp_path, launches, monkeypatch):
    class Deadly(SignalFreezer):
        """Kills the second server in its third freeze."""

        def __init__(self, child):
            super().__init__(child)
            self.child, self.freezes, self.deadly = child, 0, child.pid == launches()[1]

        def freeze(self):
            at = super().freeze()
            self.freezes += 1
            if self.deadly and self.freezes == 3:
                os.kill(self.child.pid, signal.SIGKILL)
            return at

    @contextmanager
    def deadly(child):
        freezer = Deadly(child)
        yield freezer
        freezer.thaw()

    monkeypatch.setattr(launched, "freezer_of", deadly)
    pair = Pair(tmp_path).run()
    (turn_side,) = [side for side in SIDES if pair.failures[side]]
    (failure,) = pair.failures[turn_side]
    assert failure.of_server and "signal 9" in failure.reason
    assert len(list((tmp_path / turn_side).glob("cells/*/loads/failed-1"))) == 1
    assert not any(map(alive, launches()))


def test_servers_that_do_not_fit_into_memory_together_are_refused(tmp_path, launches, monkeypatch):
    monkeypatch.setattr(twin_pairs, "free_memory", lambda: {"this machine": 1 << 20})
    with pytest.raises(UsageError, match="do not fit"):
        Pair(tmp_path).run()
    assert len(launches()) == 1 and not any(map(alive, launches()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_comparison_that_is_ended_leaves_nothing_frozen_or_running(tmp_path, launches, number):
    words = ["compare", command("base"), command("candidate"), "--workload", "streams.yaml", "--method", "twins"]
    words += ["-o", "load.num_requests=[400]"]
    with subprocess.Popen([sys.executable, "-m", "kvbench", *words], stdout=subprocess.DEVNULL) as kvbench:
        began = "results/compare/*/*/streams/cells/*/loads/running-1/client.log"
        wait_until(lambda: len(list(tmp_path.glob(began))) == 2)
        clients = [int(p.name) for p in os.scandir("/proc") if p.name.isdigit() and _loads(p.path)]
        kvbench.send_signal(number)
        assert kvbench.wait(timeout=30) == (130 if number == signal.SIGINT else -9)
    pids = [*launches(), *clients]
    assert len(launches()) == 4  # each once before the pairs, as it may compile then
    wait_until(lambda: not any(map(alive, pids)), 20)


def _loads(process):
    """Whether it is a load client of ours."""
    try:
        with open(f"{process}/cmdline", "rb") as file:
            return b"kvbench.load" in (words := file.read()) and os.getcwd().encode() in words
    except OSError:
        return False
