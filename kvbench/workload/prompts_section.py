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


_MOST = 10_000_000  # requests of a load, tokens of a length: above it arrays would not fit into memory
_Count = Annotated[int, Field(ge=1, le=_MOST)]
Counts = Annotated[
    tuple[_Count, ...], BeforeValidator(as_tuple, json_schema_input_type=_Count | list[_Count]), Field(min_length=1)
]


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

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> Any:
        number = {"type": "integer" if cls.KIND is int else "number", "minimum": cls.LEAST}
        if math.isfinite(cls.MOST):
            number["maximum"] = cls.MOST
        forms = [number, {"type": "array", "items": number, "minItems": 2, "maxItems": 2}]
        if cls.OTHER:
            other = {"type": "number"} if cls.OTHER == "exponential" else {"type": "object"}
            forms.append({"type": "object", "properties": {cls.OTHER: other}, "required": [cls.OTHER]})
        return {"anyOf": forms, "title": cls.__name__}

    @model_serializer
    def _to_yaml(self) -> Any:
        if self.OTHER and (other := getattr(self, self.OTHER)) is not None:
            return {self.OTHER: other}
        return self.low if self.low == self.high else [self.low, self.high]


class Length(Range):
    """A token count."""

    WANTED = "a length; write a whole number from 1 on, [low, high] or {percentiles: {p50: .., max: ..}}, to 10000000"
    LEAST = 1
    MOST = _MOST
    OTHER = "percentiles"

    percentiles: dict[str, float] | None = None

    @field_validator("percentiles")
    @classmethod
    def _rising(cls, given: dict[str, float] | None) -> dict[str, float] | None:
        if given is not None:
            values = [given[name] for name in PERCENTILES if name in given]
            if set(given) - set(PERCENTILES) or not {"p50", "max"} <= set(given):
                raise ValueError(f"{given} needs p50 and max, and knows {', '.join(PERCENTILES)}; write those.")
            if values != sorted(values) or values[0] < 1 or not values[-1] <= _MOST:
                raise ValueError(f"{given} must be from 1 to {_MOST} and must not fall from min to max.")
        return given

    @property
    def maximum(self) -> int:
        """The largest token count this length can give, before any scaling."""
        return self.high if self.percentiles is None else math.ceil(self.percentiles["max"])


class Turns(Range):
    """The number of turns of a conversation."""

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
    """Conversations. The first turn is a prompt of the class; each later turn is the whole history and new tokens of
    the user."""

    num_sessions: Counts | None = None
    """conversations of a load, instead of `num_requests`; an open loop may have `duration_s` instead"""
    turns: Turns
    """turns of a conversation"""
    think_s: Think = Think.model_validate(0.0)
    """seconds from the end of an answer to the next turn"""
    user_tokens: Length | None = None
    """new tokens of each later turn. Left out: as many as the class's prompts have"""
    history: Literal["recorded", "actual"] = "recorded"
    """the answers in the history. recorded: drawn beforehand, so every byte sent is known before the run; actual: the
    server's own, which must return token ids"""


class SharedPrefix(StrictModel):
    """A prefix that prompts share. Its tokens come on top of the class's `prompt_tokens`."""

    tokens: _Count
    """length of the prefix"""
    share: float = Field(default=1.0, gt=0, le=1)
    """share of the prompts that begin with it"""
    families: _Count = 1
    """number of different prefixes, all used equally often"""


class PromptClass(StrictModel):
    """One kind of request. A single class needs neither name nor share."""

    name: str = Field(default="request", min_length=1)
    """the name in the report"""
    share: float = Field(default=1.0, gt=0, le=1)
    """share of the requests; all shares add up to 1"""
    prompt_tokens: Length
    """length of the prompt without the shared prefix"""
    output_tokens: Length
    """length of the output"""
    priority: int = Field(default=0, ge=0, le=2**63 - 1)  # what a server and a Parquet column hold
    """lower is more urgent. It is not sent to a server that is known to work first come, first served"""
    n: int = Field(default=1, ge=1)
    """answers to each prompt, drawn side by side (parallel sampling); needs a `temperature` above 0"""
    best_of: int | None = Field(default=None, ge=1)
    """draw so many answers, and return the `n` most probable ones, at the end"""
    beam_width: int | None = Field(default=None, ge=1)
    """search with so many beams, and return the `n` best, at the end; nothing is sampled"""

    @model_validator(mode="after")
    def _answers(self) -> PromptClass:
        if self.best_of is not None and self.beam_width is not None:
            raise ValueError(
                f"class {self.name!r} has best_of {self.best_of} and beam_width {self.beam_width}; a beam search keeps "
                "the best by itself, so remove best_of."
            )
        for name, width in (("best_of", self.best_of), ("beam_width", self.beam_width)):
            if width is not None and width < self.n:
                raise ValueError(
                    f"class {self.name!r} wants n {self.n} answers of {name} {width}; raise {name} or lower n."
                )
        return self

    @property
    def answers(self) -> dict[str, int | None]:
        """The number of answers drawn and returned, as the fields of a ``RequestSpec``."""
        return {"n": self.n, "best_of": self.best_of, "beam_width": self.beam_width}


