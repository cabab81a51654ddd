"""The work list of triton_plan in NumPy, and an estimate of a GPU's time for it by a model of its waves.

The model: ``places`` programs run at a time; in the order of their launch each takes the place that is free first, for
as long as its tokens and PROGRAM_TOKENS more. Times are in tokens of one KV head. It knows no memory: an estimate.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from kvbench_kernels.launch import (
    MIN_SPLIT_TOKENS,
    PROGRAM_TOKENS,
    PROGRAMS_PER_SM,
    cdiv,
    most_decode_items,
    num_kv_splits,
)

UNIT = 64  # tokens: a piece is a whole number of tiles
CUTS = [*range(1, 33), *range(36, 161, 4)]  # of the longest sequence
LEVELS = 8


def expected_list(
    lens: Sequence[int], window: int | None, kv_heads: int, num_sms: int, most_items: int
) -> list[tuple[int, int, int]]:
    """What the table must hold, computed the plain way: (sequence, piece, pieces) in order."""
    spans = [cdiv(min(n, window or n), UNIT) for n in lens]
    places = PROGRAMS_PER_SM * num_sms

    def pieces_for(chunk: int) -> list[int]:
        return [max(1, cdiv(span, chunk)) for span in spans]

    def cost(chunk: int) -> int:
        pieces = pieces_for(chunk)
        levels = [chunk * level // LEVELS for level in range(LEVELS + 1)]
        longer = [sum(n for n, span in zip(pieces, spans, strict=True) if cdiv(span, n) > x) for x in levels[:-1]]
        waves = [cdiv(n * kv_heads, places) for n in longer]
        own = sum(n * (above - x) for n, x, above in zip(waves, levels, levels[1:], strict=False))
        return own + PROGRAM_TOKENS // UNIT * cdiv(sum(pieces) * kv_heads, places)

    chunks = [max(MIN_SPLIT_TOKENS // UNIT, cdiv(max(spans), cuts)) for cuts in CUTS]
    pieces = pieces_for(min((c for c in chunks if sum(pieces_for(c)) <= most_items), key=cost))
    order = sorted(range(len(lens)), key=lambda b: (-cdiv(spans[b], pieces[b]), b))
    return [(b, piece, pieces[b]) for b in order for piece in range(pieces[b])]


def tokens_of(length: int, piece: int, pieces: int) -> int:
    """Tokens of one of the equal pieces, as ``triton_common.attend`` cuts them."""
    each = cdiv(cdiv(length, UNIT), pieces) * UNIT
    return min(max(length - piece * each, 0), each)


def wave_time(programs: Iterable[int], places: int) -> int:
    """When the last of ``programs`` (tokens of each, in the order of their launch) ends."""
    ends = [0] * places
    for tokens in programs:
        heapq.heapreplace(ends, ends[0] + tokens + PROGRAM_TOKENS)
    return max(ends)


def planned_time(lens: Sequence[int], kv_heads: int, num_sms: int) -> int:
    """Of a decode by the work list."""
    most = most_decode_items(len(lens), kv_heads, max(lens), PROGRAMS_PER_SM * num_sms)
    items = expected_list(lens, None, kv_heads, num_sms, most)
    programs = np.repeat([tokens_of(lens[b], piece, pieces) for b, piece, pieces in items], kv_heads)
    return wave_time(programs.tolist(), PROGRAMS_PER_SM * num_sms)


def evenly_split_time(lens: Sequence[int], kv_heads: int, num_sms: int) -> int:
    """Of a decode that cuts all sequences into one number of pieces, by the batch size: without a list."""
    splits = num_kv_splits(len(lens) * kv_heads, max(lens), num_sms)
    programs = [tokens_of(n, piece, splits) for piece in range(splits) for _ in range(kv_heads) for n in lens]
    return wave_time(programs, PROGRAMS_PER_SM * num_sms)


def ideal_time(lens: Sequence[int], kv_heads: int, num_sms: int) -> float:
    """All places busy to the end, one program a sequence; no less than one shortest piece takes."""
    shared = sum(n + PROGRAM_TOKENS for n in lens) * kv_heads / (PROGRAMS_PER_SM * num_sms)
    return max(shared, min(max(lens), MIN_SPLIT_TOKENS) + PROGRAM_TOKENS)
