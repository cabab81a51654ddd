"""Shares a step's decode among programs, by a list that the device makes from the sequences' lengths.

Of prefill it chooses how long the pieces are that blocks are cut into.

A program of decode attends to one **item** under one KV head: a whole sequence, or one of the equal pieces that a long
sequence is cut into. One launch of ``plan_kernel`` a step (and distinct window) chooses how long a piece may be and
lists the items, the longest first. It reads the lengths on the device, so that a CUDA graph plans anew at each replay;
every size that the host needs follows from the batch size, the chip and a bound on the lengths.

The table, int32 [1 + items, 4]:

    row 0        number of items, -, -, -
    from row 1   of an item: its sequence, which of its pieces, how many pieces, tokens of the sequence

The pieces of a sequence are neighbours, in their order. Beside the table lie counters, one a sequence and KV head, by
which the pieces find out which of them ends last; the kernel sets them to 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvbench_kernels.launch import GOOD_FILL, MAX_SPLITS, MIN_SPLIT_TOKENS, PROGRAM_TOKENS, cdiv, most_decode_items

UNIT = 64  # tokens, in which the plan counts: the tile of the usual kernels
ROWS = 16  # sequences that a program lists
CONSTANTS = {
    "UNIT": UNIT, "SHORTEST": MIN_SPLIT_TOKENS // UNIT, "PROGRAM": PROGRAM_TOKENS // UNIT,
    "CHOICES": 64, "LEVELS": 8, "ROWS": ROWS, "num_warps": 4,
}  # fmt: skip
PIECE_CONSTANTS = {"SHORTEST": MIN_SPLIT_TOKENS, "CHOICES": MAX_SPLITS, "GOOD": GOOD_FILL, "num_warps": 4}
_NO_WINDOW = (1 << 31) - 1


@triton.jit
def load_spans(lens_ptr, start, batch, window, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Units that the sequences start .. start + BLOCK - 1 attend to, and which of these sequences exist."""
    b = start + tl.arange(0, BLOCK)
    lens = tl.load(lens_ptr + b, mask=b < batch, other=0).to(tl.int32)
    return tl.cdiv(tl.minimum(lens, window), UNIT), b < batch


@triton.jit
def count_pieces(spans, chunk):
    """Pieces of at most ``chunk`` units: one at least, of a sequence without tokens too."""
    return tl.maximum(tl.cdiv(spans, chunk), 1)


