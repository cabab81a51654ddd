"""Whole reports: one page that loads nothing and escapes all, what the terminal shows, and what is not overwritten."""

from __future__ import annotations

import html
import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from plotly.offline import get_plotlyjs_version
from rich.console import Console

from kvbench.cli.main import cli
from kvbench.common.console import print_table
from kvbench.common.errors import UsageError
from kvbench.report.cells import flat_rows
from kvbench.report.document import Document, document
from kvbench.report.figures.registry import FIGURES
from kvbench.report.headline import headline
from kvbench.report.page import PLOTLY_JS, markdown, page, template_file, write_report
from kvbench.report.style import looks
from kvbench.report.terminal import DROP_FIRST, console_table
from kvbench.runs.model import MeasuredCell, Run
from kvbench.runs.read import read_run
from tests.support.records import put, take
from tests.support.report_cells import cell, refused, wrong
from tests.support.report_cells import run as run_of_cells
from tests.support.report_parts import (
    frontier_drawing,
    frontier_frame,
    ledger_drawing,
    plain_document,
    timeline_drawing,
)
from tests.support.synthetic_run import PAIR, make_run
from tests.support.toy_engine import Scenario

EVIL = '<script>alert("x")</script><img src="https://evil.example/x.png">'


def without_scripts(page_: str) -> str:
    return re.sub(r"<script.*?</script>", "", page_, flags=re.S)


def visible(page_: str) -> str:
    """The text that a reader sees."""
    return html.unescape(re.sub(r"<[^>]*>", " ", without_scripts(page_)))


def printed(report: Document, width: int = 80, **how: object) -> str:
    """The table on a terminal."""
    out = io.StringIO()
    terminal = Console(file=out, width=width, **({"force_terminal": True, "color_system": None} | how))  # type: ignore
    print_table(terminal, console_table(report), drop_first=DROP_FIRST)
    return out.getvalue()


def of_whole_runs(*cells: MeasuredCell) -> None:
    """Takes the steady window from cells."""
    for one in cells:
        for repeat in one.repeats:
            put(repeat.metrics, output_throughput=take(repeat.metrics, "steady_output_throughput"))


# --- The two pages ---


def test_a_page_has_every_part_once_and_loads_nothing(document_of: Callable[[str], Document]) -> None:
    report = document_of("normal")
    run = report.decision.run
    write_report(report, run.folder)
    assert {path.name for path in run.folder.iterdir()} == {
        "cells", "manifest.json", "quality.json", "report.html", "report.md", "summary.csv",
    }  # fmt: skip
    source, text = ((run.folder / f"report.{kind}").read_text() for kind in ("html", "md"))
    plain, seen = without_scripts(source), visible(source)
    assert len(source) < 8_000_000 and plain.count("<h1>") == 1 and headline(report.decision) in seen
    assert "<script src" not in source and "url(" not in plain and "@import" not in plain
    loads = re.findall(r'\b(?:src|href|srcset|action|data)="([^"]*)"', plain)
    assert loads and all(load.startswith(("data:", "#")) for load in loads)
    keys = ["effects", "frontier", "quality", "ledger", "kv-timeline-closed-24", "kv-timeline-closed-3"]
    assert [drawing.key for drawing in report.drawings] == [*keys, "distributions", "slowest"]
    assert all(source.count(f'<figure id="{drawing.key}">') == 1 for drawing in report.drawings)
    in_page = [re.sub(r" <small>.*", "", title) for title in re.findall(r"<h2>(.*?)</h2>", source)]
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == in_page
    assert source.count('<p class="numbers">') == len(report.answers)
    assert text.startswith(f"# {run.workload}\n") and len(pd.read_csv(run.folder / "summary.csv")) == len(run.cells)
    assert all(seen.count(name) >= len(run.loads) for name in run.configs)
    version = get_plotlyjs_version()
    assert f"-{version}." in PLOTLY_JS and f"v{version}\n" in template_file(PLOTLY_JS)[:100]


