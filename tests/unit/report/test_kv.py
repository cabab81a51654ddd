"""When requests waited for KV, what the budget is divided into, and where it went, in a sentence."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pandas as pd
import pytest

from kvbench.common.files import write_json
from kvbench.report.comparisons import Comparisons
from kvbench.report.decision import Decision
from kvbench.report.kv import ledger_sentence, reservation
from kvbench.report.limits import KV
from kvbench.report.provenance import kv_capacity
from kvbench.runs.kv_ledger import SLOT_USES
from kvbench.runs.model import MeasuredCell
from kvbench.runs.read import read_run
from kvbench.runs.results import Capacity
from tests.support.report_cells import cell
from tests.support.report_cells import run as run_of
from tests.support.report_parts import ledgers, memory_table


def test_a_request_waits_for_room_only_while_another_would_not_fit(make):
    """The toy engine's contiguous layout queues at 24 users and holds all 3; its paged one has room for all."""
    run = make(repeats=1)
    found = {(each.cell.config_id, each.cell.load.value): each.limit for each in Decision.of(run).limits}
    low, high = sorted({load for _, load in found})
    assert found["layout-contiguous", high] == KV and found["layout-contiguous", low] != KV
    waited = {(c.config_id, c.load.value): max(c.observed("kv_full").values()) for c in run.cells}
    assert waited["layout-contiguous", high] > 0.5 and waited["layout-contiguous", low] == 0


@pytest.mark.parametrize(
    ("settings", "capacity", "waited"),
    [
        ({"max_num_seqs": 1}, {}, 0.0),  # the batch is full, not the KV
        ({"reservation": "pow2"}, {"capacity_tokens": 10**9}, 0.5),  # holes between the reservations
        ({"layout": None}, {"capacity_tokens": None}, None),
    ],
)
def test_what_requests_wait_for_is_told_apart(make, settings, capacity, waited):
    toy = make(repeats=1, concurrencies=(24,)).folder
    (path,) = toy.glob("cells/layout-contiguous-*24/summary.json")
    summary = json.loads(path.read_text())
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


@pytest.mark.parametrize(
    ("capacity", "text"),
    [
        ({"capacity_tokens": 6144, "bytes_per_token": 16384}, "6,144 tokens, 96 MiB"),
        # What the server says of its bytes wins over the arithmetic.
        (
            {"capacity_tokens": 6400, "bytes_per_token": 16384, "kv_bytes": 50 << 20, "kv_type": "f16"},
            "6,400 tokens, 50 MiB of f16",
        ),
        ({"kv_budget_bytes": 1 << 20}, ""),
    ],
)
def test_a_capacity_is_shown_in_tokens_and_bytes(capacity, text):
    assert kv_capacity(Capacity.parse(capacity)) == text


def test_reservation_stands_beside_the_requests_own_lengths(tmp_path):
    lengths = pd.DataFrame({"t0": [0.0, 1.0], "prompt_tokens": [700, 20], "output_tokens": [132, 30], "ok": [True] * 2})
    lengths.to_parquet(tmp_path / "requests.parquet")
    contiguous = replace(cell("contiguous", max_model_len=2048), folder=tmp_path, name="contiguous")
    text = reservation(contiguous)
    assert all(number in text for number in ("Contiguous", "2,048", "832", "441"))
    assert reservation(cell("contiguous")) == ""  # no lengths known, nothing said
    exact = replace(cell("contiguous", max_model_len=2048, reservation="oracle"), folder=tmp_path)
    assert reservation(exact) == ""  # each request's own length, no one number


def ledger_sentence_of(*cells: MeasuredCell) -> str:
    measured = run_of(*cells)
    return ledger_sentence(Comparisons.of(measured), ledgers(measured))


def uses(**slots: float) -> dict[str, float]:
    known = {f"use_{use}": slots.get(use, 0.0) for use in SLOT_USES}
    return known | {"kv_bytes_per_slot": 1.0, "kv_budget_bytes": 1000.0}


def test_the_ledgers_sentence_is_of_the_pair_else_of_the_baseline():
    paged = cell(observed=uses(tokens=660, waste=21, free=319))
    contiguous = cell("contiguous", observed=uses(tokens=120, waste=760, free=4, fragmented=116))
    low = [cell(kind, load=3, observed=uses(free=1000)) for kind in ("paged", "contiguous")]
    said = ledger_sentence_of(paged, contiguous, *low)
    assert re.findall(r"[\d.]+ %", said) == ["12 %", "76 %", "12 %", "66 %", "2.1 %", "32 %"]
    assert said.startswith("At 24 concurrent requests contiguous held")
    base = cell(observed=uses(tokens=500, waste=100, cached=400))
    alone = ledger_sentence_of(base, cell(page_size=8, observed=uses(tokens=1)))
    assert all(part in alone for part in ("paged (page 16)", "50 %", "10 %", "40 % cached"))
    broken = cell("contiguous", observed=uses(tokens=500), reasons=("late",))
    assert "Invalid measurement" in ledger_sentence_of(base, broken)
    assert ledger_sentence_of(cell()) == ""
