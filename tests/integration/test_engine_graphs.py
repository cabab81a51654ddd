"""Whole engines whose decode steps are replayed from static buffers, and engines that share a model.

The oracle is Hugging Face ``generate``, each prompt alone. The capture is a fake that runs the captured function again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine.sequence import Request, SamplingParams
from tests.support.fake_capture import FakeCapture
from tests.support.hf_parts import VOCAB, Run, greedy_outputs, loaded, make_engine, model_folder, one_thread, preempting

MAX_LEN, OUTPUT_TOKENS = 64, 20
_rng = random.Random(11)
PROMPTS = {str(n): tuple(_rng.randrange(2, VOCAB) for _ in range(n)) for n in (33, 16, 15, 8, 5, 3, 1)}
GREEDY = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
SIZES = {"max_model_len": MAX_LEN, "max_num_seqs": 6, "max_num_batched_tokens": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with one_thread():
        yield model_folder(str(tmp_path_factory.mktemp("models")), "gemma2")


@pytest.fixture(scope="module")
def expected(folder: str) -> dict[str, list[int]]:
    return greedy_outputs(folder, PROMPTS, OUTPUT_TOKENS)


def requests(params: SamplingParams = GREEDY) -> list[Request]:
    return [Request(name, prompt, params) for name, prompt in PROMPTS.items()]


def graphed(engine) -> FakeCapture:
    capture = FakeCapture()
    assert engine.executor.forward.capture_decodes(engine.kv.page_table.shape, MAX_LEN, capture)
    assert capture.captured == 4  # batches of 1, 2, 4 and 6
    return capture


@pytest.mark.parametrize(
    ("layout", "how", "async_scheduling"),
    [
        ({"page_size": 1}, "swap", False),
        ({"page_size": 7, "enable_prefix_caching": True}, "swap", True),
        ({"page_size": 16}, "recompute", True),
        ({"layout": "contiguous", "reservation": "oracle"}, "recompute", False),
    ],
    ids=["1", "7-cached", "16", "contiguous"],
)
def test_replayed_decodes_say_what_generate_says(folder, expected, layout, how, async_scheduling) -> None:
    settings = {**SIZES, **layout, **preempting(how, 16), "async_scheduling": async_scheduling}
    engine = make_engine(loaded(folder), folder, slots=112, **settings)
    capture = graphed(engine)
    run = Run(engine, requests())
    assert run.tokens() == expected
    assert capture.replayed > OUTPUT_TOKENS
    if layout.get("layout") != "contiguous":  # an oracle's reservation is never outgrown
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"n": 3, "top_p": 0.9}, {"best_of": 4}, {"beam_width": 3}])
def test_sampled_tokens_do_not_depend_on_graphs(folder, params) -> None:
    """Forks, candidates and beams read the logits buffer that the next replay writes over."""
    sampling = replace(GREEDY, **{"temperature": 0.8, "seed": 5, **params})
    answers = []
    for with_graphs in (False, True):
        engine = make_engine(loaded(folder), folder, slots=512, page_size=7, **SIZES)
        capture = graphed(engine) if with_graphs else FakeCapture()
        run = Run(engine, requests(sampling))
        answers.append({name: answer.tokens for name, answer in run.answers.items()})
        assert (capture.replayed > 0) == with_graphs
    assert answers[0] == answers[1]


def test_engines_that_share_a_model_step_in_turns(folder, expected) -> None:
    """Each has a KV cache of its own, and the model's attention goes to whoever steps; nobody else needs to know."""
    model = loaded(folder)
    engines = [
        make_engine(model, folder, slots=512, page_size=16, **SIZES),
        make_engine(model, folder, slots=512, layout="contiguous", **SIZES),
        make_engine(model, folder, slots=512, page_size=7, **SIZES),
    ]
    graphed(engines[2])
    said: list[dict[str, list[int]]] = [{} for _ in engines]
    for engine in engines:
        for request in requests():
            engine.add_request(request)
    while any(engine.has_work() for engine in engines):
        for engine, answers in zip(engines, said, strict=True):
            for output in engine.step() if engine.has_work() else ():
                answers.setdefault(output.request_id, []).extend(output.token_ids)
    assert said == [expected] * 3
