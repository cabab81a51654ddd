"""What the server of a running load says of itself, for a line on a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvbench.common import text as words
from kvbench.common.console import Part, fit
from kvbench.targets.prometheus import MetricsSample

WINDOW_S = 5.0
_TOKENS = "generation_tokens_total"


class LiveServer:
    """The last seconds of a server, from readings of its /metrics that the measurement takes anyway.

    ``take`` may be called by another thread than ``rows``.
    """

    def __init__(self) -> None:
        self._samples: tuple[MetricsSample, ...] = ()

    def take(self, sample: MetricsSample) -> None:
        """The next reading of the same server."""
        self._samples = (*(each for each in self._samples if sample.at - each.at <= WINDOW_S), sample)

    def rows(self, width: int) -> Sequence[str]:
        """``412 tok/s, 18 running, 14 waiting, KV 93 %`` as far as the server tells; none where it tells nothing."""
        now = time.perf_counter()
        recent = [each for each in self._samples if now - each.at <= WINDOW_S]
        line = fit(_parts(recent), width, ", ")
        return (line,) if line else ()


def _parts(recent: Sequence[MetricsSample]) -> list[Part]:
    if not recent:
        return []
    gauges, counted = recent[-1].gauges, [each for each in recent if _TOKENS in each.counters]
    parts = []
    if len(counted) > 1 and (seconds := counted[-1].at - counted[0].at) > 0:
        made = counted[-1].counters[_TOKENS] - counted[0].counters[_TOKENS]
        parts.append((f"{words.tokens_per_s(made / seconds)} tok/s", 1))
    for name, what, rank in (("num_requests_running", "running", 3), ("num_requests_waiting", "waiting", 4)):
        if name in gauges:
            parts.append((f"{gauges[name]:.0f} {what}", rank))
    if (usage := gauges.get("kv_cache_usage_perc")) is not None:
        parts.append((f"KV {100 * usage:.0f} %", 2))
    return parts
