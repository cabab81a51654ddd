"""Bounds on the prompt tokens that a prefix cache can have served in a load, from the prompts alone. Pure functions.

A server that counts hits outside these bounds did not have its cache in the state that the load declares.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.requests.request import RequestSpec, distinct_prefixes

Ids = tuple[int, ...]
_STRIDE = 256  # tokens compared at once
OTHER_SEED = "--seed N draws others, but for texts of a file"
_HIT_NOTES = {  # by the count of a load that makes it worth a word
    "disagree": "/metrics count {counted:,.0f} tokens, the usage of the answers {told:,.0f}: the larger count is taken",
    "from_before": "{from_before:,.0f} tokens are hits only because the server was sent these prompts before, as "
    f"cache_state steady allows: {OTHER_SEED}",
}


@dataclass(frozen=True)
class HitBounds:
    """The least and the most prefix-cache hits of a whole load, in tokens."""

    low: int
    high: int


def predict_hits(
    requests: Sequence[RequestSpec],
    *,
    cache_state: str,
    page_size: int = 1,
    caching: bool = True,
    total_pages: float | None = None,
    template_tokens: int | None = None,
) -> HitBounds | None:
    """The bounds; None when a prompt is sent as text, whose tokens only the server knows.

    ``template_tokens``: texts have the tokens that were drawn, and a chat template adds so many. How many of them are
    in front, and so shared by all prompts, is not known: the most is where all are, the least where none is.

    ``high``: what a cache without limit serves in the best order of arrival (the real order is not known). Of the
    requests that look a page up, the first finds nothing unless the cache had the page. With ``page_size`` 1 this holds
    for every page size. A turn whose history holds the server's own answers finds those in the cache too, and is
    counted with the most tokens that they can have. A ``steady`` cache may have held every token before.

    ``low``: 0, except for a ``primed`` cache of ``total_pages`` (None: not known) with room for all that the load
    writes. Then nothing is evicted, and every request finds its prefix.
    """
    if not caching:
        return HitBounds(0, 0)
    texts = any(r.prompt is not None for r in requests)
    if any(r.prompt_token_ids is None or r.history for r in requests) or (texts and template_tokens is None):
        return None
    if texts:
        sizes = {"cache_state": cache_state, "page_size": page_size, "total_pages": total_pages}
        behind, before = (predict_hits(_behind(requests, head), **sizes) for head in (0, template_tokens or 0))
        return HitBounds(min(behind.low, before.low), before.high) if behind and before else None
    prefixes = distinct_prefixes(requests) if cache_state == "primed" else []
    if cache_state == "steady":
        return HitBounds(0, sum(len(_full(r.prompt_token_ids or (), page_size)) for r in requests))
    high = _most_hits(requests, prefixes, page_size) * page_size
    low = 0
    if prefixes and total_pages is not None and _pages_written(requests, prefixes, page_size) <= total_pages:
        low = sum(min(r.prefix_tokens // page_size, _lookups(r, page_size)) for r in requests) * page_size
    return HitBounds(low, high)


def _behind(requests: Sequence[RequestSpec], tokens: int) -> list[RequestSpec]:
    """The requests as token ids, after ``tokens`` ids that all of them share."""
    head = (-1,) * tokens
    return [
        dataclasses.replace(
            request,
            prompt=None,
            prompt_token_ids=head + (request.prompt_token_ids or ()),
            prefix_tokens=tokens + request.prefix_tokens if request.prefix_tokens else 0,
        )
        for request in requests
    ]


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
    """Says why ``hits`` [tokens] do not show that the cache was in the declared state; None where they do.

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


def hit_notes(counts: Iterable[tuple[str, Any]] | Mapping[str, Any]) -> list[str]:
    """Sentences on what a reader of a load's hits must know. ``counts``: done.json's ``prefix_cache``."""
    fields = dict(counts)
    return [note.format_map(fields) for name, note in _HIT_NOTES.items() if fields.get(name)]


def shared_beginnings(prompts: Sequence[Ids], owners: Sequence[int]) -> list[int]:
    """The most leading tokens that each prompt has in common with a prompt of another owner. [prompts]

    Sorted by their tokens, prompts that begin alike are neighbours, so the longest common beginning is with the nearest
    prompt of another owner before or after. It is the shortest of those between the neighbours on the way there.
    """
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    pairs = list(itertools.pairwise(order))
    common = [common_beginning(prompts[a], prompts[b]) for a, b in pairs]
    shared = [0] * len(prompts)
    for steps in (zip(pairs, common, strict=True), zip(reversed([p[::-1] for p in pairs]), common[::-1], strict=True)):
        reach = 0
        for (before, after), equal in steps:
            reach = equal if owners[before] != owners[after] else min(reach, equal)
            shared[after] = max(shared[after], reach)
    return shared


def _lookups(request: RequestSpec, page_size: int) -> int:
    return (len(request.prompt_token_ids or ()) - 1) // page_size


def _most_hits(requests: Iterable[RequestSpec], prefixes: Iterable[Ids], page_size: int) -> int:
    """Counts the pages that a cache without limit serves in the best order.

    Each node of the trie over full pages stands for one page after all the pages before it. If ``holders`` prompts and
    prefixes have the page and ``lookups`` of them look it up, min(lookups, holders - 1) find it: one computed it. A
    prompt that ends with a full page has that page but does not look it up, since at least one token is computed. A
    turn leaves its prompt in the cache for the next turn and, where the history holds it, the server's own answer.

    Sorted by their tokens, prompts with a common beginning are neighbours. So the trie is walked without being built,
    and pages that nobody shares cost nothing.
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
            size = (depth + 1) * page_size
            beginning = first[:size]
            # Sorted by their tokens: those that begin so come first.
            stop = bisect.bisect_right(pages, False, start, end, key=lambda item: item[0][:size] != beginning)
            if stop - start > 1:
                common = common_beginning(first, pages[stop - 1][0], depth * page_size) // page_size
                most += _hits_between(pages[start:stop], depth, common)
                todo.append((start, stop, common))
            start = stop
    return most


def _hits_between(group: list[tuple[Ids, int]], depth: int, common: int) -> int:
    """Hits of the pages ``depth`` to ``common``, which the whole group has.

    Where all of them look a page up, one finds nothing; otherwise one of the others may have computed it.
    """
    lookups = [min(max(count, depth), common) - depth for _, count in group]
    return sum(lookups) - min(lookups)


def _full(tokens: Ids, page_size: int) -> Ids:
    return tokens[: len(tokens) // page_size * page_size]


def common_beginning(first: Ids, second: Ids, equal: int = 0) -> int:
    """Counts the leading tokens that are equal; the first ``equal`` are known to be."""
    at = equal
    while at < len(first) and first[at : at + _STRIDE] == second[at : at + _STRIDE]:
        at += _STRIDE
    at = min(at, len(first), len(second))
    while at < min(len(first), len(second)) and first[at] == second[at]:
        at += 1
    return at


def _pages_written(requests: Iterable[RequestSpec], prefixes: Iterable[tuple[int, ...]], page_size: int) -> int:
    requests = list(requests)
    lengths = [len(r.prompt_token_ids or ()) + r.max_tokens for r in requests] + [len(p) + 1 for p in prefixes]
    forks = sum((r.width - 1) * (-(-r.max_tokens // page_size) + 1) for r in requests)  # 1: a copy of the prompt's last
    return sum(-(-length // page_size) for length in lengths) + forks
