"""Sentences: the numbers of every case, and no claim that the data do not support."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvbench.report.comparisons import compare
from kvbench.report.figures.cells import drawings
from kvbench.report.tables import flat_rows, main_table
from kvbench.report.wording import conclusions, headline, kernel_cost, ledger_sentence, reservation, tiles
from kvbench.runs.kv_ledger import SLOT_USES
from kvbench.runs.model import MeasuredCell, Run
from tests.support.report_cells import cell, refused, run

FAST = {"throughput": (200.0,) * 3}
SCATTERED = {"throughput": (97.8, 423.0, 462.0), "tpot": (216.0, 30.0, 43.0)}
SLOW = {"throughput": (45.0, 47.0, 42.0), "tpot": (58.0, 59.0, 60.0)}
OPEN = {"mode": "open", "load": 4}
SWAPPED = {
    "preemptions": 4, "capacity": {"bytes_per_token": 16_384}, "preemption_mode": "swap",
    "server": {"recomputed_tokens_total": 7.0, "swapped_out_slots_total": 1024.0},
}  # fmt: skip


def pair(a: dict[str, Any], b: dict[str, Any] | None = None) -> list[MeasuredCell]:
    """Paged and contiguous."""
    return [cell(**a), cell("contiguous", **(b or {}))]


def test_the_headline_has_ratio_spread_budget_concurrency_low_load_and_price() -> None:
    cells = [
        *pair(
            {"throughput": (190.0, 185.0, 196.0), "running": 18.2, "tpot": (61.0,) * 3, "preemptions": 4},
            {"running": 4.0, "tpot": (24.0,) * 3},
        ),
        *pair({"load": 3, "throughput": (99.0, 98.0, 100.0)}, {"load": 3}),
    ]
    assert headline(run(*cells)) == (
        "At 24 concurrent requests and the same 128 MiB of KV, paged (page 16) delivered 1.90x (1.85–1.96 over 3 "
        "repeats) the output tokens/s of contiguous, with 18.2 sequences running at once against 4.0; at 3 it was "
        "level, 0.99x (0.98–1.00); median TPOT 61.0 ms instead of 24.0 ms; 12 preemptions in 3 repeats "
        "(1,200 tokens recomputed)."
    )


@pytest.mark.parametrize(
    ("cells", "said", "not_said"),
    [
        pytest.param(pair(FAST | SWAPPED, SWAPPED), ["12 preemptions", "21 tokens", "48 MiB"], [], id="swap"),
        pytest.param(
            pair({"throughput": (60.0, 61.0, 62.0), "tpot": (40.0,) * 3}),
            ["slower than contiguous: 0.61x", "median TPOT 40.0 ms instead of 20.0 ms"], ["delivered"], id="slower",
        ),
        pytest.param(
            pair({"throughput": (99.0, 101.0, 103.0)}), ["level with contiguous", "1.01x (0.99–1.03 over 3 repeats)"],
            ["delivered", "No verdict"], id="level",
        ),
        pytest.param(
            pair({"throughput": (190.0,)}, {"throughput": (100.0,)}), ["No verdict: ", "1.90x", "one repeat"],
            ["delivered"], id="one repeat",
        ),
        pytest.param(
            pair({"throughput": (150.0, 160.0)}, {"throughput": (100.0,) * 2}), ["No verdict: ", "2 repeats, too few"],
            ["delivered"], id="two repeats",
        ),
        pytest.param(
            [
                *pair(SCATTERED, SLOW),
                *pair({"load": 3, "throughput": (36.0, 123.0, 216.0)}, {"load": 3, "throughput": (50.0, 170.0, 52.0)}),
            ],
            ["No verdict: ", "9.00x (2.17–11.0 over 3 repeats; 95 %", "0.72x (0.72–4.15", "97.8–462"],
            ["delivered", "level"],
            id="interval includes 1",
        ),
        pytest.param(
            pair(FAST | {"tpot": (10.0, 20.0, 45.0)}), ["2.00x", "not told apart, 1.00x (0.50–2.25"], [],
            id="TPOT unclear",
        ),
        pytest.param(pair(FAST), ["median TPOT level, 1.00x", "no preemptions"], ["sequences"], id="no price"),
        pytest.param(pair({"max_num_seqs": "{a}"}), ["max_num_seqs {a}"], [], id="braces in a name"),
        pytest.param(
            pair({"budget": 64 * 2**20}, {"max_num_seqs": 4}), ["64 MiB against 128 MiB", "max_num_seqs"], [],
            id="unequal",
        ),
        pytest.param(
            pair(FAST, {"reasons": ("repeat 2: lag p99 3 ms; do this", "x")}),
            ["No verdict", "invalid (contiguous: lag p99 3 ms, and 1 more reason)", "kvbench sweep --resume"],
            ["do this", "2.00x", "200"], id="invalid",
        ),
        pytest.param(
            [*pair(FAST), *pair({"load": 3, "reasons": ("x",)}, {"load": 3})],
            ["delivered 2.00x", "at 3 there is no verdict (invalid"], [],
            id="invalid low load",
        ),
        pytest.param(pair(FAST | {"failed": 3}), ["9 of 144 requests of paged (page 16)"], [], id="failures"),
        pytest.param(pair({"throughput": ()}), ["No verdict: ", "share no repeat"], [], id="no common repeat"),
        pytest.param(
            pair(OPEN | {"ttft": (800.0,) * 3}, OPEN | {"ttft": (3200.0,) * 3}),
            ["At 4 requests/s", "800 ms instead of 3,200 ms"], [], id="open loop",
        ),
        pytest.param([cell(load=3), cell("contiguous")], ["share no load"], [], id="no common load"),
        pytest.param([cell("contiguous", **FAST)], ["Without a paged cell", "200"], [], id="contiguous only"),
        pytest.param([cell("")], ["delivered 100"], ["paging"], id="another engine"),
        pytest.param([cell(reasons=("x",))], ["no cell at 24 concurrent requests is valid"], [], id="none valid"),
        pytest.param([], ["Nothing was measured"], [], id="empty"),
    ],
)  # fmt: skip
def test_headlines(cells: list[MeasuredCell], said: list[str], not_said: list[str]) -> None:
    text = headline(run(*cells))
    assert all(part in text for part in said), text
    assert not any(part in text for part in not_said), text


def test_the_headline_has_at_most_three_further_clauses_failures_first() -> None:
    everything = pair(SCATTERED | {"failed": 3, "preemptions": 4}, SLOW | {"failed": 3})
    text = headline(run(*everything, *pair({"load": 3}, {"load": 3})))
    assert text.count("; ") == 4 and text.count(" failed and ") == 2 and "at 3 " in text  # one ; of an interval
    assert "preemption" not in text


def without_steady(*cells: MeasuredCell) -> tuple[MeasuredCell, ...]:
    for one in cells:
        for repeat in one.repeats:
            repeat.metrics["output_throughput"] = repeat.metrics.pop("steady_output_throughput")  # type: ignore
    return cells


def test_a_throughput_of_the_whole_run_says_so_wherever_it_is_compared() -> None:
    """One side without a steady window makes both of the whole run; with one on both sides nothing is said."""
    paged, contiguous, eight = *pair(FAST), cell(page_size=8)
    assert not any("whole run" in text for text in _said(run(paged, contiguous, eight)))
    without_steady(contiguous)
    for one in (paged, eight):
        for repeat in one.repeats:
            repeat.metrics["output_throughput"] = 300.0  # type: ignore[index]
    mixed = run(paged, contiguous, eight)
    assert all("whole run" in text for text in _said(mixed)) and "3.00x" in headline(mixed)
    assert "300 output tokens/s (whole run)" in _said(mixed)[-1]  # not the 200 of its steady window
    note = {row.cell.name: [v.note for v in row.values] for row in main_table(mixed).rows if row.cell}
    assert any("whole run" in each and "–" in each for each in note["paged (page 16)"])  # beside the ratio


def _said(measured: Run) -> list[str]:
    """The headline, the first tile, the first figure's title, and what was bought and is best."""
    bought, best = (points(measured, title)[0] for title in ("What paging bought", "Which configuration is best"))
    return [headline(measured), tiles(measured)[0].label, drawings(measured)[0].title, bought, best]


