"""Sentences that several parts of the report share: the numbers of every case."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.report.comparisons import Comparisons
from kvbench.report.kv import ledger_sentence, reservation
from kvbench.runs.kv_ledger import SLOT_USES
from kvbench.runs.model import MeasuredCell
from tests.support.records import put, take
from tests.support.report_cells import cell, run
from tests.support.report_parts import flat_rows, ledgers, main_table

FAST = {"throughput": (200.0,) * 3}


def pair(a: dict[str, Any], b: dict[str, Any] | None = None) -> list[MeasuredCell]:
    """Paged and contiguous."""
    return [cell(**a), cell("contiguous", **(b or {}))]


def test_a_throughput_of_the_whole_run_says_so_wherever_it_is_compared() -> None:
    """One side without a steady window makes both of the whole run; with one on both sides nothing is said."""
    paged, contiguous = pair(FAST)
    for repeat in contiguous.repeats:
        put(repeat.metrics, output_throughput=take(repeat.metrics, "steady_output_throughput"))
    for repeat in paged.repeats:
        put(repeat.metrics, output_throughput=300.0)
    note = {row.cell.name: row.values for row in main_table(run(paged, contiguous)).rows if row.cell}
    assert any("whole run" in value.note and value.text == "3.00x" for value in note["paged (page 16)"])


def test_tables_do_not_claim_what_the_repeats_do_not_show() -> None:
    unclear = run(*pair({"throughput": (40.0, 170.0, 60.0)}, {"throughput": (60.0,) * 3}))
    paged = next(row.values for row in main_table(unclear).rows if row.cell and row.cell.is_paged)
    assert [(value.text, value.mark) for value in paged if "1.00x" in value.text] == [("1.00x?", "")]
    assert next(f for f in flat_rows(unclear) if "paged" in f["configuration"])["ratio_verdict"] == "undecided"


def test_reservation_stands_beside_the_requests_own_lengths(tmp_path: Path) -> None:
    lengths = pd.DataFrame({"t0": [0.0, 1.0], "prompt_tokens": [700, 20], "output_tokens": [132, 30], "ok": [True] * 2})
    lengths.to_parquet(tmp_path / "requests.parquet")
    contiguous = replace(cell("contiguous", max_model_len=2048), folder=tmp_path, name="contiguous")
    text = reservation(contiguous)
    assert all(number in text for number in ("Contiguous", "2,048", "832", "441"))
    assert reservation(cell("contiguous")) == ""  # no lengths known, nothing said
    exact = replace(cell("contiguous", max_model_len=2048, reservation="oracle"), folder=tmp_path)
    assert reservation(exact) == ""  # each request's own length, no one number


def ledger_sentence_of(*cells: MeasuredCell) -> str:
    measured = run(*cells)
    return ledger_sentence(Comparisons.of(measured), ledgers(measured))


def uses(**slots: float) -> dict[str, float]:
    known = {f"use_{use}": slots.get(use, 0.0) for use in SLOT_USES}
    return known | {"kv_bytes_per_slot": 1.0, "kv_budget_bytes": 1000.0}


def test_the_ledgers_sentence_is_of_the_pair_else_of_the_baseline() -> None:
    held = pair(
        {"observed": uses(tokens=660, waste=21, free=319)},
        {"observed": uses(tokens=120, waste=760, free=4, fragmented=116)},
    )
    low = pair({"load": 3, "observed": uses(free=1000)}, {"load": 3, "observed": uses(free=1000)})
    assert ledger_sentence_of(*held, *low) == (
        "At 24 concurrent requests contiguous held tokens in 12 % of the KV budget and wasted 76 % on slots reserved "
        "and empty (12 % free but scattered); paged (page 16) held tokens in 66 % and wasted 2.1 % on slots reserved "
        "and empty (32 % free)."
    )
    base = cell(observed=uses(tokens=500, waste=100, cached=400))
    alone = ledger_sentence_of(base, cell(page_size=8, observed=uses(tokens=1)))
    assert all(part in alone for part in ("paged (page 16)", "50 %", "10 %", "40 % cached"))
    broken = cell("contiguous", observed=uses(tokens=500), reasons=("late",))
    assert "Invalid measurement" in ledger_sentence_of(base, broken)
    assert ledger_sentence_of(cell()) == ""
