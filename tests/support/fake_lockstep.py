"""The lockstep protocol with an engine without tensors, whose steps take chosen times: ``python -m`` this.

A step takes 10 ms, 1 ms more for each token that it computes, and some noise. Settings of the engine choose what goes
wrong: ``page_size: 32`` dies in a turn, ``page_size: 64`` cannot be opened, ``max_num_batched_tokens: 48`` is 20 %
slower.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping
from typing import Any

from engine import lockstep
from engine.config import EngineConfig
from tests.support.engine_parts import CountingExecutor, small_engine

_NOW = [0.0]


class FakeCommands(lockstep.Commands):
    def _open(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        config = EngineConfig.from_mapping(settings)
        if config.page_size == 64:
            raise ValueError("page_size cannot be 64 here")
        engine = small_engine(
            512, CountingExecutor(8192), page_size=config.page_size, max_num_seqs=config.max_num_seqs,
            max_model_len=128, max_num_batched_tokens=64, enable_prefix_caching=config.enable_prefix_caching,
        )  # fmt: skip
        self.engines[name] = lockstep.SteppedEngine(engine)
        step, noise = engine.step, random.Random()

        def timed() -> Any:
            if config.page_size == 32:
                os._exit(3)
            outputs = step()
            slower = 1.2 if config.max_num_batched_tokens == 48 else 1.0
            _NOW[0] += slower * (0.01 + 0.001 * len(outputs)) * noise.gauss(1.0, 0.005)
            return outputs

        engine.step = timed  # type: ignore[method-assign]
        return {"model": {"name": "counting", "vocab_size": 300}, "resolved": {"device": "cpu"}, "versions": {}}


if __name__ == "__main__":
    lockstep.time.perf_counter = lambda: _NOW[0]  # type: ignore[assignment]
    lockstep.Commands = FakeCommands  # type: ignore[misc]
    lockstep.main()
    sys.exit(0)
