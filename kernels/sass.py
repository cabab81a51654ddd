"""The gate on the machine code of attention's main loops: ``python -m kvbench_kernels.sass [--write] [--show]``.

Compiles the core decode and prefill variants for sm_90, without a GPU, finds the loop over whole tiles in each, and
compares what it counts there with the committed table ``ci/kernel_sass.json``: instructions, reads of shared memory
byte by byte, conversions, copies of 16 bytes, the tensor cores' instructions, and what follows from them for an H100 if
the assumptions below hold. They are arithmetic, and **not measured on a GPU**. ``--write`` accepts what is there now.

What a loop looks like depends on the compiler, so the table has rows of each version of Triton that users have: the
one here, and 3.6.0 of torch 2.11. To check or write that one's:
``pip install --target DIR triton==3.6.0 && PYTHONPATH=DIR python -m kvbench_kernels.sass [--write]``.

The tests ask for the hash of the sources under both, and compile a few variants with the compiler here.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import triton

from kvbench_kernels import resources
from kvbench_kernels.compile_ahead import WARP_SIZE, Resources, read_resources, read_sass
from kvbench_kernels.kv_formats import find_format
from kvbench_kernels.launch import shared_bytes_limit
from kvbench_kernels.variants import COMMON, ITEMSIZE, Variant, core

TABLE = resources.TABLE.with_name("kernel_sass.json")
COMMAND = "python -m kvbench_kernels.sass --write"
COMPILERS = ("3.6.0", "3.9.0")  # of torch 2.11, and the newest
ARCH = 90
# An H100 SXM by its data sheet, and what of its peaks such loops are taken to reach.
SMS = 132
CLOCK_HZ = 1.70e9
HBM_BYTES_PER_S = 3.35e12
HBM_ATTAINABLE = 0.92
SCHEDULERS = 4  # of a multiprocessor, each issues one instruction of one warp a cycle
ISSUE_ATTAINABLE = 0.625
LATENCY_S = 800e-9  # of a read of HBM under load
SCALE_BYTES = 4  # of one token and head, of K or V; heads run side by side, so that a sector is read once
REGISTERS, REGISTER_UNIT = 65536, 8  # of a multiprocessor; given out to a thread
WARPS, BLOCKS, BLOCK_SHARED_BYTES = 64, 32, 1024  # of a multiprocessor at most; what a block takes beside its own
INSTRUCTION_TOLERANCE = 0.03  # that a loop may grow by
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_SHORTEST_LOOP = 60  # instructions; shorter ones search for the sequence, or count the blocks


@dataclass(frozen=True)
class Loop:
    """One main loop. ``instructions``: of a warp and tile; ``lds_u8``: reads of shared memory of a byte; ``f2f``:
    conversions at a quarter of the rate; ``cp_async_16``: copies of 16 bytes into shared memory; ``mma``: "HMMA",
    "HGMMA" or "none"; ``warps``: of a multiprocessor at a time; ``memory_cycles``, ``issue_cycles``: of a tile and
    multiprocessor, if only the memory or only issuing took time; ``bandwidth_share``: of the data sheet's peak that a
    decode draws then. None for prefill and latent rows, where every tile serves many queries."""

    instructions: int
    lds_u8: int
    f2f: int
    cp_async_16: int
    mma: str
    warps: int
    memory_cycles: int
    issue_cycles: int
    bandwidth_share: float | None


def memory_cycles(tile_bytes: int) -> float:
    """Cycles in which one of the multiprocessors gets ``tile_bytes`` from HBM while all of them read."""
    return tile_bytes * SMS * CLOCK_HZ / (HBM_BYTES_PER_S * HBM_ATTAINABLE)


def issue_cycles(instructions: int, num_warps: int) -> float:
    """Cycles in which a multiprocessor issues a tile's ``instructions`` of each of ``num_warps`` warps."""
    return instructions * num_warps / (SCHEDULERS * ISSUE_ATTAINABLE)


