"""``kvbench doctor``: what this machine has."""

from __future__ import annotations

import importlib.util
import shutil
import time

import click

_READ_BYTES = 256 * 2**20
_ROUNDS = 5


@click.command()
def doctor() -> int:
    """Show what this machine has for benchmarking: versions, cores, memory and its read bandwidth, GPUs.

    \b
    Exit codes: 0 ready, 2 something that kvbench needs is missing. No files are written.
    """
    import psutil
    from rich.console import Console
    from rich.table import Table

    from kvbench.common import machine
    from kvbench.common.packages import REPOSITORY, foreign_package
    from kvbench.workload.file import default_profile

    console = Console()
    table = Table(title="what this machine has", show_header=False)
    table.add_column("what")
    table.add_column("found", overflow="fold")
    versions, system = machine.versions(), machine.machine()
    missing = [name for name in ("torch", "transformers", "locust", "numpy") if versions[name] is None]
    for name, version in versions.items():
        table.add_row(name, version or "[red]missing[/red]")
    cpu = system["cpu"]
    table.add_row("processor", f"{cpu['model']} ({cpu['architecture']})")
    table.add_row("cores", f"{cpu['cores']} usable of {cpu['cores_total']}")
    memory = psutil.virtual_memory()
    table.add_row("memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available")
    bandwidth = read_bandwidth()
    table.add_row("read bandwidth", f"{bandwidth / 1e9:.1f} GB/s, all cores" if bandwidth else "not measured")
    load = psutil.getloadavg()[0]
    noisy = ": timings will be noisy" if load > cpu["cores"] / 2 else ""
    table.add_row("busy now", f"load average {load:.1f}{noisy}")
    table.add_row("free disk here", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB")
    table.add_row("operating system", system["os"])
    cuda, torch_found = _cuda()
    table.add_row("cuda", cuda)
    for gpu in machine.gpus():
        table.add_row("gpu", ", ".join(f"{k} {v}" for k, v in gpu.items()))
    table.add_row("default profile", default_profile())
    foreign = {name: foreign_package(name) for name in ("kernels", "engine")}
    for name, where in foreign.items():
        table.add_row(f"package {name}", f"[red]not ours: {where}[/red]" if where else f"ours ({REPOSITORY / name})")
    console.print(table)
    problems = [f"{name} is missing" for name in missing]
    problems += [f"the package {name!r} is not kvbench's own" for name, where in foreign.items() if where]
    if problems or not torch_found:
        console.print(f"[red]not ready:[/red] {'; '.join(problems) or cuda}. Install kvbench in a virtual environment "
                      "of its own.", highlight=False)  # fmt: skip
        return 2
    console.print("ready: kvbench sweep workloads/mixed.yaml", highlight=False)
    return 0


def read_bandwidth() -> float | None:
    """Bytes/s that all cores read together, best of a few rounds of about 0.1 s; None without numpy.

    The memory is written first: an untouched allocation reads one zero page at fantasy speed.
    """
    try:
        import numpy as np
    except ImportError:
        return None
    from concurrent.futures import ThreadPoolExecutor

    import psutil

    from kvbench.common.machine import usable_cores

    threads = usable_cores()
    size = min(_READ_BYTES, psutil.virtual_memory().available // 4)
    parts = np.array_split(np.ones(size // 4, dtype=np.float32), threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            list(pool.map(lambda part: float(np.dot(part, part)), parts))  # releases the GIL
            best = max(best, size / (time.perf_counter() - start))
    return best


def _cuda() -> tuple[str, bool]:
    if importlib.util.find_spec("torch") is None:
        return "torch is missing", False
    import torch

    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU"
        return f"none (torch {torch.__version__} was built {built})", True
    return f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}", True
