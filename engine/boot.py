"""The boot id of the machine: processes with the same one share CLOCK_MONOTONIC, so their timestamps compare."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

BOOT_HEADER = "x-kvbench-boot"
"""Header of a response with send times in its chunks: the boot id of the server's machine."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@lru_cache(maxsize=1)
def boot_id() -> str | None:
    """Read this machine's boot id; None if the system has none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip() or None
    except OSError:
        return None
