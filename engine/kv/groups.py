"""Groups of layers that keep the same tokens: all of them, or a window of the last ones. No torch.

Each group has a page table of its own, and all take pages of one pool. A page holds ``page_size`` tokens of a group,
and every group has as many layers as the pool has pairs of caches, so that a page serves any of them:

    layers 0 1 2 3 4 5, window window full window window full, in groups of two (0 3, 1 4 and 2 5)
    group    window   a sequence of 9 pages, a window of 3 pages
    2 5      none     [ 12  3  8  7 20 22 15  9 14 ]
    0 3      window   [  -  -  -  -  - 21  5 30 11 ]     pages that no later token sees are given back
    1 4      window   [  -  -  -  -  - 16 17  2 29 ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ALMOST_EQUAL = 1.25  # kinds of layers whose numbers differ by less make one group each, as in vLLM
RING_UNIT = 64  # slots: rings of the contiguous layout are multiples, so that tiles of the kernels do not cross an end


@dataclass(frozen=True)
class KVGroup:
    """Layers with one page table. ``layers[i]`` has the i-th pair of caches; ``window``: None: all tokens are kept."""

    window: int | None
    layers: tuple[int, ...]


def group_layers(windows: Sequence[int | None]) -> tuple[KVGroup, ...]:
    """Group layers by their windows, those without one first; some groups may have fewer layers than the others.

    A group has as many layers as the rarest kind, as in vLLM (v1/core/kv_cache_utils.py): larger ones would leave more
    caches unused, smaller ones would need more page tables.
    """
    kinds = sorted(set(windows), key=lambda window: (window is not None, window or 0))
    layers = {kind: [layer for layer, window in enumerate(windows) if window == kind] for kind in kinds}
    counts = [len(members) for members in layers.values()]
    size = max(counts) if max(counts) < _ALMOST_EQUAL * min(counts) else min(counts)
    groups = []
    for kind, members in layers.items():
        number = -(-len(members) // size)
        groups += [KVGroup(kind, tuple(members[first::number])) for first in range(number)]
    return tuple(groups)


def largest(groups: Sequence[KVGroup]) -> KVGroup:
    """The group whose layers have a pair of caches each; those of the others share them."""
    return max(groups, key=lambda group: len(group.layers))


def first_page(window: int | None, computed: int, page_size: int) -> int:
    """The first page that tokens after the first ``computed`` still see."""
    return 0 if window is None else max(0, computed - window + 1) // page_size


def most_pages(window: int | None, tokens: int, step_tokens: int, page_size: int) -> int:
    """The most pages at once of a sequence of ``tokens`` that computes up to ``step_tokens`` of them a step."""
    pages = -(-tokens // page_size)
    if window is None:
        return pages
    return min(pages, -(-(window + step_tokens - 2) // page_size) + 1)


def ring_slots(window: int | None, tokens: int, step_tokens: int) -> int:
    """The slots that a group needs in one piece for ``tokens``: a window's are written in turns, as a ring."""
    if window is None:
        return tokens
    return min(tokens, -(-(window + step_tokens - 1) // RING_UNIT) * RING_UNIT)
