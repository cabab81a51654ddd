"""How many prompt tokens a prefix cache can have served in a load, from the prompts alone. Pure functions.

What a server counted outside this interval shows that its cache was not in the state that the load declares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvbench.load.requests import RequestSpec, distinct_prefixes


@dataclass(frozen=True)
class HitBounds:
    """Prefix-cache hits of a whole load, in tokens, both ends included."""

    low: int
    high: int


@dataclass
class _Node:
    """A page in its context. ``lookups`` and ``holders``: requests that may ask for it, and that compute or share it.

    ``holders`` counts a request also when the page is its prompt's last full one, which it never looks up: one token
    at least is always computed.
    """

    lookups: int = 0
    holders: int = 0


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
    nodes = _trie(requests, prefixes, page_size)
    high = sum(min(node.lookups, node.holders - 1) for node in nodes) * page_size
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


def _lookups(request: RequestSpec, page_size: int) -> int:
    return (len(request.prompt_token_ids or ()) - 1) // page_size


def _trie(requests: Iterable[RequestSpec], prefixes: Iterable[tuple[int, ...]], page_size: int) -> list[_Node]:
    """The nodes of the trie over full pages of the prompts; a page's key is its parent's number and its tokens."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    nodes: list[_Node] = []

    def add(tokens: tuple[int, ...], lookups: int) -> None:
        parent = -1
        for index in range(len(tokens) // page_size):
            key = (parent, tokens[index * page_size : (index + 1) * page_size])
            parent = numbers.setdefault(key, len(nodes))
            if parent == len(nodes):
                nodes.append(_Node())
            nodes[parent].holders += 1
            nodes[parent].lookups += index < lookups

    # A turn leaves its answer in the cache too, which the next one looks up where it is the server's own.
    left = {(r.session, r.turn - 1): (r.prompt_token_ids or ())[: -r.new_tokens] for r in requests if r.new_tokens}
    for prefix in prefixes:
        add(prefix, 0)
    for request in requests:
        written = left.get((request.session, request.turn)) if request.session is not None else None
        add(written or request.prompt_token_ids or (), _lookups(request, page_size))
    return nodes


def _pages_written(requests: Iterable[RequestSpec], prefixes: Iterable[tuple[int, ...]], page_size: int) -> int:
    lengths = [len(r.prompt_token_ids or ()) + r.max_tokens for r in requests] + [len(p) + 1 for p in prefixes]
    return sum(-(-length // page_size) for length in lengths)
