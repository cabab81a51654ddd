"""Small engines without tensors: the real scheduler, managers and pool around an executor that only counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Listing
from functools import reduce
from operator import add

from kvbench_engine.config import EngineConfig
from kvbench_engine.engine import Engine
from kvbench_engine.kv.budget import KVCapacity, KVShape, LayerKV, capacity_of, page_table_bytes
from kvbench_engine.kv.layouts import make_kv_manager
from kvbench_engine.kv.manager import KVManager, Move, MoveKind
from kvbench_engine.kv.paged import PagedKVManager
from kvbench_engine.model.spec import ModelInfo
from kvbench_engine.scheduling.beam import BeamSearch
from kvbench_engine.scheduling.step_plan import StepPlan
from kvbench_engine.sequence import PENDING, Drawn, Request, SamplingParams, Sequence

SHAPE = KVShape((LayerKV(2, 4, 4),) * 2, 4)  # 2 layers x 2 heads x (4 + 4) x 4 bytes = 128 bytes a slot


def windowed(*windows: int | None) -> KVShape:
    """A shape with two layers for each window, and of as many bytes a slot: each window is a group of its own."""
    return KVShape(tuple(LayerKV(2, 4, 4, window) for window in windows for _ in range(2)), 4)


DAMAGED = -1  # what a failed step leaves in the slots it was to write
EMPTY = -2


class StepFailed(RuntimeError):
    """What a ``CountingExecutor`` raises at ``fail_at``."""


class CountingExecutor:
    """The next token is a function of the tokens before it, so a wrong history shows in the output.

    Shadow KV: every slot remembers the whole prefix that its KV was computed from (as a number: one number, one salt
    and prefix), each step checks that every slot a sequence reads holds that sequence's own prefix, and that every
    slot it writes is its alone. A slot also remembers its group of layers, and in a group with a window only the
    tokens that the window shows are read. ``watch`` gives it the manager to go by.

    Everything is done at the launch, but what it drew is shown by the handle alone. Where the engine does not know it
    yet, it is what this very sequence drew in the launch before: nothing older is remembered.

    ``fail_at``: the next step fails, before anything is done ("start"), amid its moves ("moves") or amid its writes
    ("writes"), or the next one that is read ("read"); what was to be moved or written there is damaged, and at a read
    also what has been launched since.
    """

    def __init__(self, vocab_size: int = 97, eos: tuple[int, ...] = ()):
        self.kv: KVManager | None = None
        self.model_info = ModelInfo("counting", vocab_size, None, eos, None)
        self.phase_seconds: dict[str, float] = {}
        self.plans: list[list[tuple[str, int]]] = []
        self.moved = dict.fromkeys(MoveKind, 0)  # slots
        self.fail_at: str | None = None
        self.num_drawn = 0  # tokens; of a beam, one a step
        self.num_repeated = 0  # steps
        self.pending = Counter()  # what became of tokens that the engine did not know, or of who waited for one
        self._handles: list[CountingHandle] = []  # of the last two launches
        self._numbers: dict[tuple, int] = {}  # (number of the prefix before, token) -> number
        self._histories: dict[Sequence, list[int]] = {}

    def watch(self, kv: KVManager) -> None:
        self.kv = kv
        self.shadow = [EMPTY] * kv.capacity.num_slots
        self.host_shadow = [EMPTY] * kv.capacity.host_slots
        self._histories.clear()

    def launch(self, plan: StepPlan) -> CountingHandle:
        fail_at = self.fail_at
        if fail_at in ("start", "moves", "writes"):
            self.fail_at = None
        if fail_at == "start":
            raise StepFailed("meant to fail at the start")
        handle = CountingHandle(self)
        self.num_repeated += plan.num_steady > 0
        if self.kv is not None:
            self._check_plan(plan)
            self._move(plan.moves, fail_at, handle)
            self._write(plan, fail_at, handle)
            self._read(plan)
        self.plans.append([(item.seq.request_id, item.num_tokens) for item in plan.scheduled])
        handle.drawn = [self.draw(item.seq) if item.samples else None for item in plan.scheduled]
        for item, drawn in zip(plan.scheduled, handle.drawn, strict=True):
            if item.seq.num_pending and item.samples:
                self.pending["fed" if item.num_tokens == 1 else "fed in a chunk"] += 1
            if drawn is not None:
                handle.token_of[item.seq] = drawn.token_ids[0] if drawn.token_ids else 0  # any, as on the device
                self.num_drawn += 1 if item.seq.num_candidates else len(drawn.token_ids)
        for seq in plan.preempted:
            self.pending["preempted"] += seq.num_pending
            self.pending["ending preempted"] += seq.ending
        self._handles = [*self._handles[-1:], handle]
        return handle

    def _tokens(self, seq: Sequence) -> list[int]:
        """As the device has them."""
        tokens = seq.token_ids
        if seq.num_pending:
            tokens = [*tokens[:-1], self._handles[-1].token_of[seq]]
        assert PENDING not in tokens
        return tokens

    def _check_plan(self, plan: StepPlan) -> None:
        seqs = [item.seq for item in plan.scheduled]
        assert len(set(seqs)) == len(seqs), "a sequence is scheduled twice"
        assert all(0 < item.num_tokens <= item.seq.num_uncomputed for item in plan.scheduled)
        assert all(seq.row >= 0 for seq in seqs), "a sequence is scheduled without a row"
        assert not any(seq.blocked for seq in seqs), "a sequence is scheduled that has nothing to compute"
        ends = [(seq.num_computed + count, seq.max_length) for seq, count in plan.scheduled]
        assert all(end < limit for end, limit in ends), "the KV of a last token is of no use"
        if isinstance(self.kv, PagedKVManager):
            size, pool, swap = self.kv.page_size, self.kv.pool, self.kv.swap
            for kind, source, target, _ in plan.moves:
                if kind is MoveKind.COPY:
                    assert source // size not in pool._free, "the source of a copy was given away before the copy"
                    assert pool.ref_count[target // size] == 1, "a copy's target is shared or free"
                elif kind is MoveKind.SWAP_IN:
                    assert source // size not in swap.pool._free, "a host page was given away before it was read"
                    assert pool.ref_count[target // size] > 0, "a swap-in's target is free"  # a sibling may share it

    def _move(self, moves: list[Move], fail_at: str | None, handle: CountingHandle) -> None:
        """What the real executor does with tensors, done with the shadow: in order, slot by slot."""
        for done, (kind, source, target, count) in enumerate(moves):
            sources = self.host_shadow if kind is MoveKind.SWAP_IN else self.shadow
            targets = self.host_shadow if kind is MoveKind.SWAP_OUT else self.shadow
            held = sources[source : source + count]
            assert count == len(held) > 0, f"{kind} leaves the slots"
            if fail_at != "moves":
                assert EMPTY not in held and DAMAGED not in held, f"{kind} reads slots that hold nothing"
            assert target + count <= len(targets), f"{kind} leaves the slots"
            if fail_at == "moves" and done >= len(moves) // 2:
                held = [DAMAGED] * count
            targets[target : target + count] = held
            handle.touched.append((targets, target, count))
            self.moved[kind] += count
        if fail_at == "moves":
            raise StepFailed("meant to fail during the moves")

    def _write(self, plan: StepPlan, fail_at: str | None, handle: CountingHandle) -> None:
        """The new tokens' prefixes go to their slots."""
        for seq, num_tokens in plan.scheduled:
            history = self._history(seq)
            start = seq.num_computed
            for group in range(self.kv.num_groups):
                for at, first, count in self._runs(seq, group, start, start + num_tokens):
                    self._check_writable(seq, first, at + count)
                    held = [(group, number) for number in history[at : at + count]]
                    self.shadow[first : first + count] = [DAMAGED] * count if fail_at == "writes" else held
                    handle.touched.append((self.shadow, first, count))
        if fail_at == "writes":
            raise StepFailed("meant to fail during the writes")

    def _check_writable(self, seq: Sequence, slot: int, end: int) -> None:
        kv = self.kv
        if isinstance(kv, PagedKVManager):
            page = slot // kv.page_size
            assert kv.pool.ref_count[page] == 1, f"{seq.request_id} writes to a page that others name as well"
            assert not kv.pool.is_cached(page), f"{seq.request_id} writes to a page that the prefix cache offers"
        else:
            base = seq.pages[0]
            assert base <= slot < base + kv._sizes[base], f"{seq.request_id} writes beyond its reservation"
            assert end <= kv.reserve(seq.num_prompt, seq.request.params.max_tokens), "more tokens than were reserved"

    def _read(self, plan: StepPlan) -> None:
        """Every slot that attention would read."""
        for seq, num_tokens in plan.scheduled:
            history = self._history(seq)
            for group, window in enumerate(self.kv.capacity.windows):
                oldest = 0 if window is None else max(0, seq.num_computed - window + 1)
                for at, first, count in self._runs(seq, group, oldest, seq.num_computed + num_tokens):
                    held = self.shadow[first : first + count]
                    expected = [(group, number) for number in history[at : at + count]]
                    assert held == expected, f"{seq.request_id} reads a foreign slot in group {group}"

    def _runs(self, seq: Sequence, group: int, start: int, end: int):
        """Positions ``start`` to ``end`` as (position, slot, count), page by page, by the page table."""
        size, table = self.kv.capacity.page_sizes[group], self.kv.page_table[group, seq.row]
        at = start
        while at < end:
            count = min(size - at % size, end - at)
            yield at, int(table[at // size]) + at % size, count
            at += count

    def _history(self, seq: Sequence) -> list[int]:
        """The number of each of the sequence's prefixes."""
        known, numbers = self._histories.setdefault(seq, []), self._numbers
        if len(known) < len(seq.token_ids):
            before = known[-1] if known else seq.request.cache_salt
            for token in self._tokens(seq)[len(known) :]:
                before = numbers.setdefault((before, token), len(numbers))
                known.append(before)
        return known

    def draw(self, seq: Sequence) -> Drawn:
        history = self._tokens(seq)
        if seq.num_candidates:
            return self.continuations(history, seq.num_candidates)
        indices = range(seq.index, seq.index + seq.pending_forks + 1)
        tokens = tuple(self.sample(history, index) for index in indices)
        return Drawn(tokens, tuple(map(self.logprob, tokens)) if seq.silent else ())

    def sample(self, history: Listing[int], index: int) -> int:
        """The next token of the sibling ``index``: a function of the history and of the sibling."""
        return self.next_token([*history, index]) if index else self.next_token(history)

    @staticmethod
    def logprob(token: int) -> float:
        return -0.1 * (token % 5) - 0.1

    def continuations(self, history: Listing[int], count: int) -> Drawn:
        """A beam's best, best first; how good they are depends on the history, so beams are dropped and forked."""
        vocab = self.model_info.vocab_size
        first = self.next_token(history)
        tokens = tuple((first + i) % vocab for i in range(min(count, vocab)))
        return Drawn(tokens, tuple(-0.1 - 0.3 * i - 0.25 * (first % 5) for i in range(len(tokens))))

    def next_token(self, history: Listing[int]) -> int:
        return (sum((i + 1) * t for i, t in enumerate(history)) + len(history)) % self.model_info.vocab_size


class CountingHandle:
    """A launch of a ``CountingExecutor``: what it drew, and the shadow slots it wrote or moved to."""

    def __init__(self, executor: CountingExecutor):
        self.drawn: list[Drawn | None] = []
        self.token_of: dict[Sequence, int] = {}
        self.touched: list[tuple[list[int], int, int]] = []  # shadow, first slot, count
        self._executor = executor

    def tokens(self) -> list[Drawn | None]:
        executor = self._executor
        if executor.fail_at == "read":
            executor.fail_at = None
            launches = executor._handles
            for handle in launches[launches.index(self) :]:
                for shadow, first, count in handle.touched:
                    shadow[first : first + count] = [DAMAGED] * count
            raise StepFailed("meant to fail at the read")
        return self.drawn


def expected_outputs(one: Request, max_model_len: int, executor: CountingExecutor) -> dict[int, tuple]:
    """index -> (tokens, finish_reason), from the executor's functions alone: no scheduler, no manager, no pool."""
    params, prompt = one.params, list(one.prompt_token_ids)
    eos = frozenset(executor.model_info.eos_token_ids)
    ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
    longest = min(params.max_tokens, max_model_len - len(prompt))
    if params.beam_width is not None:
        return _expected_beams(params, prompt, longest, ends, executor)
    siblings = []
    for index in range(params.width):
        tokens: list[int] = []
        while len(tokens) < longest and not (tokens and tokens[-1] in ends):
            tokens.append(executor.sample(prompt + tokens, index))
        siblings.append((tuple(tokens), "stop" if tokens[-1] in ends else "length"))
    if params.chooses:
        siblings.sort(key=lambda s: -reduce(add, map(executor.logprob, s[0])) / len(s[0]))  # of a tie, the lower index
    return dict(enumerate(siblings[: params.n]))


def _expected_beams(params, prompt, longest, ends, executor) -> dict[int, tuple]:
    search = BeamSearch(params.beam_width, longest, ends, params.length_penalty, params.early_stopping)
    beams: list[list[int]] = [[]]
    while beams:
        brought = [executor.continuations(prompt + beam, search.num_candidates) for beam in beams]
        beams = [[*beams[parent], token] for parent, token in search.advance(brought)]
    return {i: (found.token_ids, found.finish_reason) for i, found in enumerate(search.results(params.n))}


def small_config(**settings) -> EngineConfig:
    return EngineConfig(**{"max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 16, **settings})


def capacity(config: EngineConfig, slots: int, shape: KVShape = SHAPE) -> KVCapacity:
    """Capacity of exactly ``slots`` slots, the page table paid beside them."""
    pool = slots * SHAPE.slot_bytes(config.kv_cache_dtype)
    return capacity_of(config, shape, pool + page_table_bytes(config, shape))


def least_slots(config: EngineConfig, shape: KVShape = SHAPE) -> int:
    """Slots of the smallest pool that ``config`` may have."""
    roomy = capacity_of(config, shape, 1 << 40)
    if config.layout == "contiguous":
        return sum(roomy.page_sizes)
    return roomy.pages_of(config.max_model_len, roomy.step_tokens) * config.page_size


def small_engine(slots: int, executor: CountingExecutor | None = None, **settings) -> Engine:
    """``host_slots``: the swap space, in slots. ``shape``: of the KV."""
    host_slots, shape = settings.pop("host_slots", None), settings.pop("shape", SHAPE)
    if host_slots is not None:
        settings["swap_space"] = host_slots * SHAPE.bytes_per_slot
    config = small_config(**settings)
    kv = make_kv_manager(config, capacity(config, slots, shape))
    executor = executor or CountingExecutor()
    executor.watch(kv)
    return Engine(config, executor, kv)


def request(name: str, prompt, max_tokens: int = 8, **params) -> Request:
    """``prompt``: its tokens, or how many; ``priority`` and ``cache_salt`` are the request's, the rest its params'."""
    tokens = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else tuple(prompt)
    own = {key: params.pop(key) for key in ("priority", "cache_salt") if key in params}
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens, temperature=0.0, **params), **own)


def collect(outputs, tokens: dict[str, list[int]]) -> None:
    """Add a step's outputs to ``tokens``: by request, of sibling i > 0 by ``name/i``."""
    for output in outputs:
        name = f"{output.request_id}/{output.index}" if output.index else output.request_id
        tokens.setdefault(name, []).extend(output.token_ids)


def drain(engine: Engine, limit: int = 2000) -> dict[str, list[int]]:
    """Step until idle, integrity checked after each step; what ``collect`` collects."""
    tokens: dict[str, list[int]] = {}
    for _ in range(limit):
        if not engine.has_work():
            return tokens
        collect(engine.step(), tokens)
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
