"""The inputs of a step's forward pass: made with NumPy in one buffer, copied to the device at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from kvbench_engine.model.attention import StepTensors
from kvbench_engine.scheduling.step_plan import Scheduled
from kvbench_engine.sequence import Sequence

_ALIGN = 8  # int64: 64 bytes. Triton compiles a kernel anew for a pointer that 16 bytes do not divide


@dataclass(frozen=True)
class StepInputs:
    """int64 views into one buffer on the device. ``T`` tokens of all items, ``S`` items that sample.

    ``pending_at [P]``: indices in ``ids`` of tokens that the host does not know; ``pending_from [P]``: their indices
    among the tokens that the previous launch drew.
    """

    ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    last_tokens: torch.Tensor  # [S] indices of the tokens that are sampled from
    pending_at: torch.Tensor
    pending_from: torch.Tensor
    step: StepTensors

    def fill_in(self, drawn: torch.Tensor) -> None:
        """Copy the pending ids from the previous launch's tokens, on the device."""
        self.ids.index_copy_(0, self.pending_at, drawn.index_select(0, self.pending_from))


class InputBuffers:
    """Makes ``StepInputs``. Two host buffers take turns; for a GPU they are page-locked, and one is written again only
    when the copy from it is done.

    ``page_size`` in tokens. Inputs on a CPU are views of the host buffer: valid until the next call but one.
    """

    def __init__(self, device: torch.device, page_size: int):
        self._device = device
        self._page_size = page_size
        self._on_gpu = device.type == "cuda"
        self._sides = [_HostSide(self._on_gpu), _HostSide(self._on_gpu)]

    def make(self, items: list[Scheduled], page_table: np.ndarray, drawn_at: Mapping[Sequence, int]) -> StepInputs:
        """Make the inputs of a step.

        ``items``: single tokens first. ``page_table [rows, pages]``: first slots, int64. ``drawn_at``: for each
        sequence with a pending token, its index among the previous launch's tokens.
        """
        counts = _column([count for _, count in items])
        rows = _column([seq.row for seq, _ in items])
        starts = _column([seq.num_computed for seq, _ in items])
        tokens = _column([len(seq.token_ids) for seq, _ in items])
        lengths, ends = starts + counts, np.cumsum(counts)
        total, decodes = int(ends[-1]), int((counts == 1).sum())
        size = self._page_size
        if decodes == total:
            row_of_token, positions = rows, starts
        else:
            row_of_token = np.repeat(rows, counts)
            positions = np.arange(total) - np.repeat(ends - lengths, counts)
        ids = _column(_ids_of(items, decodes))
        last = ends - 1
        pending = np.flatnonzero(ids[last] < 0)
        page_starts = page_table[rows, : -(-int(lengths.max()) // size)]
        prefill_lengths, prefill_counts = lengths[decodes:], counts[decodes:]
        views = self._send(
            ids,
            positions,
            page_table[row_of_token, positions // size] + positions % size,
            last[lengths == tokens],
            last[pending],
            _column([drawn_at[items[i].seq] for i in pending.tolist()]),
            page_starts[:decodes],
            lengths[:decodes],
            page_starts[decodes:],
            prefill_lengths,
            np.concatenate([[0], np.cumsum(prefill_counts)]),
        )
        ids, positions, slots, last, pending_at, pending_from, *attention = views
        step = StepTensors(
            decodes,
            slots,
            *attention,
            max_decode_tokens=int(lengths[:decodes].max(initial=0)),
            max_prefill_tokens=int(prefill_lengths.max(initial=0)),
            max_queries=int(prefill_counts.max(initial=0)),
        )
        return StepInputs(ids, positions, last, pending_at, pending_from, step)

    def _send(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Copy the arrays to the device, packed into one."""
        offsets = np.cumsum([0, *(-(-array.size // _ALIGN) * _ALIGN for array in arrays)]).tolist()
        self._sides.reverse()
        side = self._sides[0]
        packed = side.take(offsets[-1])
        filled = side.array
        for array, offset in zip(arrays, offsets, strict=False):
            filled[offset : offset + array.size] = array.ravel()
        if self._on_gpu:
            packed = packed.to(self._device, non_blocking=True)
            side.sent()
        return [
            packed[offset : offset + array.size].view(array.shape)
            for array, offset in zip(arrays, offsets, strict=False)
        ]


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
