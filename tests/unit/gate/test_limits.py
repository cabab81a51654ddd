"""Absolute limits on cells whose numbers are set by hand: each outcome, and which of the repeats decides."""

from __future__ import annotations

import dataclasses

import pytest

from kvbench.common.packages import REPOSITORY
from kvbench.gate.limits import judge_limits
from kvbench.gate.policy import GateLimit, load_policy
from kvbench.gate.verdict.markdown import summary
from kvbench.gate.verdict.verdict import FAIL, INVALID, PASS, Verdict
from kvbench.gate.verdict.wording import number, percent
from kvbench.report.comparisons import THROUGHPUT, served
from kvbench.runs.metric_names import unit_of
from kvbench.runs.quality import QualityResult
from tests.support.quality_results import KLD_OUTSIDE, figures, result
from tests.support.records import put
from tests.support.report_cells import cell, refused, run


def judge(limits: GateLimit | list[GateLimit], *cells, quality: QualityResult | None = None, doubt: str | None = None):
    limits = [limits] if isinstance(limits, GateLimit) else limits
    return judge_limits(run(*cells, workload={"name": "mixed"}), limits, quality, doubt)


def only(limit: GateLimit, *cells, **more):
    (finding,) = judge(limit, *cells, **more)
    return finding


TTFT = cell(ttft=(300.0, 500.0, 900.0))  # median 500


@pytest.mark.parametrize(
    ("limit", "outcome", "judged"),
    [
        (GateLimit("metric", "p95_ttft_ms", high=500), PASS, 500),  # a limit may be reached
        (GateLimit("metric", "p95_ttft_ms", high=499.9), FAIL, 500),
        (GateLimit("metric", "p95_ttft_ms", high=899, every=True), FAIL, 900),
        (GateLimit("metric", "p95_ttft_ms", low=301, every=True), FAIL, 300),
        (GateLimit("metric", "ttft_ms.p95", low=501), FAIL, 500),
        (GateLimit("metric", "ttft_ms.p95", low=400, high=600), PASS, 500),
        (GateLimit("metric", "p95_ttft_ms", low=310, high=890, every=True), FAIL, 300),  # both by 10: the first
    ],
)
def test_the_median_or_every_repeat(limit, outcome, judged):
    finding = only(limit, TTFT)
    assert (finding.outcome, finding.candidate, finding.suite, finding.unit) == (outcome, judged, "limit", "ms")
    assert "300 ms, 500 ms, 900 ms" in " ".join(finding.details)
    assert finding.higher_is_better == (None if limit.low and limit.high else limit.high is None)
    bounds = {name: bound for name, bound in (("min", limit.low), ("max", limit.high)) if bound is not None}
    assert finding.figures == bounds and all(number(bound) in finding.sentence for bound in bounds.values())


def test_globs_choose_cells_and_ids_are_of_cell_and_metric():
    cells = (cell(load=3), cell(load=24), cell("contiguous", load=24))
    found = judge(GateLimit("metric", "p95_ttft_ms", high=500, cells=("paged*-24",)), *cells)
    assert [f.id for f in found] == ["limit/mixed/paged (page 16)-24/p95_ttft_ms"]
    found = judge([GateLimit("metric", "p95_ttft_ms", high=h, cells=("mixed/contig*",)) for h in (500, 400)], *cells)
    ids = [f.id.removeprefix("limit/mixed/contiguous-24/") for f in found]
    assert ids == ["p95_ttft_ms", "p95_ttft_ms (2)"] and [f.outcome for f in found] == [PASS, FAIL]
    named = only(GateLimit("metric", "p95_ttft_ms", high=1, name="what users feel"), TTFT)
    assert named.id.endswith("/what users feel")


REFUSED = dataclasses.replace(
    cell(failed=32), valid=False, refused=('repeat 1: served 16 of 48 requests; 32 of 48: "full"',)
)
LATE = cell(ttft=(9.0, 9.0, 9.0), reasons=tuple(f"repeat {n}: late" for n in range(1, 6)))


