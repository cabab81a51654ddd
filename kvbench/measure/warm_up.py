"""Warm-up requests before the first measured load.

First a few of the load's shape. Then as many short ones at once as the load has in flight, streamed as the load's are:
a server may compile or capture something for each number of requests in a step.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from kvbench.common.errors import MeasurementError, RefusedError
from kvbench.common.text import plural
from kvbench.measure.server import MeasuredServer
from kvbench.measure.single_request import complete, send_single
from kvbench.requests.request import RequestSpec
from kvbench.runs.results import WarmUpResult
from kvbench.targets.base import Target
from kvbench.workload.design import LoadPoint

WARM_UP_REQUESTS = 4
_TOKENS = 16
_SHORT_PROMPT = 32  # tokens, or letters of a text
_STEPS_A_SIZE = 2
_OPEN_IN_FLIGHT = 64  # in open loop, where neither workload nor server has a limit
_MOST_IN_FLIGHT = 512  # each has a thread
_MARGIN_S = 30.0
_LOOK_S = 1.0  # between looks at the health of a server that has not answered
_UNHEALTHY_LOOKS = 2
_SILENT_S = 30.0  # a busy engine may hold the interpreter for one long step
_FIRST_WORD = "0"  # every tokenizer has it, also one of the words of ids; llama.cpp refuses what its vocabulary lacks
_SEED = 0x5EED  # other lengths and contents than any measured request, where they are drawn


def warm_up(
    server: MeasuredServer,
    point: LoadPoint,
    count: int = WARM_UP_REQUESTS,
    on_answer: Callable[[int, int], None] = lambda answered, asked: None,
) -> WarmUpResult:
    """Sends ``count`` requests of the load's shape but other contents, then short ones at once: kernels compile.

    Their tokens or words are shuffled, and a text has another beginning: prompts of a trace or a text file are the same
    for every seed, and must not be in the cache before they are measured. One that fails is sent again, ``ATTEMPTS``
    times in all within its time-out; one of the short ones is not.

    Raises MeasurementError when the first one is not answered, one not in time, or the server does not serve any more.
    """
    if count < 1:
        return WarmUpResult(requests=0, answered=0)
    drawn = server.requests(point, 0, server.seed ^ _SEED)
    requests = sorted(drawn, key=lambda request: len(request.prompt_token_ids or request.prompt or ()))
    chosen = requests[:: max(1, (len(requests) - 1) // max(1, count - 1))][:count]
    at_once = warm_up_concurrency(server, point, requests)
    concurrent = _concurrent_requests(server, requests, at_once) if at_once > 1 else []
    answered, failures, total = 0, [], len(chosen) + len(concurrent)
    rounds = (  # the shortest alone: what it shows of a dead server needs no others
        (chosen[:1], 1, _complete),
        (chosen[1:], WARM_UP_REQUESTS, _complete),
        (concurrent, at_once, _stream),
    )
    for some, threads, send in rounds:
        for is_answered, failed in _results(server, some, threads, send):
            answered, failures = answered + is_answered, failures + failed
            on_answer(answered, total)
        if not answered:
            break
    if not answered and isinstance(failures[-1], RefusedError):
        raise RefusedError(f"the server takes no request of this load: {failures[-1]}")
    if not answered:
        attempts = plural(len(failures), "attempt")
        raise MeasurementError(f"the server answers no warm-up request ({attempts}): {failures[-1]}")
    return WarmUpResult(
        requests=total,
        answered=answered,
        failures=len(failures),
        last=str(failures[-1]) if failures else None,
        in_flight=at_once,
    )


def warm_up_concurrency(server: MeasuredServer, point: LoadPoint, requests: Sequence[RequestSpec]) -> int:
    """The most sequences that the load has in flight, as far as the server takes so many into a step."""
    users = point.concurrency or server.load.max_concurrency or _OPEN_IN_FLIGHT
    sequences = min(users, len(requests)) * max(request.width for request in requests)
    a_step = server.info.engine.max_num_seqs or server.settings.get("max_num_seqs") or sequences
    return min(sequences, a_step, _MOST_IN_FLIGHT)


def captured_sizes(most: int) -> list[int]:
    """The numbers of requests in a step, up to ``most``, for which engines capture a graph: vLLM's default list."""
    return [*(size for size in (1, 2, 4, *range(8, 256, 8), *range(256, most, 16)) if size < most), most]


