"""Where the KV bytes went: the ledger against tables of polls whose averages are worked out on paper."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvbench.report.document import document
from kvbench.report.page import write_report
from kvbench.runs.kv_ledger import SLOT_USES, accounting, ledger, mean_slots, swapped_bytes
from kvbench.runs.model import Run
from kvbench.runs.read import read_run
from tests.support.report_cells import cell
from tests.support.report_parts import ledger_drawing, ledger_section, ledger_table, ledgers

MIB = 2**20


def polls(*rows: dict[str, float]) -> pd.DataFrame:
    """Polls of a server with 100 slots; ``rows``: t, slot steps by use so far, and gauges."""
    base = {"repeat": 1, "num_requests_running": 1, "kv_slots_total": 100} | steps()
    return pd.DataFrame([base | row for row in rows])


def steps(**slots: float) -> dict[str, float]:
    return {f"kv_slot_steps_total_{use}": slots.get(use, 0.0) for use in SLOT_USES}


def gauges(t: float, reserved: float, used: float, **more: float) -> dict[str, float]:
    return {"t": t, "kv_slots_reserved": reserved, "kv_slots_used": used, **more}


def test_steps_between_polls_are_averaged_and_the_intervals_weighted_by_time() -> None:
    # 0..1 s: four steps with 10 + 90; 1..4 s: two steps with 70 tokens, 10 waste, 20 free.
    frame = polls(
        {"t": 0.0}, {"t": 1.0, **steps(tokens=40, free=360)},
        {"t": 4.0, **steps(tokens=40 + 140, waste=20, free=360 + 40)},
    )  # fmt: skip
    found = mean_slots(frame, 0.0, math.inf)
    assert found["tokens"] == pytest.approx((1 * 10 + 3 * 70) / 4)  # by steps it would be 30
    assert found["waste"] == pytest.approx(3 * 10 / 4)
    assert found["free"] == pytest.approx((1 * 90 + 3 * 20) / 4)
    assert sum(found.values()) == pytest.approx(100)


def test_only_the_window_counts_and_an_interval_that_sticks_out_counts_in_part() -> None:
    frame = polls(
        {"t": 0.0}, {"t": 2.0, **steps(tokens=10, free=90)}, {"t": 4.0, **steps(tokens=60, free=140)},
        {"t": 6.0, **steps(tokens=160, free=140)},
    )  # fmt: skip
    assert mean_slots(frame, 2.0, 4.0)["tokens"] == pytest.approx(50)
    assert mean_slots(frame, 3.0, 5.0)["tokens"] == pytest.approx((1 * 50 + 1 * 100) / 2)


def test_an_interval_without_a_step_is_what_the_gauges_say() -> None:
    frame = polls(
        gauges(0.0, 0, 0),
        gauges(1.0, 60, 40),  # a step that lasts longer than the interval
        gauges(2.0, 60, 60, **steps(tokens=60, free=40)),
    )
    found = mean_slots(frame, 0.0, 2.0)
    assert (found["tokens"], found["waste"], found["free"]) == pytest.approx((50, 10, 40))


def test_polls_that_do_not_enclose_the_window_say_what_the_gauges_said() -> None:
    frame = polls(gauges(5.0, 60, 40), gauges(6.0, 60, 60))
    assert mean_slots(frame, 0.0, 1.0)["tokens"] == pytest.approx(50)
    assert mean_slots(frame.iloc[:1], 5.0, 6.0)["tokens"] == pytest.approx(40)
    assert mean_slots(frame, 5.2, 5.3)["tokens"] == pytest.approx(60), "the interval around it, as its last poll says"
    assert mean_slots(frame.assign(kv_slots_total=float("nan")), 0.0, 1.0) == {}, "without slots nothing is known"


def stored(folder: Path, frame: pd.DataFrame, server: dict[str, float], **summary: Any) -> Run:
    """A run of one cell of one repeat with a hand-made server.parquet and counters."""
    where = folder / "run" / "cells" / "a"
    where.mkdir(parents=True)
    frame.to_parquet(where / "server.parquet")
    metrics = {"steady_start_s": 0.0, "steady_end_s": 2.0, "steady_output_throughput": 10.0, "completed": 1}
    base = {
        "cell_id": "a", "config_id": "a", "is_baseline": True, "varied": {},
        "settings": {"layout": "paged", "page_size": 16}, "load": {"mode": "closed", "concurrency": 2},
        "repeats": [{"repeat": 1, "metrics": metrics, "server": server}],
    }  # fmt: skip
    (where / "summary.json").write_text(json.dumps(base | summary))
    (folder / "run" / "manifest.json").write_text(
        json.dumps({"format": 1, "status": "complete", "workload": {}, "plan": []})
    )
    return read_run(folder / "run")


GAUGES = {
    "kv_bytes_per_slot": 1000,
    "kv_scale_bytes_per_slot": 30,
    "kv_budget_bytes": 103_500,
    "page_table_bytes": 2500,
}
COUNTERS = {
    "swapped_out_slots_total": 700.0, "swapped_in_slots_total": 600.0, "swap_lost_slots_total": 100.0,
    "recomputed_tokens_total": 130.0, "num_preemptions_total": 4.0, "swap_seconds_total": 0.25,
    "copied_pages_total": 3.0, "copied_slots_total": 21.0, "hash_seconds_total": 0.125,
    "prefix_cache_hits_total": 48.0, "prefix_cache_queries_total": 96.0, "refused_fragmented_total": 5.0,
}  # fmt: skip


@pytest.fixture
def hand_made(tmp_path: Path) -> Run:
    """100 slots of 1,000 bytes: 60 tokens, 10 waste, 8 cached, 2 pinned, 15 free, 5 scattered; 103.5 kB budget."""
    uses = steps(tokens=60, waste=10, cached=8, pinned=2, free=15, fragmented=5)
    frame = polls({"t": 0.0, "kv_slots_shared": 4, **GAUGES}, {"t": 2.0, "kv_slots_shared": 6, **GAUGES, **uses})
    return stored(tmp_path, frame, COUNTERS)


def test_every_byte_of_the_budget_is_in_one_place(hand_made: Run) -> None:
    found = ledger(hand_made.cells[0])
    assert found is not None
    assert found.parts == {
        "tokens": 60_000, "waste": 10_000, "cached": 8_000, "pinned": 2_000, "free": 15_000, "fragmented": 5_000,
        "table": 2_500, "rest": 1_000,
    }  # fmt: skip
    assert math.fsum(found.parts.values()) == found.budget == 103_500
    assert (found.scales, found.saved) == (1_800, 5_000)
    assert found.share("tokens") == pytest.approx(60_000 / 103_500)
    assert hand_made.cells[0].observed_mean("waste_share") == pytest.approx(10 / 70)  # not the gauges' at two polls


def test_counters_become_bytes_and_csv_columns(hand_made: Run) -> None:
    (only,) = hand_made.cells
    assert swapped_bytes(only) == 700_000 and swapped_bytes(only, "in") == 600_000
    write_report(document(hand_made), hand_made.folder)
    row = pd.read_csv(hand_made.folder / "summary.csv").iloc[0]
    expected = {
        "kv_tokens_bytes": 60_000, "kv_scale_bytes": 1_800, "kv_fragmented_bytes": 5_000, "kv_table_bytes": 2_500,
        "kv_budget_bytes": 103_500, "kv_saved_bytes": 5_000, "swapped_out_bytes": 700_000,
        "swapped_in_bytes": 600_000, "swap_lost_slots": 100, "swap_seconds": 0.25, "copied_pages": 3,
        "copied_slots": 21, "hash_seconds": 0.125, "prefix_cache_hits": 48, "prefix_cache_queries": 96,
        "refused_fragmented": 5, "recomputed_tokens": 130, "num_preemptions": 4,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert set(accounting(only)) <= set(row.index)


def test_table_has_percent_bytes_and_what_stands_beside(hand_made: Run) -> None:
    table = ledger_table(hand_made)
    (row,) = table.rows
    shown = {c.key: (v.text, v.note) for c, v in zip(table.columns, row.values, strict=True)}
    expected = {
        "kv_tokens": ("58 %", "58.6 KiB, 1.8 KiB of it scales"), "kv_budget": ("101 KiB", ""),
        "recomputed_tokens": ("130", ""), "swapped": ("684 KiB", "586 KiB back, 100 tokens lost"),
    }  # fmt: skip
    assert {key: shown[key] for key in expected} == expected
    assert all(word in ledger_section(hand_made).note for word in ("Saved by sharing:", "Swapped:", "Recomputed:"))


def test_columns_and_notes_of_what_never_happened_are_left_out(tmp_path: Path) -> None:
    frame = polls({"t": 0.0, **GAUGES}, {"t": 2.0, **GAUGES, **steps(tokens=60, free=40)})
    section = ledger_section(stored(tmp_path, frame, {"recomputed_tokens_total": 0.0}))
    assert not {"kv_saved", "swapped", "recomputed_tokens"} & {column.key for column in section.table.columns}
    assert not any(word in section.note for word in ("Saved", "Swapped", "Recomputed"))


def test_bars_add_up_to_the_budget_and_scales_are_part_of_the_tokens(hand_made: Run) -> None:
    drawn = ledger_drawing(hand_made)
    assert drawn is not None
    bars = {trace.name: trace for trace in drawn.figure.data}
    assert sum(trace.x[0] for trace in bars.values()) * 1024 == pytest.approx(103_500)
    assert bars["tokens"].x[0] * 1024 == pytest.approx(58_200)
    assert bars["scales of the tokens"].x[0] * 1024 == pytest.approx(1_800)


def test_another_engines_server_has_no_section(run_of: Callable[[str], Run]) -> None:
    run = run_of("foreign")
    assert ledgers(run) == {} and ledger_drawing(run) is None


def test_parts_are_the_mean_over_repeats() -> None:
    size = {"kv_bytes_per_slot": 1.0, "kv_budget_bytes": 1000.0}
    observed = tuple(
        dict.fromkeys((f"use_{use}" for use in SLOT_USES), 0.0) | size
        | {"use_tokens": tokens, "use_free": 1000 - tokens}
        for tokens in (200.0, 600.0)
    )  # fmt: skip
    found = ledger(cell(throughput=(1.0, 1.0), observed=observed))
    assert found is not None and (found.parts["tokens"], found.parts["free"]) == (400, 600)
