"""What tests of several rooms share: a mock server, loads against it, and synthetic runs, each made once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from kvbench.report.document import Document, document
from kvbench.runs.model import Run
from kvbench.runs.read import read_run
from tests.support.exchange import exchanges
from tests.support.loads import LoadRunner, own_mock
from tests.support.synthetic_run import PAIR, VARIANTS, make_run
from tests.support.toy_engine import Scenario


@pytest.fixture(scope="session")
def mock_url() -> Iterator[str]:
    """The URL of a running mock server."""
    with own_mock("--ttft-ms", "5", "--itl-ms", "1") as (_, url):
        yield url


@pytest.fixture(scope="session")
def exchange(mock_url: str) -> Callable[..., list[list[dict]]]:
    """Runs jobs through the streaming client (see tests/support/exchange.py)."""
    return lambda jobs, url=mock_url: exchanges(jobs, url)


@pytest.fixture
def loads(tmp_path: Path, mock_url: str) -> LoadRunner:
    """A runner of loads against the mock server."""
    return LoadRunner(tmp_path, mock_url)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a named variant; shared, so tests that change one make their own."""
    made: dict[str, Path] = {}

    def folder(variant: str) -> Path:
        if variant not in made:
            made[variant] = make_run(tmp_path_factory.mktemp("runs") / "mixed" / variant, VARIANTS[variant])
        return made[variant]

    return folder


@pytest.fixture
def run_of(run_folder: Callable[[str], Path]) -> Callable[[str], Run]:
    """A named variant, read."""
    return lambda variant: read_run(run_folder(variant))


@pytest.fixture(scope="session")
def document_of(run_folder: Callable[[str], Path]) -> Callable[[str], Document]:
    """What the report of a named variant says, made once."""
    return cache(lambda variant: document(read_run(run_folder(variant))))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Run]:
    """A small run of its own, paged and contiguous: `make(repeats=2, ...)` with Scenario's fields."""
    small = {"configs": PAIR, "num_requests": 30}
    return lambda **fields: read_run(make_run(tmp_path / "own", Scenario(**(small | fields))))
