"""Hit rates of the simulated engine: those of cache-sim, and so the published ones, where requests do not overlap.

A page id becomes a page of two tokens, and a prompt ends with one token more, which belongs to no full page: then an
engine can hit every page of a prompt, as the published rates count, and each request takes a page beside them.
"""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.capacity.gpus import find_gpu
from kvbench.capacity.model import plan_model
from kvbench.requests.request import RequestSpec
from kvbench.simulation.cost.machine import Machine
from kvbench.simulation.fleet.drive import Drive, EndedRequest, Replica
from kvbench.trace_analysis.cache_sim import hit_rates, replay, working_set
from kvbench.traces.model import Trace
from kvbench.traces.read import read_trace
from tests.support.trace_samples import SLICES, TRACES, needs_slices

MACHINE = Machine(plan_model("llama-3.1-8b"), find_gpu("H100"))
SIZE = 2  # tokens a page
END = 100_000


def engine_hits(prompts: list[tuple[int, ...]], num_pages: int, users: int | None = 1, page_size: int = SIZE) -> list:
    """Pages of each prompt that the prefix cache of an engine of ``num_pages`` served; each answer is one token."""
    longest = max(map(len, prompts)) + 1
    table = -(-longest // page_size) * 8 * 64
    slot = MACHINE.model.token_bytes()
    replica = Replica.on(
        MACHINE,
        {
            "page_size": page_size, "enable_prefix_caching": True, "kv_budget": num_pages * page_size * slot + table,
            "max_model_len": longest, "max_num_seqs": 64, "max_num_batched_tokens": 8192,
        }
    )  # fmt: skip
    assert replica.engine.capacity.num_pages == num_pages
    ended: dict[int, EndedRequest] = {}
    specs = [[RequestSpec(i, "all", ids, None, 1, arrival_s=0.0)] for i, ids in enumerate(prompts)]
    Drive([replica], specs, lambda one: ended.__setitem__(one.spec.index, one), users=users).run()
    assert all(one.error is None for one in ended.values())
    return [ended[i].cached // page_size for i in range(len(prompts))]


def prompts_of(page_ids) -> list[tuple[int, ...]]:
    return [(*(token for page in ids for token in (page, page)), END) for ids in page_ids]


def trace_of(requests: list[list[int]]) -> Trace:
    tokens = np.array([len(ids) * SIZE for ids in requests], dtype=np.int64)
    pages = tuple(array("q", ids) for ids in requests)
    return Trace("test", tokens, tokens * 0 + 1, page_ids=pages, page_size=SIZE)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=25), st.integers(6, 20))
def test_requests_one_after_another_hit_what_cache_sim_says(requests, num_pages):
    hits = engine_hits(prompts_of(requests), num_pages + 1)
    assert hits == replay(trace_of(requests), num_pages).hits.tolist()


@needs_slices
def test_the_published_hit_rates_of_mooncakes_slice_come_out_of_the_engine():
    name = "mooncake/conversation_600s-900s.jsonl"
    trace, expected = read_trace(TRACES / name), SLICES[name]
    prompts, tokens = prompts_of(trace.page_ids), 5_000_000
    rates = {
        tokens // trace.page_size: expected["lru_block_hit_by_capacity_tokens"][str(tokens)],
        working_set(trace): expected["prefix_infinite_cache_cold"]["block_hit"],
    }
    for size, rate in rates.items():
        hits = np.array(engine_hits(prompts, size + 1))
        assert round(hit_rates(trace, hits).pages, 4) == rate


def test_a_prompt_that_ends_with_a_page_computes_that_page_again():
    full = tuple(range(64))
    assert engine_hits([full, full], 64, page_size=16) == [0, 3]
    assert engine_hits([(*full, 1), (*full, 2)], 64, page_size=16) == [0, 4]
