"""The mock server as a child of this process, for as long as a block lasts."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.common import processes
from kvbench.common.errors import MeasurementError

_READY_S = 20.0


class MockProcess:
    """``python -m kvbench.calibration.mock`` on a free port for as long as the block lasts; gives its URL."""

    def __init__(self, folder: Path, flags: Mapping[str, Any]) -> None:
        self._log = folder / "mock.log"
        self._command = [sys.executable, "-m", "kvbench.calibration.mock", "--port", "0"]
        self._command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]

    def __enter__(self) -> str:
        with self._log.open("wb") as log:
            self._process = processes.launch(self._command, stdout=log, stderr=subprocess.STDOUT)
        try:
            return self._ready_url()
        except BaseException:  # an interruption, too, must not leave it behind
            self.__exit__()
            raise

    @property
    def pid(self) -> int:
        """Of the process, within the block."""
        return self._process.pid

    def _ready_url(self) -> str:
        due = time.monotonic() + _READY_S
        while self._process.poll() is None and time.monotonic() < due:
            for line in self._log.read_text("utf-8", "replace").splitlines(keepends=True):
                if line.startswith("ready ") and line.endswith("\n"):
                    return line.split()[1]
            time.sleep(0.02)
        said = processes.last_lines(self._log, 3) or "(it said nothing)"
        raise MeasurementError(f"the mock server is not ready in {_READY_S:g} s: {said}")

    def __exit__(self, *exc: object) -> None:
        processes.stop(self._process)
