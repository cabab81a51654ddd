"""The processor of this machine. Standard library only: ci/gpu needs it where nothing is installed."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from pathlib import Path


def cpu_model() -> str:
    """Returns the processor's name as Linux or macOS tells it, else as Python does, else "unknown"."""
    facts = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip().lower(), value.strip())
    if name := facts.get("model name") or facts.get("hardware"):
        return name
    if part := facts.get("cpu part"):  # arm64
        return f"{platform.machine()} implementer {facts.get('cpu implementer')} part {part}"
    with suppress(OSError, subprocess.SubprocessError):
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return platform.processor() or "unknown"
