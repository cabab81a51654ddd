"""The keys of ``load:`` that say when requests arrive in open loop; names are those of ``vllm bench serve``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from kvbench.common.schema import StrictModel

Strategy = Literal["linear", "exponential"]


@dataclass(frozen=True)
class Segment:
    """``seconds`` (may be inf) during which the rate goes from ``start_rps`` to ``end_rps`` [requests/s].

    ``linear``: at a constant slope in time. ``exponential``: by a constant factor a second.
    """

    seconds: float
    start_rps: float
    end_rps: float
    strategy: Strategy = "linear"

    @property
    def constant(self) -> bool:
        """Whether the rate stays the same."""
        return self.start_rps == self.end_rps

    @property
    def mean_rps(self) -> float:
        """Mean rate over the segment."""
        if self.constant:
            return self.start_rps
        if self.strategy == "linear":
            return (self.start_rps + self.end_rps) / 2
        return (self.end_rps - self.start_rps) / math.log(self.end_rps / self.start_rps)

    @property
    def mass(self) -> float:
        """Expected arrivals over the segment: the integral of the rate."""
        return 0.0 if self.mean_rps == 0 else self.seconds * self.mean_rps

    def inverse(self, mass: np.ndarray) -> np.ndarray:
        """Seconds from the segment's start until ``mass`` arrivals [0, ``mass``] are due. float64 [n]"""
        if self.constant:
            return mass / self.start_rps
        if self.strategy == "linear":  # s t + a t^2 / 2 = mass, in the form that does not cancel for small a
            slope = (self.end_rps - self.start_rps) / self.seconds
            root = np.sqrt(np.maximum(self.start_rps**2 + 2 * slope * mass, 0.0))
            return np.divide(2 * mass, self.start_rps + root, out=np.zeros_like(mass), where=mass > 0)
        growth = math.log(self.end_rps / self.start_rps) / self.seconds
        return np.log1p(mass * growth / self.start_rps) / growth


def ramp(
    start_rps: float, end_rps: float, strategy: Strategy, *, seconds: float | None = None, count: int | None = None
) -> tuple[Segment, ...]:
    """A rate that changes over ``seconds``, or until ``count`` arrivals are expected, and then stays.

    The rate is a function of time. vLLM's ``--ramp-up-strategy`` of the same names makes it one of the request's
    number, so that its ``linear`` is exponential in time and its ``exponential`` steeper still.
    """
    unit = Segment(1.0, start_rps, end_rps, strategy)
    if seconds is None:
        assert count is not None
        seconds = count / unit.mean_rps
    return (Segment(seconds, start_rps, end_rps, strategy), Segment(math.inf, end_rps, end_rps))


Kind = Literal["poisson", "constant", "gamma", "ramp", "step", "trace"]
_RAMP_KEYS = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps", "ramp_up_s")
_OWNER = dict.fromkeys(_RAMP_KEYS, "ramp") | {"steps": "step", "spread_ticks": "trace"}
_RATE_INSTEAD = {"ramp": "ramp_up_start_rps and ramp_up_end_rps", "step": "steps", "trace": "prompts.rate_scale"}
_OPEN_ONLY = ("request_rate", "burstiness", "max_concurrency", "duration_s", *_OWNER)


def as_tuple(value: Any) -> Any:
    """A single value or a list becomes a tuple, so that YAML may give either."""
    if value is None or isinstance(value, tuple):
        return value
    return tuple(value) if isinstance(value, list) else (value,)


def _rates(value: Any) -> Any:
    """The word ``inf`` becomes the number, which JSON, and so a manifest, could not hold."""
    given = as_tuple(value)
    if not isinstance(given, tuple):
        return given
    if math.inf in given:
        raise ValueError("request_rate .inf is a number that a manifest cannot hold; write the word inf.")
    return tuple(math.inf if item == "inf" else item for item in given)


IntTuple = Annotated[tuple[int, ...], BeforeValidator(as_tuple)]
RateTuple = Annotated[tuple[float, ...], BeforeValidator(_rates)]


class Step(StrictModel):
    """``rate`` [requests/s] for ``seconds``; a rate of 0 is a pause."""

    rate: float = Field(ge=0, lt=math.inf)
    seconds: float = Field(gt=0, lt=math.inf)


