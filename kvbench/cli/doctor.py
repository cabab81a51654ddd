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

    versions, system, memory = machine.versions(), machine.machine(), psutil.virtual_memory()
    cpu, load = system["cpu"], psutil.getloadavg()[0]
    has_torch = importlib.util.find_spec("torch") is not None
    cuda, bfloat16 = (_cuda(), _bfloat16()) if has_torch else ("torch is missing", "torch is missing")
    foreign = {name: foreign_package(name) for name in ("kernels", "engine")}
    rows = [
        *((name, version or "[red]missing[/red]") for name, version in versions.items()),
        ("processor", f"{cpu['model']} ({cpu['architecture']})"),
        ("cores", f"{cpu['cores']} usable of {cpu['cores_total']}"),
        ("memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available"),
        ("busy now", f"load average {load:.1f}{': timings will be noisy' if load > cpu['cores'] / 2 else ''}"),
        ("free disk here", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB"),
        ("operating system", system["os"]),
        ("bfloat16 on the processor", bfloat16),
        ("cuda", cuda),
        *(("gpu", ", ".join(f"{k} {v}" for k, v in gpu.items())) for gpu in machine.gpus()),
        ("default profile", default_profile()),
        *(
            (f"package {name}", f"[red]not ours: {where}[/red]" if where else f"ours ({REPOSITORY / name})")
            for name, where in foreign.items()
        ),
    ]
    table = Table(title="what this machine has", show_header=False)
    table.add_column("what")
    table.add_column("found", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    print_table(console, table)
    problems = [f"{name} is missing" for name in ("torch", "transformers", "locust", "numpy") if versions[name] is None]
    problems += [f"the package {name!r} is not kvbench's own" for name, where in foreign.items() if where]
    if problems or not has_torch:
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


def _cuda() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU"
    return f"none (torch {torch.__version__} was built {built})"
