"""The sentence: right in every case, and silent about what the data do not show."""

from __future__ import annotations

from kvbench.report.comparisons import compare
from kvbench.report.conclusions import conclusions, kernel_cost
from kvbench.report.sentence import headline
from tests.support.report_cells import cell, run


def test_paged_ahead_says_ratio_spread_reason_low_load_and_price() -> None:
    cells = [
        cell(throughput=(190.0, 185.0, 196.0), running=18.2, tpot=(61.0,) * 3, preemptions=4),
        cell("contiguous", running=4.0, tpot=(24.0,) * 3),
        cell(load=3, throughput=(99.0, 98.0, 100.0)),
        cell("contiguous", load=3, throughput=(100.0,) * 3),
    ]
    assert headline(run(*cells)) == (
        "At 24 concurrent requests and the same 128 MiB of KV, paged (page 16) delivered 1.90x (1.85–1.96 over 3 "
        "repeats) the output tokens/s of contiguous, while it ran 18.2 sequences at once instead of 4.0; at 3 it "
        "was level, 0.99x (0.98–1.00 over 3 repeats); the price: median TPOT 61.0 ms instead of 24.0 ms and 12 "
        "preemptions in 3 repeats (1,200 tokens recomputed)."
    )


def test_preemption_by_swap_is_a_price_in_bytes() -> None:
    moved = {"recomputed_tokens_total": 0.0, "swapped_out_slots_total": 1024.0}
    capacity = {"bytes_per_token": 16_384}
    cells = [
        cell(throughput=(190.0,) * 3, preemptions=4, server=moved, capacity=capacity, preemption_mode="swap"),
        cell("contiguous", preemption_mode="swap"),
    ]
    assert "12 preemptions in 3 repeats (48 MiB swapped out)" in headline(run(*cells))
    partly = moved | {"recomputed_tokens_total": 7.0}
    cells[0] = cell(throughput=(190.0,) * 3, preemptions=4, server=partly, capacity=capacity, preemption_mode="swap")
    assert "(21 tokens recomputed and 48 MiB swapped out)" in headline(run(*cells))


def test_paged_slower_is_said_and_is_no_price() -> None:
    text = headline(
        run(cell(throughput=(60.0, 61.0, 62.0), tpot=(40.0,) * 3, running=8.0), cell("contiguous", running=4.0))
    )
    assert "was slower than contiguous: 0.61x" in text
    assert "delivered" not in text
    assert "because" not in text
    assert "the price" not in text
    assert "on top of that: median TPOT 40.0 ms instead of 20.0 ms" in text


def test_level_is_called_level() -> None:
    text = headline(run(cell(throughput=(99.0, 101.0, 103.0), running=8.0), cell("contiguous", running=4.0)))
    assert "was level with contiguous in output tokens/s: 1.01x (0.99–1.03 over 3 repeats)" in text
    assert "because" not in text


def test_fewer_than_three_repeats_make_no_verdict() -> None:
    one = headline(run(cell(throughput=(190.0,)), cell("contiguous", throughput=(100.0,))))
    assert one.startswith("No verdict: at 24 concurrent requests")
    assert "1.90x (one repeat, so no spread)" in one
    two = headline(run(cell(throughput=(150.0, 160.0)), cell("contiguous", throughput=(100.0, 100.0))))
    assert two.startswith("No verdict: ")
    assert "over 2 repeats, too few for a verdict" in two


def test_interval_that_includes_one_makes_no_verdict_and_claims_no_price() -> None:
    cells = [
        cell(throughput=(97.8, 423.0, 462.0), tpot=(216.0, 30.0, 43.0), running=21.0),
        cell("contiguous", throughput=(45.0, 47.0, 42.0), tpot=(58.0, 59.0, 60.0), running=3.0),
        cell(load=3, throughput=(36.0, 123.0, 216.0)),
        cell("contiguous", load=3, throughput=(50.0, 170.0, 52.0)),
    ]
    text = headline(run(*cells))
    assert text.startswith("No verdict: at 24 concurrent requests")
    assert "is not told apart from contiguous in output tokens/s: 9.00x (2.17–11.0 over 3 repeats; 95 %" in text
    assert "at 3 they are not told apart, 0.72x (0.72–4.15" in text
    assert "median TPOT 43.0 ms instead of 59.0 ms, not told apart: 0.72x (0.51–3.72" in text
    assert "the repeats scatter (paged (page 16) 97.8–462 output tokens/s)" in text
    for claim in ("delivered", "level", "no price", "because", "while it ran"):
        assert claim not in text


def test_unclear_tpot_beside_a_clear_gain_is_given_as_numbers() -> None:
    text = headline(run(cell(throughput=(200.0,) * 3, tpot=(10.0, 20.0, 45.0)), cell("contiguous")))
    assert "delivered 2.00x" in text
    assert "no price" not in text
    assert "median TPOT 20.0 ms instead of 20.0 ms, not told apart: 1.00x (0.50–2.25" in text


def test_preemptions_are_a_price_though_tpot_is_level() -> None:
    text = headline(run(cell(throughput=(200.0,) * 3, preemptions=2), cell("contiguous")))
    assert "the price: 6 preemptions in 3 repeats" in text
    assert "no price" not in text


def test_most_is_said_only_when_the_rivals_are_told_apart() -> None:
    top, rival = cell(throughput=(200.0,) * 3), cell(page_size=8, throughput=(90.0, 190.0, 300.0), baseline=False)
    text = headline(run(top, rival))
    assert "No verdict on which is best at 24 concurrent requests: paged (page 16) has the highest median" in text
    assert "not told apart from paged (page 8)" in text
    assert "delivered the most" not in text


