"""Metric definitions against hand-made samples and independent oracles (NumPy, SciPy, plain counting)."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from kvbench.metrics import latency as metrics


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


def test_a_request_counts_in_the_window_in_which_it_ends_not_in_that_of_its_last_token() -> None:
    got = metrics.throughput(frame(row(ts=1.0, chunk_times=[2.0, 3.0], output_tokens=2, end=5.0)), (1.0, 4.0))
    assert (got["request_throughput"], got["output_throughput"]) == (0.0, pytest.approx(2 / 3))


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
    )  # longest gaps: 300, 100, 500, none
    duration = 2.51 - 1.0
    load = {"mode": "closed", "concurrency": 1}

    def good(slo: dict | None) -> float | None:
        return metrics.summarise(rows, load, slo)["goodput"]

    assert good({"ttft_ms": 600.0, "tpot_ms": 300.0}) == pytest.approx(2 / duration)
    assert good({"ttft_ms": 600.0, "tpot_ms": None}) == pytest.approx(3 / duration)
    assert good({"itl_ms": 300.5}) == pytest.approx(3 / duration)  # one chunk has no gap to be too long
    assert good({"itl_ms": 290.0}) == pytest.approx(2 / duration)  # the longest gap counts, not the mean
    assert good({"itl_ms": 99.0}) == pytest.approx(1 / duration)
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


def test_steady_goodput_is_of_the_requests_that_ended_inside() -> None:
    """Window (1, 7], as above: two requests end in it, one of them after 1 s to its first token."""
    rows = frame(
        row(t0=0.0, ts=0.0, end=4.0, chunk_times=[0.5, 3.0]),
        row(t0=1.0, ts=1.0, end=7.0, chunk_times=[2.0, 3.0, 6.9]),
        row(t0=4.0, ts=4.0, end=9.0, chunk_times=[4.1, 8.9], output_tokens=2),
    )
    got = metrics.summarise(rows, {"mode": "closed", "concurrency": 2}, {"ttft_ms": 600.0})
    assert got["steady_goodput"] == pytest.approx(1 / 6)
    assert got["goodput"] == pytest.approx(2 / 9)
    assert got["steady_request_throughput"] == pytest.approx(2 / 6)
    assert metrics.summarise(rows, {"mode": "closed", "concurrency": 9}, {"ttft_ms": 600.0})["steady_goodput"] is None


def test_time_queued_in_the_client_is_inside_ttft_and_beside_it() -> None:
    rows = frame(row(t0=0.4, ts=1.0, queued_s=0.6), row(t0=0.9, ts=1.0, queued_s=0.1), row(queued_s=0.0))
    got = metrics.summarise(rows, {"mode": "open", "max_concurrency": 2})
    assert got["client_queue_ms"]["max"] == pytest.approx(600)
    assert got["client_queue_ms"]["n"] == 3
    assert got["ttft_ms"]["max"] == pytest.approx(1100)
    assert got["ttft_send_ms"]["max"] == pytest.approx(500)
    assert got["per_class"]["a"]["client_queue_ms"]["p50"] == pytest.approx(100)
    assert "client_queue_ms" not in metrics.summarise(frame(row(queued_s=0.0)), {"mode": "open"})


def test_turns_and_classes_have_latencies_of_their_own() -> None:
    rows = frame(
        row(session=0.0, turn=0, priority=3),
        row(session=0.0, turn=1, chunk_times=[1.1, 1.2], priority=3),
        row(session=None, turn=0, chunk_times=[1.3, 1.4], priority=0, **{"class": "b"}),
        row(session=1.0, turn=1, ok=False, error_kind="session_broken", chunk_times=[], priority=3),
    )
    got = metrics.summarise(rows, {"mode": "closed", "concurrency": 1})
    assert (got["per_turn"]["first"]["n"], got["per_turn"]["later"]["n"]) == (2, 1)
    assert got["per_turn"]["later"]["ttft_ms"]["p50"] == pytest.approx(100)
    assert got["per_turn"]["first"]["ttft_ms"]["max"] == pytest.approx(500)
    assert {name: c["priority"] for name, c in got["per_class"].items()} == {"a": 3, "b": 0}
    assert (got["completed"], got["failed"], got["not_sent"], got["failure_kinds"]) == (3, 0, 1, {})
    assert "per_turn" not in metrics.summarise(frame(row()), {"mode": "closed", "concurrency": 1})


def test_turns_that_were_never_sent_are_no_failures_and_the_first_failure_is_the_first_due() -> None:
    rows = frame(
        row(t0=2.0, ok=False, error_kind="truncated", error="cut"),
        row(t0=1.0, ok=False, error_kind="http_error", error="HTTP 500: out of memory"),
        *(row(t0=0.5, ok=False, error_kind="session_broken", error="turn 1 failed") for _ in range(200)),
        *(row() for _ in range(198)),
    )
    got = metrics.summarise(rows, {"mode": "closed", "concurrency": 1})
    assert (got["completed"], got["failed"], got["not_sent"]) == (198, 2, 200)
    assert got["failure_kinds"] == {"truncated": 1, "http_error": 1}
    assert got["first_failure"] == "http_error: HTTP 500: out of memory"
    assert not metrics.too_many_failed(got) and metrics.too_many_failed(got | {"failed": 3})
    assert metrics.summarise(frame(row()), {"mode": "closed", "concurrency": 1})["first_failure"] is None


def test_each_plateau_of_steps_has_figures_of_its_own() -> None:
    """2 requests/s for 40 s, then 5/s for 40 s, each answered in 0.5 s; in the second step the first token is late."""
    starts = np.concatenate([np.arange(0, 40, 0.5), np.arange(40, 80, 0.2)])
    rows = [
        row(t0=t, ts=t, chunk_times=[t + (0.1 if t < 40 else 0.4), t + 0.5], end=t + 0.5, output_tokens=2)
        for t in starts
    ]
    load = {"mode": "open", "notes": {"plateaus": [[0.0, 40.0, 2.0], [40.0, 80.0, 5.0]]}}
    got = metrics.summarise(frame(*rows), load, {"ttft_ms": 200.0})
    assert got["steady_start_s"] is None
    assert "2 plateaus" in got["steady_note"]
    slow, fast = got["plateaus"]
    assert (slow["request_rate"], fast["request_rate"]) == (2.0, 5.0)
    assert slow["steady_request_throughput"] == pytest.approx(2.0, rel=0.03)
    assert fast["steady_output_throughput"] == pytest.approx(10.0, rel=0.03)
    assert (slow["ttft_ms"]["p50"], fast["ttft_ms"]["p50"]) == (pytest.approx(100), pytest.approx(400))
    assert slow["steady_goodput"] == pytest.approx(2.0, rel=0.03)
    assert fast["steady_goodput"] == pytest.approx(0.0)


def queued_at_the_end() -> pd.DataFrame:
    """An arrival a second, answered 0.1 s after its send; three early ones and the last three wait 10, 20 and 30 s in
    the client."""
    waits = np.zeros(100)
    waits[5:8] = waits[97:] = 10.0, 20.0, 30.0
    sent = np.arange(100.0) + waits
    return frame(
        *(
            row(t0=s - w, ts=s, queued_s=w, chunk_times=[s + 0.1, s + 0.2], output_tokens=2)
            for s, w in zip(sent, waits, strict=True)
        )
    )


def test_who_waits_past_the_steady_windows_end_is_in_its_latency() -> None:
    got = metrics.summarise(queued_at_the_end(), {"mode": "open", "max_concurrency": 1})
    assert got["steady_end_s"] == 99.0
    inside = 100 - np.ceil(got["steady_start_s"])
    steady = got["steady_latency"]
    assert steady["ttft_ms"]["n"] == inside
    assert steady["ttft_ms"]["max"] == pytest.approx(30_100) and steady["client_queue_ms"]["max"] == pytest.approx(30e3)


def test_requests_all_due_at_once_are_steady_when_they_were_sent() -> None:
    """Four places, 2 s each: the first three sends are before the four were busy."""
    sends = np.repeat(np.arange(10.0) * 2, 4) + np.tile([0.0, 0.1, 0.2, 0.3], 10)
    rows = [row(t0=1e-6 * (k % 2), ts=t, queued_s=t, chunk_times=[t + 1, t + 2], end=t + 2, output_tokens=2)
            for k, t in enumerate(sends)]  # fmt: skip
    got = metrics.summarise(frame(*rows), {"mode": "open", "max_concurrency": 4})
    assert (got["steady_start_s"], got["steady_end_s"]) == (pytest.approx(0.3), pytest.approx(20.0))
    assert got["steady_latency"]["ttft_send_ms"]["n"] == 37
    assert got["steady_output_throughput"] == pytest.approx(4.0, rel=0.05)
