"""``load.prompts`` and ``load.sessions`` of a workload file: where prompts come from, and how long they are."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_serializer, model_validator

from kvbench.common.schema import StrictModel

PERCENTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}


def as_tuple(value: Any) -> Any:
    """A tuple of a list or a single value: YAML may have either."""
    if value is None or isinstance(value, tuple):
        return value
    return tuple(value) if isinstance(value, list) else (value,)


Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(as_tuple), Field(min_length=1)]


class Range(StrictModel):
    """A number in YAML, or ``[low, high]`` (uniform), or a mapping with the key ``OTHER`` for another distribution."""

    WANTED: ClassVar[str]
    LEAST: ClassVar[float]
    MOST: ClassVar[float] = math.inf
    KIND: ClassVar[Any] = int
    OTHER: ClassVar[str] = ""

    low: Any = None
    high: Any = None

    @model_validator(mode="before")
    @classmethod
    def _from_yaml(cls, data: Any) -> Any:
        if isinstance(data, Range) or (isinstance(data, dict) and len(data) == 1 and data.get(cls.OTHER) is not None):
            return data
        pair = data if isinstance(data, list | tuple) else (data, data)
        numbers = len(pair) == 2 and all(isinstance(x, cls.KIND) and not isinstance(x, bool) for x in pair)
        if not numbers or not cls.LEAST <= pair[0] <= pair[1] <= cls.MOST or pair[1] == math.inf:
            raise ValueError(f"{data!r} is not {cls.WANTED}.")
        return {"low": pair[0], "high": pair[1]}

    @model_serializer
    def _to_yaml(self) -> Any:
        if self.OTHER and (other := getattr(self, self.OTHER)) is not None:
            return {self.OTHER: other}
        return self.low if self.low == self.high else [self.low, self.high]


class Length(Range):
    """A token count."""

    WANTED = "a length; write a whole number from 1 on, [low, high] or {percentiles: {p50: .., max: ..}}"
    LEAST = 1
    OTHER = "percentiles"

    percentiles: dict[str, float] | None = None

    @field_validator("percentiles")
    @classmethod
    def _rising(cls, given: dict[str, float] | None) -> dict[str, float] | None:
        if given is not None:
            values = [given[name] for name in PERCENTILES if name in given]
            if set(given) - set(PERCENTILES) or not {"p50", "max"} <= set(given):
                raise ValueError(f"{given} needs p50 and max, and knows {', '.join(PERCENTILES)}; write those.")
            if values != sorted(values) or values[0] < 1:
                raise ValueError(f"{given} must be at least 1 and must not fall from min to max.")
        return given

    @property
    def maximum(self) -> int:
        """The largest token count this length can give, before any scaling."""
        return self.high if self.percentiles is None else math.ceil(self.percentiles["max"])


class Turns(Range):
    """How many turns a conversation has."""

    WANTED = "a number of turns; write a whole number from 1 to 1000, or [low, high] with low before high"
    LEAST = 1
    MOST = 1000


class Think(Range):
    """Seconds between an answer and the next turn."""

    WANTED = "a think time; write seconds >= 0, [low, high] or {exponential: mean}"
    LEAST = 0
    KIND = int | float
    OTHER = "exponential"

    exponential: float | None = Field(default=None, ge=0, lt=math.inf)


def fit_scale(longest_total: int, max_model_len: int) -> float:
    """The factor (at most 1) by which lengths shrink so that the longest prompt + output fits max_model_len."""
    return min(1.0, max_model_len / longest_total)


def scale_lengths(lengths: np.ndarray, scale: float) -> np.ndarray:
    """Token counts times ``scale``, rounded down, at least 1. int64 [n]"""
    return np.maximum(1, np.floor(lengths * scale + 1e-9)).astype(np.int64)


class Sessions(StrictModel):
    """Conversations: turn 1 is a prompt of the class, each later turn the whole history and ``user_tokens`` new tokens.

    ``num_sessions``: conversations of one load, instead of num_requests (one number, or one for each load); open loop
    may have ``duration_s`` instead. ``think_s``: from the end of an answer to the next turn. ``user_tokens``: None: as
    long as the class's prompts. ``history``: its answers are ``recorded`` (drawn beforehand, so that every byte sent is
    known before the run) or ``actual`` (the server's own; it must return token ids).
    """

    num_sessions: Counts | None = None
    turns: Turns
    think_s: Think = Think.model_validate(0.0)
    user_tokens: Length | None = None
    history: Literal["recorded", "actual"] = "recorded"


class SharedPrefix(StrictModel):
    """``share`` of the prompts begin with one of ``families`` different prefixes, each used equally often.

    Its ``tokens`` come on top of the class's prompt_tokens.
    """

    tokens: int = Field(ge=1)
    share: float = Field(default=1.0, gt=0, le=1)
    families: int = Field(default=1, ge=1)


class PromptClass(StrictModel):
    """One kind of request: its share of the mix and its lengths in tokens (without the shared prefix).

    ``priority``: lower is more urgent. It is not sent to a server that is known to work first come, first served.
    """

    name: str = Field(default="request", min_length=1)
    share: float = Field(default=1.0, gt=0, le=1)
    prompt_tokens: Length
    output_tokens: Length
    priority: int = Field(default=0, ge=0, le=2**63 - 1)  # what a server and a Parquet column hold


def _positive(value: float | str) -> float | str:
    if value != "auto" and not (isinstance(value, int | float) and 0 < value < math.inf):
        raise ValueError(f"{value} must be above 0; write a number or `auto`.")
    return value


LengthScale = Annotated[float | Literal["auto"], AfterValidator(_positive)]


class SyntheticPrompts(StrictModel):
    """Random token ids in classes; ``length_scale: auto`` shrinks the lengths to fit max_model_len.

    ``shared_prefix``: one, or a list where prefixes differ in length or share; a prompt gets one or none.
    """

    kind: Literal["synthetic"]
    shared_prefix: Annotated[tuple[SharedPrefix, ...], BeforeValidator(lambda value: as_tuple(value) or ())] = ()
    classes: list[PromptClass] = Field(min_length=1)
    length_scale: LengthScale = 1.0

    @field_validator("classes")
    @classmethod
    def _shares(cls, classes: list[PromptClass]) -> list[PromptClass]:
        total = sum(c.share for c in classes)
        if abs(total - 1.0) > 1e-6:
            raise ValueError(f"the shares of the classes add up to {total:g}; they must add up to 1.")
        names = [c.name for c in classes]
        if len(set(names)) != len(names):
            raise ValueError(f"class names {names} are not all different; rename one.")
        return classes

    @field_validator("shared_prefix")
    @classmethod
    def _prefix_shares(cls, prefixes: tuple[SharedPrefix, ...]) -> tuple[SharedPrefix, ...]:
        if (total := sum(item.share for item in prefixes)) > 1 + 1e-9:
            raise ValueError(f"the shares of {len(prefixes)} shared prefixes add up to {total:g}; the most is 1.")
        return prefixes


class TextPrompts(StrictModel):
    """Lines of a text file through a tokenizer (None: the shipped one), cut to exact token counts."""

    kind: Literal["text"]
    file: str
    tokenizer: str | None = None
    prompt_tokens: Length
    output_tokens: Length
    shared_prefix_lines: int = Field(default=0, ge=0)
    shared_prefix_share: float = Field(default=1.0, gt=0, le=1)
    send_text: bool = False


class TracePrompts(StrictModel):
    """A recorded trace: its lengths, its arrival times, and its contents as far as it has them.

    Prompts are the trace's texts or token ids; without these, random token ids, which are equal where page ids are.
    ``path``: a file, several, or a pattern (``*.json``). ``page_size``: of the page ids, if the file does not tell.
    ``tokenizer``: for texts (None: the shipped one). ``send_text``: texts are sent as texts. ``output_tokens``: for
    requests whose output the trace does not tell. ``sessions``: each turn of a conversation waits for the one before it
    and its think time (None: if the trace has think times or no times); otherwise every request starts at its own time.
    ``turns: first``: only the first turn of each session. ``rate_scale``: how fast time passes, think times included.

    ``length_scale``: shrinks all lengths by one factor; ``auto``: so that the longest request fits max_model_len. With
    page ids the page shrinks to a whole number of tokens, so that as many pages are shared as in the trace. Texts are
    never cut: those that do not fit are left out.
    """

    kind: Literal["trace"]
    format: str = "auto"
    path: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(as_tuple), Field(min_length=1)]
    page_size: int | None = Field(default=None, ge=1)
    tokenizer: str | None = None
    send_text: bool = False
    output_tokens: Length | None = None
    sessions: bool | None = None
    turns: Literal["all", "first"] = "all"
    start_s: float = Field(default=0.0, ge=0)
    duration_s: float | None = Field(default=None, gt=0)
    rate_scale: float = Field(default=1.0, gt=0)
    length_scale: LengthScale = "auto"
    max_requests: int | None = Field(default=None, ge=1)

    @field_validator("format")
    @classmethod
    def _known_format(cls, value: str) -> str:
        from kvbench.traces.read import check_format

        return check_format(value)


Prompts = Annotated[SyntheticPrompts | TextPrompts | TracePrompts, Field(discriminator="kind")]
