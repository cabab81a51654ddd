"""What stands beside the numbers: the reservation, how requests were made, the measurement's quality, warnings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from kvbench.report import headline
from kvbench.report.client_quality import calibrations, quality_columns, quality_rows, quality_sentences
from kvbench.report.comparisons import compare
from kvbench.report.conclusions import conclusions, reservation, tiles
from kvbench.report.figures import drawings
from kvbench.report.markdown import markdown
from kvbench.report.page import page
from kvbench.report.provenance import CODE_PATHS, code_paths, environment, made_from, warnings
from kvbench.report.tables import columns, flat_rows, rows
from kvbench.runs.model import Run
from kvbench.runs.read import read_run
from tests.support.report_cells import cell, run

TRACE = {
    "trace": "conv.csv", "trace_requests": 52, "trace_start_s": 0, "rate_scale": 0.4, "length_scale": 0.11234,
}  # fmt: skip


def test_reservation_is_told_beside_the_requests_own_lengths(tmp_path: Path) -> None:
    lengths = pd.DataFrame({"prompt_tokens": [700, 20], "output_tokens": [132, 30], "ok": [True, True]})
    lengths.to_parquet(tmp_path / "requests.parquet")
    contiguous = replace(cell("contiguous", max_model_len=2048), folder=tmp_path, name="contiguous")
    assert reservation(compare(cell(max_model_len=2048), contiguous)) == (
        "Contiguous reserves 2,048 slots per request; the longest request here had 832 tokens, the mean 441."
    )
    assert reservation(compare(cell(), cell("contiguous"))) == ""  # no lengths known, nothing said
    exact = replace(cell("contiguous", max_model_len=2048, reservation="oracle"), folder=tmp_path)
    assert reservation(compare(cell(max_model_len=2048), exact)) == ""  # each request's own length, no one number


def test_reservation_and_code_paths_are_in_page_and_markdown(
    run_of: Callable[[str], Run], page_of: Callable[[str], str]
) -> None:
    run = run_of("normal")
    sentence = "Contiguous reserves 1,024 slots per request; the longest request here had"
    assert sentence in page_of("normal")
    assert sentence in markdown(run)
    cost = next(c for c in conclusions(run) if c.title == "What paging cost")
    assert cost.points[-1] == CODE_PATHS
    assert page_of("normal").count("paged KV is gathered first") == 2  # there and in how-to-read


def test_scales_of_a_trace_are_told() -> None:
    traced = cell(mode="open", load=0, notes=TRACE)
    workload = {"name": "azure", "load": {"prompts": {"kind": "trace", "duration_s": 10.0}}}
    assert made_from(run(traced, workload=workload)) == (
        "lengths x 0.112, 10 s of the trace at 0.4 of its speed, 52 requests"
    )
    assert made_from(run(traced)).startswith("lengths x 0.112, the trace at 0.4 of its speed")
    assert made_from(run(replace(traced, notes={**TRACE, "rate_scale": 1.0}))).count("at its own speed") == 1
    pages = {**TRACE, "trace_page_size": 512, "page_size_of_prompts": 8}
    assert made_from(run(replace(traced, notes=pages))).endswith("prompts share its pages, 512 tokens made 8")
    assert "length_scale 0.11234" in dict(environment(run(traced)))["requests"]
    assert made_from(run(cell())) == ""
    each = run(cell(load=3, notes={"length_scale": 0.5}), cell(notes={"length_scale": [0.25, 0.5]}))
    assert made_from(each) == "at 3 at once: lengths x 0.5; at 24 at once: lengths x 0.25 and 0.5"


def test_scale_stands_in_page_and_markdown(make: Callable[..., Run]) -> None:
    made = make(repeats=1, concurrencies=(3,))
    for one in made.cells:
        path = one.folder / "summary.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"notes": {"length_scale": 0.25}}))
    again = read_run(made.folder)
    assert "Lengths x 0.25" in page(again)
    assert "Lengths x 0.25" in markdown(again)


def test_steady_ttft_stands_beside_that_of_the_whole_run(run_of: Callable[[str], Run]) -> None:
    shown = run_of("normal")
    at = [c.key for c in columns(shown)].index("ttft_ms_p95")
    assert columns(shown)[at].title == "TTFT p95 ms (steady)"
    for row, flat in zip(rows(shown), flat_rows(shown), strict=True):
        steady = row.cell.pooled["steady_latency"]["ttft_ms"]
        assert steady["n"] < row.cell.pooled["ttft_ms"]["n"]
        assert row.values[at].sort == row.cell.pooled["ttft_ms"]["p95"]
        assert (
            row.values[at].note.rstrip("*").replace(",", "") == f"{steady['p95']:.{0 if steady['p95'] >= 100 else 1}f}"
        )
        assert flat["steady_ttft_ms_p95"] == steady["p95"]


def test_figures_tiles_and_tables_do_not_claim_what_the_sentence_does_not(make: Callable[..., Run]) -> None:
    made = make(concurrencies=(24,))
    for one in made.cells:
        path = one.folder / "summary.json"
        summary = json.loads(path.read_text())
        for repeat, value in zip(summary["repeats"], (40.0, 170.0, 60.0) if one.is_paged else (60.0,) * 3, strict=True):
            repeat["metrics"]["steady_output_throughput"] = value
        path.write_text(json.dumps(summary))
    unclear = read_run(made.folder)
    assert headline(made.folder).startswith("No verdict: ")
    titles = {d.key: d.title for d in drawings(unclear)}
    assert "not told apart in output tokens/s from contiguous, 1.00x" in titles["headline"]
    assert tiles(unclear)[0].note.endswith("not told apart")
    at = [c.key for c in columns(unclear)].index("ratio")
    entry = next(row.values[at] for row in rows(unclear) if row.cell.is_paged)
    assert (entry.text, entry.mark) == ("1.00x?", "")
    assert next(f for f in flat_rows(unclear) if "paged" in f["configuration"])["ratio_verdict"] == "unclear"


def test_axis_says_whole_run_where_no_window_was_steady(make: Callable[..., Run]) -> None:
    steady = make(repeats=1, concurrencies=(3, 6))
    assert "output tokens/s (steady window)" in _axes(steady)
    for one in steady.cells:
        path = one.folder / "summary.json"
        summary = json.loads(path.read_text())
        for repeat in summary["repeats"]:
            repeat["metrics"]["steady_output_throughput"] = None
        path.write_text(json.dumps(summary))
    whole = _axes(read_run(steady.folder))
    assert "output tokens/s (whole run)" in whole
    assert "steady window" not in whole


def _axes(shown: Run) -> str:
    """All texts of axes and panels."""
    return " ".join(
        json.dumps(json.loads(d.figure.to_json())["layout"]) for d in drawings(shown) if d.key != "occupancy"
    )


def test_quality_shows_the_worst_repeat_of_client_and_machine() -> None:
    machine = {"foreign_cpu_cores": 0.42, "steal_share": 0.031, "load_average": [3.2, 2, 1], "cores": 2}
    shown = run(
        cell(client={"lag_p99_ms": 0.17, "lag_source": "server stamps", "cpu_fraction": 0.021}, machine=machine),
        cell("contiguous", reasons=("repeat 1: lag", "repeat 2: lag")),
    )
    text = {
        row.cell.name: dict(zip((c.key for c in quality_columns(shown)), row.values, strict=True))
        for row in quality_rows(shown)
    }
    paged = text["paged (page 16)"]
    assert [paged[k].text for k in ("client_lag_p99_ms", "client_cpu", "valid")] == ["0.17", "2.1 %", "yes"]
    assert paged["client_lag_p99_ms"].note == "server stamps"
    few = {"lag_p99_ms": 4.0, "lag_source": "server stamps", "lag_judged": False}
    (row,) = quality_rows(run(cell(client=few)))
    assert "not judged: too few chunks" in row.values[3].note
    assert [paged[f"machine_{k}"].text for k in ("foreign_cpu_cores", "steal_share", "load_average", "cores")] == [
        "0.42", "3.1 %", "3.20", "2",
    ]  # fmt: skip
    assert (text["contiguous"]["valid"].text, text["contiguous"]["valid"].note) == ("no", "2 reasons")
    assert text["contiguous"]["machine_steal_share"].text == "–"


def test_quality_takes_the_highest_of_the_repeats() -> None:
    one = cell()
    for repeat, lag in zip(one.repeats, (0.1, 0.9, 0.2), strict=True):
        repeat.metrics["client"]["lag_p99_ms"] = lag  # type: ignore[index]
    shown = run(one)
    keys = [c.key for c in quality_columns(shown)]
    assert quality_rows(shown)[0].values[keys.index("client_lag_p99_ms")].sort == 0.9
    assert "machine_steal_share" not in keys  # nobody recorded it: no column of dashes


def test_quality_of_an_open_loop_of_several_processes_has_slip_cost_and_processes() -> None:
    client = {
        "lag_p99_ms": 0.4, "cpu_fraction": 0.31, "schedule_slip_p99_ms": 1.25, "coalesced_share": 0.0004,
        "cpu_s_per_1000_output_tokens": 0.125, "processes": [{"name": "a"}, {"name": "b"}],
    }  # fmt: skip
    shown = run(cell(client=client, load=4, mode="open", machine={"foreign_cpu_cores": 0.02}), cell("contiguous"))
    values = dict(zip((c.key for c in quality_columns(shown)), quality_rows(shown)[0].values, strict=True))
    texts = [values[f"client_{k}"].text for k in ("schedule_slip_p99_ms", "coalesced_share", "processes")]
    assert texts == ["1.2", "0.04 %", "2"] and values["client_cpu"].note == "0.12 s/1,000"
    (said,) = quality_sentences(shown)
    assert said == (
        "The worst of all loads: p99 timestamp lag 0.40 ms, p99 schedule slip 1.2 ms, client at 31 % of a core, "
        "0.12 s of client CPU per 1,000 output tokens, 0.02 cores taken by other processes."
    )


CALIBRATION = {
    "settings": {"streams": 64, "itl_ms": 20.0, "processes": 1, "seconds": 3.0},
    "figures": {"lag_p99_ms": 0.334, "itl_error_p99_ms": 0.29, "cpu_us_per_event": 21.4, "coalesced_share": 0.0001},
    "reasons": [],
}


def test_the_clients_calibration_is_a_sentence() -> None:
    manifest = {"calibration": {"left_out": False, "measured": [CALIBRATION]}}
    assert calibrations(run(cell(), **manifest)) == [
        "The load client was calibrated against the mock server at 64 streams of 20 ms ITL: p99 timestamp lag 0.33 ms, "
        "p99 ITL error 0.29 ms, CPU an event 21 µs, coalesced 0.01 %."
    ]
    over = {**CALIBRATION, "settings": {**CALIBRATION["settings"], "processes": 4}, "reasons": ["it lags."]}
    (said,) = calibrations(run(cell(), calibration={"measured": [over]}))
    assert "over 4 processes" in said and said.endswith("Over the limits: it lags.")
    assert "not calibrated" in calibrations(run(cell(), calibration={"left_out": True, "measured": []}))[0]
    assert calibrations(run(cell())) == []


def test_quality_table_is_in_page_and_markdown(run_of: Callable[[str], Run], page_of: Callable[[str], str]) -> None:
    assert "How good was the measurement" in page_of("normal")
    assert "## How good was the measurement" in markdown(run_of("normal"))


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"git": {"sha": "b"}}, "commit (a then, b later)"),
        ({"git": {"sha": "b"}, "differences": ["torch (2.12 then, 2.13 now)"]}, "torch (2.12 then, 2.13 now)"),
    ],
)
def test_resuming_elsewhere_is_warned_of(entry: dict, expected: str) -> None:
    (text,) = [t for t in warnings(run(cell(), git={"sha": "a"}, resumed=[entry])) if "resumed" in t]
    assert expected in text


@pytest.mark.parametrize("resumed", [None, [], [{"git": {"sha": "a"}}], [{"git": {"sha": "a"}, "differences": []}]])
def test_resuming_in_the_same_place_is_no_warning(resumed: list | None) -> None:
    assert not any("resumed" in t for t in warnings(run(cell(), git={"sha": "a"}, resumed=resumed)))


def test_scattered_cells_are_warned_of_by_name() -> None:
    found = " ".join(warnings(run(cell(throughput=(98.0, 423.0, 462.0)), cell("contiguous"))))
    assert "The repeats scatter" in found
    assert "paged (page 16) at 24 at once (98.0–462)" in found
    assert "contiguous" not in found
    assert "scatter" not in " ".join(warnings(run(cell(), cell("contiguous"))))


def test_the_rule_of_the_verdicts_is_in_how_to_read(page_of: Callable[[str], str]) -> None:
    text = page_of("normal")
    assert "within 5 % of 1" in text
    assert "not told apart" in text


def test_code_paths_are_told_where_layouts_of_the_built_in_engine_were_compared() -> None:
    assert code_paths(run(cell(), cell("contiguous")))
    assert not code_paths(run(cell(), cell(page_size=8)))
    assert not code_paths(run(cell(), cell("contiguous"), backend="vllm"))
