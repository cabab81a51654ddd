"""What a page table costs the attention kernel: one decode step of one layer, timed on pages and on reservations.

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
from functools import partial
from pathlib import Path
from typing import Any

from kvbench.common import processes
from kvbench.common.errors import MeasurementError
from kvbench.common.files import read_json, write_json

PAGE_SIZE = 16
RESERVED, IN_ORDER, SCATTERED = "reserved", "in order", "scattered"
LAYOUTS, ROUNDS = 10, 12  # of memory, and of turns in each
_SHAPES: dict[str, dict[str, Any]] = {  # more KV than caches hold; heads as of llama-32m and Llama-3.1-8B
    "cpu": {"dtype": "float32", "batch": 32, "context": 1024, "heads": 8, "kv_heads": 4, "head_dim": 64},
    "cuda": {"dtype": "bfloat16", "batch": 64, "context": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128},
}
_LIMIT_S = 180.0


def measure_kernel_cost(
    folder: Path, on_cpu: bool, say: Callable[[str], None], check: Callable[[], None]
) -> dict[str, Any]:
    """What ``time_kernels`` returns, from a process of its own. Raises MeasurementError."""
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
    return read_json(out)


def time_kernels(device: str, shape: dict[str, Any]) -> dict[str, Any]:
    """The shape, the backend, and ``seconds`` of a decode step [layouts] for each place of the KV."""
    import torch

    from kernels import default_backend, get_backend
    from kernels.api import AttentionOptions
    from kernels.cpu_memory import cache_zeros

    dtype = getattr(torch, shape["dtype"])
    backend = get_backend(default_backend(device, dtype))
    batch, context, dim = shape["batch"], shape["context"], shape["head_dim"]
    options = AttentionOptions(scale=dim**-0.5)
    seconds: dict[str, list[float]] = {RESERVED: [], IN_ORDER: [], SCATTERED: []}
    for _ in range(LAYOUTS):
        of_cache = (batch * context, shape["kv_heads"], dim)
        k, v = (cache_zeros(of_cache, dtype, device).normal_() for _ in "kv")
        q = torch.randn(batch, shape["heads"], dim, dtype=dtype, device=device)
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
        for name, each in took.items():
            seconds[name].append(statistics.median(each[1:]))  # the first turn warms up
    return {**shape, "device": device, "backend": backend.name, "page_size": PAGE_SIZE, "seconds": seconds}


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
    write_json(Path(out), time_kernels(device, _SHAPES[device]))


if __name__ == "__main__":
    main()
