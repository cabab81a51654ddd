"""The shipped tokenizer: its size, its special tokens, and that it loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(ROOT / "engine" / "tokenizer" / "bpe8k")


def test_size_and_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == 8192
    assert sorted(tokenizer.get_vocab().values()) == list(range(8192))
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"]) == [0, 1, 2, 3]
    assert tokenizer.eos_token_id == 0


@pytest.mark.parametrize("text", ["Shall I compare thee", "naïve 中文 🙂\n\t\x00  end ", "def f(x):\n    return x"])
def test_any_text_comes_back(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_it_compresses_what_it_was_made_for(tokenizer: PreTrainedTokenizerBase) -> None:
    sonnets = (ROOT / "workloads" / "text" / "sonnets.txt").read_text()
    assert len(sonnets) / len(tokenizer(sonnets).input_ids) > 3
    poems = sonnets.strip().split("\n\n")
    assert len(poems) >= 24
    assert {len(poem.splitlines()) for poem in poems} == {14}


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>Be brief.<|user|>Hi<|assistant|>Hello<|endoftext|><|user|>Bye<|assistant|>"
