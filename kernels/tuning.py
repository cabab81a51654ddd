"""Chooses the tiles of a kernel: those measured on such a chip, or those that launch.py computes.

``kernels/tuned/sm_XX.json`` holds, per architecture, the tiles that ``kvbench dev tune`` found faster than the computed
ones on a real device, with that device's name, driver and Triton. Only what was measured has an entry: sm_90.json,
of an H200, has head dim 128; every other choice is launch.py's until somebody runs ``kvbench dev tune`` and commits
what it wrote.

An entry serves the shapes that compile to the same tile: same kernel, KV kind, bytes of a query's value, padded head
dims, and padded number of query heads a KV head. Of those, the one with the nearest page size is taken (by ratio; of
two as near, the smaller page; a contiguous reservation is a very large page).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

from kvbench_kernels.kv_formats import find_format
from kvbench_kernels.launch import (
    MIN_DOT,
    Tiles,
    decode_tiles,
    next_power_of_two,
    padded_dim,
    prefill_tiles,
    shared_bytes_limit,
)

FOLDER = Path(__file__).parent / "tuned"
KERNELS = ("decode", "prefill")


@dataclass(frozen=True)
class Entry:
    """Tiles of one kernel for one bucket of shapes, with their measured times.

    ``rows``: query heads of a KV head, padded to a power of two of at least 16; ``d_pad``, ``v_pad``: padded head dims;
    ``itemsize``: bytes of a query's value. ``microseconds`` and ``default_microseconds``: medians of the two.
    """

    kernel: str
    kind: str
    rows: int
    d_pad: int
    v_pad: int
    itemsize: int
    page_size: int
    block_m: int
    block_n: int
    num_stages: int
    num_warps: int
    microseconds: float
    default_microseconds: float

    @property
    def tiles(self) -> Tiles:
        return Tiles(self.block_m, self.block_n, self.d_pad, self.v_pad, self.num_stages, self.num_warps)

    @property
    def bucket(self) -> tuple:
        """The properties that a shape must share with the entry; the page size is not one of them."""
        return (self.kernel, self.kind, self.rows, self.d_pad, self.v_pad, self.itemsize)


@dataclass(frozen=True)
class TuningTable:
    """The tiles that ``kvbench dev tune`` wrote on one machine.

    ``arch``: 10 x major + minor compute capability; ``date``: UTC.
    """

    arch: int
    device: str
    num_sms: int
    driver: str
    triton: str
    date: str
    entries: tuple[Entry, ...]


def table_path(arch: int, folder: Path = FOLDER) -> Path:
    return folder / f"sm_{arch}.json"


def write_table(table: TuningTable, folder: Path = FOLDER) -> Path:
    """Write ``table`` where ``read_table`` finds it, an entry a line."""
    head = {field.name: getattr(table, field.name) for field in fields(TuningTable) if field.name != "entries"}
    lines = ",\n".join(f"  {json.dumps(asdict(entry))}" for entry in table.entries)
    folder.mkdir(parents=True, exist_ok=True)
    path = table_path(table.arch, folder)
    path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "entries": [\n{lines}\n ]\n}}\n')
    return path


@cache
def read_table(arch: int, folder: Path = FOLDER) -> TuningTable | None:
    """The table of sm_``arch``; None where there is none.

    Raises:
        ValueError: the file is not such a table, or an entry could not run on the chip.
    """
    path = table_path(arch, folder)
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text())
        table = TuningTable(**data | {"entries": tuple(Entry(**entry) for entry in data["entries"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a table of tiles ({error}): run kvbench dev tune, or delete it") from None
    for entry in table.entries:
        if entry.kernel not in KERNELS or entry.page_size < 1:
            raise ValueError(f"{path}: an entry of kernel {entry.kernel!r}, page size {entry.page_size}: delete it")
        if reason := unusable(entry.tiles, entry.rows, entry.kind, entry.itemsize, arch):
            raise ValueError(f"{path}: {entry.kernel} {entry.kind} with {entry.tiles}: {reason}: delete that entry")
    return table


def unusable(tiles: Tiles, rows: int, kind: str, itemsize: int, arch: int) -> str | None:
    """The reason for which sm_``arch`` could not run ``tiles``, by arithmetic alone; None if there is none."""
    for name, value, least in (
        ("block_m", tiles.block_m, max(rows, MIN_DOT)), ("block_n", tiles.block_n, MIN_DOT),
        ("num_warps", tiles.num_warps, 1),
    ):  # fmt: skip
        if value < least or value & (value - 1):
            return f"{name} {value} is not a power of two of at least {least}"
    if tiles.num_stages < 1:
        return f"num_stages {tiles.num_stages} is under 1"
    needed, limit = shared_bytes_floor(tiles, kind, itemsize), shared_bytes_limit(arch)
    if needed > limit:
        return f"at least {needed} bytes of shared memory, and a block of sm_{arch} has {limit}"
    return None


def shared_bytes_floor(tiles: Tiles, kind: str, itemsize: int) -> int:
    """Bytes of shared memory that ``tiles`` take at least.

    A pipeline of n stages keeps n - 1 tiles of K and V in flight, as the cache stores them. The compiler adds to that,
    so tiles over the limit by this cannot launch.
    """
    kv_format = find_format(kind)
    bits = 8 * itemsize if kv_format is None else kv_format.code_bits
    return (tiles.num_stages - 1) * tiles.block_n * (tiles.d_pad + tiles.v_pad) * bits // 8


def nearest(entries: Iterable[Entry], bucket: tuple, page_size: int) -> Entry | None:
    """The entry of ``bucket`` whose page size has the smallest ratio to ``page_size``; None without any."""
    candidates = [entry for entry in entries if entry.bucket == bucket]
    return min(candidates, key=lambda e: (abs(math.log2(e.page_size / page_size)), e.page_size), default=None)


def bucket_of(kernel: str, kind: str, group: int, head_dim: int, v_head_dim: int, itemsize: int) -> tuple:
    """The bucket of a shape, see ``Entry.bucket``."""
    rows = max(MIN_DOT, next_power_of_two(group))
    return (kernel, kind, rows, padded_dim(head_dim, kind), padded_dim(v_head_dim, kind), itemsize)


def computed(kernel: str, arch: int, kind: str, group: int, head_dim: int, v_head_dim: int, itemsize: int) -> Tiles:
    """Compute the tiles of a shape by launch.py."""
    if kernel == "decode":
        return decode_tiles(group, head_dim, v_head_dim, itemsize, kind)
    return prefill_tiles(group, head_dim, v_head_dim, itemsize, kind, arch)


def _choose(kernel: str, arch: int, shape: tuple[str, int, int, int, int], page_size: int, folder: Path) -> Tiles:
    table = read_table(arch, folder)
    entry = nearest(table.entries, bucket_of(kernel, *shape), page_size) if table else None
    return entry.tiles if entry else computed(kernel, arch, *shape)


def choose_decode(
    arch: int,
    kind: str,
    group: int,
    head_dim: int,
    v_head_dim: int,
    itemsize: int,
    page_size: int,
    *,
    folder: Path = FOLDER,
) -> Tiles:
    """Tiles of the decode kernel on sm_``arch``.

    ``kind``: "auto" or the name of a KV format; ``group``: query heads of a KV head; ``itemsize``: bytes of a value of
    q. Raises ValueError for a table that cannot be used.
    """
    return _choose("decode", arch, (kind, group, head_dim, v_head_dim, itemsize), page_size, folder)


def choose_prefill(
    arch: int,
    kind: str,
    group: int,
    head_dim: int,
    v_head_dim: int,
    itemsize: int,
    page_size: int,
    *,
    folder: Path = FOLDER,
) -> Tiles:
    """Tiles of the prefill kernel for long chunks. Arguments and errors as of ``choose_decode``."""
    return _choose("prefill", arch, (kind, group, head_dim, v_head_dim, itemsize), page_size, folder)
