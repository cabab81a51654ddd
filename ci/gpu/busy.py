"""How busy the GPU is, and with what: nvidia-smi's samples beside a run, and a profiled window."""

from __future__ import annotations

import collections
import contextlib
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

FIELDS = ("utilization.gpu", "power.draw", "clocks.sm", "temperature.gpu")
PERIOD_MS = 200
MAX_KERNELS = 30


class SmiSampler:
    """A context in which ``nvidia-smi`` reads ``FIELDS`` of GPU 0 every ``PERIOD_MS``; it reads, and sets nothing.

    Not for a run that is measured: it stops a busy GPU for 0.25 to 0.33 s (H200, driver 580).
    ``summary`` afterwards: means, ``samples``, empty where there is no nvidia-smi or no sample.
    """

    def __init__(self, enabled: bool):
        self._enabled = enabled and shutil.which("nvidia-smi") is not None
        self._process: subprocess.Popen[str] | None = None
        self.summary: dict[str, float] = {}

    def __enter__(self) -> SmiSampler:
        if self._enabled:
            query = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(
                    [*query, "-lms", str(PERIOD_MS)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            text, _ = self._process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            text, _ = self._process.communicate()
        self.summary = summarise(text)


def summarise(text: str) -> dict[str, float]:
    """Means of the lines of numbers in ``text``; a line that nvidia-smi had not finished is left out."""
    rows = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        with contextlib.suppress(ValueError):
            if len(values) == len(FIELDS):
                rows.append([float(value) for value in values])
    if not rows:
        return {}
    means = {
        field: round(statistics.fmean(column), 1) for field, column in zip(FIELDS, zip(*rows, strict=True), strict=True)
    }
    return means | {"samples": len(rows)}


def covered_share(intervals: Iterable[tuple[float, float]]) -> float | None:
    """Share of the time from the first start to the last end in which at least one (start, end) runs."""
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
    """What ran on the device in a profiled window. Times in microseconds, counts and times a step.

    ``busy_share``: of the window's time; the profiler slows the host down, so the true share is at least this.
    ``kernels``: the ``MAX_KERNELS`` that took longest, by name; ``other_us``: all others. ``count``: of all.
    """

    busy_share: float | None
    kernels: list[dict[str, Any]]
    other_us: float
    count: float


def profiled(events: Iterable[tuple[str, float, float]], steps: int) -> Profile:
    """Of (name, start, end) in microseconds of everything that ran on the device in ``steps`` steps."""
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
