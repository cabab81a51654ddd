"""Prompts made of pages: two prompts share exactly the pages whose page ids they share."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from kvbench.requests.draw import LOWEST_TOKEN, Drawing, random_tokens
from kvbench.requests.prefix_hits import shared_beginnings
from kvbench.requests.request import Notes
from kvbench.traces.model import Trace

Ids = tuple[int, ...]
_KEPT_TOKENS = 4_000_000  # of pages that were made: 32 MB; others are made again


def page_prompts(trace: Trace, length_scale: float | str, drawing: Drawing) -> tuple[Iterator[Ids], np.ndarray, Notes]:
    """Token ids of each request, made when they are asked for, output lengths, and notes for the report.

    A page id becomes a page of tokens that depends on the id and the seed only; pages of different ids differ in their
    first few tokens. Tokens beyond a request's last page id are its own. To shrink lengths, the page shrinks to a whole
    number of tokens, ``round(page_size x length_scale)`` (``auto``: the largest with which every request fits), and a
    partly filled last page in proportion. So every request has as many full pages as in the trace. Pages of one token
    cannot be filled in part: they are refused where the trace has partly filled pages.

    Raises:
        ValueError: lengths that fit at no page size, or pages so short that there are not enough different ones.
    """
    assert trace.page_ids is not None and trace.page_size is not None
    size = _scaled_page(trace, length_scale, drawing.max_model_len)
    distinct = 1 + max((max(ids) for ids in trace.page_ids if ids), default=0)
    pages = _Pages(size, drawing.vocab_size, distinct + len(trace), int(drawing.rng.integers(2**63)))
    full, rest, outputs = _lengths(trace, size)
    notes = {
        "contents": "random tokens that share the pages of the trace's page ids",
        "length_scale": size / trace.page_size,
        "trace_page_size": trace.page_size,
        "page_size_of_prompts": size,
        "longest_total_tokens_in_trace": int((trace.prompt_tokens + trace.output_tokens).max()),
    }
    return _prompts(trace.page_ids, pages, full, rest, distinct), outputs, notes


def _prompts(
    page_ids: Sequence[Sequence[int]], pages: _Pages, full: np.ndarray, rest: np.ndarray, distinct: int
) -> Iterator[Ids]:
    for row, numbers in enumerate(page_ids):
        count = int(full[row])
        prompt = tuple(token for number in numbers[:count] for token in pages.of(number))
        last = numbers[count] if len(numbers) > count else distinct + row  # its own number: nobody else's page
        yield prompt + pages.of(last)[: int(rest[row])]


def shared_pages(trace: Trace, owners: Sequence[int], size: int) -> list[int]:
    """How many leading tokens, in full pages of ``size``, each prompt shares with one of another owner. [requests]"""
    assert trace.page_ids is not None
    full, _, _ = _lengths(trace, size)
    whole = [tuple(numbers[:count]) for numbers, count in zip(trace.page_ids, full.tolist(), strict=True)]
    return [size * shared for shared in shared_beginnings(whole, owners)]


def _lengths(trace: Trace, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """At ``size`` tokens a page: full pages, tokens in the last, partly filled one, output. int64 [requests] each"""
    full, rest = np.divmod(trace.prompt_tokens, trace.page_size)
    scaled = np.maximum(1, rest * size // trace.page_size)
    rest = np.where(rest > 0, scaled, (full == 0).astype(np.int64))  # at least one token: an empty prompt is none
    return full, rest, np.maximum(1, trace.output_tokens * size // trace.page_size)


def _longest(trace: Trace, size: int) -> int:
    full, rest, output = _lengths(trace, size)
    return int((full * size + rest + output).max())


def _scaled_page(trace: Trace, length_scale: float | str, max_model_len: int) -> int:
    assert trace.page_size is not None
    least = 2 if (trace.prompt_tokens % trace.page_size).any() else 1
    if length_scale != "auto":
        size = max(1, round(trace.page_size * float(length_scale)))
        if size < least:
            raise ValueError(
                f"length_scale {float(length_scale):g} makes pages of {trace.page_size} tokens pages of 1, and some "
                f"prompts fill their last page in part: choose at least {least / trace.page_size:g}, or auto."
            )
        return size
    low, high = least - 1, trace.page_size  # the longest request grows with the page
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _longest(trace, middle) <= max_model_len else (low, middle - 1)
    if low < least:
        raise ValueError(
            f"the longest request has {int(trace.pages.max())} pages: even with pages of {least} tokens it would need "
            f"{_longest(trace, least)} tokens, more than max_model_len {max_model_len}; choose a part of the trace "
            "with shorter requests (start_s, duration_s, max_requests) or a larger max_model_len."
        )
    return low


class _Pages:
    """Pages of ``size`` tokens by number, all different: the first tokens spell the number, permuted by the salt."""

    def __init__(self, size: int, vocab_size: int, count: int, salt: int):
        self._low = LOWEST_TOKEN if vocab_size > 2 * LOWEST_TOKEN else 0
        self._base = vocab_size - self._low
        self._size, self._vocab_size, self._salt = size, vocab_size, salt
        self._digits = max(1, math.ceil(math.log(max(count, 2)) / math.log(max(self._base, 2)) - 1e-12))
        if self._digits > size:
            raise ValueError(
                f"pages of {size} tokens are too short to tell {count} pages apart with {self._base} token ids: it "
                f"takes {self._digits}; choose a larger length_scale or max_model_len, or a shorter part of the trace."
            )
        self._space = self._base**self._digits
        space = range(salt % self._space or 1, 2 * self._space + 2)
        self._factor = next(f for f in space if math.gcd(f, self._space) == 1)
        self.of = functools.lru_cache(max(1, _KEPT_TOKENS // size))(self._make)

    def _make(self, number: int) -> Ids:
        """The page's tokens; the same for the same number and salt."""
        spelt, left = [], (number * self._factor + self._salt) % self._space
        for _ in range(self._digits):
            left, digit = divmod(left, self._base)
            spelt.append(self._low + digit)
        rng = np.random.default_rng([self._salt, number])
        return (*spelt, *random_tokens(self._size - self._digits, self._vocab_size, rng))
