"""What the PagedAttention paper measured (Kwon et al., SOSP 2023, section 6), simulated with our own engine.

    python -m tests.benchmarks.paged_attention        prints the tables of docs/simulation_results.md

Scheduler, pool, page sharing and reservations are the engine's own; the GPUs are a cost model. The paper's baselines
place reservations with a buddy allocator (section 6.1), ours are first fit: ``BuddySlab`` is the paper's.

The datasets are not here, their mean lengths are published. Lengths are drawn from lognormal distributions with these
means. The spread of the ShareGPT outputs comes from the paper's own figures: by Figure 2, Orca (Oracle) holds 38.2 % of
the slots as tokens and 25.2 % for tokens to come, by Figure 13 for 13.62 requests at once. So a request that runs holds
441 tokens and will hold 732: it computes the 291 that are half of its output, and 2 x 291 = E[output^2] / E[output],
which is 338 (1 + cv^2) for a cv of 0.85. The Alpaca outputs come from Figures 13b and 11, see ``ALPACA``.
"""

from __future__ import annotations

import argparse
import os
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from kvbench.capacity.gpus import find_gpu
from kvbench.capacity.model import plan_model
from kvbench.requests.request import RequestSpec
from kvbench.simulation.cost.cost_model import TYPICAL
from kvbench.simulation.cost.machine import Machine
from kvbench.simulation.fleet.drive import Drive, EndedRequest, Replica
from kvbench_engine.execution.null_executor import mixed
from kvbench_engine.execution.simulated_executor import SimulatedExecutor, StepTime, StepWork
from kvbench_engine.kv.contiguous import ContiguousKVManager, Slab
from kvbench_engine.sequence import Drawn
from kvbench_engine.sequence import Sequence as EngineSequence

LONGEST = 2048  # tokens of prompt + output that OPT and LLaMA take
_PAGE_TABLE_BYTES = 256 * 128 * 8  # paid for beside the slots
_COMMON = {
    "max_model_len": LONGEST, "max_num_seqs": 256, "max_num_batched_tokens": 2560, "async_scheduling": False,
}  # fmt: skip
LIMIT_S = 0.5  # a token: the middle of the latency axis of the paper's Figures 12 and 16


class BuddySlab(Slab):
    """Slots given in blocks of a power of two; two free halves of a block are joined again.

    A reservation is rounded up to a block. The lowest block that is just large enough is taken, a larger one split.
    ``free``: slots in free blocks.
    """

    def __init__(self, size: int):
        super().__init__(size)
        self._blocks: dict[int, list[int]] = {1 << order: [] for order in range(size.bit_length())}
        base = 0
        for block in sorted(self._blocks, reverse=True):  # each at a multiple of its own size
            if size & block:
                self._blocks[block].append(base)
                base += block

    def copy(self) -> BuddySlab:
        other = BuddySlab(self.size)
        other.free, other._blocks = self.free, {size: list(bases) for size, bases in self._blocks.items()}
        return other

    @property
    def largest_hole(self) -> int:
        return max((size for size, bases in self._blocks.items() if bases), default=0)

    def find(self, size: int) -> int | None:
        """The size of the block that would be taken."""
        return next((block for block, bases in self._blocks.items() if block >= size and bases), None)

    def take(self, size: int) -> int | None:
        block = self.find(size)
        if block is None:
            return None
        base, wanted = self._blocks[block].pop(0), _rounded(size)
        while block > wanted:
            block //= 2
            insort(self._blocks[block], base + block)
        self.free -= wanted
        return base

    def give(self, base: int, size: int) -> None:
        block = _rounded(size)
        self.free += block
        while (buddy := base ^ block) in (bases := self._blocks.get(block, [])):
            bases.remove(buddy)
            base, block = min(base, buddy), 2 * block
        insort(self._blocks[block], base)

    def check_integrity(self, taken: list[tuple[int, int]]) -> None:
        holes = [(base, size) for size, bases in self._blocks.items() for base in bases]
        end = 0
        for base, size in sorted([*((base, _rounded(size)) for base, size in taken), *holes]):
            assert base == end and base % size == 0, f"the slab is torn or used twice at slot {base}"
            end += size
        assert end == self.size and sum(size for _, size in holes) == self.free


