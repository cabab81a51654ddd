"""A queue whose waiting times are known in closed form, as the server of a rate search."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
from scipy.optimize import brentq

from kvbench.load.validity import client_report, invalid_reasons
from kvbench.metrics.latency import summarise

SERVICE_S = 0.1
N = 2000  # requests of a run
CLIENT = client_report([], [0.04] * 5000, cpu_s=9.9, wall_s=10.0, mode="open")  # lagged, and used all of a core


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
    """Stands in for a server: one request after the other, each SERVICE_S; its answer is one token at its end.

    ``invalid``: whether the run of that number is disturbed by other work. ``client_limit``: the highest rate that the
    client can send. ``in_parallel_s``: seconds of each request, as many at once as come. ``runs``: rate, requests and
    number of each.
    """

    def __init__(self, invalid=lambda number: False, client_limit=math.inf, in_parallel_s=None):
        self.runs: list[tuple[float, int, int]] = []
        self.invalid, self.client_limit, self.in_parallel_s = invalid, client_limit, in_parallel_s

    def measure(self, rate, count, number, out):
        self.runs.append((rate, count, number))
        starts = np.cumsum(np.random.default_rng([7, number]).exponential(1 / rate, count))
        answered, free = [], 0.0
        for start in starts:
            free = max(start, free) + SERVICE_S
            answered.append(free)
        rows = pd.DataFrame(
            {
                "index": range(count), "session": None, "class": "a", "t0": starts, "ts": starts, "first": answered,
                "last": answered, "end": answered, "chunk_times": [[e] for e in answered], "output_tokens": 1,
                "prompt_tokens": 4, "ok": True, "error_kind": None,
            }
        )  # fmt: skip
        metrics = summarise(rows, {"mode": "open"}, {"ttft_ms": 500.0})
        if self.in_parallel_s is not None:
            rows["end"] = rows["t0"] + self.in_parallel_s
        rows.to_parquet(out / "requests.parquet")
        reasons = ["foreign work"] if self.invalid(number) else []
        if rate > self.client_limit:
            (out / "load.json").write_text(json.dumps({"client": CLIENT}))
            reasons += invalid_reasons(CLIENT, 0)
        return {"valid": not reasons, "invalid_reasons": reasons, "metrics": metrics}


def answer(search):
    return json.loads((search.folder.path / "search.json").read_text())
