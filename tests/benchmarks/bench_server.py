"""A server as a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench_engine import model_name

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def server(*flags: str, environment: Mapping[str, str] | None = None) -> Iterator[int]:
    """Its port, once it is ready. ``environment`` is added to this process's."""
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.server", "--model", model_name(), "--port", "0", *flags],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})},
    )  # fmt: skip
    try:
        ready = process.stdout.readline()
        assert ready.startswith("ready http://127.0.0.1:"), ready
        yield int(ready.rsplit(":", 1)[1])
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
