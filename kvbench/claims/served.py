"""The two claims that need a server: clients that leave, and malformed requests among good ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from kvbench.common.errors import MeasurementError
from kvbench.targets.base import HttpAnswer
from kvbench.targets.builtin import BuiltinTarget
from kvbench.workload.settings import Settings

STREAMS = 6
_PATH = "/v1/completions"
_TIMEOUT_S = 60.0
_CLIENT: dict[str, Any] = {"timeout": _TIMEOUT_S, "trust_env": False, "headers": {"Accept-Encoding": "identity"}}
_FREED_WITHIN_S = 2.0
_LENGTH, _PROMPT = 1024, 160  # tokens: max_model_len, and of each abandoned prompt
_SETTINGS = {
    "model": "llama-32m",
    "load_format": "dummy",
    "dtype": "float32",
    "kv_budget": "17MiB",  # one sequence of 1,024 tokens, or the abandoned prompts
    "max_model_len": _LENGTH,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
}
_VARIANTS = {
    "pages": {"page_size": 16, "enable_prefix_caching": False},
    "pages with prefix caching": {"page_size": 16, "enable_prefix_caching": True},
}


@dataclass(frozen=True)
class Abandoned:
    """The memory that a server kept of streams that were left after their first token.

    owned_before: pages; freed_after_s: None if some were still owned after ``_FREED_WITHIN_S``; next_served: whether a
    request for the whole memory then was served.
    """

    streams: int
    owned_before: float
    freed_after_s: float | None
    next_served: bool


@dataclass(frozen=True)
class Malformed:
    """Malformed requests beside good ones: how many were ``sent``, and ``refused`` with a reason.

    good: good requests; running: those that still ran when the malformed ones were refused; same_tokens: those with the
    tokens that they have alone.
    """

    good: int
    running: int
    same_tokens: int
    sent: int
    refused: int
    seconds_alone: float
    seconds_beside: float


@dataclass(frozen=True)
class ServedFacts:
    """The facts that the two claims are judged by. ``abandoned``: by the variant of the server."""

    abandoned: dict[str, Abandoned]
    malformed: Malformed | None


def measure_served(folder: Path, on_cpu: bool, say: Callable[[str], None], check: Callable[[], None]) -> ServedFacts:
    """Measures the facts of both claims. Raises MeasurementError."""
    abandoned, malformed = {}, None
    for name, settings in _VARIANTS.items():
        check()
        say(f"a server with {name}")
        settings = {**_SETTINGS, **settings, "device": "cpu" if on_cpu else "cuda"}
        with _server(settings, folder / f"{name.replace(' ', '-')}.log") as target:
            abandoned[name] = _abandon(target)
            malformed = malformed or _send_malformed(target)
    return ServedFacts(abandoned, malformed)


@contextmanager
def _server(settings: Settings, log: Path) -> Iterator[BuiltinTarget]:
    """A server, stopped in the end. Raises MeasurementError, also where a request got no answer."""
    log.parent.mkdir(parents=True, exist_ok=True)
    target = BuiltinTarget(forked=True)
    try:
        target.start(settings, log)
        yield target
    except httpx.HTTPError as error:
        raise MeasurementError(f"the server did not answer ({str(error) or type(error).__name__})") from None
    finally:
        target.stop()


def _abandon(target: BuiltinTarget) -> Abandoned:
    """Leaves streams after their first token.

    All are sent at once: while one waits for the next, its answer would grow into the memory of the other prompts.
    """

    kept: list[Iterator[str]] = []  # since a stream is closed once nobody can read it

    def begin(number: int) -> Iterator[str]:
        body = _body(target, [16 + number] * _PROMPT, _LENGTH - _PROMPT)
        response = client.send(client.build_request("POST", _PATH, json=body | {"stream": True}), stream=True)
        stack.callback(response.close)
        lines = response.iter_lines()
        next(lines)  # the first token
        return lines

    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=target.http.base_url, **_CLIENT))
        threads = stack.enter_context(ThreadPoolExecutor(STREAMS))
        kept.extend(threads.map(begin, range(STREAMS)))
        if not (before := target.metrics().owned_pages):
            raise MeasurementError("the server owned no page while its streams ran")
    left, freed = time.monotonic(), None
    while freed is None and time.monotonic() < left + _FREED_WITHIN_S:
        if target.metrics().owned_pages == 0:
            freed = time.monotonic() - left
    answer = _post(target, _body(target, [20] * (_LENGTH - 8), 8))
    return Abandoned(STREAMS, before, freed, answer.status == 200)


def _send_malformed(target: BuiltinTarget) -> Malformed:
    """Good requests with malformed ones among them, beside the same good ones alone. Raises MeasurementError."""
    good = [_body(target, [30 + number] * 40, 48) for number in range(STREAMS)]
    name = target.model.name
    bad: list[Any] = [
        _body(target, [], 8),
        _body(target, [20] * (2 * _LENGTH), 8),
        _body(target, [10**7], 8),
        _body(target, [20], -1),
        {"model": name, "prompt": {"text": 1}, "max_tokens": 8},
        {"model": "another-model", "prompt": [20], "max_tokens": 8},
        b'{"model": ',
        b"\xff\xfe not JSON",
    ]
    with ThreadPoolExecutor(len(good)) as threads:
        started = time.monotonic()
        alone = list(map(_tokens, threads.map(partial(_post, target), good)))
        between = time.monotonic()
        sent = [threads.submit(_post, target, body) for body in good]
        answers = [_post(target, body) for body in bad]
        running = sum(not request.done() for request in sent)
        beside = [_tokens(request.result()) for request in sent]
        ended = time.monotonic()
    if None in alone:
        raise MeasurementError("a good request failed without malformed ones beside it")
    if not running:
        raise MeasurementError("the good requests had ended before the malformed ones were refused")
    return Malformed(
        good=len(good),
        running=running,
        same_tokens=sum(a == b for a, b in zip(alone, beside, strict=True)),
        sent=len(bad),
        refused=sum(map(_is_refused, answers)),
        seconds_alone=between - started,
        seconds_beside=ended - between,
    )


def _post(target: BuiltinTarget, body: Any) -> HttpAnswer:
    return target.http.call("POST", _PATH, body=body, timeout_s=_TIMEOUT_S)


def _tokens(answer: HttpAnswer) -> list[int] | None:
    return answer.json()["choices"][0]["token_ids"] if answer.status == 200 else None


def _is_refused(answer: HttpAnswer) -> bool:
    """Tests whether the request is blamed, with a reason."""
    with suppress(KeyError, TypeError):
        return 400 <= answer.status < 500 and bool(answer.json()["error"]["message"])
    return False


def _body(target: BuiltinTarget, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": target.model.name,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
