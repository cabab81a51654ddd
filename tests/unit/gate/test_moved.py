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


SLOW = PHASES_MS | {"execute": 12.0}


@pytest.mark.parametrize(
    ("metric", "candidate", "shares", "words"),
    [
        ("p95_ttft_ms", {"queue": 130.0, "prefill": 60.0}, {"request_queue_time": 0.75, "request_prefill_time": 0.25},
         ("+40 ms", "75 % in queue", "25 % in prefill")),
        ("output_throughput", {"phases": SLOW, "prefill": 60.0}, {},
         ("100 % in execute", "100 % in prefill")),  # explained by both latencies
        ("p95_itl_ms", {"phases": SLOW | {"schedule": 0.24}},
         {"step_time_seconds_total_execute": 2 / 2.04, "step_time_seconds_total_schedule": 0.04 / 2.04},
         ("+2.04 ms", "98 % in execute")),
        ("p95_itl_ms", {"phases": PHASES_MS | {"prepare": 2.8}, "rest": {"swap_seconds_total": STEPS * 1.9 / 1000}},
         {"swap_seconds_total": 0.95}, ("swap",)),  # a part of prepare
        ("p95_itl_ms", {"outside": 3.3}, {}, ("+3 ms",)),  # spent in no step: the server does not show it
    ],
)  # fmt: skip
def test_where_the_time_went(metric, candidate, shares, words):
    counters, findings = pairs([load()] * 8, [load(**candidate)] * 8), [failed(metric)]
    moved = moved_between(counters, findings)
    assert {name: by_name(moved)[name].share for name in shares} == pytest.approx(shares)
    sentence = where_it_went(moved, findings, counters)
    assert all(each in sentence for each in words)


def test_what_moved_is_listed_with_its_sizes_causes_first_and_what_base_never_does_before_them():
    rest = {"num_preemptions_total": 5.0}
    counters = pairs([load()] * 8, [load(SLOW, rest=rest)] * 8)
    moved = moved_between(counters, [failed("p95_itl_ms")])
    assert [m.name for m in moved] == [
        "num_preemptions_total", "step_time_seconds_total_execute", "inter_token_latency", "request_decode_time",
        "e2e_request_latency",
    ]  # fmt: skip
    never, execute, itl, *_ = moved
    assert (never.base, never.candidate, never.change) == (0.0, pytest.approx(1.25), None)  # per 1,000 output tokens
    assert never.interval is None and "preemptions (1.25" in where_it_went(moved, [], counters)
    assert (execute.base, execute.candidate, execute.unit) == (pytest.approx(10.0), pytest.approx(12.0), "ms")
    assert execute.change == pytest.approx(0.2) and itl.share is None
    (gone,) = moved_between(pairs([load(rest=rest)] * 8, [load()] * 8))
    assert (gone.name, gone.change, gone.interval) == ("num_preemptions_total", -1, (-1, -1))


def test_what_is_below_the_floor_is_listed_only_if_it_is_the_same_in_every_pair():
    counters = pairs([load()] * 4, [load(rest={"steps_total": STEPS + 1})] * 4)
    assert by_name(moved_between(counters))["steps_total"].change == pytest.approx(1 / STEPS)
    some = [load(rest={"num_preemptions_total": 1.0 if pair == 3 else 0.0}) for pair in range(8)]
    assert moved_between(pairs([load()] * 8, some)) == ()
    counters = pairs([load()] * 8, [load(PHASES_MS | {"execute": 10.05})] * 8)  # 0.5 %
    assert moved_between(counters) == ()


def test_noise_is_rarely_listed_and_a_slowdown_in_it_found():
    """Without a difference each figure is listed in at most one of twenty comparisons; 100 of them, one seed."""
    rng = np.random.default_rng(20)
    runs = 100
    listed = [
        by_name(moved_between(pairs([noisy(rng, 0.03) for _ in range(8)], [noisy(rng, 0.03) for _ in range(8)])))
        for _ in range(runs)
    ]
    assert sum("step_time_seconds_total_execute" in one for one in listed) <= stats.binom.ppf(0.999, runs, 0.05)
    assert not any("num_preemptions_total" in one for one in listed)
    base, candidate = [noisy(rng) for _ in range(12)], [noisy(rng, slower=1.3, phases=SLOW) for _ in range(12)]
    found = by_name(moved_between(pairs(base, candidate), [failed("p95_itl_ms")]))
    assert found["step_time_seconds_total_execute"].share == pytest.approx(1.0, abs=0.1)
    name = "request_queue_time_seconds_sum"
    ratios = [np.log(c[name] / b[name]) for b, c in zip(base, candidate, strict=True)]
    ends = stats.t.interval(0.95, 11, np.mean(ratios), stats.sem(ratios))  # Student's, on the log ratios
    assert found["request_queue_time"].interval == pytest.approx(tuple(np.expm1(ends)))


def test_only_the_cells_that_failed_are_listed_and_all_where_the_whole_did():
    slow = [load(SLOW)] * 4
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
    keep = ("time_to_first_token", "request_queue_time", "request_prefill_time", "num_preemptions", "generation_tokens")
    base, candidate = ({k: v for k, v in one.items() if k.startswith(keep)} for one in (load(), load(prefill=90.0)))
    moved = moved_between(pairs([base] * 4, [candidate] * 4), [failed("p95_ttft_ms")])
    assert [m.name for m in moved] == ["request_prefill_time", "time_to_first_token"]  # vLLM has no phases of steps
    slow = load(SLOW)
    found = by_name(moved_between(pairs([load(), {}, load(), load()], [slow] * 4)))
    assert found["step_time_seconds_total_execute"].change == pytest.approx(0.2)
    for base, candidate in (([load()], [slow]), ([load(), {}], [{}, slow])):
        assert moved_between(pairs(base, candidate)) == ()  # one pair is too few
