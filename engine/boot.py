"""Which run of which kernel this is: processes that share it share CLOCK_MONOTONIC, and their stamps compare."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

BOOT_HEADER = "x-kvbench-boot"
"""Of an answer whose chunks are stamped with their send times: the boot id of the machine that sent it."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@lru_cache(maxsize=1)
def boot_id() -> str | None:
    """What tells this kernel's run from every other; None where the system does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip() or None
    except OSError:
        return None
