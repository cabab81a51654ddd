"""The first step at which two histories differ, and which of two sets of counters moved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.gate.counters.judge import Change, changed_counters, first_difference

_COLUMNS = st.dictionaries(st.sampled_from(["preempted", "free_pages", "running"]), st.just(None), min_size=1)


@st.composite
def pairs(draw):
    """Two histories of the same columns and lengths of their own, alike more often than not."""
    names = draw(_COLUMNS)
    lengths = [draw(st.integers(0, 12)) for _ in range(2)]
    values = {name: draw(st.lists(st.integers(0, 2), min_size=12, max_size=12)) for name in names}
    was = {name: tuple(column[: lengths[0]]) for name, column in values.items()}
    now = {name: list(column[: lengths[1]]) for name, column in values.items()}
    for _ in range(draw(st.integers(0, 2))):
        column = now[draw(st.sampled_from(sorted(now)))]
        if column:
            column[draw(st.integers(0, len(column) - 1))] += draw(st.integers(-1, 1))
    return was, {name: tuple(column) for name, column in now.items()}


@given(pairs())
def test_the_first_difference_is_the_first(histories):
    was, now = histories
    lengths = [len(next(iter(each.values()))) for each in histories]
    rows = [list(zip(*(each[name] for name in sorted(each)), strict=True)) for each in histories]
    expected = next((i for i in range(min(lengths)) if rows[0][i] != rows[1][i]), None)
    difference = first_difference(was, now)
    if expected is not None:
        assert difference.step == expected + 1 and difference.changes
        assert {c.name: (c.was, c.now) for c in difference.changes} == {
            name: (was[name][expected], now[name][expected])
            for name in was
            if was[name][expected] != now[name][expected]
        }
        assert difference.before == ({name: was[name][expected - 1] for name in was} if expected else {})
    elif lengths[0] != lengths[1]:
        assert difference.step == min(lengths) + 1 and not difference.changes
        assert difference.longer == (lengths[0] < lengths[1])
    else:
        assert difference is None


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        (
            {"free_pages": (4, 4), "decode_tokens": (3, 3), "preempted": (0, 0)},
            {"free_pages": (4, 3), "decode_tokens": (3, 2), "preempted": (0, 1)},
            "step 2: preempted 1 (was 0), decode tokens 2 (was 3), free pages 3 (was 4)",  # causes first
        ),
        ({"running": (1, 1)}, {"running": (1, 1), "preempted": (0, 2)}, "step 2: preempted 2 (was 0)"),
        ({"running": (1, 1)}, {"running": (1, 1), "preempted": (0, 0)}, "None"),
        ({"running": (1,)}, {"running": (1, 1)}, "step 2: goes on, had ended"),
        ({"running": (1, 1)}, {"running": (1,)}, "step 2: has ended, went on"),
    ],
)
def test_the_first_difference_names_its_step_and_its_cause(was, now, words):
    assert str(first_difference(was, now)) == words


def test_counters_that_moved_most_come_first_and_sums_over_steps_last():
    was = {"steps": 100, "preempted": 4, "slot_steps_free": 10, "forks": 7}
    now = {"steps": 101, "preempted": 5, "slot_steps_free": 90, "forks": 7, "copied_pages": 2}
    moved = changed_counters(was, now)
    assert moved == [
        Change("copied_pages", 0, 2),
        Change("preempted", 4, 5),
        Change("steps", 100, 101),
        Change("slot_steps_free", 10, 90),
    ]
    assert [str(change) for change in moved[:3]] == [
        "copied pages 0 -> 2 (+2)",
        "preempted 4 -> 5 (+25.0 %)",
        "steps 100 -> 101 (+1.00 %)",
    ]
