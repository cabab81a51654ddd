"""The host's time for a step by phase: all of the engine but the model, whose forward is replaced by fixed logits.

    taskset -c 0 python -m tests.benchmarks.host_step OUT.md

The loop, the scheduler, the KV manager, the executor and its captured steps run as in a server. Tensors are on the CPU;
the replay of a graph and the draws do nothing. The time is the thread's own. ``steady``: every sequence decodes, and
none comes or goes. ``churn``: sequences end after 20 to 400 tokens, and others take their places at once.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

from kvbench.common.machine import environment
from kvbench_engine.config import EngineConfig
from kvbench_engine.counters import PHASES
from kvbench_engine.engine import Engine
from kvbench_engine.engine_loop import Command, EngineLoop
from kvbench_engine.engine_process import _SocketPort
from kvbench_engine.execution import executor as executor_module
from kvbench_engine.execution import sampler
from kvbench_engine.execution.graphs import GraphSizes
from kvbench_engine.kv.budget import KVCapacity, KVShape, LayerKV
from kvbench_engine.kv.layouts import make_kv_manager
from kvbench_engine.model.loader import LoadedModel
from kvbench_engine.model.spec import ModelInfo
from kvbench_engine.sequence import Request, SamplingParams

Windows = tuple[int | None, ...]
WINDOWED: dict[str, Windows] = {"gpt-oss": (None, 128), "Gemma 3 27B": (None, *(1024,) * 6), "Mistral": (4096,)}
VOCAB, SLOT_BYTES, PROMPT_STEP = 8, 4096, 65_536
STEPS, WARM_STEPS = 400, 20


class FixedLogits(nn.Module):
    """A model whose logits are the same at every position."""

    def __init__(self, rows: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, VOCAB), requires_grad=False)
        self.config = SimpleNamespace(_attn_implementation="kvbench")

    def forward(self, input_ids, position_ids, use_cache, logits_to_keep):
        count = input_ids.shape[1] if isinstance(logits_to_keep, int) else len(logits_to_keep)
        return SimpleNamespace(logits=self.weight[None, :count])


class NoHost:
    """An attention host without a cache."""

    def begin(self, step) -> None: ...

    def raw_tensors(self) -> tuple[torch.Tensor, ...]:
        return ()


class IdlePort(_SocketPort):
    """A server's port whose bytes go nowhere; ``commands`` are what the loop receives next."""

    def __init__(self):
        super().__init__(SimpleNamespace(sendall=len))
        self.commands: list[Command] = []

    def receive(self, wait: bool) -> list[Command]:
        commands, self.commands = self.commands, []
        return commands


