"""The ``load:`` section of a workload file, as pydantic models.

Strict on purpose: an unknown key or a value of the wrong type is refused with a sentence that names the
value, the limit and the way out. ``explain(error)`` turns pydantic's ValidationError into such sentences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from kvbench.load.length import Length
from kvbench.load.prompt_schema import (
    PromptClass,
    Prompts,
    SharedPrefix,
    SyntheticPrompts,
    TextPrompts,
    TracePrompts,
)
from kvbench.load.strict import StrictModel, explain

__all__ = [
    "Length",
    "LoadConfig",
    "LoadPoint",
    "PromptClass",
    "SharedPrefix",
    "Slo",
    "SyntheticPrompts",
    "TextPrompts",
    "TracePrompts",
    "explain",
]


def _as_tuple(value: Any) -> Any:
    """A single value or a list becomes a tuple, so that YAML may give either."""
    if value is None or isinstance(value, tuple):
        return value
    return tuple(value) if isinstance(value, list) else (value,)


IntTuple = Annotated[tuple[int, ...], BeforeValidator(_as_tuple)]
FloatTuple = Annotated[tuple[float, ...], BeforeValidator(_as_tuple)]


class Slo(StrictModel):
    """Limits for goodput; a request counts when it meets every limit that is given."""

    ttft_ms: float | None = Field(default=None, gt=0)
    tpot_ms: float | None = Field(default=None, gt=0)
    e2el_ms: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _some(self) -> Slo:
        if self.ttft_ms is None and self.tpot_ms is None and self.e2el_ms is None:
            raise ValueError("slo is empty; give at least one of ttft_ms, tpot_ms, e2el_ms.")
        return self


@dataclass(frozen=True)
class LoadPoint:
    """One load of a sweep: a concurrency (closed loop) or a rate (open; None: the trace's own arrivals)."""

    mode: str
    concurrency: int | None
    request_rate: float | None
    num_requests: int | None


class LoadConfig(StrictModel):
    """The ``load:`` section."""

    mode: Literal["closed", "open"] = "closed"
    concurrency: IntTuple | None = None
    num_requests: IntTuple | None = None
    request_rate: FloatTuple | None = None
    arrivals: Literal["poisson", "constant", "trace"] = "poisson"
    repeats: int = Field(default=3, ge=1, le=1000)
    cache_state: Literal["cold", "primed", "steady"] = "cold"
    ignore_eos: bool = True
    temperature: float = Field(default=0.0, ge=0)
    timeout_s: float = Field(default=120.0, gt=0, le=86400)
    prompts: Prompts
    slo: Slo | None = None

    @model_validator(mode="after")
    def _consistent(self) -> LoadConfig:
        _check_numbers("concurrency", self.concurrency, "1 user", 1)
        _check_numbers("num_requests", self.num_requests, "1 request", 1)
        _check_numbers("request_rate", self.request_rate, "more than 0 requests/s", None)
        if self.mode == "closed":
            self._check_closed()
        else:
            self._check_open()
        if self.num_requests is None and not isinstance(self.prompts, TracePrompts):
            raise ValueError("num_requests is missing; say how many requests one load sends, e.g. 48.")
        swept = self.swept_values()
        if self.num_requests is not None and len(self.num_requests) not in (1, len(swept)):
            raise ValueError(
                f"num_requests has {len(self.num_requests)} values for {len(swept)} loads {list(swept)}; "
                "give one number, or one for each."
            )
        for point in self.points():
            if point.concurrency and point.num_requests and point.num_requests < point.concurrency:
                raise ValueError(
                    f"num_requests {point.num_requests} never reaches concurrency {point.concurrency}; "
                    "send at least as many requests as there are users."
                )
        return self

    def _check_closed(self) -> None:
        if not self.concurrency:
            raise ValueError("mode closed needs concurrency, e.g. `concurrency: [3, 24]`.")
        if self.request_rate is not None:
            given = list(self.request_rate)
            raise ValueError(f"request_rate {given} has no meaning in mode closed; remove it or set mode: open.")
        if self.arrivals == "trace":
            raise ValueError("arrivals: trace has no meaning in mode closed; set mode: open.")

    def _check_open(self) -> None:
        if self.concurrency is not None:
            given = list(self.concurrency)
            raise ValueError(f"concurrency {given} has no meaning in mode open; remove it or set mode: closed.")
        if self.arrivals == "trace":
            if not isinstance(self.prompts, TracePrompts):
                raise ValueError(
                    f"arrivals: trace needs prompts of kind trace, not {self.prompts.kind}; use poisson or constant."
                )
            if self.request_rate is not None:
                given = list(self.request_rate)
                raise ValueError(f"request_rate {given} contradicts arrivals: trace; use prompts.rate_scale.")
        elif not self.request_rate:
            raise ValueError(f"arrivals: {self.arrivals} needs request_rate, e.g. `request_rate: [4]`.")

    def swept_values(self) -> tuple[int | float | None, ...]:
        """The swept load values: concurrencies, rates, or (None,) for a trace's own arrivals."""
        if self.mode == "closed":
            return self.concurrency or ()
        return self.request_rate if self.request_rate is not None else (None,)

    def points(self) -> list[LoadPoint]:
        """One LoadPoint for each swept value, in the order of the file."""
        values = self.swept_values()
        counts: tuple[int | None, ...] = self.num_requests or (None,)
        counts = counts * len(values) if len(counts) == 1 else counts
        closed = self.mode == "closed"
        return [
            LoadPoint(self.mode, v if closed else None, None if closed else v, n)  # type: ignore[arg-type]
            for v, n in zip(values, counts, strict=True)
        ]

    def num_requests_for(self, value: float | None) -> int | None:
        """Requests of the load with this concurrency or rate (None: as many as the trace slice has)."""
        for point in self.points():
            if value in (point.concurrency, point.request_rate):
                return point.num_requests
        raise ValueError(f"no load of {value}; this workload has {list(self.swept_values())}.")


def _check_numbers(name: str, values: tuple[float, ...] | None, least: str, minimum: int | None) -> None:
    if values is None:
        return
    if not values:
        raise ValueError(f"{name} is an empty list; give at least one value.")
    for value in values:
        if not math.isfinite(value) or (value < minimum if minimum is not None else value <= 0):
            raise ValueError(f"{name} {value} is too small; the least is {least}.")
    if name != "num_requests" and len(set(values)) != len(values):
        raise ValueError(f"{name} {list(values)} lists a value twice; remove one.")
