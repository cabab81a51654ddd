"""The load process's command line."""

from __future__ import annotations

import argparse

from kvbench.load.spec import ARRIVE_S, DEFAULT_PORT


def parse(argv: list[str]) -> argparse.Namespace:
    """See kvbench/load/run.py. Ends the process with code 2 for what cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.load", description=__doc__)
    parser.add_argument("spec", nargs="?")
    parser.add_argument("--master", action="store_true")
    parser.add_argument("--expect-workers", type=int, default=1)
    parser.add_argument("--bind-host", default="127.0.0.1")
    parser.add_argument("--bind-port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--arrive-timeout", type=float, default=ARRIVE_S)
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--master-host", default="127.0.0.1")
    parser.add_argument("--master-port", type=int, default=DEFAULT_PORT)
    options = parser.parse_args(argv)
    if options.worker == (options.spec is not None):
        parser.error("give SPEC.json, or --worker without one")
    return options
