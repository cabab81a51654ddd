"""The HTTP request of one completion, made before the load starts so that sending costs one system call."""

from __future__ import annotations

import json
from typing import Any

from kvbench.common.secrets import api_key
from kvbench.load.client import Address
from kvbench.load.spec import LoadSpec
from kvbench.requests.request import RequestSpec


def http_request(spec: LoadSpec, address: Address, request: RequestSpec) -> bytes:
    """The whole request, head and body, in the dialect of the load's server.

    ValueError for a prompt that the server cannot be sent, or a key that is not where the spec says.
    """
    dialect = spec.dialect
    body: dict[str, Any] = {
        "model": spec.model,
        "prompt": _prompt(spec, request),
        "max_tokens": request.max_tokens,
        "temperature": spec.temperature,
        "stream": True,
    }
    if dialect.ignore_eos:
        body["ignore_eos"] = spec.ignore_eos
    if dialect.stream_options:
        body["stream_options"] = {"include_usage": True}
    if spec.return_token_ids and dialect.return_token_ids:
        body["return_token_ids"] = True
    if spec.send_priority and request.priority:  # 0 is what a server takes where nothing is said
        body["priority"] = request.priority
    payload = json.dumps(body | dialect.extra_body, separators=(",", ":")).encode()
    head = [
        f"POST {address.prefix}{dialect.endpoint} HTTP/1.1",
        f"Host: {address.authority}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
        "x-kvbench-stamp: 1",  # the built-in server then says when it sent each chunk; others ignore it
        *authorization(spec.api_key_env),
        f"Content-Length: {len(payload)}",
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + payload


def authorization(variable: str | None) -> list[str]:
    """The header with the key that the environment variable holds; none without a variable. ValueError."""
    return [] if variable is None else [f"Authorization: Bearer {api_key(variable)}"]


def _prompt(spec: LoadSpec, request: RequestSpec) -> str | list[int]:
    if request.prompt is not None:
        return request.prompt
    if not spec.dialect.token_id_prompts:
        raise ValueError(
            f"request {request.index} is a prompt of token ids, which this server does not take; give it text: prompts "
            "of kind text with send_text: true."
        )
    return list(request.prompt_token_ids or ())
