"""Loads in engine time that are computed several times: which may be, and the times of their requests."""

from __future__ import annotations

import json
import math
import random
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from kvbench.lockstep.instrument import (
    Repetition,
    SteppedInstrument,
    begin,
    compute,
    is_repeatable,
    requests_of,
    store,
    typical,
)
from kvbench.lockstep.process import EngineFailedError
from kvbench.lockstep.turns import TurnTaker
from kvbench.measure.instrument import Job
from kvbench.requests.request import RequestList
from kvbench.runs.folder import RunFolder
from kvbench.workload.design import Cell
from kvbench.workload.load_section import LoadConfig, load_point

CLASSES = [{"name": "chat", "share": 1.0, "prompt_tokens": 8, "output_tokens": 8}]
LOAD = {"mode": "closed", "concurrency": [2], "num_requests": [4], "ignore_eos": True,
        "prompts": {"kind": "synthetic", "classes": CLASSES}}  # fmt: skip
PREFILLS = [8, 0, 0, 8, 0]  # two requests, one after the other, of three tokens and of two


def repetition(*seconds: float, prefills=PREFILLS) -> Repetition:
    at = np.append(0.0, np.cumsum(seconds))
    rows = [(0.0, 0.0, list(at[1:4]), [1, 1, 1], 0, "length", [5, 6, 7]), (at[3], at[3], list(at[4:]), [1, 1], 0, "length", [5, 6])]  # fmt: skip # noqa: E501
    steps = np.column_stack([seconds, prefills, np.equal(prefills, 0), np.ones(5), np.zeros(5)])
    return Repetition(steps, [5], at[-1], rows, "")


def test_an_interruption_that_does_not_recur_is_in_the_duration_and_in_no_gap_of_its_own():
    usual = (0.05, 0.01, 0.01, 0.05, 0.01)
    first, second = typical([repetition(*usual), repetition(0.05, 0.9, 0.01, 0.05, 0.01), repetition(*usual)])
    mean = (2 * 0.13 + 1.02) / 3
    assert second[2][-1] == pytest.approx(mean)
    gaps = np.diff([0.0, *first[2], *second[2]])
    assert gaps == pytest.approx(np.array(usual) * mean / 0.13)
    assert second[0] == second[1] == pytest.approx(first[2][-1])  # sent when the first had ended
    assert first[3:] == ([1, 1, 1], 0, "length", [5, 6, 7])
    first, _ = typical([repetition(0.05, 0.01, 0.2, 0.05, 0.01)] * 3)  # what recurs at the same step stays
    assert np.diff(first[2]) == pytest.approx([0.01, 0.2])


def test_no_two_repeats_share_a_draw_and_all_requests_have_a_number_of_their_own():
    load, sizes = LoadConfig.model_validate(LOAD), {"vocab_size": 512, "max_model_len": 64, "seed": 3}
    point = load_point("closed", concurrency=2, rate=None, num_requests=4)
    first, second = (requests_of(load, point, repeat=repeat, times=2, **sizes) for repeat in (1, 2))
    assert [request.index for request in first] == list(range(8))
    prompts = [tuple(request.prompt_token_ids) for request in (*first, *second)]
    assert len(set(prompts)) == len(prompts) == 16


def drawn_of(**change):
    """A load, its point and its four requests."""
    load = LoadConfig.model_validate(LOAD | change)
    point = load_point("closed", concurrency=2, rate=None, num_requests=4)
    return load, point, requests_of(load, point, vocab_size=512, max_model_len=64, seed=3, repeat=1)


def stored(folder, *repetitions):
    """The result of a load of two requests, stored in ``folder``."""
    load, point, drawn = drawn_of()
    metrics = "vllm:num_requests_running 0\n"
    kept = [Repetition(each.steps[:, :4], each.turns, each.clock, each.rows, metrics) for each in repetitions]
    return store(folder, kept, load, point, RequestList(drawn[:2]), metrics)


def test_the_duration_is_that_of_one_repetition_and_a_request_that_did_not_end_makes_it_invalid(tmp_path):
    usual = repetition(0.05, 0.01, 0.01, 0.05, 0.01)
    assert stored(tmp_path, usual, usual).valid
    assert json.loads((tmp_path / "load.json").read_text())["duration_s"] == pytest.approx(0.13)
    usual.rows[1] = (*usual.rows[1][:5], "abort", *usual.rows[1][6:])
    result = stored(tmp_path, usual)
    assert not result.valid and result.metrics.failed == 1
    assert result.invalid_reasons == result.server_faults == ("1 of 2 requests did not end",)


