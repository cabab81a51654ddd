"""What the command line of ``kvbench load`` makes of a workload, in vllm bench serve's words."""

from __future__ import annotations

import math

import pytest
import yaml

from kvbench.common.errors import UsageError
from kvbench.common.text import slo_words
from kvbench.loadtest.options import Asked, parse_goodput, parse_rate, shaped

BASE = {
    "name": "w",
    "model": {"config": "llama-32m"},
    "load": {
        "concurrency": [2, 8],
        "num_requests": [20, 80],
        "prompts": {
            "kind": "synthetic",
            "classes": [{"name": "a", "share": 1.0, "prompt_tokens": 8, "output_tokens": 4}],
        },
    },
}


@pytest.fixture
def shape(tmp_path):
    """Writes BASE with changes under ``load:`` and shapes it."""

    def make(asked, load=None, **how):
        data = {**BASE, "load": BASE["load"] | (load or {})}
        data["load"] = {k: v for k, v in data["load"].items() if v is not None}
        path = tmp_path / "w.yaml"
        path.write_text(yaml.safe_dump(data))
        return shaped(path, asked, **how)

    return make


OPEN = {"mode": "open", "concurrency": None, "request_rate": [4, 9], "num_requests": [30, 60]}


def test_nothing_asked_is_the_first_load_and_at_names_another(shape):
    assert shape(Asked())[1].load_id == "c2"
    workload, point = shape(Asked(at="c8"))
    assert (point.load_id, point.concurrency, point.num_requests) == ("c8", 8, 80)
    assert len(workload.load_points) == 2  # the file as it is
    with pytest.raises(UsageError, match=r"--at 'r4' is no load of this workload: its loads are c2, c8"):
        shape(Asked(at="r4"))


def test_a_rate_opens_the_loop_and_keeps_the_number_of_the_load_it_began_from(shape):
    workload, point = shape(Asked(at="c8", request_rate=3.5))
    assert (point.mode, point.request_rate, point.num_requests, point.concurrency) == ("open", 3.5, 80, None)
    assert workload.load.arrivals == "poisson" and workload.load.max_concurrency is None
    workload, point = shape(Asked(request_rate=3.5, max_concurrency=5, num_prompts=7, burstiness=0.5))
    assert (workload.load.max_concurrency, point.num_requests) == (5, 7)
    assert (workload.load.arrivals, workload.load.burstiness) == ("gamma", 0.5)


def test_concurrency_is_the_users_in_closed_loop_and_a_cap_in_open_loop(shape):
    workload, point = shape(Asked(max_concurrency=4))
    assert (point.mode, point.concurrency) == ("closed", 4) and workload.load.max_concurrency is None
    workload, point = shape(Asked(at="r9", max_concurrency=4), OPEN)
    assert (point.mode, point.request_rate, point.num_requests) == ("open", 9, 60)
    assert workload.load.max_concurrency == 4


def test_an_infinite_rate_sends_all_at_once(shape):
    workload, point = shape(Asked(request_rate=math.inf, max_concurrency=3))
    assert point.mode == "open" and math.isinf(point.request_rate) and workload.load.max_concurrency == 3


def test_the_number_of_a_load_of_conversations_is_theirs(shape):
    talk = {"num_requests": None, "sessions": {"num_sessions": [3, 8], "turns": 2}}
    workload, _ = shape(Asked(num_prompts=5), talk)
    assert workload.load.sessions.num_sessions == (5,)
    workload, _ = shape(Asked(at="c8", goodput=("ttft:9",)), talk)
    assert workload.load.sessions.num_sessions == (8,)


def test_a_duration_gives_way_to_a_number(shape):
    timed = {**OPEN, "num_requests": None, "duration_s": 20.0}
    assert shape(Asked(at="r4", goodput=("ttft:9",)), timed)[0].load.duration_s == 20.0
    workload, point = shape(Asked(num_prompts=11), timed)
    assert workload.load.duration_s is None and point.num_requests == 11


def test_overrides_and_seed_hold_beside_the_options(shape):
    workload, _ = shape(Asked(request_rate=2), overrides=("load.timeout_s=7",), seed=5)
    assert workload.load.timeout_s == 7 and workload.seed == 5


def test_burstiness_needs_an_open_loop(shape):
    with pytest.raises(UsageError, match="--burstiness 2 needs --request-rate"):
        shape(Asked(burstiness=2.0))


def test_goodput_is_read_as_vllm_writes_it(shape):
    assert parse_goodput(("ttft:200 tpot:50",)) == {"ttft_ms": 200, "tpot_ms": 50}
    assert parse_goodput(("ttft:200", "e2el:1.5")) == {"ttft_ms": 200, "e2el_ms": 1.5}
    slo = shape(Asked(goodput=("ttft:200", "tpot:50")))[0].load.slo
    assert slo_words(slo.model_dump()) == "ttft <= 200 ms and tpot <= 50 ms" and slo_words(None) == ""


@pytest.mark.parametrize("words", ["ttft", "ttft:", "ttft:x", "ttft:0", "ttft:inf", "speed:3", ":3"])
def test_a_goodput_that_is_none_is_refused_by_its_text(words):
    with pytest.raises(UsageError, match="is not NAME:MS"):
        parse_goodput((words,))


def test_rates_are_numbers_above_0_or_inf():
    assert parse_rate("0.5") == 0.5 and math.isinf(parse_rate("inf")) and parse_rate(None) is None
    for text in ("0", "-1", "nan", "fast", ""):
        with pytest.raises(UsageError, match="--request-rate"):
            parse_rate(text)


def test_fewer_conversations_than_users_are_refused_by_what_was_typed(shape):
    talk = {"num_requests": None, "sessions": {"num_sessions": [3, 8], "turns": 2}}
    said = "--num-prompts 5: so many conversations never keep the workload's 8 users busy at once: give --num-prompts 8"
    with pytest.raises(UsageError, match=said):
        shape(Asked(at="c8", num_prompts=5), talk)
    with pytest.raises(UsageError, match="--num-prompts 1: so many requests never keep the workload's 2 users"):
        shape(Asked(num_prompts=1))
    with pytest.raises(UsageError, match=r"^20 requests of the workload never keep --max-concurrency 30 busy"):
        shape(Asked(max_concurrency=30))
    assert shape(Asked(num_prompts=1, max_concurrency=1))[1].num_requests == 1
