"""One HTTP request in the engine: its sequences, their text in order of arrival, their usage.

    prompts -> one engine request each, with n choices -> EngineClient.submit -> pieces -> JSON or a stream of events

If the client disconnects, even while it waits in the queue, the requests are aborted.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive

from kvbench_engine.async_engine import EngineClient, OutputStream
from kvbench_engine.engine_loop import Delivery, EngineUnavailable
from kvbench_engine.scheduling.beam import check_beam_search
from kvbench_engine.scheduling.scheduler import QueueFull
from kvbench_engine.sequence import Request, SamplingParams
from kvbench_engine.server.answer_parts import TAGS, AnswerParts
from kvbench_engine.server.choices import Choice, EngineFailure, Piece
from kvbench_engine.server.detokenizer import TextDecoder
from kvbench_engine.server.errors import APIError, invalid, queue_full, shown, unprocessable
from kvbench_engine.server.metrics import ServerMetrics
from kvbench_engine.server.protocol import GenerationBody
from kvbench_engine.server.tokenizer import ServerTokenizer

MAX_CHOICES = 1024  # prompts x n in one request
LONG_INPUT = 20_000  # characters or tokens; longer inputs would hold up the other streams
_Result = TypeVar("_Result")


class ClientGone(Exception):
    """The connection closed before the answer was complete."""


@dataclass(frozen=True)
class ServerState:
    """The state that the endpoints share. ``model_name``: the clients' name of the model; ``aliases``: other names for
    it.

    ``reasoning_parser``, ``tool_call_parser``: of chats; None: their answers are not split.
    """

    engine: EngineClient
    tokenizer: ServerTokenizer
    metrics: ServerMetrics
    model_name: str
    aliases: frozenset[str]
    started: int  # Unix seconds
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None

    @property
    def max_model_len(self) -> int:
        return self.engine.config.max_model_len or self.engine.model_info.max_model_len or 0

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self.model_name and model not in self.aliases:
            sentence = f"the model {shown(model)} does not exist: this server has {self.model_name!r}"
            raise APIError(404, sentence, "model", "model_not_found")


async def in_thread_if_long(size: int, function: Callable[..., _Result], *args: Any) -> _Result:
    """Calls ``function``, in a thread for a long input: tokenizers let the event loop go on meanwhile."""
    return function(*args) if size < LONG_INPUT else await asyncio.to_thread(function, *args)


class Generation:
    """The running choices of one HTTP request. The caller of ``start`` closes it."""

    def __init__(self, state: ServerState, requests: Sequence[Request], choices: Sequence[Choice]):
        """Take the choices in order: the n of the first request, then the n of the next."""
        self.state = state
        self.requests = requests
        self.choices = choices
        owners = [(request.request_id, index) for request in requests for index in range(request.params.n)]
        self._by_sequence = dict(zip(owners, choices, strict=True))
        self._stream: OutputStream | None = None

    @classmethod
    async def start(
        cls,
        state: ServerState,
        body: GenerationBody,
        prompts: Sequence[Sequence[int]],
        default_max_tokens: int | None,
        new_parts: Callable[[TextDecoder], AnswerParts] | None = None,
    ) -> Generation:
        """Submit everything that ``body`` asks for, after ``check_body``. ``new_parts`` makes the decoder of a choice.

        Raises:
            APIError: 400, 422, 429 or 503, and then nothing is left in the engine.
        """
        arrival = time.monotonic()
        skip_special = body.skip_special_tokens is not False and not (new_parts and state.tokenizer.hides(TAGS))
        requests: list[Request] = []
        choices: list[Choice] = []
        for prompt in prompts:
            params = sampling_params(state, body, prompt, default_max_tokens)
            request_id = uuid.uuid4().hex
            requests.append(
                Request(
                    request_id,
                    tuple(prompt),
                    params,
                    arrival,
                    body.priority or 0,
                    cache_salt=body.cache_salt,
                    kv_facts=bool(body.kvbench_kv_facts),
                )
            )
            for _ in range(params.n):
                decoder = state.tokenizer.decoder(skip_special, prompt)
                decoder = new_parts(decoder) if new_parts else decoder
                choices.append(Choice(len(choices), decoder, body.stops, params, arrival, state.metrics))
        generation = cls(state, requests, choices)
        try:
            generation._stream = await state.engine.submit(requests)
        except QueueFull as error:
            raise queue_full(str(error)) from None
        except ValueError as error:
            raise unprocessable(str(error), "prompt", "cannot_fit") from None
        except EngineUnavailable as error:
            raise APIError(503, str(error), code="engine_unavailable") from None
        return generation

    def send_at_once(self, ready: Callable[[], bool], send: Callable[[Piece], None]) -> None:
        """Give ``send`` the pieces that end nothing while ``ready``, instead of to the waiting reader of ``pieces``."""
        assert self._stream is not None
        if any(choice.has_stops for choice in self.choices):
            return  # any token may end one

        def take(delivery: Delivery) -> bool:
            if not ready():
                return False
            send(self._by_sequence[delivery.output.request_id, delivery.output.index].advance(delivery))
            return True

        self._stream.take = take

    async def pieces(self, receive: Receive) -> AsyncIterator[Piece]:
        """One piece for each output of the engine that was not sent at once. Aborts what is left when it is closed.

        Raises:
            ClientGone: the connection closed.
            EngineFailure: a request failed in the engine; the others are aborted.
        """
        stream = self._stream
        assert stream is not None
        watch = asyncio.create_task(_until_gone(receive))
        watch.add_done_callback(lambda _: stream.interrupt(ClientGone()))
        kind = "disconnect"
        try:
            while not stream.done:
                for delivery in await stream.get():
                    output = delivery.output
                    choice = self._by_sequence[output.request_id, output.index]
                    if choice.finish_reason is not None:
                        continue  # stopped by its text while this token was computed
                    piece = choice.advance(delivery)
                    if piece.finish_reason is not None:
                        stream.stop(output.request_id, output.index)
                    yield piece
        except EngineFailure as failure:
            kind = "shutdown" if failure.shutdown else "engine_error"
            raise
        finally:
            watch.cancel()
            stream.close()
            unfinished = sum(choice.finish_reason in (None, "abort", "error") for choice in self.choices)
            self.state.metrics.failed(kind, unfinished)

    def close(self) -> None:
        """Abort what has not ended."""
        if self._stream is not None:
            self._stream.close()

    def usage(self) -> dict[str, Any]:
        """Tokens of the request so far, in OpenAI's format. A prompt counts once, whatever the number of choices.

        As with OpenAI, all candidates of ``best_of`` count. Of a beam search the returned beams count.
        """
        prompt_tokens = sum(len(request.prompt_token_ids) for request in self.requests)
        completion_tokens = sum(choice.num_tokens + choice.num_discarded for choice in self.choices)
        firsts = (self._by_sequence[request.request_id, 0] for request in self.requests)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached for choice in firsts)},
        }
        if self.state.reasoning_parser is not None and (parts := [c.parts for c in self.choices if c.parts]):
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(part.reasoning_tokens for part in parts)}
        return usage


def sampling_params(
    state: ServerState, body: GenerationBody, prompt: Sequence[int], default_max_tokens: int | None
) -> SamplingParams:
    """The engine's parameters for one prompt. ``default_max_tokens`` None: up to ``max_model_len``.

    Raises:
        APIError: 400 with the numbers.
    """
    check_prompt(state, prompt)
    limit = state.max_model_len
    left = limit - len(prompt)
    wanted = body.token_limit
    if wanted is not None and wanted > left:
        raise invalid(
            f"the prompt has {len(prompt)} tokens and max_tokens is {wanted}, together {len(prompt) + wanted}, over "
            f"the limit of {limit} tokens (max_model_len): lower max_tokens to at most {left} or shorten the prompt",
            "max_tokens",
            "context_length_exceeded",
        )
    max_tokens = wanted or min(left, default_max_tokens or left)
    n, beams = body.choices_per_prompt, bool(body.use_beam_search)
    length_penalty = 1.0 if body.length_penalty is None else float(body.length_penalty)
    default_temperature = 0.0 if beams else 1.0
    try:
        if beams:
            check_beam_search(body.width, max_tokens, length_penalty)
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=default_temperature if body.temperature is None else float(body.temperature),
            top_k=max(0, body.top_k or 0),
            top_p=1.0 if body.top_p is None else float(body.top_p),
            seed=body.seed,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            n=n,
            best_of=None if beams or body.width == n else body.width,
            beam_width=body.width if beams else None,
            length_penalty=length_penalty,
            early_stopping=body.early_stopping or False,
        )
    except ValueError as error:
        raise invalid(str(error), code="invalid_value") from None


def check_body(state: ServerState, body: GenerationBody, num_prompts: int) -> None:
    """Check all that needs no token of the prompts, before they are encoded. Raises APIError: 400, 404 or 422."""
    state.check_model(body.model)
    if body.stops and state.tokenizer.backend is None:
        raise unprocessable(
            "stop strings need a tokenizer and there is none: use stop_token_ids", "stop", "no_tokenizer"
        )
    check_width(state, body, num_prompts)
    check_priority(state, body)


def check_width(state: ServerState, body: GenerationBody, num_prompts: int) -> None:
    """Check that the sequences of one prompt fit into one step, and the prompts into the queue.

    Raises:
        APIError: 422 with the numbers.
    """
    config, n = state.engine.config, body.choices_per_prompt
    limit, vocab = config.max_num_seqs, state.engine.model_info.vocab_size
    if body.width > limit:
        name, value = ("best_of", body.best_of) if body.best_of is not None else ("n", n)
        raise unprocessable(
            f"{name} {value} is more sequences than the server runs side by side ({limit}): lower {name} to at most "
            f"{limit}, or start the server with a larger --max-num-seqs",
            name,
            "too_many_sequences",
        )
    if body.use_beam_search and body.width > vocab:
        sentence = f"{body.width} beams cannot begin with different tokens of a vocabulary of {vocab}: ask for fewer"
        raise unprocessable(sentence, "n", "too_many_sequences")
    if config.max_num_waiting is not None and num_prompts > config.max_num_waiting + config.max_num_seqs:
        raise unprocessable(
            f"{num_prompts} prompts are more than the {config.max_num_seqs} that run at once (max_num_seqs) and the "
            f"{config.max_num_waiting} that may wait (max_num_waiting): send fewer in one request",
            "prompt",
            "too_many_prompts",
        )
    if num_prompts * n > MAX_CHOICES:
        raise unprocessable(
            f"{num_prompts} prompts with n {n} are over the limit of {MAX_CHOICES} choices: send fewer in one request",
            "prompt",
            "too_many_choices",
        )


def check_priority(state: ServerState, body: GenerationBody) -> None:
    priority = body.priority or 0
    if priority < 0:
        sentence = f"priority cannot be {priority}: it is 0 (first) or more"
        raise unprocessable(sentence, "priority", "invalid_value")
    if priority and state.engine.config.scheduling_policy != "priority":
        raise unprocessable(
            f"priority {priority} would be ignored, because this server works first come, first served: leave priority "
            "out, or start the server with --scheduling-policy priority",
            "priority",
            "unsupported",
        )


def check_prompt(state: ServerState, prompt: Sequence[int]) -> None:
    limit, vocab = state.max_model_len, state.engine.model_info.vocab_size
    if not prompt:
        raise invalid("the prompt is empty: send at least one token", "prompt", "empty_prompt")
    if len(prompt) >= limit:
        raise invalid(
            f"the prompt has {len(prompt)} tokens and the limit is {limit} tokens of prompt and output together "
            f"(max_model_len): send at most {limit - 1}",
            "prompt",
            "context_length_exceeded",
        )
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab:
        bad = low if low < 0 else high
        raise invalid(
            f"token id {bad} is not in the vocabulary of model {state.model_name!r}: ids run from 0 to {vocab - 1}",
            "prompt",
            "invalid_token_id",
        )


def error_of(failure: EngineFailure) -> APIError:
    """Make a 503 if the server is stopping, else a 500."""
    if failure.shutdown:
        return APIError(503, str(failure), code="shutting_down", counted=True)
    return APIError(500, str(failure), code="engine_error", counted=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
