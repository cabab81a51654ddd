"""POST /v1/chat/completions: a conversation through the tokenizer's chat template."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvbench_engine.server.answer_parts import THINK, AnswerParts
from kvbench_engine.server.completions import choice_fields, collect, stream_response
from kvbench_engine.server.detokenizer import SilentDecoder, TextDecoder
from kvbench_engine.server.errors import CLIENT_LEFT, invalid, unsupported
from kvbench_engine.server.generation import Generation, ServerState, check_body, in_thread_if_long
from kvbench_engine.server.protocol import CHAT_BODIES, ChatBody, ChatMessage, ReasoningChatBody, ToolChatBody, parse
from kvbench_engine.server.tokenizer import ServerTokenizer


async def chat_completions(state: ServerState, request: Request, raw: bytes) -> Response:
    """Answer one chat request whose body is ``raw``."""
    body = parse(chat_body(state), raw)
    check_body(state, body, 1)
    generate = body.add_generation_prompt is not False
    prompt = await chat_ids(state.tokenizer, body.messages, generate, template_options(state, body))
    new_parts = splitter(state, body, prompt)
    generation = await Generation.start(state, body, [prompt], None, new_parts)
    head = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": state.model_name,
    }
    if body.stream:
        return stream_response(generation, body, request, head, chat=True)
    texts = await collect(generation, request)
    if texts is None:
        return Response(status_code=CLIENT_LEFT)
    choices = []
    for choice, (text, token_ids) in zip(generation.choices, texts, strict=True):
        answer = choice_fields(choice)
        answer["message"] = {"role": "assistant", "content": text}
        if new_parts is not None:
            delta = new_parts(SilentDecoder()).split(text, final=True)
            for call in delta.get("tool_calls", ()):
                del call["index"]  # which only streams have
            answer["message"] = {"role": "assistant", "content": None, **delta}
        if body.return_token_ids:
            answer["token_ids"] = token_ids
        choices.append(answer)
    return JSONResponse({**head, "choices": choices, "usage": generation.usage()})


def chat_body(state: ServerState) -> type[ChatBody]:
    """The fields of chats that this server has."""
    return CHAT_BODIES[state.reasoning_parser is not None, state.tool_call_parser is not None]


def template_options(state: ServerState, body: ChatBody) -> dict[str, Any]:
    """The options that the chat template gets beside the messages.

    Raises:
        APIError: 400 for tools that it does not read.
    """
    options = body.chat_template_kwargs or {}
    if not (isinstance(body, ToolChatBody) and body.tools):
        return options
    if "tools" not in state.tokenizer.chat_template:
        sentence = "the chat template reads no tools, so the model would not know of them: leave tools out"
        raise unsupported(f"{sentence}, or start the server with --tokenizer FOLDER of a template that does", "tools")
    return {**options, "tools": body.tools}


PROMPT_END = 16  # tokens, in which a tag and space behind it have room


def splitter(state: ServerState, body: ChatBody, prompt: Sequence[int]) -> Callable[[TextDecoder], AnswerParts] | None:
    """Chooses the function that makes the splitter of a choice's text; None where the text is not split."""
    tools = isinstance(body, ToolChatBody) and bool(body.tools) and body.tool_choice != "none"
    if isinstance(body, ReasoningChatBody):
        thinking = state.tokenizer.decode(prompt[-PROMPT_END:], False).rstrip().endswith(THINK)
        show = body.include_reasoning is not False
        return functools.partial(AnswerParts, reasoning=True, tools=tools, thinking=thinking, show_reasoning=show)
    return functools.partial(AnswerParts, reasoning=False, tools=True) if tools else None


# Arguments of apply_chat_template and of its callees that a client may not set.
RESERVED_OPTIONS = (
    "self", "messages", "conversation", "conversations", "tokenize", "add_generation_prompt", "chat_template",
    "continue_final_message", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip
MESSAGE_SIZE = 100  # characters that take as long as what a template does for a message


async def chat_ids(
    tokenizer: ServerTokenizer,
    messages: list[ChatMessage],
    add_generation_prompt: bool,
    template_options: dict[str, Any] | None = None,
) -> list[int]:
    """Ids of the conversation.

    Raises:
        APIError: 400 when the template refuses it or a part is not text, 422 for an unknown field of a message and
            when there is no tokenizer.
    """
    for message in messages:
        message.check_fields(tokenizer.chat_template)
    plain = [message.plain() for message in messages]
    options = template_options or {}
    for name in RESERVED_OPTIONS:
        if name in options:
            raise invalid(f"chat_template_kwargs cannot set {name}: leave it out", "chat_template_kwargs")
    size = sum(len(message["content"]) + MESSAGE_SIZE for message in plain)
    return await in_thread_if_long(size, tokenizer.encode_chat, plain, add_generation_prompt, options)
