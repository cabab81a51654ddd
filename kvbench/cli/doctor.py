"""``kvbench doctor``: what this machine has."""

from __future__ import annotations

import importlib.util
import shutil

import click


@click.command()
def doctor() -> int:
    """Show what this machine has for benchmarking.

    Versions, cores, memory and GPUs.

    \b
    Exit codes: 0 ready, 2 something that kvbench needs is missing. No files are written.
    """
    import psutil
    from rich.console import Console
    from rich.table import Table

    from kvbench.common import machine
    from kvbench.common.console import print_table
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
    load = psutil.getloadavg()[0]
    noisy = ": timings will be noisy" if load > cpu["cores"] / 2 else ""
    table.add_row("busy now", f"load average {load:.1f}{noisy}")
    table.add_row("free disk here", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB")
    table.add_row("operating system", system["os"])
    cuda, torch_found = _cuda()
    table.add_row("bfloat16 on the processor", _bfloat16() if torch_found else "torch is missing")
    table.add_row("cuda", cuda)
    for gpu in machine.gpus():
        table.add_row("gpu", ", ".join(f"{k} {v}" for k, v in gpu.items()))
    table.add_row("default profile", default_profile())
    foreign = {name: foreign_package(name) for name in ("kernels", "engine")}
    for name, where in foreign.items():
        table.add_row(f"package {name}", f"[red]not ours: {where}[/red]" if where else f"ours ({REPOSITORY / name})")
    print_table(console, table)
    problems = [f"{name} is missing" for name in missing]
    problems += [f"the package {name!r} is not kvbench's own" for name, where in foreign.items() if where]
    if problems or not torch_found:
        console.print(f"[red]not ready:[/red] {'; '.join(problems) or cuda}. Install kvbench in a virtual environment "
                      "of its own.", highlight=False)  # fmt: skip
        return 2
    console.print("ready: kvbench sweep workloads/mixed.yaml", highlight=False)
    return 0


def _bfloat16() -> str:
    """Which instructions the built-in engine computes bfloat16 with on this CPU, by its own check."""
    import torch

    from kernels.numba_amx import has_amx

    if has_amx():
        return "fast: AMX, in linear layers and prefill"
    if torch.cpu._is_avx512_bf16_supported():
        return "AVX512-BF16 in linear layers; no AMX, so prefill computes in float32"
    return "slow: neither AMX nor AVX512-BF16"


def _cuda() -> tuple[str, bool]:
    if importlib.util.find_spec("torch") is None:
        return "torch is missing", False
    import torch

    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU"
        return f"none (torch {torch.__version__} was built {built})", True
    return f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}", True
