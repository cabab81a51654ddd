"""What ``kvbench tune`` runs: attention problems on the device, checked against float64 and timed with events.

Correctness is checked on a small problem with hostile lengths (empty, one token, around tile and page bounds), NaN in
every slot that no token owns, and a poisoned output; time is taken on a large one whose KV is far larger than the
cache of the chip.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from kernels.api import AttentionOptions, KVCache
from kernels.kv_formats import find_format
from kernels.launch import Tiles, cdiv
from kernels.quantized import QuantizedKV, raw_tensors
from kernels.reference import TorchBackend
from kernels.triton_launch import Attention, Chip, Splits
from kernels.tune.search import Case

DTYPES = {2: torch.bfloat16, 4: torch.float32}
TOLERANCE = {2: 2e-2, 4: 1e-4}  # of a row's norm; bf16 rounds values and weights to 1 in 256
FP8_SCALE = 0.02  # keeps normal values well within the range of both formats
CHECKED = {
    "decode": ((1, 63, 64, 65, 300, 1500, 0), (1,) * 7),
    "prefill": ((40, 1, 300, 700), (40, 1, 7, 200)),
}
CHECKED_KV_HEADS, TIMED_KV_HEADS = 2, 8
TIMED = {"decode": ((4096,) * 64, (1,) * 64), "prefill": ((4096,) * 4, (2048,) * 4)}
WARM_UPS, REPEATS = 3, 15


class Problem:
    """Sequences of ``lens`` tokens, of which the last ``new`` are asked for, under a case's page size and KV kind
    (decode asks for one, of an empty sequence too).

    ``run`` fills ``out [queries, heads, Dv]`` with given tiles; ``expected`` is the same in float64 by torch.
    """

    def __init__(
        self, case: Case, lens: tuple[int, ...], new: tuple[int, ...], kv_heads: int, chip: Chip, device: torch.device
    ):
        self.case, self._chip, self._buffers = case, chip, Splits()
        self._dtype = DTYPES[case.bucket[-1]]
        self._generator = torch.Generator(device).manual_seed(0)
        self._device, self._max_tokens, self._max_queries = device, max(lens), max(new)
        self._options = AttentionOptions(case.head_dim**-0.5)
        self._lens = torch.tensor(lens, device=device)
        self._starts = torch.tensor([0, *new], device=device).cumsum(0)
        self._place(lens, kv_heads)
        queries = len(lens) if case.kernel == "decode" else sum(new)
        self._q = self._random(queries, kv_heads * case.group, case.head_dim)
        self.out = self._q.new_empty((*self._q.shape[:2], case.v_head_dim))

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device, dtype=self._dtype)

    def _place(self, lens: tuple[int, ...], kv_heads: int) -> None:
        """Pages in random order; what no token owns is NaN."""
        size, pages = self.case.page_size, cdiv(max(lens), self.case.page_size)
        order = torch.randperm(len(lens) * pages, generator=self._generator, device=self._device)
        self._page_starts = order.view(len(lens), pages) * size
        dims, slots = (self.case.head_dim, self.case.v_head_dim), len(lens) * pages * size
        self._caches = tuple(
            _new_cache(self.case.kind, slots, kv_heads, dim, self._dtype, self._device) for dim in dims
        )
        for row, length in zip(self._page_starts, lens, strict=True):
            tokens = torch.arange(length, device=self._device)
            k, v = (self._random(length, kv_heads, dim) for dim in dims)
            TorchBackend().write_kv(k, v, *self._caches, row[tokens // size] + tokens % size)

    def run(self, tiles: Tiles) -> None:
        """Queue the kernel on the current stream."""
        call = Attention(
            self._q, *self._caches, self._page_starts, self.case.page_size, self._options, self.out, self._chip,
            tiles=tiles,
        )  # fmt: skip
        if self.case.kernel == "decode":
            call.decode(self._lens, self._max_tokens, self._buffers)
        else:
            call.prefill(self._starts, self._lens, self._max_queries, self._max_tokens, self._buffers)

    def expected(self) -> torch.Tensor:
        """``[queries, heads, Dv]`` float64."""
        backend, page_size = TorchBackend(), self.case.page_size
        caches = [c if isinstance(c, QuantizedKV) else c.double() for c in self._caches]
        if self.case.kernel == "decode":
            return backend.decode_attention(
                self._q.double(), *caches, self._page_starts, self._lens, page_size, self._options
            )
        return backend.prefill_attention(
            self._q.double(), *caches, self._page_starts, self._starts, self._lens, page_size, self._options
        )


def _new_cache(kind: str, slots: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """A cache of NaN."""
    kv_format = find_format(kind)
    if kv_format is None:
        cache: KVCache = torch.zeros(slots, kv_heads, dim, dtype=dtype, device=device)
    else:
        scale = None if kv_format.scale_bytes else FP8_SCALE
        cache = QuantizedKV.zeros(kv_format, slots, kv_heads, dim, device, scale)
    for tensor in raw_tensors(cache):
        tensor.view(torch.uint8).fill_(0xFF)  # NaN in every float format, fp8 among them
    return cache


class Checker:
    """Says what is wrong with tiles, or None: they do not launch, or give other numbers than torch in float64."""

    def __init__(self, problem: Problem):
        self._problem = problem
        self._expected = problem.expected()
        self._limit = TOLERANCE[problem.case.bucket[-1]]

    def __call__(self, tiles: Tiles) -> str | None:
        out = self._problem.out.fill_(float("nan"))
        try:
            self._problem.run(tiles)
            if out.is_cuda:
                torch.cuda.synchronize(out.device)
        except Exception as error:  # whatever the compiler or the driver has against them
            return f"does not run: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        difference = (out.double() - self._expected).norm(dim=-1)
        scale = self._expected.norm(dim=-1).clamp_min(1e-6)
        worst = (difference / scale).nan_to_num(float("inf")).max().item()
        return None if worst <= self._limit else f"differs from the reference by {worst:.3g} of a row's norm"


def event_timer(problem: Problem) -> Callable[[Tiles], float]:
    """A function from tiles to the median microseconds of REPEATS launches, by CUDA events."""

    def microseconds(tiles: Tiles) -> float:
        for _ in range(WARM_UPS):
            problem.run(tiles)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * REPEATS)]
        for begin, end in zip(events[::2], events[1::2], strict=True):
            begin.record()
            problem.run(tiles)
            end.record()
        torch.cuda.synchronize(problem.out.device)
        return statistics.median(
            begin.elapsed_time(end) * 1e3 for begin, end in zip(events[::2], events[1::2], strict=True)
        )

    return microseconds


def chip_of(device: torch.device) -> Chip:
    properties = torch.cuda.get_device_properties(device)
    return Chip(10 * properties.major + properties.minor, properties.multi_processor_count)