@pytest.mark.parametrize(
    ("limit", "of", "said"),
    [
        (GateLimit("metric", "p95_ttft_ms", high=500, cells=("pagde-*",)), TTFT, "pagde-*"),
        (GateLimit("metric", "server.copied_pages_totl", high=0), cell(server={"copied_pages_total": 0}), "total?"),
        (GateLimit("metric", "server.copied", high=0), cell(), "remove the limit"),
        (GateLimit("metric", "goodput_share", low=0.5), TTFT, "load.slo"),
        (GateLimit("metric", "p95_ttft_ms", high=500), cell(ttft=(300.0, float("nan"), 300.0)), "in 1 of 3 repeats"),
        (GateLimit("metric", "p95_ttft_ms", high=1000), LATE, "repeat 3: late and 2 more"),
        (GateLimit("metric", "p95_ttft_ms", high=1), LATE, "repeat 3: late and 2 more"),
        (GateLimit("metric", "p95_ttft_ms", high=1e6), REFUSED, '32 of 48: "full"'),
        (GateLimit("metric", "p95_reasoning_ms", high=9), cell(), "not measured"),
    ],
)
def test_what_nobody_measured_is_no_pass(limit, of, said):
    finding = only(limit, of)
    assert finding.outcome == INVALID and said in finding.sentence


FAILED = cell(failed=3, reasons=("3 of 48 requests failed",))  # 0.0625 of them
LEAKY = cell(server={"pages_owned_after": 1}, reasons=("1 page is still owned",))


@pytest.mark.parametrize(
    ("of", "limit", "outcome"),
    [
        (FAILED, GateLimit("metric", "failure_rate", high=0.05), FAIL),
        (FAILED, GateLimit("metric", "failure_rate", high=0.0625), INVALID),
        (cell(failed=3), GateLimit("metric", "failure_rate", high=0.0625), PASS),
        (REFUSED, GateLimit("metric", "failure_rate", high=0.05), FAIL),
        (REFUSED, GateLimit("metric", "failure_rate", high=0.7), PASS),  # it was measured
        (REFUSED, GateLimit("metric", "p95_ttft_ms", high=1e6), INVALID),  # of a server that did less work
        (LEAKY, GateLimit("metric", "pages_owned_after", high=0), FAIL),
        (LEAKY, GateLimit("metric", "pages_owned_after", high=1), INVALID),
        (LEAKY, GateLimit("metric", "num_preemptions", high=-1), INVALID),
    ],
)
def test_what_makes_a_cell_invalid_breaks_its_own_limit_all_the_same(of, limit, outcome):
    assert only(limit, of).outcome == outcome


def test_a_limit_on_failures_says_what_the_server_said_of_them():
    finding = only(GateLimit("metric", "failure_rate", high=0.05), refused(20, "<b>full</b> | `x`"))
    assert finding.outcome == FAIL and '28 of 48: "<b>full</b> | `x`"' in finding.sentence
    assert "of 48" not in only(GateLimit("metric", "failure_rate", high=0.05), cell(failed=3)).sentence


def test_every_kind_of_figure_is_found_with_its_unit():
    there = cell(
        preemptions=5, failed=8, capacity={"num_pages": 12},
        server={
            "kv_waste_slots_mean": 30.0, "kv_slots_reserved_mean": 120.0, "process_resident_bytes_peak": 2.0**30,
            "prefix_cache_hits_total": 60, "prefix_cache_queries_total": 80, "kv_cache_usage_perc_peak": 0.9,
        },
    )  # fmt: skip
    for repeat in there.repeats:
        put(repeat.metrics, goodput=2.0, duration_s=18.0, completed=40, failed=8, without_output=2)
        put(repeat.metrics, steady_non_reasoning_output_throughput=12.0)
        put(repeat.metrics.steady_latency, ttfo_ms={"p95": 900.0}, reasoning_ms={"p95": 700.0})
        put(repeat.metrics.steady_latency.ttft_ms, uncertain=["p95"])
    known = {
        "kv_waste_share": (0.25, "share"), "peak_rss_bytes": (2**30, "bytes"), "num_preemptions": (5, ""),
        "prefix_cache_hit_rate": (0.75, "share"), "kv_cache_usage_perc": (0.9, "share"),
        "server.recomputed_tokens_total": (500, ""), "capacity.num_pages": (12, ""), "failure_rate": (1 / 6, "share"),
        "pooled.ttft_ms.p95": (500, "ms"), "goodput_share": (0.75, "share"),  # 36 of 48, those that failed among them
        "goodput": (2.0, "requests/s"), "p95_ttfo_ms": (900.0, "ms"), "p95_reasoning_ms": (700.0, "ms"),
        "without_output": (2, ""), "steady_non_reasoning_output_throughput": (12.0, "tokens/s"),
    }  # fmt: skip
    for name, (value, unit) in known.items():
        held = only(GateLimit("metric", name, low=value, high=value), there)
        assert (held.outcome, unit_of(name)) == (PASS, unit), name
        assert only(GateLimit("metric", name, high=value * 0.99), there).outcome == FAIL
    few, enough = (only(GateLimit("metric", name, high=500), there) for name in ("p95_ttft_ms", "p95_itl_ms"))
    assert len(few.details) == len(enough.details) + 1  # a percentile of few samples says so


