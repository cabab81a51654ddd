"""Attention problems of ``kvbench dev tune``, on the device, checked against float64 and timed with events.

Correctness is checked on a small problem with hostile lengths (empty, one token, around tile and page bounds), a
hostile KV cache and a poisoned output; time is the geometric mean over large ones, whose KV is far larger than the
cache of the chip: tiles that are best for one batch may be 9 % slower than others for another.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from kvbench_kernels.api import AttentionOptions, PrefillBatch
from kvbench_kernels.launch import Tiles
from kvbench_kernels.reference import TorchBackend
from kvbench_kernels.triton_launch import Attention, Chip, Splits
from kvbench_kernels.triton_plan import DecodePlan, PrefillPieces
from kvbench_kernels.tune.problems import as_float64, distance, hostile_kv
from kvbench_kernels.tune.search import TuningCase

DTYPES = {2: torch.bfloat16, 4: torch.float32}
TOLERANCE = {2: 2e-2, 4: 1e-4}  # share of a row's norm; bf16 rounds values and weights to 1 in 256
CHECKED = {
    "decode": ((1, 63, 64, 65, 300, 1500, 0), (1,) * 7),
    "prefill": ((40, 1, 300, 700), (40, 1, 7, 200)),
}
CHECKED_KV_HEADS, TIMED_KV_HEADS = 2, 8
TIMED = {  # of each problem: tokens of each sequence, and how many of the last are computed
    "decode": (((4096,) * 64, (1,) * 64), ((800,) * 256, (1,) * 256), ((32768,), (1,))),
    "prefill": (((4096,) * 4, (2048,) * 4), ((4096,), (4096,)), ((16384,), (512,))),
}
WARM_UPS, REPEATS = 3, 15


class TuningProblem:
    """Attention of the last ``new`` tokens of sequences of ``lens`` tokens.

    Page size and KV kind are the case's. Decode asks for one token, of an empty sequence too. ``gap``: slots between
    pages; 0 to time what the engine has.

    ``run`` fills ``out [queries, heads, Dv]`` with given tiles; ``expected`` is the same in float64 by torch.
    """

    def __init__(
        self,
        case: TuningCase,
        lens: tuple[int, ...],
        new: tuple[int, ...],
        kv_heads: int,
        chip: Chip,
        device: torch.device,
        gap: int = 1,
    ):
        self.case, self._chip, self._buffers = case, chip, Splits()
        self._dtype = DTYPES[case.bucket[-1]]
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=self._dtype)

        self._options = AttentionOptions(case.head_dim**-0.5)
        self._lens = torch.tensor(lens, device=device)
        self._starts = torch.tensor([0, *new], device=device).cumsum(0)
        self._decodes = DecodePlan(self._lens, max(lens))
        self._prefills = PrefillPieces(self._starts, self._lens, max(new), max(lens))
        dims = case.head_dim, case.v_head_dim
        self._kv = hostile_kv(
            lens, case.kind, kv_heads, dims, case.page_size, random, dtype=self._dtype, device=device, gap=gap
        )
        self._page_starts = self._kv.page_starts.to(torch.int32)
        queries = len(lens) if case.kernel == "decode" else sum(new)
        self._q = random(queries, kv_heads * case.group, case.head_dim)
        self.out = self._q.new_empty((*self._q.shape[:2], case.v_head_dim))

    def run(self, tiles: Tiles) -> None:
        """Queue the kernel on the current stream."""
        call = Attention(
            self._q, self._kv.k, self._kv.v, self._page_starts, self.case.page_size, self._options, self.out,
            self._chip, tiles=tiles,
        )  # fmt: skip
        if self.case.kernel == "decode":
            call.decode(self._lens, self._decodes, self._buffers)
        else:
            call.prefill(self._prefills, self._buffers)

    def expected(self) -> torch.Tensor:
        """Compute the expected ``[queries, heads, Dv]`` in float64."""
        kv, backend = self._kv, TorchBackend()
        tensors = self._q.double(), as_float64(kv.k), as_float64(kv.v)
        if self.case.kernel == "decode":
            return backend.decode_attention(*tensors, kv.page_starts, self._lens, kv.page_size, self._options)
        batch = PrefillBatch(kv.page_starts, self._starts, self._lens, kv.page_size)
        return backend.prefill_attention(*tensors, batch, self._options)


class Checker:
    """Tells why tiles are wrong, or None: they do not launch, or differ from torch in float64."""

    def __init__(self, problem: TuningProblem):
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
        worst = distance(out, self._expected)
        return None if worst <= self._limit else f"differs from the reference by {worst:.3g} of a row's norm"


def event_timer(problems: Sequence[TuningProblem]) -> Callable[[Tiles], float]:
    """Make a function from tiles to microseconds, by CUDA events.

    The geometric mean over the problems of the median of REPEATS replays of a graph, since a launch from Python takes
    longer than a short decode.
    """

    def median(problem: TuningProblem, tiles: Tiles) -> float:
        for _ in range(WARM_UPS):
            problem.run(tiles)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            problem.run(tiles)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * REPEATS)]
        for begin, end in zip(events[::2], events[1::2], strict=True):
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize(problem.out.device)
        return statistics.median(
            begin.elapsed_time(end) * 1e3 for begin, end in zip(events[::2], events[1::2], strict=True)
        )

    return lambda tiles: statistics.geometric_mean(median(problem, tiles) for problem in problems)


def chip_of(device: torch.device) -> Chip:
    properties = torch.cuda.get_device_properties(device)
    return Chip(10 * properties.major + properties.minor, properties.multi_processor_count)