def test_without_server_metrics_no_reason_is_given() -> None:
    text = headline(run(cell(throughput=(200.0,) * 3), cell("contiguous")))
    assert "2.00x" in text
    assert "sequences at once" not in text


def test_more_throughput_without_more_running_is_not_explained_by_it() -> None:
    text = headline(run(cell(throughput=(200.0,) * 3, running=4.1), cell("contiguous", running=4.0)))
    assert "because" not in text
    assert "running 4.1 sequences at once against 4.0" in text


def test_no_price_is_said_only_when_it_was_measured() -> None:
    text = headline(run(cell(throughput=(200.0,) * 3), cell("contiguous")))
    assert "no price shows: median TPOT level, 1.00x (1.00–1.00), and no preemptions" in text


def test_unequal_budgets_and_other_differences_are_named() -> None:
    text = headline(run(cell(budget=64 * 1024 * 1024), cell("contiguous", max_num_seqs=4)))
    assert "unequal KV budgets (64 MiB against 128 MiB)" in text
    assert "they differ in max_num_seqs too" in text


def test_invalid_pair_gives_no_verdict() -> None:
    text = headline(run(cell(throughput=(200.0,) * 3), cell("contiguous", reasons=("lag p99 3 ms",))))
    assert text.startswith(
        "No verdict, the measurement at 24 concurrent requests is invalid (contiguous: lag p99 3 ms)."
    )
    assert "not to be relied on" in text


def test_invalid_low_load_spoils_only_its_own_clause() -> None:
    cells = [
        cell(throughput=(200.0,) * 3),
        cell("contiguous"),
        cell(load=3, reasons=("x",)),
        cell("contiguous", load=3),
    ]
    text = headline(run(*cells))
    assert "delivered 2.00x" in text
    assert "at 3 there is no verdict (invalid measurement)" in text


def test_failures_are_counted() -> None:
    text = headline(run(cell(throughput=(200.0,) * 3, failed=3), cell("contiguous")))
    assert "9 of 144 requests of paged (page 16) failed" in text


def test_no_contiguous_cell_claims_nothing_about_paging() -> None:
    text = headline(run(cell(throughput=(200.0,) * 3), cell(page_size=8, baseline=False)))
    assert text.startswith("Without a contiguous cell this run cannot say what paging bought.")
    assert "200 output tokens/s" in text


def test_a_workload_that_asks_nothing_about_paging_is_told_nothing_about_it() -> None:
    cells = (cell(throughput=(200.0,) * 3), cell(page_size=8, baseline=False))
    swept = {"workload": {"sweep": {"page_size": [8]}}}
    assert headline(run(*cells, **swept)).startswith("At 24 concurrent requests paged (page 16) delivered the most")
    swept["workload"]["sweep"]["layout"] = ["contiguous"]
    assert headline(run(*cells, **swept)).startswith("Without a contiguous cell")


def test_nothing_is_compared_with_a_measurement_that_is_invalid() -> None:
    base, best = cell(reasons=("it lagged",)), cell(page_size=8, throughput=(200.0,) * 3, baseline=False)
    alone = headline(run(base, best))
    assert (
        "Only paged (page 8) was validly measured at 24 concurrent requests, so there is nothing to compare: 200"
        in alone
    )
    assert "2.00x" not in alone and "the most" not in alone
    which = next(c for c in conclusions(run(base, best)) if c.title == "Which configuration is best").points
    assert which == (
        "At 24 concurrent requests: only paged (page 8) was validly measured, with 200 output tokens/s (200–200).",
    )
    three = headline(run(base, best, cell(page_size=4, baseline=False)))
    assert "paged (page 8) delivered the most: 200 output tokens/s" in three
    assert "(of the baseline paged (page 16) there is no valid measurement)" in three and "2.00x" not in three


def test_layouts_without_a_common_load() -> None:
    assert "share no load" in headline(run(cell(load=3), cell("contiguous", load=24)))


def test_foreign_engine_is_not_told_about_paging() -> None:
    text = headline(run(cell("")))
    assert "paging" not in text


def test_open_loop_speaks_of_rates_and_ttft() -> None:
    cells = [cell(mode="open", load=4, ttft=(800.0,) * 3), cell("contiguous", mode="open", load=4, ttft=(3200.0,) * 3)]
    text = headline(run(*cells))
    assert text.startswith("At 4 requests/s")
    assert "its p95 TTFT was 800 ms instead of 3,200 ms" in text


def test_incomplete_and_empty_runs() -> None:
    text = headline(run(cell(), cell("contiguous"), missing=("a", "b"), status="incomplete"))
    assert text.startswith("Incomplete run (2 of 4 cells measured): At 24")
    assert headline(run()).startswith("Nothing was measured")


def test_kernel_cost_is_told_only_where_the_same_number_ran() -> None:
    same = compare(cell(load=3, tpot=(22.0,) * 3, running=3.0), cell("contiguous", load=3, running=3.0))
    once = compare(
        cell(throughput=(9.0,), tpot=(22.0,), running=3.0), cell("contiguous", throughput=(9.0,), running=3.0)
    )
    assert "too few" in kernel_cost(once)
    assert "median TPOT 1.10x" in kernel_cost(same)
    assert "walking page tables cost time" in kernel_cost(same)
    unlike = compare(cell(running=18.0), cell("contiguous", running=4.0))
    assert "cannot be told" in kernel_cost(unlike)
    unknown = compare(cell(), cell("contiguous"))
    assert "not the kernel alone" in kernel_cost(unknown)
