"""What a report is made from: a Run of Cells of Repeats, and how their stored numbers are asked for.

Everything that may be absent (a foreign server without /metrics, a cell that never finished, a field of an older
run) becomes None or an empty mapping here, so that the rest of the report never guesses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

THROUGHPUT = "steady_output_throughput"
SERVER_COLUMNS = (
    "t",
    "repeat",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "kv_slots_total",
    "kv_slots_reserved",
    "kv_slots_used",
    "kv_waste_slots",
    "page_table_bytes",
)


@dataclass(frozen=True, order=True)
class MeasuredLoad:
    """One load: `value` is a number of concurrent requests (closed) or requests/s (open; inf: all at once).

    `arrivals` of an open loop: "poisson" ...; "trace", "ramp" and "step" have no one rate, which is stored as 0.
    `sessions`: the load is of conversations with pauses: users are not requests in flight, and what arrives is a
    conversation.
    """

    mode: str
    value: float
    arrivals: str = field(default="", compare=False)
    sessions: bool = field(default=False, compare=False)

    @property
    def label(self) -> str:
        """Words for a sentence: "24 concurrent requests", "4 requests/s"; "8 users", "4 conversations/s"."""
        if self.mode == "closed" and self.sessions:
            return self.short
        if self.mode == "closed":
            return f"{self.value:g} concurrent request{'' if self.value == 1 else 's'}"
        if self.value == 0:
            return {"ramp": "a ramp of the rate", "step": "a rate in steps"}.get(
                self.arrivals, "the trace's own arrivals"
            )
        what = "conversations" if self.sessions else "requests"
        return f"all {what} at once" if self.value == math.inf else f"{self.value:g} {what}/s"

    @property
    def short(self) -> str:
        """Words for a table: "24 at once", "8 users", "4/s"."""
        if self.mode == "closed" and self.sessions:
            return f"{self.value:g} user{'' if self.value == 1 else 's'}"
        return f"{self.value:g} at once" if self.mode == "closed" else self.tick

    @property
    def tick(self) -> str:
        """The shortest mark: "24", "4/s", "trace", "all"."""
        if self.mode == "closed":
            return f"{self.value:g}"
        if self.value == 0:
            return self.arrivals if self.arrivals in ("ramp", "step") else "trace"
        return "all" if self.value == math.inf else f"{self.value:g}/s"


@dataclass(frozen=True)
class Repeat:
    """One load on one fresh server: what the client and the server measured."""

    repeat: int
    metrics: Mapping[str, Any]
    server: Mapping[str, Any]
    observed: Mapping[str, float] = field(default_factory=dict)  # from server.parquet, steady window only
    machine: Mapping[str, Any] = field(default_factory=dict)  # how busy the machine was; empty where not recorded
    cache: Mapping[str, Any] = field(default_factory=dict)  # prefix cache, tokens: hits, queries, low, high (possible)


@dataclass(frozen=True)
class MeasuredCell:
    """One configuration under one load, all its repeats."""

    cell_id: str
    config_id: str
    name: str  # unique per configuration, for people
    is_baseline: bool
    varied: Mapping[str, Any]
    settings: Mapping[str, Any]
    load: MeasuredLoad
    capacity: Mapping[str, Any]
    repeats: tuple[Repeat, ...]
    pooled: Mapping[str, Any]
    valid: bool
    invalid_reasons: tuple[str, ...]
    folder: Path
    notes: Mapping[str, Any] = field(default_factory=dict)  # what the load's maker did: trace, scales, source

    def per_repeat(self, metric: str) -> dict[int, float]:
        """Finite values of a client metric by repeat; `metric` is "name" or "name.percentile"."""
        found = {r.repeat: number(_dig(r.metrics, metric)) for r in self.repeats}
        return {repeat: value for repeat, value in found.items() if value is not None}

    @property
    def has_steady(self) -> bool:
        """Whether every repeat reached its load for a while; a mix of two throughputs is never shown."""
        return len(self.per_repeat(THROUGHPUT)) == len(self.repeats)

    def throughput(self, steady: bool | None = None) -> dict[int, float]:
        """Output tokens/s by repeat: of the steady window, or of the whole run where there is none."""
        chosen = self.has_steady if steady is None else steady
        return self.per_repeat(THROUGHPUT if chosen else "output_throughput")

    def observed(self, gauge: str) -> dict[int, float]:
        """A statistic of the server's gauges by repeat, e.g. "running_mean"; empty where it has no /metrics."""
        return {r.repeat: r.observed[gauge] for r in self.repeats if gauge in r.observed}

    def counter(self, name: str) -> float | None:
        """A server counter summed over the repeats; None where no repeat has it."""
        values = [number(r.server.get(name, _dig(r.server, f"counters.{name}"))) for r in self.repeats]
        known = [v for v in values if v is not None]
        return sum(known) if known else None

    def percentile(self, metric: str, which: str) -> tuple[float | None, bool]:
        """A latency percentile over the pooled raw samples, and whether too few samples make it uncertain.

        `metric` may be "steady_latency.ttft_ms": the same of the requests due in the steady window.
        """
        summary = _dig(self.pooled, metric) or {}
        value = number(summary.get(which))
        if value is not None:
            return value, which in (summary.get("uncertain") or ())
        values = list(self.per_repeat(f"{metric}.{which}").values())
        return (float(np.median(values)), True) if values else (None, False)

    def client(self, name: str) -> list[Any]:
        """What the load client recorded about itself under `name`, for each repeat that has it."""
        values = [_dig(r.metrics, f"client.{name}") for r in self.repeats]
        return [v for v in values if v is not None]

    def count(self, name: str) -> int:
        """`completed` or `failed` requests over all repeats."""
        return int(sum(number(r.metrics.get(name)) or 0 for r in self.repeats))

    @property
    def hit_rate(self) -> float | None:
        """Measured prefix-cache hit rate in tokens, 0..1; None where the cache was never asked."""
        hits, asked = self.counter("prefix_cache_hits_total"), self.counter("prefix_cache_queries_total")
        return hits / asked if asked and hits is not None else None

    @property
    def possible_hits(self) -> tuple[float, float] | None:
        """Lowest and highest hit rate that the prompts and the declared cache state allow; None where not known."""
        known = [r.cache for r in self.repeats if r.cache.get("high") is not None and r.cache.get("queries")]
        asked = sum(c["queries"] for c in known)
        if not known or len(known) != len(self.repeats):
            return None
        return sum(c["low"] for c in known) / asked, sum(c["high"] for c in known) / asked

    @property
    def is_contiguous(self) -> bool:
        return self.settings.get("layout") == "contiguous"

    @property
    def is_paged(self) -> bool:
        return self.settings.get("layout") == "paged"

    def requests(self) -> pd.DataFrame:
        """All successful requests, raw; empty when the file is missing."""
        path = self.folder / "requests.parquet"
        frame = pd.read_parquet(path) if path.is_file() else pd.DataFrame()
        return frame[frame["ok"].astype(bool)] if "ok" in frame else frame

    def gauges(self) -> pd.DataFrame:
        """The polled gauges; empty for a server without /metrics."""
        return read_gauges(self.folder)


