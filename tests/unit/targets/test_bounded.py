"""HTTP calls to a target end: whatever the server does, within the time-out, and within a bound of bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from kvbench.common.errors import MeasurementError
from kvbench.targets import base, bounded
from kvbench.targets.base import HttpTarget, ModelFacts

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 0.15
NEVER_WHOLE = ["hang", "half_head", "drip_head", "drip_body", "drip_length", "flood", "flood_length"]
CALLS = {
    "/v1/models": lambda target: target.models(),
    "/metrics": lambda target: target.metrics(),
    "/reset_prefix_cache": lambda target: target.reset_prefix_cache(),
    "/server_info": lambda target: target.server_info(),
    "plain": lambda target: target.complete([1, 2], 1, TIMEOUT_S),
}


@pytest.fixture(scope="module")
def url():
    """Each endpoint answers its 1st request in the first of the ways above, its 2nd in the second, and so on."""
    rules = [
        {"path": path, "do": do, "first": number, "count": 1}
        for path in CALLS
        for number, do in enumerate([*NEVER_WHOLE, "status", "garbage", "reset"], 1)
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.fire_server"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
        env={**os.environ, "FIRE": json.dumps(rules)},
    )  # fmt: skip
    yield process.stdout.readline().split()[1]
    process.kill()
    process.wait(10)
    process.stdout.close()


@pytest.mark.parametrize("path", CALLS)
def test_a_call_ends_within_its_time_and_bytes_and_the_next_is_served(url, path, monkeypatch):
    monkeypatch.setattr(bounded, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(base, "FACTS_TIMEOUT_S", TIMEOUT_S)
    target = HttpTarget(url)
    target._http.timeout = httpx.Timeout(TIMEOUT_S)
    target.model = ModelFacts("fake", 8192, 1024)
    for do in NEVER_WHOLE:
        began = time.monotonic()
        with pytest.raises(MeasurementError, match=r"longer than 1 MiB" if "flood" in do else r"[Tt]ime"):
            CALLS[path](target)
        assert time.monotonic() - began < TIMEOUT_S + 5.0  # the 5 s are the test machine's
    for refused in ("status", "garbage", "reset"):
        if (path, refused) == ("/server_info", "status"):
            assert CALLS[path](target) is None  # a server that has none of it
            continue
        with pytest.raises(MeasurementError):
            CALLS[path](target)
    CALLS[path](target)
    target.close()
