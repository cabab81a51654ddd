"""Memory of a CPU engine: keeps freed blocks for the next step, puts bulk data on huge pages."""

from __future__ import annotations

import ctypes
import math
import mmap

import torch

HUGE_PAGE = 2 << 20
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8  # malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc refuses more


def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed, for all threads; elsewhere nothing happens.

    By default it gives large blocks back to the system and takes new ones, so that each activation of each layer is
    page-faulted anew: 4,000 faults a step of 512 tokens with llama-32m, about 8 % of the time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_M_ARENA_MAX, 1)  # other arenas shrink by rules of their own


def huge_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Untouched memory of a CPU, on huge pages where the system has them to give.

    An entry of the TLB then covers 2 MiB and not 4 KiB, and the hardware's prefetching runs on.
    """
    size = math.prod(shape) * dtype.itemsize
    raw = torch.empty(size + HUGE_PAGE, dtype=torch.uint8)
    skip = -raw.data_ptr() % HUGE_PAGE
    _advise_huge(raw.data_ptr() + skip, size)
    return raw[skip : skip + size].view(dtype).view(shape)


class HugeArena:
    """Hands out memory on huge pages, piece by piece, for what stays as long as the process."""

    _CHUNK = 64 << 20

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Untouched memory, aligned to cache lines."""
        size = math.prod(shape) * dtype.itemsize
        padded = -(-size // 64) * 64
        if len(self._rest) < padded:
            self._rest = huge_empty((max(padded, self._CHUNK),), torch.uint8)
        piece, self._rest = self._rest[:size], self._rest[padded:]
        return piece.view(dtype).view(shape)


def cache_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Allocates a KV cache of zeros.

    Writing the zeros touches the memory pages on a CPU, so that no request pays for it.
    """
    if torch.device(device).type == "cpu":
        return huge_empty(shape, dtype).zero_()
    return torch.zeros(shape, dtype=dtype, device=device)


def _advise_huge(address: int, size: int) -> None:
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    whole = size // HUGE_PAGE * HUGE_PAGE
    if advice is not None and whole:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(whole), advice)