@dataclass(frozen=True)
class Run:
    """One results folder."""

    folder: Path
    manifest: Mapping[str, Any]
    cells: tuple[MeasuredCell, ...]  # configurations in first-seen order, contiguous first, loads ascending
    missing: tuple[str, ...]  # ids of planned cells without a finished load
    short: tuple[str, ...]  # "cell: 2 of 3 repeats", for cells that miss some
    problems: tuple[str, ...]  # loads that failed, files that could not be read

    @property
    def status(self) -> str:
        return str(self.manifest.get("status", "incomplete"))

    @property
    def workload(self) -> str:
        workload = self.manifest.get("workload")
        name = workload.get("name") if isinstance(workload, Mapping) else workload
        return str(name or self.folder.parent.name)

    @property
    def load_section(self) -> Mapping[str, Any]:
        """`load:` of the workload; empty where the manifest has none."""
        workload = self.manifest.get("workload")
        section = workload.get("load") if isinstance(workload, Mapping) else None
        return section if isinstance(section, Mapping) else {}

    @property
    def loads(self) -> list[MeasuredLoad]:
        return sorted({cell.load for cell in self.cells})

    @property
    def configs(self) -> list[str]:
        """Names of the configurations in display order."""
        return list(dict.fromkeys(cell.name for cell in self.cells))

    def at(self, load: MeasuredLoad) -> list[MeasuredCell]:
        return [cell for cell in self.cells if cell.load == load]

    def cell(self, name: str, load: MeasuredLoad) -> MeasuredCell | None:
        return next((c for c in self.cells if c.name == name and c.load == load), None)


def number(value: Any) -> float | None:
    """A finite float, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def read_gauges(folder: Path) -> pd.DataFrame:
    path = folder / "server.parquet"
    frame = pd.read_parquet(path) if path.is_file() else pd.DataFrame()
    if frame.empty or "num_requests_running" not in frame:
        return pd.DataFrame(columns=list(SERVER_COLUMNS))
    for column in SERVER_COLUMNS:
        if column not in frame:
            frame[column] = 0 if column == "repeat" else np.nan
    return frame


def _dig(mapping: Mapping[str, Any], path: str) -> Any:
    node: Any = mapping
    for part in path.split("."):
        if not isinstance(node, Mapping):
            return None
        node = node.get(part)
    return node
