"""Launches the Triton kernels: their arguments, their grids, and the buffers that splits need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvbench_kernels.api import AttentionOptions, KVCache
from kvbench_kernels.dependent_launch import dependent_launch
from kvbench_kernels.launch import (
    PROGRAMS_PER_SM,
    SHORT_QUERIES,
    KernelShape,
    Tiles,
    cdiv,
    fp8_hardware,
    kernel_page_size,
    num_kv_splits,
    prefill_blocks,
    programs_at_a_time,
)
from kvbench_kernels.quantized import QuantizedKV, shares_rows
from kvbench_kernels.triton_codes import FP8_UNIT
from kvbench_kernels.triton_common import LOG2E
from kvbench_kernels.triton_decode import decode_constants, decode_kernel, tiles_of_decode
from kvbench_kernels.triton_kv import write_constants, write_kv_kernel
from kvbench_kernels.triton_plan import DecodePlan, PrefillPieces
from kvbench_kernels.triton_prefill import prefill_constants, prefill_kernel, reduce_constants, reduce_kernel


@dataclass(frozen=True)
class Chip:
    """A chip that launches depend on. ``arch``: 10 x major + minor compute capability; ``num_sms``: multiprocessors."""

    arch: int
    num_sms: int


class Side(NamedTuple):
    """K or V of a layer as the kernels take it. ``scales`` is ``rows`` again where a token and head has none."""

    rows: torch.Tensor
    scales: torch.Tensor
    scale: float


def is_capturing(device: torch.device) -> bool:
    """Tests whether what is launched now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Splits:
    """Memory for the parts of split attention: one buffer a device and stream, for all layers and steps.

    It grows by doubling. What it outgrew is kept if it was taken during the capture of a CUDA graph, which goes on
    writing to the addresses that it was captured with. Work on one stream is in order, so that layers and steps can
    share; graphs that were captured on one stream share a buffer too and must not be replayed at the same time.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._captured: dict[int, torch.Tensor] = {}  # by address

    def take(
        self, rows: int, v_dim: int, device: torch.device, tokens: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Parts ``[rows, v_dim]`` and lse ``[rows]``, float32, and int32 ``[tokens]``, any contents."""
        key = (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
        buffer, end = self._buffers.get(key), rows * (v_dim + 1)
        if buffer is None or buffer.numel() < end + tokens:
            size = 1 << (end + tokens - 1).bit_length()
            buffer = self._buffers[key] = torch.empty(size, dtype=torch.float32, device=device)
        if is_capturing(device):
            self._captured[buffer.data_ptr()] = buffer
        parts, lse = buffer[: rows * v_dim], buffer[rows * v_dim : end]
        return parts.view(rows, v_dim), lse, buffer[end : end + tokens].view(torch.int32)


def side_of(cache: KVCache) -> Side:
    """Convert ``cache`` for the kernels.

    Raises:
        ValueError: there are gaps between heads, or between values.
    """
    if isinstance(cache, QuantizedKV):
        rows, scales, scale = cache.codes, cache.scales, cache.scale
    else:
        rows, scales, scale = cache, None, 1.0
    gaps = rows.stride(2) != 1 or (rows.stride(1) != rows.shape[2] and rows.shape[1] > 1)
    if gaps or (scales is not None and not scales.is_contiguous()):
        raise ValueError(
            f"rows of a cache {tuple(rows.shape)} with strides {rows.stride()} must be dense for the triton kernels: "
            "allocate it as [slots, kv_heads, head_dim], and scales as [slots, kv_heads]"
        )
    return Side(rows, rows if scales is None else scales, scale)


def kind_of(cache: KVCache) -> str:
    """The kernels' name of the cache's format."""
    return cache.format.name if isinstance(cache, QuantizedKV) else "auto"


def launch_write(k: torch.Tensor, v: torch.Tensor, k_cache: KVCache, v_cache: KVCache, slots: torch.Tensor) -> None:
    """Store ``k [T, Hkv, D]``, ``v [T, Hkv, Dv]`` at ``slots [T]``, skipping slots < 0."""
    tokens, kv_heads, dim = k.shape
    k_side, v_side = side_of(k_cache), side_of(v_cache)
    v_dim = 0 if shares_rows(k_cache, v_cache) else v.shape[2]
    constants = write_constants(kv_heads, dim, v_dim, kind_of(k_cache))
    write_kv_kernel[(tokens, cdiv(kv_heads, constants["HEADS_PAD"]))](
        k, v, k_side.rows, v_side.rows, k_side.scales, v_side.scales, slots, k_side.scale, v_side.scale,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), k_side.rows.stride(0), v_side.rows.stride(0),
        **constants, **dependent_launch(k.device),
    )  # fmt: skip


