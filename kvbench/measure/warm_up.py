"""Warm-up requests before the first measured load."""

from __future__ import annotations

import dataclasses
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.common.errors import MeasurementError, RefusedError
from kvbench.workload.design import LoadPoint

if TYPE_CHECKING:
    from kvbench.measure.load import LoadSetup

WARM_UP_REQUESTS = 4
ATTEMPTS = 3  # of one request: a server that fails now and then can be measured, and its failures are a result
_PAUSE_S = 0.2  # before a request is sent again
_TOKENS = 16
_MARGIN_S = 30.0
_FIRST_WORD = "Warm-up:"
_SEED = 0x5EED  # other lengths and contents than any measured request, where they are drawn


@dataclass(frozen=True)
class WarmUp:
    """Requests sent and answered, failed attempts, and why the last attempt failed."""

    requests: int
    answered: int
    failures: int = 0
    last: str | None = None

    def to_json(self) -> dict[str, Any]:
        """For a manifest and a load's result."""
        return dataclasses.asdict(self)


def warm_up(setup: LoadSetup, point: LoadPoint, count: int = WARM_UP_REQUESTS) -> WarmUp:
    """A few requests of the load's shape but other contents: kernels compile, buffers are touched.

    Their tokens or words are shuffled, and a text has another beginning: prompts of a trace or a text file are the same
    for every seed, and must not be in the cache before they are measured. One that fails is sent again, ``ATTEMPTS``
    times in all within its time-out.

    Raises MeasurementError when none is answered, or one not in time.
    """
    if count < 1:
        return WarmUp(0, 0)
    requests = sorted(
        setup.requests(point, 0, setup.seed ^ _SEED),
        key=lambda r: len(r.prompt_token_ids or r.prompt or ()),
    )
    step = max(1, (len(requests) - 1) // max(1, count - 1))
    chosen = requests[::step][:count]
    limit = (setup.load.timeout_s + _MARGIN_S) * -(-len(chosen) // WARM_UP_REQUESTS)
    results = _send(setup, chosen)
    answered, failures = 0, []
    for _ in chosen:
        try:
            result = results.get(timeout=limit)
        except queue.Empty:
            raise MeasurementError(f"a warm-up request was not answered within {limit:g} s") from None
        if isinstance(result, BaseException):
            raise result
        answered += result[0]
        failures += result[1]
    if not answered and isinstance(failures[-1], RefusedError):
        raise RefusedError(f"the server takes no request of this load: {failures[-1]}")
    if not answered:
        raise MeasurementError(
            f"all {len(failures)} attempts to warm the server up failed; the last: {failures[-1]}; see what the "
            "server's own log says of it"
        )
    return WarmUp(len(chosen), answered, len(failures), str(failures[-1]) if failures else None)


def _send(setup: LoadSetup, requests: Sequence[Any]) -> queue.SimpleQueue[Any]:
    """Sends a few at a time; the queue gets what ``_complete`` returns or raises for each.

    The threads are daemons, so that an interruption does not wait for a server that does not answer.
    """
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    todo = deque(requests)

    def work() -> None:
        with suppress(IndexError):
            while True:
                request = todo.popleft()
                try:
                    results.put(_complete(setup, request))
                except BaseException as error:
                    results.put(error)

    for _ in range(min(WARM_UP_REQUESTS, len(requests))):
        threading.Thread(target=work, name="warm-up", daemon=True).start()
    return results


def _complete(setup: LoadSetup, request: Any) -> tuple[bool, list[MeasurementError]]:
    """Whether it was answered, and the error of each failed attempt. A refused request is not sent again."""
    ends_at = time.monotonic() + setup.load.timeout_s
    tokens = min(_TOKENS, request.max_tokens)
    failures: list[MeasurementError] = []
    while len(failures) < ATTEMPTS and (left := ends_at - time.monotonic()) > 0:
        if failures:
            time.sleep(min(_PAUSE_S, left))
        try:
            setup.target.complete(_shuffled(request), tokens, max(0.001, ends_at - time.monotonic()))
        except RefusedError as error:
            return False, [*failures, error]
        except MeasurementError as error:
            failures.append(error)
        else:
            return True, failures
    return False, failures


def _shuffled(request: Any) -> Any:
    """The request's token ids or words in random order; a text gets a first word that no measured prompt has.

    A text may be a single word, or have no blanks; a prefix cache keeps prompts by their beginning.
    """
    given = request.prompt_token_ids if request.prompt is None else request.prompt.split(" ")
    mixed = random.Random(_SEED).sample(given, len(given))
    return mixed if request.prompt is None else " ".join((_FIRST_WORD, *mixed))
