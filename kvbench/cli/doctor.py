"""``kvbench doctor`` and ``kvbench dev doctor``: what this machine has."""

from __future__ import annotations

import importlib.util
import shutil

import click

_SHORT = ("processor", "cores", "memory", "busy now", "free disk here", "cuda", "gpu", "default profile")


@click.command()
def doctor() -> int:
    """Show whether this machine is ready to measure.

    Cores, memory, GPUs and other load. `kvbench dev doctor` shows versions and all else.

    \b
    Exit codes: 0 ready, 2 something that kvbench needs is missing. No files are written.
    """
    return _show([row for row in _rows() if row[0] in _SHORT])


@click.command("doctor")
def details() -> int:
    """Show everything that this machine has for measuring.

    Versions, cores, memory, GPUs, and how the built-in engine computes on this processor.

    \b
    Exit codes: 0 ready, 2 something that kvbench needs is missing. No files are written.
    """
    return _show(_rows())


def _rows() -> list[tuple[str, str]]:
    """The name and the value of each fact."""
    import psutil

    from kvbench.common import machine
    from kvbench.common.packages import REPOSITORY
    from kvbench.workload.file import default_profile

    system, memory, load = machine.machine(), psutil.virtual_memory(), psutil.getloadavg()[0]
    cpu = system["cpu"]
    noisy = ": timings will be noisy" if load > cpu["cores"] / 2 else ""
    cuda, bfloat16 = (_cuda(), _bfloat16()) if _has_torch() else ("torch is missing", "torch is missing")
    rows = [
        *((name, version or "[red]missing[/red]") for name, version in machine.versions().items()),
        ("processor", f"{cpu['model']} ({cpu['architecture']})"),
        ("cores", f"{cpu['cores']} usable of {cpu['cores_total']}"),
        ("memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available"),
        ("busy now", f"load average {load:.1f}{noisy}"),
        ("free disk here", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB"),
        ("operating system", system["os"]),
        ("bfloat16 on the processor", bfloat16),
        ("cuda", cuda),
        *(("gpu", ", ".join(f"{k} {v}" for k, v in gpu.items())) for gpu in machine.gpus()),
        ("default profile", default_profile()),
    ]
    for name, where in _packages().items():
        rows.append((f"package {name}", f"[red]not ours: {where}[/red]" if where else f"ours ({REPOSITORY / name})"))
    return rows


def _show(rows: list[tuple[str, str]]) -> int:
    """Prints the rows, and whether anything is missing; the exit code."""
    from rich.console import Console
    from rich.table import Table

    from kvbench.common import machine
    from kvbench.common.console import print_table

    table = Table(title="what this machine has", show_header=False)
    table.add_column("what")
    table.add_column("value", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console, versions = Console(), machine.versions()
    print_table(console, table)
    problems = [f"{name} is missing" for name in ("torch", "transformers", "locust", "numpy") if versions[name] is None]
    problems += [f"the package {name!r} is not kvbench's own" for name, where in _packages().items() if where]
    if not problems and _has_torch():
        console.print("ready: kvbench sweep workloads/mixed.yaml", highlight=False)
        return 0
    what = "; ".join(problems) or "torch is missing"
    console.print(
        f"[red]not ready:[/red] {what}. Install kvbench in a virtual environment of its own.", highlight=False
    )
    return 2


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _packages() -> dict[str, str | None]:
    """The packages that kvbench brings, with the place of another of that name that is imported instead."""
    from kvbench.common.packages import foreign_package

    return {name: foreign_package(name) for name in ("kernels", "engine")}


def _bfloat16() -> str:
    """Names the instructions that the built-in engine computes bfloat16 with on this CPU."""
    import torch

    from kernels.numba_amx import has_amx

    if has_amx():
        return "fast: AMX, in linear layers and prefill"
    if torch.cpu._is_avx512_bf16_supported():
        return "AVX512-BF16 in linear layers; no AMX, so prefill computes in float32"
    return "slow: neither AMX nor AVX512-BF16"


def _cuda() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU"
    return f"none (torch {torch.__version__} was built {built})"
