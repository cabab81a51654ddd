"""Incremental text equals the text of everything at once; stop strings end it wherever the pieces are cut."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvbench_engine.server.detokenizer import ByteVocabulary, StopStrings, WindowDecoder, is_byte_level, text_after
from kvbench_engine.server.tokenizer import ServerTokenizer
from tests.support.http_server import shipped_tokenizer

TOKENIZER = shipped_tokenizer().backend
VOCABULARY = ByteVocabulary(TOKENIZER)
# Half of the ids from the single-byte tokens, so that characters are often cut in the middle, broken or complete.
IDS = st.lists(st.one_of(st.integers(0, 8191), st.integers(0, 259)), max_size=40)


def sentence_piece_like() -> Tokenizer:
    """A tokenizer as Llama 2 and Gemma have it: metaspace, and bytes for what is not in the vocabulary."""
    words = ["\u2581the", "\u2581cat", "\u2581", "s", "\u2581h\u00e9", "a", "t", "\u2581sat", "."]
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    vocab |= {word: len(vocab) + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5 and Mistral have it."""
    words = ["<unk>", "\u2581the", "\u2581cat", "\u2581", "s", "\u2581h\u00e9", "a", "t", "\u2581sat", "."]
    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT has it: no space before some words, and the pieces of one are joined."""
    words = ["[UNK]", "the", "cat", "##s", "a", "##t", "h\u00e9", "sat", ".", "'s", "s", "t"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece()
    return tokenizer


def byte_level() -> Tokenizer:
    return Tokenizer.from_str(TOKENIZER.to_str())


@functools.cache
def server_tokenizer(make: Callable[[], Tokenizer]) -> ServerTokenizer:
    tokenizer = make()
    tokenizer.add_special_tokens(["<s>"])
    return ServerTokenizer("t", tokenizer, vocabulary=ByteVocabulary(tokenizer) if is_byte_level(tokenizer) else None)


WORDS = st.lists(
    st.sampled_from(["the", "cats", "h\u00e9", "sat.", "\u20ac" * 4, "\U0001f980", "a s", "'s"]), max_size=12
)


@pytest.mark.parametrize("make", [sentence_piece_like, metaspace, word_piece, byte_level])
@settings(max_examples=50)
@given(prompt=WORDS, output=WORDS, special=st.sampled_from([0, 1, 12]), skip=st.booleans())
@example(prompt=["\u20ac" * 4], output=["\u20ac"], special=0, skip=True)  # 12 bytes: the last 8 begin within one
def test_an_answer_is_what_it_adds_to_the_text_of_its_prompt(make, prompt, output, special, skip) -> None:
    """The oracle is the library's own decode of both less that of the prompt."""
    tokenizer = server_tokenizer(make)
    start = tokenizer.backend.token_to_id("<s>")
    before = [start, *tokenizer.encode(" ".join(prompt)), *[start] * special]
    after = tokenizer.encode(" ".join(output))
    if after[:1] == [tokenizer.backend.token_to_id("\u2581")]:
        del after[0]  # it goes on within a word
    decoder = tokenizer.decoder(skip, tuple(before))
    pieces = [decoder.push([i]) for i in after]
    both, alone = (tokenizer.backend.decode(ids, skip_special_tokens=skip) for ids in (before + after, before))
    assert both.startswith(alone)
    assert "".join(pieces) + decoder.flush() == both[len(alone) :]
    assert not any("\ufffd" in piece for piece in pieces)
    assert tokenizer.decode(before, skip) == alone


@settings(max_examples=50)
@given(IDS, st.integers(0, 3), st.booleans(), IDS)
def test_a_character_that_the_prompt_begins_and_the_answer_ends_is_the_answer_s(prompt, cut, ends, output) -> None:
    crab = TOKENIZER.encode("\U0001f980").ids
    prompt, output = prompt + crab[:cut], (crab[cut:] if ends else []) + output
    decoder = shipped_tokenizer().decoder(True, prompt)
    text = "".join([decoder.push([i]) for i in output]) + decoder.flush()
    both, alone = TOKENIZER.decode(prompt + output), TOKENIZER.decode(prompt)
    assert text == text_after(alone, both)


def test_so_it_is_where_characters_fall_back_to_bytes() -> None:
    tokenizer = server_tokenizer(sentence_piece_like)
    *before, last = tokenizer.encode("the \u20ac")
    decoder = tokenizer.decoder(True, before)
    assert decoder.push([last, *tokenizer.encode("s")]) + decoder.flush() == "\u20ac s"


@settings(max_examples=50)
@given(IDS, st.booleans())
def test_pieces_add_up_to_the_full_decode(ids: list[int], skip_special: bool) -> None:
    decoder = VOCABULARY.decoder(skip_special)
    text = "".join([decoder.push([i]) for i in ids]) + decoder.flush()
    assert text == TOKENIZER.decode(ids, skip_special_tokens=skip_special)


@pytest.mark.parametrize("unknown", [8192, 10**6, 2**32 - 1, 2**32, 2**70, -1])
def test_ids_outside_the_tokenizer_have_no_text(unknown: int) -> None:
    decoder = VOCABULARY.decoder()
    letter = TOKENIZER.encode("a").ids
    assert decoder.push([*letter, unknown, *letter]) + decoder.flush() == "aa"
    window = WindowDecoder(TOKENIZER, True)
    assert window.push([*letter, unknown, *letter]) + window.flush() == "aa"


def test_window_decoder_does_not_hold_back_for_ever() -> None:
    tokenizer = sentence_piece_like()
    decoder = WindowDecoder(tokenizer, True)
    continuation = tokenizer.token_to_id("<0x80>")
    assert any(decoder.push([continuation]) for _ in range(20))


def first_completed(text: str, stops: list[str]) -> str:
    """The reference: read character by character until a stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


@settings(max_examples=50)
@given(
    st.text("abc", max_size=24),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 4), min_size=30, max_size=30),
)
def test_stop_strings_end_the_text_wherever_it_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    finder = StopStrings(stops)
    shown, rest = "", text
    for size in cuts:
        piece, rest = rest[:size], rest[size:]
        shown += finder.push(piece)
        if finder.matched is not None:
            break
        assert first_completed(text, stops).startswith(shown), "text went out that belongs to a stop string"
    if finder.matched is None:
        shown += finder.push(rest, final=True)
    assert shown == first_completed(text, stops)
    assert (finder.matched is not None) == any(stop in text for stop in stops)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    finder = StopStrings(["\n\nHuman:", "END"])
    assert finder.push("text \n") == "text "
    assert finder.push("more E") == "\nmore "
    assert finder.push("N") == ""
    assert finder.push("ough", final=True) == "ENough"
