"""Whole reports from synthetic runs: self-contained, escaped, complete, and following the data."""

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
import rich.console
from plotly.offline import get_plotlyjs_version

from kvbench.cli.main import cli
from kvbench.common.console import print_table
from kvbench.common.errors import UsageError
from kvbench.report.decision import Decision
from kvbench.report.document import Document, document
from kvbench.report.headline import headline
from kvbench.report.page import PLOTLY_JS, markdown, page, template_file, write_report
from kvbench.report.style import looks
from kvbench.report.terminal import DROP_FIRST, console_table
from kvbench.runs.model import MeasuredCell, Run
from kvbench.runs.read import read_run
from tests.support.records import put, take
from tests.support.report_cells import cell, refused, wrong
from tests.support.report_cells import run as run_of_cells
from tests.support.synthetic_run import VARIANTS

EVIL = '<script>alert("x")</script><img src="https://evil.example/x.png">'


def without_scripts(page_: str) -> str:
    return re.sub(r"<script.*?</script>", "", page_, flags=re.S)


def test_the_bundle_that_draws_figures_has_the_version_of_pythons_plotly() -> None:
    version = get_plotlyjs_version()
    assert f"-{version}." in PLOTLY_JS and f"v{version}\n" in template_file(PLOTLY_JS)[:100]


def test_the_questions_that_a_run_cannot_answer_are_named() -> None:
    assert document(run_of_cells(cell(), cell("contiguous"))).baseline.endswith("; not varied: page size and KV dtype")
    both = cell("contiguous"), cell(page_size=8), cell(kv_cache_dtype="fp8_e4m3")
    assert "not varied" not in document(run_of_cells(cell(), *both)).baseline
    other = replace(cell(), settings={"kv_cache_dtype": "auto"})  # nothing else is known of it
    assert document(run_of_cells(other, backend="vllm")).baseline.endswith("not varied: KV dtype")


