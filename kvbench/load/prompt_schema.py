"""The ``load.prompts`` section of a workload file: where prompts come from."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, field_validator

from kvbench.load.length import Length
from kvbench.load.strict import StrictModel

_MAX_PRIORITY = 2**63 - 1  # what a server and a Parquet column hold


class SharedPrefix(StrictModel):
    """A prefix put in front of ``share`` of the prompts (on top of the class's prompt_tokens)."""

    tokens: int = Field(ge=1)
    share: float = Field(default=1.0, gt=0, le=1)
    families: int = Field(default=1, ge=1)


class PromptClass(StrictModel):
    """One kind of request: its share of the mix and its lengths in tokens (without the shared prefix).

    ``priority``: lower is more urgent. A server that works first come, first served is not sent it; a running server
    that does not tell how it schedules is.
    """

    name: str = Field(min_length=1)
    share: float = Field(gt=0, le=1)
    prompt_tokens: Length
    output_tokens: Length
    priority: int = 0

    @field_validator("priority")
    @classmethod
    def _urgency(cls, value: int) -> int:
        if not 0 <= value <= _MAX_PRIORITY:
            raise ValueError(f"priority cannot be {value}; write 0 (the most urgent) to {_MAX_PRIORITY}.")
        return value


class SyntheticPrompts(StrictModel):
    """Random token ids in classes; ``length_scale: auto`` shrinks the lengths to fit max_model_len."""

    kind: Literal["synthetic"]
    shared_prefix: SharedPrefix | None = None
    classes: list[PromptClass] = Field(min_length=1)
    length_scale: float | Literal["auto"] = 1.0

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

    @field_validator("length_scale")
    @classmethod
    def _scale(cls, value: float | str) -> float | str:
        return _positive_scale(value)


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
    """Arrival times and lengths of a recorded trace; contents are random token ids."""

    kind: Literal["trace"]
    format: Literal["azure"] = "azure"
    path: str
    start_s: float = Field(default=0.0, ge=0)
    duration_s: float | None = Field(default=None, gt=0)
    rate_scale: float = Field(default=1.0, gt=0)
    length_scale: float | Literal["auto"] = "auto"
    max_requests: int | None = Field(default=None, ge=1)

    @field_validator("length_scale")
    @classmethod
    def _scale(cls, value: float | str) -> float | str:
        return _positive_scale(value)


def _positive_scale(value: float | str) -> float | str:
    if value != "auto" and not (isinstance(value, int | float) and 0 < value < math.inf):
        raise ValueError(f"length_scale {value} must be above 0; write a number or `auto`.")
    return value


Prompts = Annotated[SyntheticPrompts | TextPrompts | TracePrompts, Field(discriminator="kind")]
