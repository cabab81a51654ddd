"""Paged attention kernels: Triton for GPUs, Numba for CPUs, torch for reference.

KV storage of one layer is slot-major: ``k_cache [num_slots, kv_heads, D]`` and
``v_cache [num_slots, kv_heads, Dv]``. Token ``t`` of sequence ``b`` lives in slot
``page_starts[b, t // page_size] + t % page_size``: ``page_starts`` holds the first SLOT of each
logical page, so a contiguous reservation is one page of ``max_model_len`` tokens at any base.
A quantised cache (``kvbench_kernels.quantized.QuantizedKV``) has the same logical shape.

Importing this package imports neither torch, Numba nor Triton; asking for a backend does.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kvbench_kernels.api import AttentionBackend

_BACKENDS = {
    "torch": ("kvbench_kernels.reference", "TorchBackend"),
    "numba": ("kvbench_kernels.numba_backend", "NumbaBackend"),
    "triton": ("kvbench_kernels.triton_backend", "TritonBackend"),
}


@cache
def get_backend(name: str) -> AttentionBackend:
    """The backend called ``name`` ("torch", "numba" or "triton"); always the same object."""
    if name not in _BACKENDS:
        raise ValueError(f"unknown kernel backend {name!r}: use one of {', '.join(sorted(_BACKENDS))}")
    module, cls = _BACKENDS[name]
    return getattr(import_module(module), cls)()


def default_backend(device: torch.device | str, dtype: torch.dtype, kv_cache_dtype: str = "auto") -> str:
    """Name of the backend for a model of ``dtype`` on ``device``.

    triton on cuda, numba for float32 and bfloat16 on cpu, torch otherwise. Each serves every ``kv_cache_dtype``;
    ValueError for an unknown one.
    """
    import torch

    from kvbench_kernels.kv_formats import find_format

    find_format(kv_cache_dtype)
    device = torch.device(device)
    if device.type == "cuda":
        return "triton"
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        return "numba"
    return "torch"


__all__ = ["default_backend", "get_backend"]

if __name__ == "kernels":
    import runpy
    from pathlib import Path

    runpy.run_path(str(Path(__file__).parents[1] / "kernels" / "checkout_names.py"))["share"](__name__)
