"""A certificate for a mock server on this machine, made anew each time: no key is kept anywhere."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from kvbench.common.errors import MeasurementError

_LIMIT_S = 30.0


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Paths of a PEM certificate of 127.0.0.1 and its key, written to ``folder`` by the openssl program.

    Raises MeasurementError when there is no such program, or it fails.
    """
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
        check=False, capture_output=True, timeout=_LIMIT_S, text=True,
    )  # fmt: skip
    if made.returncode:
        raise MeasurementError(f"openssl made no certificate: {made.stderr.strip()[-300:]}")
    return cert, key
