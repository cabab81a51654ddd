"""The FastAPI application: routes, the limit on bodies, start and stop of the engine."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from kvbench_engine.async_engine import EngineClient
from kvbench_engine.engine_loop import EngineUnavailable
from kvbench_engine.server.arguments import ServeOptions
from kvbench_engine.server.chat import chat_body, chat_completions, chat_ids
from kvbench_engine.server.completions import completions
from kvbench_engine.server.errors import CLIENT_LEFT, APIError, install_error_handlers, invalid
from kvbench_engine.server.generation import ServerState, in_thread_if_long
from kvbench_engine.server.metrics import ServerMetrics
from kvbench_engine.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse
from kvbench_engine.server.streaming import EventStream
from kvbench_engine.server.tokenizer import ServerTokenizer

MAX_BODY_BYTES = 32 * 2**20
BATCH_BYTES = 8 * 2**20  # bytes of a body beside the longest prompt; reading them takes a second at most
TOKEN_BYTES = 64  # most bytes of a token's text in JSON, with escapes
STOP_SECONDS = 2.0  # wait for a running step when the server stops

Endpoint = Callable[[ServerState, Request, bytes], Awaitable[Response]]


def create_app(engine: EngineClient, tokenizer: ServerTokenizer, options: ServeOptions) -> FastAPI:
    """Make the application for one engine, which its lifespan starts and stops."""
    name = options.served_model_name or engine.model_info.name
    aliases = frozenset() if options.served_model_name else frozenset({engine.config.model})
    metrics = ServerMetrics(engine.config, engine.capacity, engine.last_stats, engine.process_ids())
    parsers = options.reasoning_parser, options.tool_call_parser
    state = ServerState(engine, tokenizer, metrics, name, aliases, int(time.time()), *parsers)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        yield
        await engine.shutdown(STOP_SECONDS)

    app = FastAPI(title="kvbench engine", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.server = state
    install_error_handlers(app)
    _add_generation_routes(app, state)
    _add_tool_routes(app, state)
    _add_status_routes(app, state)
    app.openapi = functools.partial(_openapi, app.openapi, chat_body(state))
    return app


def _openapi(generate: Callable[[], dict[str, Any]], chat: type[ChatBody]) -> dict[str, Any]:
    """FastAPI's description with the models of the bodies, which it does not know."""
    document = generate()
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for model in (CompletionBody, chat, TokenizeBody, DetokenizeBody):
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= {**schema.pop("$defs", {}), model.__name__: schema}
    return document


def _post(
    app: FastAPI, state: ServerState, path: str, endpoint: Endpoint, body: Any = None, counted: bool = False
) -> None:
    """A POST route that hands the raw body to ``endpoint``; ``body`` is its model, for /openapi.json.

    ``counted``: the answers count in ``http_requests``.
    """

    async def handle(request: Request) -> Response:
        status: int | None = 500  # status of an unexpected error
        try:
            response = await endpoint(state, request, await read_body(request, body_limit(state.max_model_len)))
            status = None if isinstance(response, EventStream) else response.status_code
        except ClientDisconnect:
            state.metrics.failed("disconnect")
            status = CLIENT_LEFT
            return Response(status_code=CLIENT_LEFT)
        except APIError as error:
            status = error.status
            raise
        finally:
            if counted and status is not None:  # a stream counts itself when it ends
                state.metrics.answered(status)
        return response

    handle.__doc__ = (endpoint.__doc__ or "").strip()
    extra = None
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        extra = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    app.add_api_route(path, handle, methods=["POST"], openapi_extra=extra, name=path.strip("/").replace("/", "_"))


