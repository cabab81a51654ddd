"""The APIs through which a load can be sent: what a request says, and what the events of its stream mean.

A new API is one row of ``ENDPOINTS``: its path, how a prompt stands in a body, and a function that reads one event.
What a server takes and sends otherwise is its ``Dialect``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field

from kvbench.common.parsing import json_at
from kvbench.common.schema import StrictModel
from kvbench.common.server_errors import error_sentence
from kvbench.requests.request import ANSWERS, RequestSpec
from kvbench.workload.request_form import EndpointName, Fields, check_extra_body

TEXT, CALL, THOUGHT, ROLE = "", "call", "thought", "role"
_PARTS = {  # of a chat's delta beside its content
    "tool_calls": CALL, "function_call": CALL, "refusal": CALL,
    "reasoning_content": THOUGHT,  # DeepSeek, SGLang, llama.cpp, older vLLM
    "reasoning": THOUGHT,  # vLLM
    "reasoning_details": THOUGHT,  # OpenRouter
    "role": ROLE,
}  # fmt: skip
_RANKS = {CALL: 3, THOUGHT: 2, ROLE: 1, TEXT: 0}  # a role comes last: some servers repeat it in every chunk
_WORDS = ("text", "summary", "thinking", "name", "arguments", "function")  # of a thought or a call; not encrypted data
MOST_TOKENS = 1 << 31  # ids and counts are stored in 32 bits
_STRING, _IDS = (str, type(None)), (list, type(None))


class UnreadableEvent(Exception):
    """An event that contradicts its API; ``{}`` in the sentence stands for the event."""


class Usage(NamedTuple):
    """The tokens of a request by the server's usage; None: not told.

    ``cached``: of ``prompt``; ``reasoning``: of ``output``.
    """

    prompt: int | None = None
    output: int | None = None
    cached: int | None = None
    reasoning: int | None = None


class Chunk(NamedTuple):
    """A chunk of one sequence. ``read``, ``sent``: the piece that brought it, and the server's send stamp of it [s].

    ``counted``: the output tokens until then by its usage, None without. ``kind``: what it holds besides text, if
    anything: a call or refusal, a thought, a role. ``filled``: it shows that it brought a token; of the others only the
    usage may tell. ``ends``: it has the finish_reason.
    """

    sequence: int
    when: float
    read: int
    sent: float | None
    counted: int | None
    text: str
    ids: list[int] | None
    kind: str
    filled: bool
    ends: bool


class Stream:
    """Collects what the events of one stream say.

    ``reasons``: the finish reasons of each sequence; ``failure``: kind and sentence of the first one; ``kv_facts``: as
    in ``Completion``. Of the event that is read: ``when`` it came [s], which ``read`` brought it, the server's send
    stamp (``sent``) and the tokens ``counted`` by its usage.
    """

    def __init__(self, sequences: int) -> None:
        self.chunks: list[Chunk] = []
        self.reasons: list[list[str]] = [[] for _ in range(sequences)]
        self.usage = Usage()
        self.done = False
        self.failure: tuple[str, str] | None = None
        self.kv_facts: list[tuple[int, str]] = []
        self.when, self.read = 0.0, 0
        self.sent: float | None = None
        self.counted: int | None = None

    def chunk(
        self,
        sequence: int,
        text: str = "",
        ids: list[int] | None = None,
        kind: str = TEXT,
        filled: bool = False,
        reason: str | None = None,
    ) -> None:
        """Adds a chunk of the event that is read; ``reason``: its finish_reason. UnreadableEvent."""
        reasons = self.reasons
        if not (isinstance(sequence, int) and 0 <= sequence < len(reasons)):
            raise UnreadableEvent(f"a choice of {{}} has an index beyond the {len(reasons)} asked for")
        if reason:
            reasons[sequence].append(reason)
        ends = reason is not None
        self.chunks.append(
            Chunk(sequence, self.when, self.read, self.sent, self.counted, text, ids, kind, filled, ends)
        )

    def count(self, usage: Usage) -> None:
        """Takes counts of tokens, which replace earlier ones; None replaces nothing."""
        prompt, output, cached, reasoning = usage
        before = self.usage
        self.usage = Usage(
            before.prompt if prompt is None else prompt,
            before.output if output is None else output,
            before.cached if cached is None else cached,
            before.reasoning if reasoning is None else reasoning,
        )
        self.counted = output

    def fail(self, kind: str, message: str) -> None:
        """Notes a failure; the first one counts."""
        self.failure = self.failure or (kind, message)


@dataclass(frozen=True)
class Endpoint:
    """One API for text generation.

    ``prompt``: the fields of a body that hold a request's prompt; ``limit``: the name of ``max_tokens`` there.
    ``fields``: further fields of a request; ``headers``: header lines, ``{key}`` is the API key.
    ``read``: adds what an event's JSON says to a stream. ``answer``: the field that whole answers have.
    ``end_mark``: what ends a stream. ``least``: the smallest ``max_tokens`` that every server takes.
    ``lacks``: fields of a dialect that have these values with every server.
    """

    name: str
    path: str
    prompt: Callable[[RequestSpec], Fields]
    read: Callable[[Fields, Stream], None]
    answer: str
    limit: str = "max_tokens"
    end_mark: str = "[DONE]"
    least: int = 1
    fields: Fields = field(default_factory=dict)
    headers: tuple[str, ...] = ()
    lacks: Fields = field(default_factory=dict)

    def header_lines(self, key: str | None) -> list[str]:
        """The API's own header lines; those of the API key where there is one."""
        return [line.format(key=key) for line in self.headers if key or "{key}" not in line]


