"""The report and `kvbench recommend` on a configuration that was asked at a full pool only."""

from __future__ import annotations

from kvbench.report.quality import qualities
from kvbench.report.recommend import recommend
from kvbench.runs.quality import QualityResult
from kvbench.runs.results import Manifest
from tests.support.quality_results import figures, result, with_quality
from tests.support.report_cells import cell, run
from tests.support.report_parts import answer_quality_table, answer_sentences

BASE, PAGES = cell(), cell(throughput=(120.0, 121.0, 122.0), page_size=64)
WRONG = "2 of its 66 canaries are answered wrongly at a full pool"


def measured(*outside: str, **how: str):
    """The faster one has the figures of the baseline, beside what it answered itself."""
    follower = figures(2e-12, 64, 0.0, 46, 0, *outside) | {"measured": "full_pool", "like": BASE.config_id} | how
    return with_quality(run(BASE, PAGES), {PAGES.config_id: follower})


def test_it_may_be_advised_and_the_report_says_whose_figures_it_has():
    made = measured()
    quality = qualities(made)[PAGES.config_id]
    assert quality.safe and BASE.config_id in str(quality)
    advice = recommend(made)
    assert advice.changed == {"page_size": 16} and advice.quality["safe"]
    _, _, row, _ = answer_quality_table(made).rows
    assert row.values[1].text == "within" and BASE.config_id in row.values[1].note
    assert sum("full" in sentence for sentence in answer_sentences(made)) == 1


def test_wrong_answers_of_its_own_put_it_outside():
    assert qualities(measured(WRONG))[PAGES.config_id].outside == (WRONG,)
    assert recommend(measured(WRONG)).changed == {}


def test_one_that_is_the_same_to_every_answer_was_measured_as_a_whole():
    made = measured(measured="all")
    assert qualities(made)[PAGES.config_id].safe and not made.quality.followers


def test_an_older_file_has_only_figures_of_their_own():
    stored = result({"a": figures()}).to_json()
    assert not {"measured", "like"} & stored["configurations"]["a"].keys()
    again = QualityResult.model_validate(stored)
    assert again.configurations["a"].measured == "all" and again.configurations["a"].like is None
    assert again.differs_from(Manifest()) == []
