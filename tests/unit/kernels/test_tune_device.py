"""The device side of `kvbench tune` without a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CHECKS = Path(__file__).with_name("tune_device_checks.py")


def test_in_the_interpreter():
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=CHECKS.parents[3])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
