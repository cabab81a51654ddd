"""A result of another tool in one form, whatever its file is like: what was asked, what was measured, every request."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

TTFT, TPOT, GAP, E2EL = "ttft", "tpot", "gap", "e2el"
DEFINITIONS = {
    TTFT: "from sending the request to its first chunk",
    TPOT: "(latency - TTFT) / (output tokens - 1), per request",
    GAP: "between two chunks of a stream, whatever they hold",
    E2EL: "from sending the request to its last chunk",
}

Statistics = Mapping[str, float]
"""The figures of a latency [ms] by name: mean, p50, p99 ..."""


@dataclass(frozen=True)
class Asked:
    """The load that the user asked the tool for; None where the file does not tell.

    rate: requests/s of an open loop; limit: the most that it may have in flight
    """

    concurrency: float | None = None
    rate: float | None = None
    limit: float | None = None
    requests: int | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class AuditedRequest:
    """One request; None for what the file does not tell. ``error``: empty for one that succeeded.

    start_s: on the tool's clock; latency_s, ttft_s: from sending; gaps_s: between its chunks
    """

    start_s: float | None = None
    latency_s: float | None = None
    ttft_s: float | None = None
    gaps_s: Sequence[float] | None = None
    chunks: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""


@dataclass(frozen=True)
class AuditedResult:
    """One result of one file.

    tool, version, model, date: as the file tells them; name: the file, and which result of it
    failed, completed: requests, None where the file does not tell
    rates_are_means: whether rates are means of a distribution, and not counts over the duration
    latencies: by our names, see DEFINITIONS; titles: how the tool calls them
    queue_ms: how long requests waited in the client, mean, None where that is unknown or means nothing
    waits_count: whether such a wait is a fault: in a closed loop it is how the loop works
    peak_tokens_per_s: the most in a second, as the tool counts it
    token_counts: pairs of (what was compared, expected tokens, seen tokens)
    misnamed: a figure whose name says another one: (name, value [ms], what it is, the value by its name [ms])
    rerun: what to add to the tool's command so that more can be checked
    """

    tool: str
    name: str
    asked: Asked
    version: str | None = None
    model: str | None = None
    date: str | None = None
    completed: int | None = None
    failed: int | None = None
    duration_s: float | None = None
    requests_per_s: float | None = None
    output_tokens_per_s: float | None = None
    rates_are_means: bool = False
    latencies: Mapping[str, Statistics] = field(default_factory=dict)
    titles: Mapping[str, str] = field(default_factory=dict)
    concurrency: float | None = None
    queue_ms: float | None = None
    waits_count: bool = False
    cached_share: float | None = None
    chunk_tokens: float | None = None
    peak_tokens_per_s: float | None = None
    token_counts: Sequence[tuple[str, float, float]] = ()
    misnamed: tuple[str, float, str, float] | None = None
    runs: int = 1
    requests: Sequence[AuditedRequest] = ()
    rerun: str = "every request kept in its output"

    def figure(self, latency: str, statistic: str = "mean") -> float | None:
        """Returns a figure of a latency [ms], None where the file has none."""
        return self.latencies.get(latency, {}).get(statistic)

    @cached_property
    def succeeded(self) -> list[AuditedRequest]:
        return [request for request in self.requests if not request.error]

    @property
    def sent(self) -> int:
        """The requests that were sent, as far as the file tells."""
        return (self.completed or 0) + (self.failed or 0)

    @property
    def latency_ms(self) -> float | None:
        """The mean latency of successful requests [ms]: as the tool tells, or of its requests."""
        times = [request.latency_s for request in self.succeeded if request.latency_s]
        return self.figure(E2EL) or (1e3 * statistics.fmean(times) if times else None)

    @property
    def counts_chunks(self) -> bool:
        """Tests whether chunks were counted, by the tool or in its requests."""
        return bool(self.chunk_tokens or any(request.chunks and request.output_tokens for request in self.succeeded))

    @property
    def tokens_a_chunk(self) -> float | None:
        """The output tokens of a chunk: as the tool tells, by its requests, or by how far ITL is from TPOT."""
        if self.chunk_tokens:
            return self.chunk_tokens
        counted = [r for r in self.succeeded if r.chunks and r.output_tokens]
        if counted:
            return sum(r.output_tokens or 0 for r in counted) / sum(r.chunks or 0 for r in counted)
        gap, tpot = self.figure(GAP), self.figure(TPOT)
        return gap / tpot if gap and tpot else None

    @property
    def gap_ms(self) -> float | None:
        """The mean gap between chunks [ms]: as the tool tells, or the time a token times the tokens of a gap."""
        counted = [r for r in self.succeeded if r.chunks and r.chunks > 1 and r.output_tokens]
        tokens, token = self.tokens_a_chunk, self.figure(TPOT)
        if counted:
            tokens = sum((r.output_tokens or 0) - 1 for r in counted) / sum((r.chunks or 0) - 1 for r in counted)
        return self.figure(GAP) or (token * tokens if token and tokens else None)

    @property
    def bunching(self) -> float | None:
        """The median gap between chunks over the mean: 1 in an even stream, 0 where chunks are read in bunches."""
        gaps = [gap for request in self.succeeded for gap in request.gaps_s or ()]
        if len(gaps) >= _FEWEST_GAPS:
            mean, median = statistics.fmean(gaps), statistics.median(gaps)
        else:
            mean, median = self.figure(GAP) or 0.0, self.figure(GAP, "p50") or 0.0
            if self.figure(GAP, "p50") is None:
                return None
        return median / mean if mean > 0 else None

    @property
    def delivered_concurrency(self) -> float | None:
        """The requests in flight, the mean over the run; None where failures hide how long they took."""
        if self.concurrency is not None or self.failed:
            return self.concurrency
        times = [r.latency_s for r in self.succeeded]
        if times and self.duration_s and None not in times:
            return sum(t or 0.0 for t in times) / self.duration_s
        e2el, completed = self.figure(E2EL), self.completed
        return e2el / 1e3 * completed / self.duration_s if e2el and completed and self.duration_s else None


_FEWEST_GAPS = 100
