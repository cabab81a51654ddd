"""A run as the report and the gate read it: a Run of MeasuredCells of Repeats.

What may be absent (a server without /metrics, a cell that never finished, a field of an older run) is None or empty.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.metrics.definitions import SERVED, SIMULATED
from kvbench.metrics.latency import SEVERAL_TOKENS, in_steady, most_frequent_failures
from kvbench.metrics.model import (
    CanaryCounts,
    Distribution,
    FailureMessage,
    GroupLatencies,
    PooledLatencies,
)
from kvbench.runs.engine_time import EngineTime
from kvbench.runs.folder import GAUGES, REQUESTS, load_resume_command, read_table
from kvbench.runs.predictions import Predictions
from kvbench.runs.quality import QualityResult
from kvbench.runs.results import (
    COMPLETE,
    Capacity,
    Manifest,
    RepeatSummary,
    SimulatedMachine,
    prefix_hits,
)
from kvbench.workload.settings import Settings

if TYPE_CHECKING:
    import pandas as pd

# Keys of a workload's load that are in each cell's own definition, or that do not change the requests.
NOT_OF_REQUESTS = ("repeats", "slo", "concurrency", "request_rate", "num_requests", "timeout_s")
_THROUGHPUT = "steady_output_throughput"
WRONG = "wrong answers"
DOUBTS = (WRONG, "invalid", "refused")  # the worst first
_GAUGES = (
    "t", "repeat", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "kv_slots_total",
    "kv_slots_reserved", "kv_slots_used", "kv_waste_slots", "page_table_bytes",
)  # fmt: skip


@dataclass(frozen=True, order=True)
class MeasuredLoad:
    """One load: ``value`` concurrent requests (closed loop) or requests/s (open; inf: all at once).

    ``arrivals`` of an open loop: "poisson" and so on; "trace", "ramp" and "step" have no single rate and the value 0.
    ``sessions``: the load consists of conversations: a user pauses between turns, and a rate is of conversations.
    """

    mode: str
    value: float
    arrivals: str = field(default="", compare=False)
    sessions: bool = field(default=False, compare=False)

    @property
    def label(self) -> str:
        """The load in a sentence: "24 concurrent requests", "4 requests/s"; "8 users", "4 conversations/s"."""
        if self.mode == "closed":
            return self.short if self.sessions else f"{self.value:g} concurrent request{'' if self.value == 1 else 's'}"
        if self.value == 0:
            names = {"ramp": "a ramp of the rate", "step": "a rate in steps"}
            return names.get(self.arrivals, "the trace's arrivals")
        what = "conversations" if self.sessions else "requests"
        return f"all {what} at once" if self.value == math.inf else f"{self.value:g} {what}/s"

    @property
    def short(self) -> str:
        """The load in a table: "24 at once", "8 users", "4/s"."""
        if self.mode == "closed" and self.sessions:
            return f"{self.value:g} user{'' if self.value == 1 else 's'}"
        return f"{self.value:g} at once" if self.mode == "closed" else self.tick

    @property
    def where(self) -> str:
        """The load at the end of a sentence: "at 24 at once", "at 4/s", "on the trace"."""
        return f"at {self.short}" if self.value else f"on the {self.short}"

    @property
    def tick(self) -> str:
        """The load at an axis: "24", "4/s", "trace", "all"."""
        if self.mode == "closed":
            return f"{self.value:g}"
        if self.value == 0:
            return self.arrivals if self.arrivals in ("ramp", "step") else "trace"
        return "all" if self.value == math.inf else f"{self.value:g}/s"


class Repeat(RepeatSummary):
    """One load on one fresh server; ``observed``: statistics of the server's gauges in the steady window."""

    observed: Mapping[str, float] = {}


