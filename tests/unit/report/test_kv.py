"""Whether KV memory was the bottleneck, as a run says it."""

from __future__ import annotations

import json

import pytest

from kvbench.common.files import write_json
from kvbench.report.kv import kv_bottleneck, memory_table
from kvbench.report.page import context
from kvbench.runs.read import read_run
from tests.support.report_cells import cell
from tests.support.report_cells import run as run_of
from tests.support.synthetic_run import make_run

ROOM = {"usage_max": 0.92, "kv_full": 0.0}


def test_kv_that_nobody_waited_for_was_not_the_bottleneck():
    said = kv_bottleneck(run_of(cell(observed={"usage_max": 0.4, "kv_full": 0.0}), cell(page_size=32, observed=ROOM)))
    assert "not the bottleneck at 24" in said and "92 %" in said and "(paged (page 32))" in said


def test_those_that_waited_or_preempted_are_named_and_those_that_did_not():
    full = {"usage_max": 1.0, "kv_full": 0.5}
    run = run_of(
        cell("contiguous", observed=full), cell(observed=ROOM | {"kv_full": 0.01}), cell(page_size=8, preemptions=2,
        observed=ROOM), cell("contiguous", load=3, observed=full)
    )  # fmt: skip
    said = kv_bottleneck(run)
    assert "was the bottleneck at 24" in said and "contiguous (requests waited for room 50 %" in said
    assert "paged (page 8) (6 preemptions)" in said and "not for paged (page 16)." in said
    assert context(run)[0] == said


def test_nothing_is_said_where_it_is_not_known_or_not_valid():
    assert kv_bottleneck(run_of(cell(), cell("contiguous"))) == ""
    assert kv_bottleneck(run_of(cell(observed={"usage_max": 1.0}))) == ""  # of a KV whose size nobody tells
    assert kv_bottleneck(run_of(cell(observed=ROOM, reasons=("repeat 1: lag",)))) == ""


def test_a_short_wait_for_room_is_not_hidden():
    said = kv_bottleneck(run_of(cell(observed=ROOM | {"kv_full": 0.03})))
    assert "not the bottleneck" in said and "3.0 % of the time" in said and "no request waited" not in said


def test_a_request_waits_for_room_only_while_another_would_not_fit(tmp_path):
    """The toy engine's contiguous layout queues at 24 users and holds all 3; its paged one has room for all."""
    run = read_run(make_run(tmp_path))
    waited = {(c.config_id, c.load.value): max(c.observed("kv_full").values()) for c in run.cells}
    low, high = sorted({load for _, load in waited})
    assert waited["layout-contiguous", high] > 0.5 and waited["layout-contiguous", low] == 0


def summary_of(run):
    (path,) = run.glob("cells/layout-contiguous-*24/summary.json")
    return path, json.loads(path.read_text())


@pytest.mark.parametrize(
    ("settings", "capacity", "waited"),
    [
        ({"max_num_seqs": 1}, {}, 0.0),  # the batch is full, not the KV
        ({"reservation": "pow2"}, {"capacity_tokens": 10**9}, 0.5),  # holes between the reservations
        ({"layout": None}, {"capacity_tokens": None}, None),
    ],
)
def test_what_requests_wait_for_is_told_apart(tmp_path, settings, capacity, waited):
    path, summary = summary_of(make_run(tmp_path))
    write_json(path, summary | {"settings": summary["settings"] | settings, "capacity": summary["capacity"] | capacity})
    found = next(c for c in read_run(tmp_path).cells if c.folder == path.parent).observed("kv_full")
    assert (min(found.values()) >= waited if waited else max(found.values()) == 0) if waited is not None else not found


def test_what_the_budget_is_divided_into_is_a_row_a_configuration():
    told = {"kv_bytes_per_slot": 4352.0, "kv_scale_bytes_per_slot": 256.0, "page_table_bytes": 2.0**20}
    computed = {"bytes_per_slot": 16384, "scale_bytes_per_slot": 0, "capacity_tokens": 6192, "page_table_bytes": 32768}
    shown = run_of(
        cell("contiguous", budget=None), cell(load=3, capacity=computed), cell(capacity=computed),
        cell(kv_cache_dtype="int8", observed=told, capacity={"capacity_tokens": 23360}),
    )  # fmt: skip
    table = memory_table(shown)
    entries = [[(value.text, value.note) for value in row.values] for row in table.rows]
    assert [row.cell.load.value for row in table.rows] == [24, 24], "of the contiguous one nothing is known"
    assert entries[0][1:] == [("16 KiB", ""), ("0", ""), ("6,192", ""), ("32 KiB", "0.024 %")]
    assert entries[1][1:] == [("4.2 KiB", ""), ("256 B", ""), ("23,360", ""), ("1 MiB", "0.78 %")]
    assert not memory_table(run_of(cell("contiguous"))).rows
