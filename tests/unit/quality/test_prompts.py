"""Prompt sets as files, and passkeys of exact lengths in a tokenizer's own tokens."""

from __future__ import annotations

import runpy
from itertools import pairwise

import pytest
from tokenizers import Tokenizer

from kvbench.common.errors import UsageError
from kvbench.quality.prompts import FILLER, FOLDER, SETS, PromptText, in_tokens, make_passkeys, read_set
from kvbench_engine.tiny_model.data import TEMPLATES


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FILLER.parent / "tokenizer.json"))


@pytest.fixture(scope="module")
def encode(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def test_the_files_are_what_the_script_writes_and_what_is_read():
    made = runpy.run_path(str(FOLDER / "make_prompt_sets.py"))["make_all"]()
    assert tuple(made) == SETS
    for name, prompts in made.items():
        assert read_set(FOLDER / f"{name}.jsonl") == prompts
        assert len({each.prompt_id for each in prompts}) == len(prompts)


def test_the_sets_are_what_they_are_called(encode):
    found = {name: in_tokens(read_set(FOLDER / f"{name}.jsonl"), name, encode) for name in SETS}
    lengths = {name: [each.longest for each in prompts] for name, prompts in found.items()}
    assert max(lengths["easy"]) < 256 and max(lengths["long-context"]) > 1900
    assert max(max(each) for each in lengths.values()) <= 2048 and sum(map(sum, lengths.values())) < 40_000
    assert all(len(each.turns) == 3 for each in found["production-like"] if each.depth is not None)
    assert all(each.answer is None for each in found["malformed"] + found["average"])
    for name in ("easy", "long-context"):
        assert all(each.answer for each in found[name])
    assert {each.depth for each in found["long-context"]} >= {0.0, 1.0}


def test_turns_without_a_token_are_left_out_and_prompts_begin_as_the_model_wants(encode):
    texts = [PromptText("empty", ("one", ""), 4), PromptText("two", ("one", "two"), 4, "2", 0.5)]
    (found,) = in_tokens(texts, "easy", encode, begin=(7,))
    assert found.prompt_id == "easy/two"
    first, second = found.turns
    assert first[0] == 7 and first[1:] == tuple(encode("one")) and second == tuple(encode("two"))
    assert found.length == len(first) + 4 + len(second) and found.longest == found.length + 4


@pytest.mark.parametrize("line", ["{", '{"id": "a", "turns": ["b"], "max_tokens": 2, "more": 1}', "[]"])
def test_a_line_that_is_no_prompt_is_named(tmp_path, line):
    path = tmp_path / "set.jsonl"
    path.write_text(PromptText("a", ("b",), 3).row + line + "\n")
    with pytest.raises(UsageError, match="line 2"):
        read_set(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_set(tmp_path / "none.jsonl")


@pytest.fixture(scope="module")
def passkeys(encode):
    return make_passkeys(encode, encode(FILLER.read_text(encoding="utf-8")), 2048, begin=(0,))


def test_passkeys_have_every_remainder_once_and_fill_the_context(passkeys):
    lengths = [len(each.turns[0]) for each in passkeys]
    assert sorted(length % 64 for length in lengths) == list(range(64)) and lengths == sorted(lengths)
    assert 100 <= lengths[0] < 164 and 1900 < lengths[-1] + passkeys[-1].max_tokens <= 2048
    assert all(each.turns[0][0] == 0 for each in passkeys)
    assert 16 <= sum(a.turns[0][:20] == b.turns[0][:20] for a, b in pairwise(passkeys)) < 48  # they share text


def test_a_passkey_states_its_key_at_its_depth_and_asks_for_it_at_the_end(passkeys, tokenizer, encode):
    for each in passkeys:
        text = tokenizer.decode(each.turns[0], skip_special_tokens=True)
        assert text.endswith("The pass key is") and text.count(each.answer) == 2
        fact, question = (part.format(name="pass", value=each.answer) for part in TEMPLATES[0])
        before = len(encode(text[: text.index(fact)]))
        filler = len(each.turns[0]) - 1 - len(encode(fact)) - len(encode(question))
        assert before == pytest.approx(each.depth * filler, abs=3)  # cut text is read in other tokens
        assert each.max_tokens == len(encode(f" {each.answer}."))
        assert each.is_right(f" {each.answer}.") and not each.is_right(f" 9{each.answer}")
    assert {each.depth for each in passkeys} == {0.0, 0.25, 0.5, 0.75, 1.0}


def test_a_short_context_has_no_passkeys(encode):
    filler = encode("some text " * 50)
    assert make_passkeys(encode, filler, 120) == []
    assert 0 < len(make_passkeys(encode, filler, 256)) <= 64
    assert make_passkeys(encode, filler, 256) == make_passkeys(encode, filler, 256)
