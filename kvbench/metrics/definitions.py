"""METRICS: every metric of a load, one row each: where it is stored, its unit, direction and titles, its function.

Tables, titles, limits, the history and stored files take a metric from here. A new one is a row below ``SHIPPED`` and
its function; it needs no field elsewhere, and loads measured from then on have it:

    METRICS["slip"] = Metric("slip", "slip_ms", "ms", LOWER, "late sends", "slip", ("p95",), samples=my_function)

The definitions, as in docs/measuring.md (measured by the client, in ms):

- ``ttft``      first token of any kind (text, reasoning, tool call) - t0 (intended start in open loop, send in closed
                loop)
- ``ttft_send`` the same from the send
- ``ttfo``      time to first output: first text or tool call - t0. Not ttft where reasoning comes first, or a token
                whose text is held back; undefined for a request that reasoned to its end (``without_output``)
- ``reasoning`` reasoning time: first output - first chunk of reasoning; undefined where no reasoning was streamed, or
                no output came after it
- ``e2el``      last chunk - t0
- ``tpot``      (last - first token's chunk) / (output_tokens - 1), output_tokens from the server's usage;
                undefined (left out, not 0) for one token, or all tokens in one chunk. Reasoning tokens for which no
                chunk came (``unstreamed_tokens``) were before the first chunk, and are not divided into the time
                after it
- ``itl``       every gap between chunks that carry tokens, pooled over requests
- ``client_queue`` the part of ttft for which a request waited in the client for a place under max_concurrency
- throughput    over the whole run and over the steady window (``steady_window.py``), of successful requests only;
                ``non_reasoning_output_throughput``: as ``non_reasoning_weights`` counts output tokens, where requests
                reasoned
- ``goodput``   requests per second that met every SLO, of the whole run and of the steady window

A request may return several sequences (n > 1, beams). Its ttft is the first token of any of them and its e2el the
last chunk of all; first output and first reasoning are those of any, too. tpot and itl are of each sequence by itself,
with its own tokens; an SLO's limit is for the slowest.
``sequence_ttft`` is the first chunk with a token of each sequence - t0, where there are several. Sequences that are
chosen at the end (best_of, beams) come in one chunk each: they have no tpot and no itl, and ttft is the whole time.
Only tokens that are returned are output.

Other tools differ: GuideLLM's ``tpot`` includes TTFT, ITL of both GuideLLM and AIPerf is a mean per request, and
vLLM's TTFT may be of a chunk with nothing but a role (docs/other_tools.md has them side by side).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvbench.common import text
from kvbench.common.plugins import add_plugins
from kvbench.metrics import rows

if TYPE_CHECKING:
    import pandas as pd

SERVED, ENGINE, SIMULATED = "served", "engine time", "simulated"
"""The clocks: a client's over HTTP; the sum of an engine's own step times; the virtual one of a simulation."""
LOWER, HIGHER = "lower", "higher"
"""Which value of a metric is better."""
STEADY = "steady_"
STATISTICS = {f"p{q}": f"p{q}" for q in (50, 90, 95, 99)} | {"median": "p50", "mean": "mean", "max": "max"}
THROUGHPUT = "output_throughput"
TOKENS_PER_S = "output_tokens_per_s"  # as in summary.csv: of the steady window, of the whole run where there is none


_TEXTS: Mapping[str, Callable[[float | None], str]] = {
    "ms": text.ms, "tokens/s": text.tokens_per_s, "requests/s": text.significant, "share": text.percent,
    "bytes": text.data_size, "": text.count,
}  # fmt: skip


class InWindow:
    """The successful rows of a load in a window [s], and the share of each request's time within.

    Requests of one length end in waves: counted whole where they end, a window that ends with a wave would lose it. A
    prompt counts when its first token arrives (the server has read it by then).
    """

    def __init__(self, good: pd.DataFrame, begin: float, end: float, slo: Mapping[str, float] | None = None) -> None:
        self.good, self.slo, self.seconds = good, slo or {}, end - begin
        sends, ends = rows.stored(good, "ts"), rows.ends(good)
        inside = np.minimum(ends, end) - np.maximum(sends, begin)
        self.shares = np.clip(inside / np.maximum(ends - sends, np.finfo(float).tiny), 0.0, 1.0)  # [requests]
        self._begin, self._end = begin, end

    def _within(self, times: np.ndarray) -> np.ndarray:
        return (times > self._begin) & (times <= self._end)

    @cached_property
    def _chunks(self) -> tuple[np.ndarray, np.ndarray]:
        times, weights = rows.chunk_weights(self.good)
        return self._within(times), weights

    def requests_per_s(self) -> float:
        return float(self.shares.sum()) / self.seconds

    def output_per_s(self) -> float:
        inside, weights = self._chunks
        return float(weights[inside].sum()) / self.seconds

    def total_per_s(self) -> float:
        first = np.array([t[0] if len(t) else np.nan for t in rows.chunk_times(self.good)], dtype=float)
        prompts = rows.stored(self.good, "prompt_tokens")[self._within(first)].sum()
        inside, weights = self._chunks
        return (float(weights[inside].sum()) + float(prompts)) / self.seconds

    def non_reasoning_per_s(self) -> float | None:
        """Counts the output tokens/s beside reasoning; None where no request reasoned."""
        if not rows.reasoned(self.good).any():
            return None
        return float(rows.non_reasoning_weights(self.good)[self._chunks[0]].sum()) / self.seconds

    def goodput(self) -> float | None:
        """Counts the requests/s within the SLO; None without one."""
        over = over_slo(self.good, self.slo)
        met = ~np.any(list(over.values()), axis=0) if over else None
        return None if met is None else float(self.shares[met].sum()) / self.seconds


@dataclass(frozen=True)
class Metric:
    """A figure of a load.

    path: where LoadMetrics has it, such as ``ttft_ms``; ``server.`` before a counter of the server
    unit: ms, tokens/s, requests/s, share (0 to 1), bytes, or empty for a count; better: LOWER, HIGHER or empty
    title, short: in words ("time to first token") and in a table ("TTFT")
    statistics: of a distribution, those that tables and the history show; empty for one number
    compared: the statistic in which reports compare configurations; empty for the number itself, None: in none
    samples: the values [ms] of successful rows, pooled; of_request: one value a row, where an SLO may limit it
    rate: the value in a window of the load; computed: the value from other figures of the load, by their paths
    always: it is stored and shown although no request has it; steady: the steady window has it too
    may_lack: a request without it meets every limit
    digits: decimals in the table of a load
    """

    name: str
    path: str
    unit: str
    better: str
    title: str
    short: str
    statistics: tuple[str, ...] = ()
    samples: Callable[[pd.DataFrame], np.ndarray] | None = None
    of_request: Callable[[pd.DataFrame], np.ndarray] | None = None
    rate: Callable[[InWindow], float | None] | None = None
    computed: Callable[[Callable[[str], float | None]], float | None] | None = None
    always: bool = True
    steady: bool = False
    may_lack: bool = False
    digits: int = 1
    compared: str | None = None

    def __post_init__(self) -> None:
        if self.unit not in _TEXTS:
            raise ValueError(f"the unit of {self.name} is {self.unit!r}: use one of {', '.join(filter(None, _TEXTS))}")

    @property
    def is_distribution(self) -> bool:
        return self.samples is not None


def _from(column: str, since: str = "t0") -> Callable[[pd.DataFrame], np.ndarray]:
    return lambda requests: rows.from_start(requests, column, since)


def _latency(
    name: str,
    title: str,
    short: str,
    statistics: tuple[str, ...],
    of_request: Callable[[pd.DataFrame], np.ndarray] | None,
    samples: Callable[[pd.DataFrame], np.ndarray] | None = None,
    *,
    always: bool = True,
    may_lack: bool = False,
    compared: str | None = None,
) -> Metric:
    return Metric(
        name, f"{name}_ms", "ms", LOWER, title, short, statistics, samples or of_request, of_request,
        always=always, steady=True, may_lack=may_lack, compared=compared,
    )  # fmt: skip


def _share(part: str, whole: str) -> Callable[[Callable[[str], float | None]], float | None]:
    def share(value: Callable[[str], float | None]) -> float | None:
        counted, total = value(part), value(whole)
        return counted / total if counted is not None and total else None

    return share


def _failure_rate(value: Callable[[str], float | None]) -> float | None:
    failed = value("failed")
    sent = (value("completed") or 0.0) + (failed or 0.0)
    return failed / sent if failed is not None and sent else None


def _goodput_share(value: Callable[[str], float | None]) -> float | None:
    rate, seconds = value("goodput"), value("duration_s")
    sent = (value("completed") or 0.0) + (value("failed") or 0.0)
    return rate * seconds / sent if rate is not None and seconds and sent else None


def _count(name: str, title: str, unit: str = "", better: str = "", path: str = "") -> Metric:
    return Metric(name, path or name, unit, better, title, title)


_TTFT = ("p50", "p95")
_ROWS = (
    _latency("ttft", "time to first token", "TTFT", _TTFT, _from("first"), compared="p95"),
    _latency("ttft_send", "time to first token from the send", "TTFT from the send", (), _from("first", "ts")),
    _latency("ttfo", "time to first output", "TTFO", _TTFT, _from("first_output"), always=False),
    _latency("reasoning", "reasoning time", "reasoning", ("p50",), rows.reasoning_times, always=False),
    _latency("client_queue", "queued in the client", "queue", ("p95",), None, rows.client_queue, always=False),
    _latency("sequence_ttft", "time to first token of each sequence", "TTFT of a sequence", (), None,
             rows.sequence_ttfts, always=False),
    _latency("tpot", "time per output token", "TPOT", _TTFT, rows.slowest_tpots, rows.times_per_output_token,
             may_lack=True, compared="p50"),
    _latency("itl", "inter-token latency", "ITL", _TTFT, rows.longest_gaps, rows.inter_token_latencies, may_lack=True,
             compared="p95"),
    _latency("e2el", "end-to-end latency", "E2EL", (), _from("last")),
    Metric("output_throughput", "output_throughput", "tokens/s", HIGHER, "output throughput", "output tokens/s",
           rate=InWindow.output_per_s, steady=True, compared=""),
    Metric("non_reasoning_output_throughput", "non_reasoning_output_throughput", "tokens/s", HIGHER,
           "output throughput without reasoning", "output tokens/s without reasoning",
           rate=InWindow.non_reasoning_per_s, steady=True, always=False),
    Metric("request_throughput", "request_throughput", "requests/s", HIGHER, "request throughput", "requests/s",
           rate=InWindow.requests_per_s, steady=True),
    Metric("total_token_throughput", "total_token_throughput", "tokens/s", HIGHER, "total throughput",
           "total tokens/s", rate=InWindow.total_per_s, steady=True),
    Metric("goodput", "goodput", "requests/s", HIGHER, "goodput", "requests/s within the SLO", rate=InWindow.goodput,
           steady=True),
    Metric("goodput_share", "", "share", HIGHER, "requests within the SLO", "within SLO", computed=_goodput_share),
    Metric("failure_rate", "", "share", LOWER, "failed requests", "failed", computed=_failure_rate),
    _count("completed", "completed requests"),
    _count("failed", "failed requests", better=LOWER),
    _count("duration_s", "duration, s"),
    _count("total_input_tokens", "prompt tokens"),
    _count("total_output_tokens", "output tokens"),
    _count("total_cached_tokens", "cached prompt tokens"),
    _count("total_reasoning_tokens", "reasoning tokens"),
    _count("without_output", "requests that reasoned to their end"),
    _count("multi_token_chunks", "chunks of several tokens"),
    Metric("kv_cache_usage_perc", "server.kv_cache_usage_perc_peak", "share", "", "peak KV use", "peak KV use"),
    Metric("kv_waste_share", "", "share", LOWER, "reserved, empty KV", "reserved, empty",
           computed=_share("server.kv_waste_slots_mean", "server.kv_slots_reserved_mean")),
    Metric("prefix_cache_hit_rate", "prefix_cache_hit_rate", "share", HIGHER, "prefix hit rate", "hit rate"),
    _count("peak_rss_bytes", "peak memory of the server", "bytes", LOWER, "server.process_resident_bytes_peak"),
    _count("page_table_bytes", "page table", "bytes", LOWER, "server.page_table_bytes_peak"),
    _count("num_preemptions", "preemptions", "", LOWER, "server.num_preemptions_total"),
    _count("recomputed_tokens", "recomputed tokens", "", LOWER, "server.recomputed_tokens_total"),
    _count("swapped_out_slots", "slots swapped out", "", LOWER, "server.swapped_out_slots_total"),
    _count("copied_pages", "copied pages", "", "", "server.copied_pages_total"),
    _count("prefix_cache_evictions", "evicted pages", "", "", "server.prefix_cache_evictions_total"),
    _count("pages_owned_after", "pages owned after the load", "", LOWER, "server.pages_owned_after"),
)  # fmt: skip
METRICS: dict[str, Metric] = {metric.name: metric for metric in _ROWS}
SHIPPED = frozenset(METRICS)
"""Rows of others were added, by hand or by an entry point: they are shown wherever a table has a selection of these."""


def latencies() -> Iterator[Metric]:
    """The metrics that are distributions over requests or their tokens."""
    return (metric for metric in METRICS.values() if metric.is_distribution)


def rates() -> Iterator[Metric]:
    """The metrics that are rates in a window."""
    return (metric for metric in METRICS.values() if metric.rate)


def _at(path: str) -> Metric | None:
    """The metric that is stored at ``path``."""
    return next((metric for metric in METRICS.values() if metric.path == path), None)


def over_slo(good: pd.DataFrame, slo: Mapping[str, float | None] | None) -> dict[str, np.ndarray]:
    """Tests which successful requests are over each limit of ``slo`` [ms], by its path. Bool [requests] each.

    ``itl_ms`` limits a request's longest gap between chunks. A request of one token or one chunk has no tpot and no
    gap; such a limit does not count against it.
    """
    over = {}
    for path, limit in (slo or {}).items():
        metric = _at(path)
        if limit is not None and metric is not None and metric.of_request:
            values = metric.of_request(good)
            over[path] = ~((values <= limit) | (np.isnan(values) & metric.may_lack))
    return over


@dataclass(frozen=True)
class Figure:
    """One number of a metric: a statistic of a distribution, or the metric itself.

    ``steady``: of the steady window, else of the whole run; None: of the one that leads (``MeasuredCell``).
    """

    metric: Metric
    statistic: str = ""
    steady: bool = False

    @property
    def name(self) -> str:
        """The name in limits, comparisons and the history: ``steady_p95_ttft_ms``, ``output_throughput``."""
        latency = f"{self.statistic}_{self.metric.path}" if self.statistic else self.metric.name
        return f"{STEADY if self.steady else ''}{latency}"

    @property
    def path(self) -> str:
        """The place in LoadMetrics: ``steady_latency.ttft_ms.p95``, ``steady_output_throughput``."""
        if self.statistic:
            return f"{'steady_latency.' if self.steady else ''}{self.metric.path}.{self.statistic}"
        return f"{STEADY if self.steady else ''}{self.metric.path}"

    @property
    def title(self) -> str:
        """The name in tables and sentences: ``p95 TTFT``, ``output tokens/s``."""
        return f"{self.statistic} {self.metric.short}" if self.statistic else self.metric.short

    @property
    def unit(self) -> str:
        return self.metric.unit

    @property
    def higher_is_better(self) -> bool:
        return self.metric.better == HIGHER

    @property
    def worse_sign(self) -> int:
        """The sign of a change for the worse."""
        return -1 if self.higher_is_better else 1

    def of_steady(self, steady: bool) -> Figure:
        """The same figure of the steady window, or of the whole run."""
        return replace(self, steady=steady and self.metric.steady)

    def text(self, value: float | None) -> str:
        """The value with its unit, as tables write it."""
        return _TEXTS[self.unit](value)


def find(name: str) -> Figure | None:
    """The figure named ``p95_ttft_ms``, ``steady_output_throughput`` or ``ttft_ms.p95``; None for another name."""
    if name == TOKENS_PER_S:
        return Figure(METRICS[THROUGHPUT])
    if name in METRICS and not METRICS[name].is_distribution:
        return Figure(METRICS[name])
    if name.startswith(STEADY):
        plain = find(name.removeprefix("steady_latency.").removeprefix(STEADY))
        if plain and plain.metric.steady:
            return plain.of_steady(True)
    statistic, _, path = name.partition("_")
    if "." in name:
        path, _, statistic = name.rpartition(".")
    metric = _at(path)
    if statistic in STATISTICS and metric is not None and metric.is_distribution:
        return Figure(metric, STATISTICS[statistic])
    return None


def figure(name: str) -> Figure:
    """Returns what ``find`` does. Raises ValueError, with the most similar name, where that is nothing."""
    if (named := find(name)) is not None:
        return named
    near = difflib.get_close_matches(name, names(), 1)
    hint = f"did you mean {near[0]}?" if near else "use one such as p95_ttft_ms, or a dotted name of summary.json."
    raise ValueError(f"{name!r} is not a metric; {hint}")


def compared() -> list[str]:
    """The figures in which reports compare configurations: those of which more is better first."""
    every = [Figure(metric, metric.compared) for metric in METRICS.values() if metric.compared is not None]
    return [figure.name for figure in sorted(every, key=lambda figure: not figure.higher_is_better)]


def names() -> list[str]:
    """Every name that ``figure`` takes, but the dotted ones."""
    plain = [Figure(metric, "") for metric in METRICS.values() if not metric.is_distribution]
    plain += [Figure(metric, statistic) for metric in latencies() for statistic in STATISTICS.values()]
    twins = [figure.of_steady(True) for figure in plain if figure.metric.steady]
    shorts = {f"{short}_{metric.path}" for metric in latencies() for short in STATISTICS}
    return [TOKENS_PER_S, *dict.fromkeys([*(figure.name for figure in (*plain, *twins)), *sorted(shorts)])]


add_plugins(METRICS, "metrics", Metric)  # last: a plug-in imports this file