@triton.jit
def choose_chunk(
    lens_ptr, batch, window, kv_heads, places, most_items,
    UNIT: tl.constexpr, SHORTEST: tl.constexpr, PROGRAM: tl.constexpr, CHOICES: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Returns (units that no piece exceeds, number of items): the choice that is estimated to end first.

    Choices: the longest sequence in 1, 2, 3 ... 32, 36, 40 ... 160 pieces, none under SHORTEST units. ``places``
    programs run at a time, the longest start first: so no wave of ``places`` programs takes longer than its first, and
    all take at most the sum over x = 0, 1, 2 ... of the waves of programs longer than x. LEVELS values of x stand for
    all. A program costs PROGRAM units beside its own.
    """
    BLOCK: tl.constexpr = 16
    longest = 0
    for start in range(0, batch, 256):
        spans, _ = load_spans(lens_ptr, start, batch, window, UNIT, 256)
        longest = tl.maximum(longest, tl.max(spans, 0))
    choice = tl.arange(0, CHOICES)
    level = tl.arange(0, LEVELS)
    chunk = tl.maximum(tl.cdiv(longest, tl.maximum(choice + 1, 4 * choice - 92)), SHORTEST)
    length = chunk[None, :] * level[:, None] // LEVELS
    items = tl.zeros([CHOICES], tl.int32)
    longer = tl.zeros([LEVELS, CHOICES], tl.int32)
    for start in range(0, batch, BLOCK):
        spans, there = load_spans(lens_ptr, start, batch, window, UNIT, BLOCK)
        pieces = tl.where(there[:, None], count_pieces(spans[:, None], chunk[None, :]), 0)
        items += tl.sum(pieces, 0)
        is_longer = spans[:, None, None] > pieces[:, None, :] * length[None, :, :]  # each piece, than this length
        longer += tl.sum(tl.where(is_longer, pieces[:, None, :], 0), 0)
    width = chunk[None, :] * (level[:, None] + 1) // LEVELS - length
    waves = tl.cdiv(longer.to(tl.int64) * kv_heads, places)
    cost = tl.sum(waves * width, 0) + tl.cdiv(items.to(tl.int64) * kv_heads, places) * PROGRAM
    cost = tl.where(items <= most_items, cost, 1 << 62)
    best = choice == tl.argmin(cost, 0)
    return tl.sum(tl.where(best, chunk, 0), 0), tl.sum(tl.where(best, items, 0), 0)


@triton.jit(
    do_not_specialize=["batch", "window", "kv_heads", "places", "most_items"],
    do_not_specialize_on_alignment=["lens_ptr"],
)
def plan_kernel(
    lens_ptr,  # [B]
    table_ptr,  # int32 [1 + most_items, 4]
    arrived_ptr,  # int32 [B, kv_heads]
    batch, window, kv_heads, places, most_items,
    UNIT: tl.constexpr, SHORTEST: tl.constexpr, PROGRAM: tl.constexpr, CHOICES: tl.constexpr, LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write the table; each program lists ROWS sequences, at the places that those before them in order leave."""
    BLOCK: tl.constexpr = 64
    chunk, items = choose_chunk(
        lens_ptr, batch, window, kv_heads, places, most_items, UNIT, SHORTEST, PROGRAM, CHOICES, LEVELS
    )
    start = tl.program_id(0) * ROWS
    b = start + tl.arange(0, ROWS)
    spans, exists = load_spans(lens_ptr, start, batch, window, UNIT, ROWS)
    pieces = count_pieces(spans, chunk)
    size = tl.cdiv(spans, pieces)
    first = tl.zeros([ROWS], tl.int32)  # items before
    for offset in range(0, batch, BLOCK):
        others, there = load_spans(lens_ptr, offset, batch, window, UNIT, BLOCK)
        their_pieces = tl.where(there, count_pieces(others, chunk), 0)
        their_size = tl.cdiv(others, tl.maximum(their_pieces, 1))
        earlier = (offset + tl.arange(0, BLOCK))[None, :] < b[:, None]
        before = (their_size[None, :] > size[:, None]) | ((their_size[None, :] == size[:, None]) & earlier)
        first += tl.sum(tl.where(before, their_pieces[None, :], 0), 1)
    if tl.program_id(0) == 0:
        tl.store(table_ptr, items)
    for head in range(0, kv_heads):
        tl.store(arrived_ptr + b * kv_heads + head, 0, mask=exists)
    lens = tl.load(lens_ptr + b, mask=exists, other=0).to(tl.int32)
    for begin in range(0, tl.max(pieces, 0), 16):
        piece = begin + tl.arange(0, 16)
        ok = exists[:, None] & (piece[None, :] < pieces[:, None])
        at = table_ptr + (1 + first[:, None] + piece[None, :]) * 4
        tl.store(at, tl.broadcast_to(b[:, None], [ROWS, 16]), mask=ok)
        tl.store(at + 1, tl.broadcast_to(piece[None, :], [ROWS, 16]), mask=ok)
        tl.store(at + 2, tl.broadcast_to(pieces[:, None], [ROWS, 16]), mask=ok)
        tl.store(at + 3, tl.broadcast_to(lens[:, None], [ROWS, 16]), mask=ok)


@triton.jit(
    do_not_specialize=["batch", "reach", "block_q", "kv_heads", "places", "most"],
    do_not_specialize_on_alignment=["query_starts_ptr", "lens_ptr"],
)
def piece_kernel(
    query_starts_ptr, lens_ptr,  # [B + 1], [B]
    piece_ptr,  # int32 [1]
    batch,
    reach,  # keys that a block sees at most
    block_q, kv_heads, places,
    most,  # pieces that there is room for
    SHORTEST: tl.constexpr, CHOICES: tl.constexpr, GOOD: tl.constexpr,
):  # fmt: skip
    """Write the keys that no piece exceeds, by ``launch.num_kv_splits`` of the step's own blocks and lengths."""
    BLOCK: tl.constexpr = 128
    programs = 0
    longest = 1
    for start in range(0, batch, BLOCK):
        b = start + tl.arange(0, BLOCK)
        begin = tl.load(query_starts_ptr + b, mask=b < batch, other=0).to(tl.int32)
        end = tl.load(query_starts_ptr + b + 1, mask=b < batch, other=0).to(tl.int32)
        lens = tl.load(lens_ptr + b, mask=b < batch, other=0).to(tl.int32)
        lens = tl.where(end > begin, lens, 0)
        programs += tl.sum(tl.where(lens > 0, tl.cdiv(end - begin, block_q), 0), 0) * kv_heads
        longest = tl.maximum(longest, tl.max(lens, 0))
    longest = tl.minimum(longest, reach)
    splits = 1 + tl.arange(0, CHOICES)
    waves = tl.maximum(programs, 1) * splits
    fill = waves / (tl.cdiv(waves, places) * places)
    fill = tl.where(splits <= tl.maximum(tl.minimum(most, tl.cdiv(longest, SHORTEST)), 1), fill, 0.0)
    chosen = tl.min(tl.where(fill >= GOOD * tl.max(fill, 0), splits, CHOICES), 0)
    tl.store(piece_ptr, tl.cdiv(longest, chosen))


class Work(NamedTuple):
    """The work list of a step. ``most_items``: no table of this batch size lists more."""

    table: torch.Tensor
    arrived: torch.Tensor
    most_items: int


def make_work(seq_lens: torch.Tensor, max_tokens: int, window: int | None, kv_heads: int, places: int) -> Work | None:
    """Queue the making of the list of ``seq_lens [B]``; None if no sequence can be cut, whatever the lengths.

    ``max_tokens``: no sequence is longer. ``places``: programs that run at a time.
    """
    batch = seq_lens.shape[0]
    longest = max_tokens if window is None else min(max_tokens, window)
    most = most_decode_items(batch, kv_heads, longest, places)
    if most == batch:
        return None
    table = torch.empty(1 + most, 4, dtype=torch.int32, device=seq_lens.device)
    arrived = torch.empty(batch, kv_heads, dtype=torch.int32, device=seq_lens.device)
    plan_kernel[(cdiv(batch, ROWS),)](
        seq_lens, table, arrived, batch, window or _NO_WINDOW, kv_heads, places, most, **CONSTANTS
    )
    return Work(table, arrived, most)


class PrefillPieces:
    """The bounds of a prefill step, and how long the pieces of its blocks are.

    ``max_queries``, ``max_tokens``: no sequence has more new tokens, or tokens.
    """

    def __init__(self, query_starts: torch.Tensor, seq_lens: torch.Tensor, max_queries: int, max_tokens: int) -> None:
        self.query_starts, self.seq_lens = query_starts, seq_lens
        self.max_queries, self.max_tokens = max_queries, max_tokens
        self._pieces: dict[tuple[int, ...], torch.Tensor] = {}

    def piece(self, reach: int, block_q: int, kv_heads: int, places: int, most: int) -> torch.Tensor:
        """The keys of a piece, int32 ``[1]``, chosen on the device for the first layer of this kind."""
        key = (reach, block_q, kv_heads, places, most)
        if key not in self._pieces:
            piece = torch.empty(1, dtype=torch.int32, device=self.seq_lens.device)
            piece_kernel[(1,)](
                self.query_starts, self.seq_lens, piece, len(self.seq_lens), *key, **PIECE_CONSTANTS
            )
            self._pieces[key] = piece
        return self._pieces[key]


class DecodePlan:
    """The work lists of one step. ``max_tokens``: no sequence of the step is longer (a bound is enough)."""

    def __init__(self, seq_lens: torch.Tensor, max_tokens: int) -> None:
        self._seq_lens, self.max_tokens = seq_lens, max_tokens
        self._made: dict[tuple[int | None, int, int], Work | None] = {}

    def work(self, window: int | None, kv_heads: int, places: int) -> Work | None:
        """The list for layers with this window and number of KV heads, made for the first of them."""
        key = (window, kv_heads, places)
        if key not in self._made:
            self._made[key] = make_work(self._seq_lens, self.max_tokens, *key)
        return self._made[key]
