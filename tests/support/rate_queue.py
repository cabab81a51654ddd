"""A queue whose waiting times are known in closed form, as the server of a rate search."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
from scipy.optimize import brentq

from kvbench.metrics.latency import summarise

SERVICE_S = 0.1
N = 4000  # requests of a run


def waiting_cdf(t: float, rate: float, service: float) -> float:
    """P(wait <= t) of an M/D/1 queue (Erlang 1909; Tijms, "A First Course in Stochastic Models", 2003, sec. 9.2)."""
    rho = rate * service
    terms = [
        (-rate * (t - k * service)) ** k / math.factorial(k) * math.exp(rate * (t - k * service))
        for k in range(int(t / service) + 1)
    ]
    return (1 - rho) * math.fsum(terms)


def md1_capacity(quantile: float, limit_s: float) -> float:
    """The rate at which that quantile of the time in an M/D/1 queue of SERVICE_S equals ``limit_s``."""
    return brentq(lambda rate: waiting_cdf(limit_s - SERVICE_S, rate, SERVICE_S) - quantile, 0.01, 0.999 / SERVICE_S)


class Queue:
    """Stands in for a server: one request after the other, each SERVICE_S; its answer is one token at its end."""

    def __init__(self, invalid=lambda number: False):
        self.asked: list[tuple[float, int, int]] = []
        self.invalid = invalid

    def measure(self, rate, count, number, out):
        self.asked.append((rate, count, number))
        rng = np.random.default_rng([7, number])
        starts = np.cumsum(rng.exponential(1 / rate, count))
        ends, free = [], 0.0
        for start in starts:
            free = max(start, free) + SERVICE_S
            ends.append(free)
        rows = pd.DataFrame(
            {
                "index": range(count), "session": None, "class": "a", "t0": starts, "ts": starts, "first": ends,
                "last": ends, "end": ends, "chunk_times": [[e] for e in ends], "output_tokens": 1, "prompt_tokens": 4,
                "ok": True, "error_kind": None,
            }
        )  # fmt: skip
        rows.to_parquet(out / "requests.parquet")
        metrics = summarise(rows, {"mode": "open"}, {"ttft_ms": 500.0})
        bad = self.invalid(number)
        return {"valid": not bad, "invalid_reasons": ["foreign work"] if bad else [], "metrics": metrics}


def answer(search):
    return json.loads((search.folder.path / "search.json").read_text())


class AllAtOnce(Queue):
    """As many at once as come, ``seconds`` each: a backlog shows only in a run that is longer than that."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def measure(self, rate, count, number, out):
        kept = super().measure(rate, count, number, out)
        rows = pd.read_parquet(out / "requests.parquet")
        rows["end"] = rows["t0"] + self.seconds
        rows.to_parquet(out / "requests.parquet")
        return kept
