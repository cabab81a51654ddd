"""The result of a load: the counts of its server, and whether it may be compared with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.common.files import write_json
from kvbench.common.foreign_cpu import MachineReport
from kvbench.measure import server_state
from kvbench.measure.server import MeasuredServer
from kvbench.metrics.canaries import wrong_words
from kvbench.metrics.model import LoadMetrics, LoadOutcome, failed_words, failure_words
from kvbench.requests.request import RequestSpec
from kvbench.runs.results import LoadResult
from kvbench.targets.prometheus import MetricsSample, counter_changes, gauge_summary


@dataclass(frozen=True)
class ServerReadings:
    """The server's /metrics ``before``, during (``samples``) and ``after`` a load; ``failures``: of readings."""

    before: MetricsSample | None
    samples: Sequence[MetricsSample]
    after: MetricsSample | None
    failures: int = 0

    def during(self, outcome: LoadOutcome, metrics: LoadMetrics) -> list[MetricsSample]:
        """The samples from the first request's start to the last one's end."""
        # of a process on this machine, where all share this clock; a simulation's begins at 0
        start = (outcome.zero_perf_counter or 0.0) + metrics.first_request_s
        return [s for s in self.samples if 0.0 <= s.at - start <= (metrics.duration_s or outcome.duration_s or 0.0)]

    def store(self, out: Path, outcome: LoadOutcome, metrics: LoadMetrics) -> None:
        """Writes counters.json and server.parquet."""
        import pandas as pd

        start, during = outcome.zero_perf_counter or 0.0, self.during(outcome, metrics)
        if self.samples:
            rows = [{"t": s.at - start, **s.gauges, **s.counters} for s in self.samples]
            pd.DataFrame(rows).to_parquet(out / "server.parquet", index=False)
        unread = self.before is not None and not during and self.failures
        gauges = gauge_summary(during or ([] if unread else self.samples))  # of a load shorter than a reading: nearby
        counters = {
            **counter_changes(self.before, self.after),
            **{f"{name}_{part}": value for name, parts in gauges.items() for part, value in parts.items()},
            "pages_owned_after": self.after.owned_pages if self.after else None,
            "swap_slots_used_after": self.after.gauges.get("swap_slots_used") if self.after else None,
            "polls": len(self.samples),
            "polls_failed": self.failures,
        }
        write_json(out / "counters.json", counters)


def judge(
    server: MeasuredServer,
    requests: Sequence[RequestSpec],
    metrics: LoadMetrics,
    readings: ServerReadings,
    *,
    reasons: Sequence[str] = (),
    strict: bool = True,
    **facts: Any,
) -> LoadResult:
    """The result of a load. ``reasons``: why it is invalid beside what the server did; ``facts``: further fields.

    ``strict`` False: failed requests are a result (an overloaded server) and no fault of the measurement.
    """
    cache = server_state.cache_use(server, requests, readings.before, readings.after, metrics)
    faults = [*server_state.leak_reasons(readings.after), *cache.reasons]
    refused = refusal(metrics) if strict else None
    if strict and not refused and metrics.too_many_failed:
        faults.append(failed_words(metrics.failure_messages, metrics.failed, metrics.sent, kinds=True))
    canaries = metrics.canaries
    wrong = wrong_words(canaries) if canaries and canaries.wrong and server.fails_by_one_canary() else None
    return LoadResult(
        valid=not (reasons or faults or refused or wrong),
        invalid_reasons=(*reasons, *faults),
        refused=refused,
        wrong_answers=wrong,
        server_faults=(*faults, *filter(None, (refused, wrong))),
        metrics=metrics,
        prefix_cache=cache.counts,
        prefix_cache_bounds=cache.bounds,
        **facts,
    )


def refusal(metrics: LoadMetrics) -> str | None:
    """Tells how much was served, and with which error the server refused the rest; None where it refused nothing."""
    if not metrics.is_refusal:
        return None
    failures = failure_words(metrics.failure_messages, metrics.sent)
    return f"served {metrics.completed} of {metrics.sent} requests; {failures}"


def client_cost(machine: MachineReport, metrics: LoadMetrics) -> float | None:
    """CPU seconds of the client's processes per 1,000 output tokens of successful requests.

    Streaming: as the kernel counts it on this machine, or as the processes report it where some run on others. The
    parsing after the stream is added.
    """
    cores, seconds, client = machine.client_cpu_cores, machine.seconds, metrics.client
    by_kernel = cores * seconds if cores is not None and seconds else None
    counted = [cpu_s for cpu_s in (by_kernel, client.cpu_s) if cpu_s is not None]
    if not counted or not metrics.total_output_tokens:
        return None
    return (max(counted) + (client.parse_cpu_s or 0.0)) / metrics.total_output_tokens * 1000.0
