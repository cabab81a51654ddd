"""Texts of a trace through a tokenizer: token counts, and which prompts begin alike."""

from __future__ import annotations

import dataclasses
from array import array
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from kvbench.common.packages import shipped_path
from kvbench.traces.model import UNKNOWN, Prompt, Trace

_SHIPPED = "engine/tokenizer/bpe8k"
_BATCH = 1024


def find_path(name: str) -> Path | None:
    """The path as given, or of a file that kvbench ships; None if there is no such file."""
    return next((p for p in (Path(name).expanduser(), shipped_path(name)) if p.exists()), None)


def load_tokenizer(folder: str | None, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer in ``folder``; None: the shipped one. Raises ValueError if it does not fit the model.

    ``vocab_size``: of the model; None: any tokenizer will do.
    """
    path = find_path(folder or _SHIPPED)
    file = path / "tokenizer.json" if path is not None and path.is_dir() else path
    if file is None or not file.is_file():
        raise ValueError(f"no tokenizer.json in {folder}; give the tokenizer's folder in load.prompts.tokenizer.")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"the tokenizer {file} cannot be read ({error}); give another folder.") from None
    size = tokenizer.get_vocab_size()
    if vocab_size is not None and folder is None and size != vocab_size:
        raise ValueError(
            f"the tokenizer that ships with kvbench has {size} ids but the model {vocab_size}, so it is not "
            "the model's own; give the folder of the model's tokenizer in load.prompts.tokenizer."
        )
    if vocab_size is not None and size > vocab_size:
        raise ValueError(
            f"the tokenizer {folder} has {size} ids but the model only {vocab_size}; "
            "use the model's own tokenizer or a model with a larger vocabulary."
        )
    return tokenizer


def texts_sent(trace: Trace, row: int) -> tuple[str, ...]:
    """The texts of a prompt as they are sent; none for token ids.

    In a conversation each text ends with a line break, so that a turn begins, byte by byte and token by token, with the
    whole of the turn before it.
    """
    assert trace.prompts is not None
    texts = trace.prompts[row]
    if not isinstance(texts, tuple):
        return ()
    return texts if trace.session is None and len(texts) == 1 else tuple(f"{text}\n" for text in texts)


def tokenised(trace: Trace, tokenizer: Tokenizer, page_size: int = 16) -> Trace:
    """The trace with token ids in place of texts, the token counts that were unknown, and ids of full pages.

    Each text is tokenised by itself, so that prompts with a text in common have its tokens in common.
    """
    assert trace.prompts is not None
    texts = [texts_sent(trace, i) for i in range(len(trace))]
    replies = trace.replies or ()
    todo = sorted({text for parts in texts for text in parts} | {reply for reply in replies if reply is not None})
    ids: dict[str, list[int]] = {}
    for start in range(0, len(todo), _BATCH):
        part = todo[start : start + _BATCH]
        encoded = tokenizer.encode_batch(part, add_special_tokens=False)
        ids.update({text: item.ids for text, item in zip(part, encoded, strict=True)})
    prompts: list[Prompt] = []
    for prompt, parts in zip(trace.prompts, texts, strict=True):
        prompts.append(array("q", [i for part in parts for i in ids[part]]) if isinstance(prompt, tuple) else prompt)
    prompt_tokens = np.where(trace.prompt_tokens == UNKNOWN, [len(p) for p in prompts], trace.prompt_tokens)
    output_tokens = trace.output_tokens.copy()
    for i, reply in enumerate(replies):
        if reply is not None and output_tokens[i] == UNKNOWN:
            output_tokens[i] = len(ids[reply])
    complete = all(len(p) == n for p, n in zip(prompts, prompt_tokens, strict=True))
    return dataclasses.replace(
        trace,
        prompts=tuple(prompts),
        prompt_tokens=prompt_tokens.astype(np.int64),
        output_tokens=output_tokens,
        page_ids=_pages(prompts, page_size) if complete else None,
        page_size=page_size if complete else None,
        page_size_from="chosen for the texts",
    )


def _pages(prompts: list[Prompt], page_size: int) -> tuple[array, ...]:
    """The ids of full pages, equal for equal ones, numbered as they come."""
    numbers: dict[bytes, int] = {}
    paged = []
    for prompt in prompts:
        pages = (prompt[at : at + page_size].tobytes() for at in range(0, len(prompt) - page_size + 1, page_size))
        paged.append(array("q", [numbers.setdefault(page, len(numbers)) for page in pages]))
    return tuple(paged)
