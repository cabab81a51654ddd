"""Tests of sweeps and loads do without the client's calibration, which has tests of its own."""

import os

os.environ.setdefault("KVBENCH_NO_CALIBRATION", "1")
