"""What the Locust file drives: the load of a workload file or of a SPEC.json, from Locust's command line.

Every node of a distributed test makes the same requests from the same seed, and takes its own shard of them.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from locust.stats import RequestStats

from kvbench.load.multi.shards import make_shards
from kvbench.load.process import requests_of, session_of
from kvbench.load.samples import Sample
from kvbench.load.session import LoadSession
from kvbench.load.spec import LoadSpec, read_spec
from kvbench.requests.request import RequestList
from kvbench.workload.design import LoadPoint
from kvbench.workload.file import Workload, load_workload

SPEC_VARIABLE = "KVBENCH_LOAD_SPEC"
_WORKLOAD = Path(__file__).resolve().parents[2] / "workloads" / "mixed.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """kvbench's own options of Locust's command line."""
    group = parser.add_argument_group(
        "kvbench",
        "what is sent to --host; --users is the concurrency in closed loop; the test ends when the workload's requests "
        "are used up, or at --run-time, if that is sooner",
    )
    group.add_argument("--kvbench-workload", default=str(_WORKLOAD), help="workload file (default: mixed.yaml)")
    group.add_argument("--kvbench-at", default="", help="which of the workload's loads, e.g. c32 (default: the first)")
    group.add_argument("--kvbench-profile", default="", help="cpu or gpu (default: what this machine has)")
    group.add_argument("--kvbench-seed", type=int, default=None, help="seed of the requests (default: the workload's)")
    group.add_argument("--kvbench-model", default="", help="model name (default: the server's first)")
    group.add_argument("--kvbench-vocab-size", type=int, default=None, help="where the server does not tell")
    group.add_argument("--kvbench-max-model-len", type=int, default=None, help="where the server does not tell")
    group.add_argument(
        "--kvbench-spec",
        default=os.environ.get(SPEC_VARIABLE, ""),
        help="SPEC.json of one load, in place of a workload",
    )


@dataclass(frozen=True)
class Job:
    """What is to be driven. ``spec`` and ``requests`` are given by SPEC.json, or made when the server is known."""

    mode: str
    users: int
    workload: Workload | None = None
    point: LoadPoint | None = None
    spec: LoadSpec | None = None
    requests: RequestList | None = None

    @property
    def out_dir(self) -> Path | None:
        """Where requests.parquet and load.json go; None for a test that only Locust reports."""
        return Path(self.spec.out_dir) if self.spec else None


def job_of(options: Any) -> Job:
    """The job that the command line asks for. ValueError or UsageError with a sentence."""
    if options.kvbench_spec:
        spec = read_spec(options.kvbench_spec)
        return Job(spec.mode, spec.concurrency or 1, spec=spec, requests=requests_of(spec))
    workload = load_workload(
        options.kvbench_workload, profile=options.kvbench_profile or None, seed=options.kvbench_seed
    )
    points = {point.load_id: point for point in workload.load_points}
    point = points.get(options.kvbench_at) if options.kvbench_at else workload.load_points[0]
    if point is None:
        raise ValueError(
            f"--kvbench-at {options.kvbench_at!r} is no load of this workload: its loads are {', '.join(points)}."
        )
    return Job(point.mode, point.concurrency or 1, workload, point)


def session_for(job: Job, host: str, options: Any, users: int, shard: tuple[int, int], test: int) -> LoadSession:
    """What the users of one node share. ``shard``: this node's number, from 0, and how many nodes there are.

    ``test``: from 1; no prompt of one test is sent in another, where prompts are drawn.

    Asks the server for its model. ValueError, UsageError or MeasurementError with a sentence.
    """
    spec, requests = (job.spec, job.requests) if job.spec else _from_workload(job, host, options, users, test)
    number, nodes = shard
    if nodes > 1:
        part = make_shards(spec.model_copy(update={"concurrency": max(users, nodes)}), requests, nodes)[number]
        spec, requests = part.spec, part.requests
    return session_of(spec, requests)


def _from_workload(job: Job, host: str, options: Any, users: int, test: int) -> tuple[LoadSpec, RequestList]:
    from kvbench.load import launch as loadrun
    from kvbench.targets.running import OpenAITarget

    if not host:
        raise ValueError("no server is given; write for example --host http://127.0.0.1:8000.")
    load, point = job.workload.load, job.point
    target = OpenAITarget(
        host,
        model=options.kvbench_model or None,
        vocab_size=options.kvbench_vocab_size,
        max_model_len=options.kvbench_max_model_len,
    )
    target.start({}, Path())
    try:
        model, info = target.model, target.server_info()
    finally:
        target.stop()
    requests = loadrun.make_requests(
        load,
        point,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        seed=job.workload.seed,
        repeat=test,
    )
    fields = loadrun.load_spec(
        load, point, base_url=target.base_url, model=model.name, requests_file=Path(), out_dir=Path(),
        send_priority=loadrun.takes_priority({"target": host}, info),
    )  # fmt: skip
    spec = LoadSpec.model_validate(fields | ({"concurrency": users} if point.mode == "closed" else {}))
    return spec, requests if isinstance(requests, RequestList) else RequestList(requests)


def add_rows(stats: RequestStats, sample: Sample) -> None:
    """TTFT, TPOT and every ITL of a successful request as rows of Locust's statistics [ms], under the request's class.

    They are no requests: they go past Locust's request event, so that its Aggregated row is that of the requests alone.
    Locust shows percentiles rounded to two digits; kvbench's own come from raw samples.
    """
    done, times, cls = sample.completion, sample.completion.chunk_times, sample.request.cls
    if not done.ok or done.first is None:
        return
    rows = [("TTFT", done.first - sample.t0), *(("ITL", gap) for gap in np.diff(times).tolist())]
    if (done.output_tokens or 0) > 1:
        rows.append(("TPOT", (times[-1] - times[0]) / (done.output_tokens - 1)))
    for kind, seconds in rows:
        stats.get(cls, kind).log(seconds * 1000.0, 0)
