"""A prefix cache of several tiers: pages that leave the GPU's memory go to host memory, and from there to disk.

    HBM (the engine's pool and prefix cache) ──evicted──► DRAM ──evicted──► SSD ──evicted──► gone
            ▲                                               │                │
            └────────── loaded, or computed again ◄─────────┴────────────────┘

A page is in one tier at a time. Requests go one after another, as in ``kvbench.trace_analysis.cache_sim``, so TTFT is
that of a request alone: nothing waits in a queue. A page can be used if all pages before it are in some tier; of a hit
below HBM the cheaper is done: loading it, or computing it again. Loads end before the computing begins.

HBM evicts the least recently used page, as the engine does. The tiers below do so too, or evict the page that the
fewest requests have used (``lfu``; of equals the least recently used one; a page that left all tiers counts anew).
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from kvbench.capacity.fit import GIB, Settings, memory_of
from kvbench.capacity.gpus import parse_gpus
from kvbench.capacity.model import plan_model
from kvbench.capacity.weights import weights_of
from kvbench.common.errors import UsageError, as_usage_error
from kvbench.common.text import format_bytes, parse_bytes
from kvbench.metrics.latency import distribution
from kvbench.simulation.cost.machine import Machine
from kvbench.simulation.wording import sentence
from kvbench.trace_analysis.cache_sim import PagedPrefixes, PrefixNodes, hit_rates
from kvbench.trace_analysis.commands import print_cache
from kvbench.traces.model import Trace, file_names
from kvbench.traces.read import read_page_ids
from kvbench_engine.execution.simulated_executor import StepWork

NAMES = ("hbm", "dram", "ssd")
_SSD_BYTES_PER_S = 6.5e9  # sequential reads of a data-centre drive on PCIe 4.0 x4: as announced of Samsung's PM9A3
_LATENCY_S = {"hbm": 0.0, "dram": 20e-6, "ssd": 100e-6}  # of a request's load; a page of megabytes takes far longer
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Tier:
    """A tier and its speed of loading into HBM; ``latency_s`` counts once for each request that loads."""

    name: str
    num_bytes: int
    bytes_per_s: float
    latency_s: float


def parse_tiers(text: str, machine: Machine, kv_cache_dtype: str = "auto") -> tuple[Tier, ...]:
    """Reads ``hbm=40GiB,dram=40GiB@50GB/s,ssd=1TiB@6.5GB/s@100us`` as tiers from HBM down, whatever their order.

    HBM that is left out is all that the GPUs have for KV. DRAM is read at the speed of the GPUs' links to the host,
    each GPU its share. Raises UsageError.
    """
    room = _bytes_for_kv(machine, kv_cache_dtype)
    tiers: dict[str, Tier] = {}
    for part in text.split(","):
        name, _, rest = part.strip().partition("=")
        name = name.strip().lower()
        if name not in NAMES:
            raise UsageError(sentence("tiers.unknown", part=part.strip(), example=sentence("tiers.example")))
        if name in tiers:
            raise UsageError(sentence("tiers.twice", name=name))
        tiers[name] = _tier(name, rest.split("@"), machine)
    hbm = tiers.setdefault("hbm", Tier("hbm", room, np.inf, 0.0))
    if hbm.num_bytes > room:
        sizes = {"size": format_bytes(hbm.num_bytes), "room": format_bytes(room), "gpus": machine.gpus}
        raise UsageError(sentence("tiers.too_large", gpu=machine.gpu.name, model=machine.model.name, **sizes))
    return tuple(tiers[name] for name in NAMES if name in tiers)


def _bytes_for_kv(machine: Machine, kv_cache_dtype: str) -> int:
    """Computes the bytes of KV of all GPUs. Raises UsageError where the model does not fit."""
    weights = weights_of(machine.model)
    memory = memory_of(machine.model, weights, machine.gpu, machine.gpus, Settings(kv_cache_dtype=kv_cache_dtype))
    if memory.kv <= 0:
        machine.settle({"kv_cache_dtype": kv_cache_dtype})  # raises, with the numbers
    return max(0, memory.kv) * machine.gpus


def _tier(name: str, words: Sequence[str], machine: Machine) -> Tier:
    """Reads a tier from ``words``: its size, and below HBM its speed and latency. Raises UsageError."""
    performance = machine.gpu.performance
    assert performance is not None
    link = performance.host_link_bytes_per_s * machine.gpus
    speed, latency = {"hbm": np.inf, "dram": link, "ssd": min(_SSD_BYTES_PER_S, link)}[name], _LATENCY_S[name]
    size, *others = words
    try:
        num_bytes = parse_bytes(size.strip())
        if name == "hbm" and others:
            raise ValueError(sentence("tiers.hbm_speed"))
        for word in map(str.strip, others):
            if word.lower().endswith("/s"):
                speed = float(parse_bytes(word[:-2]))
            else:
                latency = _seconds(word)
        if num_bytes <= 0 or speed <= 0:
            raise ValueError(sentence("tiers.not_positive"))
    except ValueError as error:
        what = {"name": name, "words": "@".join(words), "why": error, "example": sentence("tiers.example")}
        raise UsageError(sentence("tiers.damaged", **what)) from None
    return Tier(name, num_bytes, speed, latency)


def _seconds(text: str) -> float:
    for unit, seconds in _SECONDS.items():
        number = text.removesuffix(unit)
        if number != text and number.strip().replace(".", "", 1).isdecimal():
            return float(number) * seconds
    raise ValueError(sentence("tiers.no_speed", text=text))


class Store:
    """The pages of a tier below HBM. The page of the least rank leaves first. ``uses``: None: least recently used."""

    def __init__(self, num_pages: int, uses: Counter[int] | None = None) -> None:
        self.num_pages, self._uses = num_pages, uses
        self._rank: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], int]] = []  # those of pages that have left stay until they are met
        self._clock = itertools.count()

    def __contains__(self, page: int) -> bool:
        return page in self._rank

    def add(self, page: int) -> int | None:
        """Keeps ``page``, most recently used; the page that leaves for it, if one does."""
        rank = self._rank[page] = (self._uses[page] if self._uses is not None else 0, next(self._clock))
        heapq.heappush(self._heap, (rank, page))
        if len(self._rank) <= self.num_pages:
            return None
        while True:
            rank, least = heapq.heappop(self._heap)
            if self._rank.get(least) == rank:
                del self._rank[least]
                return least

    def remove(self, page: int) -> None:
        del self._rank[page]
        if len(self._heap) > 2 * len(self._rank) + 1024:
            self._heap = [entry for entry in self._heap if self._rank.get(entry[1]) == entry[0]]
            heapq.heapify(self._heap)


class TieredCache:
    """The place of each page of a trace. ``num_pages`` of each tier, HBM first.

    A page is known by its node: its number among all distinct prefixes of whole pages.
    """

    def __init__(self, num_pages: Sequence[int], policy: str = "lru") -> None:
        self._hbm = PagedPrefixes(num_pages[0], self._on_evict)
        self._uses: Counter[int] = Counter()
        self.stores = [Store(count, self._uses if policy == "lfu" else None) for count in num_pages[1:]]
        self._nodes = PrefixNodes()
        self._node_in: dict[int, int] = {}  # physical page of HBM -> node

    def serve(self, page_ids: Sequence[int]) -> list[int]:
        """Returns the tiers of a prompt's leading pages, 0 for HBM, up to the first that is in none.

        All its pages are in HBM then. Of a prompt of more pages than HBM the first of them are looked up and kept.
        """
        kept = page_ids[: self._hbm.num_pages]
        nodes = self._nodes.walk(kept)
        self._uses.update(nodes)
        seq = self._hbm.match(kept)
        first = len(seq.pages)
        tiered = list(enumerate(self.stores, 1))
        below = [next((tier for tier, store in tiered if node in store), None) for node in nodes[first:]]
        for node, tier in zip(nodes[first:], below, strict=True):  # before evictions, which would push them out
            if tier is not None:
                self.stores[tier - 1].remove(node)
        tiers = [0] * first + list(itertools.takewhile(lambda tier: tier is not None, below))
        self._hbm.fill(seq)
        self._node_in.update(zip(seq.pages[first:], nodes[first:], strict=True))
        return tiers

    def _on_evict(self, pages: list[int]) -> None:
        for page in pages:
            node: int | None = self._node_in.pop(page)
            for store in self.stores:
                node = store.add(node)
                if node is None:
                    break
            if node is not None:
                del self._uses[node]


class FirstTokens:
    """The TTFT of requests alone on ``machine``, by the tiers that hold the pages of their prompts.

    step_tokens: most tokens of a step; page_bytes: KV of a page of ``page_size`` tokens
    """

    def __init__(self, machine: Machine, page_size: int, tiers: tuple[Tier, ...], kv_cache_dtype: str = "auto") -> None:
        self.machine, self.page_size, self.tiers = machine, page_size, tiers
        self.step_tokens = Settings().step_on(machine.gpu).tokens
        limits = {"max_num_batched_tokens": self.step_tokens, "max_num_seqs": 1}
        config, _ = machine.settle({"kv_cache_dtype": kv_cache_dtype, **limits})
        timer = machine.step_timer(config)
        self.page_bytes = page_size * machine.kv_shape().slot_bytes(kv_cache_dtype)
        self._step_s = functools.cache(lambda prefills, drawn: timer(StepWork(prefills, 0, 0, 0, drawn)).total)

    def pages_of(self, tier: Tier) -> int:
        """Counts the pages that ``tier`` holds. Raises UsageError for one that holds none."""
        if tier.num_bytes < self.page_bytes:
            sizes = {"size": format_bytes(tier.num_bytes), "page": format_bytes(self.page_bytes)}
            raise UsageError(sentence("tiers.no_page", name=tier.name, tokens=self.page_size, **sizes))
        return tier.num_bytes // self.page_bytes

    def of(self, tokens: int, tiers: Sequence[int]) -> tuple[float, list[int]]:
        """Computes the seconds to the first token of a prompt of ``tokens``, and the positions of the loaded pages.

        tiers: of each of its leading pages
        """
        in_hbm = sum(tier == 0 for tier in tiers)
        loaded, load_s = [], 0.0
        for number in sorted(set(tiers) - {0}):
            tier = self.tiers[number]
            page_s = self.page_bytes / tier.bytes_per_s
            cheaper = [i for i, t in enumerate(tiers) if t == number and page_s < self._compute_page_s(i)]
            gain = sum(self._compute_page_s(i) - page_s for i in cheaper)
            if gain > tier.latency_s:
                loaded += cheaper
                load_s += tier.latency_s + page_s * len(cheaper)
        without = self._compute_s(tokens, range(in_hbm))
        if loaded:
            seconds = load_s + self._compute_s(tokens, [*range(in_hbm), *sorted(loaded)])
            if seconds < without:
                return seconds, sorted(loaded)
        return without, []

    def _compute_page_s(self, position: int) -> float:
        """Computes the seconds that a page costs as a part of a full step of a long prompt."""
        before = position * self.page_size // self.step_tokens * self.step_tokens
        return self._step_s(((self.step_tokens, before),), 0) / self.step_tokens * self.page_size

    def _compute_s(self, tokens: int, held: Sequence[int]) -> float:
        """Computes the seconds of a prompt without the pages at ``held`` positions; at least its last token's."""
        total, room, parts = 0.0, self.step_tokens, []
        for start, end in self._gaps(tokens, held):
            while start < end:
                count = min(room, end - start)
                parts.append((count, start))
                start, room = start + count, room - count
                if not room and not (end == tokens and start == end):
                    total += self._step_s(tuple(parts), 0)
                    room, parts = self.step_tokens, []
        return total + self._step_s(tuple(parts), 1)

    def _gaps(self, tokens: int, held: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields the ranges of tokens that no held page has, the last token in any case."""
        at = 0
        for position in held:
            if position * self.page_size > at:
                yield at, position * self.page_size
            at = (position + 1) * self.page_size
        yield min(at, tokens - 1), tokens


@dataclass(frozen=True)
class TierValue:
    """The gain of one tier beside those above it, for ``--json``. Times in s, rates are shares of all pages.

    bytes_per_s, latency_s: of loading from it; None of HBM
    pages_not_computed: of the pages hit in it, those that were not computed again
    mean_ttft_s, p95_ttft_s: of all requests with this tier and those above; saved: by this one
    """

    tier: str
    bytes: int
    bytes_per_s: float | None
    latency_s: float | None
    num_pages: int
    page_hits: int
    page_hit_rate: float
    pages_not_computed: int
    mean_ttft_s: float
    p95_ttft_s: float
    saved_mean_ttft_s: float
    saved_p95_ttft_s: float

    @property
    def title(self) -> str:
        return self.tier.upper()


@dataclass(frozen=True)
class TieredSimulation:
    """A trace without a cache, then with each of ``tiers`` added to those above it. The fields are those of ``--json``.

    pages: of the requests that count; no_cache: mean_ttft_s and p95_ttft_s
    """

    simulated: bool
    model: str
    device: str
    gpus: int
    cost_model: str
    policy: str
    format: str
    page_size: int | None
    page_bytes: int
    requests: int
    warm_up_requests: int
    pages: int
    requests_longer_than_hbm: int
    no_cache: dict[str, float]
    tiers: tuple[TierValue, ...]


def simulate_tiers(trace: Trace, times: FirstTokens, policy: str = "lru", warm_up: int = 0) -> TieredSimulation:
    """Replays ``trace`` without a cache, with HBM, and with one tier after another. ValueError as ``hit_rates``."""
    hit_rates(trace, trace.pages * 0, warm_up)  # raises at once if no request is left to count
    num_pages, pages = [times.pages_of(tier) for tier in times.tiers], int(trace.pages[warm_up:].sum())
    alone = distribution([times.of(int(tokens), ())[0] for tokens in trace.prompt_tokens[warm_up:]])
    ttft, values = alone, []
    for last, tier in enumerate(times.tiers):
        cache, seconds, hits, loaded = TieredCache(num_pages[: last + 1], policy), [], 0, 0
        for index, (tokens, page_ids) in enumerate(zip(trace.prompt_tokens.tolist(), trace.page_ids, strict=True)):
            tiers = cache.serve(page_ids)
            if index >= warm_up:
                took, fetched = times.of(tokens, tiers)
                seconds.append(took)
                hits += tiers.count(last)
                loaded += sum(tiers[i] == last for i in fetched) if last else tiers.count(0)
        before, ttft = ttft, distribution(seconds)
        speed, latency = (tier.bytes_per_s, tier.latency_s) if last else (None, None)
        counts = (num_pages[last], hits, hits / pages, loaded)
        saved = (before.mean - ttft.mean, before.p95 - ttft.p95)
        values.append(TierValue(tier.name, tier.num_bytes, speed, latency, *counts, ttft.mean, ttft.p95, *saved))
    return TieredSimulation(
        simulated=True,
        model=times.machine.model.name,
        device=times.machine.gpu.name,
        gpus=times.machine.gpus,
        cost_model=times.machine.cost_model,
        policy=policy,
        format=trace.format,
        page_size=trace.page_size,
        page_bytes=times.page_bytes,
        requests=len(trace),
        warm_up_requests=warm_up,
        pages=pages,
        requests_longer_than_hbm=int((trace.pages[warm_up:] > num_pages[0]).sum()),
        no_cache={"mean_ttft_s": alone.mean, "p95_ttft_s": alone.p95},
        tiers=tuple(values),
    )


def tiers_command(
    trace: tuple[Path, ...],
    *,
    format: str,
    page_size: int | None,
    warm_up: int,
    model: str | None,
    kv_cache_dtype: str | None,
    tiers: str,
    device: str | None,
    policy: str | None,
    as_json: bool,
    html: Path | None,
) -> int:
    """Runs ``kvbench cache-sim --tiers``. Raises UsageError."""
    if model is None or device is None:
        raise UsageError(sentence("tiers.no_machine"))
    count, gpu = parse_gpus(device)
    machine, dtype = Machine(plan_model(model), gpu, count), kv_cache_dtype or "auto"
    sizes, files = parse_tiers(tiers, machine, dtype), file_names(trace)
    with as_usage_error():
        read = read_page_ids(trace, format, page_size)
        assert read.page_size is not None
        times = FirstTokens(machine, read.page_size, sizes, dtype)
        with Console(stderr=True).status(sentence("tiers.replaying", requests=len(read))):
            result = simulate_tiers(read, times, policy or "lru", warm_up)
    title = sentence("tiers.title", files=files, model=result.model, machine=machine.title)
    if html is not None:
        html.write_text(_figure(result, title).to_html(include_plotlyjs=True), encoding="utf-8")
    if as_json:
        print(json.dumps({"trace": files, **dataclasses.asdict(result)}, indent=2))
    else:
        lines = [*answers(result), *facts(result, times.step_tokens)]
        print_cache(title, _HEADS, _rows(result), lines, html, numbers_from=1)
    return 0


_NOTHING = 0.005  # of the mean TTFT, below which a tier is said to save nothing
_HEADS = ["with", "pages", "hits, pages", "loaded", "mean TTFT", "p95 TTFT", "saves, mean", "p95", "mean, a GiB"]


def _rows(result: TieredSimulation) -> list[list[str]]:
    """Makes a row for no cache and for each tier added."""
    rows = [["no cache", "", "", "", *map(_time, result.no_cache.values()), "", "", ""]]
    for tier in result.tiers:
        loaded = ""
        if tier.page_hits and tier is not result.tiers[0]:
            loaded = f"{tier.pages_not_computed / tier.page_hits:.0%}"
        saved_a_gib = tier.saved_mean_ttft_s / (tier.bytes / GIB)
        times = (tier.mean_ttft_s, tier.p95_ttft_s, tier.saved_mean_ttft_s, tier.saved_p95_ttft_s, saved_a_gib)
        rows.append([tier.title, f"{tier.num_pages:,}", f"{tier.page_hit_rate:.2%}", loaded, *map(_time, times)])
    return rows


def _time(seconds: float) -> str:
    """Writes three digits, in seconds from 1 s on, else in ms; what rounds to nothing is 0."""
    if abs(seconds) >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) >= 1e-7 else "0"


def answers(result: TieredSimulation) -> list[str]:
    """Writes a sentence on each tier, and one on all together."""
    without, with_all = _time(result.no_cache["mean_ttft_s"]), _time(result.tiers[-1].mean_ttft_s)
    together = sentence("tiers.all_together", without=without, with_all=with_all)
    return ["; ".join(map(_saves, result.tiers)) + ".", together]


def _saves(tier: TierValue) -> str:
    saved, before = tier.saved_mean_ttft_s, tier.mean_ttft_s + tier.saved_mean_ttft_s
    values = {"size": format_bytes(tier.bytes), "tier": tier.title, "saved": _time(saved)}
    if saved >= _NOTHING * before:
        return sentence("tiers.saves", share=saved / before, p95=_time(tier.saved_p95_ttft_s), **values)
    why = "other"
    if not tier.pages_not_computed:
        why = "computed" if tier.page_hits else "no hits"
    return sentence("tiers.saves_nothing", why, **values)


def facts(result: TieredSimulation, step_tokens: int) -> list[str]:
    """Writes sentences on what was counted, and how."""
    steps = {"tokens": step_tokens, "source": result.cost_model}
    lines = [sentence("tiers.simulated", n=result.warm_up_requests, requests=result.requests, **steps)]
    below = sentence("tiers.below", result.policy) if len(result.tiers) > 1 else ""
    size = format_bytes(result.page_bytes)
    lines.append(sentence("tiers.pages", tokens=result.page_size, size=size, below=below))
    loads = [
        sentence("tiers.speed", tier=tier.title, speed=tier.bytes_per_s / 1e9, latency=_time(tier.latency_s or 0.0))
        for tier in result.tiers
        if tier.bytes_per_s is not None
    ]
    if loads:
        lines.append(sentence("tiers.loading", speeds=", ".join(loads)))
    if result.requests_longer_than_hbm:
        lines.append(sentence("tiers.cut", "other", n=result.requests_longer_than_hbm))
    return lines


def _figure(result: TieredSimulation, title: str) -> Any:
    """Draws mean and p95 TTFT as one tier after another is added, and the pages that each hits."""
    from plotly.subplots import make_subplots

    from kvbench.report.style import CONTIGUOUS, OTHERS, PAGED, finish, safe

    names = ["no cache", *(tier.title for tier in result.tiers)]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for name, colour, key in (("mean TTFT", PAGED, "mean_ttft_s"), ("p95 TTFT", CONTIGUOUS, "p95_ttft_s")):
        seconds = [result.no_cache[key], *(getattr(tier, key) for tier in result.tiers)]
        figure.add_bar(
            x=names, y=[1e3 * second for second in seconds], name=name, marker={"color": colour},
            hovertemplate=f"%{{y:,.1f}} ms {name}<extra></extra>", row=1, col=1,
        )  # fmt: skip
    figure.add_bar(
        x=names, y=[0.0, *(tier.page_hits / result.pages * 100 for tier in result.tiers)], row=2, col=1,
        name="pages hit in the tier", marker={"color": OTHERS[0]}, hovertemplate="%{y:.2f} % of pages<extra></extra>",
    )  # fmt: skip
    finish(figure, 520)
    figure.update_yaxes(title_text="TTFT with it, ms", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="hits, % of pages", rangemode="tozero", row=2, col=1)
    top = {"text": safe(f"Simulated: {title}"), "y": 0.95, "yanchor": "top"}
    figure.update_layout(title=top, margin={"t": 96, "b": 56})
    return figure
