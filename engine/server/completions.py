"""POST /v1/completions: texts or token ids in, one choice for each prompt and each of ``n``."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvbench_engine.server.choices import Choice, EngineFailure
from kvbench_engine.server.errors import CLIENT_LEFT, invalid
from kvbench_engine.server.generation import (
    ClientGone,
    Generation,
    ServerState,
    check_body,
    error_of,
    in_thread_if_long,
)
from kvbench_engine.server.protocol import CompletionBody, GenerationBody, parse
from kvbench_engine.server.streaming import EventFormat, EventStream
from kvbench_engine.server.tokenizer import ServerTokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for completions


async def completions(state: ServerState, request: Request, raw: bytes) -> Response:
    """Answer one completion request whose body is ``raw``."""
    body = parse(CompletionBody, raw)
    if request.headers.get("x-kvbench-kv-facts") == "1":  # other servers ignore a header, and some refuse a field
        body.kvbench_kv_facts = True
    sent = sent_prompts(body)
    check_body(state, body, len(sent))
    size, special = sum(map(len, sent)), body.add_special_tokens is not False
    prompts = await in_thread_if_long(size, prompt_ids, state.tokenizer, sent, special)
    echoes = None
    if body.echo:
        echoes = await in_thread_if_long(size, _echoes, state.tokenizer, sent, body.choices_per_prompt)
    generation = await Generation.start(state, body, prompts, DEFAULT_MAX_TOKENS)
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": state.model_name,
    }
    if body.stream:
        return stream_response(generation, body, request, head, chat=False, echoes=echoes)
    texts = await collect(generation, request)
    if texts is None:
        return Response(status_code=CLIENT_LEFT)
    choices = []
    for choice, (text, token_ids) in zip(generation.choices, texts, strict=True):
        answer = choice_fields(choice)
        answer["text"] = (echoes[choice.index] if echoes else "") + text
        if body.return_token_ids:
            answer["token_ids"] = token_ids
            answer["prompt_token_ids"] = list(prompts[choice.index // body.choices_per_prompt])
        choices.append(answer)
    return JSONResponse({**head, "choices": choices, "usage": generation.usage()})


def sent_prompts(body: CompletionBody) -> list[str | list[int]]:
    """The texts or lists of ids, whichever of the four forms was sent. Raises APIError: 400 for no prompt at all."""
    prompt: Any = body.prompt
    if isinstance(prompt, list) and not prompt:
        raise invalid("the prompt is empty: send at least one token", "prompt", "empty_prompt")
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


def prompt_ids(tokenizer: ServerTokenizer, prompts: list[str | list[int]], add_special_tokens: bool) -> list[list[int]]:
    """One list of ids a prompt. Raises APIError: 422 for texts where there is no tokenizer, 400 for a too long one."""
    return [tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt for prompt in prompts]


def stream_response(
    generation: Generation,
    body: GenerationBody,
    request: Request,
    head: dict[str, Any],
    *,
    chat: bool,
    echoes: list[str] | None = None,
) -> EventStream:
    """Make the answer to ``stream: true``."""
    form = EventFormat(
        head,
        chat,
        split=generation.choices[0].parts is not None,
        token_ids=bool(body.return_token_ids),
        stamp=bool(body.kvbench_stamp) or request.headers.get("x-kvbench-stamp") == "1",
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
    )
    return EventStream(generation, form, body.include_usage, echoes)


async def collect(generation: Generation, request: Request) -> list[tuple[str, list[int]]] | None:
    """Text and ids of each choice once all have ended; None when the client went away.

    Raises:
        APIError: the engine failed.
    """
    texts: list[list[str]] = [[] for _ in generation.choices]
    ids: list[list[int]] = [[] for _ in generation.choices]
    pieces = generation.pieces(request.receive)
    try:
        async for piece in pieces:
            texts[piece.choice.index].append(piece.text)
            ids[piece.choice.index] += piece.token_ids
    except EngineFailure as failure:
        raise error_of(failure) from None
    except ClientGone:
        return None
    finally:
        await pieces.aclose()
        generation.close()
    return [("".join(text), tokens) for text, tokens in zip(texts, ids, strict=True)]


def choice_fields(choice: Choice) -> dict[str, Any]:
    """The fields that the choices of completions and of chats have in common."""
    return {
        "index": choice.index,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        **({} if choice.kv_facts is None else {"kv_facts": choice.kv_facts}),
    }


def _echoes(tokenizer: ServerTokenizer, prompts: list[str | list[int]], n: int) -> list[str]:
    """The prompt's text for each choice."""
    texts = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in prompts]
    return [text for text in texts for _ in range(n)]
