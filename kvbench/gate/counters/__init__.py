"""The counter gate: replays scenarios without computing a model and compares every counter with a lock file."""

from __future__ import annotations

from pathlib import Path

WORKLOAD, LOCK = Path("workloads/ci_counters.yaml"), Path("ci/counters.lock.json")
