"""What the progress line of ``kvbench load`` says: nothing stays on it that is over."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvbench.measure.http import DRAIN, PREPARE
from kvbench.sweep.one_load import LoadDisplay


@pytest.mark.parametrize("terminal", [True, False])
def test_each_phase_takes_the_place_of_the_one_before(terminal: bool) -> None:
    out, line = io.StringIO(), []
    told = LoadDisplay(Console(file=out, force_terminal=terminal))
    told._name, told._update = "c4", line.append
    told.say("calibrating the load client")
    assert (line == ["c4: calibrating the load client"]) == terminal  # else it is a line of the log
    assert ("calibrating" in out.getvalue()) != terminal
    seen = []
    for phase in (PREPARE, "begin", DRAIN, "measured"):
        told.load_phase(phase)
        told.load_progress(3, 8, 1, 2.0)
        seen.append(line[-1])
        assert "calibrating" not in line[-1] and "3/8 requests, 1 failed" in line[-1]
    assert len(set(seen)) == 4 and "waiting for the last answers" in seen[2]
