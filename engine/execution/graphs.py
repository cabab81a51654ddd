"""Decode with CUDA graphs: a step of single tokens is one launch instead of one for each kernel.

A graph replays the same kernels on the same addresses, so every batch is padded to one of a few sizes and copied into
fixed buffers:

    row          0 .. n-1           n .. size-1
    ids          the step's         any id, from an earlier step
    slots        the step's         -1: the KV is not written
    seq_lens     the step's         0: attention reads nothing and returns zeros
    page_starts  the step's         unused

so padding neither reads nor writes KV. Attention has room for the longest possible sequence, because the number of
programs is part of the graph; what each of them does is planned in the graph, from the lengths at its replay. All
graphs share one memory pool and one buffer for the logits.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

import torch

from engine.model.attention import StepTensors

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]  # runs the function at least once and returns its replay
Forward = Callable[[torch.Tensor, torch.Tensor, StepTensors], torch.Tensor]  # ids, positions, step -> logits

LARGEST_BATCH = 512  # in larger batches the launches take less time than the kernels

_log = logging.getLogger(__name__)


def padded_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes that are captured: 1, 2, 4, then steps of 8 to 64, of 16 to 256, of 32 to ``LARGEST_BATCH``.

    Padding is less than half of a small batch, whose time is reading the weights, and less than a fifth of one beyond
    64. The last size is ``max_num_seqs``, ``LARGEST_BATCH`` at most.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, LARGEST_BATCH + 1, 32)]
    largest = min(max_num_seqs, LARGEST_BATCH)
    return [*(size for size in sizes if size < largest), largest]


class DecodeGraphs:
    """Captured decode steps of one model and one KV cache.

    ``forward`` plans attention and runs the model. ``page_table_shape``: most sequences, most pages of one.
    ``max_model_len``: tokens of the longest possible sequence.
    """

    def __init__(
        self,
        forward: Forward,
        page_table_shape: tuple[int, int],
        max_model_len: int,
        device: torch.device,
        capture: Capture,
    ):
        self.sizes = padded_sizes(page_table_shape[0])
        rows, pages = self.sizes[-1], page_table_shape[1]
        self._forward = forward
        self._capture = capture
        self._ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._ids)
        self._page_starts = torch.zeros(rows, pages, dtype=torch.int64, device=device)
        self._nothing = torch.zeros(0, dtype=torch.int64, device=device)
        self._step = StepTensors(
            num_decodes=rows,
            slots=torch.full_like(self._ids, -1),
            decode_page_starts=self._page_starts,
            decode_seq_lens=torch.zeros_like(self._ids),
            prefill_page_starts=self._page_starts[:0],
            prefill_seq_lens=self._nothing,
            query_starts=torch.zeros(1, dtype=torch.int64, device=device),
            max_decode_tokens=max_model_len,
            max_prefill_tokens=0,
            max_queries=0,
        )
        self._logits: torch.Tensor | None = None  # [rows, vocab]
        self._replays: dict[int, Replay] = {}

    @torch.inference_mode()
    def capture(self, required: bool = False) -> bool:
        """Capture all sizes, the largest first so that the others reuse its memory.

        False, with a warning, if the model cannot be captured (it waits for the GPU during its forward, as mixtures of
        experts may): every step then runs eagerly.

        Raises:
            ValueError: it cannot, and graphs are ``required``.
        """
        try:
            for size in reversed(self.sizes):
                self._replays[size] = self._capture(self._body(size))
        except Exception as error:  # of any kind: decode works without graphs
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            if required:
                raise ValueError(
                    f"cuda_graphs cannot be true: the decode of a batch of {size} cannot be captured ({reason}); "
                    "leave cuda_graphs out to run without them"
                ) from error
            _log.warning("decode runs without CUDA graphs: a batch of %d cannot be captured (%s)", size, reason)
            self._replays.clear()
            self._logits = None
        return bool(self._replays)

    def _body(self, size: int) -> Callable[[], None]:
        """The decode of the first ``size`` rows of the buffers."""
        whole = self._step
        step = replace(
            whole,
            num_decodes=size,
            slots=whole.slots[:size],
            decode_page_starts=whole.decode_page_starts[:size],
            decode_seq_lens=whole.decode_seq_lens[:size],
        )
        ids, positions = self._ids[:size], self._positions[:size]

        def body() -> None:
            logits = self._forward(ids, positions, step)
            if self._logits is None:  # first run of the largest size
                self._logits = logits.new_zeros(self.sizes[-1], logits.shape[1])
            self._logits[:size].copy_(logits)

        return body

    def run(self, ids: torch.Tensor, positions: torch.Tensor, step: StepTensors) -> torch.Tensor | None:
        """Logits ``[n, vocab]`` of a step of n single tokens, valid until the next call; None if no graph fits."""
        count = step.num_decodes
        if not self._replays or count != len(ids) or not 0 < count <= self.sizes[-1]:
            return None
        size = self.sizes[bisect_left(self.sizes, count)]
        static = self._step
        self._ids[:count].copy_(ids, non_blocking=True)
        self._positions[:count].copy_(positions, non_blocking=True)
        static.slots[:count].copy_(step.slots, non_blocking=True)
        static.decode_seq_lens[:count].copy_(step.decode_seq_lens, non_blocking=True)
        width = step.decode_page_starts.shape[1]
        self._page_starts[:count, :width].copy_(step.decode_page_starts, non_blocking=True)
        if count < size:
            static.slots[count:size].fill_(-1)
            static.decode_seq_lens[count:size].zero_()
        self._replays[size]()
        assert self._logits is not None
        return self._logits[:count]


def cuda_capture() -> Capture:
    """Captures with torch.cuda.CUDAGraph. All captures of one call share a memory pool, and a stream, because the
    libraries allocate tens of MB for each stream."""
    pool = torch.cuda.graph_pool_handle()
    aside = torch.cuda.Stream()

    def capture(body: Callable[[], None]) -> Replay:
        before = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        try:
            # Run once before: kernels compile and libraries allocate, which a capture does not allow.
            aside.wait_stream(before)
            with torch.cuda.stream(aside):
                body()
            before.wait_stream(aside)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=pool, stream=aside):
                body()
        finally:
            torch.cuda.set_stream(before)  # a failed capture leaves its own stream current
        return graph.replay

    return capture
