"""``load.sessions``: conversations of several turns made of synthetic prompts."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer, model_validator

from kvbench.common.schema import StrictModel
from kvbench.workload.arrivals_section import IntTuple
from kvbench.workload.length import Length

_MOST_TURNS = 1000


class Turns(StrictModel):
    """How many turns a conversation has: a whole number, or ``[low, high]`` (uniform)."""

    low: int
    high: int

    @model_validator(mode="before")
    @classmethod
    def _from_yaml(cls, data: Any) -> Any:
        if isinstance(data, dict | Turns):
            return data
        pair = data if isinstance(data, list | tuple) else [data, data]
        if len(pair) != 2 or not all(isinstance(x, int) and not isinstance(x, bool) for x in pair):
            raise ValueError(f"{data!r} is no number of turns; write a whole number or [low, high].")
        if not 1 <= pair[0] <= pair[1] <= _MOST_TURNS:
            raise ValueError(f"turns {data} must lie within 1 and {_MOST_TURNS}, low before high; write e.g. [2, 6].")
        return {"low": pair[0], "high": pair[1]}

    @model_serializer
    def _to_yaml(self) -> Any:
        return self.low if self.low == self.high else [self.low, self.high]


class Think(StrictModel):
    """Seconds between an answer and the next turn: a number, ``[low, high]`` (uniform), ``{exponential: mean}``."""

    low: float = 0.0
    high: float = 0.0
    exponential: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_yaml(cls, data: Any) -> Any:
        if isinstance(data, Think):
            return data
        if isinstance(data, dict):
            mean = data.get("exponential")
            if set(data) != {"exponential"} or not _seconds(mean):
                raise ValueError(f"{data} is no think time; write seconds, [low, high] or {{exponential: mean}}.")
            return {"exponential": float(mean)}
        pair = data if isinstance(data, list | tuple) else [data, data]
        if len(pair) != 2 or not all(_seconds(x) for x in pair) or pair[0] > pair[1]:
            raise ValueError(f"{data!r} is no think time; write seconds >= 0, [low, high] or {{exponential: mean}}.")
        return {"low": float(pair[0]), "high": float(pair[1])}

    @model_serializer
    def _to_yaml(self) -> Any:
        if self.exponential is not None:
            return {"exponential": self.exponential}
        return self.low if self.low == self.high else [self.low, self.high]


def _seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


class Sessions(StrictModel):
    """Conversations: turn 1 is a prompt of the class, each later one the whole history and ``user_tokens`` new ones.

    ``num_sessions``: how many one load holds, instead of num_requests (one number, or one for each load); open loop
    may give ``duration_s`` instead. ``think_s``: from an answer's end to the next turn. ``user_tokens``: None: as long
    as the class's prompts. ``history``: ``recorded`` puts answers drawn beforehand into it, so that every byte sent is
    known before the run, ``actual`` the server's own, for which it must return token ids.
    """

    num_sessions: IntTuple | None = None
    turns: Turns
    think_s: Annotated[Think, Field(default_factory=lambda: Think.model_validate(0.0))]
    user_tokens: Length | None = None
    history: Literal["recorded", "actual"] = "recorded"