def test_everything_from_outside_is_escaped(tmp_path: Path) -> None:
    evil = Scenario(
        configs=PAIR, workload_name=EVIL, text=EVIL, repeats=1, concurrencies=(3,), num_requests=30,
        invalid={"layout-contiguous": (EVIL,)},
    )  # fmt: skip
    run = read_run(make_run(tmp_path / "run", evil))
    path = run.cells[0].folder / "summary.json"
    summary = json.loads(path.read_text())
    summary["settings"].pop("layout")
    path.write_text(json.dumps(summary | {"label": EVIL, "notes": {"text": EVIL}}))
    run = read_run(run.folder)
    server = refused(20, "<img src=x> | full", load=9)
    report = document(replace(run, cells=(*run.cells, server)))
    text = page(report)
    assert "<script>alert" not in text and "<img" not in without_scripts(text) and EVIL in visible(text)
    assert "28 of 48" in text and "&lt;img src=x&gt; | full" in text
    outside_code = re.sub(r"```.*?```", "", markdown(report), flags=re.S)
    assert "<script" not in outside_code and "<img" not in outside_code and "28 of 48" in outside_code
    traces = [trace for drawing in report.drawings for trace in drawing.figure.data]
    assert not any("<script" in (trace.name or "") for trace in traces)


# --- The document ---


STATES = {"incomplete": "incomplete", "open_loop": "valid", "foreign": "valid", "nothing": "empty"}


@pytest.mark.parametrize("variant", STATES)
def test_every_run_has_a_report(variant: str, document_of: Callable[[str], Document]) -> None:
    report = document_of(variant)
    assert report.status == STATES[variant] and report.verdict == headline(report.decision)
    assert markdown(report).splitlines()[0] == f"# {report.title}"


def test_the_questions_that_a_run_cannot_answer_are_named() -> None:
    def baseline(*cells: MeasuredCell, **manifest: str) -> str:
        return plain_document(run_of_cells(*cells, **manifest)).baseline

    assert baseline(cell(), cell("contiguous")).endswith("; not varied: page size and KV dtype")
    every = cell(), cell("contiguous"), cell(page_size=8), cell(kv_cache_dtype="fp8_e4m3")
    assert "not varied" not in baseline(*every)
    other = replace(cell(), settings={"kv_cache_dtype": "auto"})  # nothing else is known of it
    assert baseline(other, backend="vllm").endswith("not varied: KV dtype")


def test_what_is_invalid_or_missing_is_counted_and_its_reasons_are_details() -> None:
    report = plain_document(run_of_cells(cell(), cell("contiguous", reasons=("repeat 1: it lagged",)), missing=("x",)))
    assert report.status == "invalid" and "1 of 3 cells valid" in report.counted
    assert any("it lagged" in text for text in report.details)


def test_markdown_has_every_cell_and_every_missing_one(document_of: Callable[[str], Document]) -> None:
    report = document_of("incomplete")
    run, lines = report.decision.run, markdown(report).splitlines()
    start = lines.index("## All cells") + 2
    table = lines[start : lines.index("", start)]
    assert all(any(one.name in line and one.load.short in line for line in table) for one in run.cells)
    for missing in run.missing:
        assert any(missing.replace("_", r"\_") in line and "not measured" in line for line in table)
    assert len(table) == 2 + len(run.cells) + len(run.missing) and len({line.count(" | ") for line in table}) == 1


def test_limits_of_goodput_and_what_was_not_run_are_said_once() -> None:
    slo = {"load": {"slo": {"ttft_ms": 200.0, "tpot_ms": 50.0}}}
    text = markdown(plain_document(run_of_cells(cell(), workload=slo, notes=["skipped a: b"])))
    assert "requests/s that met ttft &lt;= 200 ms and tpot &lt;= 50 ms" in text
    assert "Not run" in text and text.split("Manifest</summary>")[0].count("skipped a: b") == 1


def test_the_axis_says_whole_run_where_no_window_was_steady() -> None:
    run = run_of_cells(cell(), cell("contiguous"))
    assert "output tokens/s" in _axes(run) and "whole run" not in _axes(run)
    of_whole_runs(*run.cells)
    assert "output tokens/s (whole run)" in _axes(run)


