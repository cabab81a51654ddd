"""A mock server for the whole session, and ways to run the client and whole loads in their own processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.loads import ROOT, SUPPORT, LoadRunner


@pytest.fixture(scope="session")
def mock_url() -> Iterator[str]:
    """The URL of a running mock server."""
    process = subprocess.Popen(
        [sys.executable, str(SUPPORT / "mock_server.py")], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        yield process.stdout.readline().split()[1]
    finally:
        process.terminate()
        process.wait(timeout=10)


@pytest.fixture(scope="session")
def exchange(mock_url: str) -> Callable[..., list[list[dict]]]:
    """Runs jobs through the streaming client (see tests/support/exchange.py)."""

    def run(jobs: list[dict], url: str = mock_url) -> list[list[dict]]:
        done = subprocess.run(
            [sys.executable, str(SUPPORT / "exchange.py"), url],
            input=json.dumps(jobs),
            capture_output=True,
            text=True,
            timeout=90,
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture
def loads(tmp_path: Path, mock_url: str) -> LoadRunner:
    """A runner of loads against the mock server."""
    return LoadRunner(tmp_path, mock_url)
