"""ci/gates.yaml is read as it is written, and refused where a mistake would let something pass unseen."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.common.errors import UsageError
from kvbench.gate.limits.judge import Limit, matches
from kvbench.gate.policy import Policy, load_policy
from kvbench.gate.timing.rules import DEFAULT_RULES

SHIPPED = Path(__file__).parents[3] / "ci" / "gates.yaml"


@pytest.fixture
def read(tmp_path: Path):
    def read(text: str) -> Policy:
        path = tmp_path / "gates.yaml"
        path.write_text(text)
        return load_policy(path)

    return read


def test_the_shipped_policy_writes_out_the_default_rules():
    policy = load_policy(SHIPPED)
    assert policy.timing == DEFAULT_RULES
    assert {limit.kind for limit in policy.limits} == {"metric", "ratio", "kld"}
    assert policy.source == SHIPPED


def test_without_a_file_there_are_the_default_rules_and_no_limits():
    assert load_policy(None) == Policy(DEFAULT_RULES, (), None)


@pytest.mark.parametrize("text", ["", "timing:\nlimits:\n", "timing: {looks:}"])
def test_what_is_left_empty_is_left_out(read, text):
    policy = read(text)
    assert (policy.timing, policy.limits) == (DEFAULT_RULES, ())


def test_timing_rules_are_those_of_the_file_and_the_rest_as_usual(read):
    timing = read("""
timing:
  looks:
    - {pairs: 9, alpha: 0.4%}
    - {pairs: 18, alpha: 0.003, alpha_pass: 1%}
  metrics:
    p95_ttft_ms: {floor: 5%, margins: {overall: 0.06, class: 7.5%}}
    p95_itl_ms: off
  classes: {quiet: "paged-*-c3", mixed ones: ["mixed/*", "prefix/*-c32"]}
""").timing
    # 5 % of false passes over two looks, where a look does not say its own
    assert [(look.pairs, look.alpha, look.alpha_pass) for look in timing.looks] == [
        (9, 0.004, 0.025),
        (18, 0.003, 0.01),
    ]
    throughput, ttft = timing.metrics
    assert throughput == DEFAULT_RULES.metrics[0]
    assert ttft.floor == 0.05 and dict(ttft.margins) == {"overall": 0.06, "class": 0.075, "cell": 0.10}
    assert timing.class_of("mixed/paged-p16-c3") == "quiet"  # the first that fits
    assert timing.class_of("mixed/paged-p16-c32") == "mixed ones"
    assert timing.class_of("prefix/paged-p16-c16") == "prefix"  # no class of the file's: its workload


def test_limits_as_they_are_written(read):
    limits = read("""
limits:
  - {metric: p95_ttft_ms, max: 250, cells: "paged-*"}
  - {metric: peak_rss_bytes, max: 1.5GiB, every: true, name: memory}
  - {slo: 95%, cells: ["a/*", "*-c3"]}
  - {ratio: output_throughput, of: "paged-p16", to: ["contiguous", "other"], min: 90%, max: 3}
  - {kld: p99, max: 0.01}
""").limits
    assert limits == (
        Limit("metric", "p95_ttft_ms", None, 250.0, ("paged-*",)),
        Limit("metric", "peak_rss_bytes", None, 1.5 * 2**30, ("*",), True, name="memory"),
        Limit("metric", "goodput_share", 0.95, None, ("a/*", "*-c3")),
        Limit("ratio", "output_throughput", 0.9, 3.0, ("*",), False, ("paged-p16",), ("contiguous", "other")),
        Limit("kld", "p99", None, 0.01),
    )


REFUSED = {
    "timin: {}": "`timin` is not a known key; did you mean `timing`?",
    "timing: {look: []}": "`look` is not a known key; did you mean `looks`?",
    "timing: {looks: []}": "an empty list never looks",
    "timing: {looks: [{pairs: 7, alpha: 0.4%}]}": "alpha 0.004 cannot be reached with 7 pairs",
    "timing: {looks: [{pairs: 7, alpha: 1%, alpha_pass: 0.5%}]}": "alpha_pass 0.005 cannot be reached with 7 pairs",
    "timing: {looks: [{pairs: 12, alpha: 3%}, {pairs: 16, alpha: 2.1%}]}": "alphas of the looks add up to 0.051",
    "timing: {looks: [{pairs: 12, alpha: 1%}, {pairs: 8, alpha: 1%}]}": "in ascending order",
    "timing: {looks: [{pairs: 80, alpha: 1%}]}": "less than or equal to 20",
    "timing: {looks: [{pairs: 8}]}": "timing.looks.0.alpha is missing",
    "timing: {looks: [{pairs: 8, alpha: 4}]}": "timing.looks.0.alpha: 4 is not allowed",
    "timing: {metrics: {p95_tftt_ms: {floor: 1%}}}": "did you mean p95_ttft_ms?",
    "timing: {metrics: {p95_ttft_ms: }}": "p95_ttft_ms says nothing",
    "timing: {metrics: {p95_ttft_ms: {floor: 3%, margins: {cells: 9%}}}}": "did you mean cell?",
    "timing: {metrics: {p95_ttft_ms: {floor: 4.5%}}}": "overall margin 4.00% is below the floor 4.50%",
    "timing: {metrics: {p95_ttft_ms: off, p95_itl_ms: off, output_throughput: off}}": "leaves every metric out",
    "timing: {classes: {quiet: []}}": "timing.classes.quiet",
    "limits: {metric: failed}": "is no list",
    "limits: [{metric: failed, max: 3, max: 4}]": "stands twice",
    "limits: [{metric: p95_tftt_ms, max: 3}]": "did you mean p95_ttft_ms?",
    "limits: [{ratio: output_troughput, min: 3}]": "did you mean output_throughput?",
    "limits: [{kld: median, max: 3}]": "use one of mean, p95, p99, max, same_argmax",
    "limits: [{metric: failed, maxx: 3}]": "did you mean `max`?",
    "limits: [{metric: failed}]": "the limit of failed is missing; give max or min",
    "limits: [{metric: failed, max: many}]": "'many' is no number",
    "limits: [{metric: failed, max: .nan}]": "finite number",
    "limits: [{metric: failed, max: true}]": "is not a number",
    "limits: [{metric: failed, max: 1, min: 2}]": "min 2 is above max 1",
    "limits: [{max: 1}]": "nothing to hold",
    "limits: [{metric: failed, kld: mean, max: 1}]": "both metric and kld",
    "limits: [{slo: 95%, min: 1}]": "is the limit itself",
    "limits: [{slo: 95}]": "less than 1",
    "limits: [{metric: failed, max: 1, of: a, to: b}]": "belong to a ratio",
    "limits: [{ratio: goodput, min: 1, of: a}]": "of and to go together",
    "- a": "a policy is a mapping",
    "timing: {looks: [": "not valid YAML",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_mistake_is_refused_with_what_to_write_instead(read, text):
    with pytest.raises(UsageError) as refused:
        read(text)
    assert REFUSED[text] in str(refused.value)
    assert "gates.yaml" in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="there is no policy file"):
        load_policy(tmp_path / "none.yaml")


def test_globs_without_a_slash_are_of_the_cell():
    name = "mixed/paged-p16-c3"
    assert matches(name, ["paged-*"]) and matches(name, ["x", "mixed/*-c3"]) and matches(name, ["*"])
    assert not matches(name, ["mixed*"]) and not matches(name, ["prefix/*"]) and not matches(name, ["paged-*-c32"])
