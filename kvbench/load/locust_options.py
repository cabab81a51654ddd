"""kvbench's own options of Locust's command line, and the load of a workload file that they choose."""

from __future__ import annotations

import argparse
from typing import Any

from kvbench.workload.file import Workload, load_workload
from kvbench.workload.load_section import LoadPoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument_group(
        "kvbench",
        "what is sent to --host; --users is the concurrency in closed loop; the test ends when the workload's requests "
        "are used up, or, with --headless, --run-time after the first request, if that is sooner",
    ).add_argument
    add("--kvbench-workload", default="mixed", help="workload file (default: mixed.yaml)")
    add("--kvbench-at", default="", help="which of the workload's loads, e.g. c32 (default: the first)")
    add("--kvbench-profile", default="", help="cpu or gpu (default: what this machine has)")
    add("--kvbench-seed", type=int, default=None, help="seed of the requests (default: the workload's)")
    add("--kvbench-model", default="", help="model name (default: the server's first)")
    add("--kvbench-vocab-size", type=int, default=None, help="where the server does not tell")
    add("--kvbench-max-model-len", type=int, default=None, help="where the server does not tell")


def arguments_of(options: Any) -> list[str]:
    """Returns the options as they were given."""
    given = {name: value for name, value in vars(options).items() if name.startswith("kvbench_")}
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value not in (None, "")]


def chosen_load(options: Any) -> tuple[Workload, LoadPoint]:
    """Returns the workload and which of its loads is sent. ValueError or UsageError."""
    workload = load_workload(
        options.kvbench_workload, profile=options.kvbench_profile or None, seed=options.kvbench_seed
    )
    points = {point.load_id: point for point in workload.load_points}
    point = points.get(options.kvbench_at) if options.kvbench_at else workload.load_points[0]
    if point is None:
        raise ValueError(
            f"--kvbench-at {options.kvbench_at!r} is no load of this workload: its loads are {', '.join(points)}."
        )
    return workload, point
