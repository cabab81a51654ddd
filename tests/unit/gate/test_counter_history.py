"""A column of a history as text: nothing is lost, and a person can read it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.gate.counters.history_text import decode, encode

_LEVELS = st.lists(st.tuples(st.integers(-50, 10**9), st.integers(-7, 7), st.integers(1, 12)), max_size=12)


def stretched(levels) -> tuple[int, ...]:
    """Levels, ramps and single values one after another, as columns have them."""
    return tuple(start + slope * i for start, slope, length in levels for i in range(length))


@given(st.one_of(st.lists(st.integers(-3, 3)).map(tuple), _LEVELS.map(stretched)))
def test_what_is_written_is_read_again(values):
    text = encode(values)
    assert decode(text, len(values)) == values
    assert len(text.split()) <= len(values)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((), ""),
        ((4,), "1:4"),
        ((0, 0, 0, 4, 0, 0), "1:0 4*4"),  # one event
        ((0, 0, 4, 4, 0), "1:0 3:4 5:0"),
        ((9, 9, 8, 7, 6, 6), "1:9 3:8-1 6:6"),  # a ramp
        ((10, 12, 14, 16), "1:10+2"),
        ((5, 6), "1:5 2:6"),  # too short for one
        ((0, -1), "1:0 2:-1"),
    ],
)
def test_the_text_says_what_holds_from_which_step_on(values, text):
    assert encode(values) == text
    assert decode(text, len(values)) == values


@pytest.mark.parametrize(
    ("text", "length", "complaint"),
    [
        ("1:0 x", 4, "'x'"),
        ("1:", 4, "'1:'"),
        ("2:0", 4, "'2:0'"),  # what was at step 1?
        ("1:0 3:1 3:2", 4, "'3:2'"),
        ("1:0 5:1", 4, "'5:1'"),
        ("1*3", 4, "no level"),
        ("1:3+1 4*9", 6, "no level"),
        ("", 4, "no values"),
    ],
)
def test_a_garbled_line_is_refused_with_the_word_that_is_wrong(text, length, complaint):
    with pytest.raises(ValueError, match=complaint.replace("*", r"\*").replace("+", r"\+")):
        decode(text, length)
