"""Runs whole loads in the load process, and reads what they and the mock server noted."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.requests.request import RequestSpec, write_requests

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"


def stamps_of(url: str) -> dict[tuple[int, ...], dict]:
    """What the mock server stamped, by prompt (the last one where a prompt was sent twice)."""
    with urllib.request.urlopen(url + "/stamps", timeout=10) as answer:
        return {tuple(s["prompt"]): s for s in json.load(answer)}


def free_port() -> int:
    """A port that nobody has; Locust's own workers must be told it beforehand."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextlib.contextmanager
def own_mock(*flags: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """A mock server that the test may kill, and its URL."""
    command = [sys.executable, "-m", "kvbench.calibration.mock", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield process, process.stdout.readline().split()[1]
    finally:
        process.kill()
        process.communicate()


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

    def start(self, spec: Path) -> subprocess.Popen:
        """The load process, output captured."""
        return subprocess.Popen(
            [sys.executable, "-m", "kvbench.load", str(spec)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def run(self, requests: list[RequestSpec], name: str = "load", **fields: Any) -> Result:
        """The whole load."""
        spec = self.spec(requests, name, **fields)
        process = self.start(spec)
        out, err = process.communicate(timeout=60)
        return Result(process.returncode, out, err, spec.parent)


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
