"""Numbers and texts of a verdict, as people read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.gate.verdict import wording
from kvbench.gate.verdict.verdict import FAIL, PASS, Finding, Verdict


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0"), (3.0, "3"), (1234567.0, "1,234,567"), (12.345, "12.3"), (9.996, "10.0"), (99.96, "100"),
        (0.5, "0.500"), (0.00123, "0.00123"), (0.000012345, "1.23e-05"), (-7.126, "-7.13"), (1234.5, "1,234"),
        (2.5e20, "2.50e+20"), (None, "–"), (math.nan, "–"), (math.inf, "–"),
    ],
)  # fmt: skip
def test_numbers_have_three_figures(value: float | None, words: str) -> None:
    assert wording.number(value) == words


@given(st.floats(-1e300, 1e300))
def test_a_number_in_words_is_the_number_to_three_figures(value: float) -> None:
    assert float(wording.number(value).replace(",", "")) == pytest.approx(value, rel=5.1e-3, abs=0)


@pytest.mark.parametrize(
    ("fraction", "words"),
    [
        (0.1012, "+10.1 %"), (-0.0925, "-9.25 %"), (0.00004, "0.00 %"), (-0.00004, "0.00 %"), (0.0, "0.00 %"),
        (1.5, "+150 %"), (0.99949, "+99.9 %"), (0.9996, "+100 %"), (0.09996, "+10.0 %"), (12.5, "+1,250 %"),
        (None, "–"), (math.nan, "–"),
    ],
)  # fmt: skip
def test_changes_in_percent(fraction: float | None, words: str) -> None:
    assert wording.percent(fraction) == words


def test_a_share_has_no_sign() -> None:
    assert wording.percent(0.93, signed=False) == "93.0 %"


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (12.34, "ms", "12.3 ms"),
        (2 * 2**30, "bytes", "2 GiB"),
        (3.0, None, "3"),
        (None, "ms", "–"),
        (0.5, "", "0.500"),
        (3, "count", "3"),
    ],
)
def test_quantities(value: float | None, unit: str | None, words: str) -> None:
    assert wording.quantity(value, unit) == words


@pytest.mark.parametrize(("p", "words"), [(0.00390625, "0.0039"), (1.0, "1"), (0.00001, "< 0.0001"), (None, "–")])
def test_p_values_are_never_zero(p: float | None, words: str) -> None:
    assert wording.probability(p) == words


def test_clean_keeps_what_can_be_read() -> None:
    assert wording.clean("a\r\nb\rc\td é 🚀") == "a\nb\nc\td é 🚀"
    assert wording.clean("\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x07link \x00\x7f\x85\ud800\uffff.") == "red link ."


@given(st.text())
def test_a_line_is_one_line_within_its_limit(text: str) -> None:
    flat = wording.line(text, 20)
    assert len(flat) <= 20 and flat.splitlines() in ([flat], [])


@given(st.text(), st.integers(5, 60))
def test_a_shortened_name_keeps_both_ends(text: str, limit: int) -> None:
    flat, short = wording.line(text), wording.shortened(text, limit)
    assert len(short) <= limit
    if len(flat) <= limit:
        assert short == flat
    else:
        head, tail = short[: short.rindex("…", 0, limit)] if "…" not in flat else "", short[-2:]
        assert flat.startswith(head) and flat.endswith(tail)


def test_bounds_of_a_limit() -> None:
    both = Finding("a", "limit", "a", PASS, "s", unit="ms", figures={"min": 1.0, "max": 250.0})
    assert wording.bounds(both) == ">= 1 ms and <= 250 ms"
    assert wording.bounds(Finding("a", "limit", "a", PASS, "s", unit="ms", figures={"min_ratio": 0.9})) == ">= 0.900"
    assert wording.bounds(Finding("a", "cell", "a", FAIL, "s", figures={"floor": 0.02})) == ""


def test_sides_are_named_once() -> None:
    verdict = Verdict(
        "compare", PASS, "s", base={"name": "main", "sha": "0123456789abcdef"}, candidate={"name": "0123456789ab"}
    )
    assert wording.sides(verdict) == "base main (0123456789ab), candidate 0123456789ab"
    same = Verdict(
        "compare", PASS, "s", base={"name": "0123456", "sha": "0123456789abcdef"}, candidate={"command": "x"}
    )
    assert wording.sides(same) == "base 0123456"
    built = Verdict("compare", PASS, "s", base={"name": "HEAD (0123456)", "sha": "0123456789abcdef"})
    assert wording.sides(built) == "base HEAD (0123456)"


def test_where_no_direction_is_better_the_greater_change_comes_first() -> None:
    up, down, small = (
        Finding(str(change), "counters", "t", FAIL, "s", change=change, higher_is_better=None)
        for change in (0.3, -0.9, 0.1)
    )
    assert wording.worst_first([small, up, down]) == [down, up, small]
    fine = Finding("a", "counters", "t", PASS, "s", change=5.0)
    assert wording.worst_first([fine, small]) == [small, fine]


def test_a_seed_is_written_as_it_is_pasted() -> None:
    assert (
        wording.fact(1905392412, "order_seed") == "1905392412" and wording.fact(1905392412, "steps") == "1,905,392,412"
    )
    assert wording.fact({"seed": 12345, "steps": 12345}) == "seed 12345, steps 12,345"
