"""A synthetic run folder, made by a small simulated engine, for tests of whatever reads run folders.

Nothing here is a measurement: a toy engine with a paged and a contiguous layout is stepped in virtual time and
its requests and gauges are written in the layout that a sweep writes. Seeded, so two calls give equal folders.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvbench.metrics import pooled, summarise

CLASSES = (
    ("short chat", 0.5, (16, 64), (32, 96)),
    ("medium question", 0.34, (128, 256), (32, 64)),
    ("long document", 0.16, (400, 640), (24, 48)),
)
BYTES_PER_TOKEN = 16_384
MAX_MODEL_LEN = 1024


@dataclass(frozen=True)
class Config:
    """One engine configuration of the synthetic sweep."""

    config_id: str
    layout: str = "paged"
    page_size: int = 16
    prefix_caching: bool = False
    varied: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        paged = {"page_size": self.page_size, "enable_prefix_caching": self.prefix_caching}
        return {
            "layout": self.layout,
            **(paged if self.layout == "paged" else {}),
            "kv_budget": "64MiB",
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 512,
        }


CONFIGS = (
    Config("baseline"),
    Config("layout-contiguous", layout="contiguous", varied={"layout": "contiguous"}),
    Config("page_size-8", page_size=8, varied={"page_size": 8}),
    Config("page_size-64", page_size=64, varied={"page_size": 64}),
    Config("enable_prefix_caching-true", prefix_caching=True, varied={"enable_prefix_caching": True}),
)


@dataclass(frozen=True)
class Scenario:
    """What the synthetic run holds and what went wrong in it."""

    configs: tuple[Config, ...] = CONFIGS
    concurrencies: tuple[int, ...] = (3, 24)
    rates: tuple[float, ...] = ()  # open loop when not empty
    repeats: int = 3
    num_requests: int = 48
    slots: int = 4096
    seed: int = 0
    noise: float = 0.02  # launch-to-launch sd of the step time
    slowdown: dict[str, float] = field(default_factory=dict)  # config_id -> step time factor
    failures: dict[str, int] = field(default_factory=dict)  # config_id -> failed requests a repeat
    invalid: dict[str, tuple[str, ...]] = field(default_factory=dict)  # config_id -> reasons
    missing: tuple[str, ...] = ()  # config_ids planned but never finished
    server_metrics: bool = True  # False: a foreign server without our /metrics
    workload_name: str = "mixed"
    text: str = "A page table maps what a sequence wrote to where it was put."


def make_run(folder: Path, scenario: Scenario | None = None) -> Path:
    """Write the run folder of `scenario` at `folder` and return it."""
    scenario = scenario or Scenario()
    folder.mkdir(parents=True, exist_ok=True)
    loads = (
        [("open", r) for r in scenario.rates]
        if scenario.rates
        else [("closed", float(c)) for c in scenario.concurrencies]
    )
    plan: list[dict[str, Any]] = []
    for config in scenario.configs:
        for mode, value in loads:
            cell_id = f"{config.config_id}-{'r' if mode == 'open' else 'c'}{value:g}"
            plan += [
                {"block_id": f"{config.config_id}-{r}", "repeat": r, "cells": [cell_id]}
                for r in range(1, scenario.repeats + 1)
            ]
            if config.config_id not in scenario.missing:
                _write_cell(folder / "cells" / cell_id, cell_id, config, mode, value, scenario)
    manifest = {
        "status": "incomplete" if scenario.missing else "complete",
        "shared_machine": True,
        "workload": {
            "name": scenario.workload_name,
            "description": "Short chats, questions and long documents.",
            "model": {"config": "llama-32m", "load_format": "dummy", "dtype": "float32"},
        },
        "command": ["kvbench", "sweep", "workloads/mixed.yaml", "--profile", "cpu"],
        "git": {"sha": "0123456789abcdef", "dirty": False},
        "versions": {"python": "3.11.2", "torch": "2.13.0"},
        "device": "cpu",
        "cpu": {"model": "synthetic", "cores": 2},
        "seeds": {"workload": scenario.seed},
        "started": "2026-01-01T10:00:00+00:00",
        "ended": "2026-01-01T10:06:42+00:00",
        "plan": plan,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return folder


def _write_cell(folder: Path, cell_id: str, config: Config, mode: str, value: float, sc: Scenario) -> None:
    folder.mkdir(parents=True)
    frames, gauges, repeats = [], [], []
    for repeat in range(1, sc.repeats + 1):
        requests, server, counters = simulate(config, mode, value, repeat, sc)
        metrics = summarise(requests, {"mode": mode, "concurrency": int(value) if mode == "closed" else None})
        frames.append(requests.assign(repeat=repeat))
        gauges.append(server.assign(repeat=repeat))
        repeats.append(
            {
                "repeat": repeat,
                "started_at": f"2026-01-01T10:0{repeat}:00+00:00",
                "metrics": metrics,
                "server": counters if sc.server_metrics else {},
            }
        )
    pooled_requests = pd.concat(frames, ignore_index=True)
    pooled_requests.to_parquet(folder / "requests.parquet")
    if sc.server_metrics:
        pd.concat(gauges, ignore_index=True).to_parquet(folder / "server.parquet")
    with (folder / "samples.jsonl").open("w") as out:
        for row in pooled_requests[pooled_requests.ok].head(3).itertuples():
            out.write(
                json.dumps(
                    {
                        "index": int(row.index),
                        "class": row[pooled_requests.columns.get_loc("class") + 1],
                        "prompt_tokens": int(row.prompt_tokens),
                        "text": row.text,
                    }
                )
                + "\n"
            )
    reasons = list(sc.invalid.get(config.config_id, ()))
    summary = {
        "cell_id": cell_id,
        "config_id": config.config_id,
        "label": config.config_id.replace("-", "="),
        "is_baseline": not config.varied,
        "varied": config.varied,
        "settings": config.settings,
        "load": {
            "mode": mode,
            "concurrency": int(value) if mode == "closed" else None,
            "request_rate": value if mode == "open" else None,
            "num_requests": sc.num_requests,
        },
        "capacity": {
            "kv_budget_bytes": sc.slots * BYTES_PER_TOKEN,
            "capacity_tokens": sc.slots,
            "num_pages": sc.slots // config.page_size,
            "max_concurrency_at_max_len": sc.slots // MAX_MODEL_LEN,
        },
        "repeats": repeats,
        "aggregate": aggregate([r["metrics"] for r in repeats]),
        "pooled": pooled(frames),
        "valid": not reasons,
        "invalid_reasons": reasons,
    }
    (folder / "summary.json").write_text(json.dumps(summary))


# ---- the toy engine ---------------------------------------------------------------------------------


@dataclass
class _Sequence:
    index: int
    prompt: int
    output: int
    t0: float
    user: int
    hit: int = 0
    computed: int = 0
    produced: int = 0
    times: list[float] = field(default_factory=list)


def simulate(
    config: Config, mode: str, value: float, repeat: int, sc: Scenario
) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, float]]:
    """One load on a fresh toy engine: requests, polled gauges, counters."""
    draws = np.random.default_rng([sc.seed, repeat, int(value * 10)])  # the same for every configuration
    noise = np.random.default_rng([sc.seed, repeat, int(value * 10), sum(config.config_id.encode())])
    pace = float(np.exp(noise.normal(0, sc.noise))) * sc.slowdown.get(config.config_id, 1.0)
    names = _shuffled_classes(sc.num_requests, draws)
    lengths = {name: (p, o) for name, _, p, o in CLASSES}
    jobs = [(int(draws.integers(*lengths[n][0])), int(draws.integers(*lengths[n][1]))) for n in names]
    shared = draws.random(sc.num_requests) < 0.5
    arrivals = np.cumsum(draws.exponential(1 / value, sc.num_requests)) if mode == "open" else None
    clock, engine = 0.0, _Engine(config, sc.slots)
    pending, done, polls, next_poll = list(range(sc.num_requests)), [], [], 0.0

    def send(index: int, user: int, t0: float) -> None:
        hit = 96 if (config.prefix_caching and shared[index] and engine.prefix_seen) else 0
        engine.prefix_seen |= bool(shared[index])
        engine.waiting.append(
            _Sequence(index, jobs[index][0] + 96 * bool(shared[index]), jobs[index][1], t0, user, hit=hit)
        )

    if arrivals is None:
        for user in range(min(int(value), len(pending))):
            send(pending.pop(0), user, 0.0)
    while len(done) < sc.num_requests:
        while arrivals is not None and pending and arrivals[pending[0]] <= clock:
            send(pending[0], 0, float(arrivals[pending.pop(0)]))
        cost = engine.step(clock)
        if cost == 0.0:
            clock = float(arrivals[pending[0]])
            continue
        clock += cost * pace * float(np.exp(noise.normal(0, 0.08)))
        for sequence in engine.emit(clock):
            done.append(sequence)
            if arrivals is None and pending:
                send(pending.pop(0), sequence.user, clock)
        while next_poll <= clock:
            polls.append({"t": next_poll, **engine.gauges()})
            next_poll += 0.25
    frame = _frame(done, names, config, sc)
    return frame, pd.DataFrame(polls), {**engine.counters, "pages_owned_after": 0}


def _shuffled_classes(count: int, rng: np.random.Generator) -> list[str]:
    names = [name for name, share, *_ in CLASSES for _ in range(int(share * count))]
    names += [CLASSES[0][0]] * (count - len(names))
    return [names[i] for i in rng.permutation(count)]


class _Engine:
    def __init__(self, config: Config, slots: int) -> None:
        self.config, self.slots = config, slots
        self.waiting: list[_Sequence] = []
        self.running: list[_Sequence] = []
        self.prefix_seen = False
        self.counters = {
            "num_preemptions_total": 0,
            "recomputed_tokens_total": 0,
            "prefix_cache_hits_total": 0,
            "prefix_cache_queries_total": 0,
            "generation_tokens_total": 0,
        }

    def reserved(self, sequence: _Sequence, extra: int = 0) -> int:
        if self.config.layout == "contiguous":
            return MAX_MODEL_LEN
        size = self.config.page_size
        return -(-(sequence.computed + extra) // size) * size

    def used(self) -> int:
        return sum(s.computed for s in self.running)

    def owned(self) -> int:
        return sum(self.reserved(s, 1) for s in self.running)

    def step(self, now: float) -> float:
        """Admit, prefill within the token budget, decode the rest; return the step's cost in seconds."""
        while self.owned() > self.slots:
            victim = self.running.pop()
            self.counters["num_preemptions_total"] += 1
            self.counters["recomputed_tokens_total"] += victim.computed
            victim.computed = 0
            self.waiting.insert(0, victim)
        while self.waiting:
            head = self.waiting[0]
            need = MAX_MODEL_LEN if self.config.layout == "contiguous" else head.prompt + head.produced + 16
            if self.owned() + need > self.slots:
                break
            head.computed = head.hit
            if self.config.prefix_caching and not head.times:
                self.counters["prefix_cache_queries_total"] += head.prompt
                self.counters["prefix_cache_hits_total"] += head.hit
            self.running.append(self.waiting.pop(0))
        if not self.running:
            return 0.0
        budget, prefill, self.decoding = 512, 0, []
        for sequence in self.running:
            target = sequence.prompt + sequence.produced
            chunk = min(target - sequence.computed, budget - prefill)
            if chunk > 0:
                prefill += chunk
                sequence.computed += chunk
            if sequence.computed >= target:
                self.decoding.append(sequence)
        tables = 1 + 0.15 / self.config.page_size if self.config.layout == "paged" else 1.0
        return 0.012 + (0.0014 * len(self.decoding) + 3e-7 * self.used()) * tables + 1.1e-4 * prefill

    def emit(self, now: float) -> list[_Sequence]:
        finished = []
        for sequence in self.decoding:
            sequence.produced += 1
            sequence.times.append(now)
            self.counters["generation_tokens_total"] += 1
            if sequence.produced >= sequence.output:
                self.running.remove(sequence)
                finished.append(sequence)
        return finished

    def gauges(self) -> dict[str, float]:
        owned, used = min(self.owned(), self.slots), self.used()
        size = MAX_MODEL_LEN if self.config.layout == "contiguous" else self.config.page_size
        return {
            "num_requests_running": len(self.running),
            "num_requests_waiting": len(self.waiting),
            "kv_cache_usage_perc": owned / self.slots,
            "kv_pages_total": self.slots // size,
            "kv_pages_owned": owned // size,
            "kv_slots_total": self.slots,
            "kv_slots_reserved": owned,
            "kv_slots_used": min(used, owned),
            "kv_waste_slots": max(owned - used, 0),
            "kv_waste_bytes": max(owned - used, 0) * BYTES_PER_TOKEN,
            "page_table_bytes": (owned // size) * 8,
            "kv_budget_bytes": self.slots * BYTES_PER_TOKEN,
        }


def _frame(done: list[_Sequence], names: list[str], config: Config, sc: Scenario) -> pd.DataFrame:
    rows = []
    failed = sc.failures.get(config.config_id, 0)
    for s in sorted(done, key=lambda s: s.index):
        ok = s.index >= failed
        rows.append(
            {
                "index": s.index,
                "class": names[s.index],
                "user": s.user,
                "prompt_tokens": s.prompt,
                "output_tokens": s.output,
                "cached_tokens": s.hit,
                "max_tokens": s.output,
                "t0": s.t0,
                "ts": s.t0 + 1e-4,
                "first": s.times[0],
                "last": s.times[-1],
                "chunk_times": s.times,
                "ok": ok,
                "error_kind": None if ok else "truncated",
                "error": None if ok else "stream ended early",
                "finish_reason": "length" if ok else None,
                "http_status": 200,
                "text": sc.text,
            }
        )
    return pd.DataFrame(rows)


# ---- summaries, in the shape that a sweep writes ----------------------------------------------------


def aggregate(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, spread and values over the repeats of every scalar and every percentile."""
    flat: dict[str, list[float]] = {}
    for one in metrics:
        for name, value in one.items():
            if isinstance(value, (int, float)):
                flat.setdefault(name, []).append(float(value))
            elif isinstance(value, dict) and name.endswith("_ms"):
                for stat in ("p50", "p90", "p95", "p99", "mean"):
                    if value.get(stat) is not None:
                        flat.setdefault(f"{name}.{stat}", []).append(value[stat])
    return {
        name: {
            "median": float(np.median(v)),
            "mean": float(np.mean(v)),
            "min": min(v),
            "max": max(v),
            "sd": float(np.std(v, ddof=1)) if len(v) > 1 else None,
            "n": len(v),
            "values": v,
        }
        for name, v in flat.items()
    }


BASELINE, CONTIGUOUS = CONFIGS[0], CONFIGS[1]
PAIR = (BASELINE, CONTIGUOUS)
VARIANTS: dict[str, Scenario] = {
    "normal": Scenario(),
    "failures": Scenario(configs=PAIR, failures={"baseline": 3}),
    "invalid": Scenario(configs=PAIR, invalid={"layout-contiguous": ("timestamp lag p99 3.1 ms is over 1.0 ms",)}),
    "incomplete": Scenario(missing=("page_size-64", "enable_prefix_caching-true")),
    "single_repeat": Scenario(repeats=1),
    "open_loop": Scenario(configs=PAIR, rates=(2.0, 12.0)),
    "no_contiguous": Scenario(configs=tuple(c for c in CONFIGS if c.layout == "paged")),
    "one_cell": Scenario(configs=(BASELINE,), concurrencies=(24,)),
    "foreign": Scenario(configs=(replace(BASELINE, config_id="vllm"),), server_metrics=False),
    "nothing": Scenario(missing=tuple(c.config_id for c in CONFIGS)),
    "paged_slower": Scenario(configs=PAIR, slowdown={c.config_id: 3.2 for c in CONFIGS if c.layout == "paged"}),
}
