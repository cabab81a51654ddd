"""Prompts and pools for the tests of forks: what a pool forces, and whether it did."""

from __future__ import annotations

import random

from engine.engine import Engine
from engine.model.loader import LoadedModel
from engine.sequence import Request, SamplingParams
from tests.support.hf_parts import PREEMPTION, VOCAB, loaded, make_engine, preempting

MAX_LEN = 64
PAGE_SIZES = (1, 7, 16)
ROOMY, TIGHT = 1024, 96  # slots; the tight pool holds one longest sequence and half of another
# pool and preemption: name -> (slots, settings)
POOLS = {"roomy": (ROOMY, {})} | {how: (TIGHT, preempting(how, 16)) for how in PREEMPTION}
POOLS["swap-overlapping"] = (TIGHT, {**preempting("swap", 16), "async_scheduling": True})


def _prompts() -> dict[str, tuple[int, ...]]:
    """By name; their lengths are 0, 1 and page size - 1 beyond whole pages of 7 and of 16."""
    rng = random.Random(5)
    base = tuple(rng.randrange(2, VOCAB) for _ in range(35))
    return {str(n): base[:n] for n in (13, 14, 15, 16, 17, 32)} | {"other": base[20:]}


PROMPTS = _prompts()


def engine_for(folder: str, slots: int, model: LoadedModel | None = None, **settings) -> Engine:
    sizes = {"max_model_len": MAX_LEN, "max_num_seqs": 16, "max_num_batched_tokens": 24}
    return make_engine(model or loaded(folder), folder, slots=slots, **{**sizes, **settings})


def requests(params: SamplingParams, names=tuple(PROMPTS), **rest) -> list[Request]:
    return [Request(name, PROMPTS[name], params, **rest) for name in names]


def assert_pressed(engine: Engine, pool: str) -> None:
    """That the pool did to the run what it was made for."""
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == (pool != "roomy")
    assert (stats.counters.swapped_out_slots > 0) == pool.startswith("swap")
    if pool != "swap-small":  # siblings may drive each other out of the host as well
        assert (stats.counters.swapped_in_slots > 0) == pool.startswith("swap")
    assert (stats.counters.swap_lost_slots > 0) == (pool == "swap-small")
    if pool == "recompute" and not engine.config.enable_prefix_caching:  # else the cache may have kept all of it
        assert stats.recomputed_tokens > 0
