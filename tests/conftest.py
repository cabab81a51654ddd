"""Tests of sweeps and loads do without the client's calibration, which has tests of its own."""

import os

os.environ.setdefault("KVBENCH_NO_CALIBRATION", "1")
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it for its workers, and a table would be made to fit
