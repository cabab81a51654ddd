"""Messages between master and workers. Locust's runners carry them beside Locust's own.

    worker -> master  JOIN {proof, version, boot, host, pid}   answered with {proof} or {error}
    master -> worker  CLOCK, SHARD, START, SAMPLES  each answered once, under its own name
    master -> worker  STOP {}, END {code, why}
    worker -> master  PROGRESS {done, failed}, ENDED {gone, signal, error}

Locust packs them with msgpack: plain data, nothing that could run.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Any

from locust.rpc import Message
from locust.runners import WorkerRunner

TOKEN_VARIABLE = "KVBENCH_LOAD_TOKEN"
JOIN, PROGRESS, ENDED, STOP, END = (f"kvbench_{name}" for name in ("join", "progress", "ended", "stop", "end"))
CLOCK, SHARD, START, SAMPLES = (f"kvbench_{name}" for name in ("clock", "shard", "start", "samples"))


def proof(name: str) -> str:
    """Proves that the sender ``name`` knows the token of the environment; the token itself is never sent."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    return hmac.new(token.encode(), name.encode(), hashlib.sha256).hexdigest()


def proven(name: str, given: Any) -> bool:
    """Tests whether ``given`` is the proof of ``name`` with our token."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), proof(name).encode())


def send_statistics(runner: WorkerRunner) -> None:
    """Sends a worker's Locust statistics to the master now, and not at Locust's next three-second report."""
    report: dict[str, Any] = {}
    runner.environment.events.report_to_master.fire(client_id=runner.client_id, data=report)
    runner.client.send(Message("stats", report, runner.client_id))
