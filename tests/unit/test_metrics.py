"""Metric definitions against hand-made samples and independent oracles (NumPy, SciPy, plain counting)."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from kvbench import metrics


def row(**given: object) -> dict:
    """One request: sent at 1.0, tokens at 1.5, 1.7, 2.0, ended at 2.01, unless told otherwise."""
    base = {
        "index": 0,
        "class": "a",
        "t0": 1.0,
        "ts": 1.0,
        "chunk_times": [1.5, 1.7, 2.0],
        "chunk_tokens": None,
        "prompt_tokens": 10,
        "output_tokens": 3,
        "cached_tokens": 2,
        "ok": True,
        "error_kind": None,
    } | given
    times = base["chunk_times"]
    base.setdefault("first", times[0] if times else None)
    base.setdefault("last", times[-1] if times else None)
    base.setdefault("end", (times[-1] if times else base["ts"]) + 0.01)
    return base


def frame(*rows: dict) -> pd.DataFrame:
    return pd.DataFrame(list(rows)).astype({"first": float, "last": float})


@pytest.mark.parametrize(("quantile", "count"), [(0.95, 130), (0.99, 662), (0.90, 64), (0.5, 11)])
def test_samples_needed_is_the_binomial_bound(quantile: float, count: int) -> None:
    assert metrics.samples_needed(quantile) == count
    at_most_one_above = [stats.binom.cdf(1, n, 1 - quantile) for n in (count - 1, count)]
    assert at_most_one_above[0] > 0.01 >= at_most_one_above[1]


def test_distribution_against_numpy() -> None:
    values = np.random.default_rng(0).lognormal(size=200)
    got = metrics.distribution(values)
    for name, q in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
        assert got[name] == pytest.approx(np.percentile(values, q), rel=1e-12)
    assert (got["mean"], got["std"]) == (pytest.approx(values.mean()), pytest.approx(values.std()))
    assert (got["min"], got["max"], got["n"]) == (values.min(), values.max(), 200)
    assert got["uncertain"] == ["p99"]


def test_percentile_interpolates_linearly() -> None:
    assert metrics.distribution([0.0, 10.0])["p90"] == pytest.approx(9.0)
    assert metrics.distribution([1.0, 2.0, 3.0, 4.0])["p50"] == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("count", "uncertain"),
    [
        (129, ["p95", "p99"]),
        (130, ["p99"]),
        (661, ["p99"]),
        (662, []),
        (1, ["p50", "p90", "p95", "p99"]),
    ],
)
def test_too_few_samples_are_marked(count: int, uncertain: list[str]) -> None:
    assert metrics.distribution(np.arange(count))["uncertain"] == uncertain


def test_nothing_measured_is_none_not_zero() -> None:
    got = metrics.distribution([])
    assert got["p95"] is None
    assert got["mean"] is None
    assert got["n"] == 0


def test_latencies_by_hand() -> None:
    got = metrics.summarise(frame(row(t0=0.9)), {"mode": "closed", "concurrency": 1})
    assert got["ttft_ms"]["p50"] == pytest.approx(600)  # from the intended start
    assert got["ttft_send_ms"]["p50"] == pytest.approx(500)  # from the send
    assert got["e2el_ms"]["p50"] == pytest.approx(1100)
    assert got["tpot_ms"]["p50"] == pytest.approx(250)  # 0.5 s over 2 further tokens
    assert got["itl_ms"]["n"] == 2
    assert got["itl_ms"]["max"] == pytest.approx(300)


def test_tpot_counts_tokens_not_chunks_and_is_undefined_for_one() -> None:
    five_in_three = row(output_tokens=5, chunk_tokens=[1, 2, 2])
    single = row(output_tokens=1, chunk_times=[1.5])
    got = metrics.summarise(frame(five_in_three, single), {"mode": "closed", "concurrency": 1})
    assert got["tpot_ms"]["n"] == 1
    assert got["tpot_ms"]["p50"] == pytest.approx(125)
    assert got["itl_ms"]["n"] == 2
    assert got["multi_token_chunks"] == 2
    unknown = metrics.summarise(frame(row(output_tokens=5)), {"mode": "closed", "concurrency": 1})
    assert unknown["multi_token_chunks"] == 2  # two tokens more than chunks


def test_tpot_starts_at_the_first_token_though_its_text_came_later() -> None:
    got = metrics.request_latencies(frame(row(first=1.7)))
    assert got["ttft_ms"][0] == pytest.approx(700)
    assert got["tpot_ms"][0] == pytest.approx(250)


def test_steady_window_is_the_time_at_target_concurrency() -> None:
    """Two users. In flight: 1 from 0, 2 from 1, 1 at 4 for an instant and again 2, 1 from 7 to 9."""
    rows = [
        row(ts=0.0, end=4.0, chunk_times=[3.9]),
        row(ts=1.0, end=7.0, chunk_times=[6.9]),
        row(ts=4.001, end=9.0, chunk_times=[8.9]),
    ]
    load = {"mode": "closed", "concurrency": 2}
    assert metrics.steady_window(frame(*rows), load) == (1.0, 7.0)
    failed = [r | {"ok": False} for r in rows]
    assert metrics.steady_window(frame(*failed), load) == (1.0, 7.0)  # they were in flight all the same
    assert metrics.steady_window(frame(*rows), {"mode": "closed", "concurrency": 3}) is None


def test_steady_window_against_counting() -> None:
    rng = np.random.default_rng(3)
    ts = rng.uniform(0, 50, 60)
    ends = ts + rng.uniform(1, 15, 60)
    window = metrics.steady_window_of(ts, ts, ends, "closed", 9)
    moments = np.sort(np.concatenate([ts, ends]))
    middles = (moments[1:] + moments[:-1]) / 2
    at_target = [k for k, m in enumerate(middles) if ((ts <= m) & (ends >= m)).sum() >= 9]
    assert window == pytest.approx((moments[at_target[0]], moments[at_target[-1] + 1]))


def test_open_loop_window_is_first_to_last_arrival() -> None:
    rows = frame(row(t0=0.5), row(t0=4.0), row(t0=2.0))
    assert metrics.steady_window(rows, {"mode": "open", "request_rate": 1.0}) == (0.5, 4.0)
    got = metrics.summarise(rows, {"mode": "open"})
    assert (got["steady_start_s"], got["steady_end_s"]) == (0.5, 4.0)


def test_throughput_counts_what_arrived_inside_the_window() -> None:
    """Window (1, 7]. First request: one of two chunks of 2 tokens inside. Second: all. Third: none."""
    rows = frame(
        row(ts=0.0, end=4.0, chunk_times=[0.5, 3.0], output_tokens=4, chunk_tokens=[2, 2], prompt_tokens=100),
        row(ts=1.0, end=7.0, chunk_times=[2.0, 3.0, 6.9], output_tokens=3, prompt_tokens=20),
        row(ts=4.0, end=9.0, chunk_times=[8.0, 8.9], output_tokens=2, prompt_tokens=50),
    )
    got = metrics.summarise(rows, {"mode": "closed", "concurrency": 2})
    assert (got["steady_start_s"], got["steady_end_s"]) == (1.0, 7.0)
    assert got["steady_output_throughput"] == pytest.approx(5 / 6)
    assert got["steady_total_token_throughput"] == pytest.approx((5 + 20) / 6)
    assert got["steady_request_throughput"] == pytest.approx(2 / 6)
    assert got["output_throughput"] == pytest.approx(9 / 9)
    assert got["total_token_throughput"] == pytest.approx((9 + 170) / 9)
    assert got["request_throughput"] == pytest.approx(3 / 9)
    assert got["duration_s"] == pytest.approx(9.0)


def test_chunks_of_unknown_size_share_the_tokens_evenly() -> None:
    times, weights = metrics.chunk_weights(frame(row(output_tokens=6), row(chunk_times=[3.0, 4.0], output_tokens=2)))
    assert times.tolist() == [1.5, 1.7, 2.0, 3.0, 4.0]
    assert weights.tolist() == [2, 2, 2, 1, 1]


def test_failures_count_as_failures_only() -> None:
    bad = row(ok=False, error_kind="truncated", chunk_times=[1.1, 1.2], output_tokens=500, **{"class": "b"})
    got = metrics.summarise(frame(row(), bad), {"mode": "closed", "concurrency": 1})
    assert (got["completed"], got["failed"], got["failure_kinds"]) == (1, 1, {"truncated": 1})
    assert got["total_output_tokens"] == 3
    assert got["ttft_ms"]["n"] == 1
    assert set(got["per_class"]) == {"a"}
    assert got["output_throughput"] == pytest.approx(3 / 1.01)


def test_load_without_any_success_has_no_latencies() -> None:
    got = metrics.summarise(
        frame(row(ok=False, error_kind="refused", chunk_times=[], output_tokens=0)),
        {"mode": "closed", "concurrency": 1},
        {"ttft_ms": 10.0},
    )
    assert got["completed"] == 0
    assert got["ttft_ms"]["p50"] is None
    assert got["output_throughput"] in (0.0, None)
    assert got["goodput"] == 0.0


def test_goodput_needs_every_limit_met() -> None:
    rows = frame(
        row(),  # ttft 500, tpot 250
        row(chunk_times=[1.9, 2.0, 2.1]),  # ttft 900
        row(chunk_times=[1.5, 2.0, 2.5]),  # tpot 500
        row(chunk_times=[1.5], output_tokens=1),  # no tpot
        row(ok=False, error_kind="timeout"),
    )
    duration = 2.51 - 1.0
    load = {"mode": "closed", "concurrency": 1}

    def good(slo: dict | None) -> float | None:
        return metrics.summarise(rows, load, slo)["goodput"]

    assert good({"ttft_ms": 600.0, "tpot_ms": 300.0}) == pytest.approx(2 / duration)
    assert good({"ttft_ms": 600.0, "tpot_ms": None}) == pytest.approx(3 / duration)
    assert good(None) is None
    with pytest.raises(ValueError, match="not a known SLO"):
        good({"speed": 1.0})


def test_pooled_percentiles_are_of_the_pool() -> None:
    """The pool's p90 is not the mean of the loads' p90s."""
    rng = np.random.default_rng(7)
    loads = []
    for scale, count in ((0.1, 20), (1.0, 200)):
        waits = rng.exponential(scale, count)
        loads.append(frame(*(row(chunk_times=[1 + w, 2 + w], output_tokens=2) for w in waits)))
    got = metrics.pooled(loads)["ttft_ms"]
    every = np.concatenate([(f["first"] - f["t0"]) * 1000 for f in loads])
    assert got["n"] == 220
    assert got["p90"] == pytest.approx(np.percentile(every, 90))
    assert "p95" not in got["uncertain"]
    parts = [metrics.latency_summary(f)["ttft_ms"]["p90"] for f in loads]
    assert abs(got["p90"] - np.mean(parts)) > 50


def test_pool_of_nothing() -> None:
    assert metrics.pooled([])["ttft_ms"]["n"] == 0
