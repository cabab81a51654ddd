"""``python -m kvbench_engine.server`` around a device that takes a fixed time a step and none of the host's.

    python -m tests.support.timed_server [the server's flags]
    STEP_S: seconds a step. SWITCH_S: Python's switch interval in the process of the engine's thread.

A step is launched and read as on a GPU: the next one is planned while it runs (``--async-scheduling``), and the wait
for it leaves the interpreter lock to others. What a step takes beyond ``STEP_S`` is the host's.
"""

from __future__ import annotations

import os
import sys
import time

from kvbench_engine.config import EngineConfig
from kvbench_engine.engine import Engine
from kvbench_engine.execution.null_executor import ReplayExecutor
from kvbench_engine.kv.budget import capacity_of
from kvbench_engine.kv.layouts import make_kv_manager
from kvbench_engine.scheduling.step_plan import Draw, StepPlan
from kvbench_engine.server import __main__ as server
from kvbench_engine.server.arguments import build_parser
from tests.support.fake_engine import SHAPE

VOCABULARY = 8192  # of the tokenizer that ships


class _Running:
    """A launched step."""

    def __init__(self, drawn: list[Draw], done_at: float):
        self._drawn, self._done_at = drawn, done_at

    def tokens(self) -> list[Draw]:
        time.sleep(max(0.0, self._done_at - time.perf_counter()))
        return self._drawn


class TimedExecutor(ReplayExecutor):
    """Steps of ``step_s`` seconds, one after another; the tokens are not the point and cost nothing to draw."""

    def __init__(self, step_s: float):
        super().__init__(0, VOCABULARY)
        self._step_s = step_s
        self._free_at = 0.0  # when the device has done all that was launched

    def launch(self, plan: StepPlan) -> _Running:
        self._free_at = max(self._free_at, time.perf_counter()) + self._step_s
        return _Running([262 if item.samples else None for item in plan.scheduled], self._free_at)


def load(config: EngineConfig) -> Engine:
    config = config.check_against_model(4096)
    capacity = capacity_of(config, SHAPE, 256 * 4096 * 64)
    executor = TimedExecutor(float(os.environ["STEP_S"]))
    return Engine(config, executor, make_kv_manager(config, capacity))


if __name__ == "__main__":
    server.SWITCH_SECONDS = float(os.environ.get("SWITCH_S", server.SWITCH_SECONDS))
    server.exit_now(server.run(build_parser().parse_args(sys.argv[1:]), load))
