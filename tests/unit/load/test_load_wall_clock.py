"""Somebody sets the wall clock while a load runs: no measured time may depend on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.loads import LoadRunner, Result, requests_of, stamps_of

STEP_S = 7200
# Runs in every process below: from the moment that the file is there, the wall clock is ahead, and with it the moments
# of arrival that the kernel notes of packets.
SITE = f"""
import os, socket, struct, time
_real, _flag, _receive, _stamp = time.time, os.environ["STEP_FLAG"], socket.socket.recvmsg, struct.Struct("ll")
def step(): return {STEP_S} if os.path.exists(_flag) else 0
def receive(self, *arguments):
    data, notes, flags, sender = _receive(self, *arguments)
    notes = [(level, kind, _moved(note) if len(note) == _stamp.size else note) for level, kind, note in notes]
    return data, notes, flags, sender
def _moved(note):
    seconds, nanoseconds = _stamp.unpack(note)
    return _stamp.pack(seconds + step(), nanoseconds)
time.time = lambda: _real() + step()
socket.socket.recvmsg = receive
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_stepped_wall_clock_spoils_nothing_and_is_told(loads: LoadRunner, tmp_path: Path, processes: int) -> None:
    """Two hours: more than any time-out of ours or of Locust's, whose heartbeats are compared by the wall clock."""
    site, flag, tag, count = tmp_path / "site", tmp_path / "flag", 7900 + processes, 48
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    spec = loads.spec(requests_of(count, tag, 20), model="mock?itl_ms=10", concurrency=4, processes=processes)
    process = loads.start(spec, PYTHONPATH=str(site), STEP_FLAG=str(flag))
    lines = []
    for line in process.stdout:
        lines.append(line)
        if json.loads(line)["event"] == "progress":
            flag.touch()
    result = Result(process.wait(timeout=120), "".join(lines), process.stderr.read(), spec.parent)
    assert result.code == 0, result.stderr
    load, samples = result.load, result.samples
    assert not load["incomplete"] and samples["ok"].all()
    assert load["wall_clock_step_s"] == pytest.approx(STEP_S, abs=0.5)
    assert "was set by +7200" in load["notes"]["wall_clock"]
    assert 0 < samples["end"].max() <= load["duration_s"] + 0.1 < STEP_S / 10
    stamps, zero = stamps_of(loads.url), load["zero_perf_counter"]
    for i in range(count):
        assert samples["ts"][i] <= stamps[(tag, i)]["received"] - zero <= samples["first"][i]