def test_a_paired_ratio_that_contradicts_the_two_values_beside_it_says_so() -> None:
    drifting = pair({"ttft": (90.0, 400.0, 1000.0)}, {"ttft": (100.0, 300.0, 1100.0)})  # 0.90, 1.33, 0.91; 400 / 300
    (text,) = points(run(*drifting), "What paging bought")
    assert "0.91x" in text and "these two give 1.33x" in text
    (plain,) = points(run(*pair({"ttft": (90.0,) * 3}, {"ttft": (100.0,) * 3})), "What paging bought")
    assert "0.90x" in plain and "these two" not in plain


def test_an_incomplete_run_says_so_first() -> None:
    assert headline(run(*pair({}), missing=("a", "b"))).startswith("Incomplete run (2 of 4 cells measured): At 24")
    assert headline(run(*pair({}), status="incomplete")).startswith("Incomplete run: At 24")


def test_without_a_pair_the_best_is_named_and_what_it_is_not_told_apart_from() -> None:
    cells = (cell(**FAST), cell(page_size=8))
    assert headline(run(*cells)).startswith("Without a contiguous cell")
    swept: dict[str, Any] = {"workload": {"sweep": {"page_size": [8]}}}
    assert "paged (page 16) delivered the most: 200" in headline(run(*cells, **swept))
    assert "Without" not in headline(run(*cells, **swept))
    swept["workload"]["sweep"]["layout"] = ["contiguous"]
    assert headline(run(*cells, **swept)).startswith("Without a contiguous cell")
    unclear = headline(run(cell(**FAST), cell(page_size=8, throughput=(90.0, 190.0, 300.0))))
    assert "No verdict on which is best" in unclear and "not told apart from paged (page 8)" in unclear


