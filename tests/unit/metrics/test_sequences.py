"""Requests of several sequences: each has times of its own, however their chunks were interleaved."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.metrics.latency import summarise
from tests.support.request_rows import frame, row

ONE = {"mode": "closed", "concurrency": 1}
# Sequence 0 at 1.5, 1.7, 2.0; sequence 1 at 1.6, 2.6: sent at 1.0.
TWO_SEQUENCES = {"chunk_times": [1.5, 1.6, 1.7, 2.0, 2.6], "chunk_choices": [0, 1, 0, 0, 1], "output_tokens": 5}


def test_a_request_of_two_sequences_by_hand() -> None:
    found = summarise(frame(row(**TWO_SEQUENCES, chunk_tokens=[1] * 5)), ONE)
    assert found.ttft_ms.n == 1 and found.ttft_ms.p50 == pytest.approx(500)
    assert found.sequence_ttft_ms.n == 2 and found.sequence_ttft_ms.p50 == pytest.approx(550)
    assert found.e2el_ms.p50 == pytest.approx(1600)
    assert found.tpot_ms.n == 2  # 500 ms over 2 tokens, 1000 ms over 1
    assert (found.tpot_ms.min, found.tpot_ms.max) == pytest.approx((250, 1000))
    assert found.itl_ms.n == 3  # 200, 300 and 1000: none between two sequences
    assert (found.itl_ms.min, found.itl_ms.max) == pytest.approx((200, 1000))
    assert found.total_output_tokens == 5 and found.completed == 1


def test_tpot_is_of_each_sequences_own_tokens_and_shared_out_where_they_are_not_known() -> None:
    known = summarise(frame(row(**TWO_SEQUENCES | {"output_tokens": 8}, chunk_tokens=[1, 4, 1, 1, 1])), ONE)
    assert (known.tpot_ms.min, known.tpot_ms.max) == pytest.approx((1000 / 4, 500 / 2))
    unknown = summarise(frame(row(**TWO_SEQUENCES | {"output_tokens": 10})), ONE)  # two a chunk
    assert (unknown.tpot_ms.min, unknown.tpot_ms.max) == pytest.approx((500 / 5, 1000 / 3))


@pytest.mark.parametrize(
    ("slo", "met"),
    [({"tpot_ms": 1001}, 1), ({"tpot_ms": 999}, 0), ({"itl_ms": 1001}, 1), ({"itl_ms": 999}, 0), ({"ttft_ms": 501}, 1)],
)
def test_a_limit_is_for_the_slowest_sequence(slo: dict, met: int) -> None:
    found = summarise(frame(row(**TWO_SEQUENCES, chunk_tokens=[1] * 5)), ONE, slo)
    assert found.goodput == pytest.approx(met / found.duration_s)


@pytest.mark.parametrize("choices", [None, [0], [0, 1]])
def test_what_is_chosen_at_the_end_has_a_ttft_and_neither_tpot_nor_itl(choices: list | None) -> None:
    chunks = len(choices or [0])
    one = row(chunk_times=[2.0] * chunks, chunk_choices=choices, chunk_tokens=[8] * chunks, output_tokens=8 * chunks)
    found = summarise(frame(one), ONE, {"tpot_ms": 1.0, "itl_ms": 1.0})
    assert found.ttft_ms.p50 == found.e2el_ms.p50 == pytest.approx(1000)
    assert found.tpot_ms.n == found.itl_ms.n == 0
    assert found.goodput > 0 and found.total_output_tokens == 8 * chunks


def test_sequence_ttft_is_there_only_where_a_request_has_several() -> None:
    assert "sequence_ttft_ms" not in summarise(frame(row(), row(chunk_choices=None)), ONE).model_fields_set
    assert summarise(frame(row(), row(**TWO_SEQUENCES)), ONE).sequence_ttft_ms.n == 2


STREAMS = st.lists(
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 3)), min_size=1, max_size=6), min_size=2, max_size=5
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STREAMS, st.randoms(use_true_random=False))
def test_interleaving_in_any_order_gives_the_metrics_of_separate_streams(streams, rng) -> None:
    """``streams``: of each sequence its gaps [ms] and the tokens of its chunks; all are of one request."""
    chunks, alone = [], []
    for number, gaps in enumerate(streams):
        at, own = 1.0, []
        for gap, tokens in gaps:
            at += gap / 1000
            own.append((at, number, tokens))
        chunks.append(own)
        times, _, tokens = (list(column) for column in zip(*own, strict=True))
        alone.append(row(chunk_times=times, chunk_tokens=tokens, output_tokens=sum(tokens)))
    merged, left = [], [list(own) for own in chunks]
    while any(left):
        merged.append(rng.choice([own for own in left if own]).pop(0))
    times, choices, tokens = (list(column) for column in zip(*merged, strict=True))
    first, last = min(times), max(times)
    together = summarise(
        frame(
            row(
                chunk_times=times, chunk_choices=choices, chunk_tokens=tokens, output_tokens=sum(tokens), first=first,
                last=last, end=last + 0.01,
            )
        ),
        ONE,
    )  # fmt: skip
    apart = summarise(frame(*alone), {"mode": "closed", "concurrency": len(alone)})
    for name in ("tpot_ms", "itl_ms"):
        assert together.value(f"{name}.n") == apart.value(f"{name}.n")
        for statistic in ("mean", "p50", "p95", "max"):
            path = f"{name}.{statistic}"
            assert together.value(path) == pytest.approx(apart.value(path), abs=1e-6), path
    assert together.sequence_ttft_ms.p50 == pytest.approx(apart.ttft_ms.p50)
    assert together.sequence_ttft_ms.n == len(streams)
    assert together.ttft_ms.max == pytest.approx(apart.ttft_ms.min)
    assert together.e2el_ms.max == pytest.approx(apart.e2el_ms.max)
    assert together.total_output_tokens == apart.total_output_tokens