PAGED, CONTIGUOUS = cell(throughput=(90.0, 200.0, 330.0)), cell("contiguous", throughput=(100.0, 100.0, 300.0))


@pytest.mark.parametrize(
    ("low", "every", "judged", "outcome"),
    [
        (1.1, False, "1.10", PASS),  # 0.9, 2.0, 1.1: the median is 1.1, and not the 2.0 of the medians
        (1.11, False, "1.10", FAIL),
        (0.9, True, "0.900", PASS),
        (0.91, True, "0.900", FAIL),
    ],
)
def test_a_ratio_is_paired_by_repeat_and_all_repeats_are_shown(low, every, judged, outcome):
    finding = only(GateLimit("ratio", "steady_output_throughput", low=low, every=every), CONTIGUOUS, PAGED)
    assert (finding.outcome, finding.base, finding.unit) == (outcome, None, None)
    assert number(finding.candidate) == judged and judged in finding.sentence
    assert finding.change == pytest.approx(finding.candidate - 1)
    assert finding.series == pytest.approx((-0.1, 1.0, 0.1)) and finding.figures == {"min_ratio": low}
    assert "0.900, 2, 1.10" in finding.details[0]
    assert "paged (page 16) 200 tokens/s, contiguous 100 tokens/s" in finding.details[1]
    row = next(line for line in summary(Verdict("limits", FAIL, "s", (finding,))).splitlines() if "ratio of" in line)
    assert f"| {judged} | {percent(finding.change)} | &gt;= {number(low)} |" in row


def two_windows(steady, whole, ttft, whole_ttft, layout="paged", settled=8):
    """A cell with these throughputs and p95 TTFT in the steady window (of ``settled`` requests) and the whole run."""
    there = cell(layout, throughput=(1.0,) * 3, ttft=(ttft,) * 3)
    for repeat in there.repeats:
        put(repeat.metrics, steady_output_throughput=steady, output_throughput=whole, ttft_ms={"p95": whole_ttft})
        put(repeat.metrics.steady_latency.ttft_ms, n=settled)
    return there


@pytest.mark.parametrize(
    ("steady", "what", "alone", "ratio", "whole"),
    [
        (200.0, "output_tokens_per_s", 200.0, 2.0, False),
        (None, "output_tokens_per_s", 150.0, 2.5, True),  # both of the whole run: 150 to 60
        (200.0, "output_throughput", 150.0, 2.5, True),  # by vLLM's name: always
        (200.0, "steady_output_throughput", 200.0, 2.0, False),
        (200.0, "p95_ttft_ms", 200.0, 0.5, False),
        (None, "p95_ttft_ms", 600.0, 0.75, True),
        (200.0, "ttft_ms.p95", 600.0, 0.75, True),  # by its place in summary.json: always
        (200.0, "steady_p95_ttft_ms", 200.0, 0.5, False),
    ],
)
def test_a_figure_is_of_the_steady_window_and_one_of_the_whole_run_says_so(steady, what, alone, ratio, whole):
    paged = two_windows(steady, 150.0, 200.0, 600.0, settled=40 if steady else 28)
    contiguous = two_windows(100.0, 60.0, 400.0, 800.0, "contiguous", settled=40)
    single = only(GateLimit("metric", what, low=1, cells=("paged*",)), paged, contiguous)
    paired = only(GateLimit("ratio", what, low=0.1, name="what paging buys"), paged, contiguous)
    assert (single.candidate, paired.candidate) == pytest.approx((alone, ratio))
    assert single.unit == ("ms" if "ttft" in what else "tokens/s")
    for finding in (single, paired):
        assert ("whole run" in finding.sentence, "whole run" in finding.title) == (whole, whole)
        assert "whole run" not in finding.id  # the name of a test in CI does not depend on the run
    if what == "p95_ttft_ms":  # the ratio that the report shows
        assert served(paged, contiguous, what).ratio == pytest.approx(ratio)


def test_the_shipped_limits_judge_the_ratio_that_the_report_shows():
    paged, contiguous = cell(throughput=(209.0,) * 3), cell("contiguous", throughput=(100.0,) * 3)
    shipped = [limit for limit in load_policy(REPOSITORY / "ci" / "gates.yaml").limits if limit.kind == "ratio"]
    limits = [dataclasses.replace(limit, cells=("*",)) for limit in shipped if not limit.of]
    found = {finding.candidate for finding in judge(limits, paged, contiguous)}
    assert len(limits) == 2 and found == {served(paged, contiguous, THROUGHPUT).ratio}