def _rounded(size: int) -> int:
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True)
class Lengths:
    """Tokens: means of prompt and output, their coefficients of variation, and tokens that all prompts begin with."""

    prompt: float
    output: float
    prompt_cv: float
    output_cv: float
    shared: int = 0

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Prompts and outputs, at most half of ``LONGEST`` each, with these means. int64 [count]"""
        limit = LONGEST // 2
        prompts = _lognormal(self.prompt, self.prompt_cv, count, limit - self.shared, rng) + self.shared
        return prompts, _lognormal(self.output, self.output_cv, count, limit, rng)


def _lognormal(mean: float, cv: float, count: int, limit: int, rng: np.random.Generator) -> np.ndarray:
    """Whole numbers from 1 to ``limit`` that have this mean and cv after all beyond the limit are cut down to it.

    Even quantiles in random order, so that few requests have the shape of many.
    """
    normal = np.array([NormalDist().inv_cdf((index + 0.5) / count) for index in range(count)])
    drawn = normal

    def too_wide(sigma: float) -> bool:
        nonlocal drawn
        shape = np.exp(normal * sigma)
        scale = _bisect(0.0, 8.0 * mean, lambda scale: np.clip(shape * scale, 1, limit).mean() > mean)
        drawn = np.clip(np.rint(shape * scale), 1, limit)
        return drawn.std() > cv * mean

    _bisect(0.0, 4.0, too_wide)
    return rng.permutation(drawn.astype(np.int64))


def _bisect(low: float, high: float, too_much: Callable[[float], bool]) -> float:
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if too_much(middle) else (middle, high)
    return low


SHAREGPT = Lengths(161.31, 337.99, 1.3, 0.85)
ALPACA = Lengths(19.31, 58.45, 0.5, 1.1)
"""Figure 13b: 72.75 requests of Orca (Oracle) on 15.7K slots, in blocks of 216 on average; filled to 0.72, as blocks of
evenly spread sizes are, they will hold 19 + 58 (1 + cv^2) tokens for a cv of 1.1. Figure 11: no prompt is long."""
TRANSLATION = {shots: Lengths(25, 35, 0.6, 0.6, shared) for shots, shared in ((1, 80), (5, 341))}
"""The prefixes of one and five examples have 80 and 341 tokens: 65 an example, of which a few are markup and the rest a
sentence of WMT16 and its translation; German takes more tokens than English."""


class SureBeams(SimulatedExecutor):
    """Beams of a model that is sure of most tokens: at one in ``every`` it has continuations that are nearly as good.

    At the others each beam continues with its best token. ``SimulatedExecutor`` has a choice at every token.
    """

    every = 1

    def _continuations(self, seq: EngineSequence) -> Drawn:
        drawn = super()._continuations(seq)
        if mixed(seq.token_ids[-1], len(seq.token_ids)) % self.every == 0:
            return drawn
        return Drawn(drawn.token_ids, tuple(-8.0 * index for index in range(len(drawn.token_ids))))


@dataclass(frozen=True, eq=False)
class System:
    """One of the paper's systems.

    buddy: reservations are placed by a buddy allocator
    choice_every: beams have a choice at one token in so many, see ``SureBeams``
    """

    name: str
    settings: Mapping[str, Any]
    buddy: bool = False
    choice_every: int = 1


def _orca(reservation: str) -> System:
    name = f"Orca ({reservation.capitalize()})"
    return System(name, {"layout": "contiguous", "reservation": reservation}, buddy=True)


MAX, POW2, ORACLE = map(_orca, ("max", "pow2", "oracle"))
PAGED = System("paged (vLLM)", {"layout": "paged", "page_size": 16})
SWAPPED = System("paged (vLLM)", {**PAGED.settings, "preemption_mode": "swap", "swap_space": "64GiB"})
"""As the paper's vLLM for several sequences of a prompt: recomputed apart, they would share nothing any more."""
SYSTEMS = (MAX, POW2, ORACLE, PAGED)
SHARED = System("paged (vLLM)", {**PAGED.settings, "enable_prefix_caching": True})


