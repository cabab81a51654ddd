"""The value of a figure (kvbench/metrics/definitions.py) in the repeats of a cell, for limits and comparisons.

A value is of one repeat (one fresh server): ``metrics`` of its entry in summary.json, and its counters under
``server.``. ``pooled.`` and ``capacity.`` are of the cell and have one value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.common import text
from kvbench.common.records import Number
from kvbench.metrics.definitions import TOKENS_PER_S, figure, find
from kvbench.metrics.model import Figures, LoadMetrics, flatten
from kvbench.runs.model import MeasuredCell, all_steady, all_steady_latency
from kvbench.runs.results import CacheCounts, prefix_hits

_PARTS_OF_A_CELL = ("pooled", "capacity")
SIMULATED_SECONDS = "simulated_seconds_total_"  # before the part of a step, as gemm: counters of a simulated engine
_WHOLE_RUN = "whole run"


@dataclass(frozen=True)
class MetricValues:
    """A metric of one cell: a value a repeat in ``values``, or one of the cell as a whole under ``None``."""

    values: Mapping[int | None, float]
    uncertain: bool = False  # a percentile of too few samples


def check_name(name: str) -> None:
    """Raises ValueError for a name without a dot that is no metric of kvbench; servers name the dotted ones."""
    if "." not in name:
        figure(name)


def values_of(metrics: LoadMetrics, server: Mapping[str, Number | None], cache: CacheCounts) -> dict[str, float]:
    """The values of a load for ``value_of``: its flattened metrics, its counters under ``server.``, its hit rate."""
    hits, queries = prefix_hits(cache, server) or (0.0, 0.0)
    rate = {"prefix_cache_hit_rate": hits / queries} if queries else {}
    return flatten({**metrics.to_json(), "server": server}) | rate


def value_of(values: Mapping[str, float], name: str) -> float | None:
    """The metric of one load, of ``values`` as ``values_of`` makes them.

    A latency without ``steady_`` is of the whole run here; ``measured`` takes that of the steady window before it.
    """
    figure = find(name)
    if figure is None:
        return values.get(name)
    return figure.metric.computed(values.get) if figure.metric.computed else values.get(figure.path)


def window_of(name: str, *cells: MeasuredCell) -> str:
    """Returns "whole run" for a throughput or latency over the whole run in any of the cells; else empty."""
    figure = find(name)
    if figure is None or figure.steady:
        return ""
    if name == TOKENS_PER_S:
        return "" if all_steady(cells) else _WHOLE_RUN
    if figure.statistic:
        return "" if "." not in name and all_steady_latency(cells) else _WHOLE_RUN
    return _WHOLE_RUN if figure.path.endswith("_throughput") else ""


def measured(cell: MeasuredCell, name: str, *others: MeasuredCell) -> MetricValues:
    """The metric in each repeat that has it; no values where nobody measured it.

    ``others``: what it will be compared with; throughput and latencies are of one window in all of them.
    """
    every = [cell, *others]
    if name == TOKENS_PER_S:
        return MetricValues(cell.throughput(all_steady(every)))
    figure = find(name)
    if figure and figure.statistic and not figure.steady and "." not in name and all_steady_latency(every):
        figure = figure.of_steady(True)
    path = figure.path if figure else name
    section, _, rest = path.partition(".")
    if section in _PARTS_OF_A_CELL:
        part = getattr(cell, section)
        value = flatten(part.to_json()).get(rest)
        return MetricValues({} if value is None else {None: value}, _is_uncertain([part], rest))
    sought = figure.name if figure else name
    values = {r.repeat: value_of(values_of(r.metrics, r.server, r.prefix_cache), sought) for r in cell.repeats}
    present = {repeat: value for repeat, value in values.items() if value is not None}
    return MetricValues(present, _is_uncertain([repeat.metrics for repeat in cell.repeats], path))


def nearest(cell: MeasuredCell, name: str) -> str | None:
    """Finds the metric of ``cell`` whose dotted name is most like ``name``."""
    names = {key for repeat in cell.repeats for key in values_of(repeat.metrics, repeat.server, repeat.prefix_cache)}
    return next(iter(text.nearest(name, sorted(names))), None)


def unit_of(name: str) -> str:
    """The unit: ``ms``, ``bytes``, ``share`` (0 to 1), ``tokens/s``, ``requests/s``, or empty for a count."""
    if (figure := find(name)) is not None:
        return figure.unit
    path = name.split(".")
    if any(part.endswith("_ms") for part in path):
        return "ms"
    last = path[-1].removesuffix("_peak").removesuffix("_mean")
    if last.endswith(("_share", "_rate", "_perc", "_fraction")) and last != "request_rate":
        return "share"
    return "bytes" if last.endswith("bytes") else ""


def _is_uncertain(sections: list[Any], path: str) -> bool:
    parent, _, statistic = path.rpartition(".")
    typed = [section for section in sections if isinstance(section, Figures)]
    return bool(parent) and any(statistic in section.distribution(parent).uncertain for section in typed)
