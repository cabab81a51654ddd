"""Whole reports from synthetic runs: self-contained, escaped, complete, and following the data."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import rich.console

from kvbench.report import build_report, console_table, headline
from kvbench.report.figures import drawings
from kvbench.report.markdown import markdown
from kvbench.report.page import page
from kvbench.report.series import ecdf, log_axis, thin
from kvbench.report.style import looks
from kvbench.runs.model import Run
from kvbench.runs.read import _observe, read_run
from tests.support.synthetic_run import PAIR, VARIANTS, make_run
from tests.support.toy_engine import Scenario

EVIL = '<script>alert("x")</script><img src="https://evil.example/x.png">'


class Page(HTMLParser):
    """Loads, element counts and visible text of a page, as a browser would parse it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.styles: list[str] = []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.inside = tag
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        self.styles += [value or "" for name, value in attrs if name == "style"]

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "style":
            self.styles.append(data)
        elif self.inside != "script":
            self.text.append(data)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_builds(variant: str, run_folder: Callable[[str], Path], page_of: Callable[[str], str]) -> None:
    folder = run_folder(variant)
    assert len(page_of(variant)) < 8_000_000
    assert (folder / "report.md").read_text().startswith(f"**{headline(folder)}**".replace("_", r"\_")[:40])
    run = read_run(folder)
    assert len(pd.read_csv(folder / "summary.csv")) == len(run.cells) if run.cells else True
    assert not list(folder.glob("*.part"))


@pytest.mark.parametrize("variant", ["normal", "foreign", "nothing"])
def test_page_loads_nothing(variant: str, page_of: Callable[[str], str]) -> None:
    parsed = Page(page_of(variant))
    assert [load for load in parsed.loads if not load.startswith(("data:", "#"))] == []
    assert not any("url(" in style or "@import" in style for style in parsed.styles)
    assert parsed.tags.count("h1") == 1


def test_page_shows_verdict_every_cell_and_every_figure(
    run_of: Callable[[str], Run], page_of: Callable[[str], str]
) -> None:
    run = run_of("normal")
    text = " ".join(Page(page_of("normal")).text)
    assert headline(run.folder) in text
    for name in run.configs:
        assert text.count(name) >= len(run.loads)
    assert {d.key for d in drawings(run)} == {
        "headline", "ledger", "cells", "latency", "distributions", "occupancy-closed-24", "occupancy-closed-3",
    }  # fmt: skip


def test_everything_from_outside_is_escaped(make: Callable[..., Run]) -> None:
    run = make(
        workload_name=EVIL,
        text=EVIL,
        repeats=1,
        concurrencies=(3,),
        invalid={"layout-contiguous": (EVIL,)},
    )
    clean = Page(page(make_clean := run_without_evil(run)))
    parsed = Page(page(run))
    assert parsed.tags.count("script") == clean.tags.count("script")
    assert "img" not in parsed.tags
    assert any(EVIL in text for text in parsed.text)
    md = markdown(run)
    outside_code = re.sub(r"```.*?```", "", md, flags=re.S)
    assert "<script" not in outside_code
    assert "<img" not in outside_code
    assert make_clean.workload == "harmless"


def run_without_evil(run: Run) -> Run:
    """The same run with a harmless name, to count elements against."""
    clean = json.loads(json.dumps(run.manifest).replace(json.dumps(EVIL)[1:-1], "harmless"))
    return Run(run.folder, clean, run.cells, run.missing, run.short, run.problems)


def test_labels_of_a_foreign_engine_are_escaped_in_figures(make: Callable[..., Run], tmp_path: Path) -> None:
    run = make(repeats=1, concurrencies=(3,))
    path = run.cells[0].folder / "summary.json"
    summary = json.loads(path.read_text())
    summary["settings"].pop("layout")
    summary["label"] = EVIL
    path.write_text(json.dumps(summary))
    for drawing in drawings(read_run(run.folder)):
        for trace in drawing.figure.data:
            assert "<script" not in (trace.name or "")
    assert "<script>alert" not in page(read_run(run.folder))


def test_markdown_table_has_every_cell(run_of: Callable[[str], Run]) -> None:
    run = run_of("incomplete")
    lines = markdown(run).splitlines()
    start = lines.index("## All cells")
    table = [line for line in lines[start + 2 :] if line.startswith("|")]
    for cell in run.cells:
        assert any(cell.name in line and cell.load.short in line for line in table)
    for missing in run.missing:
        assert any(missing.replace("_", r"\_") in line and "not measured" in line for line in table)
    assert len({line.count(" | ") for line in table[: 2 + len(run.cells) + len(run.missing)]}) == 1


def test_changed_data_change_the_sentence(make: Callable[..., Run]) -> None:
    run = make()
    before = headline(run.folder)
    for cell in run.cells:
        if cell.is_paged:
            path = cell.folder / "summary.json"
            summary = json.loads(path.read_text())
            for repeat in summary["repeats"]:
                repeat["metrics"]["steady_output_throughput"] /= 10
            path.write_text(json.dumps(summary))
    after = headline(run.folder)
    assert "delivered" in before
    assert "was slower than contiguous" in after