@dataclass(frozen=True)
class Testbed:
    """A row of the paper's Table 1. ``slots``: tokens of KV that fit beside the weights."""

    machine: Machine
    slots: int

    @classmethod
    def of(cls, model: str, gpus: int, gpu: str, slots: int) -> Testbed:
        return cls(Machine(plan_model(model), find_gpu(gpu), gpus), slots)

    def replica(self, system: System, on_work: Callable[[StepWork], None] = lambda work: None) -> Replica:
        """An idle engine. ``on_work``: called with the work of each step."""
        budget = self.slots * self.machine.model.token_bytes() + _PAGE_TABLE_BYTES
        config, capacity = self.machine.settle({**_COMMON, **system.settings, "kv_budget": budget})
        timer = self.machine.step_timer(config)

        def step_time(work: StepWork) -> StepTime:
            on_work(work)
            return timer(work)

        replica = Replica(config, capacity, self.machine.vocab_size, step_time)
        if system.choice_every > 1:
            executor = SureBeams(self.machine.vocab_size, step_time, replica.clock)
            executor.every = system.choice_every
            replica.engine.executor = executor
        if system.buddy:
            kv = replica.engine.kv
            assert isinstance(kv, ContiguousKVManager)
            kv.slab = BuddySlab(kv.slab.size)
        return replica


@dataclass(frozen=True)
class Observed:
    """Means over time, after the first fifth of the requests has ended.

    useful: share of all slots that holds a token
    running: requests at once
    batched: the same as a mean over iterations in which prompts are computed apart from the decodes
    saved: share of pages that sharing saves: 1 - pages owned / pages if nothing were shared
    per_s: requests that ended, a second
    """

    useful: float
    running: float
    batched: float
    saved: float
    per_s: float


class _Observer:
    """Adds up what ``Observed`` says, step by step.

    warm: requests that end before anything is counted
    width: sequences of a request
    waiting: whether only steps count that leave requests waiting
    """

    def __init__(self, testbed: Testbed, system: System, warm: float, width: int, waiting: bool) -> None:
        self.replica = testbed.replica(system, self._on_work)
        self._warm, self._width, self._waiting = warm, width, waiting
        self._sums, self._seconds, self._iterations, self._batched = np.zeros(3), 0.0, 0, 0.0
        self._work: StepWork | None = None
        self._last, self._ended, self._first_ended, self._last_ended = 0.0, 0, 0, 0

    def _on_work(self, work: StepWork) -> None:
        self._work = work

    def on_end(self, request: EndedRequest) -> None:
        assert request.error is None, request.error
        self._ended += 1

    def on_step(self, replica: Replica, outputs: Sequence[Any]) -> None:
        took, self._last = replica.clock.now - self._last, replica.clock.now
        scheduler, work = replica.engine.scheduler, self._work
        if self._ended < self._warm or not scheduler.running or (self._waiting and not scheduler.num_waiting):
            return
        assert work is not None
        kv = replica.engine.kv.stats()
        saved = 1 - kv.pages_owned / kv.pages_logical
        self._sums += took * np.array([kv.slots_used / kv.slots_total, len(scheduler.running) / self._width, saved])
        self._iterations += bool(work.prefills) + bool(work.decodes)
        self._batched += len(work.prefills) + work.decodes / self._width
        self._first_ended = self._first_ended or self._ended
        self._seconds, self._last_ended = self._seconds + took, self._ended

    def result(self) -> Observed:
        if not self._seconds:
            raise ValueError("too few requests: none waits after the first fifth of them has ended; take more")
        useful, running, saved = (self._sums / self._seconds).tolist()
        per_s = (self._last_ended - self._first_ended) / self._seconds
        return Observed(useful, running, self._batched / self._iterations, saved, per_s)


