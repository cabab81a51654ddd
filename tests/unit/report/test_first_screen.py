"""What a reader sees first: answers of at most 12 words with their numbers folded, and what the conclusion means."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvbench.report.answers import ReportAnswer, report_answers
from kvbench.report.decision import Decision
from kvbench.report.document import best_few, document
from kvbench.report.meaning import meaning as meaning_of
from kvbench.report.page import markdown
from kvbench.report.terminal import first_lines
from kvbench.runs.model import MeasuredCell, Run
from tests.support.quality_results import measured_run as run
from tests.support.quality_results import outside, with_quality
from tests.support.records import put
from tests.support.report_cells import FAST, LATE, SLOW, WIDE, cell
from tests.support.report_parts import plain_document

SLO: dict[str, Any] = {"workload": {"load": {"slo": {"ttft_ms": 200.0}}}}


def test_the_numbers_of_an_answer_are_folded_in_markdown_and_below_it_on_a_terminal() -> None:
    report = plain_document(run(cell(), cell("contiguous", throughput=SLOW), cell(page_size=8, throughput=FAST)))
    assert [answer.text for answer in report.answers] == ["Pays: 2.0x tokens/s", "Use 8: +51 % tokens/s"]
    folded = "".join(re.findall(r"<details>.*?</details>", markdown(report), flags=re.S))
    assert folded.count("| what | numbers |") == 1 and "+51 % tokens/s (49 to 54)" in folded
    assert all(f"    {answer.numbers}" in first_lines(report) for answer in report.answers)


def test_a_risk_names_what_is_gained_and_what_is_lost() -> None:
    late = cell(page_size=8, throughput=FAST, ttft=LATE)
    caching = {"enable_prefix_caching": True}
    high, low = cell(throughput=FAST, **caching), cell(load=3, throughput=SLOW, **caching)
    answers = report_answers(Decision.of(run(cell(), cell(load=3), late, high, low)))
    assert [answer.text for answer in answers] == [
        "Keep 16: no other is shown to be better",
        "Pays, at a risk: +51 % tokens/s, but −50 % tokens/s elsewhere",
    ]


def test_a_page_size_that_is_kept_says_why() -> None:
    fast = cell(page_size=8, throughput=FAST)
    unsafe = with_quality(run(cell(), fast), {fast.config_id: outside()})
    wide = run(cell(), cell(page_size=8, throughput=WIDE))
    texts = [report_answers(Decision.of(measured))[0].text for measured in (unsafe, wide)]
    assert texts == ["Keep 16: what is better is not safe", "Keep 16, others not decided"]


def test_a_limit_that_is_not_known_is_not_shown() -> None:
    unknown = plain_document(run(cell(), cell(page_size=8)))
    assert unknown.limits == () and "What limited it" not in markdown(unknown)
    room = {"kv_full": 0.0, "waiting_mean": 0.0, "usage_max": 0.2}
    assert plain_document(run(cell(observed=room), cell(page_size=8, observed=room))).limits


# --- Many configurations in the figure ---


def many() -> Run:
    names = [{"page_size": size} for size in (8, 32, 64, 128)]
    others = [cell(throughput=(100.0 + i, 101.0 + i, 102.0 + i), **how) for i, how in enumerate(names)]
    return run(cell(), *others, cell("contiguous", throughput=SLOW), cell(enable_prefix_caching=True, throughput=FAST))


def test_of_many_configurations_the_best_few_and_the_baseline_are_coloured_and_named() -> None:
    alike = document(run(cell(), cell(page_size=8), cell(page_size=32)))
    assert len(best_few(alike.decision)) == 3 and not any("Grey" in drawing.caption for drawing in alike.first)
    report = document(many())
    few = best_few(report.decision)
    assert few[:2] == ["paged (page 16)", "contiguous"] and "paged (page 16) + enable_prefix_caching True" in few
    (drawn,) = (drawing for drawing in report.first if drawing.key == "frontier")
    panels = {trace.xaxis for trace in drawn.figure.data}
    legend = [trace for trace in drawn.figure.data if trace.showlegend]
    grey = [trace for trace in drawn.figure.data if trace.line.color == "#8A8A8A"]
    assert len(panels) == 2 and len(legend) == len(few) == 5 and len(grey) == 2 * 2
    assert not any(trace.showlegend for trace in grey) and all(trace.name in trace.hovertext[0] for trace in grey)
    assert "Grey" in drawn.caption and drawn.min_width <= 372  # a phone shows it whole


# --- What it means ---


def meaning(measured: Run, price: float | None = None) -> ReportAnswer | None:
    return meaning_of(Decision.of(measured), price)


def served(one: MeasuredCell, goodput: float) -> MeasuredCell:
    """The cell with so many requests/s within the SLO."""
    for repeat in one.repeats:
        put(repeat.metrics, goodput=goodput, duration_s=10.0)
    return one


def better(base: float = 2.0, best: float = 3.0, **how: Any) -> Run:
    cells = served(cell(), base), served(cell(page_size=8, throughput=FAST), best)
    return run(*cells, **how)


def test_within_an_slo_it_means_requests_and_hardware_for_the_same_load() -> None:
    answer = meaning(better(**SLO))
    assert answer is not None
    assert answer.text == "3.0 requests/s within the SLO: 1.5 times the baseline's"
    parts = ("ttft <= 200 ms", "3.00 requests/s", "2.00 requests/s with the baseline", "1.5 times the hardware")
    assert all(part in answer.numbers for part in parts)
    assert "GPU" not in answer.numbers  # of a measured run nobody knows how many a configuration used
    simulated = meaning(better(**SLO, simulated={"device": "A100-80GB", "tensor_parallel": 4}))
    assert simulated is not None and "(6.0 GPUs in place of 4)" in simulated.numbers
    nothing = meaning(better(base=0.0, **SLO))
    assert nothing is not None and nothing.text == "3.0 requests/s within the SLO: none with the baseline"


def test_both_are_taken_at_the_reported_load_and_repeats_that_overlap_tell_no_hardware() -> None:
    low = served(cell(load=3), 2.5), served(cell(page_size=8, load=3, throughput=FAST), 1.0)
    base, fast = served(cell(), 2.0), served(cell(page_size=8, throughput=FAST), 3.0)
    answer = meaning(run(base, fast, *low, **SLO))
    assert answer is not None and "1.5 times" in answer.text and "2.5" not in answer.numbers
    put(base.repeats[0].metrics, goodput=3.0)
    answer = meaning(run(base, fast, **SLO))
    assert answer is not None and "times" not in answer.numbers
    assert answer.text == "3.0 requests/s within the SLO: 2.0 with the baseline"


def test_a_price_alone_means_money_and_beside_an_slo_both() -> None:
    alone = meaning(better(), price=3.6)
    assert alone is not None and alone.text == "6.62 per million output tokens: against 10.0 with the baseline"
    both = meaning(better(**SLO), price=3.6)
    assert both is not None and "a million requests within it cost 333, against 500" in both.numbers


@pytest.mark.parametrize(
    "measured",
    [
        better(),  # neither SLO nor price
        run(served(cell(), 2.0), served(cell(page_size=8), 3.0), **SLO),  # level: nothing is advised
        run(served(cell(), 2.0), cell(page_size=8, throughput=FAST), **SLO),  # no figures of the best
        with_quality(better(**SLO), {cell(page_size=8).config_id: outside()}),  # advised against
    ],
)
def test_without_slo_price_advice_or_figures_it_means_nothing(measured: Run) -> None:
    assert meaning(measured) is None
