"""The light core where Linux's own calls are missing: a load runs, and its times are the server's."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time

import pandas as pd
import pytest

from kvbench.common import kernel_timer
from tests.support.loads import ROOT, SUPPORT, own_mock

LIKE_MACOS = {"PYTHONPATH": f"{SUPPORT / 'like_macos'}{os.pathsep}{ROOT}"}


def test_a_load_without_linuxs_calls_sees_the_servers_times(tmp_path):
    command = [sys.executable, "-m", "kvbench", "load", "--input-len", "32", "--output-len", "8", "--concurrency", "4",
               "--num-prompts", "16", "--no-calibration", "--output-dir", str(tmp_path)]  # fmt: skip
    with own_mock("--ttft-ms", "60", "--itl-ms", "20", "--jitter", "0", **LIKE_MACOS) as (_, url):
        done = subprocess.run([*command, "--url", url], env={**os.environ, **LIKE_MACOS}, capture_output=True,
                              text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode in (0, 4), done.stderr  # 4: a machine that runs other tests is no quiet one
    rows = pd.read_parquet(tmp_path / "requests.parquet")
    ttft = (rows["first"] - rows["ts"]) * 1000
    assert len(ttft) == 16 and ttft.min() >= 59 and ttft.median() < 120
    client = json.loads((tmp_path / "load.json").read_text())["client"]
    assert client["priority"] != "realtime" and client["unstamped_share"] == 1


@pytest.mark.parametrize("has_timerfd", [True, False])
def test_calls_are_made_in_order_and_never_early(has_timerfd, monkeypatch):
    monkeypatch.setattr(kernel_timer, "_HAS_TIMERFD", has_timerfd)
    calls, made = kernel_timer.DueCalls(), []
    now = time.perf_counter()
    for after in (0.09, 0.03, 0.06, 0.0):  # the second is before the one that the timer was set for
        calls.add(now + after, lambda after=after: made.append((after, time.perf_counter() - now)))
    while len(made) < 4 and time.perf_counter() < now + 20:
        if select.select([calls.fd], [], [], 1.0)[0]:
            calls.on_readable()
    os.close(calls.fd)
    assert [after for after, _ in made] == [0.0, 0.03, 0.06, 0.09]
    assert all(late >= after for after, late in made)


@pytest.mark.parametrize("has_timerfd", [True, False])
def test_a_period_ticks_until_it_is_set_anew(has_timerfd, monkeypatch):
    monkeypatch.setattr(kernel_timer, "_HAS_TIMERFD", has_timerfd)
    fd, now, ticks = kernel_timer.kernel_timer(), time.perf_counter(), 0
    kernel_timer.set_timer(fd, now + 0.01, 0.02)
    while ticks < 5 and time.perf_counter() < now + 20:
        if select.select([fd], [], [], 1.0)[0]:
            ticks += int.from_bytes(os.read(fd, 8), "little")
    assert ticks >= 5 and time.perf_counter() - now >= 0.01 + 4 * 0.02
    kernel_timer.set_timer(fd, time.perf_counter() + 1e6)
    while select.select([fd], [], [], 0.1)[0]:
        os.read(fd, 8)
    os.close(fd)