def test_a_primed_engine_computes_the_shared_prefixes_before_the_load_and_keeps_them():
    for state, keeps in (("cold", False), ("steady", True)):
        seat = Mock()
        begin(seat, *drawn_of(cache_state=state), until=0.0)
        assert seat.load.call_args.kwargs["keep_cache"] is keeps
    prompts = LOAD["prompts"] | {"shared_prefix": {"tokens": 4, "share": 1.0}}
    load, point, drawn = drawn_of(prompts=prompts, cache_state="primed")
    engine = Mock(ended=True)
    begin(engine, load, point, drawn, until=math.inf)
    first, then = (call.kwargs for call in engine.load.call_args_list)
    prefix = tuple(drawn[0].prompt_token_ids[:4])
    assert [(tuple(ids), tokens) for ids, tokens, *_ in first["requests"]] == [(prefix, 1)] and not first["keep_cache"]
    assert len(then["requests"]) == 4 and then["keep_cache"]


def test_where_the_steps_differ_the_repetition_of_median_duration_counts():
    other = repetition(0.03, 0.02, 0.01, 0.05, 0.01, prefills=[4, 4, 0, 8, 0])
    fast, slow = repetition(0.02, 0.01, 0.01, 0.02, 0.01), repetition(0.5, 0.01, 0.01, 0.5, 0.01)
    assert typical([slow, other, fast]) == other.rows


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"cache_state": "primed"}, True),
        ({"cache_state": "steady"}, False),  # the second time would find its prompts in the prefix cache
        ({"ignore_eos": False, "temperature": 1.0}, False),
        ({"mode": "open", "request_rate": [3.0], "concurrency": None}, False),
    ],
)
def test_loads_whose_steps_are_the_same_each_time(change, expected):
    load = LoadConfig.model_validate({k: v for k, v in {**LOAD, **change}.items() if v is not None})
    open_loop = load.mode == "open"
    point = load_point(load.mode, concurrency=None if open_loop else 2, rate=3.0 if open_loop else None, num_requests=4)
    assert is_repeatable(load, point) == expected


class CountingEngine:
    """Stands for the process of an engine that computes a load in one step and counts its tokens."""

    def __init__(self, lost: int = 0) -> None:
        self.tokens, self.clock, self.lost = 5.0, 0.0, lost  # 5 of a warm-up

    def ask(self, do, name, **given):
        if do == "load":
            self.requests, self.clock = given["requests"], 0.0
            return {"metrics": self.metrics}
        if do == "turn":
            made = sum(tokens for _, tokens, *_ in self.requests)
            self.tokens, self.clock = self.tokens + made, 0.001
            return {"steps": [[self.clock, 0, 1, made + self.lost]], "clock": self.clock, "ended": True}
        rows = [[0.0, 0.0, [self.clock], [tokens], 0, "length", [1] * tokens] for _, tokens, *_ in self.requests]
        return {"requests": rows, "metrics": self.metrics}

    def send(self, **command):
        self.command = command

    def receive(self, limit_s):
        return self.ask(**self.command)

    @property
    def metrics(self):
        return f"vllm:num_requests_running 0\nvllm:generation_tokens_total {self.tokens}\n"


def test_the_counters_of_a_load_that_is_computed_again_are_of_all_times_and_of_nothing_before(tmp_path):
    load, point, drawn = drawn_of()
    job = Job(SimpleNamespace(load=load), RunFolder(tmp_path))
    instrument = SteppedInstrument(job, TurnTaker(CountingEngine(), "a"), lambda point, repeat: drawn)
    for repeat in (1, 2):  # the second load's are not of the first one
        instrument.begin(point, repeat)
        for _ in range(3):
            compute([instrument], point, random.Random(0), 1, math.inf)
        result = instrument.measure(Cell("a-c2", None, point), repeat)
        counters = json.loads((job.folder.load("a-c2", repeat) / "counters.json").read_text())
        assert result.clock == "engine time" and counters["generation_tokens_total"] == 3 * 4 * 8


def test_an_engine_that_loses_tokens_between_its_steps_and_its_requests_fails(tmp_path):
    load, point, drawn = drawn_of()
    job = Job(SimpleNamespace(load=load), RunFolder(tmp_path))
    instrument = SteppedInstrument(job, TurnTaker(CountingEngine(lost=1), "a"), lambda point, repeat: drawn)
    instrument.begin(point, 1)
    with pytest.raises(EngineFailedError, match="32 tokens, and its steps made 33"):
        compute([instrument], point, random.Random(0), 1, math.inf)
