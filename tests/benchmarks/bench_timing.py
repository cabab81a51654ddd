"""How much the benchmarks measure (KVBENCH_BENCH), and one function timed in turns with its rivals.

full (default): the whole matrix, about 10 minutes on 2 cores.  quick: the corners of it, about 4 minutes.
smoke: everything once and tiny, seconds; its figures mean nothing, it shows that the benchmarks still run.

What is compared takes turns: between two rounds of the function that pytest-benchmark times, each rival runs once
(a slow one now and then), so that a machine that slows down slows all of them. Figures are the fastest round of each:
what disturbs a round only ever makes it slower. A test spends a time budget, not a number of rounds.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

T = TypeVar("T")
Step = Callable[[], object]
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
MODE = os.environ.get("KVBENCH_BENCH", "full")


def choose(*, full: T, quick: T, smoke: T) -> T:
    """What the mode asks for."""
    return {"full": full, "quick": quick, "smoke": smoke}[MODE]


BUDGET_S = choose(full=0.5, quick=0.4, smoke=0.01)
MIN_ROUNDS, MAX_ROUNDS = 5, 300
LAUNCHES = 10  # in one round on a GPU, so that waiting for it is not what is timed


def wait() -> None:
    """Until the GPU is done; nothing on a CPU."""
    if CUDA:
        torch.cuda.synchronize()


def timed(step: Step) -> float:
    """Seconds until the device has done ``step``."""
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


def as_round(step: Step, capture: bool) -> tuple[Step, int]:
    """What one round runs and how many times ``step`` is in it.

    On a GPU, with ``capture``, a CUDA graph of ``LAUNCHES`` times ``step``: an engine's decode runs under one, and so
    Python's launches are in neither's time.
    """
    if not (CUDA and capture):
        return step, 1
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as torch wants it before a capture
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            step()
    return graph.replay, LAUNCHES


def plan_rounds(own_s: float, rivals_s: Mapping[str, float], budget_s: float) -> tuple[int, dict[str, int]]:
    """How many rounds the budget buys, and for each rival: it runs in every so many of them.

    ``own_s`` and ``rivals_s``: seconds of one round of each. A rival slower than twice the function runs less often,
    but ``MIN_ROUNDS`` times all the same.
    """
    allowed = max(2 * own_s, budget_s / 50)
    every = {name: max(1, math.ceil(cost / allowed)) for name, cost in rivals_s.items()}
    per_round = own_s + sum(cost / every[name] for name, cost in rivals_s.items())
    count = max(MIN_ROUNDS, min(MAX_ROUNDS, int(budget_s / per_round)))
    return count, {name: min(n, max(1, count // MIN_ROUNDS)) for name, n in every.items()}


def race(
    benchmark, step: Step, rivals: Mapping[str, Step], *, budget_s: float = BUDGET_S, capture: bool = True
) -> tuple[float, dict[str, float]]:
    """Seconds of one ``step`` and of one of each rival, each the fastest of its rounds, taken alternately."""
    own, launches = as_round(step, capture)
    others = {name: as_round(rival, capture) for name, rival in rivals.items()}
    for run, _ in ((own, launches), *others.values()):
        run()  # what the first call compiles or allocates
    rounds, every = plan_rounds(timed(own), {name: timed(run) for name, (run, _) in others.items()}, budget_s)
    fastest = dict.fromkeys(rivals, math.inf)
    numbers = itertools.count()

    def rivals_turn() -> None:
        number = next(numbers)
        for name, (run, count) in others.items():
            if number % every[name] == 0:
                fastest[name] = min(fastest[name], timed(run) / count)

    def own_turn() -> None:
        own()
        wait()

    benchmark.pedantic(own_turn, setup=rivals_turn, rounds=rounds, iterations=1)
    return benchmark.stats.stats.min / launches, fastest


def note(benchmark, **figures: object) -> None:
    """Put ``figures`` into ``extra_info``, floats with four significant digits, and say them in one line."""
    rounded = {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in figures.items()
        if value is not None
    }
    benchmark.extra_info.update(rounded)
    print(f"  {benchmark.name}: " + ", ".join(f"{name} {value}" for name, value in rounded.items()), flush=True)
