"""The real engine over an executor that computes nothing: scripted tokens, a chosen step time, failures on demand.

Scheduler, KV managers and prefix cache are the real ones, so that what the server reports of them is real too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvbench_engine.config import EngineConfig
from kvbench_engine.engine import Engine
from kvbench_engine.kv.budget import KVShape, LayerKV, capacity_of
from kvbench_engine.kv.layouts import make_kv_manager
from kvbench_engine.model.spec import ModelInfo
from kvbench_engine.scheduling.step_plan import Computed, StepPlan
from kvbench_engine.sequence import Drawn
from kvbench_engine.sequence import Sequence as EngineSequence

# The next token of a sequence, None where none can be drawn; siblings draw their first one together.
Script = Callable[[EngineSequence], int | None]
Logprob = Callable[[EngineSequence], float]  # of the token drawn now
SHAPE = KVShape((LayerKV(1, 4, 4),) * 2, 4)  # 64 bytes a token


def counting(seq: EngineSequence) -> int:
    """Token ids 100, 101, 102 ... whatever the prompt."""
    return 100 + seq.num_output


def branching(seq: EngineSequence) -> int:
    """100 first, then ids of 100 + 100 x index + position: siblings say different things after their first token."""
    return 100 + 100 * seq.index + seq.num_output


def saying(*token_ids: int) -> Script:
    """These ids in order, then the last one again and again."""
    return lambda seq: token_ids[min(seq.num_output, len(token_ids) - 1)]


@dataclass
class ScriptedExecutor:
    """``fail`` is raised by the next steps while it is set; ``step_s`` is how long a step takes.

    A beam's k-th best continuation is the scripted token + k, with a log probability of -(k + 1).
    """

    model_info: ModelInfo
    script: Script = counting
    logprob: Logprob = lambda seq: -1.0
    step_s: float = 0.0
    fail: Exception | None = None
    steps: int = 0
    phase_seconds: dict[str, float] = field(default_factory=dict)

    def launch(self, plan: StepPlan) -> Computed:
        self.steps += 1
        if self.step_s:
            time.sleep(self.step_s)
        if self.fail is not None:
            raise self.fail
        return Computed([self._draw(item.seq) if item.samples else None for item in plan.scheduled])

    def _draw(self, seq: EngineSequence) -> Drawn:
        token = self.script(seq)
        if token is None:
            return Drawn(())
        if seq.num_candidates:
            ranks = range(seq.num_candidates)
            return Drawn(tuple(token + k for k in ranks), tuple(-float(k + 1) for k in ranks))
        count = seq.pending_forks + 1
        return Drawn((token,) * count, (self.logprob(seq),) * count)


def fake_engine(
    script: Script = counting,
    *,
    step_s: float = 0.0,
    vocab_size: int = 8192,
    eos_token_ids: Sequence[int] = (0,),
    kv_slots: int = 65536,
    **settings: object,
) -> Engine:
    """An engine of ``kv_slots`` slots of 64 bytes, in whole pages; ``settings`` are ``EngineConfig`` fields."""
    values = {"model": "fake", "max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 512, **settings}
    config = EngineConfig(**values)
    page_size = config.max_model_len if config.layout == "contiguous" else config.page_size
    table_bytes = config.max_num_seqs * -(-config.max_model_len // page_size) * 8
    capacity = capacity_of(config, SHAPE, kv_slots * SHAPE.bytes_per_slot + table_bytes)
    kv = make_kv_manager(config, capacity)
    info = ModelInfo("fake", vocab_size, config.max_model_len, tuple(eos_token_ids), None)
    return Engine(config, ScriptedExecutor(info, script, step_s=step_s), kv)
