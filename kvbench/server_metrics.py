"""What a target's /metrics says: parsing, polling during a load, and the counters of one load.

Names lose their prefix (``kvbench:`` or ``vllm:``), labelled counters become ``name_label``; histograms keep ``_sum``
and ``_count`` only (percentiles come from the client's raw samples).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

POLL_INTERVAL_S = 0.25
_PREFIXES = ("kvbench:", "vllm:", "kvbench_", "vllm_")
_COUNTER_ENDS = ("_total", "_sum", "_count")
_OWNED = "kv_pages_owned"
_SWAPPED = "swap_slots_used"


@dataclass(frozen=True)
class MetricsSample:
    """One reading. ``wall`` is time.time(); ``counters`` only grow, ``gauges`` do not."""

    wall: float
    gauges: Mapping[str, float]
    counters: Mapping[str, float]

    @property
    def owned_pages(self) -> float | None:
        return self.gauges.get(_OWNED)

    @property
    def swapped_slots(self) -> float:
        """Slots of the host that sequences hold; 0 for a server without a swap space."""
        return self.gauges.get(_SWAPPED, 0.0)

    @property
    def holds_kv(self) -> bool:
        """Whether any sequence has KV anywhere, as far as the server tells."""
        return bool(self.owned_pages or self.swapped_slots)

    @property
    def active_requests(self) -> float:
        return self.gauges.get("num_requests_running", 0.0) + self.gauges.get("num_requests_waiting", 0.0)


def parse_metrics(text: str, wall: float) -> MetricsSample:
    """Prometheus text -> flat gauges and counters. Families without our prefix (process_*, python_*) are left out."""
    wanted = "\n".join(line for line in text.splitlines() if "_bucket{" not in line and "_created" not in line)
    gauges: dict[str, float] = {}
    counters: dict[str, float] = {}
    for family in text_string_to_metric_families(wanted + "\n"):
        prefix = next((p for p in _PREFIXES if family.name.startswith(p)), None)
        if prefix is None or family.name.endswith("_info"):
            continue
        for sample in family.samples:
            grows = family.type != "gauge" and sample.name.endswith(_COUNTER_ENDS)
            into = counters if grows else gauges
            labels = [v for k, v in sample.labels.items() if k not in ("model_name", "engine", "le")]
            name = "_".join([sample.name.removeprefix(prefix), *labels])
            into[name] = into.get(name, 0.0) + sample.value
    return MetricsSample(wall, gauges, counters)


def counter_changes(before: MetricsSample | None, after: MetricsSample | None) -> dict[str, float]:
    """End minus start of every counter. A label value that was not there before started from 0."""
    if before is None or after is None:
        return {}
    return {name: value - before.counters.get(name, 0.0) for name, value in sorted(after.counters.items())}


def gauge_summary(samples: Sequence[MetricsSample]) -> dict[str, dict[str, float]]:
    """Peak and mean of each gauge over the polled samples (evenly spaced in time)."""
    summary = {}
    for name in sorted({n for s in samples for n in s.gauges}):
        values = [s.gauges[name] for s in samples if name in s.gauges]
        summary[name] = {"peak": max(values), "mean": sum(values) / len(values)}
    return summary


@dataclass
class MetricsPoller:
    """Reads the metrics every ``interval_s`` in a thread of its own, until stopped.

    A failed read is counted, not raised: a server that dies is found by the sweep, and a slow one must not end it.
    """

    read: Callable[[], MetricsSample | None]
    interval_s: float = POLL_INTERVAL_S
    samples: list[MetricsSample] = field(default_factory=list)
    failures: int = 0

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-poller", daemon=True)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due = max(due + self.interval_s, time.monotonic())  # a late read is not made up for
            try:
                sample = self.read()
            except Exception:
                self.failures += 1
                continue
            if sample is not None:
                self.samples.append(sample)

    def __enter__(self) -> MetricsPoller:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
