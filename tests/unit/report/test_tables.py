"""Tables: the numbers and marks of their entries, and which columns and rows there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from kvbench.effects.comparison import Call
from kvbench.metrics.model import CanaryCounts
from kvbench.report.cells import effect_table, plateau_table
from kvbench.report.client_quality import calibrations, quality_table, worst_of_all
from kvbench.report.comparisons import TTFT, Comparisons, leaders, served
from kvbench.report.figures.distributions import EVERY, distributions
from kvbench.report.side_by_side import CellSide, ratios
from kvbench.report.tables import Column, ReportTable, Section, Value, cell_table
from kvbench.runs.metric_names import measured
from kvbench.runs.model import MeasuredCell, Run
from tests.support.records import put
from tests.support.report_cells import cell, refused, run, with_cache, wrong
from tests.support.report_parts import (
    class_table,
    flat_rows,
    frontier_frame,
    frontier_table,
    main_table,
    plain_document,
    turn_table,
)

COUNTERS = {"prefix_cache_hits_total": 96.0, "prefix_cache_queries_total": 1920.0}


def changed(one: MeasuredCell, metrics: dict[str, Any] | None = None, cache: Any = (), **pooled: Any) -> MeasuredCell:
    """``one`` with more metrics in every repeat, the prefix cache of each, and more pooled figures."""
    for repeat in one.repeats:
        put(repeat.metrics, **(metrics or {}))
    put(one.pooled, **pooled)
    repeats = tuple(with_cache(r, cache[i] if cache else {}) for i, r in enumerate(one.repeats))
    return dataclasses.replace(one, repeats=repeats)


def entries(table: ReportTable, name: str = "") -> dict[str, Value]:
    """Entries by column of the first row, or of that of the configuration ``name``."""
    row = next(row for row in table.rows if not name or (row.cell and row.cell.name == name))
    return dict(zip((column.key for column in table.columns), row.values, strict=True))


def texts(table: ReportTable) -> list[tuple[str, ...]]:
    return [tuple(value.text for value in row.values) for row in table.rows]


def test_steady_ttft_and_whole_run_stand_beside_each_other(run_of: Callable[[str], Run]) -> None:
    shown = run_of("normal")
    table = main_table(shown)
    keys = [column.key for column in table.columns]
    for row, flat in zip(table.rows, flat_rows(shown), strict=True):
        assert row.cell is not None
        steady, whole = (pooled.ttft_ms for pooled in (row.cell.pooled.steady_latency, row.cell.pooled))
        value = row.values[keys.index("ttft_ms_p95")]
        leads, other = (steady, whole) if row.cell.has_steady_latency else (whole, steady)
        assert steady.n < whole.n and value.sort == leads.p95
        assert (flat["steady_ttft_ms_p95"], flat["whole_run_ttft_ms_p95"]) == (steady.p95, whole.p95)
        assert flat["ttft_ms_p95_window"] == ("steady window" if leads is steady else "whole run")
        frame = distributions([row.cell])
        curve = frame[(frame["metric"] == "ttft_ms") & (frame["group"] == EVERY)]
        assert len(row.cell.requests(steady=True)) == steady.n and set(curve["samples"]) == {leads.n}
        assert sum(group.n for group in row.cell.latency_groups("per_class").values()) == leads.n
        label, shown_beside = value.note.splitlines()[-1].split(" ")
        assert label == ("whole" if leads is steady else "steady") and ("whole run" in value.note) == (leads is whole)
        assert float(shown_beside.rstrip("*").replace(",", "")) == pytest.approx(other.p95, rel=0.01)
    assert {row.cell.has_steady_latency for row in table.rows if row.cell} == {True, False}
    one = changed(cell(throughput=(100.0, 110.0, 120.0)), {"output_throughput": 90.0})
    assert entries(main_table(run(one)))["output_tokens_per_s"].note == "100–120\nwhole 90.0"


def test_cells_of_two_windows_are_compared_by_the_whole_run_which_is_said() -> None:
    """p95 TTFT of the whole run is 900 and 300 ms; one cell has 100 ms in its steady window, the other no window."""
    base, other = cell(ttft=(900.0,) * 3), cell(page_size=8, ttft=(300.0,) * 3)
    settled = {"ttft_ms": {"p95": 100.0, "n": 40}, "tpot_ms": {"p50": 20.0}, "itl_ms": {"p95": 20.0}}
    base = changed(base, {"steady_latency": settled}, steady_latency=settled)
    other = changed(other, {"steady_latency": {}})
    both = run(base, other)
    assert leaders(both.at(base.load))["ttft_ms_p95"] == {other.name: Call.LEVEL}
    assert served(other, base, TTFT).ratio == pytest.approx(1 / 3)
    (row,) = effect_table(Comparisons.of(both)).rows
    assert [value.note.endswith("whole run") for value in row.values[3:]] == [False, True, True, True]
    settled = changed(cell(page_size=8), {"steady_output_throughput": None, "output_throughput": 9.0})
    windows = [row["output_tokens_per_s_window"] for row in flat_rows(run(cell(), settled))]
    assert windows == ["steady window", "whole run"]
    assert sorted(frontier_frame(both)["ttft"]) == [300.0, 900.0]
    columns = frontier_table(frontier_frame(both)).columns[3:5]
    assert [column.title.endswith("whole run") for column in columns] == [True, True]
    (_, ttft, *_) = ratios(CellSide("A", both, base), CellSide("B", both, other))
    assert ttft.ratio == pytest.approx(1 / 3)


OPEN = {"open_after_last_p50_ms": 3000.0}
GOOD = {"goodput": 2.0, "steady_goodput": 2.5, "duration_s": 18.0}  # 48 requests a repeat


@pytest.mark.parametrize(
    ("metrics", "key", "shown"),
    [
        ({"tokens_per_chunk": 1.09}, "itl_ms_p95", ("20.0", "")),
        ({"tokens_per_chunk": 1.1}, "itl_ms_p95", ("20.0", "1.1 tokens a chunk")),
        ({"tokens_per_chunk": 4.0}, "tpot_ms_p50", ("20.0", "")),
        (OPEN | {"open_after_last_share": 0.03}, "open_after_last_ms", None),
        (OPEN | {"open_after_last_share": 0.031}, "open_after_last_ms", ("3,000", "3.1 %")),
        (GOOD, "goodput", ("2.00", "75 %\nsteady 2.50")),
    ],
)
def test_an_entry_has_what_its_number_needs_beside_it(metrics: dict, key: str, shown: tuple | None) -> None:
    slo = {"load": {"slo": {"ttft_ms": 200.0, "tpot_ms": None}}}
    table = main_table(run(changed(cell(), metrics), workload=slo))
    value = entries(table).get(key)
    assert (value and (value.text, value.note)) == shown
    assert all("ttft <= 200 ms" in column.hint for column in table.columns if column.key == "goodput")


def test_columns_are_shown_where_there_is_something_in_them() -> None:
    plain = cell()
    keys = [column.key for column in main_table(run(plain)).columns]
    assert {"configuration", "load", "output_tokens_per_s", "failed"} <= set(keys)
    assert not {"ratio", "client_queue_ms_p95", "goodput", "running_mean"} & set(keys)
    capped = main_table(
        run(changed(plain, steady_latency={"client_queue_ms": {"p95": 120.0}}), cell("contiguous", running=2.0))
    )
    keys = [column.key for column in capped.columns]
    assert keys.index("client_queue_ms_p95") == keys.index("ttft_ms_p95") + 1 and {"ratio", "running_mean"} <= set(keys)
    assert entries(capped, "paged (page 16)")["client_queue_ms_p95"].text == "120"
    zeros = [Column(key, key, "", lambda one: Value("0", 0.0)) for key in ("failed", "scales")]
    assert [column.key for column in cell_table(zeros, [plain], not_zero=("scales",)).columns] == ["failed"]


def test_the_first_output_has_columns_where_it_is_seen_to_be_later_than_the_first_token() -> None:
    thinks = changed(cell(), steady_latency={"ttfo_ms": {"p50": 900.0, "p95": 900.0}})
    plain = cell("contiguous")
    table = main_table(run(thinks, plain))
    assert entries(table, "paged (page 16)")["ttfo_ms_p95"].text == "900"
    assert entries(table, "contiguous")["ttfo_ms_p95"].text == "as TTFT"
    same = changed(cell(), steady_latency={"ttfo_ms": cell().pooled.ttft_ms.fields()})
    assert not {"ttfo_ms_p50", "ttfo_ms_p95"} & {column.key for column in main_table(run(same, plain)).columns}


def test_reasoning_has_columns_where_it_is() -> None:
    steady = {"ttfo_ms": cell().pooled.ttft_ms.fields(), "reasoning_ms": {"p50": 800.0}}
    told = {
        "steady_non_reasoning_output_throughput": 40.0, "non_reasoning_output_throughput": 30.0,
        "total_reasoning_tokens": 60, "total_output_tokens": 80, "without_output": 0,
    }  # fmt: skip
    thinks, plain = changed(cell(), told, steady_latency=steady), cell("contiguous")
    value = entries(main_table(run(thinks, plain)), "paged (page 16)")
    assert value["reasoning_ms_p50"].text == "800" and value["ttft_ms_p95"].text and "ttfo_ms_p95" not in value
    rate = value["non_reasoning_tokens_per_s"]
    assert (rate.sort, rate.note) == (40.0, "75 %")
    assert flat_rows(run(thinks))[0]["non_reasoning_tokens_per_s"] == 40.0
    assert not {"reasoning_ms_p50", "non_reasoning_tokens_per_s"} & {c.key for c in main_table(run(plain)).columns}
    silent = changed(cell("contiguous"), told | {"total_reasoning_tokens": None, "without_output": 3})
    value = entries(main_table(run(changed(cell(), steady_latency={"ttfo_ms": {"p95": 900.0}}), silent)), "contiguous")
    assert (value["non_reasoning_tokens_per_s"].note, value["ttfo_ms_p95"].text) == ("9 without output", "–")


def test_hits_stand_beside_what_the_declared_state_allows() -> None:
    known = {"hits": 20.0, "queries": 100.0, "low": 0, "high": 25}
    one = cell(server={"prefix_cache_hits_total": 20.0, "prefix_cache_queries_total": 100.0})
    for cache, note in (
        ([known] * 3, "of 0–25 %"),
        ([known, known, known | {"unverified": "too small"}], "of 0–25 %\nnot verified"),
        ([known, known, {}], ""),  # of one repeat it is not known
    ):
        table = main_table(run(changed(one, cache=cache), workload={"load": {"cache_state": "primed"}}))
        value = entries(table)["prefix_hit_rate"]
        assert (value.text, value.note) == ("20 %", note)
    assert "primed" in next(c.title for c in table.columns if c.key == "prefix_hit_rate")
    mixed = [known | {"state": "cold"}, known | {"state": "steady"}, known]  # wins over what the workload says
    table = main_table(run(changed(one, cache=mixed), workload={"load": {"cache_state": "cold"}}))
    assert "prefix hits (cold or steady)" in [column.title for column in table.columns]


@pytest.mark.parametrize(
    ("server", "cache", "text"),
    [
        ({}, {"hits": 20, "queries": 100, "counted": None, "told": 20}, "20 %"),
        (COUNTERS, {"hits": 1920, "queries": 1920, "counted": 96.0, "told": 1920}, "100 %"),
        (COUNTERS, {}, "5.0 %"),  # of an older run
        ({}, {}, None),
    ],
)
def test_the_hits_shown_and_limited_are_those_that_are_judged(server, cache, text) -> None:
    shown = changed(cell(server=server), cache=[cache] * 3)
    assert getattr(entries(main_table(run(shown))).get("prefix_hit_rate"), "text", None) == text
    rates = measured(shown, "prefix_cache_hit_rate").values
    assert list(rates.values()) == ([] if text is None else [float(text[:-2]) / 100] * 3)


def test_failures_and_invalid_cells_are_marked() -> None:
    bad = changed(cell(failed=2, reasons=("lag",)), {"failure_kinds": {"truncated": 2}})
    found = entries(main_table(run(bad)))
    assert (found["failed"].text, found["failed"].note, found["failed"].mark) == ("6 of 144", "truncated", "worse")
    assert found["configuration"].note == "baseline, invalid"
    one = cell(failed=2)
    for repeat, (message, n) in zip(one.repeats, (("full", 2), ("busy", 3), ("full", 2)), strict=True):
        put(repeat.metrics, failure_messages={"server_error": {"message": message, "requests": n}})
    assert entries(main_table(run(one)))["failed"].note == '4 of 144: server_error: "full"'


DRIFTING = {"throughput": (90.0, 400.0, 1000.0)}, {"throughput": (100.0, 300.0, 1100.0)}  # 0.91x; medians 400 and 300


def test_a_ratio_beside_medians_that_contradict_it_says_what_they_give() -> None:
    a, b = (dict(more) for more in DRIFTING)
    found = entries(main_table(run(cell(**a), cell("contiguous", **b))), "paged (page 16)")
    assert (found["output_tokens_per_s"].sort, found["ratio"].text) == (400.0, "0.91x?")
    assert "medians give 1.33x" in found["ratio"].note
    shown = sections(run(cell(**a), cell("contiguous", **b)))
    assert "Medians give" in next(section.note for section in shown if section.key == "cells")
    alike = entries(main_table(run(cell(throughput=(104.0, 100.0, 96.0)), cell("contiguous"))), "paged (page 16)")
    assert "medians" not in alike["ratio"].note


def test_a_cell_with_wrong_answers_is_marked_and_counts_its_canaries() -> None:
    right = dataclasses.replace(cell("contiguous"), canaries=CanaryCounts(sent=9, answered=9, distinct=9))
    shown = run(wrong(), right)
    found, other = entries(main_table(shown)), entries(main_table(shown), "contiguous")
    assert found["configuration"].note == "baseline, wrong answers" and found["configuration"].mark == "worse"
    assert (found["canaries_wrong"].text, other["canaries_wrong"].text) == ("2 of 40", "0 of 9")
    flat = next(each for each in flat_rows(shown) if each["cell_id"] == shown.cells[0].cell_id)
    assert flat["valid"] is False and "passkey-7" in flat["wrong_answers"]
    assert (flat["canaries_sent"], flat["canaries_answered"], flat["canaries_wrong"]) == (41, 40, 2)
    assert "canaries_wrong" not in entries(main_table(run(cell())))
    assert entries(quality_table(shown.by_load))["valid"].note == "wrong answers"


def test_a_refused_cell_is_marked_and_has_its_servers_message() -> None:
    shown = run(refused(), cell("contiguous"))
    found = entries(main_table(shown), "paged (page 16)")
    assert found["failed"].text == "28 of 48"
    assert found["failed"].note == '28 of 48: server_error: "Context size has been exceeded."'
    assert found["configuration"].note == "baseline, refused"
    assert found["output_tokens_per_s"].note == "one repeat\nwhole run"  # what it served, over the whole load
    flat = next(row for row in flat_rows(shown) if row["configuration"] == "paged (page 16)")
    assert flat["valid"] is False and "28 of 48" in flat["refused"] and flat["invalid_reasons"] == ""
    assert [row[2] for row in texts(quality_table(shown.by_load))] == ["yes", "yes"]
    assert found["ratio"].text == "–" and "ratio_to" not in flat  # compared with none
    changed_alone = effect_table(Comparisons.of(run(cell(), refused(page_size=8))))
    assert changed_alone.rows[0].values[3:] == ()


def test_effects_are_ratios_to_the_baseline_the_highest_load_first() -> None:
    cells = [cell(load=load, **more) for load in (3, 24) for more in ({}, {"page_size": 8, "throughput": (200.0,) * 3})]
    table = effect_table(Comparisons.of(run(*cells)))
    assert [row[:4] for row in texts(table)] == [("page size", "16 → 8", f"{n} at once", "2.00x") for n in (24, 3)]
    assert table.rows[0].values[3].mark == "better"
    slower = effect_table(Comparisons.of(run(cell(), cell(preemption_mode="swap", tpot=(40.0,) * 3))))
    assert texts(slower)[0][:2] == ("preemption", "recompute → swap")
    assert [(v.text, v.mark) for v in slower.rows[0].values[5:]] == [("2.00x", "worse")] * 2


def group(n: int, **more: Any) -> dict[str, Any]:
    return {"n": n, "ttft_ms": {"p50": 9.0, "p95": 20.0, "uncertain": ["p95"]}, **more}


def test_the_most_urgent_class_comes_first_with_its_priority_and_turns_have_a_table() -> None:
    def classes(**priorities: int) -> list[tuple[str, ...]]:
        found = {name: group(n, priority=priorities[name]) for name, n in (("batch", 30), ("chat", 10))}
        return [row[:1] + row[3:6] for row in texts(class_table(run(changed(cell(), per_class=found))))]

    assert classes(batch=5, chat=0) == [
        ("chat (priority 0)", "10", "9.0 ms", "20.0 ms*"), ("batch (priority 5)", "30", "9.0 ms", "20.0 ms*"),
    ]  # fmt: skip
    assert [row[0] for row in classes(batch=0, chat=0)] == ["batch", "chat"]
    assert class_table(run(changed(cell(), per_class={"chat": group(10)}))).rows == ()  # one class only
    turns = run(changed(cell(), per_turn={"first": group(8, priority=0), "later": group(20)}))
    assert [(row[0], row[3], row[5]) for row in texts(turn_table(turns))] == [
        ("first turn", "8", "20.0 ms*"), ("later turns", "20", "20.0 ms*"),
    ]  # fmt: skip
    assert {row.values[1].note for row in turn_table(turns).rows} == {"whole run"}  # as older runs stored them
    assert turn_table(run(cell())).rows == ()


def test_the_steps_of_a_rate_have_a_table_of_medians() -> None:
    def step(rate: float, served: float) -> dict[str, Any]:
        return {
            "request_rate": rate, "start_s": 0.0, "end_s": 30.0, "steady_request_throughput": served,
            "steady_output_throughput": served * 50, "ttft_ms": {"p95": 120.0}, "tpot_ms": {"p50": 9.0},
            "steady_goodput": None, "n": 60,
        }  # fmt: skip

    one = cell(load=0, mode="open")
    plain = run(cell(load=0, mode="open"))
    for repeat, rate in zip(one.repeats, (5.0, 5.5, 7.0), strict=True):
        put(repeat.metrics, plateaus=[step(2, 2.0), step(8, rate)])
    assert [row[1:] for row in texts(plateau_table(run(one).cells))] == [
        ("2/s", "0–30", "60", "2.00", "100", "120 ms", "9.0 ms"),
        ("8/s", "0–30", "60", "5.50", "275", "120 ms", "9.0 ms"),
    ]
    assert plateau_table(plain.cells).rows == ()


def sections(shown: Run) -> list[Section]:
    return [section for chapter in plain_document(shown).chapters for section in chapter.sections]


def test_sections_without_rows_are_left_out() -> None:
    assert [section.key for section in sections(run(cell()))] == ["cells", "frontier", "quality"]
    (only,) = sections(run(missing=("paged-c3",)))
    assert only.table.rows[0].values[0].text == "paged-c3"


def test_quality_shows_the_worst_repeat_of_client_and_machine() -> None:
    machine = {"foreign_cpu_cores": 0.42, "steal_share": 0.031, "load_average": 3.2, "cores": 2}
    client = {"lag_p99_ms": 0.17, "lag_source": "server stamps", "cpu_fraction": 0.021}
    pair = (cell(client=client, machine=machine), cell("contiguous", reasons=("repeat 1: lag", "repeat 2: lag")))
    put(pair[0].repeats[1].metrics, client=client | {"lag_p99_ms": 0.9})
    table = quality_table(pair)
    paged, contiguous = (entries(table, one.name) for one in pair)
    assert {key: paged[key].text for key in ("client_lag_p99_ms", "client_cpu", "valid")} == {
        "client_lag_p99_ms": "0.90", "client_cpu": "2.1 %", "valid": "yes",
    }  # fmt: skip
    assert paged["client_lag_p99_ms"].note == "server stamps"
    assert [paged[f"machine_{k}"].text for k in machine] == ["0.42", "3.1 %", "3.20", "2"]
    assert (contiguous["valid"].text, contiguous["valid"].note) == ("no", "2 reasons")
    assert contiguous["machine_steal_share"].text == "–"
    few = {"lag_p99_ms": 4.0, "lag_source": "server stamps", "lag_judged": False}
    loop = {"loop_lag_p99_ms": 4.0, "lag_source": "kernel stamps"}
    for lag, note in ((few, "not judged: too few chunks"), (loop, "kernel stamps")):
        value = entries(quality_table([cell(client=lag)]))["client_lag_p99_ms"]
        assert value.text == "4.0" and note in value.note
    plain = quality_table([cell()])
    assert [column.key for column in plain.columns] == ["configuration", "load", "valid"]  # no columns of dashes


def test_quality_of_an_open_loop_of_several_processes_has_slip_cost_and_processes() -> None:
    client = {
        "lag_p99_ms": 0.4, "cpu_fraction": 0.31, "schedule_slip_p99_ms": 1.25, "coalesced_share": 0.0004,
        "cpu_s_per_1000_output_tokens": 0.125, "processes": [{"name": "a"}, {"name": "b"}],
    }  # fmt: skip
    shown = run(cell(client=client, load=4, mode="open", machine={"foreign_cpu_cores": 0.02}), cell("contiguous"))
    values = entries(quality_table(shown.by_load))
    assert [values[f"client_{k}"].text for k in ("schedule_slip_p99_ms", "coalesced_share", "processes")] == [
        "1.2", "0.04 %", "2",
    ]  # fmt: skip
    assert values["client_cpu"].note == "0.12 s/1,000"
    (said,) = worst_of_all(shown.cells)
    assert all(part in said for part in ("0.40 ms", "1.2 ms", "31 % of a core", "0.12 s", "0.02 cores"))


CALIBRATION = {
    "settings": {"streams": 64, "itl_ms": 20.0, "processes": 4, "seconds": 3.0},
    "figures": {"lag_p99_ms": 0.334, "itl_error_p99_ms": 0.29, "cpu_us_per_event": 21.4, "coalesced_share": 0.0001},
    "reasons": ["it lags."],
}


@pytest.mark.parametrize(
    ("calibration", "said"),
    [
        ({"measured": [CALIBRATION]}, ["64 streams of 20 ms", "4 processes", "0.33 ms", "21 µs", "0.01 %", "it lags."]),
        ({"left_out": True, "measured": []}, ["not calibrated"]),
        (None, []),
    ],
)
def test_the_clients_calibration_is_a_sentence(calibration: dict | None, said: list[str]) -> None:
    found = calibrations(run(cell(), calibration=calibration))
    assert len(found) == bool(said) and all(part in found[0] for part in said)


def test_a_row_that_is_not_told_apart_says_what_would_have_shown() -> None:
    scattered = (80.0, 100.0, 130.0)
    shown = run(cell(), cell(page_size=8, throughput=scattered), cell(page_size=64, throughput=(150.0, 151.0, 152.0)))
    unclear, told = ({c.key: v for c, v in zip(effect_table(Comparisons.of(shown)).columns, row.values, strict=True)}
                     for row in effect_table(Comparisons.of(shown)).rows)  # fmt: skip
    assert "121 % would show" in unclear["output tok/s"].note and "would show" not in told["output tok/s"].note
    note = next(section.note for section in sections(shown) if section.key == "effects")
    assert "2.2 % to 121 % in output tok/s" in note
    few = run(cell(throughput=(100.0,)), cell(page_size=8, throughput=(50.0,)))
    assert "Fewer than 3 repeats" in next(section.note for section in sections(few) if section.key == "effects")
