"""Whatever a run measured, it is answered in few words, and nothing is advised that is doubtful or worse anywhere."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.effects.comparison import Call
from kvbench.report import answers, headline
from kvbench.report.answers import count_words, report_answers
from kvbench.report.comparisons import JUDGED
from kvbench.report.decision import Decision, Worth
from kvbench.report.recommend import recommend
from kvbench.report.recommend_lines import lines
from kvbench.runs.model import Run
from kvbench.runs.read import read_run
from tests.support.decisions import reference_runs
from tests.support.quality_results import figures, outside, with_quality
from tests.support.report_cells import FAST, FASTER, LATE, SLOW, SOON, WIDE, cell, in_engine_time
from tests.support.report_cells import run as run_of
from tests.support.report_parts import candidate, change

FP8, PREFIX = {"kv_cache_dtype": "fp8_e4m3"}, {"enable_prefix_caching": True}
SETTINGS = (
    {"page_size": 8}, FP8, PREFIX, {"page_size": 8, **PREFIX}, {"kv_cache_dtype": "int4_per_token_head"},
    {"page_size": 2048, "scheduling_policy": "priority", **FP8, **PREFIX},
)  # fmt: skip
RATES = st.sampled_from([(100.0,) * 3, FAST, FASTER, SLOW, WIDE, (150.0,)])
TIMES = st.sampled_from([(500.0,) * 3, LATE, SOON, (100.0, 500.0, 2500.0)])
EFFECTS = st.tuples(st.sampled_from(JUDGED), st.floats(0.01, 99.0), st.sampled_from(Call))


@st.composite
def measured_runs(draw: st.DrawFn) -> Run:
    """A baseline and some of SETTINGS at two loads, effects in engine time of some, a quality that may be known."""
    cells = [cell(load=load) for load in (3, 24)]
    for how in draw(st.lists(st.sampled_from(SETTINGS), min_size=1, unique_by=str)):
        for load in draw(st.sampled_from([(3, 24), (24,), (3,)])):
            cells.append(cell(load=load, throughput=draw(RATES), ttft=draw(TIMES), **how))
    if draw(st.booleans()):
        cells.append(cell("contiguous", throughput=draw(RATES), ttft=draw(TIMES)))
    timed = draw(st.lists(st.tuples(st.sampled_from(cells[2:]), EFFECTS), max_size=6))
    effects = [(one, metric, ratio, 0.9 * ratio, 1.1 * ratio, call) for one, (metric, ratio, call) in timed]
    known = in_engine_time(*effects) if effects else None
    qualities = {one.config_id: draw(st.sampled_from([None, figures(), outside()])) for one in cells}
    missing = ("x",) if draw(st.booleans()) else ()
    measured = run_of(*cells, engine_time=known, missing=missing, command=["kvbench", "sweep", "workloads/mixed.yaml"])
    return with_quality(measured, qualities)


@given(measured_runs())
@settings(max_examples=40, deadline=None)
def test_answers_are_short_and_what_is_advised_loses_nowhere(measured: Run) -> None:
    decision, said = Decision.of(measured), recommend(measured)
    first = headline.headline(decision)
    assert count_words(first) <= headline.MOST_WORDS, first
    for answer in report_answers(decision):
        assert answer.numbers and count_words(answer.text) <= answers.MOST_WORDS, answer.text
    assert decision.load is not None
    chosen = measured.cell(said.configuration, decision.load)
    assert chosen is not None and measured.quality is not None
    known = measured.quality.configurations.get(chosen.config_id)
    assert said.settings == ({} if known and known.outside else chosen.settings)  # of a baseline outside, none
    assert ("Ship " in first) == (not chosen.is_baseline), first  # the report says the same
    if not chosen.is_baseline:
        assert candidate(measured, chosen).verdict in (Worth.PAYS, Worth.BETTER_P95)
        everywhere = [one for one in measured.cells if one.name == chosen.name]
        calls = {found.call for one in everywhere for metric in JUDGED if (found := change(measured, one, metric))}
        assert Call.WORSE not in calls and Call.BETTER in calls and known and known.outside == ()
    json.dumps(said.effects), lines(said)


@pytest.mark.full
def test_answers_of_reference_runs_are_short() -> None:
    for name, folder in reference_runs():
        for answer in report_answers(Decision.of(read_run(folder))):
            assert answer.numbers and count_words(answer.text) <= answers.MOST_WORDS, (name, answer.text)
