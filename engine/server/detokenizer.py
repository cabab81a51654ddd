"""Turns token ids into text, one token at a time: no broken character, no half of a stop string.

Byte-level tokenizers (GPT-2, Llama 3, Qwen, bpe8k) are decoded exactly: each token is a run of bytes for an incremental
UTF-8 decoder. Others (SentencePiece) are decoded through a small window of recent tokens, because a token's text may
depend on the one before it.

An answer's text is that of prompt and answer less that of the prompt, so a decoder begins with the prompt's last
tokens: decoded alone, the first token of many tokenizers loses its space.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from tokenizers import Tokenizer, decoders

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 8  # a character has at most 4 bytes: more tokens will not complete one
# Tokens of the prompt to begin with: the first number whose text begins with a character that is whole. 4 in a row,
# because a character has at most 4 bytes; 64, because a chat template's special tokens have no text.
CONTEXT_LENGTHS = (8, 9, 10, 11, 64, 65, 66, 67)


class TextDecoder(Protocol):
    """A decoder of one sequence: ``push`` returns the text that is final by now, ``flush`` the rest."""

    def push(self, ids: Iterable[int]) -> str: ...
    def flush(self) -> str: ...


class ByteVocabulary:
    """The bytes of each token of a byte-level tokenizer, looked up when first needed.

    Ids that the tokenizer does not know have no bytes, and special tokens none where they are skipped.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._to_byte = {char: byte for byte, char in _byte_characters().items()}
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int, skip_special: bool) -> bytes:
        if skip_special and token_id in self._special:
            return b""
        token_bytes = self._known.get(token_id)
        if token_bytes is None:
            token_bytes = self._known[token_id] = self._look_up(token_id)
        return token_bytes

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        try:
            return bytes(self._to_byte[char] for char in token)
        except KeyError:  # an added token, which stands for itself
            return token.encode()

    def decoder(self, skip_special: bool = True, prompt: Sequence[int] = ()) -> ByteDecoder:
        return ByteDecoder(self, skip_special, prompt)


class ByteDecoder:
    """Decodes incrementally and exactly; see the module's docstring."""

    def __init__(self, vocabulary: ByteVocabulary, skip_special: bool, prompt: Sequence[int] = ()):
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._prompt_end = ""  # what the prompt's text has in the place of a character that it begins and we may end
        self.push(prompt[-CONTEXT_LENGTHS[-1] :])
        self._prompt_end = REPLACEMENT if self._utf8.getstate()[0] else ""

    def push(self, ids: Iterable[int]) -> str:
        bytes_of, skip = self._vocabulary.bytes_of, self._skip_special
        return self._new(self._utf8.decode(b"".join([bytes_of(i, skip) for i in ids])))

    def flush(self) -> str:
        return self._new(self._utf8.decode(b"", final=True))

    def _new(self, text: str) -> str:
        if text and self._prompt_end:
            text, self._prompt_end = text.removeprefix(self._prompt_end), ""
        return text


class WindowDecoder:
    """Decodes the recent tokens again with each new one and emits what has been added.

    ``_ids[:_settled]`` have been emitted and are kept only as context for the ones after them.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids = self._context(prompt)
        self._settled = len(self._ids)

    def _context(self, prompt: Sequence[int]) -> list[int]:
        for length in CONTEXT_LENGTHS:
            text = self._decode(prompt[-length:])
            if length >= len(prompt) or (text and text[0] != REPLACEMENT):
                break
        return list(prompt[-length:])

    def push(self, ids: Iterable[int]) -> str:
        return "".join([self._push_one(i) for i in ids])

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        return self._emit(hold=len(self._ids) - self._settled < MAX_HELD_TOKENS)

    def flush(self) -> str:
        return self._emit(hold=False)

    def _emit(self, hold: bool) -> str:
        before = self._decode(self._ids[: self._settled])
        now = self._decode(self._ids)
        text = text_after(before, now)
        if hold and (not text or now.endswith(REPLACEMENT)):
            return ""
        self._ids = self._ids[self._settled :]
        self._settled = len(self._ids)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return decode_all(self._tokenizer, ids, self._skip_special)


def text_after(before: str, now: str) -> str:
    """Returns the text of ``now`` after the beginning that it shares with ``before``."""
    if now.startswith(before):
        return now[len(before) :]
    return now[next((i for i, (old, new) in enumerate(zip(before, now, strict=False)) if old != new), len(now)) :]


def decode_all(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool) -> str:
    """The text of ``ids`` at once; ids that no tokenizer can have are left out."""
    return tokenizer.decode([i for i in ids if 0 <= i < 2**32], skip_special_tokens=skip_special)


class SilentDecoder:
    """A decoder without text, for a server without a tokenizer."""

    def push(self, ids: Iterable[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class StopStrings:
    """Finds the stop string that is complete first, however the text is cut into pieces.

    Text that may be the beginning of a stop string is held back. Of stop strings that end at the same character the
    longest counts. The stop string itself is not part of the output; ``rest`` is what came after it.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self.held = ""
        self.matched: str | None = None
        self.rest = ""

    def push(self, text: str, final: bool = False) -> str:
        """The text that may go out; ``matched`` is set when a stop string ended it. ``final``: no text will follow."""
        assert self.matched is None, "text after the stop string"
        text = self.held + text
        _, start, stop = min(
            ((at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0),
            default=(-1, -1, None),
        )
        if stop is not None:
            self.matched, self.held, self.rest = stop, "", text[start + len(stop) :]
            return text[:start]
        held = 0 if final else self._held_length(text)
        self.held = text[len(text) - held :]
        return text[: len(text) - held]

    def _held_length(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


def is_byte_level(tokenizer: Tokenizer) -> bool:
    return isinstance(tokenizer.decoder, decoders.ByteLevel)


def _byte_characters() -> dict[int, str]:
    """The printable character by which byte-level BPE writes each byte (GPT-2's table).

    Printable Latin-1 bytes stand for themselves; the other 68, in order, are U+0100 and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(256 + offset) for offset, byte in enumerate(others)})
    return table
