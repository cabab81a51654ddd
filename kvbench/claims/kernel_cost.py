"""The cost of a page table to attention: one decode step of one layer, timed on pages and on reservations.

All are the same kernel on the same bytes: a reservation is one page as long as its context. The pages of a sequence lie
one behind the other, as a fresh pool hands them out to prompts, or scattered, as one that served for a while does.
Memory is laid out anew several times, since where it lies moves a ratio by more than repetition does; within each
layout they take turns.

    python -m kvbench.claims.kernel_cost DEVICE FILE      (started by ``measure_kernel_cost``; writes JSON)
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from kvbench.common import processes
from kvbench.common.errors import MeasurementError
from kvbench.common.files import read_json, write_json

PAGE_SIZE = 16
RESERVED, IN_ORDER, SCATTERED = "reserved", "in order", "scattered"
LAYOUTS, ROUNDS = 16, 12  # of memory, and of turns in each
MOST_TIMINGS = 5  # of one claim, each of ``LAYOUTS``
_LIMIT_S = 180.0
_SHAPES = {  # more KV than caches hold; heads as of llama-32m and Llama-3.1-8B
    "cpu": {"dtype": "float32", "batch": 32, "context": 1024, "heads": 8, "kv_heads": 4, "head_dim": 64},
    "cuda": {"dtype": "bfloat16", "batch": 64, "context": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128},
}


@dataclass(frozen=True)
class KernelCost:
    """The ``seconds`` of a decode step [layouts of all ``timings``] for each place of the KV."""

    device: str
    backend: str
    batch: int
    context: int
    page_size: int
    seconds: dict[str, list[float]]
    timings: int = 1

    def joined(self, other: KernelCost) -> KernelCost:
        """Returns both measurements as one, of more layouts."""
        seconds = {place: times + other.seconds[place] for place, times in self.seconds.items()}
        return replace(self, seconds=seconds, timings=self.timings + other.timings)


def measure_kernel_cost(
    folder: Path, on_cpu: bool, say: Callable[[str], None], check: Callable[[], None]
) -> KernelCost:
    """Times the cost in a process of its own, beside the timings that ``folder`` has. Raises MeasurementError."""
    folder.mkdir(parents=True, exist_ok=True)
    out, log = folder / "kernel_cost.json", folder / "kernel_cost.log"
    say("the decode kernel")
    with log.open("wb") as file:
        command = [sys.executable, "-m", "kvbench.claims.kernel_cost", "cpu" if on_cpu else "cuda", str(out)]
        process = processes.launch(command, stdout=file, stderr=file)
    process.watch()
    until = time.monotonic() + _LIMIT_S
    try:
        while process.poll() is None:
            check()
            if time.monotonic() > until:
                raise MeasurementError(f"timing the kernels did not end within {_LIMIT_S:.0f} s")
            time.sleep(0.1)
    finally:
        processes.stop(process)
    if process.returncode:
        raise MeasurementError(f"the kernels could not be timed: {processes.last_lines(log, 1)}")
    return KernelCost(**read_json(out))


def time_kernels(
    device: str, *, dtype: str, batch: int, context: int, heads: int, kv_heads: int, head_dim: int
) -> KernelCost:
    """Times one decode step of a layer, on the default backend."""
    import torch

    from kvbench_kernels import default_backend, get_backend
    from kvbench_kernels.api import AttentionOptions
    from kvbench_kernels.cpu_memory import cache_zeros

    kv_dtype = getattr(torch, dtype)
    backend = get_backend(default_backend(device, kv_dtype))
    options = AttentionOptions(scale=head_dim**-0.5)
    seconds: dict[str, list[float]] = {RESERVED: [], IN_ORDER: [], SCATTERED: []}
    for _ in range(LAYOUTS):
        k, v = (cache_zeros((batch * context, kv_heads, head_dim), kv_dtype, device).normal_() for _ in "kv")
        q = torch.randn(batch, heads, head_dim, dtype=kv_dtype, device=device)
        out, lengths = torch.empty_like(q), torch.full((batch,), context, device=device)

        steps = {}
        for name in seconds:
            size = context if name == RESERVED else PAGE_SIZE
            order = torch.randperm if name == SCATTERED else torch.arange
            starts = order(batch * context // size).view(batch, -1) * size  # [batch, pages]
            where = (starts.to(device), lengths, size)
            plan = backend.plan_decode(*where, max_tokens=context)
            steps[name] = partial(backend.decode_attention, q, k, v, *where, options, out=out, plan=plan)
        took: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(ROUNDS + 1):
            for name in sorted(steps, reverse=bool(turn % 2)):  # who follows whom changes
                took[name].append(_time(device, steps[name]))
        for name, times in took.items():
            seconds[name].append(statistics.median(times[1:]))  # the first turn warms up
    return KernelCost(device, backend.name, batch, context, PAGE_SIZE, seconds)


def _time(device: str, step: Callable[[], object]) -> float:
    """Seconds of one step, to its end on the device."""
    import torch

    started = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    import torch

    device, out = sys.argv[1:]
    torch.set_num_threads(1)  # as the engines of the other claims
    cost, file = time_kernels(device, **_SHAPES[device]), Path(out)
    if file.exists():
        cost = KernelCost(**read_json(file)).joined(cost)
    write_json(file, asdict(cost))


if __name__ == "__main__":
    main()
