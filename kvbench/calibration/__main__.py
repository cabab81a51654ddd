"""``python -m kvbench.calibration --streams 16 [--tls]``: calibrates the client, prints the Calibration as JSON.

A worker of a load on several machines runs it on its own machine. Exit code 4 and a sentence where that fails.
"""

from __future__ import annotations

import argparse
import json
import sys

from kvbench.calibration.cache import ClientLoad, settings_for
from kvbench.calibration.calibrate import calibrate
from kvbench.common.errors import EXIT_INVALID, EXIT_OK, MeasurementError


def main(argv: list[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.calibration")
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tls", action="store_true")
    options = parser.parse_args(argv)
    try:
        found = calibrate(settings_for(ClientLoad(options.streams, tls=options.tls)))
    except MeasurementError as error:
        print(error, file=sys.stderr)
        return EXIT_INVALID
    print(json.dumps(found.to_json()))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
