"""Names of the metrics that a limit can be set on: short ones, the dotted ones of summary.json, and their units.

A value is of one repeat (one fresh server): ``metrics`` of its entry in summary.json, and its counters under
``server.``. ``pooled.`` and ``capacity.`` are of the cell and have one value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.common import text
from kvbench.metrics.latency import goodput_share
from kvbench.runs.aggregate import flatten
from kvbench.runs.model import MeasuredCell, all_steady, all_steady_latency, prefix_hits

LATENCIES = ("ttft", "ttft_send", "ttfo", "reasoning", "tpot", "itl", "e2el")
_STATISTICS = {f"p{q}": f"p{q}" for q in (50, 90, 95, 99)} | {"median": "p50", "mean": "mean", "max": "max"}
_PARTS_OF_A_CELL = ("pooled", "capacity")

SIMULATED_SECONDS = "simulated_seconds_total_"  # before the part of a step, as gemm: counters of a simulated engine
THROUGHPUT = "output_tokens_per_s"  # as in summary.csv: of the steady window, of the whole run where there is none
_THROUGHPUTS = ("output", "non_reasoning_output", "request", "total_token")
_OF_WHOLE_RUN = tuple(f"{kind}_throughput" for kind in _THROUGHPUTS)  # as vLLM defines them

Values = Mapping[str, float]


@dataclass(frozen=True)
class MetricValues:
    """A metric of one cell: a value a repeat in ``values``, or one of the cell as a whole under ``None``."""

    values: Mapping[int | None, float]
    uncertain: bool = False  # a percentile of too few samples


def _share(part: str, whole: str) -> Callable[[Values], float | None]:
    def of(values: Values) -> float | None:
        return values[part] / values[whole] if part in values and values.get(whole) else None

    return of


def _failure_rate(values: Values) -> float | None:
    sent = values.get("completed", 0.0) + values.get("failed", 0.0)
    return values["failed"] / sent if sent and "failed" in values else None


_COMPUTED: Mapping[str, Callable[[Values], float | None]] = {
    "failure_rate": _failure_rate,  # of the requests sent
    "goodput_share": goodput_share,  # of the requests sent, failed ones included, that met every SLO
    "kv_waste_share": _share("server.kv_waste_slots_mean", "server.kv_slots_reserved_mean"),
}
_LATENCIES = {f"{short}_{latency}_ms" for latency in LATENCIES for short in _STATISTICS}
_SHORT: Mapping[str, str] = {
    **{
        f"{when}{short}_{latency}_ms": f"{section}{latency}_ms.{statistic}"
        for latency in LATENCIES
        for short, statistic in _STATISTICS.items()
        for when, section in (("", ""), ("steady_", "steady_latency."))
    },
    "peak_rss_bytes": "server.process_resident_bytes_peak",
    "kv_cache_usage_perc": "server.kv_cache_usage_perc_peak",
    "page_table_bytes": "server.page_table_bytes_peak",
    "num_preemptions": "server.num_preemptions_total",
    "recomputed_tokens": "server.recomputed_tokens_total",
    "swapped_out_slots": "server.swapped_out_slots_total",
    "copied_pages": "server.copied_pages_total",
    "prefix_cache_evictions": "server.prefix_cache_evictions_total",
    "pages_owned_after": "server.pages_owned_after",
}
_PLAIN = (
    *(f"{when}{name}" for name in _OF_WHOLE_RUN for when in ("", "steady_")),
    "goodput", "steady_goodput", "completed", "failed", "duration_s", "total_input_tokens", "total_output_tokens",
    "total_cached_tokens", "total_reasoning_tokens", "without_output", "multi_token_chunks", "prefix_cache_hit_rate",
)  # fmt: skip
SHORT_NAMES = (THROUGHPUT, *_PLAIN, *_COMPUTED, *_SHORT)


def check_name(name: str) -> None:
    """Raises ValueError for a name without a dot that is none of ours; dotted ones are as the server has counters."""
    if name not in SHORT_NAMES and "." not in name:
        near = text.nearest(name, SHORT_NAMES)
        hint = f"did you mean {near[0]}?" if near else "use one such as p95_ttft_ms, or a dotted name of summary.json."
        raise ValueError(f"{name!r} is not a metric; {hint}")


def values_of(metrics: Mapping[str, Any], server: Mapping[str, Any], cache: Mapping[str, Any]) -> dict[str, float]:
    """The values of a load for ``value_of``: its flattened metrics, its counters under ``server.``, its hit rate."""
    hits, queries = prefix_hits(cache, server) or (0.0, 0.0)
    rate = {"prefix_cache_hit_rate": hits / queries} if queries else {}
    return flatten({**metrics, "server": server}) | rate


def value_of(values: Values, name: str) -> float | None:
    """The metric of one load; ``values``: as ``values_of`` makes them.

    A latency without ``steady_`` is of the whole run here; ``measured`` takes that of the steady window before it.
    """
    return _COMPUTED[name](values) if name in _COMPUTED else values.get(_SHORT.get(name, name))


def window_of(name: str, *cells: MeasuredCell) -> str:
    """The words "whole run" for a throughput or latency that is of it, whichever cell makes it so; else empty."""
    of_whole_run = name in _OF_WHOLE_RUN or name.partition("_ms.")[0] in LATENCIES
    leads = name in _LATENCIES or name == THROUGHPUT
    return "whole run" if of_whole_run or (leads and not _all_steady(name, cells)) else ""


def _all_steady(name: str, cells: Sequence[MeasuredCell]) -> bool:
    return (all_steady if name == THROUGHPUT else all_steady_latency)(cells)


def measured(cell: MeasuredCell, name: str, *others: MeasuredCell) -> MetricValues:
    """The metric in each repeat that has it; no values where nobody measured it.

    ``others``: what it will be compared with; throughput and latencies are of one window in all of them.
    """
    if name == THROUGHPUT:
        return MetricValues(cell.throughput(_all_steady(name, [cell, *others])))
    if name in _LATENCIES and _all_steady(name, [cell, *others]):
        name = f"steady_{name}"
    path = _SHORT.get(name, name)
    section, _, rest = path.partition(".")
    if section in _PARTS_OF_A_CELL:
        values = flatten(getattr(cell, section))
        return MetricValues(
            {None: values[rest]} if rest in values else {}, _is_uncertain([getattr(cell, section)], rest)
        )
    found = {}
    for repeat in cell.repeats:
        values = values_of(repeat.metrics, repeat.server, repeat.cache)
        if (value := value_of(values, name)) is not None:
            found[repeat.repeat] = value
    return MetricValues(found, _is_uncertain([repeat.metrics for repeat in cell.repeats], path))


def nearest(cell: MeasuredCell, name: str) -> str | None:
    """The metric of ``cell`` whose dotted name is most like ``name``."""
    names = {key for repeat in cell.repeats for key in values_of(repeat.metrics, repeat.server, repeat.cache)}
    return next(iter(text.nearest(name, sorted(names))), None)


def unit_of(name: str) -> str:
    """``ms``, ``bytes``, ``share`` (0 to 1), ``tokens/s``, ``requests/s``, or empty for a count."""
    path = name.split(".")
    if any(part.endswith("_ms") for part in path):
        return "ms"
    last = path[-1].removesuffix("_peak").removesuffix("_mean")
    if last.endswith(("_share", "_rate", "_perc", "_fraction")) and last != "request_rate":
        return "share"
    if last.endswith("bytes"):
        return "bytes"
    if last.endswith("request_throughput") or last.endswith("goodput"):
        return "requests/s"
    return "tokens/s" if last.endswith("throughput") or last == THROUGHPUT else ""


def _is_uncertain(sections: list[Mapping[str, Any]], path: str) -> bool:
    *parents, statistic = path.split(".")
    for node in sections:
        for part in parents:
            node = node.get(part) if isinstance(node.get(part), Mapping) else {}
        if statistic in (node.get("uncertain") or ()):
            return True
    return False
