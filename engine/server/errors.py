"""Refusals, in OpenAI's error shape: ``{"error": {"message", "type", "param", "code"}}``.

    400  malformed JSON, a value of the wrong type or out of its range, a prompt over the limit, an option that the
         engine does not have (code "unsupported")
    404  unknown model or path
    405  the path knows other methods
    413  a body over the limit
    422  a field that no engine has, and what this server cannot do: a text prompt where there is no tokenizer, a
         request that the KV budget could never hold
    429  the waiting queue is at its limit; ``Retry-After`` says when to try again
    500  the engine failed while it worked on the request
    503  the engine takes no requests: it has failed for good, or the server is stopping

The official ``openai`` client turns these into BadRequestError, NotFoundError, UnprocessableEntityError,
RateLimitError and InternalServerError by the status; 429 and 5xx it tries again by itself.
"""

from __future__ import annotations

import itertools
import json
import logging
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

if TYPE_CHECKING:  # the tokenizer needs the errors; where the engine has a process of its own, that needs no fastapi
    from fastapi import FastAPI, Request
    from pydantic import ValidationError

_log = logging.getLogger(__name__)
_FORMS = {  # fields of several types, where pydantic's message names only the first
    "prompt": "a text, a list of token ids, a list of texts or a list of lists of token ids",
    "stop": "a text or a list of texts",
    "content": "a text or a list of text parts",
    "early_stopping": 'true, false or "never"',
}
_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable"}
CLIENT_LEFT = 499  # nginx's status for a client that closed its connection; only counted
RETRY_AFTER_SECONDS = 1  # until the next request is admitted


class APIError(Exception):
    """An error response. ``param`` names the wrong field, ``code`` is for programs.

    ``counted``: the failure is already counted in /metrics.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, counted: bool = False
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.counted = counted

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        content = json.dumps(self.body()).encode()
        headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if self.status == 429 else None
        return Response(content, status_code=self.status, headers=headers, media_type="application/json")


def invalid(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """Make a 400: the request is wrong."""
    return APIError(400, message, param, code)


def unsupported(message: str, param: str) -> APIError:
    """Make a 400: the engine does not have what the field ``param`` asks for."""
    return invalid(message, param, "unsupported")


def unprocessable(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """Make a 422: the request is well-formed, but this server cannot do it."""
    return APIError(422, message, param, code)


def queue_full(message: str) -> APIError:
    """Make a 429: the same request may be accepted later."""
    return APIError(429, message, code="queue_full")


def shown(value: Any) -> str:
    """The beginning of a value in JSON, for a message: at most 80 characters, however large the value is."""
    value = value[:80] if isinstance(value, str) else value
    text = "".join(itertools.islice(json.JSONEncoder().iterencode(value), 80))
    return text if len(text) <= 80 else text[:77] + "..."


def from_validation(error: ValidationError) -> APIError:
    """Pydantic's first error as one sentence that names the field and the value; too long a list comes first."""
    errors = error.errors(include_url=False, include_input=False)  # which costs most where a list is long
    first = next((problem for problem in errors if problem["type"] == "too_long"), errors[0])
    path = [str(part) for part in first["loc"]]
    param = ".".join(path) or None
    if first["type"] == "missing":
        return invalid(f"{param} is missing: the request cannot do without it", param, "missing_field")
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "too_long":
        param = path[0]
        limit = first["ctx"]["max_length"]
        return invalid(f"{param} has more than {limit} items, the limit: send fewer in one request", param, "too_many")
    if first["type"] == "value_error":
        return invalid(reason, param, "invalid_value")
    for name in reversed(path):
        if name in _FORMS:
            param = ".".join(path[: path.index(name) + 1])
            return invalid(f"{param} is {_FORMS[name]}: this is none of them", param, "invalid_value")
    value = shown(error.errors(include_url=False)[0]["input"])
    return invalid(f"{param or 'the body'} cannot be {value}: {reason[:1].lower()}{reason[1:]}", param, "invalid_value")


def install_error_handlers(app: FastAPI) -> None:
    """Send every error, the router's too, in OpenAI's format; a bug is a 500 without traceback."""

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, APIError)
        if not error.counted:
            request.app.state.server.metrics.refused(error.status)
        return error.response()

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        method, path = request.method, request.url.path
        if error.status_code == 404:
            sentence = f"there is no {path}: GET /openapi.json lists what there is"
            return APIError(404, sentence, code="unknown_path").response()
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            refusal = APIError(405, f"{path} does not take {method}: use {allowed}", code="method_not_allowed")
            response = refusal.response()
            response.headers["allow"] = allowed
            return response
        return APIError(error.status_code, str(error.detail)).response()

    async def on_bug(request: Request, error: Exception) -> Response:
        return APIError(500, f"the server failed: {type(error).__name__}", code="internal_error").response()

    app.add_exception_handler(APIError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_bug)