def _axes(shown: Run) -> str:
    """All texts of axes and panels of the frontier."""
    return json.dumps(json.loads(frontier_drawing(shown, frontier_frame(shown)).figure.to_json())["layout"])


def test_a_server_that_tells_nothing_of_its_kv_has_no_figure_of_it(make: Callable[..., Run]) -> None:
    made = make(repeats=1, concurrencies=(3,), num_requests=10)
    assert timeline_drawing(made, made.loads[0]) and ledger_drawing(made)
    for column, found in (("kv_cache_usage_perc", True), ("t", False)):  # another engine tells its usage alone
        for one in made.cells:
            path = one.folder / "server.parquet"
            known = ["t", "repeat", "num_requests_running", "num_requests_waiting", column]
            pd.read_parquet(path)[list(dict.fromkeys(known))].to_parquet(path)
        shown = read_run(made.folder)
        assert ledger_drawing(shown) is None and (timeline_drawing(shown, shown.loads[0]) is not None) == found


def test_every_figure_has_a_name_of_its_own_and_draws_nothing_without_data() -> None:
    assert [figure.name for figure in FIGURES.values()] == list(FIGURES)
    assert all(not chapter.drawings for chapter in document(run_of_cells(cell())).chapters)


def test_colours_are_the_same_whatever_else_was_measured() -> None:
    pages = [cell(page_size=size) for size in (8, 64)]
    full, part = looks([cell(), cell("contiguous"), *pages]), looks([cell(), *pages])
    assert full["paged (page 16)"].colour == part["paged (page 16)"].colour
    assert len({look.colour for look in full.values()}) == len(full)


# --- The terminal ---


@pytest.mark.parametrize("width", [60, 80])
def test_a_terminal_shows_whole_columns_and_names_the_others(document_of: Callable[[str], Document], width) -> None:
    text = printed(document_of("normal"), width)
    assert max(map(len, text.splitlines())) <= width and "…" not in text and "! " not in text
    heads = next(line for line in text.splitlines() if "configuration" in line)
    assert all(head in heads for head in ("tok/s", "ratio", "p95 TTFT", "fail"))
    named = text.partition("not shown at this width: ")[2].strip()
    assert set(filter(None, named.split(", "))) == ({"run", "preempt", "TPOT"} if width == 60 else set())
    assert ("TPOT" in heads) == (width == 80) and re.search(r"\d\.\d\dx\? \(\d\.\d\d–\d\.\d\d\)", text)


def test_the_console_explains_its_marks_once_and_only_where_they_are() -> None:
    def shown(*cells: MeasuredCell) -> str:
        return printed(plain_document(run_of_cells(*cells)))

    drifting = [(90.0, 400.0, 1000.0), (100.0, 300.0, 1100.0)]
    marked = shown(cell(throughput=drifting[0]), cell("contiguous", throughput=drifting[1]))
    assert marked.count("‡") == 2 and "†" not in marked
    whole = cell()
    of_whole_runs(whole)
    assert all(figure in shown(whole) for figure in ("100†", "500†", "20.0†")) and shown(whole).count("†") == 4
    assert not {"†", "‡", "!"} & set(shown(cell(), cell("contiguous")))
    invalid = shown(cell(), cell("contiguous", reasons=("lag",)))
    assert "! contiguous" in invalid and "! paged" not in invalid and "! invalid measurement" in invalid


