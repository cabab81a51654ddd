"""The clock of --max-minutes: work begins only if it fits the time left, and is cut at the end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

LAUNCH = "launch"  # the work of starting one server
ONE_SIDE = "{}: one side"  # of a configuration in a pair


class DeadlineError(Exception):
    """The time of --max-minutes is over, or would be before the next work ends."""


@dataclass
class Clock:
    """The time that is left. ``began``, ``deadline`` [s, time.monotonic]; ``took`` [s]: by kind of work, each time."""

    began: float = field(default_factory=lambda: monotonic())
    deadline: float = math.inf
    took: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, max_minutes: float | None) -> Clock:
        now = monotonic()
        return cls(now, math.inf if max_minutes is None else now + 60 * max_minutes)

    @property
    def elapsed_s(self) -> float:
        return monotonic() - self.began

    @property
    def left_s(self) -> float:
        return self.deadline - monotonic()

    def require(self, seconds: float = 0.0) -> None:
        """Raises DeadlineError where so much time is not left."""
        if seconds > self.left_s:
            raise DeadlineError

    def expected_s(self, work: str, unknown: float = 0.0) -> float:
        """The time that ``work`` takes, by those that it took before; ``unknown`` if it was never done."""
        return longest(self.took.get(work, ())) or unknown

    def attempt_s(self, key: str) -> float:
        """An attempt at both sides of the configuration ``key``: as earlier ones, else two sides, else two launches."""
        return self.expected_s(key, 2 * self.expected_s(ONE_SIDE.format(key), self.expected_s(LAUNCH)))

    @contextmanager
    def spend(self, work: str, unknown: float = 0.0) -> Iterator[None]:
        """Does ``work``, if it can be expected to end in time; how long it took is kept, if it ends."""
        self.require(self.expected_s(work, unknown))
        began = monotonic()
        yield
        self.took.setdefault(work, []).append(monotonic() - began)


def longest(seconds: Sequence[float]) -> float:
    """The longest of several times; the first, in which kernels compile or the client is calibrated, only if alone."""
    return max(seconds[1:] or seconds, default=0.0)