def _concurrent_requests(server: MeasuredServer, requests: Sequence[RequestSpec], count: int) -> list[RequestSpec]:
    """Makes ``count`` short requests whose number in flight falls through all captured sizes."""
    sizes, room = captured_sizes(count), max(1, server.target.model.most_tokens // 2)
    made = []
    for number in range(count):
        prompt = _shuffled(requests[number % len(requests)])[: min(_SHORT_PROMPT, room)]
        ids, text = (None, prompt) if isinstance(prompt, str) else (tuple(prompt), None)
        tokens = _STEPS_A_SIZE * sum(size > number for size in sizes)
        made.append(RequestSpec(number, "warm-up", ids, text, min(tokens, room)))
    return made


_Send = Callable[[MeasuredServer, Any], tuple[bool, list[MeasurementError]]]


def _results(
    server: MeasuredServer, requests: Sequence[Any], at_once: int, send: _Send
) -> Iterator[tuple[bool, list[MeasurementError]]]:
    """Yields what ``send`` returns for each. Raises MeasurementError for a server that is gone or does not answer."""
    results, left = _begin(server, requests, at_once, send), len(requests)
    limit = (server.load.timeout_s + _MARGIN_S) * -(-len(requests) // at_once)
    due, watch = time.monotonic() + limit, HealthWatch(server.target)
    while left:
        try:
            result = results.get(timeout=max(0.0, min(_LOOK_S, due - time.monotonic())))
        except queue.Empty:
            if time.monotonic() >= due:
                raise MeasurementError(f"a warm-up request was not answered within {limit:g} s") from None
            server.check()
            watch.check()
            continue
        if isinstance(result, BaseException):
            raise result
        left -= 1
        yield result


class HealthWatch:
    """Looks at the health of a server that has not answered yet: one that is gone is not waited for."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._unhealthy = 0  # looks in a row
        self._answered = time.monotonic()

    def check(self) -> None:
        """Raises MeasurementError when it says twice that it does not serve, or says nothing for ``_SILENT_S``."""
        self._target.check_alive()
        try:
            reason = self._target.why_unhealthy()
        except MeasurementError as error:
            if time.monotonic() - self._answered > _SILENT_S:
                raise MeasurementError(f"the server stopped answering: {error}") from None
            return
        self._answered, self._unhealthy = time.monotonic(), self._unhealthy + 1 if reason else 0
        if self._unhealthy == _UNHEALTHY_LOOKS:
            raise MeasurementError(f"the server does not serve: {reason}")


def _begin(server: MeasuredServer, requests: Sequence[Any], at_once: int, send: _Send) -> queue.SimpleQueue[Any]:
    """Sends so many at a time; the queue gets what ``send`` returns or raises for each.

    The threads are daemons, so that an interruption does not wait for a server that does not answer.
    """
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    todo = deque(requests)

    def work() -> None:
        with suppress(IndexError):
            while True:
                request = todo.popleft()
                try:
                    results.put(send(server, request))
                except BaseException as error:
                    results.put(error)

    for _ in range(min(at_once, len(requests))):
        threading.Thread(target=work, name="warm-up", daemon=True).start()
    return results


def _complete(server: MeasuredServer, request: Any) -> tuple[bool, list[MeasurementError]]:
    return complete(server.target, _shuffled(request), min(_TOKENS, request.max_tokens), server.load.timeout_s)


def _stream(server: MeasuredServer, request: RequestSpec) -> tuple[bool, list[MeasurementError]]:
    try:
        send_single(server.target, request, server.load.timeout_s)
    except MeasurementError as error:
        return False, [error]
    return True, []


def _shuffled(request: Any) -> Any:
    """The request's token ids or words in random order; a text gets a first word that few measured prompts have.

    A text may be a single word, or have no blanks; a prefix cache keeps prompts by their beginning.
    """
    given = request.prompt_token_ids if request.prompt is None else request.prompt.split(" ")
    mixed = random.Random(_SEED).sample(given, len(given))
    return mixed if request.prompt is None else " ".join((_FIRST_WORD, *mixed))
