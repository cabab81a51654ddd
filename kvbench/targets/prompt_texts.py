"""Prompts for servers that take no token ids: the ids' text, with as many tokens as there were ids."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.requests.request import Notes, RequestList, RequestSpec

_LEAST_WORDS = 256  # with fewer, random prompts would begin alike by chance

TextOfIds = Callable[[Sequence[int]], str]


def ids_as_words(ids: Sequence[int]) -> str:
    """Writes token ids as words, `17 4`: exact where the tokenizer has one word a token (engine/model/export.py)."""
    return " ".join(map(str, ids))


class TokenizerWords:
    """Texts for a model's own tokenizer: each id becomes a word that is one token wherever it stands.

    The text of random ids would not give the same ids back (broken UTF-8, merges across ids). Words of ASCII letters
    between spaces are never merged, so equal ids give equal tokens, and prompts share exactly the beginning that was
    drawn. Ids are mapped to words by their remainder, so two random ids share a word now and then (bpe8k: 1 in 3,579).

    Raises UsageError for a tokenizer with too few such words.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # of no other class
            raise UsageError(f"--tokenizer {folder} has no tokenizer.json that can be read: {error}") from None
        decoded = {tokenizer.decode([i], skip_special_tokens=False).strip() for i in range(tokenizer.get_vocab_size())}
        words = sorted(word for word in decoded if word.isascii() and word.isalpha())
        # Byte-level tokenizers know most words with the space before them only, others put one there themselves.
        self._lead, self._words = max(
            ((lead, _one_token_words(tokenizer, lead, words)) for lead in (" ", "")), key=lambda pair: len(pair[1])
        )
        if len(self._words) < _LEAST_WORDS:
            raise UsageError(
                f"the tokenizer in {folder} has {len(self._words)} words of one token, and texts of random prompts "
                f"need {_LEAST_WORDS}: give prompts of kind text with send_text: true"
            )

    def text(self, ids: Sequence[int]) -> str:
        """A text of ``len(ids)`` tokens; texts of equal beginnings begin alike."""
        return self._lead + " ".join(self._words[i % len(self._words)] for i in ids) if ids else ""


@functools.cache
def texts_of(folder: Path | None) -> TextOfIds:
    """Makes texts for the tokenizer in ``folder``; None: for one with a word an id, or none that is known."""
    if folder is None:
        return ids_as_words
    return TokenizerWords(folder).text


def _one_token_words(tokenizer: Any, lead: str, words: Sequence[str]) -> list[str]:
    """The words that are one token each, all different; none if the tokenizer merges them in a row."""
    alone: dict[int, str] = {}
    encoded = tokenizer.encode_batch([lead + word for word in words], add_special_tokens=False)
    for word, encoding in zip(words, encoded, strict=True):
        if len(encoding.ids) == 1:
            alone.setdefault(encoding.ids[0], word)
    row = tokenizer.encode(lead + " ".join(alone.values()), add_special_tokens=False).ids
    return list(alone.values()) if row == list(alone) else []


def with_texts(requests: list[RequestSpec], text: TextOfIds, *, as_messages: bool = False) -> RequestList:
    """The requests, each with a text. Ids stay, for lengths and prefixes; a text that is there stays as it is.

    ``as_messages``: a later turn's text is its new tokens only, after the texts of the turns and answers before it.
    """
    notes: Notes = {**getattr(requests, "notes", {}), "sent_as": "messages" if as_messages else "text"}
    turns: dict[tuple[int | None, int], RequestSpec] = {}
    made = []
    for request in requests:
        if request.prompt is None:
            before = turns.get((request.session, request.turn - 1)) if request.session is not None else None
            request = _message(request, before, text) if as_messages and before else _whole(request, text)
        turns[request.session, request.turn] = request
        made.append(request)
    return RequestList(made, notes)


def _whole(request: RequestSpec, text: TextOfIds) -> RequestSpec:
    return dataclasses.replace(request, prompt=text(request.prompt_token_ids or ()))


def _message(request: RequestSpec, before: RequestSpec, text: TextOfIds) -> RequestSpec:
    """The turn as a conversation, if its drawn prompt goes on from the turn ``before`` it and its drawn answer."""
    ids, sent = request.prompt_token_ids or (), before.prompt_token_ids or ()
    answered = len(sent) + before.max_tokens
    if before.prompt is None or ids[: len(sent)] != sent or len(ids) <= answered:
        return _whole(request, text)
    history = (*before.history, before.prompt, text(ids[len(sent) : answered]))
    return dataclasses.replace(request, history=history, prompt=text(ids[answered:]))