class ArrivalFields(StrictModel):
    """When requests arrive.

    ``arrivals``: ``poisson``, ``constant`` and ``gamma`` (gaps of shape ``burstiness``) at ``request_rate``; ``ramp``:
    from ``ramp_up_start_rps`` to ``ramp_up_end_rps`` in ``ramp_up_s`` seconds (None: over the whole load), then on at
    the latter; ``step``: the ``steps`` one after the other; ``trace``: as recorded, where ``spread_ticks`` spreads what
    a coarse clock put onto one tick (``even``, ``uniform``; true: ``uniform``). Ramps and steps take ``burstiness``
    too. ``request_rate: inf``: all at once. ``duration_s``: as many requests as arrive in it, instead of num_requests.
    ``max_concurrency``: most requests in flight; the others wait in the client, and their ttft goes on.
    """

    request_rate: RateTuple | None = None
    arrivals: Kind = "poisson"
    burstiness: float | None = Field(default=None, gt=0, lt=math.inf)
    max_concurrency: int | None = Field(default=None, ge=1)
    duration_s: float | None = Field(default=None, gt=0, lt=math.inf)
    ramp_up_strategy: Strategy | None = None
    ramp_up_start_rps: float | None = Field(default=None, ge=0, lt=math.inf)
    ramp_up_end_rps: float | None = Field(default=None, gt=0, lt=math.inf)
    ramp_up_s: float | None = Field(default=None, gt=0, lt=math.inf)
    steps: list[Step] | None = Field(default=None, min_length=1)
    spread_ticks: bool | Literal["even", "uniform"] = False

    def check_closed_loop(self) -> None:
        """ValueError for a key that only open loop knows."""
        for name in _OPEN_ONLY:
            value = getattr(self, name)
            if value is not None and value is not False:
                given = list(value) if name == "request_rate" else value if name != "steps" else "..."
                raise ValueError(f"{name} {given} has no meaning in mode closed; remove it or set mode: open.")
        if self.arrivals not in ("poisson", "constant"):  # the default, and what files of old say
            raise ValueError(f"arrivals: {self.arrivals} has no meaning in mode closed; set mode: open.")

    def check_open_loop(self) -> None:
        """ValueError where the keys of open loop are too few or contradict one another."""
        kind = self.arrivals
        for name, owner in _OWNER.items():
            value = getattr(self, name)
            if value is not None and value is not False and kind != owner:
                raise ValueError(f"{name} has no meaning with arrivals: {kind}; remove it or set arrivals: {owner}.")
        if self.burstiness is not None and kind in ("poisson", "constant", "trace"):
            raise ValueError(
                f"burstiness {self.burstiness:g} has no meaning with arrivals: {kind}; set arrivals: gamma "
                "(1 is poisson, less is burstier, more is more regular)."
            )
        if kind in _RATE_INSTEAD:
            if self.request_rate is not None:
                given, instead = list(self.request_rate), _RATE_INSTEAD[kind]
                raise ValueError(f"request_rate {given} contradicts arrivals: {kind}; use {instead}.")
        elif not self.request_rate:
            raise ValueError(f"arrivals: {kind} needs request_rate, e.g. `request_rate: [4]`.")
        if self.burstiness is not None and self.request_rate and all(map(math.isinf, self.request_rate)):
            raise ValueError(
                f"burstiness {self.burstiness:g} has no meaning with request_rate inf, all at once; remove one."
            )
        if kind == "gamma" and self.burstiness is None:
            raise ValueError("arrivals: gamma needs burstiness, e.g. `burstiness: 0.5` (1 would be poisson).")
        self._check_ramp()
        self._check_end()

    def _check_ramp(self) -> None:
        if self.arrivals == "step" and self.steps is None:
            raise ValueError(
                "arrivals: step needs steps, e.g. `steps: [{rate: 2, seconds: 30}, {rate: 8, seconds: 9}]`."
            )
        if self.arrivals == "step" and not any(step.rate for step in self.steps or ()):
            raise ValueError("the rates of all steps are 0, so that nothing arrives; give one above 0.")
        if self.arrivals != "ramp":
            return
        for name in _RAMP_KEYS[:3]:
            if getattr(self, name) is None:
                raise ValueError(f"arrivals: ramp needs {name}; vllm bench serve has it as --{name.replace('_', '-')}.")
        if self.ramp_up_strategy == "exponential" and not self.ramp_up_start_rps:
            raise ValueError("an exponential ramp cannot start at ramp_up_start_rps 0; start above 0 or use linear.")
        if self.ramp_up_s is not None and self.duration_s is not None and self.ramp_up_s > self.duration_s:
            raise ValueError(
                f"ramp_up_s {self.ramp_up_s:g} is longer than duration_s {self.duration_s:g}: the ramp would never "
                "end; shorten it."
            )

    def _check_end(self) -> None:
        if self.duration_s is None:
            return
        if self.arrivals in ("step", "trace"):
            other = "the seconds of its steps" if self.arrivals == "step" else "prompts.duration_s"
            raise ValueError(f"duration_s {self.duration_s:g} contradicts arrivals: {self.arrivals}; use {other}.")
        if math.inf in (self.request_rate or ()):
            raise ValueError("request_rate inf sends all at once, so duration_s has no meaning; give num_requests.")

    @property
    def counted_by_time(self) -> bool:
        """Whether the arrivals' times say how many there are, and nobody else."""
        return self.duration_s is not None or self.arrivals == "step"

    @property
    def gap_shape(self) -> float:
        """Shape of the gaps' gamma distribution (inf: evenly spaced)."""
        return math.inf if self.arrivals == "constant" else self.burstiness or 1.0

    @property
    def tick_spread(self) -> Literal["even", "uniform"] | None:
        """How to spread a trace's ticks; None: not at all."""
        return ("uniform" if self.spread_ticks is True else self.spread_ticks) or None

    def profile(self, rate: float | None, count: int | None) -> tuple[Segment, ...]:
        """The rate over time of a load of ``rate``; ``count``: its requests, unless time says how many.

        Not for a trace, nor for rate inf.
        """
        if self.arrivals == "step":
            return tuple(Segment(step.seconds, step.rate, step.rate) for step in self.steps or ())
        if self.arrivals == "ramp":
            seconds = self.ramp_up_s or self.duration_s
            start, end = float(self.ramp_up_start_rps or 0.0), float(self.ramp_up_end_rps or 0.0)
            return ramp(start, end, self.ramp_up_strategy or "linear", seconds=seconds, count=count)
        assert rate is not None
        return (Segment(math.inf, rate, rate),)


Strategy = Literal["linear", "exponential"]
