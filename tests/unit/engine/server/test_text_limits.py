"""Texts that are refused before they are tokenised."""

from __future__ import annotations

import asyncio

import pytest

from engine.config import EngineConfig
from engine.model.spec import ModelInfo
from engine.server.chat import RESERVED_OPTIONS, chat_ids
from engine.server.errors import APIError
from engine.server.protocol import ChatMessage
from engine.server.tokenizer import load_tokenizer

MODEL = ModelInfo("m", 8192, 256, (0,), 0)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(EngineConfig(max_model_len=256), MODEL)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(tokenizer):
    limit = tokenizer.max_characters
    longest = max(tokenizer.backend.get_vocab(with_added_tokens=True), key=len)
    assert limit == 256 * len(longest), "256 tokens of the longest kind are the longest text that may pass"
    with pytest.raises(APIError, match=f"has {limit + 1} characters"):
        tokenizer.encode("a" * (limit + 1))


@pytest.mark.parametrize("name", RESERVED_OPTIONS)
def test_options_of_the_template_call_are_not_the_clients_to_set(tokenizer, name):
    message = ChatMessage(role="user", content="hi")
    with pytest.raises(APIError, match=f"cannot set {name}"):
        asyncio.run(chat_ids(tokenizer, [message], True, {name: 5}))
