"""One simulated engine: the built-in engine with a cost model in the place of tensors, on its own virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.simulated_executor import SimulatedExecutor, StepTime, StepWork, VirtualClock
from engine.kv.budget import KVCapacity
from engine.kv.layouts import make_kv_manager
from engine.sequence import Request, SamplingParams, Sequence, TokenOutput
from kvbench.requests.request import RequestSpec

StepTimer = Callable[[StepWork], StepTime]
"""A cost model: the time of a step from its work."""
SettingsByName = Mapping[str, Any]
"""Settings of the engine by name, as a workload's ``engine`` section has them."""


class Replica:
    """An engine of a fleet.

    number: among its replicas
    step_time: its cost model
    clock.now: the end of its last step, which began at ``step_began`` [s]
    """

    def __init__(
        self, config: EngineConfig, capacity: KVCapacity, vocab_size: int, step_time: StepTimer, number: int = 0
    ) -> None:
        self.number = number
        self.clock = VirtualClock()
        self.step_time = step_time
        self.step_began = 0.0
        pipelined = bool(config.async_scheduling)
        self._executor = SimulatedExecutor(vocab_size, step_time, self.clock, pipelined=pipelined)
        config = replace(config, async_scheduling=pipelined)
        self.engine = Engine(config, self._executor, make_kv_manager(config, capacity), self.clock)

    def rewind(self) -> None:
        """Sets the clock of an idle engine back to 0; its prefix cache stays."""
        assert not self.busy
        self._executor.rewind()
        self.step_began = 0.0

    @property
    def busy(self) -> bool:
        return self.engine.has_work()

    def add(self, request_id: str, spec: RequestSpec, at: float) -> Sequence:
        """Queues a request that arrives at ``at`` [s]. Raises ValueError where it can never fit, or the queue is full.

        An idle replica's clock goes on to ``at``; a busy one takes it when its present step ends.
        """
        if not self.busy:
            self.clock.now = max(self.clock.now, at)
        params = SamplingParams(spec.max_tokens, temperature=0.0, ignore_eos=True, **spec.answers)
        ids = spec.prompt_token_ids
        assert ids is not None, "a simulated engine knows tokens only"
        return self.engine.add_request(Request(request_id, ids, params, at, spec.priority))

    def step(self) -> list[TokenOutput]:
        """Computes one step; its tokens are there at ``clock.now``."""
        self.step_began = self.clock.now
        return self.engine.step()

    @property
    def seconds_by_class(self) -> Mapping[str, float]:
        """Of all steps so far: seconds by class of operator, where the cost model tells them."""
        return getattr(self.step_time, "seconds", {})

    @property
    def cost_notes(self) -> list[str]:
        """What a reader must know of the step times, such as how far they lie beyond a measured table."""
        return getattr(self.step_time, "notes", list)()

    @property
    def outstanding(self) -> int:
        """Sequences that run or wait."""
        scheduler = self.engine.scheduler
        return len(scheduler.running) + scheduler.num_waiting + scheduler.num_parked
