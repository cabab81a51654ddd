"""From tensors to launches: what the Triton kernels get, in which grid, and the buffers that splits need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.api import AttentionOptions, KVCache
from kernels.launch import (
    MAX_SPLITS,
    SHORT_QUERIES,
    KernelShape,
    Tiles,
    cdiv,
    fp8_hardware,
    kernel_page_size,
    next_power_of_two,
    num_kv_splits,
    prefill_blocks,
)
from kernels.quantized import QuantizedKV
from kernels.triton_codes import FP8_UNIT
from kernels.triton_common import LOG2E, reduce_kernel
from kernels.triton_decode import decode_constants, decode_kernel
from kernels.triton_kv import write_constants, write_kv_kernel
from kernels.triton_prefill import prefill_constants, prefill_kernel


@dataclass(frozen=True)
class Chip:
    """What launches depend on. ``arch``: 10 x major + minor compute capability; ``num_sms``: multiprocessors."""

    arch: int
    num_sms: int


class Side(NamedTuple):
    """K or V of a layer as the kernels take it. ``scales`` is ``rows`` again where a token and head has none."""

    rows: torch.Tensor
    scales: torch.Tensor
    scale: float


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now goes into a CUDA graph."""
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

    def take(self, rows: int, splits: int, v_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Parts ``[rows, splits, v_dim]`` and lse ``[rows, splits]``, float32, any contents."""
        key = (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
        count = rows * splits
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < count * (v_dim + 1):
            size = 1 << (count * (v_dim + 1) - 1).bit_length()
            buffer = self._buffers[key] = torch.empty(size, dtype=torch.float32, device=device)
        if is_capturing(device):
            self._captured[buffer.data_ptr()] = buffer
        parts, lse = buffer[: count * v_dim], buffer[count * v_dim : count * (v_dim + 1)]
        return parts.view(rows, splits, v_dim), lse.view(rows, splits)


def side_of(cache: KVCache) -> Side:
    """``cache`` as the kernels take it.

    Raises:
        ValueError: there are gaps between heads, or between values.
    """
    if isinstance(cache, QuantizedKV):
        rows, scales, scale = cache.codes, cache.scales, cache.scale
    else:
        rows, scales, scale = cache, None, 1.0
    gaps = rows.stride(2) != 1 or rows.stride(1) != rows.shape[2]
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
    constants = write_constants(kv_heads, dim, v.shape[2], kind_of(k_cache))
    write_kv_kernel[(tokens, cdiv(kv_heads, constants["HEADS_PAD"]))](
        k, v, k_side.rows, v_side.rows, k_side.scales, v_side.scales, slots, k_side.scale, v_side.scale,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), k_side.rows.stride(0), v_side.rows.stride(0),
        **constants,
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
        kind = kind_of(k_cache)
        if not out.is_contiguous():
            raise ValueError(f"out {tuple(out.shape)} with strides {out.stride()} must be contiguous")
        self.shape = KernelShape(
            q.shape[1], k_cache.shape[1], q.shape[2], v_cache.shape[2], q.element_size(),
            kernel_page_size(page_size, page_starts.shape[1]), kind, chip.arch,
            options.sliding_window, options.softcap is not None, options.sinks is not None, tiles,
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

    def num_splits(self, blocks: int, max_tokens: int) -> int:
        """Pieces for ``blocks`` programs a KV head, none of which attends to more than ``max_tokens``."""
        return num_kv_splits(blocks * self.shape.num_kv_heads, max_tokens, self.chip.num_sms)

    def decode(self, seq_lens: torch.Tensor, max_tokens: int, buffers: Splits) -> None:
        """``q [B, H, D]`` -> ``out [B, H, Dv]``."""
        window = self.options.sliding_window
        batch = self.q.shape[0]
        splits = self.num_splits(batch, max_tokens if window is None else min(max_tokens, window))
        self._run(decode_kernel, decode_constants(self.shape, splits), batch, splits, buffers, (seq_lens,), ())

    def prefill(
        self, query_starts: torch.Tensor, seq_lens: torch.Tensor, max_queries: int, max_tokens: int, buffers: Splits
    ) -> None:
        """``q [T, H, D]`` -> ``out [T, H, Dv]``."""
        window = self.options.sliding_window
        tokens, batch = self.q.shape[0], seq_lens.shape[0]
        short = max_queries <= SHORT_QUERIES
        block_q = prefill_constants(self.shape, 1, short)["BLOCK_M"] // self.shape.group
        useful = prefill_blocks(tokens, batch, max_queries, block_q)
        splits = self.num_splits(useful, max_tokens if window is None else min(max_tokens, window + block_q - 1))
        constants, blocks = prefill_constants(self.shape, splits, short), tokens // block_q + batch
        self._run(prefill_kernel, constants, blocks, splits, buffers, (query_starts, seq_lens), (batch,))

    def _run(self, kernel, constants, blocks, splits, buffers, lengths, extra) -> None:
        """Launch ``kernel`` on (blocks, KV heads, splits), and the reduction where there are parts to add.

        Blocks come first, because the other two dimensions of a grid end at 65,535.
        """
        q, k, v, out, shape = self.q, self.k, self.v, self.out, self.shape
        sinks = q if self.options.sinks is None else self.options.sinks
        parts = lse = out
        if splits > 1:
            parts, lse = buffers.take(out.shape[0] * shape.num_heads, splits, shape.v_head_dim, q.device)
        kernel[(blocks, shape.num_kv_heads, splits)](
            q, k.rows, v.rows, k.scales, v.scales, self.page_starts, *lengths, sinks, parts, lse, *self.scalars,
            q.stride(0), q.stride(1), k.rows.stride(0), v.rows.stride(0), self.page_starts.stride(0), *extra,
            **constants,
        )  # fmt: skip
        if splits > 1:
            reduce_kernel[(out.shape[0] * shape.num_heads,)](
                parts, lse, sinks, out, splits, HEADS=shape.num_heads, DV=shape.v_head_dim,
                DV_PAD=next_power_of_two(shape.v_head_dim), SPLITS_PAD=MAX_SPLITS,
                HAS_SINKS=shape.sinks, num_warps=4,
            )  # fmt: skip