def visible(page_: str) -> str:
    """The text that a reader sees."""
    return html.unescape(re.sub(r"<[^>]*>", " ", without_scripts(page_)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_builds_one_page_that_loads_nothing(
    variant: str, run_folder: Callable[[str], Path], page_of: Callable[[str], str]
) -> None:
    folder, text = run_folder(variant), page_of(variant)
    run, plain = read_run(folder), without_scripts(text)
    assert len(text) < 8_000_000 and plain.count("<h1>") == 1 and headline(Decision.of(run)) in visible(text)
    assert "<script src" not in text and "url(" not in plain and "@import" not in plain
    loads = re.findall(r'\b(?:src|href|srcset|action|data)="([^"]*)"', plain)
    assert loads and all(load.startswith(("data:", "#")) for load in loads)
    title, _, verdict, *_ = (folder / "report.md").read_text().splitlines()
    assert title == f"# {run.workload}" and verdict.startswith(
        f"**{headline(Decision.of(run))}**".replace("_", r"\_")[:40]
    )
    assert not run.cells or len(pd.read_csv(folder / "summary.csv")) == len(run.cells)
    assert {path.name for path in folder.iterdir()} <= {
        "cells", "manifest.json", "quality.json", "report.html", "report.md", "summary.csv",
    }  # fmt: skip


def test_the_page_has_every_section_and_every_figure(
    run_of: Callable[[str], Run], page_of: Callable[[str], str], document_of: Callable[[str], Document]
) -> None:
    run, source, report = run_of("normal"), page_of("normal"), document_of("normal")
    text = visible(source)
    assert all(text.count(name) >= len(run.loads) for name in run.configs)
    keys = ["effects", "frontier", "ledger", "kv-timeline-closed-24", "kv-timeline-closed-3", "distributions"]
    assert [drawing.key for drawing in report.drawings] == [*keys, "slowest"]
    assert all(source.count(f'<figure id="{key}">') == 1 for key in keys)
    in_markdown = [line[3:] for line in markdown(report).splitlines() if line.startswith("## ")]
    in_page = [re.sub(r" <small>.*", "", title) for title in re.findall(r"<h2>(.*?)</h2>", source)]
    assert in_markdown == in_page  # the same chapters, in the same order
    assert "within 5 % of 1" in text and text.count("paged KV is gathered first") == 1


def test_what_is_not_valid_is_said_on_the_second_line_with_its_reasons_folded() -> None:
    broken = run_of_cells(cell(), cell("contiguous", reasons=("repeat 1: it lagged",)))
    report = document(broken)
    assert report.status == "invalid" and "1 of 2 cells valid" in report.counted
    assert any("it lagged" in text for text in report.details)
    head = page(report).split("<h2>")[0]
    assert '<details class="banner invalid">' in head and "it lagged" in head.split("</summary>")[1]


def test_everything_from_outside_is_escaped(make: Callable[..., Run]) -> None:
    run = make(workload_name=EVIL, text=EVIL, repeats=1, concurrencies=(3,), invalid={"layout-contiguous": (EVIL,)})
    path = run.cells[0].folder / "summary.json"
    summary = json.loads(path.read_text())
    summary["settings"].pop("layout")
    path.write_text(json.dumps(summary | {"label": EVIL, "notes": {"text": EVIL}}))
    run = read_run(run.folder)
    report = document(run)
    text = page(report)
    assert "<script>alert" not in text and "<img" not in without_scripts(text) and EVIL in visible(text)
    outside_code = re.sub(r"```.*?```", "", markdown(report), flags=re.S)
    assert "<script" not in outside_code and "<img" not in outside_code
    traces = [trace for drawing in report.drawings for trace in drawing.figure.data]
    assert not any("<script" in (trace.name or "") for trace in traces)


def test_markdown_has_every_cell_and_every_missing_one(
    run_of: Callable[[str], Run], document_of: Callable[[str], Document]
) -> None:
    run = run_of("incomplete")
    lines = markdown(document_of("incomplete")).splitlines()
    start = lines.index("## All cells") + 2
    table = lines[start : lines.index("", start)]
    for one in run.cells:
        assert any(one.name in line and one.load.short in line for line in table)
    for missing in run.missing:
        assert any(missing.replace("_", r"\_") in line and "not measured" in line for line in table)
    assert len(table) == 2 + len(run.cells) + len(run.missing) and len({line.count(" | ") for line in table}) == 1


def test_limits_of_goodput_and_what_was_not_run_are_in_page_and_markdown() -> None:
    slo = {"load": {"slo": {"ttft_ms": 200.0, "tpot_ms": 50.0}}}
    shown = run_of_cells(cell(), workload=slo, notes=["skipped a: b"])
    for text in (page(document(shown)), markdown(document(shown))):
        assert "requests/s that met ttft &lt;= 200 ms and tpot &lt;= 50 ms" in text
        assert "Not run" in text and text.split("Manifest</summary>")[0].count("skipped a: b") == 1


def test_the_axis_says_whole_run_where_no_window_was_steady() -> None:
    run = run_of_cells(cell(), cell("contiguous"))
    assert "output tokens/s" in _axes(run) and "whole run" not in _axes(run)
    for one in run.cells:
        for repeat in one.repeats:
            put(repeat.metrics, output_throughput=take(repeat.metrics, "steady_output_throughput"))
    assert "output tokens/s (whole run)" in _axes(run)


def _axes(shown: Run) -> str:
    """All texts of axes and panels."""
    return " ".join(json.dumps(json.loads(d.figure.to_json())["layout"]) for d in document(shown).drawings)


def test_a_server_that_tells_nothing_of_its_kv_has_no_figure_of_it(make: Callable[..., Run]) -> None:
    made = make(repeats=1)
    assert any(drawing.key.startswith("kv-timeline") for drawing in document(made).drawings)
    for column, found in (("kv_cache_usage_perc", True), ("t", False)):  # another engine tells its usage alone
        for one in made.cells:
            path = one.folder / "server.parquet"
            known = ["t", "repeat", "num_requests_running", "num_requests_waiting", column]
            pd.read_parquet(path)[list(dict.fromkeys(known))].to_parquet(path)
        shown = [drawing.key for drawing in document(read_run(made.folder)).drawings]
        assert "ledger" not in shown and any(key.startswith("kv-timeline") for key in shown) == found


def test_colours_are_the_same_whatever_else_was_measured(run_of: Callable[[str], Run]) -> None:
    full, part = looks(run_of("normal").cells), looks(run_of("no_contiguous").cells)
    assert full["paged (page 16)"].colour == part["paged (page 16)"].colour
    assert len({look.colour for look in full.values()}) == len(full)


def test_uncertain_percentiles_are_marked(run_of: Callable[[str], Run], page_of: Callable[[str], str]) -> None:
    assert "* too few samples" in page_of("single_repeat")
    one = run_of("single_repeat").cells[0]
    assert one.percentile("ttft_ms", "p95")[1]  # 48 samples
    assert not one.percentile("itl_ms", "p95")[1]  # thousands


@pytest.mark.parametrize("variant", ["invalid", "normal"])
def test_the_console_table_fits_80_columns_and_marks_what_is_invalid(
    variant: str, run_of: Callable[[str], Run]
) -> None:
    out = io.StringIO()
    rich.console.Console(file=out, width=80).print(console_table(document(run_of(variant))))
    text = out.getvalue()
    rows = [line for line in text.splitlines() if "contiguous" in line and "ratio" not in line]
    assert rows and all(("! contiguous" in line) == (variant == "invalid") for line in rows)
    assert "…" not in text and ("! invalid measurement" in text) == (variant == "invalid")
    assert all(word in text for word in ("paged (page 16)", "24 at once", "3 at once", "fail"))


@pytest.mark.parametrize("width", [60, 80])
def test_a_terminal_shows_whole_columns_and_names_the_others(width: int, run_of: Callable[[str], Run]) -> None:
    out = io.StringIO()
    terminal = rich.console.Console(file=out, width=width, force_terminal=True, color_system=None)
    print_table(terminal, console_table(document(run_of("normal"))), drop_first=DROP_FIRST)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    heads = next(line for line in text.splitlines() if "configuration" in line)
    assert all(head in heads for head in ("tok/s", "ratio", "p95 TTFT", "fail"))
    named = text.partition("not shown at this width: ")[2].strip()
    assert set(filter(None, named.split(", "))) == ({"run", "preempt", "TPOT"} if width == 60 else set())
    assert ("TPOT" in heads) == (width == 80) and re.search(r"\d\.\d\dx\? \(\d\.\d\d–\d\.\d\d\)", text)


def test_the_console_explains_its_marks_once_and_only_where_they_are() -> None:
    def printed(*cells: MeasuredCell) -> str:
        out = io.StringIO()
        rich.console.Console(file=out, width=80).print(console_table(document(run_of_cells(*cells))))
        return out.getvalue()

    drifting = [(90.0, 400.0, 1000.0), (100.0, 300.0, 1100.0)]
    marked = printed(cell(throughput=drifting[0]), cell("contiguous", throughput=drifting[1]))
    assert marked.count("‡") == 2 and "†" not in marked
    whole = cell()
    for repeat in whole.repeats:
        put(repeat.metrics, output_throughput=take(repeat.metrics, "steady_output_throughput"))
    assert all(figure in printed(whole) for figure in ("100†", "500†", "20.0†"))
    assert printed(whole).count("†") == 4
    assert not {"†", "‡"} & set(printed(cell(), cell("contiguous")))


def test_the_console_table_marks_the_best_of_each_load_where_that_is_decided() -> None:
    def printed(*cells: MeasuredCell, **how: object) -> str:
        out = io.StringIO()
        rich.console.Console(file=out, width=80, **how).print(console_table(document(run_of_cells(*cells))))  # type: ignore
        return out.getvalue()

    fast = {"throughput": (200.0,) * 3, "tpot": (10.0,) * 3}
    cells = [cell(**fast), cell("contiguous", **fast, ttft=(250.0,) * 3), cell(page_size=8)]
    cells += [cell(page_size=64, throughput=(90.0, 190.0, 230.0), tpot=(20.0,) * 3)]
    cells += [cell(load=3), cell("contiguous", load=3), cell(page_size=8, load=3)]
    text = printed(*cells)
    assert [text.count(entry) for entry in ("200•", "250•", "10.0•", "190◦")] == [2, 1, 2, 1]  # two are level
    assert text.count("•") == 5 + 1 and "• best of its load" in text  # none at 3 at once, where all are level
    assert text.count("◦") == 1 + 1 and "◦ not told apart from the best" in text
    assert "\x1b[1m200•" in printed(*cells, force_terminal=True, color_system="standard")
    for undecided in (cells[4:], cells[:1]):
        assert "•" not in printed(*undecided) and "best" not in printed(*undecided)


def test_no_ratio_of_an_invalid_pair_is_anywhere_in_the_report() -> None:
    late = {"throughput": (207.0,) * 3, "tpot": (41.4,) * 3, "ttft": (1035.0,) * 3, "reasons": ("repeat 1: lag",)}
    broken = run_of_cells(cell(**late), cell("contiguous"), cell(load=3, **late), cell("contiguous", load=3))
    out = io.StringIO()
    rich.console.Console(file=out, width=100).print(console_table(document(broken)))
    figures = " ".join(drawing.figure.to_json() + drawing.title for drawing in document(broken).drawings)
    for text in (visible(page(document(broken))), markdown(document(broken)), out.getvalue(), figures):
        assert "2.07" not in text and "--resume" in visible(page(document(broken)))


def test_the_console_table_and_the_page_say_what_a_server_refused() -> None:
    shown, out = run_of_cells(refused(), cell("contiguous")), io.StringIO()
    rich.console.Console(file=out, width=80).print(console_table(document(shown)))
    text = " ".join(out.getvalue().split())
    assert "! paged (page 16)" in text and "! contiguous" not in text and "invalid" not in text
    assert "! paged (page 16) at 24 at once served 20 of 48 requests and refused the others" in text
    report = document(shown)
    assert "refused 28 of 48" in report.verdict and "0 of 2" not in report.counted
    (failures,) = (s for chapter in report.chapters for s in chapter.sections if s.key == "failures")
    assert any("Context size has been exceeded." in value.text for row in failures.table.rows for value in row.values)


def test_a_servers_sentence_is_escaped_in_page_and_markdown() -> None:
    shown = run_of_cells(refused(20, "<img src=x> | full"), cell("contiguous"))
    report = document(shown)
    page_, text = page(report), markdown(report)
    assert "28 of 48" in page_ and "<img src=x>" not in page_ and "&lt;img src=x&gt; | full" in page_
    assert "28 of 48" in text and "<img src=x>" not in text and "full" in text


def test_wrong_answers_are_said_first_in_console_page_and_markdown() -> None:
    shown, out = run_of_cells(wrong(), cell("contiguous")), io.StringIO()
    print_table(rich.console.Console(file=out, width=200), console_table(document(shown)))
    assert "! WRONG ANSWERS: paged (page 16) at 24 at once" in out.getvalue() and "invalid meas" not in out.getvalue()
    report = document(shown)
    assert report.status == "wrong" and "passkey-7" in report.details[0]
    assert "WRONG ANSWERS" in markdown(report) and "WRONG ANSWERS" in page(report)


@pytest.mark.parametrize("fault", ["samples gone", "samples cut", "cell gone", "manifest gone"])
def test_a_report_is_not_replaced_by_one_that_would_say_less(
    make: Callable[..., Run], tmp_path: Path, fault: str
) -> None:
    run = make(repeats=1, concurrencies=(3,))
    lost = run.cells[0].folder
    whole = {path: path.read_bytes() for path in write_report(document(run), run.folder)}
    if fault == "cell gone":
        shutil.rmtree(lost)
    elif fault == "manifest gone":
        lost = run.folder / "manifest.json"
        lost.unlink()
    elif fault == "samples cut":
        (lost / "requests.parquet").write_bytes(b"PAR")
    else:
        (lost / "requests.parquet").unlink()
    run = read_run(run.folder)
    with pytest.raises(UsageError) as refused:
        write_report(document(run), run.folder)
    assert all(word in str(refused.value) for word in (lost.name, "--output-dir"))
    assert {path: path.read_bytes() for path in whole} == whole
    elsewhere = tmp_path / "elsewhere"
    assert cli.main(["report", str(run.folder), "--output-dir", str(elsewhere)], standalone_mode=False) == 0
    assert [path.name for path in sorted(elsewhere.iterdir())] == sorted(path.name for path in whole)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a results folder"):
        read_run(tmp_path)
    (tmp_path / "manifest.json").write_text('{"kind": "load", "status": "complete"}')
    with pytest.raises(ValueError, match=r"read its search\.json or metrics"):
        read_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
