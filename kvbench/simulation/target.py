"""A simulated engine in the place of a server: what a sweep needs to know of it, and what it is made of."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.planning import window_note
from kvbench.requests.request import RequestSpec
from kvbench.runs.metric_names import SIMULATED_SECONDS as SECONDS
from kvbench.runs.model import SIMULATED
from kvbench.runs.server_info import ServerInfo
from kvbench.simulation.machine import Machine
from kvbench.simulation.replica import Replica
from kvbench.targets.base import ModelFacts, Target
from kvbench.targets.builtin import capacity_facts
from kvbench.targets.prometheus import MetricsSample

BACKEND = CLOCK = SIMULATED


class SimulatedTarget(Target):
    """``start`` makes the engine; nothing is launched, and nothing called over HTTP."""

    starts_cold = True
    replica: Replica

    def __init__(self, machine: Machine, facts: Mapping[str, Any]) -> None:
        self._machine, self._facts = machine, facts
        self.base_url = CLOCK

    def start(self, settings: Mapping[str, Any], log: Path) -> None:
        self._settings = settings
        self.restart()
        length = self.replica.engine.config.max_model_len
        assert length is not None
        self.model = ModelFacts(self._machine.model.name, self._machine.vocab_size, length)

    def restart(self) -> None:
        """A new engine in the place of the last one: nothing of an earlier load is in a figure of the next."""
        self.replica = self._machine.replica(self._settings)

    def stop(self) -> None:
        """There is nothing to stop."""

    def as_sent(self, requests: list[RequestSpec]) -> list[RequestSpec]:
        return requests

    def server_info(self) -> ServerInfo:
        """In the shape of /server_info."""
        engine, spec = self.replica.engine, self._machine.model.spec
        capacity = engine.capacity
        known = capacity_facts(capacity, self.model.max_model_len)
        at_once = known["max_concurrency_at_max_len"]
        told = {
            "engine": dataclasses.asdict(engine.config),
            "resolved": {"device": CLOCK, "device_name": self._machine.title, "dtype": spec.default_dtype},
            "model": {"name": self.model.name, "vocab_size": self.model.vocab_size},
            "capacity": {
                **dataclasses.asdict(capacity),
                "capacity_tokens": capacity.num_slots,
                "max_concurrency_at_max_len": at_once,
            },
            "versions": {"python": platform.python_version()},
            "simulated": dict(self._facts),
        }
        return ServerInfo.read(told)

    def metrics(self) -> MetricsSample:
        """The engine's state, at its own time."""
        from engine.server.metrics import readings

        gauges, counters = readings(self.replica.engine.stats())
        counters |= {f"{SECONDS}{name}": seconds for name, seconds in self.replica.seconds_by_class.items()}
        return MetricsSample(self.replica.clock.now, gauges, counters)

    def reset_prefix_cache(self) -> bool:
        return self.replica.engine.reset_prefix_cache()


def checked(machine: Machine, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What ``check_configuration`` returns, of a simulated engine with these settings. Raises UsageError."""
    config, capacity = machine.settle(settings)
    assert config.max_model_len is not None
    known = {
        "max_model_len": config.max_model_len,
        "vocab_size": machine.vocab_size,
        "dtype": machine.model.spec.default_dtype,
        "window_note": window_note(machine.model.spec, config.max_model_len),
    }
    return known | capacity_facts(capacity, config.max_model_len)
