"""Small engines without tensors: the real scheduler, managers and pool around an executor that only counts."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv_budget import KVCapacity, KVShape, LayerKV, capacity_of
from engine.kv_manager import make_kv_manager
from engine.kv_moves import MoveKind
from engine.model_spec import ModelInfo
from engine.scheduler import StepPlan
from engine.sequence import Drawn, Request, SamplingParams, Sequence

SHAPE = KVShape((LayerKV(2, 4, 4),) * 2, 4)  # 2 layers x 2 heads x (4 + 4) x 4 bytes = 128 bytes a slot


class CountingExecutor:
    """The next token is a function of the tokens before it, so a wrong history shows in the output.

    Shadow KV: every slot remembers the whole prefix that its KV was computed from, and each step checks that every
    slot a sequence reads holds that sequence's own prefix. ``watch`` gives it the page table to go by.
    """

    def __init__(self, vocab_size: int = 97, eos: tuple[int, ...] = ()):
        self.shadow: dict[int, tuple[int, ...]] = {}
        self.host_shadow: dict[int, tuple[int, ...]] = {}
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

    def move(self, plan: StepPlan) -> None:
        """What the real executor does with tensors, done with the shadow: in order, slot by slot."""
        for kind, source, target, count in plan.moves:
            sources = self.host_shadow if kind is MoveKind.SWAP_IN else self.shadow
            targets = self.host_shadow if kind is MoveKind.SWAP_OUT else self.shadow
            moved = [sources[source + i] for i in range(count)]
            targets.update((target + i, held) for i, held in enumerate(moved))

    def execute(self, plan: StepPlan) -> list[Drawn | None]:
        self.move(plan)
        if self.kv is not None:
            self.check_shadow(plan)
        self.plans.append([(item.seq.request_id, item.num_tokens) for item in plan.scheduled])
        return [self.draw(item.seq) if item.samples else None for item in plan.scheduled]

    def draw(self, seq: Sequence) -> Drawn:
        """A function of the history alone; siblings differ by their index, continuations by their place."""
        if seq.num_candidates:
            count = min(seq.num_candidates, self.model_info.vocab_size)
            first = self.next_token(seq.token_ids)
            tokens = tuple((first + 3 * i) % self.model_info.vocab_size for i in range(count))
            return Drawn(tokens, tuple(-0.1 - 0.5 * i - 0.01 * (first % 7) for i in range(count)))
        indices = range(seq.index, seq.index + seq.pending_forks + 1)
        tokens = tuple(self.next_token([*seq.token_ids, i]) if i else self.next_token(seq.token_ids) for i in indices)
        return Drawn(tokens, tuple(-0.1 * (t % 5) - 0.1 for t in tokens) if seq.silent else ())

    def next_token(self, history: list[int]) -> int:
        return (sum((i + 1) * t for i, t in enumerate(history)) + len(history)) % self.model_info.vocab_size


def small_config(**settings) -> EngineConfig:
    return EngineConfig(**{"max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 16, **settings})


def capacity(config: EngineConfig, slots: int) -> KVCapacity:
    """Capacity of exactly ``slots`` slots, the page table paid beside them."""
    per_page = config.max_model_len if config.layout == "contiguous" else config.page_size
    table = config.max_num_seqs * -(-config.max_model_len // per_page) * 8
    return capacity_of(config, SHAPE, slots * SHAPE.slot_bytes(config.kv_cache_dtype) + table)


def small_engine(slots: int, executor: CountingExecutor | None = None, **settings) -> Engine:
    config = small_config(**settings)
    kv = make_kv_manager(config, capacity(config, slots))
    executor = executor or CountingExecutor()
    executor.watch(kv)
    return Engine(config, executor, kv)


def request(name: str, prompt, max_tokens: int = 8, **params) -> Request:
    tokens = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else tuple(prompt)
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens, temperature=0.0, **params))


def drain(engine: Engine, limit: int = 2000) -> dict[str, list[int]]:
    """Step until idle, integrity checked after each step; tokens by request, of sibling i > 0 by ``name/i``."""
    tokens: dict[str, list[int]] = {}
    for _ in range(limit):
        if not engine.has_work():
            return tokens
        for output in engine.step():
            name = f"{output.request_id}/{output.index}" if output.index else output.request_id
            tokens.setdefault(name, []).extend(output.token_ids)
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
