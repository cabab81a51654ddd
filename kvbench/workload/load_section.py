"""The ``load:`` section of a workload file; names are those of ``vllm bench serve`` where it has the same thing.

An unknown key or a value of the wrong type is refused with a sentence that names the value, the limit and the way out
(``common.schema.explain``). How keys depend on one another: ``_ONLY_WITH``, ``_NEEDED``, ``LoadConfig._mistakes``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_serializer, model_validator

from kvbench.common.schema import StrictModel
from kvbench.workload.prompts_section import Counts, Prompts, Sessions, SyntheticPrompts, TracePrompts, as_tuple
from kvbench.workload.request_form import EndpointName, Fields, RequestForm, check_extra_body
from kvbench.workload.settings import slug

# A key that means something only beside certain values of another key: key -> (the other key, those values).
_OPEN, _RAMP = ("mode", ("open",)), ("arrivals", ("ramp",))
_ONLY_WITH: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "concurrency": (("mode", ("closed",)),),
    "request_rate": (_OPEN, ("arrivals", ("poisson", "constant", "gamma"))),
    "burstiness": (_OPEN, ("arrivals", ("gamma", "ramp", "step"))),
    "max_concurrency": (_OPEN,),
    "duration_s": (_OPEN, ("arrivals", ("poisson", "constant", "gamma", "ramp"))),
    "ramp_up_strategy": (_OPEN, _RAMP),
    "ramp_up_start_rps": (_OPEN, _RAMP),
    "ramp_up_end_rps": (_OPEN, _RAMP),
    "ramp_up_s": (_OPEN, _RAMP),
    "steps": (_OPEN, ("arrivals", ("step",))),
    "spread_ticks": (_OPEN, ("arrivals", ("trace",))),
}
_INSTEAD = {  # (key, value of the other key) -> what to use there
    ("concurrency", "open"): "a cap on the requests in flight is max_concurrency",
    ("request_rate", "ramp"): "the rates are ramp_up_start_rps and ramp_up_end_rps",
    ("request_rate", "step"): "the rates are those of steps",
    ("request_rate", "trace"): "a trace is played faster with prompts.rate_scale",
    ("burstiness", "poisson"): "set arrivals: gamma (1 is poisson, less is burstier, more is more regular)",
    ("duration_s", "step"): "the end is that of the seconds of its steps",
    ("duration_s", "trace"): "the end is that of prompts.duration_s",
}
# The keys that a mode, or in open loop a kind of arrivals, needs, each with an example.
_NEEDED = {
    "closed": {"concurrency": "[3, 24]"},
    "poisson": {"request_rate": "[4]"},
    "constant": {"request_rate": "[4]"},
    "gamma": {"request_rate": "[4]", "burstiness": "0.5"},
    "ramp": {"ramp_up_strategy": "linear", "ramp_up_start_rps": "1", "ramp_up_end_rps": "8"},
    "step": {"steps": "[{rate: 2, seconds: 30}, {rate: 8, seconds: 9}]"},
    "trace": {},
}


def _rates(value: Any) -> Any:
    """The word ``inf`` becomes the number, which JSON, and so a manifest, could not hold."""
    given = as_tuple(value)
    if math.inf in given:
        raise ValueError("request_rate .inf is a number that a manifest cannot hold; write the word inf.")
    return tuple(math.inf if item == "inf" else item for item in given)


_Rate = float | Literal["inf"]
Rates = Annotated[
    tuple[Annotated[float, Field(gt=0)], ...],
    BeforeValidator(_rates, json_schema_input_type=_Rate | list[_Rate]),
    Field(min_length=1),
]
TimeOut = Annotated[float, Field(gt=0, le=86400)]


@dataclass(frozen=True)
class LoadPoint:
    """One load: ``concurrency`` users (closed) or ``request_rate`` requests/s (open; None: set by ``arrivals``)."""

    load_id: str
    mode: str
    concurrency: int | None
    request_rate: float | None
    num_requests: int | None
    arrivals: str = "poisson"


def load_point(
    mode: str, *, concurrency: int | None, rate: float | None, num_requests: int | None, arrivals: str = "poisson"
) -> LoadPoint:
    """The load point with its id: ``c24`` for 24 users, ``r4`` for 4 requests/s, else the kind of its arrivals.

    Arrivals without a single rate: ``trace``, ``ramp``, ``step``.
    """
    own = "trace" if arrivals == "poisson" else arrivals
    open_id = own if rate is None else f"r{slug(f'{rate:g}')}"
    load_id = f"c{concurrency}" if mode == "closed" else open_id
    return LoadPoint(load_id, mode, concurrency, rate, num_requests, arrivals)


class Slo(StrictModel):
    """Limits for goodput: a request counts if it meets them all."""

    ttft_ms: float | None = Field(default=None, gt=0)
    """time to first token"""
    ttfo_ms: float | None = Field(default=None, gt=0)
    """time to first output (text or a tool call); a request that only reasons misses this limit"""
    tpot_ms: float | None = Field(default=None, gt=0)
    """time per output token"""
    itl_ms: float | None = Field(default=None, gt=0)
    """the longest gap between two chunks of a request"""
    e2el_ms: float | None = Field(default=None, gt=0)
    """from a request's start to its last chunk"""

    @model_validator(mode="after")
    def _some(self) -> Slo:
        if all(getattr(self, name) is None for name in type(self).model_fields):
            raise ValueError(f"slo is empty; give at least one of {', '.join(type(self).model_fields)}.")
        return self


