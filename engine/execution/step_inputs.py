"""The inputs of a step's forward pass: made with NumPy in one buffer, copied to the device at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from itertools import accumulate
from weakref import ref

import numpy as np
import torch

from kvbench_engine.model.attention import StepTensors
from kvbench_engine.scheduling.step_plan import Scheduled
from kvbench_engine.sequence import Sequence

_ALIGN = 8  # int64: 64 bytes. Triton compiles a kernel anew for a pointer that 16 bytes do not divide
_DTYPES = {np.dtype(np.float32): torch.float32, np.dtype(np.int32): torch.int32}  # which are sent two to an int64


@dataclass(frozen=True)
class StepInputs:
    """int64 views into one buffer on the device. ``T`` tokens of all items, ``S`` items that sample.

    ``pending_at [P]``: indices in ``ids`` of tokens that the host does not know; ``pending_from [P]``: their indices
    among the tokens that the previous launch drew. ``columns``: what the caller sent with them. ``sampling``: indices
    of the items that sample.
    """

    ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    last_tokens: torch.Tensor  # [S] indices of the tokens that are sampled from
    pending_at: torch.Tensor
    pending_from: torch.Tensor
    step: StepTensors
    columns: tuple[torch.Tensor, ...] = ()
    sampling: List[int] = ()

    def fill_in(self, drawn: torch.Tensor) -> None:
        """Copy the pending ids from the previous launch's tokens, on the device."""
        self.ids.index_copy_(0, self.pending_at, drawn.index_select(0, self.pending_from))


ColumnsFor = Callable[[list[Sequence], np.ndarray, np.ndarray], List[np.ndarray]]
"""Makes int64 or float32 columns for the sequences that sample, their rows of the page table and numbers of tokens."""


