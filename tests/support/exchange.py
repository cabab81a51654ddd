"""Runs the streaming client on a list of jobs, all at once, in greenlets of the test's own process."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import gevent

from kvbench.load.client import Address, StreamingClient, Timeouts
from kvbench.load.completion import judge
from kvbench.load.http import tls_context
from kvbench.load.spec import LoadSpec, http_request
from kvbench.requests.request import RequestSpec

Job = dict[str, Any]


def exchanges(jobs: list[Job], url: str) -> list[list[dict[str, Any]]]:
    """The outcomes of each job: {"model", "prompt", "max_tokens", "timeouts", "repeat", "tls": {"verify", "ca_file"}}.

    Each job is one client that performs ``repeat`` exchanges, ``gap_s`` apart; ``connected``: it has a connection
    before the first; ``url``: of its own.
    """
    running = [gevent.spawn(_perform, job.get("url", url), job) for job in jobs]
    gevent.joinall(running, timeout=60, raise_error=True)
    return [each.get(block=False) for each in running]


def _perform(url: str, job: Job) -> list[dict[str, Any]]:
    spec = LoadSpec(
        base_url=url, model=job["model"], mode="closed", concurrency=1, requests_file="", out_dir="", timeout_s=60
    )
    address = Address.from_url(url)
    request = RequestSpec(0, "test", tuple(job["prompt"]), None, job["max_tokens"])
    context = tls_context(**job["tls"]) if "tls" in job else None
    client = StreamingClient(address, Timeouts(**job.get("timeouts", {})), context)
    if job.get("connected"):
        client.connect()
    out = []
    for _ in range(job.get("repeat", 1)):
        raw = client.exchange(http_request(spec, address, request))
        outcome = judge(raw.times, raw.chunks, request.max_tokens, raw.error_kind, raw.error)
        more = {"ok": outcome.ok, "ts": raw.ts, "end": raw.end, "reads": len(raw.times), "reopened": raw.reopened}
        out.append(asdict(outcome) | more)
        gevent.sleep(job.get("gap_s", 0))
    client.close()
    return out
