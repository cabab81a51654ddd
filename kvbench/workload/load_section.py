"""The ``load:`` section of a workload file, as pydantic models.

Strict on purpose: an unknown key or a value of the wrong type is refused with a sentence that names the
value, the limit and the way out. ``explain(error)`` turns pydantic's ValidationError into such sentences.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_serializer, model_validator

from kvbench.common.schema import StrictModel, explain
from kvbench.workload.arrivals_section import ArrivalFields, IntTuple, RateTuple
from kvbench.workload.design import LoadPoint, load_point
from kvbench.workload.length import Length
from kvbench.workload.prompts_section import (
    PromptClass,
    Prompts,
    SharedPrefix,
    SyntheticPrompts,
    TextPrompts,
    TracePrompts,
)
from kvbench.workload.sessions_section import Sessions

__all__ = [
    "Length",
    "LoadConfig",
    "PromptClass",
    "SharedPrefix",
    "Slo",
    "SyntheticPrompts",
    "TextPrompts",
    "TracePrompts",
    "explain",
]


class Slo(StrictModel):
    """Limits for goodput; a request counts when it meets every limit that is given.

    ``itl_ms`` is a limit on the request's longest pause between chunks, the others on its one value.
    """

    ttft_ms: float | None = Field(default=None, gt=0)
    tpot_ms: float | None = Field(default=None, gt=0)
    itl_ms: float | None = Field(default=None, gt=0)
    e2el_ms: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _some(self) -> Slo:
        if all(getattr(self, name) is None for name in type(self).model_fields):
            raise ValueError(f"slo is empty; give at least one of {', '.join(type(self).model_fields)}.")
        return self


class LoadConfig(ArrivalFields):
    """The ``load:`` section. ``processes``: how many load processes of this machine share each load.

    Time-outs of a request [s]: ``timeout_s`` in all, ``connect_timeout_s`` for name, TCP and TLS together,
    ``first_byte_timeout_s`` from its send, ``idle_timeout_s`` between bytes (the last two: ``timeout_s`` unless given).
    """

    mode: Literal["closed", "open"] = "closed"
    concurrency: IntTuple | None = None
    num_requests: IntTuple | None = None
    sessions: Sessions | None = None
    repeats: int = Field(default=3, ge=1, le=1000)
    cache_state: Literal["cold", "primed", "steady"] = "cold"
    ignore_eos: bool = True
    temperature: float = Field(default=0.0, ge=0)
    timeout_s: float = Field(default=120.0, gt=0, le=86400)
    connect_timeout_s: float = Field(default=5.0, gt=0, le=86400)
    first_byte_timeout_s: float | None = Field(default=None, gt=0, le=86400)
    idle_timeout_s: float | None = Field(default=None, gt=0, le=86400)
    processes: int = Field(default=1, ge=1, le=1000)
    prompts: Prompts
    slo: Slo | None = None

    @field_serializer("request_rate", when_used="json")
    def _finite(self, rates: RateTuple | None) -> list[float | str] | None:
        return None if rates is None else ["inf" if rate == math.inf else rate for rate in rates]

    @model_validator(mode="after")
    def _consistent(self) -> LoadConfig:
        _check_numbers("concurrency", self.concurrency, "1 user", 1)
        _check_numbers("num_requests", self.num_requests, "1 request", 1)
        _check_numbers("request_rate", self.request_rate, "more than 0 requests/s", None)
        if self.mode == "closed":
            if not self.concurrency:
                raise ValueError("mode closed needs concurrency, e.g. `concurrency: [3, 24]`.")
            self.check_closed_loop()
        else:
            self._check_open()
        if self.sessions is not None:
            self._check_sessions(self.sessions)
        self._check_counts()
        return self

    def _check_open(self) -> None:
        if self.concurrency is not None:
            given = list(self.concurrency)
            raise ValueError(
                f"concurrency {given} has no meaning in mode open; remove it or set mode: closed (a cap on the "
                "requests in flight is max_concurrency)."
            )
        if self.arrivals == "trace" and not isinstance(self.prompts, TracePrompts):
            raise ValueError(
                f"arrivals: trace needs prompts of kind trace, not {self.prompts.kind}; use poisson or constant."
            )
        self.check_open_loop()

    def _check_sessions(self, sessions: Sessions) -> None:
        _check_numbers("sessions.num_sessions", sessions.num_sessions, "1 session", 1)
        if not isinstance(self.prompts, SyntheticPrompts):
            raise ValueError(
                f"sessions are made of prompts of kind synthetic, not {self.prompts.kind}; change the kind or remove "
                "sessions."
            )
        if self.num_requests is not None:
            raise ValueError(
                f"num_requests {list(self.num_requests)} contradicts sessions, which end with their own last turn; "
                "give sessions.num_sessions."
            )

    def _check_counts(self) -> None:
        """How many requests or sessions a load holds must be said once, for each load."""
        name, counts = "num_requests", self.num_requests
        if self.sessions is not None:
            name, counts = "sessions.num_sessions", self.sessions.num_sessions
        if counts is not None and self.counted_by_time:
            other = "duration_s" if self.duration_s is not None else "the seconds of the steps"
            raise ValueError(f"{name} {list(counts)} contradicts {other}, which say how many there are; remove one.")
        if counts is None and not self.counted_by_time and not isinstance(self.prompts, TracePrompts):
            what = "sessions one load holds" if self.sessions is not None else "requests one load sends"
            raise ValueError(f"{name} is missing; say how many {what}, e.g. 48.")
        swept = self.swept_values()
        if counts is not None and len(counts) not in (1, len(swept)):
            raise ValueError(
                f"{name} has {len(counts)} values for {len(swept)} loads {list(swept)}; give one number, or one for "
                "each."
            )
        for value, count in zip(swept, self._counts(), strict=True):
            if self.mode == "closed" and count is not None and count < (value or 0):
                raise ValueError(
                    f"{name} {count} never reaches concurrency {value}; send at least as many as there are users."
                )

    def _counts(self) -> tuple[int | None, ...]:
        """Requests, or sessions where there are such, of each load."""
        given = self.sessions.num_sessions if self.sessions is not None else self.num_requests
        counts: tuple[int | None, ...] = given or (None,)
        return counts * len(self.swept_values()) if len(counts) == 1 else counts

    def swept_values(self) -> tuple[int | float | None, ...]:
        """The swept load values: concurrencies, rates, or (None,) where the arrivals have no one rate."""
        if self.mode == "closed":
            return self.concurrency or ()
        return self.request_rate if self.request_rate is not None else (None,)

    def points(self) -> list[LoadPoint]:
        """One LoadPoint for each swept value, in the order of the file."""
        closed = self.mode == "closed"
        return [
            load_point(
                self.mode,
                concurrency=value if closed else None,  # type: ignore[arg-type]
                rate=None if closed else value,
                num_requests=None if self.sessions is not None else count,
                arrivals=self.arrivals,
            )
            for value, count in zip(self.swept_values(), self._counts(), strict=True)
        ]

    def count_for(self, value: float | None) -> int | None:
        """Requests (or sessions, where there are such) of the load with this concurrency or rate.

        None: as many as the arrivals' times or the trace's slice give.
        """
        for swept, count in zip(self.swept_values(), self._counts(), strict=True):
            if swept == value:
                return count
        raise ValueError(f"no load of {value}; this workload has {list(self.swept_values())}.")


def _check_numbers(name: str, values: tuple[float, ...] | None, least: str, minimum: int | None) -> None:
    if values is None:
        return
    if not values:
        raise ValueError(f"{name} is an empty list; give at least one value.")
    for value in values:
        if math.isnan(value) or (value < minimum if minimum is not None else value <= 0):
            raise ValueError(f"{name} {value} is too small; the least is {least}.")
    if name != "num_requests" and len(set(values)) != len(values):
        raise ValueError(f"{name} {list(values)} lists a value twice; remove one.")
