"""Metric definitions against hand-made samples and independent oracles (NumPy, SciPy, plain counting)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from kvbench.metrics import latency as metrics
from kvbench.metrics import rows as rows_of
from tests.support.request_rows import frame, queued_at_the_end, row

ONE = {"mode": "closed", "concurrency": 1}
TWO = {"mode": "closed", "concurrency": 2}


def summary(*rows: dict, load: dict = ONE, slo: dict | None = None) -> dict[str, Any]:
    """``summarise`` of the rows, nested figures under dotted names."""
    flat: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        flat[prefix] = value
        inner = value if isinstance(value, dict) else dict(enumerate(value)) if prefix == "plateaus" else {}
        for key, of_it in inner.items():
            add(f"{prefix}.{key}", of_it)

    for key, value in metrics.summarise(frame(*rows), load, slo).to_json().items():
        add(key, value)
    return flat


def check(found: dict[str, Any], **expected: Any) -> None:
    """Dots of names are written as two underscores; numbers are equal but for rounding."""
    for name, value in expected.items():
        got = found[name.replace("__", ".")]
        assert got == (pytest.approx(value) if isinstance(value, float) else value), name


@pytest.mark.parametrize(("quantile", "count"), [(0.95, 130), (0.99, 662), (0.90, 64), (0.5, 11)])
def test_samples_needed_is_the_binomial_bound(quantile: float, count: int) -> None:
    assert metrics.samples_needed(quantile) == count
    at_most_one_above = [stats.binom.cdf(1, n, 1 - quantile) for n in (count - 1, count)]
    assert at_most_one_above[0] > 0.01 >= at_most_one_above[1]
    name = f"p{quantile * 100:.0f}"  # too few samples are marked
    assert [name in metrics.distribution(np.arange(n)).uncertain for n in (count - 1, count)] == [True, False]


def test_distribution_against_numpy() -> None:
    values = np.random.default_rng(0).lognormal(size=200)
    got = metrics.distribution(values).to_json()
    for name, q in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
        assert got[name] == pytest.approx(np.percentile(values, q), rel=1e-12)
    check(got, mean=float(values.mean()), std=float(values.std()), min=values.min(), max=values.max(), n=200)
    assert metrics.distribution([0.0, 10.0]).p90 == pytest.approx(9.0)  # linear interpolation
    check(metrics.distribution([]).to_json(), p95=None, mean=None, n=0)  # nothing measured is not 0
    assert metrics.pooled([]).ttft_ms.n == 0


def test_latencies_by_hand() -> None:
    got = summary(row(t0=0.9))  # tpot: 0.5 s over 2 further tokens
    check(got, ttft_ms__p50=600.0, ttft_send_ms__p50=500.0, e2el_ms__p50=1100.0, tpot_ms__p50=250.0)
    check(got, itl_ms__n=2, itl_ms__max=300.0)
    late = summary(row(first=1.7))  # a text that came later than its token
    check(late, ttft_ms__p50=700.0, tpot_ms__p50=250.0)


def test_the_first_output_is_there_where_it_is_not_the_first_token() -> None:
    thinks, plain = row(first_output=1.9), row(first_output=1.5)
    check(summary(thinks, plain), ttft_ms__max=500.0, ttfo_ms__n=2, ttfo_ms__max=900.0, ttfo_ms__min=500.0)
    check(summary(thinks, row(first_output=None)), ttfo_ms__n=1)  # one whose tokens were all reasoning
    check(summary(plain), ttfo_ms__p50=500.0)  # a limit on it holds for servers that do not reason, too
    for unknown in (row(first_output=None), row()):  # all was reasoning; a file of before it was stored
        assert "ttfo_ms" not in summary(unknown)


REASONED = row(chunk_times=[1.1, 1.2, 1.3, 1.4, 1.5], output_tokens=10, first_reasoning=1.2, first_output=1.4)


def test_reasoning_time_is_from_the_first_reasoning_to_the_first_output() -> None:
    at_once = row(first_reasoning=1.5, first_output=1.5)
    text_first, only = row(first_reasoning=1.7, first_output=1.5), row(first_reasoning=1.5, first_output=None)
    got = summary(REASONED, at_once, text_first, only, row(first_output=1.5))
    check(got, reasoning_ms__n=2, reasoning_ms__max=200.0, reasoning_ms__min=0.0, without_output=1, ttfo_ms__n=4)
    check(got, tpot_ms__min=400.0 / 9)  # over all tokens, reasoning included
    check(summary(only), without_output=1, non_reasoning_output_throughput=0.0)
    for without in (text_first, row(first_output=1.5), row()):
        assert "reasoning_ms" not in summary(without) and summary(without)["without_output"] == 0


@pytest.mark.parametrize(
    ("given", "inside", "total", "reasoning"),
    [
        # times 1.1 to 1.5, 10 tokens; first output at 1.4; the window (1, 1.4] has one of the two chunks of output
        ({"reasoning_tokens": 7}, 1.5, 3.0, 7),  # the usage tells: 3 tokens in two chunks
        ({"reasoning_tokens": 7, "chunk_tokens": [2, 1, 2, 4, 1]}, 3 * 4 / 5, 3.0, 7),
        ({"reasoning_tokens": None}, 2.0, 4.0, None),  # two tokens a chunk
        ({"reasoning_tokens": None, "chunk_tokens": [2, 1, 2, 4, 1]}, 4.0, 5.0, None),
        ({"reasoning_tokens": 0}, 2.0, 4.0, None),  # a server that streams reasoning and does not count it
        ({"reasoning_tokens": 10}, 0.0, 0.0, 10),
        ({"reasoning_tokens": 11}, 2.0, 4.0, 11),  # which cannot be among the output tokens
        ({"reasoning_tokens": 10, "first_output": None}, 0.0, 0.0, 10),
        ({"first_reasoning": None, "first_output": 1.1, "reasoning_tokens": 5, "unstreamed_tokens": 5}, 4.0, 5.0, 5),
        ({"first_reasoning": None, "first_output": 1.1, "reasoning_tokens": 5, "unstreamed_tokens": 0}, 4.0, 5.0, 5),
    ],
)
def test_output_tokens_without_reasoning(given: dict, inside: float, total: float, reasoning: int | None) -> None:
    one = row(**REASONED | given)
    in_window = metrics.throughput(frame(one), (1.0, 1.4))
    check(in_window, non_reasoning_output_throughput=inside / 0.4)
    got = summary(one, row(first_output=1.5))  # and 3 tokens of one that did not reason; from 1.0 to 2.01
    check(got, non_reasoning_output_throughput=(total + 3) / 1.01, output_throughput=13 / 1.01)
    check(got, total_reasoning_tokens=reasoning, total_output_tokens=13)
    busy = summary(one, row(), load=TWO)
    check(busy, steady_start_s=1.0, steady_end_s=1.51, steady_non_reasoning_output_throughput=(total + 1) / 0.51)


def test_reasoning_tokens_are_known_only_where_each_request_was_told_them() -> None:
    assert "non_reasoning_output_throughput" not in summary(row()) and summary(row())["total_reasoning_tokens"] is None
    some = summary(row(reasoning_tokens=2, first_reasoning=1.5), row(reasoning_tokens=None, first_reasoning=1.5))
    assert some["total_reasoning_tokens"] is None
    assert summary(row(reasoning_tokens=0), row(reasoning_tokens=None))["total_reasoning_tokens"] == 0


def test_output_tokens_without_reasoning_are_those_of_counting_token_by_token() -> None:
    """Loads of streams that reason first, each chunk with its tokens and the usage with the sum, in random windows."""
    rng = np.random.default_rng(4)
    for _ in range(30):
        rows, tokens = [], []
        for _ in range(20):
            times, sizes = np.cumsum(rng.uniform(0.01, 0.3, 12)), rng.integers(1, 4, 12)
            thoughts = int(rng.integers(0, 13))
            outputs = list(zip(times[thoughts:], sizes[thoughts:], strict=True))
            tokens += outputs
            rows.append(
                row(
                    ts=0.0, t0=0.0, chunk_times=times.tolist(), chunk_tokens=sizes.tolist(),
                    output_tokens=int(sizes.sum()), first_reasoning=times[0] if thoughts else None,
                    first_output=outputs[0][0] if outputs else None,
                    reasoning_tokens=int(sizes[:thoughts].sum()) if rng.random() < 0.5 else None,
                )
            )  # fmt: skip
        begin, end = np.sort(rng.uniform(0, 2, 2))
        counted = sum(size for when, size in tokens if begin < when <= end)
        got = metrics.throughput(frame(*rows), (begin, end))["non_reasoning_output_throughput"]
        assert got * (end - begin) == pytest.approx(counted)


def test_tokens_that_were_not_streamed_are_not_divided_into_the_time_after_them() -> None:
    hidden = row(output_tokens=7, unstreamed_tokens=4)
    check(summary(hidden), tpot_ms__p50=250.0, multi_token_chunks=0, unstreamed_tokens=4, total_output_tokens=7)
    check(summary(hidden, row()), tpot_ms__n=2, tpot_ms__min=250.0, tpot_ms__max=250.0)
    check(summary(row(output_tokens=7)), tpot_ms__p50=500.0 / 6, unstreamed_tokens=0)


def test_tpot_counts_tokens_not_chunks_and_is_undefined_for_one() -> None:
    single = row(output_tokens=1, chunk_times=[1.5])
    got = summary(row(output_tokens=5, chunk_tokens=[1, 2, 2]), single)
    check(got, tpot_ms__n=1, tpot_ms__p50=125.0, itl_ms__n=2, multi_token_chunks=2)
    check(summary(row(output_tokens=5)), multi_token_chunks=2)  # of unknown sizes: two tokens more than chunks


def test_throughput_counts_what_arrived_inside_the_window() -> None:
    """Window (1, 7]. First request: one of two chunks of 2 tokens inside. Second: all. Third: none."""
    rows = (
        row(ts=0.0, end=4.0, chunk_times=[0.5, 3.0], output_tokens=4, chunk_tokens=[2, 2], prompt_tokens=100),
        row(ts=1.0, end=7.0, chunk_times=[2.0, 3.0, 6.9], output_tokens=3, prompt_tokens=20),
        row(ts=4.0, end=9.0, chunk_times=[8.0, 8.9], output_tokens=2, prompt_tokens=50),
    )
    got = summary(*rows, load=TWO)
    check(got, steady_start_s=1.0, steady_end_s=7.0, duration_s=9.0)
    check(got, steady_output_throughput=5 / 6, steady_total_token_throughput=25 / 6)
    check(got, steady_request_throughput=(3 / 4 + 6 / 6 + 3 / 5) / 6)  # by the share of their time inside
    check(got, output_throughput=9 / 9, total_token_throughput=179 / 9, request_throughput=3 / 9)


def test_a_request_counts_by_its_share_in_the_window_and_unknown_chunks_share_the_tokens() -> None:
    one = frame(row(ts=1.0, chunk_times=[2.0, 3.0], output_tokens=2, end=5.0))
    check(metrics.throughput(one, (1.0, 4.0)), request_throughput=3 / 4 / 3, output_throughput=2 / 3)
    times, weights = rows_of.chunk_weights(frame(row(output_tokens=6), row(chunk_times=[3.0, 4.0], output_tokens=2)))
    assert times.tolist() == [1.5, 1.7, 2.0, 3.0, 4.0] and weights.tolist() == [2, 2, 2, 1, 1]


def test_failures_count_as_failures_only() -> None:
    bad = row(ok=False, error_kind="truncated", chunk_times=[1.1, 1.2], output_tokens=500, **{"class": "b"})
    got = summary(row(), bad)
    check(got, completed=1, failed=1, failure_kinds={"truncated": 1}, total_output_tokens=3, ttft_ms__n=1)
    check(got, output_throughput=3 / 1.01)
    assert set(got["per_class"]) == {"a"}
    none = summary(row(ok=False, error_kind="refused", chunk_times=[], output_tokens=0), slo={"ttft_ms": 10.0})
    check(none, completed=0, ttft_ms__p50=None, goodput=0.0)
    assert none["output_throughput"] in (0.0, None)


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        ({"ttft_ms": 600.0, "tpot_ms": 300.0}, 2),
        ({"ttft_ms": 600.0, "tpot_ms": None}, 3),
        ({"itl_ms": 300.5}, 3),  # one chunk has no gap to be too long
        ({"itl_ms": 290.0}, 2),  # the longest gap counts, not the mean
        ({"itl_ms": 99.0}, 1),
        ({"ttfo_ms": 500.0}, 2),  # met at the limit; missed by one that was all reasoning
        ({"ttfo_ms": 900.0}, 3),
        (None, None),
    ],
)
def test_goodput_needs_every_limit_met(slo: dict | None, met: int | None) -> None:
    rows = (
        row(first_output=1.5),  # ttft 500, tpot 250
        row(chunk_times=[1.9, 2.0, 2.1], first_output=1.9),  # ttft 900
        row(chunk_times=[1.5, 2.0, 2.5]),  # tpot 500
        row(chunk_times=[1.5], output_tokens=1, first_output=1.5),  # no tpot
        row(ok=False, error_kind="timeout"),
    )  # longest gaps: 300, 100, 500, none
    check(summary(*rows, slo=slo), goodput=None if met is None else met / (2.51 - 1.0))


def test_each_limit_of_an_slo_counts_the_requests_that_are_over_it() -> None:
    rows = (row(), row(chunk_times=[1.9, 2.0, 2.7]), row(chunk_times=[1.5], output_tokens=1), row(ok=False))
    got = summary(*rows, slo={"ttft_ms": 600.0, "tpot_ms": 300.0, "e2el_ms": None})
    assert got["slo_misses"] == {"ttft_ms": 1, "tpot_ms": 1}  # both of one request; a failed one is counted apart
    assert summary(*rows)["slo_misses"] == {}


def test_pooled_percentiles_are_of_the_pool() -> None:
    """The pool's p90 is not the mean of the loads' p90s."""
    rng = np.random.default_rng(7)
    loads = []
    for scale, count in ((0.1, 20), (1.0, 200)):
        waits = rng.exponential(scale, count)
        loads.append(frame(*(row(chunk_times=[1 + w, 2 + w], output_tokens=2) for w in waits)))
    got = metrics.pooled(loads).ttft_ms.to_json()
    every = np.concatenate([(f["first"] - f["t0"]) * 1000 for f in loads])
    check(got, n=220, p90=float(np.percentile(every, 90)))
    parts = [metrics.pooled([f]).ttft_ms.p90 for f in loads]
    assert abs(got["p90"] - np.mean(parts)) > 50


def test_steady_goodput_is_of_the_requests_by_their_share_inside() -> None:
    """Window (1, 7], as above: the second request has 1 s to its first token."""
    rows = (
        row(t0=0.0, ts=0.0, end=4.0, chunk_times=[0.5, 3.0]),
        row(t0=1.0, ts=1.0, end=7.0, chunk_times=[2.0, 3.0, 6.9]),
        row(t0=4.0, ts=4.0, end=9.0, chunk_times=[4.1, 8.9], output_tokens=2),
    )
    got = summary(*rows, load=TWO, slo={"ttft_ms": 600.0})
    check(got, steady_goodput=(3 / 4 + 3 / 5) / 6, goodput=2 / 9)
    check(summary(*rows, load={"mode": "closed", "concurrency": 9}, slo={"ttft_ms": 600.0}), steady_goodput=None)


def test_time_queued_in_the_client_is_inside_ttft_and_beside_it() -> None:
    capped = {"mode": "open", "max_concurrency": 2}
    got = summary(row(t0=0.4, queued_s=0.6), row(t0=0.9, queued_s=0.1), row(queued_s=0.0), load=capped)
    check(got, client_queue_ms__max=600.0, client_queue_ms__n=3, ttft_ms__max=1100.0, ttft_send_ms__max=500.0)
    check(got, per_class__a__client_queue_ms__p50=100.0)
    assert "client_queue_ms" not in summary(row(queued_s=0.0), load={"mode": "open"})


def test_turns_and_classes_have_latencies_of_their_own() -> None:
    got = summary(
        row(session=0.0, turn=0, priority=3),
        row(session=0.0, turn=1, chunk_times=[1.1, 1.2], priority=3),
        row(session=None, turn=0, chunk_times=[1.3, 1.4], priority=0, **{"class": "b"}),
        row(session=1.0, turn=1, ok=False, error_kind="session_broken", chunk_times=[], priority=3),
    )
    check(got, per_turn__first__n=2, per_turn__later__n=1, per_turn__later__ttft_ms__p50=100.0)
    check(got, per_turn__first__ttft_ms__max=500.0, per_class__a__priority=3, per_class__b__priority=0)
    check(got, completed=3, failed=0, not_sent=1, failure_kinds={})
    assert "per_turn" not in summary(row())


def test_turns_that_were_never_sent_are_no_failures_and_the_first_failure_is_the_first_due() -> None:
    samples = (
        row(t0=2.0, ok=False, error_kind="truncated", error="cut"),
        row(t0=1.0, ok=False, error_kind="http_error", error="HTTP 500: out of memory"),
        *(row(t0=0.5, ok=False, error_kind="session_broken", error="turn 1 failed") for _ in range(200)),
        *(row() for _ in range(198)),
    )
    got = summary(*samples)
    check(got, completed=198, failed=2, not_sent=200, failure_kinds={"truncated": 1, "http_error": 1})
    check(got, first_failure="http_error: HTTP 500: out of memory")
    load = metrics.summarise(frame(*samples), ONE)
    assert not load.too_many_failed and load.model_copy(update={"failed": 3}).too_many_failed
    check(summary(row()), first_failure=None)


def test_cached_tokens_are_known_only_where_the_server_tells_them() -> None:
    check(summary(row(cached_tokens=2), row(cached_tokens=None)), total_cached_tokens=2)
    check(summary(row(cached_tokens=0)), total_cached_tokens=0)
    check(summary(row(cached_tokens=None)), total_cached_tokens=None)


def failed(kind: str, error: str, n: int = 1, **more: Any) -> list[dict]:
    return [row(ok=False, error_kind=kind, error=error, **more) for _ in range(n)]


def test_each_kind_of_failure_has_its_most_frequent_message() -> None:
    got = summary(
        *failed("timeout", "no answer in 20 s"),
        *failed("server_error", "compute error", 2),
        *(each for n in (700, 900, 800) for each in failed("server_error", f"request of {n} tokens is too long")),
    )
    assert list(got["failure_messages"]) == ["server_error", "timeout"]  # the most frequent first
    # Messages that differ in their numbers only are one.
    check(got, failure_messages__server_error={"message": "request of 700 tokens is too long", "requests": 3})
    check(got, failure_messages__timeout={"message": "no answer in 20 s", "requests": 1})
    check(summary(row()), failure_messages={}, refused_by_server=0, rejected_by_server=0)


@pytest.mark.parametrize(
    ("status", "refused", "rejected"), [(400, 0, 2), (499, 0, 2), (429, 2, 0), (500, 2, 0), (502, 0, 0), (None, 2, 0)]
)
def test_a_status_tells_whether_the_server_or_the_request_is_blamed(status, refused, rejected) -> None:
    got = summary(row(), *failed("http_error", "no", 2, **({"http_status": status} if status else {})))
    check(got, refused_by_server=refused, rejected_by_server=rejected)


FULL = failed("server_error", "Context size has been exceeded.", 32, http_status=200)


@pytest.mark.parametrize(
    ("rows", "refused"),
    [
        (FULL, True),
        (failed("http_error", "HTTP 503: queue is full", 2, http_status=503), True),
        (failed("http_error", "HTTP 502: bad gateway", 2, http_status=502), False),  # a proxy's word
        (failed("timeout", "no answer", 2), False),
        (failed("dropped", "the connection closed", 2), False),
        ([*FULL, *failed("truncated", "cut", 2)], False),  # more than 1 % of the requests
    ],
)
def test_a_load_is_refused_where_the_server_answered_a_part_and_said_no_to_the_rest(rows: list, refused: bool) -> None:
    assert metrics.summarise(frame(*rows, *(row() for _ in range(20))), ONE).is_refusal is refused
    assert not metrics.summarise(frame(*rows), ONE).is_refusal  # it answered nothing: something else is wrong
    few = frame(*rows[:2], *(row() for _ in range(200)))  # within the limit of failures
    assert not metrics.summarise(few, ONE).is_refusal


def test_each_plateau_of_steps_has_figures_of_its_own() -> None:
    """2 requests/s for 40 s, then 5/s for 40 s, each answered in 0.5 s; in the second step the first token is late."""
    starts = np.concatenate([np.arange(0, 40, 0.5), np.arange(40, 80, 0.2)])
    rows = [
        row(t0=t, ts=t, chunk_times=[t + (0.1 if t < 40 else 0.4), t + 0.5], end=t + 0.5, output_tokens=2)
        for t in starts
    ]
    load = {"mode": "open", "notes": {"plateaus": [[0.0, 40.0, 2.0], [40.0, 80.0, 5.0]]}}
    got = summary(*rows, load=load, slo={"ttft_ms": 200.0})
    check(got, steady_start_s=None, plateaus__0__request_rate=2.0, plateaus__1__request_rate=5.0)
    check(got, plateaus__0__ttft_ms__p50=100.0, plateaus__1__ttft_ms__p50=400.0, plateaus__1__steady_goodput=0.0)
    assert got["plateaus.0.steady_request_throughput"] == pytest.approx(2.0, rel=0.03)
    assert got["plateaus.1.steady_output_throughput"] == pytest.approx(10.0, rel=0.03)
    assert got["plateaus.0.steady_goodput"] == pytest.approx(2.0, rel=0.03)


def test_who_waits_past_the_steady_windows_end_is_in_its_latency() -> None:
    got = summary(*queued_at_the_end().to_dict("records"), load={"mode": "open", "max_concurrency": 1})
    check(got, steady_end_s=99.0, steady_latency__ttft_ms__n=100 - np.ceil(got["steady_start_s"]))
    check(got, steady_latency__ttft_ms__max=30_100.0, steady_latency__client_queue_ms__max=30e3)


def test_requests_all_due_at_once_are_steady_when_they_were_sent() -> None:
    """Four places, 2 s each: the first four sends filled them."""
    sends = np.repeat(np.arange(10.0) * 2, 4) + np.tile([0.0, 0.1, 0.2, 0.3], 10)
    rows = [row(t0=1e-6 * (k % 2), ts=t, queued_s=t, chunk_times=[t + 1, t + 2], end=t + 2, output_tokens=2)
            for k, t in enumerate(sends)]  # fmt: skip
    got = summary(*rows, load={"mode": "open", "max_concurrency": 4})
    check(got, steady_start_s=0.3, steady_end_s=20.0, steady_latency__ttft_send_ms__n=36)
    assert got["steady_output_throughput"] == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize(("users", "requests", "leads"), [(8, 20, True), (8, 19, False), (4, 12, True), (4, 11, False)])
def test_the_first_burst_is_not_in_the_latency_that_leads(users: int, requests: int, leads: bool) -> None:
    """A server that prefills one prompt at a time, 0.1 s each, then decodes 10 tokens in 1 s, and all users at once."""
    prefilled, rows, idle = 0.0, [], [0.0] * users
    for k in range(requests):
        sent = idle[k % users]
        prefilled = max(prefilled, sent) + 0.1
        idle[k % users] = prefilled + 1
        rows.append(row(t0=sent, ts=sent, chunk_times=[prefilled, prefilled + 1], end=prefilled + 1, output_tokens=11))
    got = metrics.summarise(frame(*rows), {"mode": "closed", "concurrency": users})
    steady, whole = got.steady_latency.ttft_ms, got.ttft_ms
    assert whole.max == pytest.approx(users * 100)
    assert steady.max == pytest.approx(100)  # the last of the burst waited for all others
    assert steady.n == requests - users
    assert got.leading_latencies.ttft_ms.mean == pytest.approx(100 if leads else whole.mean) and whole.mean > 110


@pytest.mark.parametrize("by_id", [True, False])
def test_tokens_a_chunk_and_how_long_streams_stayed_open(by_id: bool) -> None:
    times = {"chunk_times": [1.2, 1.4, 1.6, 2.0], "output_tokens": 16, "chunk_tokens": [4] * 4 if by_id else None}
    got = summary(row(**times, end=5.0), row(**times, end=2.0), row(ok=False, error_kind="timeout", end=60.0))
    check(got, tokens_per_chunk=4.0, itl_ms__p50=200.0, tpot_ms__p50=800 / 15)
    check(got, open_after_last_p50_ms=1500.0, open_after_last_share=3 / 5)  # of 4 and 1 s from the send to the end
    check(summary(row(**times | {"output_tokens": 24}, unstreamed_tokens=8)), tokens_per_chunk=4.0)
    check(summary(row(end=2.0)), tokens_per_chunk=1.0, open_after_last_share=0.0)
    check(summary(row(ok=False, error_kind="timeout")), tokens_per_chunk=None, open_after_last_share=None)
