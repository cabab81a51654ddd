"""Sizes in bytes as text, read and written. Imports nothing of the engine, so that the harness reads them alike."""

from __future__ import annotations

import re

_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_bytes(value: int | str) -> int:
    """Parse bytes such as ``134217728``, ``"128MiB"``, ``"1.5 GiB"`` or ``"500MB"``; ValueError for a fraction of a
    byte.
    """
    if isinstance(value, bool | float):
        raise ValueError(f"a size in bytes cannot be {value!r}: give an integer or a text such as '128MiB'")
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if not match or match[2].lower() not in _UNITS:
        raise ValueError(f"{value!r} is not a size: give bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB")
    unit = _UNITS[match[2].lower()]
    if unit == 1 and "." in match[1]:
        raise ValueError(f"the size {value!r} is a fraction of a byte: give a unit, such as '{match[1]}GiB'")
    return int(float(match[1]) * unit)


def format_bytes(count: int) -> str:
    """Write bytes to three significant digits: 134217728 as `128 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.4g} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
