"""Texts for servers that take no token ids: what was drawn must be what the server reads."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

import kvbench_engine.tokenizer
from kvbench.common.errors import UsageError
from kvbench.load.completion import Completion
from kvbench.load.samples import Sample, with_history
from kvbench.requests.build import LoadDraw, build_requests
from kvbench.requests.request import RequestSpec
from kvbench.targets.prompt_texts import TokenizerWords, ids_as_words, with_texts
from kvbench.workload.file import load_workload

BPE = Path(kvbench_engine.tokenizer.__file__).parent / "bpe8k"
WORDS = ["".join(chr(97 + i // 26**k % 26) for k in range(3)) for i in range(1000)]


def reader(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def in_common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def saved(folder, tokenizer):
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def metaspace(folder):
    """Llama 2's way: a space becomes part of the word after it, and one is put before the first."""
    made = Tokenizer(models.WordLevel({f"▁{word}": i for i, word in enumerate(WORDS)} | {"<unk>": 1000}, "<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return saved(folder, made)


def word_piece(folder):
    """BERT's: spaces are gone."""
    made = Tokenizer(models.WordPiece({w: i for i, w in enumerate(WORDS)} | {"[UNK]": 1000, "##ing": 1001}))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return saved(folder, made)


@pytest.mark.parametrize("make", [lambda folder: BPE, metaspace, word_piece], ids=["bpe8k", "metaspace", "wordpiece"])
def test_prompts_differ_as_texts_as_they_differ_as_ids(tmp_path, make):
    """96 shared and 16 own ids: as many tokens, exactly 96 of them in common, and no two prompts alike."""
    folder = make(tmp_path / "t")
    texts, read, draw = TokenizerWords(folder), reader(folder), random.Random(1)
    shared = [draw.randrange(8192) for _ in range(96)]
    prompts = [[*shared, *(draw.randrange(8192) for _ in range(16))] for _ in range(40)]
    sent = [read(texts.text(ids)) for ids in prompts]
    assert [len(ids) for ids in sent] == [112] * 40
    beginning = read(texts.text(shared))
    assert len(beginning) == 96 and all(ids[:96] == beginning for ids in sent)
    pairs = [(i, j) for i in range(40) for j in range(i)]
    # Two ids fall on one word once in some hundreds or thousands of positions.
    assert sum(in_common(sent[i], sent[j]) != in_common(prompts[i], prompts[j]) for i, j in pairs) <= 8
    assert all(sum(a != b for a, b in zip(sent[i][96:], sent[j][96:], strict=True)) >= 12 for i, j in pairs)


def test_any_length_has_its_tokens():
    texts, read, draw = TokenizerWords(BPE), reader(BPE), random.Random(2)
    for length in (0, 1, 2, 3, 17, 512, 4000):
        assert len(read(texts.text([draw.randrange(8192) for _ in range(length)]))) == length


def test_a_workload_shares_as_much_as_text_as_it_does_as_ids():
    load = load_workload("workloads/mixed.yaml", profile="cpu").load
    drawn = build_requests(LoadDraw(load, vocab_size=8192, max_model_len=2048, seed=0, repeat=1, concurrency=32))
    sent, read = with_texts(drawn, TokenizerWords(BPE).text), reader(BPE)
    ids = [list(each.prompt_token_ids) for each in drawn]
    as_read = [read(each.prompt) for each in sent]
    assert [len(each) for each in as_read] == [len(each) for each in ids]

    def shared(prompts):
        return sum(max(in_common(prompts[i], prompts[j]) for j in range(i)) for i in range(1, len(prompts)))

    assert shared(ids) <= shared(as_read) <= 1.002 * shared(ids)


def turn(number, ids, session=0, **more):
    return RequestSpec(number, "a", tuple(ids), None, 2, session=session, turn=number, **more)


def test_turns_of_a_conversation_become_messages():
    """Drawn prompts hold the answers of two tokens that were drawn before: 1 2, then 3 4 (5 6), then 7 (8 9) 10."""
    drawn = [turn(0, [1, 2]), turn(1, [1, 2, 8, 9, 3]), turn(2, [1, 2, 8, 9, 3, 5, 6, 4]), turn(0, [1, 2], session=1)]
    drawn.append(turn(1, [7, 7, 7, 7, 7, 7], session=1))  # does not go on from the turn before it
    sent = with_texts(drawn, ids_as_words, as_messages=True)
    assert [(r.history, r.prompt) for r in sent] == [
        ((), "1 2"), (("1 2", "8 9"), "3"), (("1 2", "8 9", "3", "5 6"), "4"), ((), "1 2"), ((), "7 7 7 7 7 7"),
    ]  # fmt: skip
    assert [r.prompt_token_ids for r in sent] == [r.prompt_token_ids for r in drawn]
    assert [r.prompt for r in with_texts(drawn, ids_as_words)][1] == "1 2 8 9 3"
    answered = Sample(sent[0], 0, 0.0, 0.0, 1.0, Completion(text="said"))
    assert with_history(sent[1], drawn[0], answered).history == ("1 2", "said")  # history: actual


def test_a_tokenizer_with_too_few_words_is_refused_with_the_way_out(tmp_path):
    made = Tokenizer(models.WordLevel({"one": 0, "two": 1, "<unk>": 2}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UsageError, match=r"has 2 words of one token.*need 256: give prompts of kind text"):
        TokenizerWords(saved(tmp_path / "t", made))
