"""Measures the GPU's busy share of a profiled window, and the kernels that fill it."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

MAX_KERNELS = 30


def covered_share(intervals: Iterable[tuple[float, float]]) -> float | None:
    """Computes the share of the time, from the first start to the last end, in which any (start, end) runs."""
    ordered = sorted(intervals)
    if not ordered:
        return None
    first, covered, reached = ordered[0][0], 0.0, ordered[0][0]
    for start, end in ordered:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / (reached - first) if reached > first else None


@dataclass(frozen=True)
class Profile:
    """The kernels of a profiled window. Times in microseconds, counts and times a step.

    ``busy_share``: of the window's time; the profiler slows the host down, so the true share is at least this.
    ``kernels``: the ``MAX_KERNELS`` that took longest, by name; ``other_us``: all others. ``count``: of all.
    """

    busy_share: float | None
    kernels: list[dict[str, Any]]
    other_us: float
    count: float


def profiled(events: Iterable[tuple[str, float, float]], steps: int) -> Profile:
    """Makes a profile of (name, start, end) [us] of everything that ran on the device in ``steps`` steps."""
    intervals, by_name = [], collections.defaultdict(list)
    for name, start, end in events:
        intervals.append((start, end))
        by_name[name].append(end - start)
    order = sorted(by_name, key=lambda name: -sum(by_name[name]))
    kernels = [
        {"name": name, "count": len(by_name[name]) / steps, "us": sum(by_name[name]) / steps}
        for name in order[:MAX_KERNELS]
    ]
    other = sum(sum(by_name[name]) for name in order[MAX_KERNELS:]) / steps
    return Profile(covered_share(intervals), kernels, other, len(intervals) / steps)


def profile_device(step: Callable[[], Any], steps: int) -> Profile:
    """Call ``step`` ``steps`` times under torch.profiler."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return profiled(((event.name, event.time_range.start, event.time_range.end) for event in events), steps)