class PageTables:
    """The device's page tables ``[G, rows, pages]``, changed in the order of the steps.

    ``host``: the KV manager's table, int64, a group of layers after another. On a GPU, or if ``copied``, ``by_row`` is
    a copy of it, to which a step sends the entries of the pages that it writes, and both tables are int32: the KV
    budget pays for them. On a CPU ``by_row`` is the manager's own. ``in_order[:, i]`` are the tables of the step's i-th
    sequence; entries beyond those are stale, and so are entries of pages that have left a window.

    ``page_sizes``: tokens of a page of each group. ``whole``: every step has all entries, as many as the host's table.
    """

    def __init__(
        self,
        host: np.ndarray,
        device: torch.device,
        page_sizes: List[int],
        whole: bool = False,
        copied: bool | None = None,
    ):
        self._whole = whole
        groups, rows, self._width = host.shape
        self._sizes = page_sizes[0] if len(set(page_sizes)) == 1 else np.array(page_sizes)[:, None]
        self._first_of_group = np.arange(groups)[:, None] * rows * self._width
        self._is_copy = device.type != "cpu" if copied is None else copied
        self.dtype = np.int32 if self._is_copy else np.int64
        self.in_order = torch.zeros(host.shape, dtype=torch.int32 if self._is_copy else torch.int64, device=device)
        self.use(host)

    def use(self, host: np.ndarray) -> None:
        """Read the table of another KV manager of the same capacity; captured steps go on reading ``in_order``."""
        assert host.shape == self.in_order.shape
        self.host = host
        self._by_row = torch.zeros_like(self.in_order) if self._is_copy else torch.from_numpy(host)
        self._holders: list[tuple[ref[Sequence], int] | None] = [None] * host.shape[1]  # whose entries a row has

    def pages_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The pages of positions ``[N]`` and their places in them, both ``[G, N]``, or ``[N]`` for all groups."""
        return np.divmod(positions, self._sizes)

    def flat(self, rows: np.ndarray, pages: np.ndarray | int) -> np.ndarray:
        """Flat indices ``[G, N]`` of the entries of ``pages [N]`` or ``[G, N]`` in ``rows [N]``."""
        return self._first_of_group + rows * self._width + pages

    def unsent(self, items: List[Scheduled], rows: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Find the flat indices of entries that ``by_row`` lacks; a step writes pages ``first`` to ``last [G, N]``.

        All entries of a sequence that is new in its row, else those of the pages that are written: no others change.
        """
        if not self._is_copy:
            return rows[:0]
        first, holders = first.copy(), self._holders
        for index, (seq, _) in enumerate(items):
            holder = holders[seq.row]
            if holder is None or holder[0]() is not seq or holder[1] != seq.num_preemptions:
                holders[seq.row] = (ref(seq), seq.num_preemptions)
                first[..., index] = 0
        starts = self.flat(rows, first)
        counts = np.broadcast_to(last - first + 1, starts.shape).ravel()
        ends = np.cumsum(counts)
        return np.arange(ends[-1]) + np.repeat(starts.ravel() - (ends - counts), counts)

    def columns(self, pages: np.ndarray) -> int:
        """The columns of a step whose last pages are ``pages``."""
        return self._width if self._whole else int(pages.max()) + 1

    def gather(self, rows: torch.Tensor, pages: int, at: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        """Store ``entries`` at flat indices ``at``, then put ``rows [N]`` in order: ``[G, N, pages]``, first slots."""
        if len(at):
            self._by_row.view(-1).index_copy_(0, at, entries)
        page_starts = self.in_order[:, : len(rows), :pages]
        torch.index_select(self._by_row[:, :, :pages], 1, rows, out=page_starts)
        return page_starts

    def store(self, at: torch.Tensor, at_in_order: torch.Tensor, entries: torch.Tensor) -> None:
        """Store ``entries`` at flat indices ``at`` of ``by_row`` and ``at_in_order`` of the step's sequences."""
        self.in_order.view(-1).index_copy_(0, at_in_order, entries)
        if self._is_copy:
            self._by_row.view(-1).index_copy_(0, at, entries)


class InputBuffers:
    """Makes ``StepInputs``. Two host buffers take turns; for a GPU they are page-locked, and one is written again only
    when the copy from it is done.

    ``page_table``: the KV manager's own, first slots, int64 ``[G, rows, pages]``. ``page_sizes``: tokens of a page of
    each group. ``whole``: see ``PageTables``. Inputs on a CPU are views of the host buffer: valid until the next call
    but one; their page tables are valid until the next.
    """

    def __init__(self, device: torch.device, page_sizes: List[int], page_table: np.ndarray, whole: bool = False):
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._sides = [_HostSide(self._on_gpu), _HostSide(self._on_gpu)]
        self._order = torch.arange(page_table.shape[1], device=device)
        self.tables = PageTables(page_table, device, page_sizes, whole)
        self._starts = np.zeros(0, np.int64)  # of the last step that may be repeated
        self._first_entries = np.zeros((1, 0), np.int64)  # of its sequences, flat indices [G, N]

    def make(
        self, items: List[Scheduled], drawn_at: Mapping[Sequence, int], columns_for: ColumnsFor = lambda *sampling: []
    ) -> StepInputs:
        """Make the inputs of a step.

        ``items``: single tokens first. ``drawn_at``: for each sequence with a pending token, its index among the
        previous launch's tokens. ``columns_for``: makes arrays that are sent with the rest.
        """
        sequences = [seq for seq, _ in items]
        counts = _column([count for _, count in items])
        rows = _column([seq.row for seq in sequences])
        starts = _column([seq.num_computed for seq in sequences])
        tokens = _column([len(seq.token_ids) for seq in sequences])
        lengths, ends = starts + counts, np.cumsum(counts)
        total, decodes = int(ends[-1]), int((counts == 1).sum())
        tables, host = self.tables, self.tables.host.ravel()
        if decodes == total:
            row_of_token, positions = rows, starts
            self._first_entries, self._starts = tables.flat(rows, 0), starts
        else:
            row_of_token = np.repeat(rows, counts)
            positions = np.arange(total) - np.repeat(ends - lengths, counts)
        ids = _column(_ids_of(items, decodes))
        last = ends - 1
        pending = np.flatnonzero(ids[last] < 0)
        sampling = np.flatnonzero(lengths == tokens)
        drawing = sequences if len(sampling) == len(items) else [sequences[i] for i in sampling.tolist()]
        prefill_lengths, prefill_counts = lengths[decodes:], counts[decodes:]
        pages, offsets = tables.pages_at(positions)
        first_pages, last_pages = tables.pages_at(starts)[0], tables.pages_at(lengths - 1)[0]
        unsent = tables.unsent(items, rows, first_pages, last_pages)
        views = self._send(
            ids,
            positions,
            (host.take(tables.flat(row_of_token, pages)) + offsets).ravel(),
            last[sampling],
            last[pending],
            _column([drawn_at[sequences[i]] for i in pending.tolist()]),
            lengths[:decodes],
            prefill_lengths,
            np.concatenate([[0], np.cumsum(prefill_counts)]),
            rows,
            unsent,
            host[unsent].astype(tables.dtype, copy=False),
            *columns_for(drawing, rows[sampling], tokens[sampling]),
        )
        ids, positions, slots, last, pending_at, pending_from, *attention, on_device, at, entries = views[:12]
        page_starts = tables.gather(on_device, tables.columns(last_pages), at, entries)
        decode_lengths, prefill_lengths_sent, query_starts = attention
        step = StepTensors(
            decodes,
            slots.view(len(page_starts), total),
            page_starts[:, :decodes],
            decode_lengths,
            page_starts[:, decodes:],
            prefill_lengths_sent,
            query_starts,
            max_decode_tokens=int(lengths[:decodes].max(initial=0)),
            max_prefill_tokens=int(prefill_lengths.max(initial=0)),
            max_queries=int(prefill_counts.max(initial=0)),
        )
        columns = tuple(views[12:])
        return StepInputs(ids, positions, last, pending_at, pending_from, step, columns, sampling.tolist())

    def repeat(self, ids: torch.Tensor | np.ndarray, columns: List[np.ndarray] = ()) -> StepInputs:
        """Make the inputs of the last call's sequences, which all decoded, each with one token more.

        ``ids [N]`` int64: the tokens, on the device already if the host does not know them.
        """
        tables = self.tables
        starts = self._starts = self._starts + 1
        pages, offsets = tables.pages_at(starts)
        at = self._first_entries + pages
        slots, lengths, count = tables.host.ravel().take(at) + offsets, starts + 1, len(starts)
        begun = np.flatnonzero(np.broadcast_to(offsets == 0, at.shape))  # the entries of new pages
        at_in_order = tables.flat(np.arange(count), pages).ravel()[begun] if len(begun) else begun
        views = self._send(
            np.asarray([], np.int64) if isinstance(ids, torch.Tensor) else ids,
            starts,
            slots.ravel(),
            lengths,
            at.ravel()[begun],
            at_in_order,
            slots.ravel()[begun].astype(tables.dtype, copy=False),
            lengths[:0],
            *columns,
        )
        on_device, positions, slots, seq_lens, at, at_in_order, entries, none = views[:8]
        if len(begun):
            tables.store(at, at_in_order, entries)
        order = self._order[:count]
        page_starts = tables.in_order[:, :count, : tables.columns(pages)]
        slots, longest = slots.view(len(page_starts), -1), int(lengths.max())
        step = StepTensors(
            count, slots, page_starts, seq_lens, page_starts[:, :0], none, self._order[:1], longest, 0, 0
        )
        ids = ids if isinstance(ids, torch.Tensor) else on_device
        return StepInputs(ids, positions, order, none, none, step, tuple(views[8:]))

    def _send(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Copy int64, int32 or float32 arrays to the device, packed into one."""
        words = [array if array.dtype == np.int64 else _as_words(array) for array in arrays]
        offsets = list(accumulate((-(-array.size // _ALIGN) * _ALIGN for array in words), initial=0))
        self._sides.reverse()
        side = self._sides[0]
        packed = side.take(offsets[-1])
        filled = side.array
        for array, offset in zip(words, offsets, strict=False):
            filled[offset : offset + array.size] = array
        if self._on_gpu:
            packed = packed.to(self._device, non_blocking=True)
            side.sent()
        return [
            packed[offset : offset + word.size]
            if word is array
            else packed[offset : offset + word.size].view(_DTYPES[array.dtype])[: array.size]
            for array, word, offset in zip(arrays, words, offsets, strict=False)
        ]


def _as_words(column: np.ndarray) -> np.ndarray:
    """Pack values of 4 bytes two to an int64, with a zero behind an odd number."""
    return np.pad(column, (0, len(column) % 2)).view(np.int64)


class _HostSide:
    """One int64 buffer on the host, which only grows."""

    def __init__(self, pinned: bool):
        self._pinned = pinned
        self._copied = torch.cuda.Event() if pinned else None
        self._resize(0)

    def _resize(self, size: int) -> None:
        self._tensor = torch.empty(size, dtype=torch.int64, pin_memory=self._pinned)
        self.array = self._tensor.numpy()

    def take(self, size: int) -> torch.Tensor:
        """A view ``[size]`` to write to. Waits for the last copy from it, which was two steps ago."""
        if self._copied is not None:
            self._copied.synchronize()
        if size > len(self.array):
            self._resize(1 << (size - 1).bit_length())
        return self._tensor[:size]

    def sent(self) -> None:
        """Note that the copy to the device is queued."""
        self._copied.record()


def _column(numbers: list[int]) -> np.ndarray:
    return np.fromiter(numbers, dtype=np.int64, count=len(numbers))


def _ids_of(items: list[Scheduled], decodes: int) -> list[int]:
    """Token ids of all items in order; ``PENDING`` where the host does not know them."""
    ids = [seq.token_ids[seq.num_computed] for seq, _ in items[:decodes]]
    for seq, count in items[decodes:]:
        ids += seq.token_ids[seq.num_computed : seq.num_computed + count]
    return ids