def body_limit(max_model_len: int) -> int:
    """The longest body in bytes. No other request is served while one is parsed."""
    return min(MAX_BODY_BYTES, BATCH_BYTES + TOKEN_BYTES * max_model_len)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. One that is too long is read to its end, since many clients read no answer before.

    Raises:
        APIError: 413 for more than ``limit`` bytes, as soon as more than ``MAX_BODY_BYTES`` are announced or have come.
    """
    announced = request.headers.get("content-length", "")
    size = int(announced) if announced.isdigit() and int(announced) > MAX_BODY_BYTES else 0
    body, stream = bytearray(), request.stream()
    while size <= MAX_BODY_BYTES and (part := await anext(stream, None)) is not None:
        size += len(part)
        body += part if size <= limit else b""
    if size > limit:
        raise _too_large(size, limit)
    return bytes(body)


def _too_large(size: int, limit: int) -> APIError:
    sentence = f"the body has {size} bytes or more and the limit is {limit}: send less at once"
    return APIError(413, sentence, code="body_too_large")


def _add_generation_routes(app: FastAPI, state: ServerState) -> None:
    _post(app, state, "/v1/completions", completions, CompletionBody, counted=True)
    _post(app, state, "/v1/chat/completions", chat_completions, chat_body(state), counted=True)


def _add_tool_routes(app: FastAPI, state: ServerState) -> None:
    async def tokenize(state: ServerState, request: Request, raw: bytes) -> Response:
        """The token ids of a prompt or of a conversation."""
        body = parse(TokenizeBody, raw)
        state.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("send either prompt or messages", "prompt", "invalid_value")
        if body.messages is not None:
            generate = body.add_generation_prompt is not False
            ids = await chat_ids(state.tokenizer, body.messages, generate, body.chat_template_kwargs)
        else:
            text, special = body.prompt or "", body.add_special_tokens is not False
            ids = await in_thread_if_long(len(text), state.tokenizer.encode, text, special)
        return JSONResponse({"count": len(ids), "max_model_len": state.max_model_len, "tokens": ids})

    async def detokenize(state: ServerState, request: Request, raw: bytes) -> Response:
        """The text of token ids; ids that the tokenizer does not know have none."""
        body = parse(DetokenizeBody, raw)
        state.check_model(body.model)
        count, limit = len(body.tokens), state.max_model_len
        if count > limit:
            sentence = f"there are {count} tokens and the limit is {limit} (max_model_len): send fewer in one request"
            raise invalid(sentence, "tokens", "context_length_exceeded")
        return JSONResponse({"prompt": await in_thread_if_long(count, state.tokenizer.decode, body.tokens, False)})

    async def reset_prefix_cache(state: ServerState, request: Request, raw: bytes) -> Response:
        """Forget all cached pages; 409 while requests own pages."""
        try:
            done = await state.engine.reset_prefix_cache()
        except EngineUnavailable as error:
            raise APIError(503, str(error), code="engine_unavailable") from None
        if not done:
            sentence = "requests are running, so the prefix cache was not reset: wait until they have ended"
            raise APIError(409, sentence, code="requests_running")
        return JSONResponse({"status": "ok"})

    _post(app, state, "/tokenize", tokenize, TokenizeBody)
    _post(app, state, "/detokenize", detokenize, DetokenizeBody)
    _post(app, state, "/reset_prefix_cache", reset_prefix_cache)


def _add_status_routes(app: FastAPI, state: ServerState) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Answer 200 while the engine works; 503 with the reason when it does not."""
        state.engine.ping()  # an idle one that hangs is told by the next call after the limit
        failure = state.engine.failure
        if failure is not None:
            return APIError(503, failure, code="engine_unhealthy").response()
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        stats = await state.engine.stats()
        return Response(state.metrics.exposition(stats), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model that is served."""
        return JSONResponse({"object": "list", "data": [model_card(state)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """The same by its name."""
        state.check_model(name)
        return JSONResponse(model_card(state))

    @app.get("/server_info")
    async def server_info() -> Response:
        """Everything that identifies this server: settings, model, capacity, versions."""
        return JSONResponse(describe_server(state))


def model_card(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.started,
        "owned_by": "kvbench",
        "max_model_len": state.max_model_len,
    }


def describe_server(state: ServerState) -> dict[str, Any]:
    """The JSON of /server_info."""
    return {
        **state.engine.describe(),
        "served_model_name": state.model_name,
        "tokenizer": {"name": state.tokenizer.name, "text_refusal": state.tokenizer.text_refusal},
        "reasoning_parser": state.reasoning_parser,
        "tool_call_parser": state.tool_call_parser,
        "started": state.started,
    }
