"""The load section: what is accepted, and that every refusal names the key, the value and the way out."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from pydantic import ValidationError

from kvbench.common.schema import explain
from kvbench.workload.design import LoadPoint
from kvbench.workload.load_section import LoadConfig

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
A_CLASS = BASE["prompts"]["classes"][0]
TRACE = {"kind": "trace", "path": "t.csv"}
OPEN: dict[str, Any] = {"mode": "open", "num_requests": 50, "prompts": BASE["prompts"]}
RAMP = {"arrivals": "ramp", "ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 8}
STEPS = {"arrivals": "step", "num_requests": None, "steps": [{"rate": 2, "seconds": 5}, {"rate": 0, "seconds": 1.5}]}
CHAT = {"turns": [2, 6], "think_s": [0.5, 2], "num_sessions": 7}
TALKS = {"request_rate": 2, "num_requests": None, "sessions": CHAT}


def changed(path: str, value: Any) -> dict[str, Any]:
    """BASE with one entry replaced (``...``: removed); ``path`` is dotted, numbers index lists."""
    data = copy.deepcopy(BASE)
    *steps, last = (int(s) if s.isdigit() else s for s in path.split("."))
    target: Any = data
    for step in steps:
        target = target[step]
    target[last] = value
    if value is ...:
        del target[last]
    return data


def refusal(data: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        LoadConfig.model_validate(data)
    said = " ".join(explain(caught.value))
    assert said.startswith("load")
    return said


@pytest.mark.parametrize(
    ("data", "points"),
    [
        (BASE, [LoadPoint("c3", "closed", 3, None, 18), LoadPoint("c24", "closed", 24, None, 60)]),
        (changed("num_requests", 48), [LoadPoint(f"c{n}", "closed", n, None, 48) for n in (3, 24)]),
        (OPEN | {"request_rate": [2, 4.5]}, [LoadPoint(f"r{r:g}", "open", None, r, 50) for r in (2.0, 4.5)]),
        (
            {"mode": "open", "arrivals": "trace", "prompts": TRACE},
            [LoadPoint("trace", "open", None, None, None, "trace")],
        ),
        (OPEN | RAMP, [LoadPoint("ramp", "open", None, None, 50, "ramp")]),
        (OPEN | STEPS, [LoadPoint("step", "open", None, None, None, "step")]),
    ],
)
def test_a_load_point_for_each_swept_value(data: dict[str, Any], points: list[LoadPoint]) -> None:
    load = LoadConfig.model_validate(data)
    assert load.points() == points
    assert load.count_for(points[-1].concurrency or points[-1].request_rate) == points[-1].num_requests


def test_sessions_are_counted_instead_of_requests_and_a_dump_loads_again() -> None:
    swept = TALKS | {"request_rate": [1, "inf"], "sessions": CHAT | {"num_sessions": [3, 9]}}
    load = LoadConfig.model_validate(OPEN | swept | {"arrivals": "gamma", "burstiness": 0.5, "max_concurrency": 8})
    assert [(p.request_rate, p.num_requests) for p in load.points()] == [(1.0, None), (math.inf, None)]
    assert (load.count_for(1.0), load.count_for(math.inf)) == (3, 9)
    chats = CHAT | {"num_sessions": 30, "think_s": {"exponential": 2}}
    closed = LoadConfig.model_validate(changed("num_requests", None) | {"sessions": chats})
    assert closed.count_for(24) == 30 and (closed.sessions.turns.low, closed.sessions.turns.high) == (2, 6)
    length = {"percentiles": {"p50": 20, "p99": 80, "max": 100}}
    lengths = LoadConfig.model_validate(changed("prompts.classes.0.output_tokens", length))
    for config in (load, closed, lengths):
        assert (
            LoadConfig.model_validate(json.loads(json.dumps(config.model_dump(mode="json"), allow_nan=False))) == config
        )


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("concurency", 3, ["`concurency`", "`concurrency`?"]),
        ("concurrency", ["3"], ["load.concurrency.0", "'3'", "whole number"]),
        ("concurrency", [0], ["load.concurrency.0", "0", "at least 1"]),
        ("concurrency", [3, 3], ["concurrency [3, 3]", "remove one"]),
        ("concurrency", ..., ["concurrency", "[3, 24]"]),
        ("num_requests", [1, 2, 3], ["num_requests", "3 values for 2 loads [3, 24]"]),
        ("num_requests", [18, 20], ["num_requests 20", "concurrency 24"]),
        ("num_requests", ..., ["num_requests is missing", "48"]),
        ("request_rate", 4, ["request_rate [4.0]", "mode: closed", "mode: open"]),
        ("mode", "open", ["concurrency [3, 24]", "mode: open", "max_concurrency"]),
        ("temperature", "hot", ["load.temperature", "'hot'", "a number"]),
        ("timeout_s", 0, ["load.timeout_s", "more than 0"]),
        ("prompts.kind", "magic", ["load.prompts", "'magic'", "'synthetic', 'text', 'trace'"]),
        ("prompts", TRACE | {"length_scale": 0}, ["load.prompts.length_scale", "0", "auto"]),
        ("prompts", TRACE | {"format": "moon"}, ["load.prompts.format", "'moon'", "mooncake"]),
        ("prompts.classes.0.share", 0.4, ["load.prompts.classes", "0.4", "add up to 1"]),
        ("prompts.classes", BASE["prompts"]["classes"] * 2, ["load.prompts.classes", "2"]),
        ("prompts.classes", [BASE["prompts"]["classes"][0] | {"share": 0.5}] * 2, ["classes", "['a', 'a']"]),
        ("prompts.classes.0.priority", -1, ["load.prompts.classes.0.priority", "-1"]),
        ("prompts.classes.0.prompt_tokens", [64, 16], ["load.prompts.classes.0.prompt_tokens", "[64, 16]"]),
        ("prompts.classes.0.prompt_tokens", 0, ["prompt_tokens: 0", "from 1 on"]),
        ("prompts.classes.0.prompt_tokens", [1, 2, 3], ["prompt_tokens: [1, 2, 3]", "[low, high]"]),
        ("prompts.classes.0.output_tokens", {"percentiles": {"p50": 9, "max": 3}}, ["output_tokens", "'max': 3"]),
        ("prompts.classes.0.output_tokens", {"percentiles": {"p50": 9, "max": 9, "p80": 9}}, ["p80", "p95"]),
        ("prompts.shared_prefix", [{"tokens": 4, "share": 0.6}] * 2, ["load.prompts.shared_prefix", "1.2"]),
        ("prompts.shared_prefix", [{"tokens": 4, "shar": 0.6}], ["load.prompts.shared_prefix.0", "`share`?"]),
        ("prompts.classes.0.n", 0, ["load.prompts.classes.0.n", "0", "at least 1"]),
        ("prompts.classes.0.n", 4, ["'a'", "4 answers", "temperature: 1.0"]),
        ("prompts.classes.0", A_CLASS | {"n": 3, "best_of": 2}, ["n 3", "best_of 2", "lower n"]),
        ("prompts.classes.0", A_CLASS | {"n": 3, "beam_width": 2}, ["n 3", "beam_width 2", "lower n"]),
        ("prompts.classes.0", A_CLASS | {"best_of": 2, "beam_width": 2}, ["beam_width 2", "remove best_of"]),
        ("arrivals", "trace", ["arrivals: trace", "mode: open"]),
        ("slo", {}, ["load.slo", "ttft_ms"]),
        ("max_concurrency", 4, ["max_concurrency 4", "mode: closed"]),
        ("steps", [{"rate": 1, "seconds": 2}], ["steps", "mode: closed"]),
        ("sessions", {"turns": 2}, ["num_requests [18, 60]", "sessions.num_sessions"]),
    ],
)
def test_refusals_of_closed_loop(path: str, value: Any, words: list[str]) -> None:
    said = refusal(changed(path, value))
    assert all(word in said for word in words), said


@pytest.mark.parametrize("answers", [{"n": 4}, {"n": 2, "best_of": 4}, {"n": 2, "beam_width": 4}, {"beam_width": 4}])
def test_a_class_may_have_several_answers_and_a_dump_loads_again(answers: dict[str, int]) -> None:
    classes = [A_CLASS | answers]
    load = LoadConfig.model_validate(changed("prompts.classes", classes) | {"temperature": 1.0})
    assert LoadConfig.model_validate(json.loads(json.dumps(load.model_dump(mode="json")))) == load
    talk = changed("prompts.classes", classes) | {"temperature": 1.0, "sessions": {"turns": 2, "num_sessions": 60}}
    talk.pop("num_requests")
    if "n" in answers:
        assert "goes on from one" in refusal(talk)
    else:
        assert LoadConfig.model_validate(talk)
    if "beam_width" in answers:  # samples nothing
        assert LoadConfig.model_validate(changed("prompts.classes", classes))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["request_rate", "[4]"]),
        ({"arrivals": "trace"}, ["arrivals: trace", "synthetic"]),
        ({"arrivals": "trace", "request_rate": 3, "prompts": TRACE}, ["request_rate [3.0]", "prompts.rate_scale"]),
        ({"request_rate": 2, "burstiness": 0.5}, ["burstiness 0.5", "arrivals: poisson", "gamma"]),
        ({"request_rate": "inf", "arrivals": "gamma", "burstiness": 0.5}, ["burstiness 0.5", "request_rate inf"]),
        ({"request_rate": 2, "arrivals": "gamma"}, ["gamma needs burstiness"]),
        ({"request_rate": math.inf}, ["request_rate .inf", "the word inf"]),
        ({"request_rate": [2, 0]}, ["load.request_rate.1", "more than 0"]),
        ({"request_rate": "inf", "num_requests": None, "duration_s": 5}, ["request_rate inf", "num_requests"]),
        ({"request_rate": 2, "duration_s": 5}, ["num_requests [50]", "duration_s"]),
        ({"request_rate": 2, "num_requests": None}, ["num_requests is missing"]),
        ({"request_rate": 2, "ramp_up_s": 3}, ["ramp_up_s 3", "arrivals: poisson", "arrivals: ramp"]),
        ({"request_rate": 2, "spread_ticks": True}, ["spread_ticks True", "arrivals: trace"]),
        (RAMP | {"request_rate": 2}, ["request_rate [2.0]", "arrivals: ramp", "ramp_up_end_rps"]),
        (RAMP | {"ramp_up_end_rps": None}, ["ramp needs ramp_up_end_rps"]),
        (RAMP | {"ramp_up_strategy": "exponential", "ramp_up_start_rps": 0}, ["ramp_up_start_rps 0", "linear"]),
        (RAMP | {"num_requests": None, "duration_s": 5, "ramp_up_s": 9}, ["ramp_up_s 9", "duration_s 5"]),
        (STEPS | {"steps": None}, ["step needs steps"]),
        (STEPS | {"steps": [{"rate": 0, "seconds": 3}]}, ["steps are 0"]),
        (STEPS | {"num_requests": 9}, ["num_requests [9]", "steps"]),
        (STEPS | {"duration_s": 9}, ["duration_s 9", "arrivals: step"]),
        (TALKS | {"num_requests": 50}, ["num_requests [50]", "sessions"]),
        (TALKS | {"sessions": {"turns": 2}}, ["sessions.num_sessions is missing"]),
        (TALKS | {"sessions": CHAT | {"turns": 0}}, ["load.sessions.turns: 0", "1 to 1000"]),
        (TALKS | {"sessions": CHAT | {"think_s": -1}}, ["load.sessions.think_s: -1"]),
        (TALKS | {"sessions": CHAT | {"think_s": {"mean": 1}}}, ["load.sessions.think_s", "{exponential: mean}"]),
        (TALKS | {"prompts": TRACE}, ["synthetic", "trace"]),
        (TALKS | {"mode": "closed", "request_rate": None, "concurrency": 9}, ["num_sessions 7", "concurrency 9"]),
    ],
)
def test_refusals_of_open_loop(given: dict[str, Any], words: list[str]) -> None:
    said = refusal(OPEN | given)
    assert all(word in said for word in words), said
