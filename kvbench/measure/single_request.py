"""One streamed request to a server, sent from this process and timed with blocking reads.

A load has a process of its own, since many streams at once need one. With a single request in flight nothing competes
with its reads, and what is compared here differs by milliseconds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvbench.load.blocking import connect, exchange
from kvbench.load.completion import judge
from kvbench.load.http import Address, MalformedStream, tls_context
from kvbench.load.spec import LoadSpec, http_request
from kvbench.requests.request import RequestSpec
from kvbench.targets.base import MOST_BYTES, Target


@dataclass(frozen=True)
class Latencies:
    """Times of one request [ms] from before its connection is opened.

    ``ttft_ms``: to its first token. ``itl_ms``: mean time between tokens, None of a single one. ``e2e_ms``: to the
    response's end.
    """

    ttft_ms: float
    itl_ms: float | None
    e2e_ms: float


def send_single(target: Target, request: RequestSpec, timeout_s: float) -> Latencies:
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
    found = judge(times, chunks, request.max_tokens, dialect=target.dialect)
    if not found.ok or found.first is None:
        raise target.http.error(f" answered a single request wrongly: {found.error or 'no token came'}")
    gaps = max(found.streamed_tokens, 1) - 1
    return Latencies(
        ttft_ms=(found.first - began) * 1e3,
        itl_ms=(found.chunk_times[-1] - found.first) * 1e3 / gaps if gaps else None,
        e2e_ms=(times[-1] - began) * 1e3,
    )
