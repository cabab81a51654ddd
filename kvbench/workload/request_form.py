"""The form of a load's requests: the API that they are sent to, and further fields."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

Fields = dict[str, Any]
"""Fields of a JSON object: a request's body, or an event of its answer."""
EndpointName = Literal["completions", "chat", "responses", "messages"]
"""OpenAI's three APIs and Anthropic's."""
_OURS = (
    "model", "prompt", "messages", "input", "max_tokens", "max_completion_tokens", "max_output_tokens", "stream",
    "stream_options", "temperature", "ignore_eos", "n", "best_of", "use_beam_search",
)  # fmt: skip


@dataclass(frozen=True)
class RequestForm:
    """The form that a load asks for. ``endpoint``: None: completions, or what the server has."""

    endpoint: EndpointName | None = None
    temperature: float = 0.0
    extra_body: Fields = field(default_factory=dict)


DEFAULT_FORM = RequestForm()


def check_extra_body(fields: Fields) -> Fields:
    """The further fields of a request's JSON. Raises ValueError for one that the load sets, or that JSON has not."""
    for name in fields:
        if name in _OURS:
            raise ValueError(f"extra_body cannot set {name!r}: the load sets it; remove it.")
    try:
        json.dumps(fields, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra_body has a value that JSON cannot hold ({error}); write it as a text.") from None
    return fields
