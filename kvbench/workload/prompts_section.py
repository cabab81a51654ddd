"""The ``load.prompts`` section of a workload file: where prompts come from."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from kvbench.common.schema import StrictModel
from kvbench.workload.length import Length

_MAX_PRIORITY = 2**63 - 1  # what a server and a Parquet column hold


class SharedPrefix(StrictModel):
    """Prefixes put in front of ``share`` of the prompts (on top of the class's prompt_tokens).

    ``families``: how many different ones of that length there are; they are used equally often.
    """

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
    """Random token ids in classes; ``length_scale: auto`` shrinks the lengths to fit max_model_len.

    ``shared_prefix``: one, or a list where prefixes differ in length or share; a prompt gets one or none.
    """

    kind: Literal["synthetic"]
    shared_prefix: SharedPrefix | list[SharedPrefix] | None = None
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

    @field_validator("shared_prefix", mode="before")
    @classmethod
    def _one_kind(cls, value: Any) -> Any:
        """Validated here, so that a mistake is told once and not for each way to write it."""
        return [SharedPrefix.model_validate(item) for item in value] if isinstance(value, list) else value

    @field_validator("shared_prefix")
    @classmethod
    def _prefix_shares(
        cls, value: SharedPrefix | list[SharedPrefix] | None
    ) -> SharedPrefix | list[SharedPrefix] | None:
        if isinstance(value, list) and (not value or sum(item.share for item in value) > 1 + 1e-9):
            total = sum(item.share for item in value)
            raise ValueError(
                f"the shares of {len(value)} shared prefixes add up to {total:g}; give some, at most 1 in all."
            )
        return value

    @field_validator("length_scale")
    @classmethod
    def _scale(cls, value: float | str) -> float | str:
        return _positive_scale(value)

    @property
    def shared_prefixes(self) -> tuple[SharedPrefix, ...]:
        """All of them; empty without any."""
        if self.shared_prefix is None:
            return ()
        return tuple(self.shared_prefix) if isinstance(self.shared_prefix, list) else (self.shared_prefix,)

    @property
    def longest_prefix(self) -> int:
        """Tokens of the longest shared prefix; 0 without any."""
        return max((item.tokens for item in self.shared_prefixes), default=0)


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
    """A recorded trace: its lengths, its arrival times, and what it knows of the contents.

    Prompts are the trace's texts or token ids; else random token ids that share the pages whose page ids are the same;
    else random token ids. ``path``: a file, several, or a pattern (``*.json``). ``page_size``: of the page ids, where
    the file leaves a choice. ``tokenizer``: for texts (None: the shipped one). ``send_text``: texts are sent as such.
    ``output_tokens``: for requests whose output the trace does not tell. ``sessions``: the turns of a conversation
    follow one another, each its think time after the one before (None: if the trace tells think times, or has no
    times); otherwise every request starts when the trace says. ``turns: first`` keeps the first of each session.
    ``rate_scale``: how fast the trace's time passes, think times included.

    ``length_scale`` shrinks all lengths by one factor, ``auto`` so that the longest request fits max_model_len. Page
    ids: the page shrinks, to a whole number of tokens, so that as many pages are shared as in the trace. Texts are
    never cut: those that do not fit are left out.
    """

    kind: Literal["trace"]
    format: str = "auto"
    path: str | list[str]
    page_size: int | None = Field(default=None, ge=1)
    tokenizer: str | None = None
    send_text: bool = False
    output_tokens: Length | None = None
    sessions: bool | None = None
    turns: Literal["all", "first"] = "all"
    start_s: float = Field(default=0.0, ge=0)
    duration_s: float | None = Field(default=None, gt=0)
    rate_scale: float = Field(default=1.0, gt=0)
    length_scale: float | Literal["auto"] = "auto"
    max_requests: int | None = Field(default=None, ge=1)

    @field_validator("format")
    @classmethod
    def _known_format(cls, value: str) -> str:
        from kvbench.traces.read import FORMATS

        if value not in ("auto", *FORMATS):
            raise ValueError(f"{value!r} is not a format of traces; write auto or one of {', '.join(FORMATS)}.")
        return value

    @field_validator("path")
    @classmethod
    def _some_path(cls, value: str | list[str]) -> str | list[str]:
        if not value:
            raise ValueError("path is empty; name the trace's file.")
        return value

    @field_validator("length_scale")
    @classmethod
    def _scale(cls, value: float | str) -> float | str:
        return _positive_scale(value)


def _positive_scale(value: float | str) -> float | str:
    if value != "auto" and not (isinstance(value, int | float) and 0 < value < math.inf):
        raise ValueError(f"length_scale {value} must be above 0; write a number or `auto`.")
    return value


Prompts = Annotated[SyntheticPrompts | TextPrompts | TracePrompts, Field(discriminator="kind")]
