"""The GPU backend: all attention and the KV write in Triton.

With TRITON_INTERPRET=1 (set before Triton is imported) the same kernels run on CPU tensors: slow,
and meant for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from triton import knobs

from kvbench_kernels.api import AttentionOptions, KVCache, KVPair, PrefillBatch, check_heads, dense_rows
from kvbench_kernels.kv_formats import INT4, find_format
from kvbench_kernels.reference import TorchBackend
from kvbench_kernels.triton_launch import Attention, Chip, Splits, launch_write
from kvbench_kernels.triton_plan import DecodePlan, PrefillPieces

MAX_HEAD_DIM = 256  # larger tiles leave too little shared memory for a pipeline
MAX_LATENT_DIM = 512  # values of a latent row that are V
MAX_GROUP = 64
OLDEST_ARCH = 80  # the first with bfloat16, and the oldest that the kernels are compiled and checked for
INTERPRETED = Chip(arch=80, num_sms=4)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@cache
def read_chip(device: torch.device) -> Chip:
    """The chip behind ``device``; what the interpreter stands for on a CPU.

    Raises:
        ValueError: there is no such device.
    """
    if device.type != "cuda":
        return INTERPRETED
    if not torch.cuda.is_available():
        raise ValueError(f"the triton kernel backend needs {device}, and torch sees no CUDA device: use device cpu")
    properties = torch.cuda.get_device_properties(device)
    return Chip(10 * properties.major + properties.minor, properties.multi_processor_count)


class TritonBackend(TorchBackend):
    """The backend for float16, bfloat16 or float32 on CUDA, any KV format. See kvbench_kernels.api.AttentionBackend.

    ``chip_of``: what a device is, read from the driver unless a test says otherwise.
    """

    name = "triton"

    def __init__(self, chip_of: Callable[[torch.device], Chip] = read_chip) -> None:
        self._chip_of = chip_of
        self._splits = Splits()

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
        latent: bool = False,
    ) -> None:
        find_format(kv_cache_dtype)
        device = torch.device(device)
        most = MAX_LATENT_DIM if latent else MAX_HEAD_DIM
        check_heads(num_heads, num_kv_heads, head_dim, v_head_dim or head_dim, most, latent)
        if not latent and num_heads // num_kv_heads > MAX_GROUP:
            raise ValueError(
                f"{num_heads} query heads on {num_kv_heads} KV heads are more than the {MAX_GROUP} per KV head that "
                "the triton kernel backend serves: use the torch backend for this model"
            )
        if dtype not in _DTYPES:
            raise ValueError(
                f"the triton kernel backend cannot compute with a {dtype} KV cache: use float16, bfloat16 or float32"
            )
        if device.type != "cuda" and not knobs.runtime.interpret:
            raise ValueError(f"the triton kernel backend needs a CUDA device, not {device}: use kernel_backend auto")
        odd = kv_cache_dtype != "auto" and (head_dim % 2 or (v_head_dim or 0) % 2)
        if latent and (kv_cache_dtype == INT4.name or odd):
            raise ValueError(
                f"the triton kernel backend cannot read latent rows of {v_head_dim} and {head_dim - (v_head_dim or 0)} "
                f"values in {kv_cache_dtype}: use kv_cache_dtype auto, for even sizes int8_per_token_head or fp8_e4m3, "
                "or latent_kv false"
            )
        arch = self._chip_of(device).arch
        capability = f"{device}, of compute capability {arch // 10}.{arch % 10}"
        if arch < OLDEST_ARCH:
            raise ValueError(
                f"the triton kernel backend needs compute capability {OLDEST_ARCH / 10} or newer for "
                f"{str(dtype).removeprefix('torch.')}, and cannot serve {capability}: use the torch backend"
            )

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: KVCache, v_cache: KVCache, slots: torch.Tensor
    ) -> None:
        if k.shape[0]:
            launch_write(dense_rows(k), dense_rows(v), k_cache, v_cache, slots)

    def decode_attention(
        self,
        q: torch.Tensor,
        k_cache: KVCache,
        v_cache: KVCache,
        page_starts: torch.Tensor,
        seq_lens: torch.Tensor,
        page_size: int,
        options: AttentionOptions,
        *,
        out: torch.Tensor | None = None,
        plan: DecodePlan | None = None,
    ) -> torch.Tensor:
        if out is None:
            out = q.new_empty((q.shape[0], q.shape[1], v_cache.shape[2]))
        if q.shape[0] == 0:
            return out
        if plan is None:  # the page table's width bounds the length: no synchronisation with the GPU
            plan = DecodePlan(seq_lens, page_starts.shape[1] * page_size)
        attention = self._attention(q, k_cache, v_cache, page_starts, page_size, options, out)
        attention.decode(seq_lens, plan, self._splits)
        return out

    def prefill_attention(
        self,
        q: torch.Tensor,
        k_cache: KVCache,
        v_cache: KVCache,
        batch: PrefillBatch,
        options: AttentionOptions,
        *,
        out: torch.Tensor | None = None,
        new_kv: KVPair | None = None,
        plan: PrefillPieces | None = None,
    ) -> torch.Tensor:
        if out is None:
            out = q.new_empty((q.shape[0], q.shape[1], v_cache.shape[2]))
        if q.shape[0] == 0:
            return out
        if plan is None:  # all new tokens could be of one sequence
            plan = self.plan_prefill(
                batch, max_queries=q.shape[0], max_tokens=batch.page_starts.shape[1] * batch.page_size
            )
        attention = self._attention(q, k_cache, v_cache, batch.page_starts, batch.page_size, options, out)
        attention.prefill(plan, self._splits)
        return out

    def _attention(self, q, k_cache, v_cache, page_starts, page_size, options, out) -> Attention:
        chip = self._chip_of(q.device)
        return Attention(dense_rows(q), k_cache, v_cache, page_starts, page_size, options, out, chip)

    def plan_decode(
        self, page_starts: torch.Tensor, seq_lens: torch.Tensor, page_size: int, *, max_tokens: int
    ) -> DecodePlan:
        """Plan without a launch: the first layer of each window has its work listed."""
        return DecodePlan(seq_lens, max_tokens)

    def plan_prefill(self, batch: PrefillBatch, *, max_queries: int, max_tokens: int) -> PrefillPieces:
        """Plan without a launch: the number of programs follows from the bounds, the first layer has pieces chosen."""
        return PrefillPieces(batch.query_starts, batch.seq_lens, max_queries, max_tokens)
