"""What a sweep's engines did in engine time: <run>/lockstep/effects.json, written by kvbench/lockstep/sitting.py.

An effect is the ratio of a configuration's value to the baseline's, measured by engines that took turns step by step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.common.files import read_json

FOLDER, EFFECTS = "lockstep", "effects.json"
FORMAT = 2
LEVEL_WITHIN = 0.02  # of 1, both ends of an interval that is called level


@dataclass(frozen=True)
class EngineEffect:
    """One metric of one cell, as a ratio to the baseline's under the same load.

    ``low``, ``high``: its 95 % interval (None: its scatter is not known); ``call``: ahead, behind, level (within
    2 %) or open; ``smallest_seen``: the smallest relative change that the sitting could have seen.
    """

    cell: str
    metric: str
    ratio: float
    low: float | None
    high: float | None
    call: str
    smallest_seen: float | None
    launches: int

    def __str__(self) -> str:
        """+2.1 % (+1.6 to +2.6), level +0.1 % (-0.4 to +0.5)"""
        called = f"{self.call} " if self.call in ("level", "open") else ""
        return f"{called}{_percent(self.ratio)} %" + (f" ({self.interval})" if self.interval else "")

    @property
    def interval(self) -> str:
        """Empty where so few launches tell nothing."""
        if self.low is None or self.high is None or self.high > 9 * self.low:
            return ""
        return f"{_percent(self.low)} to {_percent(self.high)}"


def _percent(ratio: float) -> str:
    return f"{round(100 * (ratio - 1), 1) + 0.0:+.1f}"  # no -0.0


@dataclass(frozen=True)
class EngineTime:
    """All effects of a run, and how they were measured. ``facts``: effects.json without its effects."""

    effects: tuple[EngineEffect, ...]
    facts: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Which engine time it is: its throughputs are of the whole run, and an interrupted one knows less."""
        return "engine time (whole run)" if self.finished else "engine time (whole run, unfinished)"

    @property
    def finished(self) -> bool:
        """False where it was interrupted: its effects are of the launches before."""
        return bool(self.facts.get("finished", True))

    def of(self, cell: str, metric: str) -> EngineEffect | None:
        return next((effect for effect in self.effects if (effect.cell, effect.metric) == (cell, metric)), None)


def read_engine_time(run: Path) -> EngineTime | None:
    """None for a run whose engines were not measured in engine time, or not to the end of a launch."""
    path = run / FOLDER / EFFECTS
    found = read_json(path) if path.is_file() else None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not found.get("effects"):
        return None
    names = EngineEffect.__dataclass_fields__
    rows = tuple(EngineEffect(**{name: row.get(name) for name in names}) for row in found["effects"])
    return EngineTime(rows, {key: value for key, value in found.items() if key != "effects"})
