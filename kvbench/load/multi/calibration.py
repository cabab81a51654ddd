"""Workers on other machines measure their own client before the load: this one's tells nothing of it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.common import processes
from kvbench.load.multi.merge import WorkerResult, most_in_flight
from kvbench.load.spec import LoadSpec
from kvbench.load.validity import busiest_second

if TYPE_CHECKING:
    from kvbench.calibration.calibrate import Calibration

LIMIT_S = 120.0
_COMMAND_S = 90.0
_SAID_CHARS = 300


def settings_of(spec: LoadSpec, workers: int) -> dict[str, Any]:
    """What each of ``workers`` is to be calibrated for: fields of CalibrationSettings."""
    from kvbench.calibration.cache import UNKNOWN_STREAMS, ClientLoad, settings_for

    streams = spec.concurrency or spec.max_concurrency or UNKNOWN_STREAMS
    asked = ClientLoad(-(-streams // workers), tls=spec.base_url.startswith("https:"))
    return dataclasses.asdict(settings_for(asked))


def calibrate_here(settings: dict[str, Any]) -> dict[str, Any]:
    """What ``kvbench calibrate-client`` finds on this worker's machine. ValueError when it finds nothing."""
    words = [f"--{name}={settings[name]}" for name in ("streams", "seconds", "processes")]
    words += [f"--itl-ms={settings['itl_ms']}", *(["--tls"] if settings["tls"] else [])]
    with tempfile.TemporaryDirectory(prefix="kvbench-worker-") as folder:
        found = Path(folder) / "calibration.json"
        command = [sys.executable, "-m", "kvbench", "calibrate-client", *words, "--json", str(found)]
        child = processes.launch(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # it ends with this worker
        try:
            said = child.communicate(timeout=_COMMAND_S)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            processes.stop(child)
            raise ValueError(f"its client could not be calibrated within {_COMMAND_S:g} s") from None
        if not found.is_file():
            raise ValueError(f"its client could not be calibrated: {said[-_SAID_CHARS:].strip()}")
        return json.loads(found.read_text(encoding="utf-8"))


def calibration_reasons(found: Sequence[Calibration], results: Sequence[WorkerResult], wall_s: float) -> list[str]:
    """Why single workers may not be believed: over the limits of a load, or with more to do than was tried.

    ``found`` and ``results`` [workers that handed back what they measured] are in the same order.
    """
    from kvbench.calibration.cache import ClientLoad
    from kvbench.calibration.calibrate import validity_limits

    reasons = []
    for each, result in zip(found, results, strict=True):
        settings = each.settings
        reasons += [f"{result.name}: {reason}" for reason in each.reasons_at(validity_limits(settings.itl_ms))]
        chunks = sum(len(s.completion.chunk_times) for s in result.samples)
        rate = max(chunks / wall_s if wall_s > 0 else 0.0, busiest_second(result.samples))
        had = ClientLoad(most_in_flight(result.samples), 1, rate, settings.tls)
        if not had.covered_by(settings):
            reasons.append(
                f"{result.name} had up to {had.streams} streams at once and {had.events_per_s:.0f} chunks a "
                f"second, and was calibrated at {settings.streams} and {settings.events_per_s:.0f}; use more workers, "
                "or set max_concurrency."
            )
    return reasons
