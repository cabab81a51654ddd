"""``kvbench doctor`` and ``kvbench dev doctor``: what this machine has."""

from __future__ import annotations

import importlib.util
import shutil

import click

_NEEDED = ("locust", "numpy")
_MISSING = "missing"
_BUSY = {False: "load average {:.1f}", True: "load average {:.1f}: timings will be noisy"}
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
    from kvbench.common.text import data_size
    from kvbench.workload.file import default_profile

    system, memory, load = machine.machine(), psutil.virtual_memory(), psutil.getloadavg()[0]
    cpu = system["cpu"]
    cuda, bfloat16 = (_cuda(), _bfloat16()) if _has_torch() else (_MISSING, _MISSING)
    rows = [(name, version or _MISSING) for name, version in machine.versions().items()]
    rows += [
        ("processor", "{model} ({architecture})".format(**cpu)),
        ("cores", "{cores} usable of {cores_total}".format(**cpu)),
        ("memory", f"{data_size(memory.total)}, {data_size(memory.available)} available"),
        ("busy now", _BUSY[load > cpu["cores"] / 2].format(load)),
        ("free disk here", data_size(shutil.disk_usage(".").free)),
        ("operating system", system["os"]),
        ("bfloat16 on the processor", bfloat16),
        ("cuda", cuda),
    ]
    rows += [("gpu", ", ".join(map("{0[0]} {0[1]}".format, gpu.items()))) for gpu in machine.gpus()]
    rows.append(("default profile", default_profile()))
    rows.append(("kvbench is in", str(REPOSITORY)))
    return rows


def _show(rows: list[tuple[str, str]]) -> int:
    """Prints the rows, and whether anything is missing; the exit code."""
    from rich.console import Console

    from kvbench.common.console import make_table, print_table
    from kvbench.common.packages import missing_for_engine

    console = Console()
    print_table(console, make_table(("what this machine has", ""), rows, numbers_from=2))
    problems = [f"{name} is missing" for name in _NEEDED if importlib.util.find_spec(name) is None]
    if problems:
        what = f"[red]not ready:[/red] {'; '.join(problems)}. Install kvbench again."
    elif missing := missing_for_engine():
        what = (
            "ready for servers that run already: kvbench load --help. The built-in engine needs "
            f"{', '.join(missing)}: pip install 'kvbench\\[engine]'"
        )
    else:
        what = "ready: kvbench sweep workloads/mixed.yaml"
    console.print(what, highlight=False)
    return 2 if problems else 0


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _bfloat16() -> str:
    """Names the instructions that the built-in engine computes bfloat16 with on this CPU."""
    from kvbench_kernels.numba_bf16 import has_bf16
    from kvbench_kernels.numba_memory import has_amx

    if has_bf16():
        return f"fast: {'AMX' if has_amx() else 'AVX512-BF16'}, in linear layers and prefill"
    return "slow: neither AMX nor AVX512-BF16"


def _cuda() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU"
    return f"none (torch {torch.__version__} was built {built})"
