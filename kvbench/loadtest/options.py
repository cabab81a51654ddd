"""What the command line of ``kvbench load`` makes of a workload: one load point, in the words of vllm bench serve."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.workload.design import LoadPoint
from kvbench.workload.file import Workload, load_workload
from kvbench.workload.load_section import Slo

SLO_NAMES = tuple(name.removesuffix("_ms") for name in Slo.model_fields)


@dataclass(frozen=True)
class Asked:
    """The options that change the load; None: as the workload has it. ``request_rate`` [1/s] may be infinite."""

    at: str | None = None
    request_rate: float | None = None
    burstiness: float | None = None
    max_concurrency: int | None = None
    num_prompts: int | None = None
    goodput: tuple[str, ...] = ()

    @property
    def changes_the_load(self) -> bool:
        return any((self.request_rate, self.burstiness, self.max_concurrency, self.num_prompts, self.goodput))


def shaped(path: str | Path, asked: Asked, **how: Any) -> tuple[Workload, LoadPoint]:
    """The workload with one load: the one named by ``asked.at`` (else its first), changed as asked.

    ``how``: ``profile``, ``overrides`` and ``seed`` of ``load_workload``. Raises UsageError.
    """
    workload = load_workload(path, **how)
    points = {p.load_id: p for p in workload.load_points}
    point = workload.load_points[0] if asked.at is None else points.get(asked.at)
    if point is None:
        raise UsageError(f"--at {asked.at!r} is no load of this workload: its loads are {', '.join(points)}")
    changes = _changes(workload, point, asked) if asked.changes_the_load else {}
    if not changes:
        return workload, point
    more = [f"load.{key}={json.dumps(value)}" for key, value in changes.items()]
    workload = load_workload(path, **{**how, "overrides": [*(how.get("overrides") or ()), *more]})
    (point,) = workload.load_points
    return workload, point


def _changes(workload: Workload, point: LoadPoint, asked: Asked) -> dict[str, Any]:
    """Values under ``load:`` that leave one load point."""
    value = point.concurrency if point.mode == "closed" else point.request_rate
    count = asked.num_prompts or workload.load.count_for(value)
    changes: dict[str, Any] = {}
    if count:
        changes["num_requests" if workload.load.sessions is None else "sessions.num_sessions"] = count
    if asked.num_prompts and workload.load.duration_s is not None:
        changes["duration_s"] = None
    if point.mode == "open" or asked.request_rate is not None:
        rate = point.request_rate if asked.request_rate is None else asked.request_rate
        changes |= {"mode": "open", "concurrency": None}
        if rate is not None:
            changes["request_rate"] = ["inf" if math.isinf(rate) else rate]
        if asked.max_concurrency is not None:
            changes["max_concurrency"] = asked.max_concurrency
        if asked.burstiness is not None:
            if rate is not None and math.isinf(rate):
                raise UsageError(
                    f"--burstiness {asked.burstiness:g} shapes gaps, and --request-rate inf has none: leave one out"
                )
            changes |= {"arrivals": "gamma", "burstiness": asked.burstiness}
    else:
        if asked.burstiness is not None:
            raise UsageError(f"--burstiness {asked.burstiness:g} needs --request-rate: a closed loop draws no gaps")
        users = asked.max_concurrency or point.concurrency
        _require_enough(workload, asked, count, users)
        changes["concurrency"] = [users]
    if asked.goodput:
        changes["slo"] = parse_goodput(asked.goodput)
    return changes


def _require_enough(workload: Workload, asked: Asked, count: int | None, users: int | None) -> None:
    """Raises UsageError where there are more users of a closed loop than requests, or conversations."""
    if count is None or users is None or count >= users:
        return
    unit = "requests" if workload.load.sessions is None else "conversations"
    counted = f"--num-prompts {count}: so many {unit}" if asked.num_prompts else f"{count} {unit} of the workload"
    busy = f"--max-concurrency {users}" if asked.max_concurrency else f"the workload's {users} users"
    raise UsageError(
        f"{counted} never keep {busy} busy at once: give --num-prompts {users} or more, or --max-concurrency {count} "
        "or less"
    )


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """``ttft:200 tpot:50`` [ms], as vllm bench serve takes it. Raises UsageError."""
    limits: dict[str, float] = {}
    for word in " ".join(words).replace(",", " ").split():
        name, colon, text = word.partition(":")
        name = name.removesuffix("_ms")
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not colon or name not in SLO_NAMES or not 0 < value < math.inf:
            raise UsageError(
                f"--goodput {word!r} is not NAME:MS: write for example --goodput 'ttft:200 tpot:50'; the names are "
                f"{', '.join(SLO_NAMES)}"
            )
        limits[f"{name}_ms"] = value
    if not limits:
        raise UsageError("--goodput is empty: write for example --goodput 'ttft:200 tpot:50'")
    return limits


def parse_rate(text: str | None) -> float | None:
    """``4``, ``0.5`` or ``inf`` requests/s. Raises UsageError."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise UsageError(f"--request-rate {text!r} is not a number of requests/s above 0, or inf (all at once)")
    return value