def make_loop(sequences: int, page_size: int, longest: int, caching: bool, windows: Windows = (None,)) -> EngineLoop:
    """An engine's loop on the real executor, with the settings of a GPU. ``windows``: of each group of layers."""
    config = EngineConfig(
        device="cuda", model="none", max_model_len=longest, max_num_seqs=sequences, page_size=page_size, kv_budget=1,
        max_num_batched_tokens=PROMPT_STEP, enable_prefix_caching=caching, async_scheduling=True,
    )  # fmt: skip
    per_sequence = -(-longest // page_size)
    pages = len(windows) * (sequences * (per_sequence + -(-16 // page_size)) + 16)
    table_bytes = 8 * sequences * per_sequence * len(windows)
    slots = pages * page_size
    capacity = KVCapacity(
        slots * SLOT_BYTES, SLOT_BYTES, 0, page_size, pages, slots, per_sequence, table_bytes,
        windows=windows, step_tokens=PROMPT_STEP,
    )  # fmt: skip
    kv = make_kv_manager(config, capacity)
    info = ModelInfo("none", 20_000, None, (), None)
    model, cpu = FixedLogits(max(sequences, 512)), torch.device("cpu")
    shape = KVShape((LayerKV(1, 16, 16),), 2)
    loaded = LoadedModel(model, info, shape, None, cpu, torch.float32, (1,))
    with mock.patch.object(executor_module.TorchExecutor, "_make_host", return_value=NoHost()):
        executor = executor_module.TorchExecutor(config, loaded, capacity, kv.page_table)
    captured = executor.forward.capture_graphs(
        GraphSizes.of(sequences, 512), executor.page_starts, longest, lambda body: (body(), lambda: None)[1]
    )
    assert captured
    return EngineLoop(Engine(config, executor, kv, clock=time.thread_time), IdlePort())


def requests(count: int, length: int, output: Iterator[int], first: int = 0) -> list[Request]:
    """Requests whose prompts differ in their last tokens only, so that a prefix cache holds little."""
    rng = random.Random(first)
    shared = tuple(rng.randrange(1000) for _ in range(max(0, length - 2)))
    return [
        Request(
            f"{first + i:032x}",
            (*shared, (first + i) // 1000, (first + i) % 1000)[-length:],
            SamplingParams(max_tokens=next(output), temperature=0.6, ignore_eos=True),
        )
        for i in range(count)
    ]


def timed(loop: EngineLoop, steps: int) -> list[dict[str, float]]:
    """The seconds of each turn of the loop, by phase and in all."""
    rows = []
    for _ in range(steps):
        before = dict(loop.engine.stats().phase_seconds)
        started = time.thread_time()
        loop._run_once()
        total = time.thread_time() - started
        after = loop.engine.stats().phase_seconds
        rows.append({**{phase: after[phase] - before[phase] for phase in PHASES}, "total": total})
    return rows


@torch.inference_mode()
def steady(
    sequences: int, page_size: int, context: int, caching: bool, windows: Windows = (None,)
) -> list[dict[str, float]]:
    """Steps in which every sequence decodes at about ``context`` tokens."""
    length = context - STEPS // 2
    output = STEPS + WARM_STEPS + 90 + 2 * sequences * length // PROMPT_STEP  # the first ones decode as the last begin
    gc.collect()  # of the case before
    loop = make_loop(sequences, page_size, length + output + 10, caching, windows)
    endless = iter(lambda: output, None)
    loop._port.commands = [Command("add", (requests(sequences, length, endless),))]
    loop._run_once()
    engine = loop.engine
    while any(not seq.num_output for seq in engine.scheduler.running) or engine.scheduler.num_waiting:
        loop._run_once()
    for _ in range(WARM_STEPS):
        loop._run_once()
    rows = timed(loop, STEPS)
    assert len(engine.scheduler.running) == sequences
    return rows


@torch.inference_mode()
def churn(sequences: int, page_size: int, caching: bool, windows: Windows = (None,)) -> list[dict[str, float]]:
    """Steps of as many sequences, of which each ends after 20 to 400 tokens and makes room for another one."""
    gc.collect()
    loop = make_loop(sequences, page_size, 512, caching, windows)
    rng = random.Random(1)
    lengths = iter(lambda: rng.randrange(20, 401), None)
    loop._port.commands = [Command("add", (requests(sequences, 64, lengths),))]
    made, rows = sequences, []
    for step in range(STEPS + 500):
        missing = sequences - len(loop._live)
        if step and missing:
            loop._port.commands = [Command("add", (requests(missing, 64, lengths, made),))]
            made += missing
        row = timed(loop, 1)
        rows += row if step >= 500 else []
    return rows


def figures(rows: list[dict[str, float]]) -> list[str]:
    """The median of each phase, and least, median and mean of the whole, in microseconds."""
    totals = [row["total"] for row in rows]
    cells = [statistics.median(row[phase] for row in rows) for phase in PHASES]
    cells += [min(totals), statistics.median(totals), statistics.mean(totals)]
    return [f"{cell * 1e6:.0f}" for cell in cells]


def cases(quick: bool) -> Iterator[tuple[str, list[dict[str, float]]]]:
    """Every case's name and its steps."""
    grid = [(n, 16, 512, False) for n in (1, 32, 256, 1024)]
    grid += [(256, page, context, caching) for page in (1, 16, 256) for context in (512, 4096, 32_768)
             for caching in (False, True) if (page, context, caching) != (16, 512, False)]  # fmt: skip
    for sequences, page_size, context, caching in grid[:1] if quick else grid:
        cells = f"{sequences} | {page_size} | {context:,} | {'yes' if caching else 'no'}"
        yield f"steady | {cells}", steady(sequences, page_size, context, caching)
    for page_size, caching in () if quick else ((16, False), (16, True), (1, True)):
        yield f"churn | 256 | {page_size} | 64 to 464 | {'yes' if caching else 'no'}", churn(256, page_size, caching)
    for name, windows in () if quick else WINDOWED.items():
        for caching in (False, True):
            cells = f"256 | 16 | {{}} | {'yes' if caching else 'no'}"
            yield f"steady, {name} | {cells.format('4,096')}", steady(256, 16, 4096, caching, windows)
            yield f"churn, {name} | {cells.format('64 to 464')}", churn(256, 16, caching, windows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true", help="one case")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    lines = [
        f"| steps | sequences | page | tokens | caching | {' | '.join(PHASES)} | least | median | mean |",
        "|---|--:|--:|--:|---|" + "--:|" * (len(PHASES) + 3),
    ]
    with mock.patch.object(sampler, "draw_into", lambda out, at, *rest: out.index_fill_(0, at, 3)):
        for name, rows in cases(options.quick):
            lines.append(f"| {name} | {' | '.join(figures(rows))} |")
            print(lines[-1], flush=True)
    machine = environment()
    options.out.write_text("\n".join([f"{machine['cpu']}, torch {torch.__version__}", "", *lines]) + "\n")


if __name__ == "__main__":
    main()
