"""Figures are registered: each has a chapter, and one that is added stands in the report without a change elsewhere."""

from __future__ import annotations

import plotly.graph_objects as go
import pytest

from kvbench.report.document import document
from kvbench.report.figures.registry import FIGURES, ReportFigure
from kvbench.report.style import Drawing, finish
from tests.support.report_cells import cell, run


@pytest.mark.parametrize(("chapter", "new"), [("All cells", False), ("Of my own", True)])
def test_a_figure_that_is_added_is_drawn_in_its_chapter(monkeypatch, chapter: str, new: bool) -> None:
    made = Drawing("mine", "A title", "A caption.", finish(go.Figure(go.Bar(x=[1], y=[2])), 200))
    titles = [one.title for one in document(run(cell())).chapters]
    monkeypatch.setitem(FIGURES, "mine", ReportFigure("mine", chapter, lambda decision: [None, made]))
    chapters = {one.title: one for one in document(run(cell())).chapters}
    assert [drawing.key for drawing in chapters[chapter].drawings] == ["mine"]
    assert set(chapters) - set(titles) == ({chapter} if new else set())


def test_every_figure_has_a_name_of_its_own_and_draws_nothing_without_data() -> None:
    assert [figure.name for figure in FIGURES.values()] == list(FIGURES)
    assert all(not chapter.drawings for chapter in document(run(cell())).chapters)