def test_a_ratio_of_named_configurations_at_each_load():
    prefix = [cell(load=load, enable_prefix_caching=True, throughput=(50.0, 50.0, 50.0)) for load in (3, 24)]
    base = [cell(load=load) for load in (3, 24)]
    limit = GateLimit("ratio", "steady_output_throughput", low=0.6, of=("*prefix*",), to=("paged (page 16)",))
    found = judge(limit, *prefix, *base)
    assert [f.outcome for f in found] == [FAIL, FAIL] and len({f.id for f in found}) == 2
    found = judge(dataclasses.replace(limit, low=0.5, cells=("*-24",)), *prefix, *base)
    assert [f.outcome for f in found] == [PASS] and "-24 over paged (page 16)" in found[0].id
    assert "*prefix*" in only(limit, *base).sentence


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (None, "do not have a paged and a contiguous cell"),
        (cell("contiguous", load=3), "do not have a paged and a contiguous cell"),
        (cell("contiguous", reasons=("late",)), "contiguous-24: the measurement of this cell is invalid (late)"),
        (cell("contiguous", throughput=(float("nan"),) * 3), "contiguous-24: not measured"),
        (cell("contiguous", throughput=(100.0,), ttft=(1.0,), tpot=(1.0,)), "not known in every repeat"),
        (cell("contiguous", throughput=(0.0, 1.0, 1.0)), "is 0"),
    ],
)
def test_a_ratio_that_cannot_be_had_is_no_pass(other, said):
    finding = only(GateLimit("ratio", "steady_output_throughput", low=0.1), PAGED, *([other] if other else []))
    assert finding.outcome == INVALID and said in finding.sentence


INT8 = cell(kv_cache_dtype="int8_per_token_head")


def quality(*outside: str, note: str = "", **known: float) -> QualityResult:
    return result({INT8.config_id: figures(0.01, 63, 0.004, 40, 2, *outside) | known}, note=note)


@pytest.mark.parametrize(
    ("limit", "outcome"),
    [
        (GateLimit("kld", "mean", high=0.01), PASS),
        (GateLimit("kld", "mean", high=0.009), FAIL),
        (GateLimit("kld", "p99", high=0.02), FAIL),
        (GateLimit("kld", "same_argmax", low=0.99), FAIL),
        (GateLimit("kld", "p95", high=1), INVALID),  # not among the figures
        (GateLimit("quality", "perplexity_change", high=0.003), FAIL),
        (GateLimit("quality", "rms_dp", high=0.09), FAIL),
        (GateLimit("quality", "greedy", low=0.84), FAIL),  # 40 of 48
        (GateLimit("quality", "passkey", low=0.98), PASS),  # 63 of 64
        (GateLimit("quality", "full_pool_wrong", high=1), FAIL),  # of 2
        (GateLimit("quality", "within"), PASS),
    ],
)
def test_the_quality_of_a_configuration(limit, outcome):
    told = quality(mean=0.01, p99=0.03, same_argmax=0.98, p95=None)
    found = judge(limit, INT8, cell(kv_cache_dtype="int8_per_token_head", load=3), quality=told)
    assert [f.outcome for f in found] == [outcome]  # of the configuration, once
    assert f"mixed/{INT8.config_id}" in found[0].id


def test_within_holds_every_configuration_to_the_limits_of_the_measurement():
    limit = GateLimit("quality", "within")
    outside = only(limit, INT8, quality=quality(KLD_OUTSIDE, "more"))
    assert (outside.outcome, outside.candidate) == (FAIL, 2) and KLD_OUTSIDE in outside.sentence
    assert [finding.outcome for finding in judge(limit, TTFT, INT8, quality=quality())] == [INVALID, PASS]
    assert only(dataclasses.replace(limit, cells=("*int8*",)), TTFT, INT8, quality=quality()).outcome == PASS
    assert only(limit, INT8, quality=quality(note="Random weights.")).outcome == INVALID


@pytest.mark.parametrize("limit", [GateLimit("kld", "mean", high=1), GateLimit("quality", "within")])
@pytest.mark.parametrize(
    ("of", "told", "said"),
    [
        (INT8, {}, "kvbench quality"),
        (TTFT, {"quality": quality(mean=0.01)}, "kvbench quality"),  # of another configuration
        (INT8, {"quality": quality(KLD_OUTSIDE, mean=0.01), "doubt": "another commit"}, "another commit"),
    ],
)
def test_a_quality_that_was_not_measured_for_this_run_is_no_pass(limit, of, told, said):
    finding = only(limit, of, **told)
    assert finding.outcome == INVALID and said in finding.sentence
