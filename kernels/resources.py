"""The gate on the resources of compiled kernels: ``python -m kvbench_kernels.resources [--write] [--show]``.

Compiles every kernel variant of ``variants`` for every architecture, without a GPU, and compares registers,
spills and shared memory with the committed table ``ci/kernel_resources.json``. A change that starts to spill, or that
loses occupancy to registers, shows here on a machine that could not time it. ``--write`` accepts what is there now.

The numbers are those of one compiler: with another version of Triton than the table's they are not compared, and what
still holds are the chips' own limits, and that nothing spills that did not.

Compiling is deterministic, so the table also holds a hash of everything that the numbers depend on. The tests ask for
that hash and compile one variant of each kernel only: all of them take minutes.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITCallable

from kvbench_kernels import compile_ahead
from kvbench_kernels.compile_ahead import Resources, compile_for, read_resources
from kvbench_kernels.launch import shared_bytes_limit
from kvbench_kernels.variants import ARCHITECTURES, Variant, variants

TABLE = Path(__file__).resolve().parent.parent / "ci" / "kernel_resources.json"
COMMAND = "python -m kvbench_kernels.resources --write"
REGISTER_TOLERANCE = 8  # registers are given out to warps in steps of 8 a thread
MAX_WORKERS = 8

T = TypeVar("T")
Measured = dict[str, dict[str, Resources]]  # by "sm_90", then by variant


def find_variant(arch: int, name: str) -> Variant:
    """The variant called ``name`` of sm_``arch``."""
    return _variants_of(arch)[name]


@cache
def _variants_of(arch: int) -> dict[str, Variant]:
    return {variant.name: variant for variant in variants(arch)}


def all_variants() -> list[tuple[int, str]]:
    """List (architecture, name) of every variant."""
    return [(arch, name) for arch in ARCHITECTURES for name in _variants_of(arch)]


def one_of_each_kernel() -> list[tuple[int, str]]:
    """One variant of each kernel, spread over the architectures."""
    by_kernel: dict[str, list[tuple[int, str]]] = {}
    for arch, name in all_variants():
        by_kernel.setdefault(_variants_of(arch)[name].kernel.__name__, []).append((arch, name))
    count = len(ARCHITECTURES)
    return [
        next((v for v in compiled if v[0] == ARCHITECTURES[i % count]), compiled[0])
        for i, compiled in enumerate(by_kernel.values())
    ]


def sources_hash() -> str:
    """SHA-256 of what the numbers depend on: Triton functions, constants of every variant, how they are compiled."""
    parts = [Path(compile_ahead.__file__).read_text()]
    for path in sorted(Path(__file__).parent.glob("triton_*.py")):
        for name, value in sorted(vars(importlib.import_module(f"kvbench_kernels.{path.stem}")).items()):
            if isinstance(value, JITCallable):
                parts.append(f"{name} {value.raw_src}")
            elif isinstance(value, tl.constexpr):
                parts.append(f"{name} {value}")
    for arch, name in all_variants():
        variant = _variants_of(arch)[name]
        settings = [sorted(variant.constants.items()), sorted(variant.types.items()), variant.default]
        parts.append(f"{arch} {name} {variant.kernel.__name__} {settings}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def compile_variant(arch: int, name: str) -> CompiledKernel:
    """The variant called ``name``, compiled for sm_``arch``."""
    variant = find_variant(arch, name)
    return compile_for(variant.kernel, variant.constants, arch, variant.types, variant.default)


def measure_one(arch: int, name: str) -> tuple[Resources, float]:
    """Measure the resources of the variant ``name`` on sm_``arch``; they and the processor seconds taken."""
    started = _cpu_seconds()
    taken = read_resources(compile_variant(arch, name))
    return taken, _cpu_seconds() - started


def _cpu_seconds() -> float:
    """Processor seconds of this process and of the assemblers that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure(variants: Sequence[tuple[int, str]], show: bool = False) -> Measured:
    """Measure the resources of each of ``variants``; with ``show``, print them one by one."""
    measured: Measured = {f"sm_{arch}": {} for arch in ARCHITECTURES}
    for (arch, name), (taken, seconds) in zip(variants, in_processes(measure_one, variants), strict=True):
        measured[f"sm_{arch}"][name] = taken
        if show:
            print(f"sm_{arch:<4} {name:<66} {taken}  {seconds:.1f} s of processor time", flush=True)
    return measured


