"""Prompts for servers that take no token ids: the ids' text, with as many tokens as there were ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from kvbench.load.requests import RequestList, RequestSpec

_ROUNDS = 8


class Texts(Protocol):
    """Turns token ids into a text."""

    def text(self, ids: Sequence[int]) -> str: ...


class WordTexts:
    """For a tokenizer of one word a token (``engine.export_model``): exact."""

    def text(self, ids: Sequence[int]) -> str:
        """ "17 4" for 17, 4."""
        return " ".join(map(str, ids))


class TokenizerTexts:
    """For a model's own tokenizer: random ids do not survive their text, so the text is tokenised and mended.

    Merges across the ids make it shorter: ids of the text itself are added until the count is right, or, after some
    rounds, nearly so. The server's ``usage`` tells what it was.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def text(self, ids: Sequence[int]) -> str:
        """A text of ``len(ids)`` tokens that begins like that of ``ids``."""
        wanted, text = len(ids), self._tokenizer.decode(list(ids), skip_special_tokens=False)
        for _ in range(_ROUNDS):
            got = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(got) == wanted:
                break
            mended = got[:wanted] if len(got) > wanted else [*got, *ids[: wanted - len(got)]]
            text = self._tokenizer.decode(mended, skip_special_tokens=False)
        return text


def with_texts(requests: list[RequestSpec], texts: Texts) -> RequestList:
    """The requests with a text beside their ids, which are kept for lengths and prefixes; texts stay as they are."""
    notes: dict[str, Any] = {**getattr(requests, "notes", {}), "sent_as": "text"}
    made = [
        r if r.prompt is not None else dataclasses.replace(r, prompt=texts.text(r.prompt_token_ids or ()))
        for r in requests
    ]
    return RequestList(made, notes)