def test_a_server_that_refused_requests_is_said_with_its_message_and_compared_with_none() -> None:
    told = "served 20 of 48 requests and refused the others ('Context size has been exceeded.' x 28)"
    alone = headline(run(refused()))
    assert told in alone and "No verdict" in alone and "invalid" not in alone
    pair_of = headline(run(refused(), cell("contiguous", baseline=False)))
    assert told in pair_of and "No verdict" in pair_of and "invalid" not in pair_of and "x the output" not in pair_of
    beside = headline(run(cell(**FAST), refused(page_size=8)))
    assert "Only paged (page 16) served its load" in beside and told in beside and "validly" not in beside
    low = headline(run(*pair(FAST), refused(load=3), cell("contiguous", load=3)))
    assert "2.00x" in low and "at 3 there is no verdict (requests were refused)" in low


def test_nothing_is_compared_with_a_measurement_that_is_invalid() -> None:
    base, top = cell(reasons=("it lagged",)), cell(page_size=8, **FAST)
    alone = headline(run(base, top))
    assert "Only paged (page 8) was validly measured at 24 concurrent requests" in alone
    assert "2.00x" not in alone and "the most" not in alone
    which = next(c for c in conclusions(run(base, top)) if c.title == "Which configuration is best").points
    assert len(which) == 1 and which[0] in alone
    three = headline(run(base, top, cell(page_size=4)))
    assert "paged (page 8) delivered the most: 200 output tokens/s" in three
    assert "not comparable with the baseline paged (page 16)" in three and "2.00x" not in three


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ({"tpot": (22.0,) * 3, "running": 3.0}, {"running": 3.0}, ["1.10x", "walking page tables cost time"]),
        ({"tpot": (22.0,), "throughput": (9.0,), "running": 3.0}, {"running": 3.0}, ["too few"]),
        ({"running": 18.0}, {"running": 4.0}, ["unknown", "18.0", "4.0"]),
        ({}, {}, ["unknown", "not known"]),
    ],
)
def test_kernel_cost_is_told_only_where_the_same_number_ran(a: dict, b: dict, said: list[str]) -> None:
    text = kernel_cost(compare(*pair({"load": 3} | a, {"load": 3} | b)))
    assert all(part in text for part in said), text


def points(measured: Run, title: str) -> tuple[str, ...]:
    return next(c.points for c in conclusions(measured) if c.title == title)


STEPS = {"step_time_seconds_total_execute": 9.0, "step_time_seconds_total_schedule": 1.0}
CACHE = STEPS | {"hash_seconds_total": 0.02, "prefix_cache_hits_total": 25.0, "prefix_cache_queries_total": 100.0}
SWAPS = STEPS | {"swapped_out_slots_total": 512.0, "swap_seconds_total": 0.5}
MOVED = SWAPS | {"recomputed_tokens_total": 0.0}
SIZE = {"capacity": {"bytes_per_token": 16_384}}


