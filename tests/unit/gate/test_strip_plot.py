"""The pairs in text: each at its place on the scale, worse to the right."""

from __future__ import annotations

import pytest

from kvbench.gate.verdict.strip_plot import legend, strip
from kvbench.gate.verdict.verdict import FAIL, PASS, Finding
from tests.support import verdicts


def finding(**parts: object) -> Finding:
    values: dict[str, object] = {"id": "a", "suite": "cell", "title": "a", "outcome": FAIL, "sentence": "s"}
    return Finding(**{**values, **parts})  # type: ignore[arg-type]


def test_every_pair_interval_and_threshold_lies_at_its_place() -> None:
    drawn = strip(
        finding(
            series=(0.05, 0.05, 0.08, 0.1), change=0.07, interval=(0.04, 0.1), figures={"floor": 0.02, "margin": -0.03}
        ),
        width=101,  # a column a tenth of a percent
    )
    head, dots, effect, axis, ends = drawn
    assert head == "a: FAIL, +7.00 % [+4.00, +10.0]"
    assert {i: mark for i, mark in enumerate(dots) if mark != " "} == {50: "2", 80: "o", 100: "o"}
    assert effect == " " * 40 + "[" + "=" * 29 + "*" + "=" * 29 + "]"
    assert {i: mark for i, mark in enumerate(axis) if mark != "-"} == {0: "0", 20: "F", 30: "M"}
    assert ends.split() == ["0.00", "%", "+10.0", "%"] and len(ends) == 101


def test_where_less_is_worse_the_scale_is_turned() -> None:
    drawn = strip(finding(series=(-0.1, 0.1), higher_is_better=True, figures={"floor": 0.05}), width=101)
    _, dots, axis, ends = drawn
    assert (dots[0], dots[100]) == ("o", "o")
    assert (axis[50], axis[75]) == ("0", "F")  # the floor is a loss of 5 %
    assert ends.split() == ["+10.0", "%", "-10.0", "%"]


def test_many_equal_pairs_are_one_digit() -> None:
    assert strip(finding(series=(0.1,) * 30))[1].strip() == "9"


@pytest.mark.parametrize("series", [(), (float("nan"),)])
def test_without_pairs_there_is_nothing_to_draw(series: tuple[float, ...]) -> None:
    assert strip(finding(series=series, change=0.1)) == []


@pytest.mark.parametrize("series", [(0.0,), (0.0, 0.0), (1e-12, -1e-12), (1e6, -1.0), (float("nan"), 0.1)])
def test_odd_pairs_are_drawn_within_the_width(series: tuple[float, ...]) -> None:
    drawn = strip(finding(series=series, outcome=PASS), width=40)
    assert max(map(len, drawn[1:])) <= 40 and "0" in drawn[-2]


def test_all_is_ascii_but_the_title() -> None:
    assert "".join(strip(verdicts.hostile().findings[0])[1:]).isascii()


def test_the_limit_of_a_ratio_is_drawn_and_the_legend_has_what_is_there() -> None:
    held = finding(series=(-0.1, 0.1), change=0.0, higher_is_better=True, figures={"min_ratio": 0.95})
    assert strip(held, width=101)[-2][75] == "L"  # a loss of 5 % of a scale from +10 to -10 %
    assert legend([held], "repeat") == "o one repeat (a digit: so many)   * what is judged   0 no change   L limit"
    at_most_as_slow = finding(series=(-0.1, 0.1), change=0.0, figures={"max_ratio": 1.0})
    assert strip(at_most_as_slow, width=101)[-2][50] == "L"
    timed = finding(series=(0.1,), change=0.1, interval=(0.0, 0.2), figures={"floor": 0.05, "margin": 0.1})
    assert "95 % interval" in legend([timed]) and legend([timed]).endswith("F floor   M margin")
