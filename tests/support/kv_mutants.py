"""Errors of a paged KV cache as engines have shipped them, planted into the built-in engine while a block runs.

Each is a context manager that gives a ``Fired``, so that a test knows that the error really happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from kvbench_engine.execution.executor import TorchExecutor
from kvbench_engine.execution.step_inputs import InputBuffers
from kvbench_engine.kv.manager import Move, MoveKind
from kvbench_engine.kv.mover import KVMover
from kvbench_engine.kv.page_pool import PagePool
from kvbench_engine.kv.prefix_cache import PrefixCache
from kvbench_kernels import numba_backend, prefill_cpu
from kvbench_kernels.quantized import QuantizedKV

_EVERY = 4  # launches from one swap of two pages to the next


@dataclass
class Fired:
    """How often the error happened."""

    times: int = 0


def _patched(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> Any:
    """``owner.name`` replaced by ``make(the original)``."""
    return mock.patch.object(owner, name, make(getattr(owner, name)))


def _insert_unchecked(original: Any) -> Any:
    """Without the check that no page is cached under two prefixes, which would end the run."""

    def insert(self: PrefixCache, seq: Any, num_full: int, pool: PagePool) -> None:
        known = self._verified(seq, num_full)[1]
        if not any(self._node_of[page] >= 0 for page in seq.pages[known:num_full]):
            original(self, seq, num_full, pool)

    return insert


@contextmanager
def page_of_another_sequence() -> Iterator[Fired]:
    """Two sequences have one page of each other in their page tables, from time to time."""
    fired, launches = Fired(), [0]

    def make(original: Any) -> Any:
        def launch(self: TorchExecutor, plan: Any) -> Any:
            launches[0] += 1
            rows = [seq.row for seq, _ in plan.scheduled if len(seq.pages) > 2]
            if launches[0] % _EVERY == 0 and len(rows) > 1:
                fired.times += 1
                table = self._inputs.tables.host
                table[0, rows[:2], 1] = table[0, rows[1::-1], 1]
                plan.repeats = False  # all entries are read again
            return original(self, plan)

        return launch

    with _patched(TorchExecutor, "launch", make):
        yield fired


@contextmanager
def stale_page_after_eviction() -> Iterator[Fired]:
    """An evicted page is still found by its key, and is served with what another sequence wrote into it."""
    fired, stale = Fired(), {}

    def evict(original: Any) -> Any:
        def keep(self: PrefixCache, page: int) -> list[int]:
            stale[self._key_of[self._node_of[page]]] = page
            return original(self, page)

        return keep

    def match(original: Any) -> Any:
        def longer(self: PrefixCache, seq: Any) -> list[int]:
            pages = original(self, seq)
            limit = (len(seq.token_ids) - 1) // self.page_size
            if len(pages) < limit and (page := stale.get((seq.prefix_node, self._packed(seq, len(pages))))) is not None:
                pages.append(page)
            return pages

        return longer

    def share(original: Any) -> Any:
        def take(self: PagePool, page: int) -> None:
            if self._cached[page]:
                return original(self, page)
            fired.times += 1
            if self.ref_count[page] == 0:  # without the check that it holds something
                self._free.remove(page)
            self.ref_count[page] += 1
            self.num_references += 1

        return take

    with (
        _patched(PrefixCache, "evict", evict),
        _patched(PrefixCache, "match", match),
        _patched(PrefixCache, "insert", _insert_unchecked),
        _patched(PagePool, "share", share),
    ):
        yield fired


@contextmanager
def scales_of_one() -> Iterator[Fired]:
    """What was stored with its scales is read as if all of them were 1.0.

    What is stored with 1.0 as well is another error, and a small one where K and V lie within the range of fp8.
    """
    fired = Fired()
    ones: dict[int, torch.Tensor] = {}

    def unscaled(cache: Any) -> Any:
        if not isinstance(cache, QuantizedKV):
            return cache
        fired.times += 1
        if cache.scales is None:
            return replace(cache, scale=1.0)
        scales = ones.setdefault(cache.scales.data_ptr(), torch.ones_like(cache.scales))
        return replace(cache, scales=scales)

    def decode_rows(original: Any) -> Any:
        return lambda k_cache, v_cache: original(unscaled(k_cache), unscaled(v_cache))

    def load_rows(original: Any) -> Any:
        return lambda cache, slots, out: original(unscaled(cache), slots, out)

    with _patched(numba_backend, "_decode_rows", decode_rows), _patched(prefill_cpu, "load_rows", load_rows):
        yield fired


@contextmanager
def fork_without_copy() -> Iterator[Fired]:
    """A fork gets a page of its own for the partly filled last one, and nothing is copied into it."""
    fired = Fired()

    def make(original: Any) -> Any:
        def move(self: KVMover, moves: list[Move]) -> None:
            kept = [each for each in moves if each.kind is not MoveKind.COPY]
            fired.times += len(moves) - len(kept)
            original(self, kept)

        return move

    with _patched(KVMover, "move", make):
        yield fired


@contextmanager
def wrong_position_after_recompute() -> Iterator[Fired]:
    """What is computed after a preemption is counted from position 0 in every chunk."""
    fired = Fired()

    def make(original: Any) -> Any:
        def inputs(self: InputBuffers, items: list[Any], *rest: Any) -> Any:
            made = original(self, items, *rest)
            behind = [
                seq.num_computed if seq.num_preemptions else 0
                for seq, count in items
                for _ in range(count)
            ]
            fired.times += any(behind)
            return replace(made, positions=made.positions - torch.tensor(behind))

        return inputs

    with _patched(InputBuffers, "make", make):
        yield fired


@contextmanager
def half_a_page_compared() -> Iterator[Fired]:
    """Of the tokens of a page, the first half is compared only."""
    fired = Fired()
    whole: dict[tuple[int, bytes], bytes] = {}

    def packed(original: Any) -> Any:
        def half(self: PrefixCache, seq: Any, index: int) -> bytes:
            tokens = original(self, seq, index)
            fired.times += whole.setdefault((index, tokens[: len(tokens) // 2]), tokens) != tokens
            return tokens[: len(tokens) // 2]

        return half

    with _patched(PrefixCache, "_packed", packed), _patched(PrefixCache, "insert", _insert_unchecked):
        yield fired


@contextmanager
def swap_in_out_of_order() -> Iterator[Fired]:
    """A whole page and a partly filled one that come back from the host in a step change places.

    Two whole pages of one sequence may change places without harm: keys carry their positions, and attention over all
    of them does not depend on their order. 102 such changes in 5 runs of 120 canaries changed no answer.
    """
    fired = Fired()

    def make(original: Any) -> Any:
        def move(self: KVMover, moves: list[Move]) -> None:
            back = [each for each in moves if each.kind is MoveKind.SWAP_IN]
            pair = (
                [min(back, key=lambda each: each.num_slots), max(back, key=lambda each: each.num_slots)] if back else []
            )
            if pair and pair[0].num_slots < pair[1].num_slots:
                fired.times += 1
                other = {pair[0]: pair[1].target, pair[1]: pair[0].target}
                moves = [each._replace(target=other.get(each, each.target)) for each in moves]
            original(self, moves)

        return move

    with _patched(KVMover, "move", make):
        yield fired


@contextmanager
def prefix_hit_one_page_too_long() -> Iterator[Fired]:
    """After the last page that really matches comes one more, the next page of another prompt."""
    fired = Fired()

    def match(original: Any) -> Any:
        def longer(self: PrefixCache, seq: Any) -> list[int]:
            pages = original(self, seq)
            node, limit = seq.prefix_node, (len(seq.token_ids) - 1) // self.page_size
            child = self._child[node & 0xFFFFFFFF] if node else -1
            if child >= 0 and len(pages) < limit:
                fired.times += 1
                pages.append(self._pages[0][child])
            return pages

        return longer

    with _patched(PrefixCache, "match", match), _patched(PrefixCache, "insert", _insert_unchecked):
        yield fired


MUTANTS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "page of another sequence": (page_of_another_sequence, {}),
    "stale page after eviction": (stale_page_after_eviction, {"enable_prefix_caching": True}),
    "scales of 1.0, int8": (scales_of_one, {"kv_cache_dtype": "int8_per_token_head"}),
    "scales of 1.0, int4": (scales_of_one, {"kv_cache_dtype": "int4_per_token_head"}),
    "scales of 1.0, fp8_e4m3": (scales_of_one, {"kv_cache_dtype": "fp8_e4m3"}),
    "scales of 1.0, fp8_e5m2": (scales_of_one, {"kv_cache_dtype": "fp8_e5m2"}),
    "fork without copy": (fork_without_copy, {}),
    "wrong position after recompute": (wrong_position_after_recompute, {}),
    "half a page compared": (half_a_page_compared, {"enable_prefix_caching": True}),
    "swap in out of order, pages of 64": (swap_in_out_of_order, {"preemption_mode": "swap", "page_size": 64}),
    "swap in out of order, pages of 16": (swap_in_out_of_order, {"preemption_mode": "swap", "page_size": 16}),
    "prefix hit one page too long": (prefix_hit_one_page_too_long, {"enable_prefix_caching": True}),
}
"""Name -> the error, and the settings under which it can happen."""
