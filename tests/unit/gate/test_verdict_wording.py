"""Numbers and texts of a verdict, as people read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.gate.verdict import wording
from kvbench.gate.verdict.verdict import FAIL, PASS, Finding, Verdict
from tests.support import verdicts

WRITTEN = {
    wording.number: [
        (0, "0"), (3.0, "3"), (1234567.0, "1,234,567"), (12.345, "12.3"), (9.996, "10.0"), (99.96, "100"),
        (0.5, "0.500"), (0.00123, "0.00123"), (0.000012345, "1.23e-05"), (-7.126, "-7.13"), (1234.5, "1,234"),
        (2.5e20, "2.50e+20"), (None, "–"), (math.nan, "–"), (math.inf, "–"),
    ],
    wording.percent: [
        (0.1012, "+10.1 %"), (-0.0925, "-9.25 %"), (0.00004, "0.00 %"), (-0.00004, "0.00 %"), (0.0, "0.00 %"),
        (1.5, "+150 %"), (0.99949, "+99.9 %"), (0.9996, "+100 %"), (0.09996, "+10.0 %"), (12.5, "+1,250 %"),
        (None, "–"), (math.nan, "–"),
    ],
    wording.probability: [(0.00390625, "0.0039"), (1.0, "1"), (0.00001, "< 0.0001"), (None, "–")],
    lambda pair: wording.quantity(*pair): [
        ((12.34, "ms"), "12.3 ms"), ((2 * 2**30, "bytes"), "2 GiB"), ((3.0, None), "3"), ((None, "ms"), "–"),
        ((0.5, ""), "0.500"), ((3, "count"), "3"), ((0.25, "share"), "25 %"),
    ],
    lambda value: wording.percent(value, signed=False): [(0.93, "93.0 %")],
    lambda pair: wording.fact(*pair): [  # a seed is written as it is pasted
        ((1905392412, "order_seed"), "1905392412"), ((1905392412, "steps"), "1,905,392,412"),
        (({"seed": 12345, "steps": 12345}, ""), "seed 12345, steps 12,345"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("write", WRITTEN)
def test_numbers_as_people_read_them(write) -> None:
    assert [write(value) for value, _ in WRITTEN[write]] == [words for _, words in WRITTEN[write]]


@given(st.floats(-1e300, 1e300))
def test_a_number_in_words_is_the_number_to_three_figures(value: float) -> None:
    assert float(wording.number(value).replace(",", "")) == pytest.approx(value, rel=5.1e-3, abs=0)


def test_clean_keeps_what_can_be_read() -> None:
    assert wording.clean("a\r\nb\rc\td é 🚀") == "a\nb\nc\td é 🚀"
    assert wording.clean("\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x07link \x00\x7f\x85\ud800\uffff.") == "red link ."


@given(st.text(max_size=100), st.integers(5, 60))
def test_a_line_and_a_shortened_name_keep_their_limit(text: str, limit: int) -> None:
    flat, cut, short = wording.line(text), wording.line(text, limit), wording.shortened(text, limit)
    assert len(cut) <= limit and len(short) <= limit and cut.splitlines() in ([cut], [])
    if len(flat) <= limit:
        assert short == flat == cut
    else:
        assert flat.endswith(short[-2:]) and flat.startswith(cut.removesuffix(" …"))


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ({"name": "main", "sha": "0123456789abcdef"}, "base main (0123456789ab)"),
        ({"name": "0123456", "sha": "0123456789abcdef"}, "base 0123456"),
        ({"name": "HEAD (0123456)", "sha": "0123456789abcdef"}, "base HEAD (0123456)"),
        ({"command": "x"}, ""),
    ],
)
def test_sides_are_named_once(base: dict[str, str], words: str) -> None:
    assert wording.sides(Verdict("compare", PASS, "s", base=base, candidate={"command": "x"})) == words


def test_the_worst_comes_first_and_where_no_direction_is_better_the_greater_change() -> None:
    kwargs = {"metric": "output_throughput", "unit": "tokens/s", "higher": True}
    less, more = (verdicts.timing("a", FAIL, change, **kwargs) for change in (-0.05, 0.5))
    assert wording.worst_first([more, less]) == [less, more]
    up, down, small = (
        Finding(str(change), "counters", "t", FAIL, "s", change=change, higher_is_better=None)
        for change in (0.3, -0.9, 0.1)
    )
    assert wording.worst_first([small, up, down]) == [down, up, small]
    fine = Finding("a", "counters", "t", PASS, "s", change=5.0)
    assert wording.worst_first([fine, small]) == [small, fine]
