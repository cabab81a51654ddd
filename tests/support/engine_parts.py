"""Small engines without tensors: the real scheduler, managers and pool around an executor that only counts."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv_budget import KVCapacity, KVShape, LayerKV, capacity_of
from engine.kv_manager import make_kv_manager
from engine.model_spec import ModelInfo
from engine.scheduler import StepPlan
from engine.sequence import Request, SamplingParams

SHAPE = KVShape((LayerKV(2, 4, 4),) * 2, 4)  # 2 layers x 2 heads x (4 + 4) x 4 bytes = 128 bytes a slot


class CountingExecutor:
    """The next token is a function of the tokens before it, so a wrong history shows in the output.

    Shadow KV: every slot remembers the whole prefix that its KV was computed from, and each step checks that every
    slot a sequence reads holds that sequence's own prefix. ``watch`` gives it the page table to go by.
    """

    def __init__(self, vocab_size: int = 97, eos: tuple[int, ...] = ()):
        self.shadow: dict[int, tuple[int, ...]] = {}
        self.kv = None
        self.model_info = ModelInfo("counting", vocab_size, None, eos, None)
        self.phase_seconds: dict[str, float] = {}
        self.plans: list[list[tuple[str, int]]] = []

    def watch(self, kv) -> None:
        self.kv = kv

    def check_shadow(self, plan: StepPlan) -> None:
        """Write the new tokens' prefixes to their slots, then read every slot that attention would read."""
        page_size = self.kv.capacity.page_size

        def slot(seq, position: int) -> int:
            return int(self.kv.page_table[seq.row, position // page_size]) + position % page_size

        for item in plan.scheduled:
            seq = item.seq
            for position in range(seq.num_computed, seq.num_computed + item.num_tokens):
                self.shadow[slot(seq, position)] = tuple(seq.token_ids[: position + 1])
        for item in plan.scheduled:
            seq = item.seq
            for position in range(seq.num_computed + item.num_tokens):
                held = self.shadow.get(slot(seq, position))
                assert held == tuple(seq.token_ids[: position + 1]), f"{seq.request_id} reads a foreign slot"

    def execute(self, plan: StepPlan) -> list[int | None]:
        if self.kv is not None:
            self.check_shadow(plan)
        self.plans.append([(item.seq.request_id, item.num_tokens) for item in plan.scheduled])
        return [self.next_token(item.seq.token_ids) if item.samples else None for item in plan.scheduled]

    def next_token(self, history: list[int]) -> int:
        return (sum((i + 1) * t for i, t in enumerate(history)) + len(history)) % self.model_info.vocab_size


def small_config(**settings) -> EngineConfig:
    return EngineConfig(**{"max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 16, **settings})


def capacity(config: EngineConfig, slots: int) -> KVCapacity:
    """Capacity of exactly ``slots`` slots, the page table paid beside them."""
    per_page = config.max_model_len if config.layout == "contiguous" else config.page_size
    table = config.max_num_seqs * -(-config.max_model_len // per_page) * 8
    return capacity_of(config, SHAPE, slots * SHAPE.bytes_per_slot + table)


def small_engine(slots: int, executor: CountingExecutor | None = None, **settings) -> Engine:
    config = small_config(**settings)
    kv = make_kv_manager(config.layout, config.max_num_seqs, capacity(config, slots), config.enable_prefix_caching)
    executor = executor or CountingExecutor()
    executor.watch(kv)
    return Engine(config, executor, kv)


def request(name: str, prompt, max_tokens: int = 8, **params) -> Request:
    tokens = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else tuple(prompt)
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens, temperature=0.0, **params))


def drain(engine: Engine, limit: int = 2000) -> dict[str, list[int]]:
    """Step until idle, integrity checked after each step; tokens by request."""
    tokens: dict[str, list[int]] = {}
    for _ in range(limit):
        if not engine.has_work():
            return tokens
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check_integrity()
    raise AssertionError(f"the engine did not finish in {limit} steps")


def undisturbed(requests: list[Request], executor: CountingExecutor | None = None) -> dict[str, list[int]]:
    """What each request gives when it is alone in a roomy engine."""
    answers: dict[str, list[int]] = {}
    for one in requests:
        engine = small_engine(4096, executor, max_model_len=64, page_size=16, max_num_batched_tokens=64)
        engine.add_request(one)
        answers.update(drain(engine))
    return answers