def test_the_console_table_marks_the_best_of_each_load_where_that_is_decided() -> None:
    fast = {"throughput": (200.0,) * 3, "tpot": (10.0,) * 3}
    cells = [cell(**fast), cell("contiguous", **fast, ttft=(250.0,) * 3), cell(page_size=8)]
    cells += [cell(page_size=64, throughput=(90.0, 190.0, 230.0), tpot=(20.0,) * 3)]
    cells += [cell(load=3), cell("contiguous", load=3), cell(page_size=8, load=3)]
    report = plain_document(run_of_cells(*cells))
    text = printed(report)
    assert [text.count(entry) for entry in ("200•", "250•", "10.0•", "190◦")] == [2, 1, 2, 1]  # two are level
    assert text.count("•") == 5 + 1 and "• best of its load" in text  # none at 3 at once, where all are level
    assert text.count("◦") == 1 + 1 and "◦ not told apart from the best" in text
    assert "\x1b[1m200•" in printed(report, color_system="standard")
    for undecided in (cells[4:], cells[:1]):
        alike = printed(plain_document(run_of_cells(*undecided)))
        assert "•" not in alike and "best" not in alike


def test_no_ratio_of_an_invalid_pair_is_anywhere_in_the_report() -> None:
    late = {"throughput": (207.0,) * 3, "tpot": (41.4,) * 3, "ttft": (1035.0,) * 3, "reasons": ("repeat 1: lag",)}
    broken = document(run_of_cells(cell(**late), cell("contiguous"), cell(load=3, **late), cell("contiguous", load=3)))
    drawn = " ".join(drawing.figure.to_json() + drawing.title for drawing in broken.drawings)
    table = str(flat_rows(broken.cells, broken.decision.comparisons))
    for text in (markdown(broken), printed(broken, 100), drawn, table):
        assert "2.07" not in text
    assert "--resume" in broken.next_steps[0].command


def test_what_a_server_refused_and_wrong_answers_are_said_first() -> None:
    report = plain_document(run_of_cells(refused(), cell("contiguous")))
    text = " ".join(printed(report).split())
    assert "! contiguous" not in text and "invalid" not in text
    assert "! paged (page 16) at 24 at once served 20 of 48 requests and refused the others" in text
    assert "refused 28 of 48" in report.verdict and "0 of 2" not in report.counted
    (failures,) = (s for chapter in report.chapters for s in chapter.sections if s.key == "failures")
    assert any("Context size has been exceeded." in value.text for row in failures.table.rows for value in row.values)
    report = plain_document(run_of_cells(wrong(), cell("contiguous")))
    text = printed(report, 200)
    assert "! WRONG ANSWERS: paged (page 16) at 24 at once" in text and "invalid meas" not in text
    assert report.status == "wrong" and "passkey-7" in report.details[0] and "WRONG ANSWERS" in markdown(report)


# --- The files ---


def _lose(fault: str, run: Run) -> str:
    """Damages the folder of a run and returns the name of what is lost."""
    lost = run.cells[0].folder
    if fault == "cell":
        shutil.rmtree(lost)
    elif fault == "manifest":
        lost = run.folder / "manifest.json"
        lost.unlink()
    elif fault == "samples cut":
        (lost / "requests.parquet").write_bytes(b"PAR")
    else:
        (lost / "requests.parquet").unlink()
    return lost.name


@pytest.mark.parametrize("fault", ["samples", "samples cut", "cell", "manifest"])
def test_a_report_is_not_replaced_by_one_that_would_say_less(make: Callable[..., Run], tmp_path: Path, fault) -> None:
    run = make(repeats=1, concurrencies=(3,), num_requests=10)
    there = [run.folder / name for name in ("report.html", "report.md", "summary.csv")]
    for path in there:
        path.write_text("of the whole run")
    lost = _lose(fault, run)
    with pytest.raises(UsageError) as error:
        write_report(plain_document(read_run(run.folder)), run.folder)
    assert all(word in str(error.value) for word in (lost, "--output-dir"))
    assert [path.read_text() for path in there] == ["of the whole run"] * 3
    if fault == "samples":
        elsewhere = tmp_path / "elsewhere"
        assert cli.main(["report", str(run.folder), "--output-dir", str(elsewhere)], standalone_mode=False) == 0
        assert sorted(path.name for path in elsewhere.iterdir()) == sorted(path.name for path in there)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a results folder"):
        read_run(tmp_path)
    (tmp_path / "manifest.json").write_text('{"kind": "load", "status": "complete"}')
    with pytest.raises(ValueError, match=r"read its search\.json or metrics"):
        read_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
