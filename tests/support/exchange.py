"""Runs the streaming client on a list of jobs, in a process of its own since gevent patches it.

    python tests/support/exchange.py URL < jobs.json

A job: {"model", "prompt", "max_tokens", "timeouts": {...}, "repeat": n, "tls": {"verify", "ca_file"}}; all jobs run at
once, each on one client that performs ``repeat`` exchanges after one another. ``connected``: it has a connection before
the first. Prints one list of outcomes per job.
"""

from gevent import monkey

monkey.patch_all()

import json  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from dataclasses import asdict  # noqa: E402

import gevent  # noqa: E402

from kvbench.load.client import (  # noqa: E402
    Address,
    StreamingClient,
    Timeouts,
)
from kvbench.load.completion import judge  # noqa: E402
from kvbench.load.http import tls_context  # noqa: E402
from kvbench.load.spec import LoadSpec, http_request  # noqa: E402
from kvbench.requests.request import RequestSpec  # noqa: E402


def perform(url: str, job: dict) -> list[dict]:
    """The outcomes of one job."""
    spec = LoadSpec(
        base_url=url,
        model=job["model"],
        mode="closed",
        concurrency=1,
        requests_file="",
        out_dir="",
        timeout_s=60,
    )
    address = Address.from_url(job.get("url", url))
    request = RequestSpec(0, "test", tuple(job["prompt"]), None, job["max_tokens"])
    client = StreamingClient(
        address, Timeouts(**job.get("timeouts", {})), tls_context(**job["tls"]) if "tls" in job else None
    )
    if job.get("connected"):
        client.connect()
    out = []
    for _ in range(job.get("repeat", 1)):
        raw = client.exchange(http_request(spec, address, request))
        outcome = judge(raw.times, raw.chunks, request.max_tokens, raw.error_kind, raw.error)
        more = {"ok": outcome.ok, "ts": raw.ts, "end": raw.end, "reads": len(raw.times), "reopened": raw.reopened}
        out.append(asdict(outcome) | more)
        time.sleep(job.get("gap_s", 0))
    client.close()
    return out


if __name__ == "__main__":
    jobs = [gevent.spawn(perform, sys.argv[1], job) for job in json.load(sys.stdin)]
    gevent.joinall(jobs, timeout=60, raise_error=True)
    print(json.dumps([job.value for job in jobs]))
