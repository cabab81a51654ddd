"""Canaries as a server takes them: of its own model, in text where it takes no ids, forked where it forks."""

from __future__ import annotations

import pytest

from kvbench.common.errors import UsageError
from kvbench.measure.server import MeasuredServer, as_taken, canaries_for
from kvbench.requests.canaries import CanarySet, as_request, write_canaries
from kvbench.requests.request import RequestList, RequestSpec
from kvbench.runs.server_info import ServerInfo
from kvbench.targets.base import ModelFacts, Target
from kvbench.targets.presets import BUILT_IN, GENERIC, PRESETS
from kvbench.workload.load_section import LoadConfig
from tests.support.canaries import canary

SET = CanarySet("tiny", ("f00d", "cafe"), (canary("a", (5, 6, 70), (8, 9)), canary("b", (5, 6), (7,))))
PROMPTS = {"kind": "synthetic", "classes": [{"name": "a", "prompt_tokens": 4, "output_tokens": 4}]}


def target(preset=BUILT_IN, vocab_size=100, max_model_len=64, **info) -> Target:
    made = Target("http://127.0.0.1:9", preset=preset, text_of_ids=lambda ids: "words for ids")
    made.model = ModelFacts("served", vocab_size, max_model_len)
    made.server_info = lambda: ServerInfo.read(info)
    return made


@pytest.fixture
def load(tmp_path):
    write_canaries(tmp_path / "c.jsonl", SET)
    section = {"concurrency": [1], "num_requests": 4, "prompts": PROMPTS}
    return LoadConfig.model_validate(section | {"canaries": {"share": 0.5, "file": str(tmp_path / "c.jsonl")}})


@pytest.mark.parametrize("told", [{}, {"model": {}}, {"model": {"weights_fingerprint": "cafe"}}])
def test_the_right_weights_and_a_server_that_does_not_tell_are_believed(load, told):
    assert canaries_for(load, target(**told)) == SET
    assert canaries_for(load.model_copy(update={"canaries": None}), target(**told)) is None


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({"model": {"weights_fingerprint": "beef"}}, "the weights beef"),
        ({"vocab_size": 70}, "the token id 70"),
        ({"max_model_len": 2}, "no canary of tiny fits"),
    ],
)
def test_another_model_is_refused(load, server, words):
    with pytest.raises(UsageError, match=words):
        canaries_for(load, target(**server))


def test_without_a_file_the_set_is_that_of_the_model_the_server_names(load):
    own = load.model_copy(update={"canaries": load.canaries.model_copy(update={"file": None})})
    with pytest.raises(UsageError, match="'named'"):
        canaries_for(own, target(model={"name": "some/named"}))
    with pytest.raises(UsageError, match="'served'"):
        canaries_for(own, target())


def taken(server: Target) -> list[RequestSpec]:
    drawn = [RequestSpec(0, "a", (1, 2), None, 4), as_request(SET.canaries[0], 1, answers=2)]
    return server.as_sent(as_taken(RequestList(drawn), SET, server))


@pytest.mark.parametrize(
    ("server", "answers"),
    [
        (target(), 2),
        (target(engine={"max_num_seqs": 2}), 2),
        (target(engine={"max_num_seqs": 1}), 1),
        (target(GENERIC), 1),
        (target(PRESETS["vllm"]), 1),  # it refuses n > 1 at temperature 0
    ],
)
def test_only_a_server_that_forks_greedy_answers_is_asked_for_several(server, answers):
    other, mine = taken(server)
    assert (other.n, mine.n) == (1, answers) and other.prompt is mine.prompt is None
    of_texts = taken(target(PRESETS["transformers"]))  # which gets the canary's own, and words for the others' ids
    assert [r.prompt for r in of_texts] == ["words for ids", "5 6 70"]


@pytest.mark.parametrize(
    ("settings", "info", "strict"),
    [
        ({}, None, True),
        ({"target": "http://x"}, {"engine": {}}, True),
        ({"kv_cache_dtype": "auto"}, {"engine": {"kv_cache_dtype": "auto"}}, True),
        ({"kv_cache_dtype": "fp8_e4m3"}, None, False),
        ({"target": "http://x"}, {"engine": {"kv_cache_dtype": "int8_per_token_head"}}, False),
    ],
)
def test_one_wrong_answer_fails_a_load_unless_its_kv_is_quantised(settings, info, strict):
    assert (
        MeasuredServer(None, 0, target(), settings, ServerInfo.read(info or {}), None, print).fails_by_one_canary()
        == strict
    )
