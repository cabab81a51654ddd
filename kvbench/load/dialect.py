"""What a server's completions API does differently from OpenAI's as vLLM and the built-in server speak it.

A quirk is declared for the server that has it (a preset, or LoadSpec), so that it weakens nobody else's definition
of success: a stream without ``[DONE]`` stays a failure where the server is known to send one.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from kvbench.common.schema import StrictModel

_OURS = ("model", "prompt", "max_tokens", "stream")
_FINISHED = ("length", "stop", "eos", "eos_token", "stop_sequence")


class Dialect(StrictModel):
    """The defaults are the API of vLLM and of the built-in server.

    ``done_marker``: streams end with ``data: [DONE]``. ``stream_options``: ``stream_options.include_usage`` is sent.
    ``usage``: the server reports usage (without it, output tokens are the streamed ids, else the chunks with
    content). ``token_id_prompts``: a prompt may be a list of token ids (else its text is sent). ``ignore_eos``: the
    field of that name is understood and sent. ``return_token_ids``: the field is understood and sent where the load
    asks for it. ``extra_body``: merged into each request's JSON. ``endpoint``: path of the completions.
    ``finish_reasons``: those of a stream that came to its end; any other (abort, error, timeout) is a failure.
    """

    done_marker: bool = True
    stream_options: bool = True
    usage: bool = True
    token_id_prompts: bool = True
    ignore_eos: bool = True
    return_token_ids: bool = True
    finish_reasons: list[str] = Field(default_factory=lambda: [*_FINISHED])
    extra_body: dict[str, Any] = Field(default_factory=dict)
    endpoint: str = "/v1/completions"

    @field_validator("endpoint")
    @classmethod
    def _path(cls, value: str) -> str:
        if not value.startswith("/"):
            raise ValueError(f"endpoint {value!r} is no path; write for example /v1/completions.")
        return value

    @field_validator("extra_body")
    @classmethod
    def _not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            if key in _OURS:
                raise ValueError(f"extra_body cannot set {key!r}: the load sets it; remove it.")
        return value


OPENAI = Dialect()