def observe(
    testbed: Testbed,
    system: System,
    lengths: Lengths,
    count: int,
    rate: float | None = None,
    seed: int = 0,
    **answers: int,
) -> Observed:
    """``count`` requests, as Poisson arrivals of ``rate``; None: more than can be served, of which some always wait.

    answers: ``n`` or ``beam_width`` of each request
    """  # fmt: skip
    width = answers.get("beam_width", answers.get("n", 1))
    observer = _Observer(testbed, system, count / 5, width, waiting=rate is None)
    specs = _requests(lengths, _arrivals(count, rate, seed), seed, answers)
    Drive([observer.replica], specs, observer.on_end, on_step=observer.on_step).run()
    return observer.result()


def _arrivals(count: int, rate: float | None, seed: int) -> list[float]:
    if rate is None:
        return [0.0] * count
    return np.cumsum(np.random.default_rng(seed + 1).exponential(1 / rate, count)).tolist()


def _requests(
    lengths: Lengths, arrivals: Sequence[float], seed: int, answers: Mapping[str, int]
) -> list[list[RequestSpec]]:
    """Prompts that begin with ``lengths.shared`` equal tokens and have nothing else in common."""
    prompts, outputs = lengths.draw(len(arrivals), np.random.default_rng(seed))
    rows = enumerate(zip(prompts.tolist(), outputs.tolist(), arrivals, strict=True))
    return [
        [RequestSpec(index, "paper", _prompt(index, size, lengths.shared), None, output, arrival, **answers)]
        for index, (size, output, arrival) in rows
    ]


