"""``python -m kvbench.calibration --streams 16 [--tls]``: calibrates the client, prints the Calibration as JSON.

A worker of a load on several machines runs it on its own machine. Exit code 4 and a sentence where that fails.
"""

from __future__ import annotations

import argparse
import json
import sys

from kvbench.calibration.cache import ClientLoad, settings_for
from kvbench.calibration.calibrate import calibrate
from kvbench.common.errors import EXIT_INVALID, MeasurementError

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m kvbench.calibration")
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tls", action="store_true")
    options = parser.parse_args()
    try:
        print(json.dumps(calibrate(settings_for(ClientLoad(options.streams, tls=options.tls))).to_json()))
    except MeasurementError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_INVALID)
