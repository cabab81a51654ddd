"""The mock server as a child of this process, and a certificate for it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from kvbench.common import processes
from kvbench.common.errors import MeasurementError

_READY_S, _OPENSSL_S = 20.0, 30.0


class MockProcess:
    """A ``kvbench dev mock-server`` on a free port for as long as the block lasts; gives its URL."""

    def __init__(self, folder: Path, flags: Mapping[str, object]) -> None:
        self._log = folder / "mock.log"
        self._command = [sys.executable, "-m", "kvbench", "dev", "mock-server", "--port", "0"]
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
        """The process, within the block."""
        return self._process.pid

    def _ready_url(self) -> str:
        due = time.monotonic() + _READY_S
        while self._process.poll() is None and time.monotonic() < due:
            for line in self._log.read_text("utf-8", "replace").splitlines(keepends=True):
                if line.startswith("ready ") and line.endswith("\n"):
                    return line.split()[1]
            time.sleep(0.02)
        output = processes.last_lines(self._log, 3) or "(it said nothing)"
        raise MeasurementError(f"the mock server is not ready in {_READY_S:g} s: {output}")

    def __exit__(self, *exc: object) -> None:
        processes.stop(self._process)


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A fresh PEM certificate of 127.0.0.1 and its key in ``folder``, made by the openssl program. MeasurementError."""
    program = shutil.which("openssl")
    if program is None:
        raise MeasurementError(
            "the load client cannot be calibrated through TLS without a certificate: install the openssl program, or "
            "measure with --no-calibration"
        )
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = subprocess.run(
        [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=kvbench-mock", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=False, capture_output=True, timeout=_OPENSSL_S, text=True,
    )  # fmt: skip
    if made.returncode:
        raise MeasurementError(f"openssl made no certificate: {made.stderr.strip()[-300:]}")
    return cert, key
