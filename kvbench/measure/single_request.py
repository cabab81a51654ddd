"""Single requests to a server, sent from this process.

A load has a process of its own, since many streams at once need one. With a single request in flight nothing competes
with its reads, and what is compared here differs by milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.common.errors import MeasurementError, RefusedError
from kvbench.load.blocking import connect, exchange
from kvbench.load.completion import judge
from kvbench.load.http import Address, MalformedStream, tls_context
from kvbench.load.spec import LoadSpec, http_request
from kvbench.requests.request import RequestSpec
from kvbench.targets.base import MOST_BYTES, Target

ATTEMPTS = 3  # of one request: a server that fails now and then can be measured, and its failures are a result
_PAUSE_S = 0.2  # before a request is sent again


@dataclass(frozen=True)
class SingleLatencies:
    """Times of one request [ms] from before its connection is opened.

    ``ttft_ms``: to its first token. ``itl_ms``: mean time between tokens, None of a single one. ``e2e_ms``: to the
    response's end.
    """

    ttft_ms: float
    itl_ms: float | None
    e2e_ms: float


def send_single(target: Target, request: RequestSpec, timeout_s: float) -> SingleLatencies:
    """Sends the request on a connection of its own and waits for the response's end.

    Raises MeasurementError unless it succeeds as one of a load must (kvbench/load/completion.py) within ``timeout_s``.
    """
    spec = LoadSpec(
        base_url=target.base_url, model=target.model.name, mode="closed", concurrency=1, requests_file="", out_dir="",
        timeout_s=timeout_s, **target.client_fields(),
    )  # fmt: skip
    address = Address.from_url(target.base_url)
    payload = http_request(spec, address, *target.as_sent([request]))
    tls = tls_context(spec.tls_verify, spec.tls_ca_file) if address.tls else None
    began = time.perf_counter()
    try:
        with connect(address, began + timeout_s, tls) as connection:
            times, chunks = exchange(connection, payload, began + timeout_s, MOST_BYTES)
    except TimeoutError:
        raise target.http.error(f" did not answer a single request within {timeout_s:g} s") from None
    except (OSError, MalformedStream) as error:
        raise target.http.error(f" did not answer a single request: {error}") from None
    answer = judge(times, chunks, request.max_tokens, dialect=target.dialect)
    if not answer.ok or answer.first is None:
        raise target.http.error(f" answered a single request wrongly: {answer.error or 'no token came'}")
    gaps = max(answer.streamed_tokens, 1) - 1
    return SingleLatencies(
        ttft_ms=(answer.first - began) * 1e3,
        itl_ms=(answer.chunk_times[-1] - answer.first) * 1e3 / gaps if gaps else None,
        e2e_ms=(times[-1] - began) * 1e3,
    )


def complete(
    target: Target, prompt: str | Sequence[int], tokens: int, timeout_s: float
) -> tuple[bool, list[MeasurementError]]:
    """Sends a prompt up to ``ATTEMPTS`` times; whether it was answered in time, and the error of each failure."""
    ends_at = time.monotonic() + timeout_s
    failures: list[MeasurementError] = []
    while len(failures) < ATTEMPTS and (left := ends_at - time.monotonic()) > 0:
        if failures:
            time.sleep(min(_PAUSE_S, left))
        try:
            target.complete(prompt, tokens, max(0.001, ends_at - time.monotonic()))
        except RefusedError as error:
            return False, [*failures, error]
        except MeasurementError as error:
            failures.append(error)
        else:
            return True, failures
    return False, failures
