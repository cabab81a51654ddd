"""The load section: what is accepted, and that every refusal is a sentence with the value and the way out."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from pydantic import ValidationError

from kvbench.workload.design import LoadPoint
from kvbench.workload.load_section import LoadConfig, explain

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
    assert load.points() == [LoadPoint("c3", "closed", 3, None, 18), LoadPoint("c24", "closed", 24, None, 60)]
    assert load.count_for(24) == 60
    one = LoadConfig.model_validate(changed("num_requests", 48))
    assert [p.num_requests for p in one.points()] == [48, 48]


def test_open_loop_points() -> None:
    data = changed("mode", "open") | {"request_rate": [2, 4.5], "num_requests": 50}
    del data["concurrency"]
    assert LoadConfig.model_validate(data).points() == [
        LoadPoint("r2", "open", None, 2.0, 50),
        LoadPoint("r4.5", "open", None, 4.5, 50),
    ]
    trace = {"mode": "open", "arrivals": "trace", "prompts": TRACE}
    assert LoadConfig.model_validate(trace).points() == [LoadPoint("trace", "open", None, None, None, "trace")]


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
        ("max_concurrency", 4, "max_concurrency 4 has no meaning in mode closed"),
        ("duration_s", 9, "no meaning in mode closed"),
        ("steps", [{"rate": 1, "seconds": 2}], "steps ... has no meaning in mode closed"),
        ("arrivals", "ramp", "arrivals: ramp has no meaning in mode closed"),
        ("sessions", {"turns": 2}, "num_requests [18, 60] contradicts sessions"),
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


OPEN: dict[str, Any] = {"mode": "open", "num_requests": 50, "prompts": BASE["prompts"]}
RAMP = {"arrivals": "ramp", "ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 8}
STEPS = {"arrivals": "step", "num_requests": None, "steps": [{"rate": 2, "seconds": 5}, {"rate": 0, "seconds": 1.5}]}
CHAT = {"turns": [2, 6], "think_s": [0.5, 2], "num_sessions": 7}


def test_open_loop_without_one_rate_is_one_point() -> None:
    assert LoadConfig.model_validate(OPEN | RAMP).points() == [LoadPoint("ramp", "open", None, None, 50, "ramp")]
    assert LoadConfig.model_validate(OPEN | STEPS).points() == [LoadPoint("step", "open", None, None, None, "step")]
    swept = {"request_rate": [1, "inf"], "num_requests": None, "sessions": CHAT | {"num_sessions": [3, 9]}}
    load = LoadConfig.model_validate(OPEN | swept | {"arrivals": "gamma", "burstiness": 0.5, "max_concurrency": 8})
    assert [p.request_rate for p in load.points()] == [1.0, math.inf]
    assert [p.num_requests for p in load.points()] == [None, None]
    assert (load.count_for(1.0), load.count_for(math.inf)) == (3, 9)
    assert LoadConfig.model_validate(json.loads(json.dumps(load.model_dump(mode="json"), allow_nan=False))) == load


def test_closed_loop_of_sessions() -> None:
    data = changed("num_requests", None) | {"sessions": CHAT | {"num_sessions": 30, "think_s": {"exponential": 2}}}
    load = LoadConfig.model_validate(data)
    assert load.count_for(24) == 30
    assert load.sessions is not None
    assert (load.sessions.turns.low, load.sessions.turns.high) == (2, 6)
    assert LoadConfig.model_validate(load.model_dump(mode="json")) == load
    data["sessions"]["num_sessions"] = 20
    assert "sessions.num_sessions 20 never reaches concurrency 24" in sentences(data)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"request_rate": 2, "burstiness": 0.5},
            "burstiness 0.5 has no meaning with arrivals: poisson; set arrivals: g",
        ),
        ({"request_rate": 2, "arrivals": "gamma"}, "gamma needs burstiness"),
        ({"request_rate": 2, "arrivals": "gamma", "burstiness": 0}, "greater than 0"),
        ({"request_rate": math.inf}, "write the word inf"),
        (
            {"request_rate": "inf", "num_requests": None, "duration_s": 5},
            "duration_s has no meaning; give",
        ),
        ({"request_rate": 2, "duration_s": 5}, "num_requests [50] contradicts duration_s"),
        ({"request_rate": 2, "num_requests": None}, "num_requests is missing"),
        ({"request_rate": 2, "max_concurrency": 0}, "greater than or equal to 1"),
        ({"request_rate": 2, "concurrency": 3}, "a cap on the requests in flight is max_concurrency"),
        ({"request_rate": 2, "ramp_up_s": 3}, "ramp_up_s has no meaning with arrivals: poisson"),
        ({"request_rate": 2, "spread_ticks": True}, "set arrivals: trace"),
        (RAMP | {"request_rate": 2}, "request_rate [2.0] contradicts arrivals: ramp"),
        (RAMP | {"ramp_up_end_rps": None}, "ramp needs ramp_up_end_rps; vllm bench serve has it as --ramp-up-end-rps"),
        (RAMP | {"ramp_up_strategy": "exponential", "ramp_up_start_rps": 0}, "cannot start at ramp_up_start_rps 0"),
        (RAMP | {"num_requests": None, "duration_s": 5, "ramp_up_s": 9}, "the ramp would never end"),
        (STEPS | {"steps": None}, "step needs steps"),
        (STEPS | {"steps": [{"rate": 0, "seconds": 3}]}, "nothing arrives"),
        (STEPS | {"steps": [{"rate": 3, "second": 3}]}, "did you mean `seconds`?"),
        (STEPS | {"num_requests": 9}, "contradicts the seconds of the steps"),
        (STEPS | {"duration_s": 9}, "use the seconds of its steps"),
        ({"request_rate": 2, "sessions": CHAT}, "num_requests [50] contradicts sessions"),
        ({"request_rate": 2, "num_requests": None, "sessions": {"turns": 2}}, "sessions.num_sessions is missing"),
        ({"request_rate": 2, "num_requests": None, "sessions": CHAT | {"turns": 0}}, "must lie within 1 and 1000"),
        ({"request_rate": 2, "num_requests": None, "sessions": CHAT | {"turns": [4, 2]}}, "low before high"),
        ({"request_rate": 2, "num_requests": None, "sessions": CHAT | {"think_s": -1}}, "-1 is no think time"),
        ({"request_rate": 2, "num_requests": None, "sessions": CHAT | {"think_s": {"mean": 1}}}, "{exponential: mean}"),
        ({"request_rate": 2, "num_requests": None, "sessions": CHAT | {"history": "real"}}, "'real' is not allowed"),
        ({"request_rate": 2, "num_requests": None, "sessions": CHAT, "prompts": TRACE}, "of kind synthetic, not trace"),
    ],
)
def test_open_loop_refusals_are_sentences(given: dict[str, Any], words: str) -> None:
    said = sentences(OPEN | given)
    assert words in said
    assert said.rstrip().endswith((".", "?"))
