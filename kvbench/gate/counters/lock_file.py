"""ci/counters.lock.json: what every scenario counted when it was accepted, and who accepted what, and why.

It holds the history of each scenario as well, so that a difference is explained without the old code. Nobody edits it:
a digest over the scenarios tells, and what is intended is accepted anew, with a reason.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from kvbench.common.errors import UsageError
from kvbench.common.files import write_json
from kvbench.common.schema import StrictModel, explain
from kvbench.gate.counters.commands import LOCK
from kvbench.gate.counters.history_text import decode, encode
from kvbench.gate.counters.replay import COUNTERS, Replayed
from kvbench.gate.counters.workload import CounterWorkload, Scenario

LOCK_FORMAT = "kvbench-counters/1"


class Accepted(StrictModel):
    """One acceptance. ``git``: commit of the code that counted, with ``-dirty`` where files differed from it."""

    reason: str = Field(min_length=1)
    git: str
    date: str
    changed: str


class LockedScenario(StrictModel):
    """``definition``: digest of settings and requests. Counters and columns that are 0 throughout are left out."""

    definition: str
    steps: int = Field(ge=0, le=10_000_000)
    outputs: str
    counters: dict[str, int]
    history: dict[str, str]

    @property
    def columns(self) -> dict[str, tuple[int, ...]]:
        """Column -> value at each step. Raises ValueError."""
        return {name: decode(text, self.steps) for name, text in self.history.items()}


class CounterLock(StrictModel):
    """The whole file. ``counters``: names of all that were compared, those that are 0 everywhere among them."""

    format: Literal["kvbench-counters/1"]
    workload: str
    workload_digest: str
    accepted: list[Accepted] = Field(min_length=1)
    counters: list[str]
    scenarios: dict[str, LockedScenario]
    scenarios_digest: str


def read_lock(path: Path) -> CounterLock | None:
    """None when there is none. Raises UsageError for a file that ``write_lock`` did not leave like this."""
    way_out = f"restore it (git checkout HEAD -- {path}), then accept what changed with `kvbench accept counters`"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        hint = f"give the file, such as {path / LOCK.name}" if path.is_dir() else "make it readable, or give another"
        raise UsageError(f"{path} cannot be read: {error.strerror or error}; {hint}") from None
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}; {way_out}") from None
    try:
        if isinstance(data, Mapping) and data.get("format") != LOCK_FORMAT:
            raise UsageError(
                f"{path} has the format {data.get('format')!r}, this kvbench reads {LOCK_FORMAT}; {way_out}"
            )
        lock = CounterLock.model_validate(data)
        if digest(data["scenarios"]) != lock.scenarios_digest:
            raise UsageError(f"{path} was changed by hand or in a merge: its scenarios_digest differs; {way_out}")
        for name, scenario in lock.scenarios.items():
            _check(f"{path}: {name}", scenario)
    except ValidationError as error:
        raise UsageError(f"{path}: {explain(error, '')[0]} So {way_out}") from None
    return lock


def _check(where: str, scenario: LockedScenario) -> None:
    try:
        _ = scenario.columns
    except ValueError as error:
        raise UsageError(f"{where}: the history cannot be read: {error}") from None


def write_lock(
    path: Path, workload: CounterWorkload, runs: Mapping[str, Replayed], accepted: Sequence[Accepted]
) -> None:
    """Whole or not at all: the old file stays until the new one is complete on the disk."""
    scenarios = {scenario.name: locked(scenario, runs[scenario.name]) for scenario in workload.scenarios}
    data = {
        "format": LOCK_FORMAT,
        "workload": workload.name,
        "workload_digest": workload.digest,
        "accepted": [entry.model_dump() for entry in accepted],
        "counters": list(COUNTERS),
        "scenarios": scenarios,
        "scenarios_digest": digest(scenarios),
    }
    write_json(path, data)


def locked(scenario: Scenario, run: Replayed) -> dict[str, Any]:
    """A scenario as the file keeps it."""
    return {
        "definition": scenario.digest,
        "steps": run.steps,
        "outputs": run.outputs,
        "counters": {name: run.counters[name] for name in COUNTERS if run.counters[name]},
        "history": {name: encode(values) for name, values in run.history.items() if any(values)},
    }


def digest(scenarios: Any) -> str:
    """Of the scenarios as the file keeps them, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(scenarios, sort_keys=True).encode()).hexdigest()