def _prompt(index: int, size: int, shared: int) -> tuple[int, ...]:
    own = (2 + index % 20_000, 2 + index // 20_000)
    return ((1,) * shared + own * size)[:size]


def normalised_latency(
    testbed: Testbed, system: System, lengths: Lengths, rate: float, seconds: float, seed: int = 0
) -> float:
    """The paper's metric [s a token], with Poisson arrivals of ``rate``: the mean of (end - arrival) / output."""
    arrivals = _arrivals(max(round(rate * seconds), 1), rate, seed)
    latencies: list[float] = []

    def end(request: EndedRequest) -> None:
        latencies.append((request.times[-1] - request.due) / len(request.times))

    Drive([testbed.replica(system)], _requests(lengths, arrivals, seed, {}), end).run()
    return float(np.mean(latencies))


def sustained_rate(testbed: Testbed, system: System, lengths: Lengths, seconds: float, seed: int = 0) -> float:
    """The largest rate [requests/s], to 3 %, whose normalised latency is at most ``LIMIT_S``.

    seconds: of arrivals
    """
    per_s = observe(testbed, system, lengths, 1000, seed=seed).per_s  # under overload: near the rate searched

    def holds(rate: float) -> bool:
        return normalised_latency(testbed, system, lengths, rate, seconds, seed) <= LIMIT_S

    low, high = 0.9 * per_s, 1.2 * per_s
    while not holds(low):
        low, high = low / 1.5, low
    while holds(high):
        low, high = high, 1.2 * high
    while high > 1.03 * low:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


TESTBEDS = {
    "OPT-13B": Testbed.of("OPT-13B", 1, "A100-40GB", 15_700),
    "OPT-66B": Testbed.of("OPT-66B", 4, "A100-40GB", 9_700),
    "OPT-175B": Testbed.of("OPT-175B", 8, "A100-80GB", 60_100),
    "LLaMA-13B": Testbed.of("LLaMA-13B", 1, "A100-40GB", 15_700),
}


@dataclass(frozen=True)
class Row:
    """A figure of the paper beside ours. ``paper``: a value, or the ends of a range. ``unit``: ``%``, ``x`` or none."""

    what: str
    paper: tuple[float, ...]
    ours: float
    unit: str = ""

    @property
    def difference(self) -> float:
        """Of ours from the paper's, from the nearest end of a range: 0 within it."""
        nearest = min(max(self.ours, min(self.paper)), max(self.paper))
        return self.ours / nearest - 1

    def cells(self) -> tuple[str, ...]:
        """Of the Markdown table."""
        scale, sign = (100, " %") if self.unit == "%" else (1, self.unit)
        paper, ours = (" to ".join(f"{x * scale:.4g}" for x in xs) + sign for xs in (self.paper, (self.ours,)))
        within = len(self.paper) > 1 and self.difference == 0
        return self.what, paper, ours, "within" if within else f"{self.difference:+.1%}"


_USEFUL = {MAX: 0.204, POW2: 0.268, ORACLE: 0.382, PAGED: 0.963}
_BATCHED = {MAX: 7.00, POW2: 9.81, ORACLE: 13.62, PAGED: 30.42}
_SAVED = {  # dataset and kind -> by 2, 4 and 6 sequences; the paper tells only the ends for ShareGPT
    ("Alpaca", "n"): (0.0609, 0.0853, 0.0979),
    ("Alpaca", "beam_width"): (0.3756, 0.5313, 0.5516),
    ("ShareGPT", "n"): (0.162, None, 0.305),
    ("ShareGPT", "beam_width"): (0.443, None, 0.663),
}
_DATASETS = {"ShareGPT": SHAREGPT, "Alpaca": ALPACA}


def memory_rows(count: int = 2000, seed: int = 0) -> list[Row]:
    """Figures 2 and 13a. The paper's vLLM computes prompts in iterations of their own, its Orca does not."""
    seen = {system: observe(TESTBEDS["OPT-13B"], system, SHAREGPT, count, seed=seed) for system in SYSTEMS}
    batched = {system: each.batched if system is PAGED else each.running for system, each in seen.items()}
    rows = [Row(f"memory that holds tokens, {s.name}", (_USEFUL[s],), seen[s].useful, "%") for s in SYSTEMS]
    rows += [Row(f"requests at once, {s.name}", (_BATCHED[s],), batched[s]) for s in SYSTEMS]
    for other, paper in ((ORACLE, 2.2), (MAX, 4.3)):
        rows.append(Row(f"requests at once, paged over {other.name}", (paper,), batched[PAGED] / batched[other], "x"))
    return rows


def first_fit_rows(count: int = 2000, seed: int = 0) -> list[Row]:
    """As ``memory_rows``, with the first fit of our contiguous layout in the place of the buddy allocator."""
    rows = []
    for system in (POW2, ORACLE):
        plain = System(system.name, system.settings)
        seen = observe(TESTBEDS["OPT-13B"], plain, SHAREGPT, count, seed=seed)
        rows.append(Row(f"memory that holds tokens, {system.name}, first fit", (_USEFUL[system],), seen.useful, "%"))
        rows.append(Row(f"requests at once, {system.name}, first fit", (_BATCHED[system],), seen.running))
    return rows


def rate_rows(model: str, seconds: float = 300.0, seed: int = 0) -> list[Row]:
    """Figure 12, ShareGPT."""
    rates = {each: sustained_rate(TESTBEDS[model], each, SHAREGPT, seconds, seed) for each in (MAX, ORACLE, PAGED)}
    pairs = ((ORACLE, (1.7, 2.7)), (MAX, (2.7, 8.0)))
    return [
        Row(f"sustained rate, {model}, paged over {other.name}", paper, rates[PAGED] / rates[other], "x")
        for other, paper in pairs
    ]


def saving_rows(dataset: str, kind: str, count: int, choice_every: int = 1, seed: int = 0) -> list[Row]:
    """Figure 15, and what section 6.3 tells of ShareGPT: at half the rate that the memory bears.

    kind: ``n`` or ``beam_width``
    """
    rows, lengths, testbed = [], _DATASETS[dataset], TESTBEDS["OPT-13B"]
    system = replace(SWAPPED, choice_every=choice_every)
    words = {"n": "parallel samples", "beam_width": "beams"}[kind]
    words += f" that choose at 1 token in {choice_every}" if choice_every > 1 else ""
    for width, paper in zip((2, 4, 6), _SAVED[dataset, kind], strict=True):
        if paper is not None:
            most = observe(testbed, system, lengths, count, seed=seed, **{kind: width}).per_s
            seen = observe(testbed, system, lengths, count, most / 2, seed, **{kind: width})
            rows.append(Row(f"memory saved by sharing, {dataset}, {width} {words}", (paper,), seen.saved, "%"))
    return rows


def prefix_rows(host_s: float = 0.0, host_per_sequence_s: float = 0.0, count: int = 1500, seed: int = 0) -> list[Row]:
    """Figure 16. The paper's vLLM keeps the shared prefix; its Orca computes and stores it for each request.

    host_s, host_per_sequence_s: what the CPU takes beside each step, and beside each of its sequences
    """
    times = TYPICAL.model_copy(update={"host_s": host_s, "host_per_sequence_s": host_per_sequence_s})
    testbed = TESTBEDS["LLaMA-13B"]
    testbed = replace(testbed, machine=replace(testbed.machine, calibration=times))
    host = f", {host_s * 1e3:g} ms of CPU a step" if host_s else ""
    host += f", {host_per_sequence_s * 1e3:g} ms of CPU a sequence and step" if host_per_sequence_s else ""
    rows = []
    for shots, paper in ((1, 1.67), (5, 3.58)):
        lengths = TRANSLATION[shots]
        orca, shared = (observe(testbed, system, lengths, count, seed=seed).per_s for system in (ORACLE, SHARED))
        what = f"throughput, prefix of {lengths.shared} tokens, paged over {ORACLE.name}{host}"
        rows.append(Row(what, (paper,), shared / orca, "x"))
    return rows


def _parts() -> dict[str, list[tuple[Callable[..., list[Row]], tuple[Any, ...]]]]:
    """Headings of the page and how to get the rows below each."""
    return {
        "Memory and requests at once: OPT-13B, ShareGPT, A100-40GB": [(memory_rows, ())],
        "The same reservations placed by our first fit": [(first_fit_rows, ())],
        "Sustained rates, ShareGPT": [(rate_rows, (model,)) for model in ("OPT-13B", "OPT-66B", "OPT-175B")],
        "Sharing between samples: OPT-13B": [
            (saving_rows, (dataset, "n", count)) for dataset, count in (("Alpaca", 1500), ("ShareGPT", 300))
        ],
        "Sharing between beams: OPT-13B": [
            (saving_rows, (dataset, "beam_width", count, every))
            for every in (1, 16)
            for dataset, count in (("Alpaca", 400), ("ShareGPT", 150))
        ],
        "Shared prefix: LLaMA-13B, translation": [(prefix_rows, host) for host in ((), (0.012, 0.0), (0.0, 0.0004))],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.paged_attention", description=main.__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    with ProcessPoolExecutor(parser.parse_args(argv).jobs) as pool:
        parts = {head: [pool.submit(make, *given) for make, given in tasks] for head, tasks in _parts().items()}
        for head, tasks in parts.items():
            print(f"### {head}\n\n| | paper | ours | difference |\n|---|---|---|---|")
            for row in (row for task in tasks for row in task.result()):
                print("| " + " | ".join(row.cells()) + " |")
            print()


if __name__ == "__main__":
    main()
