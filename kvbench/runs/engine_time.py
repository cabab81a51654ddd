"""The comparison of a sweep's engines in engine time: <run>/lockstep/effects.json of kvbench/lockstep/sitting.py.

An effect is the ratio of a configuration's value to the baseline's, measured by engines that took turns step by step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, PositiveFloat, field_validator, model_validator

from kvbench.common.files import read_json
from kvbench.common.records import Record, record_of
from kvbench.effects.comparison import Call, Comparison, stored_call
from kvbench.metrics.definitions import ENGINE, figure

FOLDER, EFFECTS = "lockstep", "effects.json"
_WAY_OUT = "engine time is left out; `kvbench sweep` of the workload measures it anew"


class EngineEffect(Record):
    """One metric of one cell, as a ratio to the baseline's under the same load, with its 95 % interval.

    smallest_seen: the smallest relative change that the sitting could have seen
    base, value: means over the launches; decided: it has a call and a narrow interval; within_launch: the interval is
    of one launch; pooled: its noise is known from other configurations too
    """

    model_config = ConfigDict(extra="allow")

    cell: str
    metric: str
    higher_is_better: bool | None = None
    base: float | None = None
    value: float | None = None
    decided: bool | None = None
    ratio: PositiveFloat
    low: PositiveFloat | None = None
    high: PositiveFloat | None = None
    call: Call
    smallest_seen: float | None = None
    launches: int = 1
    within_launch: bool | None = None
    pooled: bool | None = None

    @field_validator("call", mode="before")
    @classmethod
    def _today(cls, word: Any) -> Any:
        return stored_call(word) if isinstance(word, str) else word

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        figure(self.metric)
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"its interval ends at {self.high} before it begins at {self.low}")
        return self

    @property
    def comparison(self) -> Comparison:
        return Comparison(
            self.metric, ENGINE, self.ratio, self.low, self.high, self.launches, self.call, smallest=self.smallest_seen
        )


class TurnSteps(Record):
    """The steps of a turn, also in the first launch, and by how much turns lengthen a step (0.01: 1 %)."""

    turn_steps: int | None = None
    first_turn_steps: int | None = None
    cold_cost: float | None = None


class EngineTime(Record):
    """All effects of a run, and how they were measured in how many ``seconds``. ``turns``: by load.

    finished: False where it was interrupted, so that its effects are of the launches before
    at_once: launches that computed side by side, each on cores of its own
    own_processes: whether each engine had one; asynchronous: whether their servers schedule while the device computes
    """

    FORMAT: ClassVar[int] = 2
    model_config = ConfigDict(extra="allow")

    finished: bool = True
    launches: int | None = None
    seconds: float | None = None
    limit_s: float | None = None
    order_seed: int | None = None
    configurations: int | None = None
    at_once: int = 1
    own_processes: bool = False
    asynchronous: bool = False
    baseline: str | None = None
    turns: Mapping[str, TurnSteps] = {}
    notes: tuple[str, ...] = ()
    effects: tuple[EngineEffect, ...] = ()

    @property
    def label(self) -> str:
        """The clock's name: its throughputs are of the whole run, and an interrupted one knows less."""
        return f"{ENGINE} (whole run)" if self.finished else f"{ENGINE} (whole run, unfinished)"

    def of(self, cell: str, metric: str) -> Comparison | None:
        """Compares a cell with the baseline; None where that was not measured."""
        return next((e.comparison for e in self.effects if (e.cell, e.metric) == (cell, metric)), None)


def read_engine_time(run: Path) -> EngineTime | None:
    """Reads the effects; None where no launch was measured to its end, or in format 1.

    Raises UsageError for a damaged file, or one of another format.
    """
    path = run / FOLDER / EFFECTS
    if not os.path.lexists(path):
        return None
    stored = read_json(path, _WAY_OUT)
    if isinstance(stored, dict) and stored.get("format") == 1:
        return None
    engine_time = record_of(EngineTime, stored, path, _WAY_OUT)
    return engine_time if engine_time.effects else None
