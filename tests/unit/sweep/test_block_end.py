"""A block ends where it is told to, and leaves no server."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from kvbench.common.errors import Interrupted
from kvbench.runs.folder import create_run
from kvbench.sweep.block import BlockRunner
from kvbench.targets.base import Target
from kvbench.workload.design import plan_sweep
from kvbench.workload.file import load_workload
from tests.support.sweep_parts import Bench


class Starting(Target):
    """A server whose start takes until it is told to end."""

    def __init__(self):
        self.stop = Mock()

    def start(self, settings, log):
        for _ in range(10):
            self.check()
        pytest.fail("it was not told")


def test_a_start_asks_whether_to_go_on(tmp_path):
    workload = load_workload(Bench(tmp_path).write(sweep={}), profile="cpu")
    _, blocks = plan_sweep(workload, ())
    target, asked = Starting(), []

    def check():
        asked.append(1)
        if len(asked) == 3:
            raise Interrupted("SIGTERM")

    runner = BlockRunner(workload, create_run(tmp_path, "tiny", "none"), lambda: target, Mock(), Mock(), check)
    with pytest.raises(Interrupted):
        runner.run_block(blocks[0])
    target.stop.assert_called_once()