def tile_bytes(variant: Variant) -> int:
    """Bytes of K and V that a tile reads, as the cache stores them, with the scales."""
    constants = variant.constants
    kv_format = find_format(constants["KIND"])
    if kv_format is None:
        of_token = (constants["D"] + constants["DV"]) * ITEMSIZE[variant.default]
    else:
        of_token = sum(kv_format.code_bytes(constants[dim]) for dim in ("D", "DV"))
        of_token += 2 * SCALE_BYTES * (kv_format.scale_bytes > 0)
    return constants["BLOCK_N"] * of_token


def resident_blocks(taken: Resources, num_warps: int) -> int:
    """Blocks of ``num_warps`` warps that fit a multiprocessor at a time."""
    registers = -(-taken.registers // REGISTER_UNIT) * REGISTER_UNIT * WARP_SIZE * num_warps
    shared = shared_bytes_limit(ARCH) + BLOCK_SHARED_BYTES
    return min(REGISTERS // registers, shared // (taken.shared_bytes + BLOCK_SHARED_BYTES), WARPS // num_warps, BLOCKS)


def main_loop(listing: str) -> list[str]:
    """Opcodes of the loop over whole tiles: the first that copies into shared memory as it goes, else the first.

    Raises:
        ValueError: there is no loop of some length.
    """
    lines = [(int(at, 16), opcode, rest) for at, opcode, rest in _LINE.findall(listing)]
    index = {at: i for i, (at, _, _) in enumerate(lines)}
    loops = []
    for i, (at, opcode, rest) in enumerate(lines):
        target = _TARGET.search(rest) if opcode.startswith("BRA") else None
        first = index.get(int(target.group(1), 16)) if target else None
        if first is not None and lines[first][0] < at and i - first >= _SHORTEST_LOOP:
            loops.append([opcode for _, opcode, _ in lines[first : i + 1]])
    if not loops:
        raise ValueError("the listing has no loop over tiles")
    return next((loop for loop in loops if any(opcode.startswith("LDGSTS") for opcode in loop)), loops[0])


def describe(variant: Variant, listing: str, taken: Resources) -> Loop:
    """Describes the main loop of ``listing``, the machine code of ``variant``."""
    opcodes = main_loop(listing)
    families = Counter(opcode.partition(".")[0] for opcode in opcodes)
    constants = variant.constants
    num_warps, size = constants["num_warps"], tile_bytes(variant)
    blocks = resident_blocks(taken, num_warps)
    memory, issue = memory_cycles(size), issue_cycles(len(opcodes), num_warps)
    in_flight = blocks * max(1, constants["num_stages"] - 1) * size
    needed = LATENCY_S * HBM_BYTES_PER_S * HBM_ATTAINABLE / SMS
    share = HBM_ATTAINABLE * min(1.0, memory / issue, in_flight / needed)
    return Loop(
        instructions=len(opcodes),
        lds_u8=sum(opcode.startswith("LDS.U8") for opcode in opcodes),
        f2f=families["F2F"],
        cp_async_16=sum(opcode.startswith("LDGSTS") and opcode.endswith(".128") for opcode in opcodes),
        mma=next((mma for mma in ("HGMMA", "HMMA") if families[mma]), "none"),
        warps=blocks * num_warps,
        memory_cycles=round(memory),
        issue_cycles=round(issue),
        bandwidth_share=round(share, 3) if variant.name.startswith("decode") and "latent" not in variant.name else None,
    )


def loop_variants() -> list[str]:
    """Names of the variants in the table."""
    return [variant.name for variant in core(ARCH) if variant.name.startswith(("decode", "prefill"))]


def measure_one(arch: int, name: str) -> Loop:
    """The main loop of the variant called ``name``, compiled now."""
    compiled = resources.compile_variant(arch, name)
    return describe(resources.find_variant(arch, name), read_sass(compiled), read_resources(compiled))


def measure(names: Sequence[str], show: bool = False) -> dict[str, Loop]:
    """The main loop of each variant; with ``show``, print each as it is known."""
    measured = {}
    loops = resources.in_processes(measure_one, [(ARCH, name) for name in names])
    for name, loop in zip(names, loops, strict=True):
        measured[name] = loop
        if show:
            print(f"{name:<66} {loop}", flush=True)
    return measured


def slow_loops(loops: Mapping[str, Loop]) -> list[str]:
    """Writes a sentence for each slow loop.

    It reads bytes one by one or converts them slowly, or is of a decode with 16-bit queries at the commonest shape and
    takes longer to issue than the memory takes.
    """
    sentences = []
    shape = f"D {COMMON[1]}, group {COMMON[0]}"
    for name, loop in loops.items():
        if loop.lds_u8 or loop.f2f:
            sentences.append(
                f"{name}: {loop.lds_u8} LDS.U8 and {loop.f2f} F2F in the main loop: codes are unpacked one by one"
            )
        common = name.startswith("decode") and shape in name and "fp32" not in name
        if common and loop.issue_cycles >= loop.memory_cycles:
            sentences.append(
                f"{name}: {loop.issue_cycles} issue cycles a tile ({loop.instructions} instructions), and the memory "
                f"takes {loop.memory_cycles}: it is bound by instructions"
            )
    return sentences


def worse_than(rows: Mapping[str, Mapping], loops: Mapping[str, Loop]) -> list[str]:
    """A sentence for each number of a loop that is worse than in ``rows``, the table's of this compiler."""
    sentences = []
    for name, loop in loops.items():
        old, now = rows.get(name), asdict(loop)
        if old is None:
            continue
        worse = [what for what in ("lds_u8", "f2f") if now[what] > old[what]]
        worse += [what for what in ("cp_async_16", "warps") if now[what] < old[what]]
        worse += ["mma"] if now["mma"] != old["mma"] else []
        worse += ["instructions"] if now["instructions"] > old["instructions"] * (1 + INSTRUCTION_TOLERANCE) else []
        sentences += [f"{name}: {what} {old[what]} -> {now[what]}; if that is meant: {COMMAND}" for what in worse]
    return sentences


def sources_hash() -> str:
    """SHA-256 of what the rows depend on: the kernels and how they are compiled, and this file."""
    return hashlib.sha256(f"{resources.sources_hash()} {Path(__file__).read_text()}".encode()).hexdigest()


def read_table(path: Path = TABLE) -> dict:
    """The committed table: {version of Triton: {"sources": hash, "loops": {variant: numbers}}}; {} if there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def write_table(loops: Mapping[str, Loop], path: Path = TABLE) -> None:
    """Put this compiler's rows into the table, a line a variant; those of versions not in COMPILERS go."""
    table = {version: rows for version, rows in read_table(path).items() if version in COMPILERS}
    table[triton.__version__] = {
        "sources": sources_hash(),
        "loops": {name: asdict(loop) for name, loop in loops.items()},
    }
    parts = []
    for version, rows in sorted(table.items()):
        lines = ",\n".join(f"   {json.dumps(name)}: {json.dumps(row)}" for name, row in rows["loops"].items())
        parts.append(f' "{version}": {{\n  "sources": "{rows["sources"]}",\n  "loops": {{\n{lines}\n  }}\n }}')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def out_of_date(table: Mapping[str, Mapping], versions: Sequence[str] = COMPILERS) -> list[str]:
    """A sentence for each compiler whose rows are missing, or of other kernels."""
    return [
        f"{TABLE.name} has no rows of these kernels under Triton {version}: {COMMAND}, see the top of kernels/sass.py"
        for version in versions
        if table.get(version, {}).get("sources") != sources_hash()
    ]


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 as in the table and nothing bound by instructions, 1 worse, 2 not comparable."""
    if resources.said_usage(arguments, __doc__):
        return 0 if {"-h", "--help"} & set(arguments) else 2
    if triton.__version__ not in COMPILERS:
        print(
            f"error: {TABLE.name} has rows of Triton {' and '.join(COMPILERS)}, and this is {triton.__version__}: "
            "install one of them, or add this one to COMPILERS in kernels/sass.py",
            file=sys.stderr,
        )
        return 2
    started = time.perf_counter()
    loops = measure(loop_variants(), "--show" in arguments)
    print(f"read {len(loops)} loops in {time.perf_counter() - started:.0f} s with Triton {triton.__version__}")
    problems = slow_loops(loops)
    if "--write" in arguments:
        write_table(loops)
        print(f"wrote {TABLE}")
    else:
        table = read_table()
        problems += worse_than(table.get(triton.__version__, {}).get("loops", {}), loops)
        problems += out_of_date(table, [triton.__version__])
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