@dataclass(frozen=True)
class MeasuredCell:
    """One configuration under one load, all its repeats."""

    cell_id: str
    config_id: str
    name: str  # unique per configuration, for people
    is_baseline: bool
    varied: Settings
    settings: Settings
    load: MeasuredLoad
    capacity: Capacity
    repeats: tuple[Repeat, ...]
    pooled: PooledLatencies
    valid: bool
    invalid_reasons: tuple[str, ...]
    folder: Path
    notes: Mapping[str, Any] = field(default_factory=dict)  # how the requests were made: trace, scales, source
    invalid_repeats: Mapping[str, Sequence[str]] = field(default_factory=dict)  # disturbed, not in ``repeats``: why
    refused: tuple[str, ...] = ()  # how much of each repeat the server served, where it refused too much
    wrong_answers: tuple[str, ...] = ()  # how many canaries of each repeat were answered wrongly, where that fails it
    canaries: CanaryCounts = field(default_factory=CanaryCounts)  # over all repeats
    simulated: bool = False

    @property
    def clock(self) -> str:
        """The clock of its times: ``SERVED`` or ``SIMULATED``."""
        return SIMULATED if self.simulated else SERVED

    @property
    def doubt(self) -> str:
        """The reason why its figures are compared with no others, one of ``DOUBTS``; empty where they are."""
        if self.valid:
            return ""
        return WRONG if self.wrong_answers else "refused" if self.refused and not self.invalid_reasons else "invalid"

    @property
    def marked_name(self) -> str:
        """The name; of a cell in doubt also why: "contiguous (invalid)"."""
        return f"{self.name} ({self.doubt})" if self.doubt else self.name

    @property
    def failure_messages(self) -> dict[str, FailureMessage]:
        """The most frequent message of each kind of failure, over all repeats."""
        every = [entry for r in self.repeats for entry in r.metrics.failure_messages.items()]
        return most_frequent_failures((kind, entry.message, entry.requests) for kind, entry in every)

    def per_repeat(self, path: str) -> dict[int, float]:
        """The finite values of a client metric by repeat; ``path``: as in LoadMetrics, such as ``ttft_ms.p95``."""
        values = {r.repeat: r.metrics.value(path) for r in self.repeats}
        return {repeat: value for repeat, value in values.items() if value is not None}

    @property
    def has_steady(self) -> bool:
        """Tests whether every repeat has a steady window; throughputs of both kinds are never mixed.

        Requests that a server refuses in the window end at once, so what it served is seen over the whole load.
        """
        return not self.refused and len(self.per_repeat(_THROUGHPUT)) == len(self.repeats)

    def throughput(self, steady: bool | None = None) -> dict[int, float]:
        """The output tokens/s by repeat: of the steady window, or of the whole run where a repeat has none."""
        chosen = self.has_steady if steady is None else steady
        return self.per_repeat(_THROUGHPUT if chosen else "output_throughput")

    @property
    def has_steady_latency(self) -> bool:
        """Tests whether the leading latencies are of the steady windows: every repeat has one with enough requests."""
        return self.has_steady and all(r.metrics.has_steady_latency for r in self.repeats)

    def latency(self, metric: str, steady: bool | None = None) -> dict[int, float]:
        """A latency such as "ttft_ms.p95" by repeat: of the steady window, or of the whole run as ``percentile``."""
        return self.per_repeat(self._latencies(metric, steady))

    def _latencies(self, metric: str, steady: bool | None) -> str:
        return f"steady_latency.{metric}" if (self.has_steady_latency if steady is None else steady) else metric

    @property
    def typical_repeat(self) -> int:
        """The repeat of median throughput (the lower of the middle two): one that happened, not a mean."""
        values = sorted(self.throughput().items(), key=lambda pair: pair[1])
        return values[(len(values) - 1) // 2][0] if values else self.repeats[0].repeat

    def observed(self, gauge: str) -> dict[int, float]:
        """A statistic of the server's gauges by repeat, such as "running_mean"."""
        return {r.repeat: r.observed[gauge] for r in self.repeats if gauge in r.observed}

    def observed_mean(self, gauge: str) -> float | None:
        """The mean of such a statistic over the repeats; None where no repeat has it."""
        values = list(self.observed(gauge).values())
        return math.fsum(values) / len(values) if values else None

    def counter(self, name: str) -> float | None:
        """A server counter summed over the repeats; None where no repeat has it."""
        values = [value for r in self.repeats if (value := r.server.get(name)) is not None]
        return float(sum(values)) if values else None

    def latency_groups(self, kind: str) -> Mapping[str, GroupLatencies]:
        """The leading pooled latencies of each group of requests; ``kind``: "per_class" or "per_turn"."""
        return self.pooled.at(self._latencies(kind, self.has_steady_groups(kind))) or {}

    def has_steady_groups(self, kind: str) -> bool:
        """Tests whether these are of the steady windows: an older run stored them of the whole run only."""
        steady = self.pooled.steady_latency
        return self.has_steady_latency and steady is not None and kind in steady.model_fields_set

    def percentile(self, metric: str, which: str, steady: bool | None = None) -> tuple[float | None, bool]:
        """A latency percentile over the pooled raw samples, and whether it has too few samples to be certain.

        ``steady``: over the requests due in the steady windows, or all; None: as ``has_steady_latency`` says.
        """
        path = self._latencies(metric, steady)
        summary: Distribution = self.pooled.distribution(path)
        value = self.pooled.value(f"{path}.{which}")
        if value is not None:
            return value, which in summary.uncertain
        values = list(self.per_repeat(f"{path}.{which}").values())
        return (float(np.median(values)), True) if values else (None, False)

    @property
    def several_tokens_per_chunk(self) -> float | None:
        """The mean number of tokens in a chunk, over the repeats; None where it is one or not known."""
        per_chunk = self.per_repeat("tokens_per_chunk").values()
        mean = math.fsum(per_chunk) / len(per_chunk) if per_chunk else 0.0
        return mean if mean >= SEVERAL_TOKENS else None

    def client(self, name: str) -> list[Any]:
        """The values that the load client recorded of itself under ``name``, one a repeat that has it."""
        values = [r.metrics.at(f"client.{name}") for r in self.repeats]
        return [v for v in values if v is not None]

    def count(self, name: str) -> int:
        """Counts the ``completed`` or ``failed`` requests over all repeats."""
        return int(sum(r.metrics.value(name) or 0 for r in self.repeats))

    @property
    def sent(self) -> int:
        """The requests sent over all repeats."""
        return self.count("completed") + self.count("failed")

    @property
    def share_within_slo(self) -> float | None:
        """The share of all requests that met every limit of the workload's SLO, whole run; None without one."""
        rates, seconds = self.per_repeat("goodput"), self.per_repeat("duration_s")
        sent = self.sent
        met = sum(rate * seconds.get(repeat, 0.0) for repeat, rate in rates.items())
        return min(1.0, met / sent) if rates and seconds and sent else None

    @property
    def hit_rate(self) -> float | None:
        """The measured prefix-cache hit rate in tokens, 0 to 1; None where no token was looked up."""
        counts = [prefix_hits(r.prefix_cache, r.server) or (0.0, 0.0) for r in self.repeats]
        hits, queries = map(sum, zip(*counts, strict=True))
        return hits / queries if queries else None

    @property
    def possible_hits(self) -> tuple[float, float] | None:
        """The lowest and highest hit rate that prompts and declared cache state allow; None unless all repeats tell."""
        bounds = [r.prefix_cache_bounds for r in self.repeats if r.prefix_cache_bounds and r.prefix_cache.queries]
        if not bounds or len(bounds) != len(self.repeats):
            return None
        queries = sum(r.prefix_cache.queries or 0.0 for r in self.repeats)
        return sum(b.low for b in bounds) / queries, sum(b.high for b in bounds) / queries

    @property
    def layout(self) -> str | None:
        """The layout of the KV cache; None for an engine whose settings do not name it."""
        return self.settings.get("layout")

    @property
    def is_contiguous(self) -> bool:
        return self.layout == "contiguous"

    @property
    def page_size(self) -> int | None:
        """The page size that was set; None where the setting was left out."""
        return self.settings.get("page_size")

    @property
    def is_paged(self) -> bool:
        return self.layout == "paged"

    def requests(self, steady: bool = False) -> pd.DataFrame:
        """Reads all successful requests; empty without the file. ``steady``: those that came in the steady windows."""
        import pandas as pd

        frame = read_table(self.folder / REQUESTS)
        if steady and len(frame):
            ends = {r.repeat: (r.metrics.steady_start_s, r.metrics.steady_end_s) for r in self.repeats}
            frame = pd.concat([in_steady(rows, ends.get(repeat)) for repeat, rows in frame.groupby("repeat")])
        return frame[frame["ok"].astype(bool)] if "ok" in frame else frame

    def gauges(self) -> pd.DataFrame:
        """Reads the polled gauges; empty for a server without /metrics."""
        return read_gauges(self.folder)


@dataclass(frozen=True)
class Run:
    """One results folder."""

    folder: Path
    manifest: Manifest
    cells: tuple[MeasuredCell, ...]  # by configuration, contiguous ones first, then by load, ascending
    missing: tuple[str, ...]  # ids of planned cells without a finished load
    short: tuple[str, ...]  # "cell: 2 of 3 repeats"
    failures: tuple[str, ...]  # loads that failed, each with the reason
    damaged: tuple[str, ...]  # cells that are left out because a file is cut short, each with what to do
    unread: tuple[str, ...] = ()  # those of them that are of files beside the cells, which no limit of a gate reads
    engine_time: EngineTime | None = None
    quality: QualityResult | None = None
    predictions: Predictions | None = None

    @property
    def not_kept(self) -> bool:
        """Tests whether it was measured to its end and no file of its cells is here: some references are kept so."""
        finished = bool(self.missing) and self.status == COMPLETE
        return finished and not self.cells and self.folder.is_dir() and not (self.folder / "cells").exists()

    @property
    def resume_command(self) -> str:
        """The command that measures what is missing or invalid."""
        if self.manifest.kind == "load":
            return load_resume_command(self.manifest.command)
        return shlex.join(["kvbench", "sweep", "--resume", str(self.folder)])

    @property
    def problems(self) -> tuple[str, ...]:
        return self.damaged + self.failures

    @property
    def status(self) -> str:
        return self.manifest.status

    @property
    def is_built_in(self) -> bool:
        """Tests whether the engine is the built-in one, whose defaults are known; so are runs that do not tell."""
        return self.manifest.backend in (None, "kvbench") or bool(self.simulated)

    @property
    def simulated(self) -> SimulatedMachine | None:
        """The machine of a simulated run, and where its step times came from; None for a measured run."""
        return self.manifest.simulated

    @property
    def clock(self) -> str:
        """The clock of its times: ``SERVED`` or ``SIMULATED``."""
        return self.manifest.clock

    @property
    def spec(self) -> Mapping[str, Any]:
        """The workload file as the manifest keeps it."""
        return self.manifest.workload

    @property
    def workload(self) -> str:
        return str(self.spec.get("name") or self.folder.parent.name)

    @property
    def load_section(self) -> Mapping[str, Any]:
        return self.manifest.load_section

    @property
    def cache_state(self) -> str:
        """The state of the prefix cache that its loads began with; of an older run the declared one."""
        declared = self.load_section.get("cache_state", "cold")
        return " or ".join(
            {r.prefix_cache.state or declared: None for c in self.cells for r in c.repeats} or [declared]
        )

    @property
    def loads(self) -> list[MeasuredLoad]:
        return sorted({cell.load for cell in self.cells})

    @property
    def configs(self) -> list[str]:
        """The names of the configurations in display order."""
        return list(dict.fromkeys(cell.name for cell in self.cells))

    @property
    def by_load(self) -> list[MeasuredCell]:
        """The cells in the order of the tables: the highest load first."""
        return [cell for load in reversed(self.loads) for cell in self.at(load)]

    def at(self, load: MeasuredLoad) -> list[MeasuredCell]:
        return [cell for cell in self.cells if cell.load == load]

    def cell(self, name: str, load: MeasuredLoad) -> MeasuredCell | None:
        return next((c for c in self.cells if c.name == name and c.load == load), None)


def all_steady(cells: Iterable[MeasuredCell]) -> bool:
    """Tests whether the throughputs of ``cells`` are comparable in the steady window; else the whole run of all is."""
    return all(cell.has_steady for cell in cells)


def all_steady_latency(cells: Iterable[MeasuredCell]) -> bool:
    """Tests whether the latencies of ``cells`` are comparable in the steady window; else the whole run of all is."""
    return all(cell.has_steady_latency for cell in cells)


def number(value: Any) -> float | None:
    """A finite float, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def read_gauges(folder: Path) -> pd.DataFrame:
    """Reads server.parquet with all the columns that the report reads; empty without the file."""
    import pandas as pd

    frame = read_table(folder / GAUGES)
    if frame.empty or "num_requests_running" not in frame:
        return pd.DataFrame(columns=list(_GAUGES))
    return frame.assign(**{name: 0 if name == "repeat" else np.nan for name in _GAUGES if name not in frame})