def test_single_repeat_of_a_planned_three_is_incomplete(make: Callable[..., Run]) -> None:
    run = make()
    path = run.cells[0].folder / "summary.json"
    summary = json.loads(path.read_text())
    summary["repeats"] = summary["repeats"][:2]
    path.write_text(json.dumps(summary))
    assert read_run(run.folder).short == (f"{run.cells[0].cell_id}: 2 of 3 repeats",)
    assert headline(run.folder).startswith("Incomplete run: ")


def test_unreadable_summary_is_reported_not_fatal(make: Callable[..., Run]) -> None:
    run = make(repeats=1)
    (run.cells[0].folder / "summary.json").write_text('{"cell_id": "x", ')
    broken = read_run(run.folder)
    assert len(broken.cells) == len(run.cells) - 1
    assert "not readable JSON" in " ".join(broken.problems)
    build_report(run.folder)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a results folder.*kvbench sweep"):
        build_report(tmp_path)


def test_colours_are_the_same_whatever_else_was_measured(run_of: Callable[[str], Run]) -> None:
    full, part = looks(run_of("normal")), looks(run_of("no_contiguous"))
    assert full["paged (page 16)"].colour == part["paged (page 16)"].colour
    assert len({look.colour for look in full.values()}) == len(full)


def test_server_means_are_of_the_steady_window(run_of: Callable[[str], Run]) -> None:
    cell = next(c for c in run_of("normal").cells if c.is_contiguous and c.load.value == 24)
    repeat = cell.repeats[0]
    gauges = cell.gauges()
    gauges = gauges[gauges["repeat"] == repeat.repeat]
    inside = gauges["t"].between(repeat.metrics["steady_start_s"], repeat.metrics["steady_end_s"])
    assert 0 < inside.sum() < len(gauges)
    assert repeat.observed["running_mean"] == pytest.approx(gauges[inside]["num_requests_running"].mean())


def test_server_means_are_over_time_where_readings_are_rarer_under_load(run_of: Callable[[str], Run]) -> None:
    gauges = run_of("normal").cells[0].gauges().head(60)
    gauges = gauges.assign(t=0.25 * np.arange(60), kv_slots_total=100.0, kv_slots_used=0.0)
    busy = gauges["t"] >= 7.5
    for name in ("num_requests_running", "kv_slots_used"):
        gauges[name] = np.where(busy, 10.0, 0.0)
    gauges = gauges[~busy | (np.arange(60) % 5 == 4)]  # the last reading is kept
    found = _observe(gauges, {})
    assert gauges["num_requests_running"].mean() < 2.0
    assert found["running_mean"] == pytest.approx(5.0, rel=0.1)  # half of the time 10 ran
    assert found["used_share"] == pytest.approx(0.05, rel=0.1)


def test_uncertain_percentiles_are_marked(run_of: Callable[[str], Run], page_of: Callable[[str], str]) -> None:
    assert "due in the steady window. * too few samples" in page_of("single_repeat")
    cell = run_of("single_repeat").cells[0]
    assert cell.percentile("ttft_ms", "p95")[1]  # 48 samples
    assert not cell.percentile("itl_ms", "p95")[1]  # thousands


def test_console_marks_what_is_invalid_on_the_line_of_its_name(run_folder: Callable[[str], Path]) -> None:
    out = io.StringIO()
    rich.console.Console(file=out, width=80).print(console_table(run_folder("invalid")))
    rows = [line for line in out.getvalue().splitlines() if "contiguous" in line or "paged" in line]
    assert rows and all(("! contiguous" in line) == ("contiguous" in line) for line in rows)
    assert "! invalid measurement" in out.getvalue()


def test_console_table_fits_80_columns_and_names_every_configuration(run_folder: Callable[[str], Path]) -> None:
    out = io.StringIO()
    rich.console.Console(file=out, width=80).print(console_table(run_folder("normal")))
    text = out.getvalue()
    assert "…" not in text
    for word in (
        "contiguous",
        "paged (page 8)",
        "paged (page 64)",
        "prefix caching",
        "24 at once",
        "3 at once",
        "fail",
    ):
        assert word in text


def test_ecdf_keeps_real_points_and_both_ends() -> None:
    samples = np.random.default_rng(0).exponential(10, 50_000)
    x, y = ecdf(samples)
    assert len(x) == 400
    assert (x[0], x[-1], y[-1]) == (samples.min(), samples.max(), 1.0)
    assert y == pytest.approx([(samples <= value).mean() for value in x])
    assert len(ecdf(np.array([]))[0]) == 0


def test_thin_keeps_first_and_last() -> None:
    frame = pd.DataFrame({"t": range(10_000)})
    short = thin(frame)
    assert len(short) <= 400
    assert (short["t"].iloc[0], short["t"].iloc[-1]) == (0, 9_999)


def test_log_axis_ticks_lie_on_one_two_five() -> None:
    axis = log_axis(np.array([12.0, 300.0]))
    assert {10, 20, 50, 100, 200, 500} <= set(axis["tickvals"])
    assert log_axis(np.array([0.0])) == {}


def test_same_seed_same_report(tmp_path: Path) -> None:
    scenario = Scenario(configs=PAIR, repeats=1, num_requests=30, concurrencies=(3,))
    a, b = (read_run(make_run(tmp_path / name / "run", scenario)) for name in ("a", "b"))
    assert markdown(a) == markdown(b)
