"""The file ci/counters.lock.json: each scenario's accepted counters, and every acceptance with its reason.

It holds the history of each scenario, so that a difference can be explained without the old code. A digest over the
scenarios shows whether it was edited by hand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from kvbench.common.errors import UsageError
from kvbench.common.files import write_json
from kvbench.common.parsing import parse_json
from kvbench.common.schema import StrictModel, explain
from kvbench.gate.counters.replay import COUNTERS, Replayed
from kvbench.gate.counters.workload import CounterWorkload
from kvbench.gate.sentences import say

LOCK_FORMAT = "kvbench-counters/2"


class Accepted(StrictModel):
    """An acceptance. ``git``: commit of the code that counted, with ``-dirty`` where files differed from it."""

    reason: str = Field(min_length=1)
    git: str
    date: str
    changed: str


class LockedScenario(StrictModel):
    """A scenario as it was accepted.

    ``definition``: digest of settings and requests. ``history``: column -> ``step:value`` wherever it changes.

    Counters and columns that are always 0 are left out.
    """

    definition: str
    steps: int = Field(ge=0, le=10_000_000)
    outputs: str
    counters: dict[str, int]
    history: dict[str, str]

    @model_validator(mode="after")
    def _is_readable(self) -> LockedScenario:
        _ = self.columns
        return self

    @property
    def columns(self) -> dict[str, tuple[int, ...]]:
        """Column -> its value at each step. Raises ValueError."""
        return {name: _values(changes, self.steps) for name, changes in self.history.items()}


class CounterLock(StrictModel):
    """The whole file. ``counters``: names of all counters, also of those that are always 0."""

    format: Literal["kvbench-counters/2"]
    workload: str
    workload_digest: str
    accepted: list[Accepted] = Field(min_length=1)
    counters: list[str]
    scenarios: dict[str, LockedScenario]
    scenarios_digest: str


def read_lock(path: Path) -> CounterLock | None:
    """The lock file, None if there is none. Raises UsageError for one that ``write_lock`` did not write."""
    restore = say("counters.restore", lock=path)
    try:
        data = parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(say("counters.unreadable", lock=path, error=reason, restore=restore)) from None
    if isinstance(data, dict) and (written := data.get("format")) != LOCK_FORMAT:
        raise UsageError(say("counters.other_format", lock=path, written=written, format=LOCK_FORMAT))
    try:
        lock = CounterLock.model_validate(data)
    except ValidationError as error:
        raise UsageError(say("counters.invalid", lock=path, reason=explain(error, "")[0], restore=restore)) from None
    if digest(data["scenarios"]) != lock.scenarios_digest:
        raise UsageError(say("counters.edited", lock=path, restore=restore))
    return lock


def write_lock(
    path: Path, workload: CounterWorkload, runs: Mapping[str, Replayed], accepted: Sequence[Accepted]
) -> None:
    """Writes the lock file atomically. Raises OSError."""
    scenarios = {}
    for scenario in workload.scenarios:
        run = runs[scenario.name]
        scenarios[scenario.name] = LockedScenario(
            definition=scenario.digest,
            steps=run.steps,
            outputs=run.outputs,
            counters={name: run.counters[name] for name in COUNTERS if run.counters[name]},
            history={name: changes_of(values) for name, values in run.history.items() if any(values)},
        )
    lock = CounterLock(
        format=LOCK_FORMAT,
        workload=workload.name,
        workload_digest=workload.digest,
        accepted=list(accepted),
        counters=list(COUNTERS),
        scenarios=scenarios,
        scenarios_digest=digest({name: scenario.model_dump() for name, scenario in scenarios.items()}),
    )
    write_json(path, lock.model_dump())


def changes_of(values: Sequence[int]) -> str:
    """Writes a column as its changes. ``37:4 40:6``: 0 at first, 4 from step 37 on, 6 from step 40 on."""
    pairs = zip((0, *values), values, strict=False)
    return " ".join(f"{step}:{now}" for step, (was, now) in enumerate(pairs, 1) if was != now)


def _values(changes: str, steps: int) -> tuple[int, ...]:
    """The value at each step. Raises ValueError."""
    values: list[int] = []
    level = 0
    for entry in changes.split():
        step, value = map(int, entry.split(":"))
        if not len(values) < step <= steps:
            raise ValueError(say("counters.not_following", entry=entry, step=len(values), steps=steps))
        values += [level] * (step - 1 - len(values)) + [value]
        level = value
    return (*values, *[level] * (steps - len(values)))


def digest(scenarios: Any) -> str:
    """The digest of the scenarios as the file keeps them; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(scenarios, sort_keys=True).encode()).hexdigest()
