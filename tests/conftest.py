"""The environment of all tests: no calibration and no quality, which have tests of their own, no terminal's width,
no threads that spin.

``browser``: headless Chromium, see tests/support/browser.py.
"""

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from kvbench.common.preloaded import Preloaded
from tests.support.browser import Browser, chromium

settings.register_profile("kvbench", deadline=None)  # a busy machine is no failure
settings.load_profile("kvbench")
os.environ.setdefault("KVBENCH_NO_CALIBRATION", "1")
os.environ.setdefault("KVBENCH_NO_QUALITY", "1")
# Tests start some 500 processes: without byte code each of them compiles every file of this repository again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Torch's threads sleep between their parallel regions: those that spin take the cores from the other worker's tests.
# Torch reads it once, when it is imported. A server that a test launches sets GOMP_SPINCOUNT, which comes first.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it for its workers, and a table would be made to fit
# Of tests, and what some packages set when a test imports them.
LATER = ("PYTEST_", "FAKE_", "FIRE", "GIT_DIR", "GOMP_", "TRANSFORMERS_", "RAY_")
# All load clients and engine servers below this process are forked from two that have imported what they need.
for module, imported in (("kvbench.load", "__main__"), ("kvbench_engine.server", "preload")):
    Preloaded((module,), f"{module}.{imported}", reads_later=LATER).share()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for a file of tests: Playwright's event loop must be gone before other tests run their own."""
    try:
        with chromium() as started:
            yield started
    except LookupError as why:
        pytest.skip(str(why))
