"""A server's own running time: the clock of the load, which stands still while the server is frozen. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

_MOMENTS = ("t0", "ts", "first", "first_output", "first_reasoning", "last", "end")
_LISTS = ("chunk_times", "sent_times")
TIMES = (*_MOMENTS, *_LISTS)  # the columns of requests.parquet that are times


def running_time(times: np.ndarray, frozen: np.ndarray) -> np.ndarray:
    """The time from 0 to each of ``times`` [s] without what lay in ``frozen``; NaN stays. float64, of ``times``' shape.

    A moment while the server was frozen becomes that of the freeze: what arrives then was sent before it, and what is
    sent then waits for nothing that the server does.

    frozen: [intervals, 2] float64: from freeze to thaw [s, on the clock of ``times``], in order and apart.
    """
    times, frozen = np.asarray(times, dtype=float), np.asarray(frozen, dtype=float).reshape(-1, 2)
    if not len(frozen):
        return times
    lasted = frozen[:, 1] - frozen[:, 0]
    lost = np.column_stack([np.cumsum(lasted) - lasted, np.cumsum(lasted)])  # at each freeze, and at its thaw
    return times - np.interp(times, frozen.ravel(), lost.ravel()) + np.interp(0.0, frozen.ravel(), lost.ravel())


def in_running_time(requests: pd.DataFrame, frozen: np.ndarray) -> pd.DataFrame:
    """Rows of requests.parquet (times since load start [s]) with every time as ``running_time`` tells it."""
    stored = [name for name in _MOMENTS if name in requests]  # files of earlier versions lack some
    moments = {name: running_time(requests[name].to_numpy(dtype=float), frozen) for name in stored}
    lists = {
        name: [None if each is None else running_time(np.asarray(each, dtype=float), frozen) for each in requests[name]]
        for name in _LISTS
    }
    return requests.assign(**moments, **lists)
