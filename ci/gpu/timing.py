"""Device time of a step: CUDA events around replays of a captured graph, the L2 flushed before each.

The flush reads: lines that it wrote would be written back to memory inside the step, and be charged to it (37 % more
traffic for a decode of 1 x 32768). A step that writes more than the L2 holds leaves its own last lines there instead,
unpaid; such a step is flushed by writing (``WRITING``), so that it pays at its start what it is spared at its end.

A graph, because the engine decodes under one, and because the Python of a launch would otherwise be timed where a
kernel takes less than 100 us. What cannot be captured is launched as it is. On a CPU: the wall clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

FLUSH_BYTES = 256 * 2**20  # several times the L2 of any GPU known
READING, WRITING = "reading", "writing"
MIN_ROUNDS, MAX_ROUNDS = 5, 200


@dataclass(frozen=True)
class Timing:
    """Seconds a step: median, and the 10th and 90th percentile of ``rounds``."""

    median: float
    p10: float
    p90: float
    rounds: int
    captured: bool

    def as_dict(self) -> dict[str, float | int | bool]:
        """The times for a report, in microseconds."""
        return {
            "us": round(self.median * 1e6, 2),
            "us_p10": round(self.p10 * 1e6, 2),
            "us_p90": round(self.p90 * 1e6, 2),
            "rounds": self.rounds,
            "graph": self.captured,
        }


class Flush:
    """Fills the L2 with lines of a buffer, clean ones (``READING``) or dirty ones (``WRITING``)."""

    def __init__(self, how: str, device: str, size: int = FLUSH_BYTES):
        self._how = how
        self._buffer = torch.ones(size // 4, device=device)
        self._sum = torch.empty((), device=device)

    def __call__(self) -> None:
        if self._how == WRITING:
            self._buffer.zero_()
        else:
            torch.sum(self._buffer, dim=0, out=self._sum)


def measure(
    step: Callable[[], object], device: str, seconds: float = 0.3, capture: bool = True, flush: str = READING
) -> Timing:
    """Time ``step`` for about ``seconds``. ``capture``: try a CUDA graph first."""
    if device == "cpu":
        return _measure_cpu(step, seconds)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = _captured(step) if capture else None
    run = step if graph is None else graph.replay
    flushed = Flush(flush, device)
    first = _rounds_cuda(run, flushed, MIN_ROUNDS)
    rounds = int(seconds / max(statistics.median(first), 1e-6))
    times = first if rounds <= MIN_ROUNDS else _rounds_cuda(run, flushed, min(rounds, MAX_ROUNDS))
    return _timing(times, graph is not None)


def _measure_cpu(step: Callable[[], object], seconds: float) -> Timing:
    step()
    times: list[float] = []
    ends = time.perf_counter() + seconds
    while len(times) < MIN_ROUNDS or (time.perf_counter() < ends and len(times) < MAX_ROUNDS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return _timing(times, False)


def _captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    """Captures the step; None where that fails (it waits for the device, or copies from pageable memory)."""
    graph = torch.cuda.CUDAGraph()
    before, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(before)
    try:
        with torch.cuda.stream(side):
            step()
        before.wait_stream(side)
        with torch.cuda.graph(graph):
            step()
        graph.replay()
    except RuntimeError:
        torch.cuda.set_stream(before)  # a capture that fails leaves its own current
        torch.cuda.synchronize()
        return None
    torch.cuda.synchronize()
    return graph


def _rounds_cuda(run: Callable[[], object], flush: Flush, rounds: int) -> list[float]:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for start, end in pairs:
        flush()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def _timing(times: list[float], captured: bool) -> Timing:
    times = sorted(times)
    last = len(times) - 1
    return Timing(statistics.median(times), times[last // 10], times[last - last // 10], len(times), captured)
