"""Replays every scenario twice, the second time in a process of its own with another hash seed.

Code that depends on the order of a set, on an address or on what ran before in the process gives two different results.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import kvbench
from kvbench.common.errors import MeasurementError
from kvbench.gate.counters.replay import Replayed, replay
from kvbench.gate.counters.workload import CounterWorkload, Scenario, read_counter_workload

_TIMEOUT = 300  # s
_ANOTHER_SEED = {"1": "2"}  # hash seed of this process, where it was set -> that of the other one


def replay_all(scenarios: tuple[Scenario, ...]) -> dict[str, Replayed]:
    return {scenario.name: replay(scenario) for scenario in scenarios}


def replay_twice(workload: CounterWorkload) -> tuple[dict[str, Replayed], dict[str, Replayed]]:
    """All scenarios here, and all of them side by side in another process. Raises MeasurementError."""
    root = str(Path(kvbench.__file__).resolve().parent.parent)
    seed = _ANOTHER_SEED.get(os.environ.get("PYTHONHASHSEED", ""), "1")
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    module = ("-m", "kvbench.gate.counters.second_run")
    other = subprocess.Popen(
        [sys.executable, *module, str(workload.path), *(s.name for s in workload.scenarios)],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        first = replay_all(workload.scenarios)
        printed, complaint = other.communicate(timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise MeasurementError(f"the second run of the scenarios took more than {_TIMEOUT} s") from None
    finally:
        if other.poll() is None:
            other.kill()
            other.communicate()
    if other.returncode:
        last = (complaint.strip().splitlines() or ["no message"])[-1]
        raise MeasurementError(f"the second run of the scenarios failed with exit code {other.returncode}: {last}")
    return first, {name: _from_json(run) for name, run in json.loads(printed).items()}


def _from_json(data: Mapping) -> Replayed:
    history = {name: tuple(values) for name, values in data["history"].items()}
    return Replayed(data["counters"], history, data["outputs"], data["error"])


def _print_runs(path: str, names: list[str]) -> None:
    wanted = set(names)
    scenarios = tuple(s for s in read_counter_workload(Path(path)).scenarios if s.name in wanted)
    json.dump({name: dataclasses.asdict(run) for name, run in replay_all(scenarios).items()}, sys.stdout)


if __name__ == "__main__":
    _print_runs(sys.argv[1], sys.argv[2:])
