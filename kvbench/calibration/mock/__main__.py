"""``python -m kvbench.calibration.mock [--port 0] [--itl-ms 5] ...``: ``kvbench mock-server`` without the command line.

Options are the arguments of ``run`` and the fields of MockSettings.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

from kvbench.calibration.mock.server import run
from kvbench.calibration.mock.settings import MockSettings
from kvbench.common.errors import UsageError

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m kvbench.calibration.mock")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    for name in ("--tls-cert", "--tls-key", "--api-key-env"):
        parser.add_argument(name)
    for field in dataclasses.fields(MockSettings):
        kind = {"action": "store_true"} if isinstance(field.default, bool) else {"type": type(field.default)}
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, **kind)
    try:
        sys.exit(run(**vars(parser.parse_args())))
    except UsageError as error:
        print(f"kvbench mock-server: {error}", file=sys.stderr)
        sys.exit(2)
