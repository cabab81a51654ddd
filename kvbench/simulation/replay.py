"""A measured load again, on a simulated engine with the settings and the requests that it had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.config import EngineConfig
from engine.execution.simulated_executor import StepTime, StepWork
from engine.kv.budget import KVCapacity
from kvbench.requests.request import RequestSpec, conversations, distinct_prefixes
from kvbench.simulation.drive import TURNAROUND_S, Drive, Ended, prime
from kvbench.simulation.replica import Replica, StepTimer

_EVEN_STEP_S = 0.02  # of a replay whose times do not matter; longer than the turnaround


@dataclass(frozen=True)
class ReplayedLoad:
    """What is replayed.

    users: of a closed loop; None: requests are sent at their arrivals, at most ``most_in_flight`` at a time
    primed: the shared prefixes were sent once before the load
    turnaround_s: 0 in engine time
    """

    config: EngineConfig
    capacity: KVCapacity
    vocab_size: int
    requests: Sequence[RequestSpec]
    users: int | None
    most_in_flight: int | None = None
    primed: bool = False
    turnaround_s: float = TURNAROUND_S

    @property
    def repeats_its_steps(self) -> bool:
        """Whether its steps are the same however fast they are computed."""
        return self.users is not None and not any(request.turn for request in self.requests)


def replay(
    load: ReplayedLoad, step_time: StepTimer, on_step: Callable[[float], None] = lambda end: None
) -> list[Ended]:
    """What becomes of the requests, in the order of their indices. ``on_step``: gets the end of each step [s]."""
    replica = Replica(load.config, load.capacity, load.vocab_size, step_time)
    if load.primed:
        prime(replica, distinct_prefixes(load.requests))
    turns = conversations(load.requests)
    if load.users is None:
        turns.sort(key=lambda each: each[0].arrival_s or 0.0)
    ended: list[Ended] = []
    Drive(
        [replica],
        turns,
        ended.append,
        users=load.users,
        most_in_flight=load.most_in_flight,
        turnaround_s=load.turnaround_s,
        began=replica.clock.now,
        on_step=lambda replica, outputs: on_step(replica.clock.now),
    ).run()
    return sorted(ended, key=lambda each: each.spec.index)


def works_of(load: ReplayedLoad) -> tuple[list[StepWork], list[float], list[Ended]]:
    """The work of each step of a load that repeats its steps, when each ended in a replay, and the requests of it."""
    works: list[StepWork] = []
    ends: list[float] = []

    def even(work: StepWork) -> StepTime:
        works.append(work)
        return StepTime(_EVEN_STEP_S)

    ended = replay(load, even, ends.append)
    return works[len(works) - len(ends) :], ends, ended  # without the steps that primed the cache


def step_ends(ends: Sequence[float], ended: Sequence[Ended], token_times: Sequence[Sequence[float]]) -> np.ndarray:
    """When each step of a measured load ended [s], NaN where no token came at its end.

    ends, ended: of a replay, as ``works_of`` returns them
    token_times: of each request in the order of the indices, when each token came [s]; a request with another number
        of tokens than in the replay is left out
    """
    number = {end: index for index, end in enumerate(ends)}
    came: list[list[float]] = [[] for _ in ends]
    for request, times in zip(ended, token_times, strict=True):
        if len(times) == len(request.times):
            for simulated, real in zip(request.times, times, strict=True):
                came[number[simulated]].append(float(real))
    return np.array([np.median(times) if times else np.nan for times in came])
