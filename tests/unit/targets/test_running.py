"""A server that runs already: what it tells of its model is read, and what it does not tell is asked for at once."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.requests.request import RequestSpec
from kvbench.targets.model_export import shipped_tokenizer
from kvbench.targets.presets import GENERIC, PRESETS
from kvbench.targets.running import OpenAITarget
from tests.support.scripted_http import scripted_server


def row(**more):
    return {"/v1/models": (200, {"data": [{"id": "m", "owned_by": "someone", **more}]})}


def sizes(answers, preset=GENERIC, **given):
    """Vocabulary and longest sequence of the target of a server with these answers."""
    with scripted_server({"/health": (200, {})} | answers) as server:
        target = OpenAITarget(server.url, preset=preset, **given)
        try:
            target.start({}, Path())
            return target.model.vocab_size, target.model.max_model_len
        finally:
            target.stop()


LLAMA = {"n_vocab": 8192, "n_ctx_train": 4096}
OLD_PROPS = {"/props": (200, {"default_generation_settings": {"n_ctx": 512}})}


@pytest.mark.parametrize(
    ("answers", "given", "found"),
    [
        (row(meta=LLAMA | {"n_ctx": 2048}), {}, (8192, 2048)),  # a slot may hold less than the model was trained for
        (row(meta=LLAMA) | OLD_PROPS, {}, (8192, 512)),
        (row(meta=LLAMA), {}, (8192, 4096)),
        (row(meta=LLAMA | {"n_ctx": 2048}), {"vocab_size": 100, "max_model_len": 300}, (100, 300)),
        (row(max_model_len=900), {"vocab_size": 5}, (5, 900)),
        (row(max_model_len=900, vocab_size=70), {}, (70, 900)),
        (row(meta="text", max_model_len=None), {"vocab_size": 5, "max_model_len": 7}, (5, 7)),
    ],
)
def test_sizes_are_read_where_the_server_tells_them(answers, given, found):
    assert sizes(answers, **given) == found


@pytest.mark.parametrize(
    ("answers", "preset", "given", "options"),
    [
        (row(), "vllm", {}, {"--vocab-size", "--max-model-len"}),
        (row(max_model_len=900), "vllm", {}, {"--vocab-size"}),
        (row(), "vllm", {"vocab_size": 5}, {"--max-model-len"}),
        ({}, "transformers", {}, {"--model", "--max-model-len"}),  # it lists no models, and takes texts
        ({}, "transformers", {"model": "m", "vocab_size": 5}, {"--max-model-len"}),
    ],
)
def test_everything_that_is_missing_is_asked_for_in_one_sentence(answers, preset, given, options):
    with pytest.raises(UsageError) as error:
        sizes(answers, PRESETS[preset], **given)
    asked = str(error.value).partition(": give ")[2]
    assert {word for word in asked.split() if word.startswith("--")} == options
    assert asked.count("config.json") == len(options - {"--model"})  # where to find the sizes


@pytest.mark.parametrize("given", [{"vocab_size": 8193}, {"max_model_len": 2049}])
def test_more_than_the_server_has_is_refused(given):
    (value,) = given.values()
    with pytest.raises(UsageError, match=rf"{value} is more than the {value - 1} "):
        sizes(row(meta=LLAMA | {"n_ctx": 2048}), **given)


FINE = row(max_model_len=900, meta=LLAMA)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (FINE | {"/server_info": (200, {"engine": 5})}, "engine: 5 is not a mapping"),
        (FINE | {"/server_info": (200, {"model": {"vocab_size": 10**400}})}, "model.vocab_size"),
        (FINE | {"/server_info": (200, {"capacity": {"kv_bytes": []}})}, "capacity.kv_bytes: []"),
        (FINE | {"/server_info": (200, {"capacity": {"kv_bytes": -0.5}})}, "capacity.kv_bytes: -0.5"),
        (FINE | {"/server_info": (200, {"engine": {"max_num_seqs": "many"}})}, "engine.max_num_seqs: 'many'"),
        (FINE | {"/server_info": (200, {"engine": {"max_num_seqs": 3.5}})}, "engine.max_num_seqs: 3.5"),
        (FINE | {"/server_info": (200, {"engine": {"enable_prefix_caching": "no"}})}, "enable_prefix_caching: 'no'"),
        (FINE | {"/server_info": (200, {"server": {"notes": "none"}})}, "server.notes: 'none'"),
        (row(max_model_len=-1), "--max-model-len N"),
        (row(max_model_len=True, meta={"n_vocab": 2**40}), "--vocab-size N (vocab_size"),
        ({"/v1/models": (200, {"data": [{"id": "m\ud800"}]})}, "lists no models"),
        ({"/v1/models": (200, {"data": [{"id": "\x1b[2J"}]})}, "can be printed"),
        ({"/v1/models": (200, {"data": [{"id": 5}]})}, "data.0.id: 5 is not a string"),
        ({"/v1/models": (200, {"data": [{"id": ""}]})}, "data.0.id"),
        ({"/v1/models": (200, {"data": {}})}, "data: {} is not a list"),
        ({"/v1/models": (200, "[" * 100_000)}, "lists no models"),
    ],
)
def test_what_cannot_be_true_is_refused_by_name(answers, words):
    with pytest.raises(UsageError) as error:
        sizes(answers)
    assert words in str(error.value) and len(str(error.value)) < 1100


@pytest.mark.parametrize("size", [-1, 0, None])
def test_sizes_below_one_are_as_if_they_were_not_told(size):
    info = {"engine": {"max_num_seqs": size, "page_size": size}, "model": {"vocab_size": size}, "more": size}
    with scripted_server(FINE | {"/server_info": (200, info)}) as server:
        target = OpenAITarget(server.url)
        target.start({}, Path())
        checked = target.server_info()
        assert target.model.vocab_size == 8192 and checked["more"] == size
        assert [checked["engine"].get("max_num_seqs"), checked["engine"].get("page_size")] == [None, None]
        target.stop()


def test_metrics_that_cannot_be_printed_are_refused_in_words_that_can():
    with scripted_server({"/metrics": (200, "\0\x1b[2J 1\n")}) as server:
        target = OpenAITarget(server.url)
        with pytest.raises(MeasurementError, match="/metrics cannot be read") as error:
            target.metrics()
        target.stop()
    assert str(error.value).isprintable()


TEXT = (200, {"choices": [{"text": " x"}]})


def completions(ids, text=TEXT):
    return {"/v1/completions": lambda body: text if isinstance(body["prompt"], str) else ids}


@pytest.mark.parametrize(
    ("answers", "preset", "given", "texts", "noted"),
    [
        (completions(TEXT), GENERIC, {}, False, False),
        (completions((422, "no list")), GENERIC, {}, True, True),
        (completions((400, "no list")), GENERIC, {"tokenizer": shipped_tokenizer()}, True, False),  # as it was asked
        (completions((400, "no list"), (400, "no")), GENERIC, {}, False, False),  # it refuses everything
        (completions((500, "down")), GENERIC, {}, False, False),  # not because of the ids
        (completions((400, "no list")), PRESETS["vllm"], {}, False, False),  # which takes them
        (completions((400, "no list")), PRESETS["vllm"], {"tokenizer": shipped_tokenizer()}, True, False),
        (completions((400, "no list")), PRESETS["transformers"], {"model": "m", "max_model_len": 9}, True, True),
    ],
)
@pytest.mark.parametrize("vocabulary", [{}, {"vocab_size": 50}])  # without one it is asked at once: texts need none
def test_a_server_that_refuses_token_ids_gets_texts(answers, preset, given, texts, noted, vocabulary):
    with scripted_server({"/health": (200, {})} | row(max_model_len=900) | answers) as server:
        target = OpenAITarget(server.url, preset=preset, **given, **(vocabulary if texts else {"vocab_size": 50}))
        try:
            target.start({}, Path())
            with suppress(MeasurementError):
                target.complete([7, 8, 9], 1, 5.0)  # as a warm-up does
            (request,) = target.as_sent([RequestSpec(0, "a", (7, 8, 9), None, 4)])
            notes = ((target.server_info() or {}).get("server") or {}).get("notes") or []
        finally:
            target.stop()
    assert (request.prompt is not None, target.dialect.token_id_prompts) == (texts, not texts)
    assert len((request.prompt or "a b c").split()) == 3
    assert bool(notes) == noted and all("--tokenizer DIR" in note for note in notes)


def test_texts_take_any_vocabulary_that_is_given():
    answers = row(max_model_len=900) | completions((422, "no list"))
    assert sizes(answers) == (8192, 900) and sizes(answers, vocab_size=50000) == (50000, 900)
