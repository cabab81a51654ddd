"""What moved with a timing: shares known by construction, noise that must not be listed, servers that tell little."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from kvbench.gate.timing.explain import moved_between, where_it_went
from kvbench.gate.verdict.verdict import FAIL, PASS, Finding

PHASES_MS = {"schedule": 0.2, "prepare": 0.8, "execute": 10.0, "sample": 0.5, "output": 0.5}
TOKENS, STEPS, REQUESTS = 4000.0, 800.0, 40.0


def load(phases=PHASES_MS, queue=100.0, prefill=50.0, outside=0.3, rest=None, scale=1.0):
    """counters.json of one load in which a token takes one step and ``outside``. Times in ms."""
    step = sum(phases.values()) * scale
    itl, ttft = step + outside, queue + prefill
    told = {f"step_time_seconds_total_{name}": STEPS * ms * scale / 1000 for name, ms in phases.items()}
    decode = itl * (TOKENS - REQUESTS) / REQUESTS
    means = {"request_queue_time": queue, "request_prefill_time": prefill, "request_decode_time": decode,
             "time_to_first_token": ttft, "e2e_request_latency": ttft + decode}  # fmt: skip
    for name, ms in means.items():
        told |= {f"{name}_seconds_sum": ms * REQUESTS / 1000, f"{name}_seconds_count": REQUESTS}
    gaps = TOKENS - REQUESTS
    told |= {"inter_token_latency_seconds_sum": itl * gaps / 1000, "inter_token_latency_seconds_count": gaps}
    told |= {"steps_total": STEPS, "generation_tokens_total": TOKENS, "num_preemptions_total": 0.0}
    told |= {"swap_seconds_total": 0.0, "recomputed_tokens_total": 0.0, "num_requests_running_mean": 8.0}
    return told | (rest or {})


def noisy(rng, sd=0.01, slower=1.0, **changes):
    """A load with its own speed: all of its times are longer or shorter together. ``slower``: the queue alone."""
    factor = float(np.exp(rng.normal(0.0, sd)))
    return load(queue=100.0 * factor * slower, prefill=50.0 * factor, scale=factor, **changes)


def pairs(base, candidate, cell="w/c8"):
    return {cell: {"base": list(base), "candidate": list(candidate)}}


def failed(metric, cell="w/c8", suite="cell"):
    return Finding(f"{suite}/{cell}/{metric}", suite, metric, FAIL, "slower", metric=metric)


def by_name(moved):
    return {m.name: m for m in moved}


@pytest.mark.parametrize(
    ("metric", "candidate", "shares", "words"),
    [
        ("p95_ttft_ms", {"queue": 130.0, "prefill": 60.0}, {"request_queue_time": 0.75, "request_prefill_time": 0.25},
         ("+40 ms", "75 % in queue", "25 % in prefill")),
        ("output_throughput", {"phases": PHASES_MS | {"execute": 12.0}, "prefill": 60.0}, {},
         ("100 % in execute", "100 % in prefill")),  # explained by both latencies
        ("p95_itl_ms", {"outside": 3.3}, {}, ("+3 ms",)),  # spent in no step: the server does not show it
    ],
)  # fmt: skip
def test_where_the_time_went(metric, candidate, shares, words):
    counters, findings = pairs([load()] * 8, [load(**candidate)] * 8), [failed(metric)]
    moved = moved_between(counters, findings)
    assert {name: by_name(moved)[name].share for name in shares} == pytest.approx(shares)
    sentence = where_it_went(moved, findings, counters)
    assert all(each in sentence for each in words)


def test_a_slower_forward_pass_explains_the_time_between_tokens():
    slow = PHASES_MS | {"execute": 12.0, "schedule": 0.24}
    counters = pairs([load()] * 8, [load(slow)] * 8)
    moved = moved_between(counters, [failed("p95_itl_ms")])
    found = by_name(moved)
    assert set(found) == {"inter_token_latency", "request_decode_time", "e2e_request_latency",
                          "step_time_seconds_total_execute", "step_time_seconds_total_schedule"}  # fmt: skip
    execute = found["step_time_seconds_total_execute"]
    assert (execute.base, execute.candidate, execute.unit) == (pytest.approx(10.0), pytest.approx(12.0), "ms")
    assert execute.change == pytest.approx(0.2) and execute.share == pytest.approx(2.0 / 2.04)
    assert found["step_time_seconds_total_schedule"].share == pytest.approx(0.04 / 2.04)
    assert found["inter_token_latency"].share is None
    assert [m.name for m in moved][:2] == ["step_time_seconds_total_execute", "step_time_seconds_total_schedule"]
    sentence = where_it_went(moved, [failed("p95_itl_ms")], counters)
    assert "+2.04 ms" in sentence and "98 % in execute" in sentence


def test_swapping_is_part_of_prepare():
    swaps = {"swap_seconds_total": STEPS * 1.9 / 1000, "swapped_out_slots_total": 40.0}
    counters = pairs(
        [load(rest={"swapped_out_slots_total": 0.0})] * 8, [load(PHASES_MS | {"prepare": 2.8}, rest=swaps)] * 8
    )
    moved = moved_between(counters, [failed("p95_itl_ms")])
    found = by_name(moved)
    assert found["swap_seconds_total"].share == pytest.approx(0.95) and found["swap_seconds_total"].change is None
    assert "swap" in where_it_went(moved, [failed("p95_itl_ms")], counters)
    assert found["swapped_out_slots_total"].candidate == pytest.approx(10.0)  # per 1,000 output tokens


def test_what_base_never_does_comes_first():
    rest = {"num_preemptions_total": 5.0}
    counters = pairs([load()] * 8, [load(PHASES_MS | {"execute": 12.0}, rest=rest)] * 8)
    moved = moved_between(counters, [failed("p95_itl_ms")])
    assert moved[0].name == "num_preemptions_total" and moved[0].change is None and moved[0].interval is None
    assert (moved[0].base, moved[0].candidate) == (0.0, pytest.approx(1.25))
    assert "preemptions (1.25" in where_it_went(moved, [], counters)
    (gone,) = moved_between(pairs([load(rest=rest)] * 8, [load()] * 8))
    assert (gone.name, gone.change, gone.interval) == ("num_preemptions_total", -1, (-1, -1))


def test_what_is_below_the_floor_is_listed_only_if_it_is_the_same_in_every_pair():
    counters = pairs([load()] * 4, [load(rest={"steps_total": STEPS + 1})] * 4)
    assert by_name(moved_between(counters))["steps_total"].change == pytest.approx(1 / STEPS)
    some = [load(rest={"num_preemptions_total": 1.0 if pair == 3 else 0.0}) for pair in range(8)]
    assert moved_between(pairs([load()] * 8, some)) == ()
    counters = pairs([load()] * 8, [load(PHASES_MS | {"execute": 10.05})] * 8)  # 0.5 %
    assert moved_between(counters) == ()


def test_the_interval_is_students_on_the_log_ratios():
    rng = np.random.default_rng(5)
    base = [noisy(rng) for _ in range(8)]
    candidate = [noisy(rng, slower=1.3) for _ in range(8)]
    queue = by_name(moved_between(pairs(base, candidate)))["request_queue_time"]
    ratios = [np.log(c["request_queue_time_seconds_sum"] / b["request_queue_time_seconds_sum"])
              for b, c in zip(base, candidate, strict=True)]  # fmt: skip
    low, high = stats.t.interval(0.95, 7, np.mean(ratios), stats.sem(ratios))
    assert queue.interval == pytest.approx((np.expm1(low), np.expm1(high)))
    assert queue.change == pytest.approx(np.expm1(np.mean(ratios)))


def test_noise_is_rarely_listed_and_a_slowdown_in_it_found():
    """Without a difference each figure is listed in at most one of twenty comparisons; 200 of them, one seed."""
    rng = np.random.default_rng(20)
    listed = [
        by_name(moved_between(pairs([noisy(rng, 0.03) for _ in range(8)], [noisy(rng, 0.03) for _ in range(8)])))
        for _ in range(200)
    ]
    assert sum("step_time_seconds_total_execute" in one for one in listed) <= stats.binom.ppf(0.999, 200, 0.05)
    assert not any("num_preemptions_total" in one for one in listed)
    slow = PHASES_MS | {"execute": 12.0}
    counters = pairs([noisy(rng) for _ in range(12)], [noisy(rng, phases=slow) for _ in range(12)])
    execute = by_name(moved_between(counters, [failed("p95_itl_ms")]))["step_time_seconds_total_execute"]
    assert execute.share == pytest.approx(1.0, abs=0.1)


def test_only_the_cells_that_failed_are_listed_and_all_where_the_whole_did():
    slow = [load(PHASES_MS | {"execute": 12.0})] * 4
    counters = {name: pairs([load()] * 4, slow, name)[name] for name in ("w/c8", "w/c80", "v")}
    passed = Finding("cell/v/p95_itl_ms", "cell", "", PASS, "", metric="p95_itl_ms")
    for findings, cells in (
        ([failed("p95_itl_ms", "w/c8")], {"w/c8"}),
        ([failed("p95_itl_ms", "", "overall")], {"w/c8", "w/c80", "v"}),
        ([passed, failed("p95_itl_ms", "w/c80")], {"w/c80"}),
    ):
        assert {m.where for m in moved_between(counters, findings)} == cells
    orders = [moved_between({name: counters[name] for name in names}) for names in (counters, reversed(counters))]
    assert orders[0] == orders[1]
    counters |= pairs([load()] * 4, [load(PHASES_MS | {"execute": 15.0})] * 4, "w/c80")
    findings = [failed("p95_itl_ms", "", "overall")]
    sentence = where_it_went(moved_between(counters, findings), findings, counters)  # of the cell that changed most
    assert "+5 ms" in sentence and "w/c80" in sentence and "100 % in execute" in sentence


def test_a_tail_that_the_means_do_not_show_and_a_server_that_tells_nothing_are_said():
    findings = [failed("p95_itl_ms")]
    for told, words in ((load(), "tail"), ({}, "not known"), ({"polls": 3, "pages_owned_after": None}, "not known")):
        counters = pairs([told] * 4, [told] * 4)
        assert moved_between(counters, findings) == () and words in where_it_went((), findings, counters)


def test_another_engine_tells_part():
    """vLLM: latencies, queue and prefill, no step phases."""
    keep = ("time_to_first_token", "request_queue_time", "request_prefill_time", "num_preemptions", "generation_tokens")
    base, candidate = ({k: v for k, v in one.items() if k.startswith(keep)} for one in (load(), load(prefill=90.0)))
    moved = moved_between(pairs([base] * 4, [candidate] * 4), [failed("p95_ttft_ms")])
    assert [m.name for m in moved] == ["request_prefill_time", "time_to_first_token"]


def test_one_pair_is_too_few_and_a_load_that_tells_nothing_is_left_out():
    slow = load(PHASES_MS | {"execute": 12.0})
    assert moved_between(pairs([load()], [slow])) == ()
    found = by_name(moved_between(pairs([load(), {}, load(), load()], [slow] * 4)))
    assert found["step_time_seconds_total_execute"].change == pytest.approx(0.2)
    assert moved_between(pairs([load(), {}], [{}, slow])) == ()
