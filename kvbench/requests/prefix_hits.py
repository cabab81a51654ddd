"""How many prompt tokens a prefix cache can have served in a load, from the prompts alone. Pure functions.

What a server counted outside this interval shows that its cache was not in the state that the load declares.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvbench.requests.request import RequestSpec, distinct_prefixes

Ids = tuple[int, ...]
_STRIDE = 256  # tokens compared at once


@dataclass(frozen=True)
class HitBounds:
    """Prefix-cache hits of a whole load, in tokens, both ends included."""

    low: int
    high: int


def predict_hits(
    requests: Sequence[RequestSpec],
    *,
    cache_state: str,
    page_size: int = 1,
    caching: bool = True,
    total_pages: float | None = None,
) -> HitBounds | None:
    """The interval; None when a prompt is sent as text, whose tokens only the server knows.

    The upper end is what an endless cache would serve in the best order of arrival (streams end when they end, so the
    order is not known): of a page that n requests look up, the first finds nothing unless the cache had it. With
    ``page_size`` 1 it holds for every page size. The lower end is 0, but for a ``primed`` cache of ``total_pages`` that
    has room for all that the load ever writes: nothing is evicted then, and every request meets its prefix.
    A turn whose history holds the server's own answers meets them in the cache as well; how many tokens they have at
    most is known, and that is what the upper end is made of.

    Args:
        total_pages: pages of the cache; None when not known.
    """
    if not caching:
        return HitBounds(0, 0)
    if any(r.prompt is not None or r.prompt_token_ids is None for r in requests):
        return None
    prefixes = distinct_prefixes(requests) if cache_state == "primed" else []
    if cache_state == "steady":
        return HitBounds(0, sum(_lookups(r, page_size) * page_size for r in requests))
    high = _most_hits(requests, prefixes, page_size) * page_size
    low = 0
    if prefixes and total_pages is not None and _pages_written(requests, prefixes, page_size) <= total_pages:
        low = sum(min(r.prefix_tokens // page_size, _lookups(r, page_size)) for r in requests) * page_size
    return HitBounds(low, high)


def outside(hits: float, bounds: HitBounds, cache_state: str, *, complete: bool) -> str | None:
    """A sentence when the measured ``hits`` [tokens] lie outside; ``complete``: every request succeeded."""
    if hits > bounds.high:
        return (
            f"the prefix cache served {hits:g} tokens, at most {bounds.high} are possible for these prompts in the "
            f"state {cache_state!r}: it held prompts from before this load"
        )
    if complete and hits < bounds.low:
        return (
            f"the prefix cache served {hits:g} tokens, at least {bounds.low} are due for these prompts in the state "
            f"{cache_state!r}: the shared prefixes were not in it"
        )
    return None


def unverified(hits: float | None, bounds: HitBounds | None, cache_state: str) -> str | None:
    """Why nothing shows that the cache was in the declared state; None where its ``hits`` [tokens] do.

    ``steady`` declares nothing: the cache is measured as it is found.
    """
    if cache_state == "steady":
        return None
    if hits is None:
        return "the server does not tell its hits"
    if bounds is None:
        return "how many hits are possible is not known"
    if cache_state == "primed" and bounds.high and not bounds.low:
        return "how many hits are due is not known: the cache may not have room for all that the load writes"
    return None


def shared_beginnings(prompts: Sequence[Ids], owners: Sequence[int]) -> list[int]:
    """How many leading tokens of each prompt another owner's prompt has, too. [prompts]

    In order of their tokens, the prompts most alike are neighbours: of those of other owners the nearest on either
    side, with which all in between have as much in common.
    """
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    pairs = list(itertools.pairwise(order))
    common = [_common(prompts[a], prompts[b], 0) for a, b in pairs]
    shared = [0] * len(prompts)
    for steps in (zip(pairs, common, strict=True), zip(reversed([p[::-1] for p in pairs]), common[::-1], strict=True)):
        reach = 0
        for (before, after), alike in steps:
            reach = alike if owners[before] != owners[after] else min(reach, alike)
            shared[after] = max(shared[after], reach)
    return shared


def _lookups(request: RequestSpec, page_size: int) -> int:
    return (len(request.prompt_token_ids or ()) - 1) // page_size


def _most_hits(requests: Iterable[RequestSpec], prefixes: Iterable[Ids], page_size: int) -> int:
    """Pages that an endless cache serves in the best order.

    Of a page in its context (a node of the trie over full pages) that ``holders`` prompts and prefixes have and
    ``lookups`` of them may ask for: min(lookups, holders - 1), one at least having computed it. A prompt never asks for
    the last page that it fills to its end, since one token at least is computed; it has it for others, though. What a
    turn leaves in the cache for the next one is its prompt and, where the history holds it, the server's own answer.

    Prompts in order of their tokens have those with a common beginning side by side, so that the trie is walked without
    being built, and what nobody shares costs nothing.
    """
    left = {(r.session, r.turn - 1): (r.prompt_token_ids or ())[: -r.new_tokens] for r in requests if r.new_tokens}
    pages = [(_full(prefix, page_size), 0) for prefix in prefixes]
    for request in requests:
        holds = left.get((request.session, request.turn)) or request.prompt_token_ids or ()
        pages.append((_full(holds, page_size), _lookups(request, page_size)))
    pages.sort()
    most = 0
    todo = [(0, len(pages), 0)]  # neighbours from, to, that have so many first pages in common
    while todo:
        start, end, depth = todo.pop()
        while start < end and len(pages[start][0]) == depth * page_size:  # ends here: sorted, those come first
            start += 1
        while start < end:
            first = pages[start][0]
            alike = _alike(pages, start, end, first[: (depth + 1) * page_size])
            if alike - start > 1:
                common = _common(first, pages[alike - 1][0], depth * page_size) // page_size
                most += _hits_between(pages[start:alike], depth, common)
                todo.append((start, alike, common))
            start = alike
    return most


def _hits_between(group: list[tuple[Ids, int]], depth: int, common: int) -> int:
    """The sum over the pages ``depth`` to ``common``, which the whole group has: all lookups, less those of the first.

    Where all look a page up, one finds nothing; elsewhere those who do not look it up may have computed it.
    """
    lookups = [min(max(count, depth), common) - depth for _, count in group]
    return sum(lookups) - min(lookups)


def _full(tokens: Ids, page_size: int) -> Ids:
    return tokens[: len(tokens) // page_size * page_size]


def _alike(pages: list[tuple[Ids, int]], start: int, end: int, beginning: Ids) -> int:
    """Where the neighbours from ``start`` on that have this beginning end."""
    return bisect.bisect_right(pages, False, start, end, key=lambda item: item[0][: len(beginning)] != beginning)


def _common(first: Ids, second: Ids, known: int) -> int:
    """Tokens that both begin with, ``known`` of them known."""
    at = known
    while at < len(first) and first[at : at + _STRIDE] == second[at : at + _STRIDE]:
        at += _STRIDE
    at = min(at, len(first), len(second))
    while at < min(len(first), len(second)) and first[at] == second[at]:
        at += 1
    return at


def _pages_written(requests: Iterable[RequestSpec], prefixes: Iterable[tuple[int, ...]], page_size: int) -> int:
    lengths = [len(r.prompt_token_ids or ()) + r.max_tokens for r in requests] + [len(p) + 1 for p in prefixes]
    return sum(-(-length // page_size) for length in lengths)
