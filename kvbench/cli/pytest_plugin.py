"""The pytest plug-in: an engine's own tests measure its server. ``pytest --kvbench``; docs/adopting.md has examples.

kvbench_server    the base URL of the server under test
kvbench_load      a function: sends a load to it; the words are those of `kvbench load`
kvbench_gate      a function: judges, as `kvbench gate` and `kvbench gate counters`
kvbench_compare   a function: compares two sides, as `kvbench compare`

The fixtures skip a test where --kvbench is not given. pytest imports this file in every session of an environment that
has kvbench, so all else is imported where it is used.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvbench.runs.model import MeasuredCell

_POLL_S = 0.2


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvbench", "measure a server with kvbench")
    group.addoption("--kvbench", action="store_true", help="Run the tests that use kvbench's fixtures.")
    group.addoption("--kvbench-url", metavar="URL", help="The server under test (default: launch kvbench_serve).")
    parser.addini("kvbench_serve", "The command that launches the server under test; {port} is filled in.")
    parser.addini("kvbench_start_timeout", "Seconds until it must serve (default: 900).", default="900")
    parser.addini("kvbench_timeout", "Seconds that a command of kvbench may take (default: 3600).", default="3600")


@dataclass(frozen=True)
class LoadOutput:
    """A load that was sent. ``load["p95_ttft_ms"]``: a figure, by the names that limits in ci/gates.yaml have.

    exit_code: of `kvbench load`: 0 measured, 1 canaries were answered wrongly, 4 invalid
    output: what it printed; folder: requests.parquet, metrics.json and the rest
    """

    exit_code: int
    output: str
    folder: Path
    cell: MeasuredCell

    @property
    def valid(self) -> bool:
        """Tests whether its figures may be compared."""
        return self.cell.valid

    def __getitem__(self, name: str) -> float:
        from kvbench.runs import metric_names

        metric_names.check_name(name)
        values = metric_names.measured(self.cell, name).values
        if not values:
            raise KeyError(f"{name}: it was not measured")
        return next(iter(values.values()))


@dataclass(frozen=True)
class GateVerdict:
    """A verdict. ``outcome``: pass, fail, inconclusive, invalid or empty; ``folder``: verdict.json, summary.md."""

    exit_code: int
    outcome: str
    sentence: str
    folder: Path


@pytest.fixture(scope="session")
def kvbench_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of the server under test: --kvbench-url, or one that the command of the ini file launches."""
    _require(request)
    if url := request.config.getoption("--kvbench-url"):
        yield url
        return
    command, limit_s = request.config.getini("kvbench_serve"), float(request.config.getini("kvbench_start_timeout"))
    if "{port}" not in command:
        problem = f"kvbench_serve = {command} lacks {{port}}" if command else "there is no server under test"
        pytest.fail(f"{problem}: give --kvbench-url URL, or set kvbench_serve = COMMAND with {{port}}", False)
    with _launched(command, tmp_path_factory.mktemp("kvbench") / "server.log", limit_s) as url:
        yield url


@pytest.fixture
def kvbench_load(
    request: pytest.FixtureRequest, kvbench_server: str, tmp_path: Path
) -> Callable[..., LoadOutput]:
    """A function that sends a load, in the words of `kvbench load` without --url and --output-dir."""

    def load(*words: str) -> LoadOutput:
        from kvbench.runs.read import read_run

        folder = _new_folder(tmp_path, "load")
        code, output = _run(request, "load", "--url", kvbench_server, "--output-dir", str(folder), *words)
        cells = read_run(folder).cells if (folder / "manifest.json").is_file() else ()
        if not cells:  # nothing was measured
            pytest.fail(f"kvbench load (exit code {code}): {output.strip()}", False)
        return LoadOutput(code, output, folder, cells[0])

    return load


@pytest.fixture
def kvbench_gate(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., GateVerdict]:
    """A function that judges, in the words of `kvbench gate`: a results folder, or `counters`."""
    _require(request)
    return partial(_judge, request, tmp_path, "gate")


@pytest.fixture
def kvbench_compare(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., GateVerdict]:
    """A function that compares two sides, in the words of `kvbench compare`."""
    _require(request)
    return partial(_judge, request, tmp_path, "compare")


def _require(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--kvbench"):
        pytest.skip("measures a server: give --kvbench")


def _new_folder(parent: Path, name: str) -> Path:
    return parent / f"{name}-{sum(1 for _ in parent.glob(f'{name}-*'))}"


def _run(request: pytest.FixtureRequest, *words: str) -> tuple[int, str]:
    """Runs a command of kvbench; returns its exit code and output. Bad input and failures fail the test."""
    from kvbench.common import processes

    limit_s, code = float(request.config.getini("kvbench_timeout")), None
    with tempfile.TemporaryFile() as written:
        child = processes.launch(
            [sys.executable, "-m", "kvbench", *map(str, words)], stdout=written, stderr=subprocess.STDOUT
        )
        try:
            child.watch()
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(timeout=limit_s)
        finally:
            processes.stop(child)
        written.seek(0)
        output = written.read().decode(errors="replace")
    if code is None:
        pytest.fail(f"kvbench {words[0]} took more than {limit_s:g} s: shorten it, or raise kvbench_timeout", False)
    if code == 2:
        pytest.fail(f"kvbench {words[0]}: {output.strip()}", False)
    return code, output


def _judge(request: pytest.FixtureRequest, parent: Path, command: str, *words: str) -> GateVerdict:
    """Runs a command that writes a verdict; returns that. None fails the test."""
    folder = _new_folder(parent, command)
    code, output = _run(request, command, *words, "--output-dir", str(folder))
    if (file := next(folder.rglob("verdict.json"), None)) is None:
        pytest.fail(f"there is no verdict (exit code {code}): {output[-2000:]}", False)
    stored = json.loads(file.read_text(encoding="utf-8"))
    return GateVerdict(code, stored["outcome"], stored["sentence"], file.parent)


@contextmanager
def _launched(command: str, log: Path, limit_s: float) -> Iterator[str]:
    """Launches the server; yields its URL once it lists its models, and stops it afterwards."""
    from kvbench.common import processes
    from kvbench.common.errors import MeasurementError
    from kvbench.common.ports import free_port
    from kvbench.targets.base import HttpCalls

    port = free_port(0)
    url, words = f"http://127.0.0.1:{port}", shlex.split(command.replace("{port}", str(port)))
    with log.open("wb") as file:
        if shutil.which(words[0]) is None:
            pytest.fail(f"kvbench_serve cannot be launched: there is no program {words[0]!r}", False)
        server = processes.launch(words, stdout=file, stderr=subprocess.STDOUT)
    try:
        server.watch()
        deadline = time.monotonic() + limit_s
        while True:
            if (code := server.poll()) is not None or time.monotonic() > deadline:
                ended = f"did not serve within {limit_s:g} s" if code is None else processes.how_it_ended(code)
                pytest.fail(f"kvbench_serve {ended}; its last lines:\n{processes.last_lines(log)}", False)
            with suppress(MeasurementError):
                if HttpCalls(url).call("GET", "/v1/models").status == 200:
                    break
            time.sleep(_POLL_S)
        yield url
    finally:
        processes.stop(server)