def in_processes(read: Callable[[int, str], T], variants: Sequence[tuple[int, str]]) -> Iterator[T]:
    """Call ``read`` on each of ``variants``, in a process a core; yields the results in order."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # spawn: a fork would inherit the locks of torch's and LLVM's threads
    with ProcessPoolExecutor(min(cores, MAX_WORKERS), mp_context=get_context("spawn")) as pool:
        yield from pool.map(read, *zip(*variants, strict=True))


def beyond_limits(measured: Measured) -> list[str]:
    """A sentence for each variant that asks for more shared memory than its chip gives a block."""
    return [
        f"{chip}, {name}: {taken.shared_bytes} bytes of shared memory, and a block has {limit}: choose smaller tiles"
        for chip, kernels in measured.items()
        for name, taken in kernels.items()
        if taken.shared_bytes > (limit := shared_bytes_limit(int(chip.removeprefix("sm_"))))
    ]


def unlisted(table: Mapping, variants: Iterable[tuple[int, str]]) -> list[str]:
    """A sentence for each variant that only one of table and kernels has."""
    listed = {(chip, name) for chip, names in table["kernels"].items() for name in names}
    present = {(f"sm_{arch}", name) for arch, name in variants}
    return [
        f"{chip}, {name}: {'in the kernels' if (chip, name) in present else 'in the table'} only: {COMMAND}"
        for chip, name in sorted(listed ^ present)
    ]


def worse_than(table: Mapping, measured: Measured) -> list[str]:
    """A sentence for each number that grew: spills and shared memory at all, registers by more than the tolerance."""
    problems = []
    for chip, kernels in measured.items():
        for name, taken in kernels.items():
            old = table["kernels"].get(chip, {}).get(name)
            if old is None:
                continue
            for what, now in asdict(taken).items():
                if now > old[what] + (REGISTER_TOLERANCE if what == "registers" else 0):
                    problems.append(f"{chip}, {name}: {what} {old[what]} -> {now}; if that is meant: {COMMAND}")
    return problems


def new_spills(table: Mapping, measured: Mapping) -> list[str]:
    """A sentence for each variant that spills here and not in the table: bad under every compiler."""
    return [
        f"{chip}, {name}: spills 0 -> {taken.spills} with Triton {triton.__version__}; if that is meant: {COMMAND}"
        for chip, kernels in measured.items()
        for name, taken in kernels.items()
        if taken.spills and table["kernels"].get(chip, {}).get(name, {}).get("spills") == 0
    ]


def compare(table: Mapping, measured: Measured) -> list[str]:
    """Compare by ``worse_than`` if the table is of this version of Triton, else by ``new_spills``."""
    return (worse_than if table["triton"] == triton.__version__ else new_spills)(table, measured)


def read_table(path: Path = TABLE) -> dict:
    """The committed table: {"triton": version, "sources": hash, "kernels": {"sm_90": {variant: numbers}}}.

    Raises:
        ValueError: there is no table.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no table {path}: {COMMAND}") from None


def write_table(measured: Measured, path: Path = TABLE) -> None:
    """Write the table, one line a variant, so that a diff reads like a table."""
    chips = []
    for chip, kernels in measured.items():
        lines = [f"   {json.dumps(name)}: {json.dumps(asdict(taken))}" for name, taken in kernels.items()]
        chips.append(f"  {json.dumps(chip)}: {{\n" + ",\n".join(lines) + "\n  }")
    path.parent.mkdir(exist_ok=True)
    head = f'{{\n "triton": "{triton.__version__}",\n "sources": "{sources_hash()}",\n "kernels": {{\n'
    path.write_text(head + ",\n".join(chips) + "\n }\n}\n")


def said_usage(arguments: Sequence[str], usage: str) -> bool:
    """Print ``usage`` where it is asked for or an option is unknown; whether it was printed."""
    unknown = sorted(set(arguments) - {"--write", "--show", "-h", "--help"})
    if unknown:
        print(f"error: there is no option {unknown[0]!r}: use --write, --show or --help", file=sys.stderr)
    elif {"-h", "--help"} & set(arguments):
        print(usage)
    else:
        return False
    return True


def main(arguments: list[str]) -> int:
    """Run the gate. Exit code 0: as in the table; 1: worse, beyond a limit or unlisted; 2: not comparable."""
    if said_usage(arguments, __doc__):
        return 0 if {"-h", "--help"} & set(arguments) else 2
    started = time.perf_counter()
    measured = measure(all_variants(), "--show" in arguments)
    count = sum(map(len, measured.values()))
    print(f"compiled {count} variants in {time.perf_counter() - started:.0f} s with Triton {triton.__version__}")
    problems = beyond_limits(measured)
    spilling = [f"{c}, {n}: {t.spills} spills" for c, ks in measured.items() for n, t in ks.items() if t.spills]
    for line in spilling:
        print(f"note: {line}")
    if "--write" in arguments:
        write_table(measured)
        print(f"wrote {TABLE}")
    else:
        table = read_table()
        problems += unlisted(table, all_variants())
        problems += compare(table, measured)
        if table["triton"] != triton.__version__:
            print(f"the table is of Triton {table['triton']}: nothing but new spills is compared with it")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