@pytest.mark.parametrize(
    ("base", "other", "title", "said"),
    [
        (
            cell(capacity={"capacity_tokens": 6192}),
            cell(kv_cache_dtype="fp8_e4m3", throughput=(150.0, 151.0, 152.0), capacity={"capacity_tokens": 24_816}),
            "KV dtype", ["FP8 KV (e4m3) instead of KV in the model's dtype", "1.51x (1.50–1.52)", "24,816", "6,192"],
        ),
        (
            cell(enable_prefix_caching=False, baseline=True), cell(enable_prefix_caching=True, server=CACHE),
            "Prefix caching", ["On instead of off", "25 % of prompt tokens", "hashing took 0.2 % of the step time"],
        ),
        (
            cell(preemptions=2), cell(preemption_mode="swap", server=MOVED, **SIZE), "Preemption",
            ["Swap instead of recompute", "24 MiB", "0 tokens recomputed instead of 600", "moving took 5.0 %"],
        ),
        (
            cell(server=SWAPS), cell(preemption_mode="swap", server=SWAPS, **SIZE), "Preemption",
            ["nothing was preempted at 24 at once."],
        ),
        (
            cell(preemptions=1), cell(preemption_mode="swap", preemptions=1), "Preemption",  # an older server
            ["level, 1.00x (1.00–1.00) at 24 at once."],
        ),
        (
            cell("contiguous", reservation="max", baseline=True, running=6.2),
            cell("contiguous", reservation="oracle", running=12.5, throughput=(150.0,) * 3),
            "Reservation", ["Oracle instead of max", "1.50x", "12.5 sequences running at once instead of 6.2"],
        ),
    ],
)  # fmt: skip
def test_a_changed_setting_tells_what_it_is_for(base, other, title: str, said: list[str]) -> None:
    (text,) = points(run(base, other), f"{title}, changed alone")
    assert all(part in text for part in said), text


def test_reservation_stands_beside_the_requests_own_lengths(tmp_path: Path) -> None:
    lengths = pd.DataFrame({"prompt_tokens": [700, 20], "output_tokens": [132, 30], "ok": [True, True]})
    lengths.to_parquet(tmp_path / "requests.parquet")
    contiguous = replace(cell("contiguous", max_model_len=2048), folder=tmp_path, name="contiguous")
    text = reservation(compare(cell(max_model_len=2048), contiguous))
    assert all(number in text for number in ("Contiguous", "2,048", "832", "441"))
    assert reservation(compare(cell(), cell("contiguous"))) == ""  # no lengths known, nothing said
    exact = replace(cell("contiguous", max_model_len=2048, reservation="oracle"), folder=tmp_path)
    assert reservation(compare(cell(max_model_len=2048), exact)) == ""  # each request's own length, no one number


def test_figures_tiles_and_tables_do_not_claim_what_the_sentence_does_not() -> None:
    unclear = run(*pair({"throughput": (40.0, 170.0, 60.0)}, {"throughput": (60.0,) * 3}))
    assert headline(unclear).startswith("No verdict: ")
    assert "not told apart, 1.00x" in drawings(unclear)[0].title and tiles(unclear)[0].note.endswith("not told apart")
    paged = next(row.values for row in main_table(unclear).rows if row.cell and row.cell.is_paged)
    assert [(value.text, value.mark) for value in paged if "1.00x" in value.text] == [("1.00x?", "")]
    assert next(f for f in flat_rows(unclear) if "paged" in f["configuration"])["ratio_verdict"] == "unclear"


def test_tiles_are_of_valid_cells_only() -> None:
    late: dict[str, Any] = {"throughput": (777.0,) * 3, "reasons": ("late",)}
    assert tiles(run(*pair(late, late))) == []
    (top, *_) = tiles(run(*pair(late), cell(page_size=8, throughput=(50.0,) * 3)))  # contiguous has 100
    assert (top.value, top.note.split(";")[0]) == ("100", "contiguous")


def uses(**slots: float) -> dict[str, float]:
    known = {f"use_{use}": slots.get(use, 0.0) for use in SLOT_USES}
    return known | {"kv_bytes_per_slot": 1.0, "kv_budget_bytes": 1000.0}


def test_the_ledgers_sentence_is_of_the_pair_else_of_the_baseline() -> None:
    held = pair(
        {"observed": uses(tokens=660, waste=21, free=319)},
        {"observed": uses(tokens=120, waste=760, free=4, fragmented=116)},
    )
    low = pair({"load": 3, "observed": uses(free=1000)}, {"load": 3, "observed": uses(free=1000)})
    assert ledger_sentence(run(*held, *low)) == (
        "At 24 concurrent requests contiguous held tokens in 12 % of the KV budget and wasted 76 % on slots reserved "
        "and empty (12 % free but scattered); paged (page 16) held tokens in 66 % and wasted 2.1 % on slots reserved "
        "and empty (32 % free)."
    )
    base = cell(observed=uses(tokens=500, waste=100, cached=400))
    alone = ledger_sentence(run(base, cell(page_size=8, observed=uses(tokens=1))))
    assert all(part in alone for part in ("paged (page 16)", "50 %", "10 %", "40 % cached"))
    broken = cell("contiguous", observed=uses(tokens=500), reasons=("late",))
    assert "Invalid measurement" in ledger_sentence(run(base, broken))
    assert ledger_sentence(run(cell())) == ""
