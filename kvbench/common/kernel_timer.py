"""Linux's timerfd: a file descriptor that becomes readable at an exact moment of perf_counter's clock."""

from __future__ import annotations

import ctypes
import os

_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1


def _libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        _ = libc.timerfd_create, libc.timerfd_settime
    except (OSError, AttributeError):
        return None
    return libc


_LIBC = _libc()


def kernel_timer() -> int:
    """A timer that is not set yet; -1 where the system has none."""
    return -1 if _LIBC is None else int(_LIBC.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))


def set_timer(fd: int, first: float, period: float = 0.0) -> bool:
    """``fd`` becomes readable at ``first`` [s, perf_counter] and every ``period`` [s] after; False if it cannot."""
    assert _LIBC is not None
    parts = [part for t in (period, first) for part in (int(t), int(t % 1 * 1e9))]
    return int(_LIBC.timerfd_settime(fd, _ABSOLUTE, (ctypes.c_long * 4)(*parts), None)) == 0
