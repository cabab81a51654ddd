"""A toy engine in virtual time: enough of one to give a synthetic run the shape of a real one.

Nothing here is a measurement. Sequences are admitted, prefilled in chunks, decoded and preempted as in the real
engine; the cost of a step is a formula.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

CLASSES = (
    ("short chat", 0.5, (16, 64), (32, 96)),
    ("medium question", 0.34, (128, 256), (32, 64)),
    ("long document", 0.16, (400, 640), (24, 48)),
)
BYTES_PER_TOKEN = 16_384
MAX_MODEL_LEN = 1024
PAGE_TABLE_BYTES = 65_536  # on top of the slots, as the budget has it
INT8, INT4 = "int8_per_token_head", "int4_per_token_head"
CODES_A_FLOAT = {INT8: 4, INT4: 8}
PLACES = ("tokens", "waste", "cached", "pinned", "free", "fragmented")
COUNTERS = (
    "num_preemptions_total", "recomputed_tokens_total", "prefix_cache_hits_total", "prefix_cache_queries_total",
    "generation_tokens_total", "swapped_out_slots_total", "swapped_in_slots_total", "swap_lost_slots_total",
    *(f"kv_slot_steps_total_{place}" for place in PLACES),
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """One engine configuration of the synthetic sweep."""

    config_id: str
    layout: str = "paged"
    page_size: int = 16
    prefix_caching: bool = False
    kv_cache_dtype: str = "auto"
    preemption_mode: str = "recompute"
    varied: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        paged = {"page_size": self.page_size, "enable_prefix_caching": self.prefix_caching}
        limits = {"kv_budget": "64MiB", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 64}
        return {
            "layout": self.layout, **(paged if self.layout == "paged" else {}), "kv_cache_dtype": self.kv_cache_dtype,
            "preemption_mode": self.preemption_mode, **limits, "max_num_batched_tokens": 512,
        }  # fmt: skip

    @property
    def bytes_per_slot(self) -> int:
        """int8 takes a quarter of float32, int4 an eighth, and a scale of 4 bytes for every 64 codes of them."""
        return BYTES_PER_TOKEN // CODES_A_FLOAT.get(self.kv_cache_dtype, 1) + self.scale_bytes

    @property
    def scale_bytes(self) -> int:
        return BYTES_PER_TOKEN // 64 if self.kv_cache_dtype in CODES_A_FLOAT else 0


CONFIGS = (
    Config("baseline"),
    Config("layout-contiguous", layout="contiguous", varied={"layout": "contiguous"}),
    Config("page_size-8", page_size=8, varied={"page_size": 8}),
    Config("page_size-64", page_size=64, varied={"page_size": 64}),
    Config("enable_prefix_caching-true", prefix_caching=True, varied={"enable_prefix_caching": True}),
    Config("kv_cache_dtype-int8", kv_cache_dtype=INT8, varied={"kv_cache_dtype": INT8}),
    Config("preemption_mode-swap", preemption_mode="swap", varied={"preemption_mode": "swap"}),
    Config("kv_cache_dtype-int4", kv_cache_dtype=INT4, varied={"kv_cache_dtype": INT4}),
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
    quality: str = ""  # "own" or "beside": which model its quality.json is of
    text: str = "A page table maps what a sequence wrote to where it was put."


@dataclass
class _Sequence:
    index: int
    prompt: int
    output: int
    t0: float
    user: int
    hit: int = 0
    computed: int = 0
    swapped: int = 0  # tokens whose KV is on the host
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
    clock, engine = 0.0, _Engine(config, sc.slots * BYTES_PER_TOKEN)
    pending, done, polls, next_poll = list(range(sc.num_requests)), [], [], 0.0

    def send(index: int, user: int, t0: float) -> None:
        hit = 96 if (config.prefix_caching and shared[index] and engine.prefix_seen) else 0
        engine.prefix_seen |= bool(shared[index])
        engine.waiting.append(
            _Sequence(index, jobs[index][0] + 96 * bool(shared[index]), jobs[index][1], t0, user, hit=hit)
        )

    if arrivals is None:
        for user in range(min(int(value), len(pending))):
            send(pending.pop(0), user, user * 1e-4)  # one after the other, as a client's users start
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
            polls.append({"t": next_poll, **engine.gauges(), **engine.counters})
            next_poll += 0.25
    frame = _frame(done, names, config, sc)
    return frame, pd.DataFrame(polls), {**engine.counters, "pages_owned_after": 0}


def _shuffled_classes(count: int, rng: np.random.Generator) -> list[str]:
    names = [name for name, share, *_ in CLASSES for _ in range(int(share * count))]
    names += [CLASSES[0][0]] * (count - len(names))
    return [names[i] for i in rng.permutation(count)]


class _Engine:
    def __init__(self, config: Config, budget: int) -> None:
        self.config, self.budget = config, budget
        self.slots = budget // config.bytes_per_slot
        self.waiting: list[_Sequence] = []
        self.running: list[_Sequence] = []
        self.prefix_seen = False
        self.counters = dict.fromkeys(COUNTERS, 0)

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
            if self.config.preemption_mode == "swap":
                victim.swapped = victim.computed
                self.counters["swapped_out_slots_total"] += victim.computed
            else:
                self.counters["recomputed_tokens_total"] += victim.computed
            victim.computed = 0
            self.waiting.insert(0, victim)
        while self.waiting:
            head = self.waiting[0]
            need = MAX_MODEL_LEN if self.config.layout == "contiguous" else head.prompt + head.produced + 16
            if self.owned() + need > self.slots:
                break
            head.computed = max(head.hit, head.swapped)
            self.counters["swapped_in_slots_total"] += head.swapped
            head.swapped = 0
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
        for place, slots in self.ledger().items():
            self.counters[f"kv_slot_steps_total_{place}"] += slots
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

    def ledger(self) -> dict[str, int]:
        """Slots by place; all of them, each once."""
        owned = min(self.owned(), self.slots)
        used = min(self.used(), owned)
        cached = min(96, self.slots - owned) if self.config.prefix_caching and self.prefix_seen else 0
        free = self.slots - owned - cached
        return dict(zip(PLACES, (used, owned - used, cached, 0, free, 0), strict=True))

    def gauges(self) -> dict[str, float]:
        places, width = self.ledger(), self.config.bytes_per_slot
        owned = places["tokens"] + places["waste"]
        size = MAX_MODEL_LEN if self.config.layout == "contiguous" else self.config.page_size
        return {
            "num_requests_running": len(self.running), "num_requests_waiting": len(self.waiting),
            "kv_cache_usage_perc": owned / self.slots,
            "kv_pages_total": self.slots // size, "kv_pages_owned": owned // size,
            "kv_slots_total": self.slots, "kv_slots_reserved": owned, "kv_slots_used": places["tokens"],
            **{f"kv_slots_{place}": places[place] for place in PLACES[2:]},
            "kv_slots_shared": 48 if places["cached"] else 0,
            "kv_waste_slots": places["waste"], "kv_waste_bytes": places["waste"] * width,
            "kv_bytes_per_slot": width, "kv_scale_bytes_per_slot": self.config.scale_bytes,
            "page_table_bytes": (owned // size) * 8, "kv_budget_bytes": self.budget + PAGE_TABLE_BYTES,
        }  # fmt: skip


def _frame(done: list[_Sequence], names: list[str], config: Config, sc: Scenario) -> pd.DataFrame:
    rows = []
    failed = sc.failures.get(config.config_id, 0)
    for s in sorted(done, key=lambda s: s.index):
        ok = s.index >= failed
        ending = (None, None, "length") if ok else ("truncated", "stream ended early", None)
        rows.append(
            {
                "index": s.index, "class": names[s.index], "user": s.user, "prompt_tokens": s.prompt,
                "output_tokens": s.output, "cached_tokens": s.hit, "max_tokens": s.output,
                "t0": s.t0, "ts": s.t0 + 1e-4, "first": s.times[0], "last": s.times[-1], "chunk_times": s.times,
                "ok": ok, "http_status": 200,
                **dict(zip(("error_kind", "error", "finish_reason"), ending, strict=True)), "text": sc.text,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)
