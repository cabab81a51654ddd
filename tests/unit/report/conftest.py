"""Synthetic runs, one of each kind, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.report import build_report
from kvbench.runs.model import Run
from kvbench.runs.read import read_run
from tests.support.synthetic_run import PAIR, VARIANTS, make_run
from tests.support.toy_engine import Scenario


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
def page_of(run_folder: Callable[[str], Path]) -> Callable[[str], str]:
    """The HTML of a named variant, built once."""
    built: dict[str, str] = {}

    def text(variant: str) -> str:
        if variant not in built:
            built[variant] = build_report(run_folder(variant)).html.read_text()
        return built[variant]

    return text


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Run]:
    """A small run of its own, paged and contiguous: `make(repeats=2, ...)` with Scenario's fields."""
    small = {"configs": PAIR, "num_requests": 30}
    return lambda **fields: read_run(make_run(tmp_path / "own", Scenario(**(small | fields))))