def _chat_prompt(request: RequestSpec) -> Fields:
    """The conversation before the prompt, user and assistant in turn, and the prompt as the user's last message."""
    texts = (*request.history, request.prompt or "")
    return {"messages": [{"role": ("user", "assistant")[number % 2], "content": x} for number, x in enumerate(texts)]}


def _responses_prompt(request: RequestSpec) -> Fields:
    if not request.history:
        return {"input": request.prompt or ""}
    return {"input": [{"type": "message", **message} for message in _chat_prompt(request)["messages"]]}


def read_choices(event: Fields, stream: Stream) -> None:
    """Reads an event of completions or of chat."""
    if usage := event.get("usage"):
        counts = _usage(usage, "prompt_tokens", "completion_tokens")
        if counts.reasoning is None:  # SGLang's place for it
            counts = counts._replace(reasoning=_tokens(usage, "reasoning_tokens"))
        stream.count(counts)
    if not (choices := event.get("choices")):
        return
    try:
        for choice in choices:
            text, delta = choice.get("text"), choice.get("delta") or {}
            if text is None:
                text = delta.get("content")
                if isinstance(text, list):  # Mistral's parts
                    thoughts = [part for part in text if part.get("type") == "thinking"]
                    text = "".join(part["text"] for part in text if part.get("type") == "text")
                    delta = {**delta, "reasoning_details": thoughts}
            ids, reason = choice.get("token_ids"), choice.get("finish_reason")
            if not (isinstance(text, _STRING) and isinstance(ids, _IDS) and isinstance(reason, _STRING)):
                raise UnreadableEvent("a choice of {} has a field of another type than the API's")
            if isinstance(choice.get("message"), dict):  # in place of a delta
                stream.fail("not_streamed", NOT_STREAMED)
            number = choice.get("index") or 0
            kind = _kind(delta) if delta else TEXT
            filled = bool(text or ids) or kind is CALL or kind is THOUGHT
            stream.chunk(number, text or "", ids, kind, filled, reason)
            if isinstance(facts := choice.get("kv_facts"), dict):
                stream.kv_facts.append((number, json.dumps(facts)))
    except (AttributeError, KeyError, TypeError, RecursionError):
        raise UnreadableEvent("{} has no readable choice") from None


NOT_STREAMED = "the whole answer came as one JSON object, though a stream was asked for"


def _kind(delta: Fields) -> str:
    """Names the part of a delta besides its content, the highest of ``_RANKS`` where it has several."""
    kind = TEXT
    for name, value in delta.items():
        part = _PARTS.get(name)
        if part is not None and _RANKS[part] > _RANKS[kind] and _has_words(value):
            kind = part
    return kind


def _has_words(value: Any) -> bool:
    """Tests whether a part of a delta holds text; servers send empty ones of every kind."""
    if isinstance(value, dict):
        value = [value[name] for name in _WORDS if name in value]
    return any(map(_has_words, value)) if isinstance(value, list) else isinstance(value, str) and value != ""


def _usage(usage: Any, prompt: str, output: str) -> Usage:
    """Reads OpenAI's usage, which names its counts so. UnreadableEvent for what is no whole number of tokens."""
    return Usage(
        _tokens(usage, prompt, needed=True),
        _tokens(usage, output, needed=True),
        _tokens(usage, f"{prompt}_details", "cached_tokens"),
        _tokens(usage, f"{output}_details", "reasoning_tokens"),
    )


def _tokens(usage: Any, *path: str, needed: bool = False) -> int | None:
    """A count of a usage; None: not told, which is right only where it is not ``needed``. UnreadableEvent."""
    if not isinstance(usage, dict):
        raise UnreadableEvent("the usage of {} is not an object")
    count = json_at(usage, *path)
    if (needed or count is not None) and not (type(count) is int and 0 <= count < MOST_TOKENS):
        shown = repr(str(count)[:40])
        raise UnreadableEvent(f"the usage of {{}} has {path[-1]} {shown}, which is no whole number of tokens")
    return count


