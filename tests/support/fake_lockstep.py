"""Engines in lockstep without tensors, whose steps take chosen times: in this process, or by ``python -m`` this.

A step takes 10 ms, 1 ms more for each token that it computes, and some noise. Settings of the engine choose what goes
wrong: ``page_size: 32`` dies in a turn, ``page_size: 64`` cannot be opened, ``max_num_batched_tokens: 48`` is 20 %
slower.
"""

from __future__ import annotations

import json
import math
import random
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvbench.lockstep import turns
from kvbench.lockstep.process import EngineFailedError, EngineProcess, EngineRefusedError
from kvbench_engine import lockstep
from kvbench_engine.config import EngineConfig
from tests.support.engine_parts import CountingExecutor, small_engine

_NOW = [0.0]
_READABLE = Path("/dev/null").open()  # noqa: SIM115  # at any moment, as a pipe once its engine has answered


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
                raise SystemExit(3)
            outputs = step()
            slower = 1.2 if config.max_num_batched_tokens == 48 else 1.0
            _NOW[0] += slower * (0.01 + 0.001 * len(outputs)) * noise.gauss(1.0, 0.005)
            return outputs

        engine.step = timed  # type: ignore[method-assign]
        return {"model": {"name": "counting", "vocab_size": 300}, "resolved": {"device": "cpu"}, "versions": {}}


class FakeProcess(EngineProcess):
    """Stands for the process: its engines compute in this one, as starting Python costs more than their steps."""

    alive = True

    def __init__(
        self, command: Any, log: Any, *, check: Any = lambda: None, preloaded: Any = None, **how: Any
    ) -> None:
        self.preloaded, self.protocol, self.greedy_only = preloaded, lockstep.PROTOCOL, False
        self.check, self._commands, self._answers = check, FakeCommands(), deque()
        self.options = frozenset(lockstep.OPTIONS)

    def __exit__(self, *exc: object) -> None: ...

    @property
    def forked(self) -> bool:
        return self.preloaded is not None

    def greet(self) -> None: ...

    def stay_on(self, cores: Any) -> None: ...

    def fileno(self) -> int:
        return _READABLE.fileno()

    def send(self, **command: Any) -> None:
        self._answers.append(json.loads(json.dumps(command)))

    def receive(self, limit_s: float) -> dict[str, Any]:
        self.check()
        try:
            return json.loads(json.dumps(self._commands.do(self._answers.popleft())))
        except ValueError as error:
            raise EngineRefusedError(str(error), self) from None
        except SystemExit as end:
            raise EngineFailedError(f"the engine's process ended with exit code {end.code}", self) from None


def fake_clock(monkeypatch: Any) -> None:
    """Steps take what the fake engines say, whatever the wall says."""
    monkeypatch.setattr(lockstep, "time", SimpleNamespace(perf_counter=lambda: _NOW[0]))
    monkeypatch.setattr(turns, "CLOCKS_DIFFER_S", math.inf)


if __name__ == "__main__":
    lockstep.time = SimpleNamespace(perf_counter=lambda: _NOW[0])  # type: ignore[assignment]
    lockstep.Commands = FakeCommands  # type: ignore[misc]
    lockstep.main()