class Attention:
    """One call of attention: everything that decode and prefill launches have in common.

    ``k_cache`` and ``v_cache`` are plain tensors or ``QuantizedKV`` of one format; ``chip``: what it will run on.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k_cache: KVCache,
        v_cache: KVCache,
        page_starts: torch.Tensor,
        page_size: int,
        options: AttentionOptions,
        out: torch.Tensor,
        chip: Chip,
        tiles: Tiles | None = None,
    ) -> None:
        self.q, self.out, self.page_starts, self.options, self.chip = q, out, page_starts, options, chip
        self.k, self.v = side_of(k_cache), side_of(v_cache)
        kind, latent = kind_of(k_cache), shares_rows(k_cache, v_cache)
        if not out.is_contiguous():
            raise ValueError(f"out {tuple(out.shape)} with strides {out.stride()} must be contiguous")
        self.shape = KernelShape(
            q.shape[1], k_cache.shape[1], q.shape[2], v_cache.shape[2], q.element_size(),
            kernel_page_size(page_size, page_starts.shape[1]), kind, chip.arch,
            options.sliding_window, options.softcap is not None, options.sinks is not None, tiles, latent,
        )  # fmt: skip
        # What fp8_value() leaves out of the values of e4m3 goes into the scales.
        unit = FP8_UNIT if kind == "fp8_e4m3" and not fp8_hardware(kind, chip.arch) else 1.0
        score_scale = options.scale * self.k.scale * unit * LOG2E
        cap = options.softcap
        self.scalars = (
            score_scale if cap is None else 2 * score_scale / cap,
            0.0 if cap is None else cap * LOG2E,
            self.v.scale * unit,
        )

    def decode(self, seq_lens: torch.Tensor, plan: DecodePlan, buffers: Splits) -> None:
        """Launch decode: ``q [B, H, D]`` -> ``out [B, H, Dv]``. ``plan``: of these lengths."""
        shape = self.shape
        places = programs_at_a_time(tiles_of_decode(shape).num_warps, self.chip.num_sms)
        work = plan.work(shape.window, shape.num_groups, places)
        constants = decode_constants(shape, work is not None) | dependent_launch(self.q.device)
        if work is None:
            out, grid = self.out, (self.q.shape[0] * shape.num_groups,)
            decode_kernel[grid](*self._inputs(seq_lens), out, out, out, out, out, *self._numbers(), **constants)
            return
        parts, lse, _ = buffers.take(work.most_items * shape.num_heads, shape.v_head_dim, self.q.device)
        decode_kernel[(work.most_items * shape.num_groups,)](
            *self._inputs(seq_lens), self.out, work.table, parts, lse, work.arrived, *self._numbers(), **constants
        )

    def prefill(self, plan: PrefillPieces, buffers: Splits) -> None:
        """Launch prefill: ``q [T, H, D]`` -> ``out [T, H, Dv]``."""
        shape, window = self.shape, self.shape.window
        tokens, batch = self.q.shape[0], plan.seq_lens.shape[0]
        short = plan.max_queries <= SHORT_QUERIES
        block_q = prefill_constants(shape, 1, short)["BLOCK_M"] // shape.group
        useful = prefill_blocks(tokens, batch, plan.max_queries, block_q)
        longest = plan.max_tokens if window is None else min(plan.max_tokens, window + block_q - 1)
        splits = num_kv_splits(useful * shape.num_groups, longest, self.chip.num_sms)
        parts = lse = pieces = piece = self.out
        if splits > 1:
            rows, places = tokens * splits * shape.num_heads, PROGRAMS_PER_SM * self.chip.num_sms
            parts, lse, pieces = buffers.take(rows, shape.v_head_dim, self.q.device, tokens)
            piece = plan.piece(longest, block_q, shape.num_groups, places, splits)
        blocks, early = tokens // block_q + batch, dependent_launch(self.q.device)
        inputs = self._inputs(plan.query_starts, plan.seq_lens)
        prefill_kernel[(blocks * shape.num_groups, splits)](
            *inputs, self.out, parts, lse, pieces, piece, *self._numbers(),
            batch, **prefill_constants(shape, splits, short), **early,
        )  # fmt: skip
        if splits > 1:
            constants = reduce_constants(shape.num_heads, shape.v_head_dim, shape.sinks)
            reduce_kernel[(tokens * cdiv(shape.num_heads, constants["BLOCK_H"]),)](
                parts, lse, inputs[-1], self.out, pieces, splits, **constants, **early
            )

    def _inputs(self, *lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors that both kernels read, in their order."""
        q, k, v = self.q, self.k, self.v
        sinks = q if self.options.sinks is None else self.options.sinks
        return q, k.rows, v.rows, k.scales, v.scales, self.page_starts, *lengths, sinks

    def _numbers(self) -> tuple[float | int, ...]:
        """The scalars and strides of both kernels, in their order."""
        q = self.q
        strides = q.stride(0), q.stride(1), self.k.rows.stride(0), self.v.rows.stride(0), self.page_starts.stride(0)
        return *self.scalars, *strides
