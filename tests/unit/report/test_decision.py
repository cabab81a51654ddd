"""The first sentence and the answers: at most 25 words, and no advice that the data do not support."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvbench.effects.comparison import Call
from kvbench.metrics.model import CanaryCounts
from kvbench.report.answers import ReportAnswer, count_words, report_answers
from kvbench.report.comparisons import THROUGHPUT, TTFT
from kvbench.report.decision import Decision, Worth
from kvbench.report.headline import MOST_WORDS
from kvbench.report.headline import headline as headline_of
from kvbench.runs.model import MeasuredCell, Run
from tests.support.quality_results import figures, outside, with_quality
from tests.support.quality_results import measured_run as run
from tests.support.report_cells import FAST, FASTER, LATE, SLOW, SOON, WIDE, cell, in_engine_time, refused, wrong
from tests.support.report_cells import run as run_without_quality
from tests.support.report_parts import candidate

BETTER, WORSE, LEVEL, OPEN = Call.BETTER, Call.WORSE, Call.LEVEL, Call.UNDECIDED


def headline(measured: Run) -> str:
    return headline_of(Decision.of(measured))


def answers(measured: Run) -> tuple[ReportAnswer, ...]:
    return report_answers(Decision.of(measured))


FP8: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ({"throughput": FAST}, Worth.PAYS),
        ({"throughput": FAST, "ttft": LATE}, Worth.RISK),
        ({"throughput": FAST, "tpot": (30.0, 30.1, 30.2)}, Worth.RISK),  # the cells' p95 ITL is their TPOT
        ({"throughput": SLOW}, Worth.COSTS),
        ({"throughput": SLOW, "ttft": SOON}, Worth.COSTS),
        ({}, Worth.NO_CHANGE),
        ({"ttft": LATE}, Worth.WORSE_P95),
        ({"ttft": SOON}, Worth.BETTER_P95),
        ({"throughput": WIDE}, Worth.UNDECIDED),
        ({"throughput": WIDE, "ttft": SOON}, Worth.UNDECIDED),  # closed loop: it may be slower
        ({"throughput": WIDE, "ttft": LATE}, Worth.WORSE_P95),
        ({"throughput": (150.0,)}, Worth.UNDECIDED),
    ],
)
def test_the_verdict_weighs_throughput_and_both_p95s(figures: dict[str, Any], verdict: str) -> None:
    base, other = cell(), cell(page_size=8, **figures)
    assert candidate(run(base, other), other).verdict == verdict


TO_4 = {"mode": "open", "load": 4}
AT_3 = cell(load=3), cell(page_size=8, load=3, throughput=SLOW)
LATE_START = {"ttft": (2000.0, 2010.0, 2020.0), **TO_4}
CLOSE = {"throughput": (110.0, 111.0, 112.0)}
BOTH = {"page_size": 32, "kv_cache_dtype": "fp8_e4m3"}
LAG = {"reasons": ("repeat 1: it lagged; do this",)}


def timed(*effects: tuple, **how: Any) -> Run:
    """A baseline and page 8 with these effects (metric, ratio, low, high, call) in engine time; ``how``: its cell."""
    other = cell(page_size=8, **how)
    return run(cell(), other, engine_time=in_engine_time(*((other, *effect) for effect in effects)))


SENTENCES: dict[str, tuple[Run, str, str]] = {
    "ship": (run(cell(), cell(page_size=8, throughput=FAST)), "Ship page 8: +51 %", "p95 TTFT level"),
    "average up, p95 worse": (
        run(cell(), cell(page_size=8, throughput=FAST, ttft=LATE)), "Risk: page 8", "but p95 TTFT +81 %",
    ),
    "slower": (run(cell(), cell(page_size=8, throughput=SLOW)), "Do not ship page 8: −50 %", ""),
    "level": (run(cell(), cell(page_size=8)), "Page 8 makes no difference", "level"),
    "paging is what pays": (run(cell(), cell("contiguous", throughput=SLOW)), "Keep paged (page 16): 2.0x", ""),
    "the best of several": (
        run(cell(), cell("contiguous", throughput=SLOW), cell(page_size=8, **CLOSE)), "Ship page 8", "",
    ),
    "contiguous is the baseline": (
        run(cell(baseline=False), cell("contiguous", throughput=SLOW, baseline=True)), "Ship paged (page 16): 2.0x", "",
    ),
    "of known quality before a faster one of unknown": (
        run(cell(), cell(throughput=FASTER, **FP8), cell(page_size=8, throughput=FAST)), "Ship page 8", "",
    ),
    "wide": (run(cell(), cell(page_size=8, throughput=WIDE)), "Cannot tell page 8", "would most likely"),
    "one repeat": (
        run(cell(throughput=(100.0,)), cell(page_size=8, throughput=(150.0,))), "Cannot tell page 8", "3 repeats",
    ),
    "invalid baseline": (
        run(cell(**LAG), cell(page_size=8, throughput=FAST)), "Cannot tell", "1 of 2 cells is invalid (it lagged)",
    ),
    "wrong answers": (run(wrong(), cell("contiguous", baseline=False)), "Cannot tell", "2 of 40 canaries"),
    "refused": (run(refused(), cell("contiguous", baseline=False)), "Cannot tell", "refused 28 of 48"),
    "alone": (run(cell()), "Paged (page 16): 100 output tokens/s", "nothing to compare"),
    "empty": (run(), "Cannot tell", "no load"),
    "incomplete": (
        run(cell(), cell(page_size=8, throughput=FAST), missing=("a", "b")), "Incomplete: Ship page 8", "",
    ),
    "interrupted": (run(cell(), status="incomplete"), "Incomplete: ", ""),
    "lost at another load": (
        run(cell(), cell(page_size=8, throughput=FAST), *AT_3), "Risk: page 8 brings +51 %", "−50 % tokens/s at 3",
    ),
    "lost twice: the larger loss is named": (
        run(cell(), cell(page_size=8, throughput=FAST, ttft=LATE), *AT_3), "Risk: page 8", "−50 % tokens/s at 3",
    ),
    "lost in the other clock": (
        timed((THROUGHPUT, 1.2, 1.1, 1.3, BETTER), (TTFT, 1.0, 0.99, 1.01, LEVEL), throughput=SLOW),
        "Risk: page 8 brings +20 %", "−50 % tokens/s served",
    ),
    "engine time leaves the p95 open, the served loads do not": (
        timed((THROUGHPUT, 1.2, 1.1, 1.3, BETTER), (TTFT, 1.0, 0.8, 1.2, OPEN), ttft=LATE), "Risk: ", "",
    ),
    "arrivals set the throughput, so a better p95 ships": (
        run(cell(**TO_4), cell(page_size=8, ttft=SOON, tpot=(10.0, 10.1, 10.2), **TO_4)),
        "Ship page 8: p95 TTFT −80 %", "tokens/s level.",
    ),
    "paging with a better p95": (
        run(cell(**TO_4), cell("contiguous", **LATE_START)), "Keep paged (page 16): p95 TTFT −75 %", "",
    ),
    "one p95 better and one worse, seen from the baseline": (
        run(cell(**TO_4), cell("contiguous", tpot=(10.0, 10.1, 10.2), **LATE_START)),
        "Risk: paged (page 16) has p95 TTFT −75 %", "p95 ITL +98 %",
    ),
    "no load was finished": (
        run(engine_time=in_engine_time((cell(page_size=8), THROUGHPUT, 1.1, 1.08, 1.12, BETTER))),
        "Only engine time", "+10 %",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SENTENCES)
def test_the_first_sentence(case: str) -> None:
    measured, begins, has = SENTENCES[case]
    text = headline(measured)
    assert text.startswith(begins) and has in text and count_words(text) <= MOST_WORDS, text


def test_what_cannot_be_told_by_loads_is_told_by_engine_time_with_its_clock() -> None:
    base, other = cell(reasons=("lag",)), cell(page_size=8, reasons=("lag",))
    known = in_engine_time((other, THROUGHPUT, 1.163, 1.126, 1.202, BETTER), (other, TTFT, 0.76, 0.64, 0.91, BETTER))
    text = headline(run(base, other, engine_time=known))
    assert text == "Ship page 8: +16 % tokens/s (13 to 20) in engine time at 24 at once, p95 TTFT −24 %."
    (answer,) = answers(SENTENCES["engine time leaves the p95 open, the served loads do not"][0])
    assert answer.numbers.endswith("served")


def test_nothing_is_advised_before_its_answers_are_known() -> None:
    for name, how in (("FP8 KV (e4m3)", FP8), ("page 8", {"page_size": 8})):
        other = cell(throughput=FAST, **how)
        measured = run_without_quality(cell(), other)
        assert headline(measured).startswith(f"Measure quality before you ship {name}: +51 %")
        assert headline(with_quality(measured)).startswith(f"Ship {name}")
        assert headline(with_quality(measured, {other.config_id: None})).startswith("Measure quality before")
        bad = headline(with_quality(measured, {other.config_id: outside()}))
        assert bad.startswith(f"Do not ship {name}: +51 %") and "outside" in bad and "KLD 0.03" in bad
        random = headline(with_quality(measured, note="random"))
        assert random.startswith(f"Do not ship {name} yet") and "random" in random
    assert headline(run_without_quality(cell(), cell("contiguous", throughput=SLOW))).startswith("Keep paged")


def test_canaries_under_load_speak_for_full_precision_alone() -> None:
    def sent(wrong: int, answered: int = 40, distinct: int = 40, **how: Any) -> MeasuredCell:
        counts = {"sent": 40, "answered": answered, "wrong": wrong, "distinct": min(answered, distinct)}
        return replace(cell(throughput=FAST, **how), canaries=CanaryCounts(**counts))

    assert headline(run_without_quality(cell(), sent(0, page_size=8))).startswith("Ship page 8")
    assert headline(run_without_quality(cell(), sent(1, page_size=8))).startswith("Measure quality")
    assert headline(run_without_quality(cell(), sent(0, **FP8))).startswith("Measure quality")
    assert headline(run_without_quality(cell(), sent(0, 9, page_size=8))).startswith("Measure quality")  # too few
    one = run_without_quality(cell(), sent(0, distinct=1, page_size=8))  # the same one 40 times
    assert headline(one).startswith("Measure quality")
    low = sent(1, page_size=8, load=3)  # of the same configuration
    assert headline(run_without_quality(cell(), sent(0, page_size=8), low)).startswith("Measure quality")


def test_wrong_answers_under_load_count_whatever_was_measured_without_load() -> None:
    """Engine time decides without the load that was answered wrongly."""
    other = wrong(page_size=8)
    known = in_engine_time((other, THROUGHPUT, 1.2, 1.18, 1.22, BETTER))
    text = headline(with_quality(run_without_quality(cell(), other, engine_time=known)))
    assert text.startswith("Do not ship page 8: +20 %") and "wrong answers" in text


def test_a_quality_of_another_commit_is_not_this_runs() -> None:
    other = cell(throughput=FAST, **FP8)
    measured = run_without_quality(cell(), other, git={"sha": "aaa"})
    assert headline(with_quality(measured, git={"sha": "bbb"})).startswith("Do not ship FP8 KV (e4m3) yet")
    assert headline(with_quality(measured, git={"sha": "aaa"})).startswith("Ship FP8 KV")


def test_the_longest_risk_keeps_its_loss() -> None:
    high, low = cell(**BOTH), cell(load=3, ttft=LATE, **BOTH)
    known = in_engine_time((high, THROUGHPUT, 1.16, 1.13, 1.2, BETTER))
    text = headline(run(cell(), high, cell(load=3), low, engine_time=known))
    assert text.endswith("but p95 TTFT +81 % served at 3 at once.") and count_words(text) <= MOST_WORDS


def test_of_several_better_p95s_the_best_ships_and_not_the_one_of_the_highest_throughput() -> None:
    how: dict[str, Any] = {"mode": "open", "load": 4}
    best = cell(page_size=8, ttft=SOON, throughput=(99.9, 100.0, 100.0), **how)
    other = cell(page_size=32, ttft=(400.0, 401.0, 402.0), throughput=(100.2, 100.1, 100.3), **how)
    measured = run(cell(**how), other, best)
    assert headline(measured).startswith("Ship page 8: p95 TTFT −80 %")
    assert answers(measured)[0].verdict == "Use 8"


def test_the_answers_begin_with_paging_and_tell_what_is_not_known() -> None:
    cells = [
        cell(running=18.2, capacity={"capacity_tokens": 6192}),
        cell("contiguous", throughput=SLOW, running=4.0),
        cell(page_size=8, throughput=FAST),
        cell(page_size=64, ttft=LATE),
        cell(throughput=FAST, capacity={"capacity_tokens": 24_768}, **FP8),
        cell(enable_prefix_caching=True, server={"prefix_cache_hits_total": 25.0, "prefix_cache_queries_total": 100.0}),
        *(cell(load=3), cell("contiguous", load=3, throughput=WIDE)),
    ]
    found = {answer.subject: answer for answer in answers(run(*cells))}
    assert list(found) == ["Paging", "Page size", "FP8 KV (e4m3)", "Prefix caching"]
    paging = found["Paging"]
    assert paging.verdict == "Pays" and "18.2 sequences at once as served, against 4.0" in paging.numbers
    assert "not decided at 3 at once" in found["Paging"].numbers
    assert found["Page size"].verdict == "Use 8" and "64: worse p95" in found["Page size"].numbers
    fp8 = found["FP8 KV (e4m3)"]
    assert fp8.verdict == "Pays; quality not measured" and "4.0x the tokens" in fp8.numbers and fp8.mark == ""
    assert (found["Prefix caching"].verdict, "hit rate 25 %" in found["Prefix caching"].numbers) == ("No change", True)


def test_a_gain_that_may_be_as_small_as_level_pays_little_and_open_p95s_are_named() -> None:
    once = {"throughput": (100.0,)}  # no interval as served
    base, little, more = cell(**once), cell(page_size=8, **once), cell(enable_prefix_caching=True, **once)
    effects = in_engine_time(
        (little, THROUGHPUT, 1.025, 1.015, 1.035, BETTER), (little, TTFT, 1.0, 0.99, 1.01, LEVEL),
        (more, THROUGHPUT, 1.025, 1.021, 1.029, BETTER), (more, TTFT, 1.0, 0.9, 1.1, OPEN),
    )  # fmt: skip
    size, caching = answers(run(base, little, more, engine_time=effects))
    assert "8: pays little" in size.numbers and "TTFT" not in size.numbers
    assert (caching.verdict, caching.mark) == ("Pays", "better")
    assert "p95 TTFT and p95 ITL not decided" in caching.numbers


def test_what_was_served_stands_beside_engine_time_only_with_an_interval() -> None:
    def evidence(*rates: float) -> str:
        other = cell(page_size=8, throughput=rates)
        effects = in_engine_time((other, THROUGHPUT, 1.1, 1.08, 1.12, BETTER), (other, TTFT, 1.5, 1.3, 1.7, WORSE))
        (answer,) = answers(run(cell(throughput=tuple(100.0 for _ in rates)), other, engine_time=effects))
        return answer.numbers

    assert "served" not in evidence(80.0, 85.0) and "served −15 %" in evidence(80.0, 85.0, 90.0)
    assert "worse p95 TTFT +50 %" in evidence(80.0)


def test_the_answers_say_what_is_safe() -> None:
    other, page = cell(throughput=FAST, **FP8), cell(page_size=8, throughput=FAST)
    for known, fp8, size in (
        (figures(), ("Pays", "better"), ("Use 8", "better")),
        (outside(), ("Pays; not safe", "worse"), ("Keep 16", "")),
        (None, ("Pays; quality not measured", ""), ("8 pays; quality not measured", "")),
    ):
        measured = with_quality(run(cell(), other, page), dict.fromkeys((other.config_id, page.config_id), known))
        found = {each.subject: (each.verdict, each.mark) for each in answers(measured)}
        assert found == {"FP8 KV (e4m3)": fp8, "Page size": size}
    both = answers(run(cell(), cell(page_size=32, enable_prefix_caching=True, throughput=FAST)))
    assert [(each.subject, each.verdict) for each in both] == [("Page 32 with prefix caching", "Pays")]
    (size,) = answers(run(cell(page_size=None, baseline=True), cell(page_size=8, throughput=(80.0,) * 3)))
    assert size.verdict == "Keep the default"  # no one set it
    mixed = SENTENCES["one p95 better and one worse, seen from the baseline"][0]
    assert [(each.verdict, each.mark) for each in answers(mixed)] == [("One p95 better, one worse", "risk")]
