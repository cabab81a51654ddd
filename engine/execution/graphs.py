"""Steps as CUDA graphs: one launch instead of one for each kernel.

A graph replays the same kernels on the same addresses, so a step is padded to one of a few sizes and copied into fixed
buffers. A *decode* graph has a size in sequences, each of which computes one token:

    row          0 .. n-1           n .. size-1
    ids          the step's         any id, from an earlier step
    slots        the step's         -1: the KV is not written
    seq_lens     the step's         0: attention reads nothing and returns zeros
    page_starts  the step's         unused; the executor's own tensor, which is not copied

A *mixed* graph, for decodes beside chunks of prompts, has a size in tokens. It is valid for any division of them,
because kernels find each sequence through tensors on the device. Decode attention takes the first rows, as many as
there can be decodes, and prefill attention takes all rows:

    row                    decodes        tokens of prompts       padding
    decode: seq_lens       the step's     0                       -
    prefill: sequence      the first, 0   one a chunk, the step's the next, 0

A sequence of length 0 gets zeros, so the sum of both parts is each row's own result. The last sequences, up to the
chunks that the graph has room for, have no rows. Only the rows that are sampled from pass the model's head.

Padding neither reads nor writes KV. Attention has room for the longest possible sequence, because the number of
programs is part of the graph; what each program of decode does is planned in the graph, from the lengths at its replay.
All graphs share one memory pool, which the largest fills, and one buffer for the logits.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kvbench_engine.model.attention import StepTensors

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]  # runs the function at least once and returns its replay
# ids, positions, step, tokens whose logits are wanted (0: all, as in transformers) -> logits
Forward = Callable[[torch.Tensor, torch.Tensor, StepTensors, torch.Tensor | int], torch.Tensor]

LARGEST_BATCH = 512  # in larger batches the launches take less time than the kernels
LARGEST_MIXED = 8192  # tokens; steps of 2,048 to 8,192 of a model of 0.6B were bound by the host on an H200
FEW_PREFILLS = 16  # chunks that every mixed graph has room for; each one that is missing starts programs without work
PREFILL_TOKENS = 64  # tokens for which a larger graph has room for one chunk

_log = logging.getLogger(__name__)


def decode_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes that are captured, the last one ``max_num_seqs`` or ``LARGEST_BATCH``.

    1, 2, 4, then in steps of 8 up to 64, of 16 up to 256, of 32 up to ``LARGEST_BATCH``.

    Padding is less than half of a small batch, whose time is reading the weights, and less than a fifth of one beyond
    64.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, LARGEST_BATCH + 1, 32)]
    return _up_to(min(max_num_seqs, LARGEST_BATCH), sizes)


def mixed_sizes(max_num_batched_tokens: int) -> list[int]:
    """The numbers of tokens that are captured, the last ``max_num_batched_tokens`` or ``LARGEST_MIXED``.

    16 and 32, then in steps of 32 up to 128, of 64 up to 512, of 128 up to 2,048, of an eighth beyond.

    Products of matrices are computed in tiles of up to 128 rows, so that padding to a whole tile costs little where
    they are the most of a step.
    """
    sizes = [16, *range(32, 128, 32), *range(128, 512, 64), *range(512, 2048, 128)]
    sizes += [*range(2048, 4096, 256), *range(4096, LARGEST_MIXED, 512)]
    return _up_to(min(max_num_batched_tokens, LARGEST_MIXED), sizes)


def _up_to(largest: int, sizes: list[int]) -> list[int]:
    return [*(size for size in sizes if size < largest), largest]


class Fit(NamedTuple):
    """The graph of a step: its size in sequences, or, with ``mixed``, in tokens."""

    mixed: bool
    size: int


@dataclass(frozen=True)
class GraphSizes:
    """The sizes that are captured: of decodes in sequences, of mixed steps in tokens."""

    decodes: tuple[int, ...]
    mixed: tuple[int, ...]

    @classmethod
    def of(cls, max_num_seqs: int, max_num_batched_tokens: int) -> GraphSizes:
        """Make the sizes for an engine of these settings."""
        return cls(tuple(decode_sizes(max_num_seqs)), tuple(mixed_sizes(max_num_batched_tokens)))

    def __str__(self) -> str:
        prompts = f", steps with prompts up to {self.mixed[-1]} tokens" if self.mixed else ""
        return f"decodes up to {self.decodes[-1]} sequences{prompts} ({len(self.decodes) + len(self.mixed)} graphs)"

    @property
    def rows(self) -> int:
        """The most sequences of a step that draw."""
        return self.decodes[-1]

    def describe(self) -> dict[str, list[int]]:
        """Describe the sizes for /server_info. ``prefills``: the most chunks of prompts of each mixed size."""
        prefills = [self.most_prefills(size) for size in self.mixed]
        return {"decodes": [*self.decodes], "mixed": [*self.mixed], "prefills": prefills}

    def most_prefills(self, tokens: int) -> int:
        """The chunks that the mixed graph of ``tokens`` has room for."""
        return min(self.rows, max(FEW_PREFILLS, tokens // PREFILL_TOKENS))

    def fit(self, decodes: int, prefills: int, tokens: int) -> Fit | None:
        """The smallest graph that holds a step; None where there is none.

        ``decodes``: single tokens. ``prefills``: longer chunks. ``tokens``: of both together.
        """
        if decodes + prefills > self.rows:
            return None
        if not prefills:
            return Fit(False, self.decodes[bisect_left(self.decodes, decodes)]) if decodes else None
        if not self.mixed or tokens > self.mixed[-1]:
            return None
        size = self.mixed[bisect_left(self.mixed, tokens)]
        return Fit(True, size) if prefills <= self.most_prefills(size) else None


class StepGraphs:
    """Captured steps of one model and one KV cache.

    ``forward`` plans attention and runs the model. ``page_starts [G, rows, pages]``: the tensor in which steps have
    their page tables. ``max_model_len``: tokens of the longest possible sequence. ``sizes``: what is captured, nothing
    before ``capture``.
    """

    def __init__(
        self,
        forward: Forward,
        sizes: GraphSizes,
        page_starts: torch.Tensor,
        max_model_len: int,
        device: torch.device,
        capture: Capture,
    ):
        self.sizes = sizes
        self._forward = forward
        self._capture = capture
        self._replays: dict[Fit, Replay] = {}
        self._logits: torch.Tensor | None = None  # [rows, vocab]
        rows, tokens = sizes.rows, max((sizes.rows, *sizes.mixed))
        groups, _, pages = page_starts.shape
        sequences = sizes.most_prefills(tokens) + 2  # before and behind the chunks: all that is not a chunk

        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self._ids = numbers(tokens)
        self._positions = numbers(tokens)
        self._sampled = numbers(rows)  # tokens of a mixed step that are sampled from
        self._step = StepTensors(
            num_decodes=rows,
            slots=numbers(groups, tokens) - 1,
            decode_page_starts=page_starts[:, :rows],
            decode_seq_lens=numbers(rows),
            prefill_page_starts=page_starts.new_zeros(groups, sequences, pages),
            prefill_seq_lens=numbers(sequences),
            query_starts=numbers(sequences + 1),
            max_decode_tokens=max_model_len,
            max_prefill_tokens=max_model_len,
            max_queries=0,
            prefills_from=0,
        )

    @torch.inference_mode()
    def capture(self, required: bool = False) -> bool:
        """Capture all sizes, the largest first so that the others reuse its memory.

        False, with a warning, if the model cannot be captured: every step then runs eagerly. Where only mixed steps
        cannot, decodes are replayed all the same, and so are the mixed steps that the memory suffices for.

        Raises:
            ValueError: not all can be captured, and graphs are ``required``.
        """
        self._capture_all("mixed step of {} tokens", [Fit(True, n) for n in self.sizes.mixed], required)
        decodes = self._capture_all("decode of a batch of {}", [Fit(False, n) for n in self.sizes.decodes], required)
        if not decodes:
            self._replays.clear()
            self._logits = None
        else:
            captured = tuple(size for size in self.sizes.mixed if Fit(True, size) in self._replays)
            self.sizes = replace(self.sizes, mixed=captured)
        return decodes

    def _capture_all(self, what: str, fits: list[Fit], required: bool) -> bool:
        for fit in reversed(fits):
            try:
                self._replays[fit] = self._capture(self._mixed_body(fit.size) if fit.mixed else self._body(fit.size))
            except Exception as error:  # of any kind: the engine works without graphs
                step = what.format(fit.size)
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                too_large = fit.mixed and isinstance(error, torch.OutOfMemoryError) and fit != fits[0]
                if required and not too_large:
                    raise ValueError(
                        f"cuda_graphs cannot be true: the {step} cannot be captured ({reason}); leave cuda_graphs out "
                        "to run without them"
                    ) from error
                kind = "decode runs" if not fit.mixed else "such steps run" if too_large else "steps with prompts run"
                _log.warning("%s without CUDA graphs: the %s cannot be captured (%s)", kind, step, reason)
                if too_large:  # a smaller one may fit
                    continue
                for captured in fits:
                    self._replays.pop(captured, None)
                return False
        return True

    def _keep(self, logits: torch.Tensor) -> None:
        """Copy the logits of the first rows to the buffer that all graphs share."""
        if self._logits is None:  # first run
            self._logits = logits.new_zeros(self.sizes.rows, logits.shape[1])
        self._logits[: len(logits)].copy_(logits)

    def _body(self, size: int) -> Callable[[], None]:
        """The decode of the first ``size`` rows of the buffers."""
        whole = self._step
        step = replace(
            whole,
            num_decodes=size,
            slots=whole.slots[:, :size],
            decode_page_starts=whole.decode_page_starts[:, :size],
            decode_seq_lens=whole.decode_seq_lens[:size],
            prefill_page_starts=whole.prefill_page_starts[:, :0],
            prefill_seq_lens=whole.prefill_seq_lens[:0],
            query_starts=whole.query_starts[:1],
            max_prefill_tokens=0,
            prefills_from=None,
        )
        ids, positions = self._ids[:size], self._positions[:size]
        return lambda: self._keep(self._forward(ids, positions, step, 0))

    def _mixed_body(self, size: int) -> Callable[[], None]:
        """Decodes and chunks of ``size`` tokens together, padding included."""
        whole = self._step
        rows, sequences = min(size, self.sizes.rows), self.sizes.most_prefills(size) + 2
        step = replace(
            whole,
            prefill_page_starts=whole.prefill_page_starts[:, :sequences],
            prefill_seq_lens=whole.prefill_seq_lens[:sequences],
            query_starts=whole.query_starts[: sequences + 1],
            num_decodes=rows,
            slots=whole.slots[:, :size],
            decode_page_starts=whole.decode_page_starts[:, :rows],
            decode_seq_lens=whole.decode_seq_lens[:rows],
            max_queries=size,
        )
        ids, positions, sampled = self._ids[:size], self._positions[:size], self._sampled[:rows]
        whole.query_starts[1:].fill_(size)  # for the capture alone: all tokens are one sequence of length 0
        return lambda: self._keep(self._forward(ids, positions, step, sampled))

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, step: StepTensors, last_tokens: torch.Tensor
    ) -> torch.Tensor | None:
        """Logits ``[N, vocab]`` of the ``last_tokens [N]``, valid until the next call; None if no graph fits."""
        fit = self.sizes.fit(step.num_decodes, len(step.prefill_seq_lens), len(ids)) if self._replays else None
        if fit is None or len(last_tokens) > self.sizes.rows:
            return None
        count, padded, static = len(ids), fit.size, self._step
        self._ids[:count].copy_(ids, non_blocking=True)
        self._positions[:count].copy_(positions, non_blocking=True)
        _fill(static.slots[:, :padded], step.slots, -1)
        rows = min(padded, self.sizes.rows)
        _fill(static.decode_seq_lens[:rows], step.decode_seq_lens, 0)
        if step.decode_page_starts.data_ptr() != static.decode_page_starts.data_ptr():
            _copy_tables(static.decode_page_starts, step.decode_page_starts)
        if fit.mixed:
            self._fill_prefills(step, padded)
            _fill(self._sampled[:rows], last_tokens, 0)
        self._replays[fit]()
        assert self._logits is not None
        if fit.mixed or len(last_tokens) == count:
            return self._logits[: len(last_tokens)]
        return self._logits[last_tokens]  # a prompt's chunk may be a single token that draws nothing

    def _fill_prefills(self, step: StepTensors, padded: int) -> None:
        """Fill the prefill tensors: sequence 0 has the decodes' rows, the one behind the chunks the padding."""
        static, count = self._step, len(step.prefill_seq_lens)
        _fill(static.prefill_seq_lens[1:], step.prefill_seq_lens, 0)
        _copy_tables(static.prefill_page_starts[:, 1:], step.prefill_page_starts)
        torch.add(step.query_starts, step.num_decodes, out=static.query_starts[1 : count + 2])
        static.query_starts[count + 2 :].fill_(padded)


def _fill(buffer: torch.Tensor, values: torch.Tensor, rest: int) -> None:
    """Write ``values`` to the first elements of ``buffer`` in its last dimension, and ``rest`` to the others."""
    count = values.shape[-1]
    buffer[..., :count].copy_(values, non_blocking=True)
    if count < buffer.shape[-1]:
        buffer[..., count:].fill_(rest)


def _copy_tables(buffer: torch.Tensor, page_starts: torch.Tensor) -> None:
    """Write ``page_starts`` to the top left corner of each group of ``buffer``."""
    _, rows, pages = page_starts.shape
    buffer[:, :rows, :pages].copy_(page_starts, non_blocking=True)


def cuda_capture() -> Capture:
    """Makes a function that captures with torch.cuda.CUDAGraph.

    All its captures share a memory pool, and a stream, because the libraries allocate tens of MB for each stream.
    """
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
