"""What ``locust -f kvbench/load/locustfile.py`` sends: a load of a workload file.

Every process of a distributed test makes the same requests from the same seed, and sends its own share of them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.load import launch
from kvbench.load.spec import LoadSpec
from kvbench.measure.server import requests_for
from kvbench.measure.server_state import with_default_ends
from kvbench.requests.request import RequestList
from kvbench.targets.choose import require_url
from kvbench.targets.running import OpenAITarget
from kvbench.workload.design import LoadPoint
from kvbench.workload.file import Workload, load_workload

_WORKLOAD = Path(__file__).resolve().parents[2] / "workloads" / "mixed.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """kvbench's own options of Locust's command line."""
    add = parser.add_argument_group(
        "kvbench",
        "what is sent to --host; --users is the concurrency in closed loop; the test ends when the workload's requests "
        "are used up, or, with --headless, --run-time after the first request, if that is sooner",
    ).add_argument
    add("--kvbench-workload", default=str(_WORKLOAD), help="workload file (default: mixed.yaml)")
    add("--kvbench-at", default="", help="which of the workload's loads, e.g. c32 (default: the first)")
    add("--kvbench-profile", default="", help="cpu or gpu (default: what this machine has)")
    add("--kvbench-seed", type=int, default=None, help="seed of the requests (default: the workload's)")
    add("--kvbench-model", default="", help="model name (default: the server's first)")
    add("--kvbench-vocab-size", type=int, default=None, help="where the server does not tell")
    add("--kvbench-max-model-len", type=int, default=None, help="where the server does not tell")


@dataclass(frozen=True)
class LocustJob:
    """What to send. ``users``: Locust users where --users does not say."""

    mode: str
    users: int
    workload: Workload
    point: LoadPoint

    def requests(self, host: str, options: Any, users: int, test: int) -> tuple[LoadSpec, RequestList]:
        """The spec and requests of the whole test, which ``users`` share; without canaries, which nobody judges there.

        ``test``: how many tests this process has started; a workload's drawn prompts differ from test to test. Asks the
        server for its model. ValueError, UsageError or MeasurementError.
        """
        require_url("--host", host or "")
        target = OpenAITarget(
            host,
            model=options.kvbench_model or None,
            vocab_size=options.kvbench_vocab_size,
            max_model_len=options.kvbench_max_model_len,
            form=self.workload.load.form,
        )
        target.start({}, Path())
        try:
            info = target.server_info()
            load = with_default_ends(self.workload.load.model_copy(update={"canaries": None}), target)
            requests = requests_for(load, self.point, target, self.workload.seed, test)
        finally:
            target.stop()
        for note in target.notes:
            print(f"kvbench: {note}", file=sys.stderr)
        point = self.point
        fields = target.client_fields() | ({"concurrency": users} if point.mode == "closed" else {})
        spec = LoadSpec.of(
            load, point, base_url=target.base_url, model=target.model.name, requests_file="", out_dir="",
            send_priority=launch.takes_priority({"target": host}, info), **fields,
        )  # fmt: skip
        return spec, RequestList(requests, getattr(requests, "notes", None))


def job_of(options: Any) -> LocustJob:
    """The job of this command line. ValueError or UsageError."""
    workload = load_workload(
        options.kvbench_workload, profile=options.kvbench_profile or None, seed=options.kvbench_seed
    )
    points = {point.load_id: point for point in workload.load_points}
    point = points.get(options.kvbench_at) if options.kvbench_at else workload.load_points[0]
    if point is None:
        raise ValueError(
            f"--kvbench-at {options.kvbench_at!r} is no load of this workload: its loads are {', '.join(points)}."
        )
    return LocustJob(point.mode, point.concurrency or 1, workload, point)
