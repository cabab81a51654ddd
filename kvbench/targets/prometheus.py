"""A target's /metrics: parsing, polling during a load, and the counters of one load.

Names lose their prefix (``kvbench:``, ``vllm:`` ...) and become ours where a server has others (``MetricNames``);
labelled counters become ``name_label``; histograms keep ``_sum`` and ``_count`` only (percentiles come from the
client's raw samples). What a server does not tell is absent, not 0.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvbench.common.stats import time_mean

POLL_INTERVAL_S = 0.25
_READ_SHARE = 0.005  # of a core: a long page of metrics costs its server more than its reader
_LONGEST_PAUSE_S = 2.0
_COUNTER_ENDS = ("_total", "_sum", "_count")
_HISTOGRAM_ENDS = ("_sum", "_count")
_SHARE_END = "_perc"  # a share: several engines have the mean of theirs, not the sum
# Labels that name the process that counted.
_SOURCES = {"model_name", "engine", "engine_type", "le", "pid", "tp_rank", "pp_rank", "dp_rank", "moe_ep_rank"}


@dataclass(frozen=True)
class MetricNames:
    """The names that one kind of server has for its metrics. Our units: tokens, seconds, shares from 0 to 1.

    ``names``: its name without the prefix -> our name or names; of a histogram without ``_sum`` and ``_count``. A
    renamed metric is summed over its labels; others keep their name.
    ``facts``: family -> label -> our name of a fact about the server (an ``_info`` metric has it in a label; the empty
    label stands for a gauge's value).
    ``parts_label``: a label that gauges have for each part of a whole. The whole has an empty value there, and only
    the whole is read.
    """

    prefixes: tuple[str, ...]
    names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    facts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    parts_label: str = ""

    def ours(self, name: str) -> tuple[str, ...]:
        """Our names for a sample of theirs; empty where it keeps its own."""
        if name not in self.names:
            for end in _HISTOGRAM_ENDS:
                if name.endswith(end) and name.removesuffix(end) in self.names:
                    return tuple(ours + end for ours in self.ours(name.removesuffix(end)))
            return ()
        ours = self.names[name]
        return (ours,) if isinstance(ours, str) else ours

    def facts_in(self, name: str, sample: Sample) -> dict[str, float]:
        """The facts about the server that a sample tells."""
        facts = {}
        for label, ours in self.facts[name].items() if name in self.facts else ():
            try:
                facts[ours] = float(sample.labels[label]) if label else sample.value
            except (KeyError, ValueError):
                continue  # another version of that server
        return facts


OURS = MetricNames(("kvbench:", "kvbench_", "vllm:", "vllm_"))


@dataclass(frozen=True)
class MetricsSample:
    """One reading, ``at`` [s, perf_counter]. ``counters`` only grow, ``gauges`` do not; ``facts`` never change."""

    at: float
    gauges: Mapping[str, float]
    counters: Mapping[str, float]
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def owned_pages(self) -> float | None:
        return self.gauges.get("kv_pages_owned")

    @property
    def swapped_slots(self) -> float:
        """Slots of the host that sequences hold; 0 for a server without a swap space."""
        return self.gauges.get("swap_slots_used", 0.0)

    @property
    def holds_kv(self) -> bool:
        """Tests whether any sequence has KV anywhere, as far as the server tells."""
        return bool(self.owned_pages or self.swapped_slots)

    @property
    def active_requests(self) -> float:
        return self.gauges.get("num_requests_running", 0.0) + self.gauges.get("num_requests_waiting", 0.0)


OnReading = Callable[[MetricsSample], None]


def parse_metrics(text: str, at: float, kinds: Sequence[MetricNames] = (OURS,)) -> MetricsSample:
    """Flat gauges and counters of a Prometheus text, in the names of the first of ``kinds`` with the family's prefix.

    Families with no such prefix (process_*, python_*) are left out.
    """
    wanted = "\n".join(line for line in text.splitlines() if "_bucket{" not in line and "_created" not in line)
    gauges, counters, facts = defaultdict[str, list[float]](list), defaultdict[str, float](float), dict[str, float]()
    for family in text_string_to_metric_families(wanted + "\n"):
        prefixes = ((kind, prefix) for kind in kinds for prefix in kind.prefixes if family.name.startswith(prefix))
        kind, prefix = next(prefixes, (None, ""))
        if kind is None:
            continue
        samples, is_gauge = family.samples, family.type == "gauge"
        if is_gauge:
            samples = [sample for sample in samples if not sample.labels.get(kind.parts_label)] or samples
        for sample in samples:
            name = sample.name.removeprefix(prefix)
            facts |= kind.facts_in(name, sample)
            if name.endswith("_info"):
                continue
            labels = [value for label, value in sample.labels.items() if value and label not in _SOURCES]
            for ours in kind.ours(name) or ("_".join([name, *labels]),):
                if not is_gauge and name.endswith(_COUNTER_ENDS):
                    counters[ours] += sample.value
                else:
                    gauges[ours].append(sample.value)
    shares = {name: sum(values) / (len(values) if name.endswith(_SHARE_END) else 1) for name, values in gauges.items()}
    return MetricsSample(at, shares, dict(counters), facts)


def counter_changes(before: MetricsSample | None, after: MetricsSample | None) -> dict[str, float]:
    """Returns after minus before of every counter. A new one started from 0."""
    if before is None or after is None:
        return {}
    return {name: value - before.counters.get(name, 0.0) for name, value in sorted(after.counters.items())}


def gauge_summary(samples: Sequence[MetricsSample]) -> dict[str, dict[str, float]]:
    """Peak of each gauge over the polled samples, and its mean over their time."""
    summary = {}
    for name in sorted({name for sample in samples for name in sample.gauges}):
        at, values = zip(*((s.at, s.gauges[name]) for s in samples if name in s.gauges), strict=True)
        summary[name] = {"peak": max(values), "mean": time_mean(at, values)}
    return summary


@dataclass
class MetricsPoller:
    """Reads the metrics every ``interval_s`` in its own thread, until stopped.

    Less often if reading takes more than ``_READ_SHARE`` of a core, so that the readings do not disturb the load. A
    failed reading is counted, not raised: the sweep notices a server that dies, and a slow one must not end the sweep.
    ``on_reading`` gets each reading, in that thread.
    """

    read: Callable[[], MetricsSample | None]
    interval_s: float = POLL_INTERVAL_S
    on_reading: OnReading = lambda sample: None
    samples: list[MetricsSample] = field(default_factory=list)
    failures: int = 0

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-poller", daemon=True)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            before = time.thread_time()
            try:
                sample = self.read()
            except Exception:
                self.failures += 1
                sample = None
            if sample is not None:
                self.samples.append(sample)
                self.on_reading(sample)
            pause = max(self.interval_s, min((time.thread_time() - before) / _READ_SHARE, _LONGEST_PAUSE_S))
            due = max(due + pause, time.monotonic())  # a late read is not made up for

    def __enter__(self) -> MetricsPoller:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(timeout=1)  # a read that hangs ends by its own time-out