# https://platform.openai.com/docs/api-reference/responses-streaming: the deltas of each kind of output.
_RESPONSE_DELTAS = {
    "response.output_text.delta": TEXT,
    "response.reasoning_text.delta": THOUGHT,
    "response.reasoning_summary_text.delta": THOUGHT,
    "response.refusal.delta": CALL,
    "response.function_call_arguments.delta": CALL,
    "response.custom_tool_call_input.delta": CALL,
    "response.mcp_call_arguments.delta": CALL,
    "response.code_interpreter_call_code.delta": CALL,
}
_RESPONSE_ENDS = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
_RESPONSE_REASONS = {"completed": "stop", "max_output_tokens": "length", "incomplete": "length"}


def read_responses(event: Fields, stream: Stream) -> None:
    """Reads an event of OpenAI's Responses, in which only deltas bring tokens."""
    name = str(event.get("type"))
    if (kind := _RESPONSE_DELTAS.get(name)) is not None:
        _add_delta(event.get("delta"), kind, stream)
    elif name == "response.output_item.added":
        if json_at(event, "item", "name"):  # of a call: its first token, or all of it (transformers serve)
            stream.chunk(0, kind=CALL, filled=True)
    elif name in _RESPONSE_ENDS:
        response = json_at(event, "response") or {}
        if usage := json_at(response, "usage"):
            stream.count(_usage(usage, "input_tokens", "output_tokens"))
        status = json_at(response, "status") or name.removeprefix("response.")
        if status == "failed":
            stream.fail("server_error", error_sentence(json.dumps(response).encode()) or "the response failed")
        reason = str(json_at(response, "incomplete_details", "reason") or status)
        stream.chunk(0, reason=_RESPONSE_REASONS.get(reason, reason))
        stream.done = True


# https://docs.claude.com/en/docs/build-with-claude/streaming
_MESSAGE_DELTAS = {  # by type: the field that holds it
    "text_delta": ("text", TEXT),
    "thinking_delta": ("thinking", THOUGHT),
    "input_json_delta": ("partial_json", CALL),
}
_MESSAGE_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


def read_messages(event: Fields, stream: Stream) -> None:
    """Reads an event of Anthropic's messages, in which only deltas of content blocks bring tokens."""
    name = str(event.get("type"))
    if name == "content_block_delta":
        delta = event.get("delta")
        if isinstance(delta, dict) and (row := _MESSAGE_DELTAS.get(str(delta.get("type")))):
            _add_delta(delta.get(row[0]), row[1], stream)
    elif name == "content_block_start":
        if json_at(event, "content_block", "name"):
            stream.chunk(0, kind=CALL, filled=True)
    elif name == "message_start":
        stream.count(_messages_usage(json_at(event, "message", "usage") or {}))
    elif name == "message_delta":
        stream.count(_messages_usage(event.get("usage") or {}))
        if reason := json_at(event, "delta", "stop_reason"):
            stream.chunk(0, reason=_MESSAGE_REASONS.get(str(reason), str(reason)))
    elif name == "message_stop":
        stream.done = True


def _messages_usage(usage: Any) -> Usage:
    """Returns the counts that there are; Anthropic's input tokens are those that the cache neither had nor got."""
    names = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    computed, output, cached, written = (_tokens(usage, name) for name in names)
    prompt = None if computed is None else computed + (cached or 0) + (written or 0)
    return Usage(prompt, output, cached, _tokens(usage, "output_tokens_details", "thinking_tokens"))


def _add_delta(text: Any, kind: str, stream: Stream) -> None:
    if not isinstance(text, str):
        raise UnreadableEvent("{} has no readable delta")
    stream.chunk(0, text if kind == TEXT else "", None, kind, text != "")


_ONLY_TEXTS = {"token_id_prompts": False}
_TYPED = {**_ONLY_TEXTS, "stream_options": False, "return_token_ids": False, "answers": []}
ENDPOINTS: Mapping[str, Endpoint] = {
    endpoint.name: endpoint
    for endpoint in (
        Endpoint(
            "completions", "/v1/completions",
            lambda request: {"prompt": request.prompt if request.prompt is not None else [*request.prompt_token_ids]},
            read_choices, "choices",
        ),
        Endpoint("chat", "/v1/chat/completions", _chat_prompt, read_choices, "choices", lacks=_ONLY_TEXTS),
        Endpoint(
            "responses", "/v1/responses", _responses_prompt, read_responses, "output",
            limit="max_output_tokens", end_mark="response.completed", least=16, fields={"store": False}, lacks=_TYPED,
        ),
        Endpoint(
            "messages", "/v1/messages", _chat_prompt, read_messages, "content", end_mark="message_stop",
            headers=("anthropic-version: 2023-06-01", "x-api-key: {key}"), lacks={**_TYPED, "ignore_eos": False},
        ),
    )
}  # fmt: skip
"""In the order in which a server is asked for them: OpenAI's three and Anthropic's."""
PATHS: Mapping[str, str] = {name: endpoint.path for name, endpoint in ENDPOINTS.items()}
_FINISHED = ("length", "stop", "eos", "eos_token", "stop_sequence", "tool_calls", "function_call")


