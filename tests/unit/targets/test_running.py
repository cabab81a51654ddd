"""A server that runs already: what it tells of its model is read, and what it does not tell is asked for at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.common.errors import UsageError
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
        ({}, "transformers", {}, {"--model", "--vocab-size", "--max-model-len"}),  # it lists no models
        ({}, "transformers", {"model": "m", "vocab_size": 5}, {"--max-model-len"}),
    ],
)
def test_everything_that_is_missing_is_asked_for_in_one_sentence(answers, preset, given, options):
    with pytest.raises(UsageError) as error:
        sizes(answers, PRESETS[preset], **given)
    asked = str(error.value).partition(": give ")[2]
    assert {word for word in asked.split() if word.startswith("--")} == options


@pytest.mark.parametrize("given", [{"vocab_size": 8193}, {"max_model_len": 2049}])
def test_more_than_the_server_has_is_refused(given):
    (value,) = given.values()
    with pytest.raises(UsageError, match=rf"{value} is more than the {value - 1} "):
        sizes(row(meta=LLAMA | {"n_ctx": 2048}), **given)
