"""The environment of all tests: no calibration of the load client, which has tests of its own, no terminal's width."""

import os

os.environ.setdefault("KVBENCH_NO_CALIBRATION", "1")
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it for its workers, and a table would be made to fit
