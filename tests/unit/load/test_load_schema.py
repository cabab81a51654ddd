"""The load section: what is accepted, and that every refusal is a sentence with the value and the way out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from pydantic import ValidationError

from kvbench.load.schema import LoadConfig, LoadPoint, explain

BASE: dict[str, Any] = {
    "mode": "closed",
    "concurrency": [3, 24],
    "num_requests": [18, 60],
    "prompts": {
        "kind": "synthetic",
        "classes": [{"name": "a", "share": 1.0, "prompt_tokens": [16, 64], "output_tokens": 32}],
    },
    "slo": {"ttft_ms": 1000},
}
TRACE = {"kind": "trace", "path": "t.csv"}


def changed(path: str, value: Any) -> dict[str, Any]:
    """BASE with one entry replaced; ``path`` is dotted, numbers index lists."""
    data = copy.deepcopy(BASE)
    *steps, last = (int(s) if s.isdigit() else s for s in path.split("."))
    target: Any = data
    for step in steps:
        target = target[step]
    target[last] = value
    return data


def sentences(data: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        LoadConfig.model_validate(data)
    return " ".join(explain(caught.value))


def test_points_pair_loads_with_their_request_counts() -> None:
    load = LoadConfig.model_validate(BASE)
    assert load.points() == [LoadPoint("closed", 3, None, 18), LoadPoint("closed", 24, None, 60)]
    assert load.num_requests_for(24) == 60
    one = LoadConfig.model_validate(changed("num_requests", 48))
    assert [p.num_requests for p in one.points()] == [48, 48]


def test_open_loop_points() -> None:
    data = changed("mode", "open") | {"request_rate": [2, 4.5], "num_requests": 50}
    del data["concurrency"]
    assert LoadConfig.model_validate(data).points() == [
        LoadPoint("open", None, 2.0, 50),
        LoadPoint("open", None, 4.5, 50),
    ]
    trace = {"mode": "open", "arrivals": "trace", "prompts": TRACE}
    assert LoadConfig.model_validate(trace).points() == [LoadPoint("open", None, None, None)]


def test_dump_and_load_again_is_the_same() -> None:
    load = LoadConfig.model_validate(
        changed("prompts.classes.0.output_tokens", {"percentiles": {"p50": 20, "p99": 80, "max": 100}})
    )
    assert LoadConfig.model_validate(load.model_dump(mode="json")) == load


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("concurency", 3, "did you mean `concurrency`?"),
        ("prompts.clases", [], "did you mean `classes`?"),
        ("concurrency", ["3"], "'3' is not a whole number"),
        ("concurrency", [True], "True is not a whole number"),
        ("concurrency", [0], "the least is 1 user"),
        ("concurrency", [3, 3], "lists a value twice"),
        ("num_requests", 1.5, "1.5 is not a whole number"),
        ("num_requests", [1, 2, 3], "3 values for 2 loads"),
        ("num_requests", [18, 20], "never reaches concurrency 24"),
        ("request_rate", 4, "no meaning in mode closed"),
        ("mode", "open", "no meaning in mode open"),
        ("mode", "both", "'both'"),
        ("temperature", "hot", "'hot' is not a number"),
        ("timeout_s", 0, "greater than 0"),
        ("prompts.kind", "magic", "'synthetic', 'text', 'trace'"),
        ("prompts", {"classes": []}, "the key 'kind' is missing"),
        ("prompts", TRACE | {"length_scale": 0}, "above 0"),
        ("prompts.classes", [], "at least 1 item"),
        ("prompts.classes.0.share", 0.4, "add up to 0.4"),
        ("prompts.classes.0.priority", -1, "priority cannot be -1; write 0"),
        ("prompts.classes.0.priority", 0.5, "0.5 is not a whole number"),
        ("prompts.classes.0.prompt_tokens", [64, 16], "runs backwards"),
        ("prompts.classes.0.prompt_tokens", 0, "the least is 1"),
        ("prompts.classes.0.prompt_tokens", [1, 2, 3], "two whole numbers"),
        ("prompts.classes.0.prompt_tokens", "many", "'many' is not a length"),
        ("prompts.classes.0.output_tokens", {"percentiles": {"p50": 9, "max": 3}}, "must not fall"),
        ("prompts.classes.0.output_tokens", {"percentiles": {"p50": 9}}, "at least p50 and max"),
        ("prompts.shared_prefix", {"tokens": 8, "share": 1.5}, "less than or equal to 1"),
        ("arrivals", "trace", "set mode: open"),
        ("slo", {}, "slo is empty"),
        ("slo", {"ttft": 3}, "did you mean `ttft_ms`?"),
    ],
)
def test_refusals_are_sentences(path: str, value: Any, words: str) -> None:
    said = sentences(changed(path, value))
    assert words in said
    assert said.rstrip().endswith((".", "?"))


def test_open_loop_needs_a_rate_or_a_trace() -> None:
    data = changed("mode", "open")
    del data["concurrency"]
    assert "needs request_rate" in sentences(data)
    assert "needs prompts of kind trace" in sentences(data | {"arrivals": "trace"})
    contradiction = {"mode": "open", "arrivals": "trace", "request_rate": 3, "prompts": TRACE}
    assert "use prompts.rate_scale" in sentences(contradiction)


def test_number_of_requests_is_needed_unless_a_trace_gives_it() -> None:
    data = copy.deepcopy(BASE)
    del data["num_requests"]
    assert "num_requests is missing" in sentences(data)
