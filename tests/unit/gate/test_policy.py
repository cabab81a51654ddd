"""ci/gates.yaml is read as it is written, and refused where a mistake would let something pass unseen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbench.common.errors import UsageError
from kvbench.gate.policy import GateLimit, Policy, StoredPolicy, load_policy, matches
from kvbench.gate.timing.rules import DEFAULT_RULES
from kvbench.gate.timing.served import ALPHA
from kvbench.workload.design import design_of
from kvbench.workload.file import load_workload

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
    assert (policy.timing, policy.source) == (DEFAULT_RULES, SHIPPED)
    assert DEFAULT_RULES.alpha + ALPHA == pytest.approx(0.01)
    assert sum(look.alpha_pass for look in DEFAULT_RULES.looks) == pytest.approx(0.05)
    assert {limit.kind for limit in policy.limits} == {"metric", "ratio", "quality"}
    (within,) = (limit for limit in policy.limits if limit.what == "within")  # but of fp8 and int4
    cells = design_of(load_workload(SHIPPED.parents[1] / "workloads" / "mixed.yaml", profile="cpu")).cells
    left = [cell.cell_id for cell in cells if not matches(f"mixed/{cell.cell_id}", within.cells)]
    outside = ("fp8_e4m3", "int4_per_token_head")
    assert sorted(left) == sorted(f"paged-p16-{dtype}-c{users}" for dtype in outside for users in (3, 32))


def test_what_is_left_empty_is_left_out(read, tmp_path):
    for policy in (load_policy(None), read(""), read("timing:\nlimits:\n"), read("timing: {looks:}")):
        assert (policy.timing, policy.limits) == (DEFAULT_RULES, ())
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UsageError, match=str(path)):
            load_policy(path)


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
    found = [(look.pairs, look.alpha, look.alpha_pass) for look in timing.looks]
    assert found == [(9, 0.004, 0.025), (18, 0.003, 0.01)]
    throughput, ttft = timing.metrics
    assert throughput == DEFAULT_RULES.metrics[0]
    assert ttft.floor == 0.05 and dict(ttft.margins) == {"overall": 0.06, "class": 0.075, "cell": 0.10}
    assert timing.class_of("mixed/paged-p16-c3") == "quiet"  # the first that fits
    assert timing.class_of("mixed/paged-p16-c32") == "mixed ones"
    assert timing.class_of("prefix/paged-p16-c16") == "prefix"  # no class of the file's: its workload
    name = "mixed/paged-p16-c3"  # globs without a slash are of the cell
    assert matches(name, ["paged-*"]) and matches(name, ["x", "mixed/*-c3"]) and matches(name, ["*"])
    assert not any(matches(name, [glob]) for glob in ("mixed*", "prefix/*", "paged-*-c32"))
    text = "timing: {looks: [{pairs: 10, alpha: 1%}], classes: {b: ['*b*'], a: '*'}}"
    policy = read(text)  # as it comes back from a manifest
    again = Policy.of(StoredPolicy.parse(json.loads(json.dumps(policy.stored().to_json()))))
    assert again.timing == policy.timing and list(again.timing.classes) == ["b", "a"]
    assert policy.stored().digest == policy.digest == again.digest != load_policy(None).digest
    assert read(text.replace("b: ['*b*'], a: '*'", "a: '*', b: ['*b*']")).digest != policy.digest  # the first counts


def test_limits_as_they_are_written(read):
    limits = read("""
limits:
  - {metric: p95_ttft_ms, max: 250, cells: "paged-*"}
  - {metric: peak_rss_bytes, max: 1.5GiB, every: true, name: memory}
  - {slo: 95%, cells: ["a/*", "*-c3"]}
  - {ratio: output_throughput, of: "paged-p16", to: ["contiguous", "other"], min: 90%, max: 3}
  - {kld: p99, max: 0.01}
  - {quality: passkey, min: 98%}
  - {quality: within, cells: "*-c3"}
""").limits
    assert limits == (
        GateLimit("metric", "p95_ttft_ms", None, 250.0, ("paged-*",)),
        GateLimit("metric", "peak_rss_bytes", None, 1.5 * 2**30, ("*",), True, name="memory"),
        GateLimit("metric", "goodput_share", 0.95, None, ("a/*", "*-c3")),
        GateLimit("ratio", "output_throughput", 0.9, 3.0, ("*",), False, ("paged-p16",), ("contiguous", "other")),
        GateLimit("kld", "p99", None, 0.01),
        GateLimit("quality", "passkey", 0.98, None),
        GateLimit("quality", "within", None, None, ("*-c3",)),
    )


# A file's text, and what the sentence names: the value, the key or what was probably meant.
REFUSED = {
    "timin: {}": "`timing`",
    "timing: {look: []}": "`looks`",
    "timing: {looks: []}": "at least one metric and one look",
    "timing: {looks: [{pairs: 7, alpha: 0.4%}]}": "alpha of 0.004 after 7 pairs",
    "timing: {looks: [{pairs: 7, alpha: 1%, alpha_pass: 0.5%}]}": "alpha_pass of 0.005 after 7 pairs",
    "timing: {looks: [{pairs: 12, alpha: 3%}, {pairs: 16, alpha: 2.1%}]}": "0.051",
    "timing: {looks: [{pairs: 12, alpha: 1%}, {pairs: 8, alpha: 1%}]}": "[12, 8]",
    "timing: {looks: [{pairs: 80, alpha: 1%}]}": "at most 20",
    "timing: {looks: [{pairs: 8, alpha: 4}]}": "timing.looks.0.alpha: 4",
    "timing: {metrics: {p95_tftt_ms: {floor: 1%}}}": "`p95_ttft_ms`?",
    "timing: {metrics: {p95_ttft_ms: {floor: 3%, margins: {cells: 9%}}}}": "did you mean `cell`?",
    "timing: {metrics: {p95_ttft_ms: {floor: 4.5%}}}": "margin 4.00% is below the floor 4.50%",
    "timing: {classes: {quiet: []}}": "timing.classes.quiet",
    "limits: [{metric: failed, max: 3, max: 4}]": "max",
    "limits: [{metric: p95_tftt_ms, max: 3}]": "p95_ttft_ms?",
    "limits: [{kld: median, max: 3}]": "'same_argmax'",
    "limits: [{metric: failed, maxx: 3}]": "`max`?",
    "limits: [{metric: failed}]": "give max or min",
    "limits: [{metric: failed, max: many}]": "'many'",
    "limits: [{metric: failed, max: .nan}]": "finite",
    "limits: [{metric: failed, max: 1, min: 2}]": "min 2 is above max 1",
    "limits: [{quality: passkeys, min: 1}]": "'passkey'",
    "limits: [{quality: within, max: 1}]": "remove max and min",
    "limits: [{max: 1}]": "metric, slo, ratio, kld, quality",
    "limits: [{metric: failed, kld: mean, max: 1}]": "metric and kld",
    "limits: [{slo: 95}]": "less than 1",
    "limits: [{slo: 100%}]": "`metric: goodput_share` with `min: 1`",
    "limits: [{metric: failed, max: 1, of: a, to: b}]": "of and to",
    "- a": "this file is a list",
    "timing: {looks: [": "YAML",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_mistake_is_refused_with_what_to_write_instead(read, text):
    with pytest.raises(UsageError) as refused:
        read(text)
    assert REFUSED[text] in str(refused.value)
    assert "gates.yaml" in str(refused.value) and "\n" not in str(refused.value)