class Step(StrictModel):
    """One step of `arrivals: step`."""

    rate: float = Field(ge=0, lt=math.inf)
    """requests/s; 0: a pause"""
    seconds: float = Field(gt=0, lt=math.inf)
    """length of the step [s]"""


class Canaries(StrictModel):
    """Requests whose right answers are known, mixed into the load: a wrong answer fails the cell."""

    share: float = Field(gt=0, le=0.5)
    """share of canaries in all requests that are sent. The load's own requests stay as they are; canaries come between
    them"""
    file: str | None = None
    """a file that `kvbench dev canaries` wrote, or the name of a set in workloads/canaries. Left out: the set that has
    the served model's name"""


class LoadConfig(StrictModel):
    """The load that is sent: users or requests a second, prompts, repeats."""

    mode: Literal["closed", "open"] = "closed"
    """closed: each user waits for an answer before sending the next request; open: requests arrive at set times,
    however slow the server is"""
    concurrency: Counts | None = None
    """closed: number of users; a list makes one load for each number"""
    request_rate: Rates | None = None
    """open: requests/s (with `sessions`: conversations/s); a list makes one load for each rate; inf: all at once"""
    num_requests: Counts | None = None
    """requests of a load: one number for all loads, or a list with one for each"""
    prompts: Prompts
    """where prompts come from"""
    endpoint: EndpointName | None = None
    """the API: OpenAI's completions, chat (/v1/chat/completions) or responses, or Anthropic's messages. Left out:
    completions, or the first of the four that a running server has. All but completions take texts, to which the
    server's chat template adds tokens"""
    extra_body: Annotated[Fields, AfterValidator(check_extra_body)] = Field(default_factory=dict)
    """further fields of each request, e.g. {reasoning_effort: low} or {chat_template_kwargs: {enable_thinking:
    false}}"""
    repeats: int = Field(default=3, ge=1, le=1000)
    """measurements of each cell, each on a fresh server; a verdict needs 3"""
    cache_state: Literal["cold", "primed", "steady"] = "cold"
    """the prefix cache before a load. cold: emptied; primed: emptied, then each shared prefix is sent once; steady: as
    the load before left it (the default on a running server whose cache cannot be emptied)"""
    ignore_eos: bool = True
    """true: outputs have exactly the length of `output_tokens`"""
    temperature: float = Field(default=0.0, ge=0)
    """sampling temperature; 0: greedy"""
    slo: Slo | None = None
    """limits for goodput"""
    sessions: Sessions | None = None
    """conversations of several turns (prompts of kind synthetic)"""
    canaries: Canaries | None = None
    """requests whose right answers are known, such as {share: 0.1}"""
    arrivals: Literal["poisson", "constant", "gamma", "ramp", "step", "trace"] = "poisson"
    """open: when requests arrive. poisson, constant, gamma: at `request_rate`; ramp: from `ramp_up_start_rps` to
    `ramp_up_end_rps`; step: the `steps` one after another; trace: at the recorded times"""
    burstiness: float | None = Field(default=None, gt=0, lt=math.inf)
    """shape of gamma-distributed gaps (gamma, ramp, step): 1 is Poisson, less is burstier, more is more regular"""
    max_concurrency: int | None = Field(default=None, ge=1)
    """open: most requests in flight. The others wait in the client, and this wait is part of their TTFT"""
    duration_s: float | None = Field(default=None, gt=0, lt=math.inf)
    """open, instead of `num_requests`: requests arrive for so many seconds"""
    ramp_up_strategy: Literal["linear", "exponential"] | None = None
    """growth of the rate of a ramp"""
    ramp_up_start_rps: float | None = Field(default=None, ge=0, lt=math.inf)
    """the rate at which a ramp begins"""
    ramp_up_end_rps: float | None = Field(default=None, gt=0, lt=math.inf)
    """the rate at which a ramp ends"""
    ramp_up_s: float | None = Field(default=None, gt=0, lt=math.inf)
    """seconds of the ramp; then the last rate stays. Left out: the whole load"""
    steps: list[Step] | None = Field(default=None, min_length=1)
    """the steps of `arrivals: step`, each with a rate and its seconds"""
    spread_ticks: bool | Literal["even", "uniform"] = False
    """spread the arrivals of a trace that share a tick of its coarse clock; true means uniform"""
    processes: int = Field(default=1, ge=1, le=1000)
    """load processes on this machine that share each load"""
    timeout_s: TimeOut = 120.0
    """time-out of a request [s]"""
    connect_timeout_s: TimeOut = 5.0
    """time-out of name lookup, TCP and TLS together [s]"""
    first_byte_timeout_s: TimeOut | None = None
    """time-out from the send to the first byte [s]. Left out: `timeout_s`"""
    idle_timeout_s: TimeOut | None = None
    """time-out between two bytes [s]. Left out: `timeout_s`"""

    @field_serializer("request_rate", when_used="json")
    def _finite(self, rates: tuple[float, ...] | None) -> list[float | str] | None:
        return None if rates is None else ["inf" if rate == math.inf else rate for rate in rates]

    @model_validator(mode="after")
    def _consistent(self) -> LoadConfig:
        if (mistake := next(self._mistakes(), None)) is not None:
            raise ValueError(mistake)
        return self

    def _mistakes(self) -> Iterator[str]:
        """A sentence for each thing that contradicts another, is missing or makes no load."""
        if self.endpoint not in (None, "completions") and self.canaries is not None:
            yield (
                f"canaries need the completions API, and endpoint {self.endpoint} has a chat template that changes the "
                "prompts; remove canaries, or endpoint."
            )
        if self.mode == "closed" and self.arrivals not in ("poisson", "constant"):  # older files have one of these
            yield f"arrivals: {self.arrivals} has no meaning with mode: closed; set mode: open."
        for key, conditions in _ONLY_WITH.items():
            given = getattr(self, key)
            for other, fitting in conditions if given not in (None, False) else ():
                if (value := getattr(self, other)) not in fitting:
                    shown = list(given) if isinstance(given, tuple) else "..." if key == "steps" else given
                    instead = _INSTEAD.get((key, value))
                    way_out = f" ({instead})" if instead else f", or set {other}: {' or '.join(fitting)}"
                    yield f"{key} {shown} has no meaning with {other}: {value}; remove it{way_out}."
        kind = "closed" if self.mode == "closed" else self.arrivals
        for key, example in _NEEDED[kind].items():
            if getattr(self, key) is None:
                what = "mode" if kind == "closed" else "arrivals"
                yield f"{what}: {kind} needs {key}; write for example `{key}: {example}`."
        for key in ("concurrency", "request_rate"):
            values = getattr(self, key) or ()
            if len(set(values)) != len(values):
                yield f"{key} {list(values)} lists a value twice; remove one."
        yield from self._mistakes_of_arrivals()
        yield from self._mistakes_of_counts()
        yield from self._mistakes_of_answers()

    def _mistakes_of_arrivals(self) -> Iterator[str]:
        if self.arrivals == "trace" and not isinstance(self.prompts, TracePrompts):
            yield f"arrivals: trace needs prompts of kind trace, not {self.prompts.kind}; use poisson or constant."
        if self.request_rate is not None and math.inf in self.request_rate:
            if self.duration_s is not None:
                yield "request_rate inf sends all at once, so duration_s has no meaning; give num_requests."
            if self.burstiness is not None and set(self.request_rate) == {math.inf}:
                yield f"burstiness {self.burstiness:g} has no meaning with request_rate inf, all at once; remove one."
        if self.steps is not None and not any(step.rate for step in self.steps):
            yield "the rates of all steps are 0, so that nothing arrives; give one above 0."
        if self.ramp_up_strategy == "exponential" and not self.ramp_up_start_rps:
            yield "an exponential ramp cannot start at ramp_up_start_rps 0; start above 0 or use linear."
        if self.ramp_up_s is not None and self.duration_s is not None and self.ramp_up_s > self.duration_s:
            yield (
                f"ramp_up_s {self.ramp_up_s:g} is longer than duration_s {self.duration_s:g}: the ramp would never "
                "end; shorten it."
            )

    def _mistakes_of_counts(self) -> Iterator[str]:
        """Checks that the number of requests or sessions is said once, for each load."""
        name, counts = "num_requests", self.num_requests
        if self.sessions is not None:
            if not isinstance(self.prompts, SyntheticPrompts):
                yield (
                    f"sessions are made of prompts of kind synthetic, not {self.prompts.kind}; change the kind or "
                    "remove sessions."
                )
            if counts is not None:
                yield (
                    f"num_requests {list(counts)} contradicts sessions, which end with their own last turn; give "
                    "sessions.num_sessions."
                )
            name, counts = "sessions.num_sessions", self.sessions.num_sessions
        if counts is not None and self.counted_by_time:
            other = "duration_s" if self.duration_s is not None else "the seconds of the steps"
            yield f"{name} {list(counts)} contradicts {other}, which say how many there are; remove one."
        if counts is None and not self.counted_by_time and not isinstance(self.prompts, TracePrompts):
            yield f"{name} is missing; say how many one load sends, e.g. 48."
        swept = self.swept_values()
        if counts is not None and len(counts) not in (1, len(swept)):
            yield f"{name} has {len(counts)} values for {len(swept)} loads {list(swept)}; give one, or one for each."
        for users, count in zip(self.concurrency or (), self._counts(), strict=False):
            if count is not None and count < users:
                yield f"{name} {count} never reaches concurrency {users}; send at least as many as there are users."

    def _mistakes_of_answers(self) -> Iterator[str]:
        """Several answers to a prompt must differ, and a conversation can go on from one only."""
        for item in self.prompts.classes if isinstance(self.prompts, SyntheticPrompts) else ():
            drawn = 1 if item.beam_width is not None else item.best_of or item.n
            if drawn > 1 and self.temperature == 0:
                yield (
                    f"class {item.name!r} draws {drawn} answers to a prompt, which are all the same at temperature 0; "
                    "set temperature: 1.0, or beam_width for a beam search."
                )
            if item.n > 1 and self.sessions is not None:
                yield (
                    f"class {item.name!r} has n {item.n} answers to each turn, and a conversation goes on from one; "
                    "remove n, or sessions."
                )

    @property
    def form(self) -> RequestForm:
        """The form of its requests."""
        return RequestForm(self.endpoint, self.temperature, self.extra_body)

    @property
    def counted_by_time(self) -> bool:
        """Tests whether only the arrivals' times say how many there are."""
        return self.duration_s is not None or self.arrivals == "step"

    def _counts(self) -> tuple[int | None, ...]:
        """Requests, or sessions where there are such, of each load."""
        given = self.sessions.num_sessions if self.sessions is not None else self.num_requests
        counts: tuple[int | None, ...] = given or (None,)
        return counts * len(self.swept_values()) if len(counts) == 1 else counts

    def swept_values(self) -> tuple[int | float | None, ...]:
        """The swept load values: concurrencies, rates, or (None,) where the arrivals have no one rate."""
        return self.concurrency or self.request_rate or (None,)

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
        return dict(zip(self.swept_values(), self._counts(), strict=True))[value]