def _positive(value: float | str) -> float | str:
    if value != "auto" and not (isinstance(value, int | float) and 0 < value < math.inf):
        raise ValueError(f"{value} must be above 0; write a number or `auto`.")
    return value


LengthScale = Annotated[float | Literal["auto"], AfterValidator(_positive)]


class SyntheticPrompts(StrictModel):
    """Random token ids, in classes of requests."""

    kind: Literal["synthetic"]
    """random tokens; prompts share nothing but `shared_prefix`"""
    classes: list[PromptClass] = Field(min_length=1)
    """the kinds of requests"""
    shared_prefix: Annotated[
        tuple[SharedPrefix, ...],
        BeforeValidator(
            lambda value: as_tuple(value) or (), json_schema_input_type=SharedPrefix | list[SharedPrefix] | None
        ),
    ] = ()
    """a shared prefix, or a list of prefixes that differ in length or share; a prompt gets one or none"""
    length_scale: LengthScale = 1.0
    """factor of all lengths; auto: the factor with which the longest request fits max_model_len"""

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
    """Lines of a text file through a tokenizer, cut to exact token counts."""

    kind: Literal["text"]
    """lines of a text file, in random order"""
    file: str
    """the text file"""
    tokenizer: str | None = None
    """folder of the tokenizer. Left out: the one that ships"""
    prompt_tokens: Length
    """length of the prompt without the shared lines"""
    output_tokens: Length
    """length of the output"""
    shared_prefix_lines: int = Field(default=0, ge=0)
    """number of first lines of the file that prompts begin with"""
    shared_prefix_share: float = Field(default=1.0, gt=0, le=1)
    """share of the prompts that begin with them"""
    send_text: bool = False
    """send texts in place of token ids"""


class TracePrompts(StrictModel):
    """A recorded trace: its lengths, its arrival times, and its contents if it has them.

    Prompts are the trace's texts or token ids. Without these they are random token ids, equal where page ids are equal.
    """

    kind: Literal["trace"]
    """a recorded trace, or a file of conversations"""
    path: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        BeforeValidator(as_tuple, json_schema_input_type=str | list[str]),
        Field(min_length=1),
    ]
    """a file, a list of files, or a pattern (`*.json`)"""
    format: str = "auto"
    """the trace's format; auto: found by the content. `kvbench trace describe --help` lists the formats"""
    page_size: int | None = Field(default=None, ge=1)
    """tokens a page of the page ids, if the file does not say"""
    tokenizer: str | None = None
    """folder of the tokenizer, for texts. Left out: the one that ships"""
    send_text: bool = False
    """send texts in place of token ids"""
    output_tokens: Length | None = None
    """length of the output of requests for which the trace has none"""
    sessions: bool | None = None
    """true: each turn of a conversation waits for the turn before it and the think time. Left out: true if the trace
    has think times or no times"""
    turns: Literal["all", "first"] = "all"
    """first: send only the first turn of each conversation"""
    start_s: float = Field(default=0.0, ge=0)
    """skip so many seconds of the trace"""
    duration_s: float | None = Field(default=None, gt=0)
    """play so many seconds of the trace"""
    rate_scale: float = Field(default=1.0, gt=0)
    """play the trace so many times as fast, think times included"""
    length_scale: LengthScale = "auto"
    """factor of all lengths; auto: the factor with which the longest request fits max_model_len. Pages shrink to whole
    tokens, so that as many are shared as in the trace. Texts are never cut: those that do not fit are left out"""
    max_requests: int | None = Field(default=None, ge=1)
    """send only so many requests, the first of the trace"""

    @field_validator("format")
    @classmethod
    def _known_format(cls, value: str) -> str:
        from kvbench.traces.read import check_format

        return check_format(value)


Prompts = Annotated[SyntheticPrompts | TextPrompts | TracePrompts, Field(discriminator="kind")]
