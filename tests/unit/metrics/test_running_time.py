"""A server's running time: what lay in its freezes is left out, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.metrics.running_time import TIMES, in_running_time, running_time
from tests.support.request_rows import frame, row

LENGTHS = st.lists(st.floats(0.001, 5.0), min_size=0, max_size=24)
MOMENTS = st.lists(st.floats(-5.0, 100.0), min_size=1, max_size=30)


def log_of(begin: float, lengths: list[float]) -> np.ndarray:
    """Freezes of every other of ``lengths`` [s], one after the other from ``begin`` on."""
    edges = begin + np.cumsum([0.0, *lengths])
    return np.array([(a, b) for a, b in zip(edges[:-1:2], edges[1::2], strict=False)]).reshape(-1, 2)


def by_hand(time: float, frozen: np.ndarray) -> float:
    """From 0 to ``time`` (or back), what is outside of the freezes."""
    low, high = min(0.0, time), max(0.0, time)
    inside = sum(max(0.0, min(high, thaw) - max(low, freeze)) for freeze, thaw in frozen)
    return float(np.sign(time)) * (high - low - inside)


@given(MOMENTS, st.floats(-3.0, 3.0), LENGTHS)
def test_it_is_the_time_outside_of_the_freezes(times, begin, lengths):
    frozen = log_of(begin, lengths)
    found = running_time(np.array(times), frozen)
    assert found == pytest.approx([by_hand(time, frozen) for time in times], abs=1e-9)
    order = np.argsort(times)
    assert (np.diff(found[order]) >= -1e-9).all()  # never backwards
    assert (np.diff(found[order]) <= np.diff(np.array(times)[order]) + 1e-9).all()  # and never faster than the wall
    if not len(frozen):
        assert found.tolist() == times


@given(st.lists(st.floats(0.001, 5.0), min_size=2, max_size=24))
def test_the_whole_is_the_sum_of_the_slices(lengths):
    frozen, end = log_of(0.0, lengths), sum(lengths)
    assert running_time(np.array([end]), frozen)[0] == pytest.approx(sum(lengths[1::2]))


def test_what_arrives_in_a_freeze_has_the_moment_of_the_freeze():
    found = running_time(np.array([0.9, 1.0, 1.5, 2.0, 2.25, np.nan]), np.array([[1.0, 2.0]]))
    assert found[:5].tolist() == [0.9, 1.0, 1.0, 1.0, 1.25] and np.isnan(found[5])


def test_a_load_begun_in_a_freeze_begins_with_the_thaw():
    assert running_time(np.array([0.0, 0.5, 1.0]), np.array([[-1.0, 0.5]])).tolist() == [0.0, 0.0, 0.5]


def test_every_time_of_a_request_is_mapped_and_a_missing_one_stays():
    given_rows = frame(
        row(ts=0.5, t0=0.25, first=3.5, first_output=4.5, first_reasoning=4.0, chunk_times=[3.5, 4.5], end=5.0),
        row(ts=4.0, t0=4.0, end=5.0),
    )
    for name in TIMES:
        if name not in given_rows:
            given_rows[name] = None
    found = in_running_time(given_rows, np.array([[1.0, 3.0]]))
    moments = ["t0", "ts", "first", "first_output", "first_reasoning", "end"]
    assert found[moments].iloc[0].tolist() == [0.25, 0.5, 1.5, 2.5, 2.0, 3.0]
    later = ["first_output", "first_reasoning"]  # were stored from some version on
    before = in_running_time(given_rows.drop(columns=later), np.array([[1.0, 3.0]]))
    assert before["first"].equals(found["first"]) and not {*later} & {*before}
    assert list(found["chunk_times"].iloc[0]) == [1.5, 2.5] and found["sent_times"].iloc[0] is None
    assert found["output_tokens"].tolist() == given_rows["output_tokens"].tolist()
