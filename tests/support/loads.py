"""Runs whole loads in the load process, and reads what they and the mock server noted."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pandas as pd

from kvbench.common import processes
from kvbench.load.launch import LOAD_CLIENT
from kvbench.requests.request import RequestSpec, write_requests

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
FAKE = SUPPORT / "fake_engine_server.py"


def stamps_of(url: str) -> dict[tuple[int, ...], dict]:
    """What the mock server stamped, by prompt (the last one where a prompt was sent twice).

    Without the request by which a load asks what the server takes.
    """
    with urllib.request.urlopen(url + "/stamps", timeout=10) as answer:
        return {tuple(s["prompt"]): s for s in json.load(answer) if s["prompt"] != [1, 2]}


def free_port() -> int:
    """A port that nobody has; Locust's own workers must be told it beforehand."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextlib.contextmanager
def served(command: list[str], **env: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server that says ``ready URL`` and that the test may kill, and its URL."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **env})
    try:
        yield process, process.stdout.readline().split()[1]
    finally:
        process.kill()
        process.communicate()


def own_mock(*flags: str, **env: str) -> contextlib.AbstractContextManager[tuple[subprocess.Popen, str]]:
    """A mock server of one test."""
    return served([sys.executable, "-m", "kvbench", "dev", "mock-server", "--port", "0", *flags], **env)


def fake_server(*flags: str, fire: Sequence[dict[str, Any]] = (), **env: str) -> Any:
    """A fake engine server, struck by the rules ``fire``."""
    return served([sys.executable, str(FAKE), *flags], FIRE=json.dumps(fire), **env)


def requests_of(count: int, tag: int, max_tokens: int = 5, spacing_s: float | None = None) -> list[RequestSpec]:
    """``count`` requests whose prompts [tag, i] nobody else sends."""
    arrivals = [None if spacing_s is None else i * spacing_s for i in range(count)]
    return [RequestSpec(i, ("even", "odd")[i % 2], (tag, i), None, max_tokens, arrivals[i]) for i in range(count)]


class LoadProcess:
    """A load process and the text that it prints; else as ``subprocess.Popen``."""

    def __init__(self, child: processes.Child, errors: IO[bytes]) -> None:
        self._child, self._errors = child, errors
        self.stdout = io.TextIOWrapper(child.stdout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child, name)

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Waits for its end; the rest of stdout, and stderr."""
        out = self.stdout.read()
        self._child.wait(timeout)
        self._errors.seek(0)
        return out, self._errors.read().decode()


def start_load(*arguments: str, wrapper: str = "", **env: str) -> LoadProcess:
    """``python -m kvbench.load`` in a group of its own, forked from a process that has imported it."""
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - read by communicate
    child = processes.launch(
        [*wrapper.split(), sys.executable, "-m", "kvbench.load", *arguments], stdout=subprocess.PIPE, stderr=errors,
        death_signal=signal.SIGKILL, env=env, cwd=ROOT,
        preloaded=None if "PYTHONPATH" in env else LOAD_CLIENT,
    )  # fmt: skip
    return LoadProcess(child, errors)


class LoadRunner:
    """Runs ``python -m kvbench.load`` on requests of the test's choice."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url

    def spec(self, requests: list[RequestSpec], name: str = "load", **fields: Any) -> Path:
        """Writes the requests and SPEC.json; the spec's path."""
        out = self.folder / name
        write_requests(out / "requests.jsonl", requests)
        spec = {
            "base_url": self.url,
            "model": "mock",
            "mode": "closed",
            "concurrency": 4,
            "requests_file": str(out / "requests.jsonl"),
            "out_dir": str(out),
            "timeout_s": 20,
        }
        spec = {k: v for k, v in (spec | fields).items() if v is not None}
        (out / "spec.json").write_text(json.dumps(spec))
        return out / "spec.json"

    def start(self, spec: Path, **env: str) -> LoadProcess:
        return start_load(str(spec), **env)

    def run(self, requests: list[RequestSpec], name: str = "load", **fields: Any) -> Result:
        """The whole load."""
        spec = self.spec(requests, name, **fields)
        return ended(self.start(spec), spec.parent)


def wait_for(process: LoadProcess, done: int = 8) -> None:
    """Until the load says that so many requests are done."""
    for line in process.stdout:
        if json.loads(line)["done"] >= done:
            return
    raise AssertionError("the load ended before it was disturbed")


def ended(process: LoadProcess, folder: Path) -> Result:
    """Waits for the end of a load, far longer than it needs, so that a busy machine passes."""
    out, err = process.communicate(timeout=120)
    return Result(process.returncode, out, err, folder)


class Result:
    """What a load left behind."""

    def __init__(self, code: int, stdout: str, stderr: str, folder: Path) -> None:
        self.code, self.stderr, self.folder = code, stderr, folder
        self.stdout, self.events = stdout, [json.loads(line) for line in stdout.splitlines()]

    @property
    def load(self) -> dict[str, Any]:
        return json.loads((self.folder / "load.json").read_text())

    @property
    def samples(self) -> pd.DataFrame:
        return pd.read_parquet(self.folder / "requests.parquet")
