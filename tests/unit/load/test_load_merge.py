"""Results of several workers as those of one load."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvbench.load.client_figures import Clocked
from kvbench.load.completion import Completion
from kvbench.load.multi.merge import (
    ClockMap,
    Member,
    Reading,
    clock_map,
    merged_client,
    samples_from_bytes,
    samples_to_bytes,
)
from kvbench.load.multi.shards import Shard
from kvbench.load.outcome import most_in_flight
from kvbench.load.samples import Sample, write_samples
from kvbench.requests.request import RequestSpec

SAME = ClockMap((Reading(0.0, 0.0, 1e-4),), True)


def sample(index: int, ts: float, end: float, *, itl: float = 0.02, late: float = 1e-4, **fields: object) -> Sample:
    """A successful stream whose chunks the server sent every ``itl`` from ``ts`` on; the stamps are ``late``."""
    sent = np.arange(ts + itl, end, itl).tolist()
    done = Completion(
        200, [t + late for t in sent], [1] * len(sent), sent_times=sent, token_ids=list(range(len(sent))), text="abc",
        first=sent[0] + late, first_output=sent[1] + late, first_reasoning=sent[2] + late, finish_reason="length",
        prompt_tokens=1, output_tokens=len(sent), cached_tokens=3, done=True,
    )  # fmt: skip
    request = RequestSpec(index, "odd", (index,), None, len(sent), ts, session=4, turn=index, priority=2)
    return Sample(request, index % 3, ts - 0.001, ts, end, dataclasses.replace(done, **fields), 0.0005)


def member(name: str, samples: list[Sample], cpu_s: float = 0.5, lags: float = 1e-4, **more: Any) -> Member:
    clocked, shard = Clocked(0.0, cpu_s, 10.0, 0.0, "normal"), Shard(None, [s.request for s in samples], 0)
    own = {"shard": shard, "samples": samples, "lags": np.full(1000, lags), "clocked": clocked, "clock": SAME}
    return Member("node", name, "h", 1, **own | more)


def test_samples_survive_the_way_and_land_on_the_masters_clock() -> None:
    """The worker's clock is 1,000 s ahead and runs 100 ppm fast: 10 ms in 100 s."""

    def shown(t: float) -> float:
        return t * 1.0001 + 1000.0

    truth = [sample(0, 5.0, 6.0), sample(1, 90.0, 91.0, error_kind="truncated", error="cut", cached_tokens=None)]
    clock = clock_map(Reading(shown(0.0), shown(0.0), 1e-5), "a", "b")
    clock = clock.with_reading(Reading(shown(100.0), shown(100.0) - 100.0, 1e-5))
    def on_worker(was: Any, *names: str, **more: Any) -> Any:
        """With these moments as the worker's clock shows them."""
        moments = {name: getattr(was, name) for name in names}
        moved = {n: list(map(shown, t)) if isinstance(t, list) else shown(t) for n, t in moments.items()}
        return dataclasses.replace(was, **moved, **more)

    moments = ("chunk_times", "sent_times", "first", "first_output", "first_reasoning")
    seen = [on_worker(s, "t0", "ts", "end", completion=on_worker(s.completion, *moments)) for s in truth]
    back = samples_from_bytes(samples_to_bytes(seen), clock, {s.request.index: s.request for s in truth}, first_user=10)
    for was, now in zip(truth, back, strict=True):
        assert now.request is was.request
        assert now.user == was.user + 10
        assert [now.t0, now.ts, now.end] == pytest.approx([was.t0, was.ts, was.end], abs=1e-6)
        for name in moments:
            assert getattr(now.completion, name) == pytest.approx(getattr(was.completion, name), abs=1e-6)
        same = ("token_ids", "text", "finish_reason", "output_tokens", "cached_tokens", "error_kind", "error", "ok")
        assert all(getattr(now.completion, n) == getattr(was.completion, n) for n in same)
        assert now.queued_s == was.queued_s


def test_a_row_has_all_first_times_and_the_tokens_of_reasoning(tmp_path) -> None:
    hidden = {"unstreamed_tokens": 2, "reasoning_tokens": 3, "first_reasoning": None}
    write_samples(tmp_path / "r.parquet", [sample(0, 5.0, 6.0, **hidden), sample(1, 5.0, 6.0)], 5.0)
    rows = pd.read_parquet(tmp_path / "r.parquet")
    assert rows["first"].tolist() == pytest.approx([0.0201] * 2) and rows["unstreamed_tokens"].tolist() == [2, 0]
    assert rows["first_output"].tolist() == pytest.approx([0.0401] * 2)
    assert rows["first_reasoning"].tolist() == pytest.approx([np.nan, 0.0601], nan_ok=True)
    assert rows["reasoning_tokens"].tolist() == pytest.approx([3, np.nan], nan_ok=True)


def test_most_in_flight_is_that_of_counting_at_every_moment() -> None:
    rng = random.Random(3)
    for _ in range(20):
        spans = [(a, a + rng.choice([0.0, 0.4, 2.0])) for a in (rng.uniform(0, 5) for _ in range(40))]
        samples = [
            Sample(RequestSpec(i, "c", (1,), None, 1), 0, a, a, b, Completion()) for i, (a, b) in enumerate(spans)
        ]
        brute = max(sum(a <= t < b for a, b in spans) for t in [a for a, _ in spans])
        assert most_in_flight([s.ts for s in samples], [s.end for s in samples]) == brute
    assert most_in_flight([], []) == 0
    assert most_in_flight([1.0, 2.0], [2.0, 3.0]) == 1  # one starts as the other ends


def test_cpu_is_limited_for_each_process_and_told_for_all() -> None:
    fine = member("worker 1", [sample(0, 0.0, 9.0)], cpu_s=6.0)
    client, reasons = merged_client([fine, member("worker 2", [sample(1, 0.0, 9.0)], cpu_s=6.0)], "closed", 10.0)
    assert client.cpu_fraction == pytest.approx(0.6)  # of a core each: within the limit of 70 %
    assert client.cpu_fraction_total == pytest.approx(1.2)
    assert [p.cpu_fraction for p in client.processes] == pytest.approx([0.6, 0.6])
    assert reasons == []


def test_one_late_worker_does_not_hide_among_many() -> None:
    """Of 400 workers' chunks half a per cent is 5 ms late: not in the p99 of all, but all that this worker saw."""
    good = [member(f"worker {k}", [sample(k * 9 + i, i, i + 0.99) for i in range(9)]) for k in range(200)]
    late = member("worker 200", [sample(5000 + i, i, i + 0.99, late=0.005) for i in range(2)])
    slow = dataclasses.replace(
        late, samples=[*late.samples, *(sample(6000 + i, i, i + 0.99, late=0.005) for i in range(2))]
    )
    client, reasons = merged_client([*good, slow], "closed", 10.0)
    assert client.lag_p99_ms < 1.0
    assert len(reasons) == 1
    assert reasons[0].startswith("worker 200: the client's timestamps lagged: p99 5.00 ms")


def test_a_badly_known_clock_speaks_against_the_load() -> None:
    far = member("worker 1", [sample(0, 0.0, 3.0)], clock=ClockMap((Reading(0.0, 7.0, 0.003),), False))
    client, reasons = merged_client([far], "closed", 10.0)
    assert "clock of worker 1" in reasons[0]
    assert client.processes[0].clock.error_ms == pytest.approx(3.0)
    assert merged_client([], "closed", 10.0)[1] == []  # nothing came back