class Dialect(StrictModel):
    """The things that a server's API takes and sends. The defaults are those of vLLM and of the built-in server.

    ``endpoint``: which of ``ENDPOINTS`` the load is sent to.
    ``done_marker``: streams end with the API's end mark. ``stream_options``: ``stream_options.include_usage`` is sent.
    ``usage``: the server reports usage (without it, output tokens are the streamed ids, else the chunks with
    content). ``token_id_prompts``: a prompt may be a list of token ids (else its text is sent). ``ignore_eos``: the
    field of that name is understood and sent. ``return_token_ids``: likewise. ``max_completion_tokens``: that field
    takes the place of ``max_tokens``. ``temperature``: the field is sent; ``api_fields``: likewise
    those of the endpoint. ``extra_body``: merged into each
    request's JSON.
    ``answers``: those of n, best_of and beam_width that a request may have. ``returns_all_beams``: n must be that
    width.
    ``keep_alive``: a connection may carry several requests; False for a server that closes it without saying so.
    ``finish_reasons``: those of a stream that came to its end; any other (abort, error, timeout) is a failure.
    """

    endpoint: EndpointName = "completions"
    done_marker: bool = True
    stream_options: bool = True
    usage: bool = True
    token_id_prompts: bool = True
    ignore_eos: bool = True
    return_token_ids: bool = True
    max_completion_tokens: bool = False
    temperature: bool = True
    api_fields: bool = True
    answers: list[str] = Field(default_factory=lambda: [*ANSWERS])
    returns_all_beams: bool = False
    keep_alive: bool = True
    finish_reasons: list[str] = Field(default_factory=lambda: [*_FINISHED])
    extra_body: Annotated[Fields, AfterValidator(check_extra_body)] = Field(default_factory=dict)

    @property
    def api(self) -> Endpoint:
        """The row of its endpoint."""
        return ENDPOINTS[self.endpoint]

    def at(self, endpoint: str) -> Dialect:
        """Returns the server's dialect at another endpoint, without what that does not have."""
        return self.model_copy(update={"endpoint": endpoint, **ENDPOINTS[endpoint].lacks})

    def refusal(self, answers: Mapping[str, int | None]) -> str | None:
        """Says why the server cannot be asked for ``answers`` (n, best_of and beam_width); None if it can."""
        wanted = {name: value for name, value in answers.items() if value and (value > 1 or name == "beam_width")}
        if unknown := [name for name in wanted if name not in self.answers]:
            return f"it has no {' and no '.join(unknown)}"
        beams = wanted.get("beam_width", 1)
        if self.returns_all_beams and beams > wanted.get("n", 1):
            return f"it returns all {beams} beams, so n must be {beams}"
        return None

    def body(self, model: str, request: RequestSpec, temperature: float) -> Fields:
        """The fields of a request, without those of a stream."""
        limit = "max_completion_tokens" if self.max_completion_tokens else self.api.limit
        fields = {"model": model, **self.api.prompt(request), limit: request.max_tokens}
        fields |= self.api.fields if self.api_fields else {}
        return fields | ({"temperature": temperature} if self.temperature else {}) | self.extra_body

    def streamed_body(self, model: str, request: RequestSpec, temperature: float, ignore_eos: bool) -> Fields:
        """The fields of a request whose answer is streamed."""
        fields = self.body(model, request, temperature) | {"stream": True, **_answers(request)}
        if self.ignore_eos:
            fields["ignore_eos"] = ignore_eos
        if self.stream_options:
            fields["stream_options"] = {"include_usage": True}
        if self.return_token_ids:
            fields["return_token_ids"] = True
        return fields | self.extra_body


OPENAI = Dialect()


def _answers(request: RequestSpec) -> Fields:
    """The fields of the sequences drawn and returned, in vLLM's names: ``best_of`` also counts the beams."""
    fields: Fields = {"n": request.n} if request.n > 1 else {}
    if request.beam_width is not None:
        fields |= {"use_beam_search": True, "temperature": 0.0}  # which samples nothing
    if request.width > request.n:
        fields["best_of"] = request.width
    return fields
