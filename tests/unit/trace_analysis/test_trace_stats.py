"""Public slices are read and counted as their expected statistics say, to the digit; small cases by hand and scipy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy import stats

from kvbench.trace_analysis.cache_sim import hit_rates, replay, working_set
from kvbench.trace_analysis.describe import Quantiles, arrivals, length_columns, memory, spread
from kvbench.traces.model import Trace
from kvbench.traces.read import read_trace
from tests.support.trace_samples import SLICES, TRACES, needs_slices


def printed(found: Quantiles) -> dict:
    return dataclasses.asdict(found) | {"mean": round(found.mean, 1)}


def lengths_of(trace: Trace) -> dict:
    columns = length_columns(trace)
    if trace.prompts is not None:
        return {
            "input_chars": printed(spread(columns["prompt_characters"])),
            "output_chars": printed(spread(columns["reply_characters"])),
        }
    needed = memory(columns["total_tokens"])
    return {
        "prompt_tokens_total": int(trace.prompt_tokens.sum()),
        "output_tokens_total": int(trace.output_tokens.sum()),
        "prompt": printed(spread(trace.prompt_tokens)),
        "output": printed(spread(trace.output_tokens)),
        "mem": {
            "total": printed(needed.total),
            "reserve_max_util": round(needed.reserve_max_util, 3),
            "reserve_p99_util": round(needed.reserve_p99_util, 3),
            **{f"waste{size}": round(share, 4) for size, share in needed.waste.items()},
            **{f"frac_le{size // 1024}k": round(share, 3) for size, share in needed.share_up_to.items()},
        },
    }


def arrivals_of(trace: Trace) -> dict:
    found = arrivals(trace.arrival_s)
    told = {
        "span_s": round(found.span_s, 1),
        "rate": round(found.rate, 3),
        "cv": round(found.cv, 2),
        "zero_gap_frac": round(found.zero_gap_share, 3),
        **{f"fano_{w}s": None if f is None else round(f, 2) for w, f in found.fano.items()},
    }
    return told | ({} if found.peak_rate_10s is None else {"peak10s_rate": round(found.peak_rate_10s, 1)})


def prefixes_of(trace: Trace) -> dict:
    unique = working_set(trace)
    rates = hit_rates(trace, replay(trace, unique).hits)
    return {
        "block": trace.page_size,
        "blocks": int(trace.pages.sum()),
        "unique_blocks": unique,
        "block_hit": round(rates.pages, 4),
        "token_hit": round(rates.tokens, 4),
        "fullblock_hit": round(rates.full_pages, 4),
        "req_with_hit": round(rates.requests, 4),
        "per_req_p50": round(rates.median_request, 3),
    }


HEAVY = ("mooncake/", "weka_agentic/")


@needs_slices
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * name.startswith(HEAVY)) for name in SLICES]
)
def test_a_public_slice_has_the_expected_statistics(name):
    expected = dict(SLICES[name])
    in_ms = name.startswith("sharegpt_derived/")  # in pages of 16, so that it has to be said
    trace = read_trace(TRACES / name, "mooncake" if in_ms else "auto")
    got = {"n": len(trace), **lengths_of(trace)}
    if "arrivals" in expected:
        got["arrivals"] = arrivals_of(trace)
    if "prefix_infinite_cache_cold" in expected:
        got["prefix_infinite_cache_cold"] = prefixes_of(trace)
    if "lru_block_hit_by_capacity_tokens" in expected:
        got["lru_block_hit_by_capacity_tokens"] = {
            tokens: round(hit_rates(trace, replay(trace, int(tokens) // trace.page_size).hits).pages, 4)
            for tokens in expected["lru_block_hit_by_capacity_tokens"]
        }
    expected.pop("prefix_infinite_cache_warmed_by_rows_before", None)  # by rows that are not in the slice
    assert got == expected


def test_poisson_arrivals_look_like_poisson_and_bursts_do_not():
    rng = np.random.default_rng(0)
    steady = np.cumsum(rng.exponential(0.1, 60_000))
    found = arrivals(steady - steady[0])
    assert found.rate == pytest.approx(10, rel=0.02) and found.cv == pytest.approx(1, abs=0.02)
    # The index of dispersion of n windows of a Poisson process is chi-squared over n - 1 (Cox and Lewis, 1966).
    for window, fano in found.fano.items():
        windows = int(found.span_s // window)
        low, high = stats.chi2.ppf([0.0005, 0.9995], windows - 1) / (windows - 1)
        assert low < fano < high
    bursts = np.repeat(np.arange(600) * 1.0, 10)
    found = arrivals(bursts)
    assert found.zero_gap_share == pytest.approx(0.9, abs=0.001) and found.cv == pytest.approx(3, abs=0.01)
    assert found.fano[1] == 0 and found.peak_rate_10s == 10.0


def test_arrivals_that_span_nothing_have_no_rate():
    assert arrivals(np.zeros(5)) is None and arrivals(np.array([0.0])) is None
    few = arrivals(np.array([0.0, 1.0, 4.9]))
    assert few.fano == {1: None, 10: None, 60: None} and few.peak_rate_10s is None
    assert arrivals(np.array([0.0, 1.0, 5.0])).fano[1] is not None  # from five whole windows on


def test_rates_and_gaps_by_hand():
    found = arrivals(np.array([0.0, 1.0, 1.0, 4.0, np.nan, 8.0]))
    assert (found.span_s, found.rate, found.zero_gap_share) == (8.0, 5 / 8, 1 / 4)
    assert found.cv == pytest.approx(stats.variation([1, 0, 3, 4]))
    assert found.fano[1] == pytest.approx(np.var([1, 2, 0, 0, 1, 0, 0, 0]) / 0.5)  # [0, 8); the one at 8 s is not in it


def test_reservations_and_pages_by_hand():
    four = memory(np.array([16, 17, 64, 2048]))
    assert four.reserve_max_util == pytest.approx((16 + 17 + 64 + 2048) / 4 / 2048)
    assert four.waste[16] == pytest.approx(15 / (16 + 32 + 64 + 2048))
    assert four.waste[256] == pytest.approx(1 - 2145 / (3 * 256 + 2048))
    assert four.share_up_to == {2048: 1.0, 8192: 1.0, 32768: 1.0}
    tail = memory(np.array([100] * 995 + [100_000] * 5))
    assert tail.total.p99 == 100 and tail.reserve_p99_util == pytest.approx(5.995)
    assert tail.reserve_p99_filled == 1.0  # a reservation holds no more than its room
    assert four.reserve_p99_filled == pytest.approx((16 + 17 + 64 + four.total.p99) / 4 / four.total.p99)
