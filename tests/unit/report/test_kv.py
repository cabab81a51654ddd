"""When requests waited for KV, and what the budget is divided into."""

from __future__ import annotations

import json
import shutil

import pytest

from kvbench.common.files import write_json
from kvbench.runs.read import read_run
from tests.support.report_cells import cell
from tests.support.report_cells import run as run_of
from tests.support.report_parts import memory_table


@pytest.fixture
def toy(tmp_path, run_folder):
    """A copy of the folder of a run, for a test to change."""
    return shutil.copytree(run_folder("normal"), tmp_path / "toy")


def test_a_request_waits_for_room_only_while_another_would_not_fit(run_folder):
    """The toy engine's contiguous layout queues at 24 users and holds all 3; its paged one has room for all."""
    run = read_run(run_folder("normal"))
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
def test_what_requests_wait_for_is_told_apart(toy, settings, capacity, waited):
    path, summary = summary_of(toy)
    write_json(path, summary | {"settings": summary["settings"] | settings, "capacity": summary["capacity"] | capacity})
    found = next(c for c in read_run(toy).cells if c.folder == path.parent).observed("kv_full")
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


def test_the_largest_channel_is_shown_of_servers_that_tell_it_in_full_precision_too():
    one, other = cell(capacity={"bytes_per_slot": 16384}), cell(page_size=8, capacity={"bytes_per_slot": 16384})
    told = {one.config_id: {"kv_outliers": {"k": 1110.0, "k_layer": 3, "v": 1.7, "v_layer": 3, "k_stored": 1.72}}}
    table = memory_table(run_of(one, other, servers=told))
    assert table.columns[-1].key == "kv_outliers"
    assert [(row.values[-1].text, row.values[-1].note) for row in table.rows] == [("1,110x", "V: 1.7x"), ("–", "")]
