"""The GPU backend: all attention and the KV write in Triton.

With TRITON_INTERPRET=1 (set before Triton is imported) the same kernels run on CPU tensors: slow,
and meant for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from triton import knobs

from kernels.api import AttentionOptions, KVPair, check_heads, dense_rows
from kernels.kv_formats import find_format
from kernels.launch import num_kv_splits
from kernels.reference import TorchBackend
from kernels.triton_decode import launch_decode
from kernels.triton_kv import launch_write_kv
from kernels.triton_prefill import launch_prefill

MAX_HEAD_DIM = 256  # larger tiles leave too little shared memory for a pipeline
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class DecodePlan:
    """``max_tokens``: no sequence of the step is longer (a bound is enough)."""

    max_tokens: int


@dataclass(frozen=True)
class PrefillPlan:
    """No sequence of the step has more new tokens than ``max_queries``, or is longer than ``max_tokens``."""

    max_queries: int
    max_tokens: int


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


class TritonBackend(TorchBackend):
    """float16, bfloat16 or float32 on CUDA; what is not overridden is torch's. See kernels.api.AttentionBackend."""

    name = "triton"

    def check_support(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_cache_dtype: str = "auto",
    ) -> None:
        check_heads(num_heads, num_kv_heads, head_dim, v_head_dim or head_dim, MAX_HEAD_DIM)
        if num_heads // num_kv_heads > 64:
            raise ValueError(
                f"{num_heads} query heads on {num_kv_heads} KV heads are more than the 64 per KV head that "
                "the triton kernel backend serves: use the torch backend for this model"
            )
        if find_format(kv_cache_dtype) is not None:
            raise ValueError(
                f"the triton kernel backend serves no quantised KV cache, and kv_cache_dtype is {kv_cache_dtype}: "
                "use the torch backend (kernel_backend torch, or auto)"
            )
        if dtype not in _DTYPES:
            raise ValueError(
                f"the triton kernel backend cannot compute with a {dtype} KV cache: use float16, bfloat16 or float32"
            )
        if torch.device(device).type != "cuda" and not knobs.runtime.interpret:
            raise ValueError(
                f"the triton kernel backend needs a CUDA device, not {device}: use default_backend(device, dtype)"
            )

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        if k.shape[0]:
            launch_write_kv(dense_rows(k), dense_rows(v), k_cache, v_cache, slots)

    def decode_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_starts: torch.Tensor,
        seq_lens: torch.Tensor,
        page_size: int,
        options: AttentionOptions,
        *,
        out: torch.Tensor | None = None,
        plan: DecodePlan | None = None,
    ) -> torch.Tensor:
        batch, heads, _ = q.shape
        v_dim = v_cache.shape[2]
        if out is None:
            out = q.new_empty((batch, heads, v_dim))
        if batch == 0:
            return out
        # Without a plan, the page table's width bounds the length: no synchronisation with the GPU.
        max_tokens = page_starts.shape[1] * page_size if plan is None else plan.max_tokens
        if options.sliding_window is not None:
            max_tokens = min(max_tokens, options.sliding_window)
        splits = num_kv_splits(batch, k_cache.shape[1], max_tokens, _num_sms(q.device))
        parts = lse = None
        if splits > 1:
            parts = torch.empty((batch, heads, splits, v_dim), dtype=torch.float32, device=q.device)
            lse = torch.empty((batch, heads, splits), dtype=torch.float32, device=q.device)
        launch_decode(
            dense_rows(q), k_cache, v_cache, page_starts, seq_lens, page_size, options,
            out, parts, lse, splits,
        )  # fmt: skip
        return out

    def prefill_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_starts: torch.Tensor,
        query_starts: torch.Tensor,
        seq_lens: torch.Tensor,
        page_size: int,
        options: AttentionOptions,
        *,
        out: torch.Tensor | None = None,
        new_kv: KVPair | None = None,
        plan: PrefillPlan | None = None,
    ) -> torch.Tensor:
        if out is None:
            out = q.new_empty((q.shape[0], q.shape[1], v_cache.shape[2]))
        if q.shape[0] == 0:
            return out
        # Without a plan, all new tokens could be of one sequence: surplus programs end at once.
        max_queries = q.shape[0] if plan is None else plan.max_queries
        launch_prefill(
            dense_rows(q), k_cache, v_cache, page_starts, query_starts, seq_lens, page_size, options,
            out, max_queries,
        )  # fmt: skip
        return out

    def plan_decode(
        self, page_starts: torch.Tensor, seq_lens: torch.Tensor, page_size: int, *, max_tokens: int
    ) -> DecodePlan:
        """The bound itself: the number of splits follows from it."""
        return DecodePlan(max_tokens)

    def plan_prefill(
        self,
        page_starts: torch.Tensor,
        query_starts: torch.Tensor,
        seq_lens: torch.Tensor,
        page_size: int,
        *,
        max_queries: int,
        max_tokens: int,
    ) -> PrefillPlan:
        """The bounds themselves: the number of programs follows from them."""
        return PrefillPlan(max_queries, max_tokens)
