"""Engines and servers for the benchmarks, and a closed-loop load in the engine's own process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path

import numpy as np
from bench_timing import CUDA, choose

from kvbench_engine.build import assemble_engine
from kvbench_engine.config import EngineConfig
from kvbench_engine.counters import PHASES
from kvbench_engine.engine import Engine
from kvbench_engine.model.loader import LoadedModel, load_model
from kvbench_engine.sequence import Request, SamplingParams

_TINY = {  # a model for smoke
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    "max_position_embeddings": 2048,
}  # fmt: skip


@cache
def model_name() -> str:
    """What the mode and the device ask for; smoke's is written to a file that stays until the process ends."""
    if choose(full=True, quick=True, smoke=False):
        return "qwen3-0.6b" if CUDA else "llama-32m"
    folder = Path(tempfile.mkdtemp(prefix="kvbench-tiny-"))
    (folder / "tiny.json").write_text(json.dumps(_TINY))
    return str(folder / "tiny.json")


@cache
def _loaded(kv_cache_dtype: str, max_model_len: int) -> LoadedModel:
    return load_model(EngineConfig(model=model_name(), max_model_len=max_model_len, kv_cache_dtype=kv_cache_dtype))


def make_engine(**settings) -> Engine:
    """An engine of ``settings``; all of one KV dtype and length share a loaded model."""
    config = EngineConfig(model=model_name(), load_format="dummy", **settings)
    return assemble_engine(config, _loaded(config.kv_cache_dtype, config.max_model_len))


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready, by its port and process id."""

    port: int
    pid: int


@contextlib.contextmanager
def server(*flags: str, environment: Mapping[str, str] | None = None) -> Iterator[RunningServer]:
    """The engine's server on the benchmarks' model. ``environment`` is added to this process's."""
    with launched("kvbench_engine.server", "--model", model_name(), *flags, environment=environment) as running:
        yield running


@contextlib.contextmanager
def launched(module: str, *flags: str, environment: Mapping[str, str] | None = None) -> Iterator[RunningServer]:
    """A server as a process of its own while the block runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, "--port", "0", *flags],
        cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})},
    )  # fmt: skip
    try:
        ready = process.stdout.readline()
        assert ready.startswith("ready http://127.0.0.1:"), ready
        yield RunningServer(int(ready.rsplit(":", 1)[1]), process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def wait_for(streams_have_begun: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not streams_have_begun():
        assert time.monotonic() < deadline, "the streams have not begun"
        time.sleep(0.05)


@dataclass
class Turn:
    """What one turn of a load brought. Times in seconds."""

    seconds: float = 0.0
    output_tokens: int = 0
    ttft: list[float] = field(default_factory=list)  # from adding the request to the end of the step with its token
    steps: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    hit_rate: float = 0.0  # of the prompts' tokens


_names = count()


def prompts(rng: np.random.Generator, requests: int, length: int, shared: int, vocab: int) -> list[tuple[int, ...]]:
    """Prompts of ``length`` random tokens, the first ``shared`` of which are the same for all."""
    common = rng.integers(0, vocab, shared).tolist()
    return [(*common, *rng.integers(0, vocab, length - shared).tolist()) for _ in range(requests)]


def run_load(engine: Engine, texts: list[tuple[int, ...]], concurrency: int, output_tokens: int) -> Turn:
    """All prompts, ``concurrency`` at a time: who ends is followed by the next one at once. Greedy."""
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    turn, waiting, added, first = Turn(), list(reversed(texts)), {}, {}
    before = engine.stats()
    started = time.perf_counter()

    def send() -> None:
        name = str(next(_names))
        added[name] = time.perf_counter()
        engine.add_request(Request(name, waiting.pop(), params))

    for _ in range(min(concurrency, len(texts))):
        send()
    while engine.has_work():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            turn.output_tokens += len(output.token_ids)
            first.setdefault(output.request_id, now)
            if output.finish_reason is not None and waiting:
                send()
    turn.seconds = time.perf_counter() - started
    turn.ttft = [first[name] - added[name] for name in added]
    after = engine.stats()
    turn.steps = after.steps - before.steps
    turn.phases = {name: after.phase_seconds[name] - before.phase_seconds[name] for name in PHASES}
    turn.hit_rate = (after.prefix_cache_hits - before.prefix_cache_hits) / sum(map(len, texts))
    assert turn.output_tokens == output_tokens * len(texts)
    return turn


def summary(turns: list[Turn]) -> dict[str, float | int]:
    """Figures of several turns of one load: medians, TTFT percentiles over all requests, phases as shares [%]."""
    ttft = np.concatenate([turn.ttft for turn in turns])
    phases = sum((Counter(turn.phases) for turn in turns), Counter())
    seconds = sum(turn.seconds for turn in turns)
    figures: dict[str, float | int] = {
        "output_tokens_per_s": float(np.median([turn.output_tokens / turn.seconds for turn in turns])),
        "ttft_p50_ms": float(np.percentile(ttft, 50)) * 1e3,
        "ttft_p95_ms": float(np.percentile(ttft, 95)) * 1e3,
        "steps": int(np.median([turn.steps for turn in turns])),
        "step_ms": seconds / sum(turn.steps for turn in turns) * 1e3,
        "hit_rate": float(np.mean([turn.hit_rate for turn in turns])),
    }
    return figures | {f"{name}_pct": 100 * phases[name] / seconds for name in PHASES}
