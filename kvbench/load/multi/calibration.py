"""Workers on other machines measure their own client before the load: this machine's calibration says nothing of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.common import processes
from kvbench.load.multi.merge import WorkerResult, most_in_flight
from kvbench.load.spec import LoadSpec
from kvbench.load.validity import RATE_MARGIN, UNKNOWN_STREAMS, busiest_second

LIMIT_S = 120.0
_COMMAND_S = 90.0
_SAID_CHARS = 300


def streams_of(spec: LoadSpec, workers: int) -> int:
    """How many streams at once each of ``workers`` is calibrated for."""
    return -(-(spec.concurrency or spec.max_concurrency or UNKNOWN_STREAMS) // workers)


def calibrate_here(streams: int, tls: bool) -> dict[str, Any]:
    """The calibration of this machine's client (kvbench/calibration), as JSON. ValueError where there is none."""
    command = [sys.executable, "-m", "kvbench.calibration", "--streams", str(streams), *(["--tls"] if tls else [])]
    child = processes.launch(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = child.communicate(timeout=_COMMAND_S)
    except subprocess.TimeoutExpired:
        processes.stop(child)
        raise ValueError(f"its client could not be calibrated within {_COMMAND_S:g} s") from None
    if child.returncode:
        raise ValueError(f"its client could not be calibrated: {err.decode(errors='replace')[-_SAID_CHARS:].strip()}")
    return json.loads(out)


def calibration_reasons(
    found: Sequence[Mapping[str, Any]], results: Sequence[WorkerResult], wall_s: float
) -> list[str]:
    """Why single workers may not be believed: over the limits of a load, or busier than they were calibrated for.

    ``found`` and ``results``: one for each worker that handed back samples, in the same order.
    """
    reasons = []
    for each, result in zip(found, results, strict=True):
        reasons += [f"{result.name}: {reason}" for reason in each["reasons"]]
        streams, most_streams = most_in_flight(result.samples), each["settings"]["streams"]
        chunks = sum(len(s.completion.chunk_times) for s in result.samples)
        rate = max(chunks / wall_s if wall_s > 0 else 0.0, busiest_second(result.samples))
        calibrated_rate = most_streams * 1000 / each["settings"]["itl_ms"]
        if streams > most_streams or rate > RATE_MARGIN * calibrated_rate:
            reasons.append(
                f"{result.name} had up to {streams} streams at once and {rate:.0f} chunks a second, and was calibrated "
                f"at {most_streams} and {calibrated_rate:.0f}; use more workers, or set max_concurrency."
            )
    return reasons
