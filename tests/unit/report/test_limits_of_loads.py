"""What limited a load: each rule holds from its bound on, the first one names the limit, and unknowns name nothing."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from kvbench.report.comparisons import Comparisons
from kvbench.report.decision import Decision
from kvbench.report.limits import (
    BUSY,
    CLIENT,
    COMPUTE,
    KV,
    MOSTLY,
    NOTHING,
    OFTEN,
    QUEUE,
    RULES,
    SEATS,
    STORM,
    UNKNOWN,
    LoadFacts,
    facts_of,
    judge,
)
from tests.support.records import put, take
from tests.support.report_cells import cell, run, stored
from tests.support.report_parts import growth, limit_lines

ROOM = LoadFacts(asked=24, running=24.0, waiting=0.0, seats=32, kv_wait=0.0, kv_peak=0.4)


@pytest.mark.parametrize(
    ("changed", "limit"),
    [
        ({}, NOTHING),
        ({"client_cpu": 0.51}, CLIENT),
        ({"client_cpu": 0.49}, NOTHING),
        ({"kv_wait": OFTEN}, KV),
        ({"kv_wait": OFTEN - 0.001}, NOTHING),
        ({"preemptions": STORM}, KV),
        ({"running": 31.0, "waiting": 3.0}, SEATS),
        ({"running": 31.0, "waiting": 0.0}, NOTHING),  # nobody waits for a seat
        ({"busy": BUSY, "rate_growth": 1.9, "running_growth": 4.0}, COMPUTE),
        ({"busy": BUSY, "rate_growth": 2.1, "running_growth": 4.0}, NOTHING),  # more requests still bring more tokens/s
        ({"busy": BUSY, "rate_growth": 1.0, "running_growth": 1.1}, NOTHING),  # hardly more ran, so nothing is known
        ({"busy": 0.5, "rate_growth": 1.2, "running_growth": 4.0}, NOTHING),  # the engine has time left
        ({"busy": BUSY, "waiting": 5.0}, COMPUTE),  # one load only: requests wait and the engine is full
        ({"grown": 4.0}, QUEUE),
        ({"grown": 0.5}, NOTHING),
        ({"kv_wait": 0.9, "client_cpu": 0.6}, KV),  # the load is valid, so the client distorts little
        ({"waiting": 5.0}, UNKNOWN),  # requests wait, and no rule sees for what
        ({"kv_wait": MOSTLY, "busy": 1.0, "rate_growth": 1.2, "running_growth": 4.0}, KV),
        ({"kv_wait": MOSTLY - 0.01, "busy": 1.0, "rate_growth": 1.2, "running_growth": 4.0}, COMPUTE),
        ({"kv_wait": 0.2, "headroom": 2.0, "busy": 1.0, "rate_growth": 1.2, "running_growth": 4.0}, KV),
        ({"kv_wait": None, "kv_peak": None, "busy": None}, UNKNOWN),
    ],
)
def test_the_first_rule_that_holds_names_the_limit(changed: dict, limit: str) -> None:
    found, evidence = judge(replace(ROOM, **changed))
    assert found == limit and (evidence or limit == UNKNOWN)


def test_every_rule_is_seen_somewhere_and_says_its_evidence() -> None:
    seen = {
        "the client was busy": {"client_cpu": 0.8},
        "requests mostly waited for KV": {"kv_wait": 0.5},
        "requests often waited for KV": {"kv_wait": 0.1},
        "preemption storm": {"preemptions": 0.5},
        "concurrency failed before compute was full": {"kv_wait": 0.5, "headroom": 2.0},
        "the batch was full": {"running": 32.0, "waiting": 3.0},
        "the engine was full": {"busy": 1.0, "rate_growth": 1.2, "running_growth": 4.0},
        "the queue grew": {"grown": 4.0},
        "admission dominates TTFT": {"queued": 0.8},
        "long prompts slow everyone": {"stall": 8.0},
        "nothing was full": {},
    }
    assert set(seen) == {rule.name for rule in RULES}
    for rule in RULES:
        facts = replace(ROOM, **seen[rule.name])
        assert rule.holds(facts) and rule.evidence(facts), rule.name
        assert not rule.holds(LoadFacts()), rule.name  # where nothing is told, nothing is seen


def test_kv_that_ran_out_before_compute_says_so_and_hides_that_steps_were_filled() -> None:
    facts = replace(ROOM, kv_wait=1.0, running=3.0, headroom=2.0, busy=0.99, waiting=20.0)
    limit, evidence = judge(facts)
    assert limit == KV and any("compute was not full" in text and "2.00x" in text for text in evidence)
    assert not any("steps fill" in text for text in evidence)
    both = replace(facts, headroom=None, rate_growth=1.2, running_growth=4.0)
    assert any("steps fill" in text for text in judge(both)[1])


def test_headroom_is_of_layouts_that_compute_the_same_and_only_where_it_is_decided() -> None:
    base, slow = cell(), cell("contiguous", throughput=(50.0, 51.0, 49.0))
    cached = cell(enable_prefix_caching=True, throughput=(300.0, 301.0, 302.0))  # computes less
    assert facts_of(slow, Comparisons.of(run(base, slow, cached))).headroom == pytest.approx(2.0, rel=0.05)
    assert facts_of(base, Comparisons.of(run(base, slow, cached))).headroom is None
    scattered = cell("contiguous", throughput=(20.0, 100.0, 260.0))
    assert facts_of(scattered, Comparisons.of(run(base, scattered))).headroom is None


def test_scaling_compares_with_the_load_below_and_needs_more_sequences() -> None:
    def at(load: float, rate: float, running: float):
        return cell(load=load, throughput=(rate,) * 3, running=running)

    def scaling(*cells) -> float | None:
        for one in cells:
            for repeat in one.repeats:
                put(repeat.metrics, output_throughput=repeat.metrics.steady_output_throughput)
        return facts_of(cells[-1], Comparisons.of(run(*cells))).scaling

    assert scaling(at(3, 100.0, 3.0), at(24, 200.0, 24.0)) == pytest.approx(1 / 3)  # 2x of 2x2x2x
    assert scaling(at(3, 100.0, 3.0), at(24, 800.0, 24.0)) == pytest.approx(1.0)
    assert scaling(at(3, 100.0, 3.0), at(24, 100.0, 3.0)) is None  # no more ran: memory or seats, not compute
    assert scaling(at(24, 100.0, 3.0)) is None


def test_an_open_loads_queue_grows_between_the_thirds_of_its_arrivals_and_not_in_the_drain(tmp_path) -> None:
    """Arrivals for 30 s, each of which lets one more wait; then the queue drains for 30 s."""
    t = [float(second) for second in range(60)]
    waits = [second if second < 30 else 60 - second for second in t]
    polls = pd.DataFrame({"t": t, "repeat": 0, "num_requests_running": 4.0, "num_requests_waiting": waits})
    requests = pd.DataFrame({"t0": t[:31], "repeat": 0, "ok": True})
    one = stored(cell(mode="open", load=4), tmp_path, requests, polls)
    one = replace(one, repeats=one.repeats[:1])
    take(one.repeats[0].metrics, "steady_end_s")  # it never settled
    assert facts_of(one, Comparisons.of(run(one))).grown == pytest.approx(20.0, abs=1.0)
    closed = replace(one, load=cell().load)
    assert facts_of(closed, Comparisons.of(run(closed))).grown is None
    put(one.repeats[0].metrics, steady_end_s=30.0)  # it settled, so it only swings
    assert facts_of(one, Comparisons.of(run(one))).grown is None


def test_lines_put_configurations_with_the_same_limit_together_highest_load_first() -> None:
    full, room = {"kv_full": 0.9, "waiting_mean": 9.0}, {"kv_full": 0.0, "waiting_mean": 0.0}
    cells = [
        cell(observed=full), cell("contiguous", observed=full | {"kv_full": 1.0}), cell(page_size=8, observed=room),
        *(cell(load=3, observed=room), cell("contiguous", load=3, observed=room), cell(page_size=8, load=3,
                                                                                       observed=room)),
        cell(page_size=64, reasons=("lag",), observed=full),
    ]  # fmt: skip
    lines = [(line.load, line.limit, line.names) for line in limit_lines(run(*cells))]
    assert lines == [
        ("24 at once", KV, "paged (page 16) and contiguous"), ("24 at once", NOTHING, "page 8"),
        ("3 at once", NOTHING, "all 3"),
    ]  # fmt: skip
    assert limit_lines(run(*cells))[0].evidence.startswith("paged (page 16): ")  # the baseline


def test_at_which_load_a_configuration_breaks_is_read_of_one_window() -> None:
    """p95 TTFT 100 and 250 ms in the steady window; 200 and 300 ms of the whole run."""
    cells = [cell(mode="open", load=rate, ttft=(ttft,)) for rate, ttft in ((1, 100.0), (2, 250.0))]
    whole = [cell(mode="open", load=rate, ttft=(ttft,)) for rate, ttft in ((1, 200.0), (2, 300.0))]
    cells = [
        replace(one, pooled=other.pooled.model_copy(update={"steady_latency": one.pooled.steady_latency}))
        for one, other in zip(cells, whole, strict=True)
    ]
    (steady,) = Decision.of(run(*cells)).breaks
    (row,) = growth(run(*cells))[1].rows
    assert steady.at is cells[1] and row.values[2].sort == 250.0
    put(cells[1].repeats[0].metrics.steady_latency.ttft_ms, n=7)
    assert Decision.of(run(*cells)).breaks[0].at is None
    assert [value.sort for value in growth(run(*cells))[1].rows[0].values[1:3]] == [200.0, 300.0]
