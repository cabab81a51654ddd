"""The processor of this machine. Standard library only: ci/gpu needs it where nothing is installed."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_model() -> str:
    """Returns the processor's name as Linux tells it, else as Python does, else "unknown"."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
