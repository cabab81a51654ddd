"""The workloads that ship put their question: the real scheduler and KV managers over their real requests, no tensors.

A cell for swapping in which nothing is ever preempted, or a share of hits that nobody gets, would measure nothing.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvbench.requests.build import LoadDraw, build_requests
from kvbench.requests.prefix_hits import predict_hits
from kvbench.requests.request import RequestList, RequestSpec, distinct_prefixes
from kvbench.targets.builtin import check_configuration
from kvbench.traces.read import read_page_ids
from kvbench.workload.design import plan_sweep
from kvbench.workload.file import load_workload
from kvbench_engine.config import EngineConfig
from kvbench_engine.counters import EngineStats
from kvbench_engine.engine import Engine
from kvbench_engine.kv.budget import capacity_of
from kvbench_engine.kv.layouts import make_kv_manager
from kvbench_engine.model.spec import find_model
from kvbench_engine.sequence import Request, SamplingParams
from tests.support.engine_parts import CountingExecutor

ROOT = Path(__file__).resolve().parents[3]
WORKLOADS = ROOT / "workloads"
TRACES = Path(os.environ.get("KVBENCH_TRACES", ROOT.parent / "shared" / "traces"))
MOONCAKE = TRACES / "mooncake" / "conversation_600s-900s.jsonl"
VOCAB = 8192


def cells(name: str, profile: str = "cpu"):
    workload = load_workload(WORKLOADS / f"{name}.yaml", profile=profile)
    design, _ = plan_sweep(workload, (), check_configuration)
    told = [note for note in design.notes if not re.match(r"skipped \d+ of \d+ combinations: ", note)]
    assert told == []  # nothing of what the file asks for is dropped or skipped
    return workload, {cell.cell_id: cell for cell in design.cells}


def requests_of(workload, cell, max_model_len: int, repeat: int = 1) -> RequestList:
    at = {"concurrency": cell.load.concurrency, "rate": cell.load.request_rate}
    return build_requests(
        LoadDraw(workload.load, vocab_size=VOCAB, max_model_len=max_model_len, seed=0, repeat=repeat, **at)
    )


@functools.cache
def stats(name: str, cell_id: str, repeat: int = 1, profile: str = "cpu") -> EngineStats:
    """What the engine counts of one load: each user sends the next request when its last one has ended."""
    workload, found = cells(name, profile)
    cell = found[cell_id]
    config = EngineConfig.from_mapping(cell.configuration.settings)
    spec = find_model(config.model, config.load_format)
    config = config.check_against_model(spec.max_positions)
    kv = make_kv_manager(config, capacity_of(config, spec.kv_shape("float32"), config.kv_budget))
    engine = Engine(config, CountingExecutor(VOCAB), kv)
    requests = requests_of(workload, cell, config.max_model_len, repeat)
    if workload.load.cache_state == "primed":
        for prefix in distinct_prefixes(requests):
            complete(engine, [RequestSpec(-1, "prime", tuple(prefix), None, 1)], 1)
    complete(engine, requests, cell.load.concurrency)
    return engine.stats()


def complete(engine: Engine, requests, users: int) -> None:
    """Each user has one conversation (or request without one) at a time, and thinks no time at all."""
    keys = [r.index if r.session is None else ("session", r.session) for r in requests]
    left = [[r for r, k in zip(requests, keys, strict=True) if k == key] for key in dict.fromkeys(keys)]
    turns: dict[str, list[RequestSpec]] = {}  # of the request that runs: what its user sends next

    def send(conversation: list[RequestSpec]) -> None:
        conversation = conversation or (left.pop(0) if left else [])
        if conversation:
            one, *rest = conversation
            params = SamplingParams(max_tokens=one.max_tokens, ignore_eos=True, temperature=0.0)
            engine.add_request(Request(str(one.index), tuple(one.prompt_token_ids), params))
            turns[str(one.index)] = rest

    for _ in range(users):
        send([])
    while engine.has_work():
        for output in engine.step():
            if output.finish_reason:
                send(turns.pop(output.request_id))


def shares(found: EngineStats) -> dict[str, float]:
    total = sum(found.slot_steps.values())
    return {place: slots / total for place, slots in found.slot_steps.items()}


def test_mixed_changes_one_variable_at_a_time_from_paged_16():
    _, found = cells("mixed")
    configurations = {cell.configuration.config_id: cell.configuration for cell in found.values()}
    assert list(configurations) == [
        "paged-p16", "contiguous", "paged-p8", "paged-p64", "paged-p16-prefix", "paged-p16-fp8_e4m3",
        "paged-p16-int8_per_token_head", "paged-p16-int4_per_token_head", "paged-p16-swap",
    ]  # fmt: skip
    assert [len(c.varied) for c in configurations.values()] == [0, *[1] * 8]


@pytest.mark.parametrize("repeat", [1, 2])
def test_mixed_has_something_to_swap_and_swapping_spares_what_recomputing_costs(repeat):
    recompute, swap = (stats("mixed", f"paged-p16{mode}-c32", repeat) for mode in ("", "-swap"))
    assert recompute.num_preemptions >= 1 and recompute.recomputed_tokens > 0
    assert swap.num_preemptions == recompute.num_preemptions
    assert swap.counters.swapped_out_slots == swap.counters.swapped_in_slots == recompute.recomputed_tokens
    assert swap.recomputed_tokens == swap.counters.swap_lost_slots == 0


def test_mixed_gives_small_kv_room_for_more_and_contiguous_for_less():
    # The same work in fewer steps: more requests run side by side.
    steps = {name: stats("mixed", f"{name}-c32").steps for name in ("contiguous", "paged-p16", "paged-p16-fp8_e4m3")}
    assert steps["contiguous"] > 3 * steps["paged-p16"] > 3 * steps["paged-p16-fp8_e4m3"]
    assert (
        shares(stats("mixed", "contiguous-c32"))["waste"] > 0.5 > shares(stats("mixed", "paged-p16-c32"))["tokens"] / 2
    )


def test_reservations_fill_the_slab_in_the_order_of_what_they_know():
    names = ("contiguous-max", "contiguous-pow2", "contiguous-oracle", "paged-p16")
    _, found = cells("reservations")
    assert [c.configuration.config_id for c in found.values()] == list(names)
    assert {check_configuration(c.configuration.settings).kv_budget_bytes for c in found.values()} == {62 * 2**20}
    tokens = [shares(stats("reservations", f"{name}-c36"))["tokens"] for name in names]
    assert tokens == sorted(tokens) and tokens[3] > 2 * tokens[0]
    oracle = stats("reservations", "contiguous-oracle-c36")
    assert oracle.counters.refused_fragmented > 0 and shares(oracle)["fragmented"] > 0.05


@pytest.mark.parametrize(("profile", "share"), [("cpu", 0.5), ("cpu-75", 0.75), ("cpu-0", 0.0)])
def test_prefix_has_the_share_of_hits_that_its_profile_says(profile, share):
    on, off = (stats("prefix", f"paged-p16{x}-c4", profile=profile) for x in ("-prefix", ""))
    requests = 24
    assert on.prefix_cache_hits == share * 512 * requests  # 512 prompt tokens each, in every profile
    assert off.prefix_cache_hits == 0
    assert on.generation_tokens == off.generation_tokens
    assert off.prefill_tokens_scheduled - on.prefill_tokens_scheduled == on.prefix_cache_hits


def test_conversations_compute_what_was_said_before_only_without_prefix_caching():
    workload, found = cells("conversations")
    requests = requests_of(workload, found["paged-p16-prefix-c8"], max_model_len=1024)
    on, off = (stats("conversations", f"paged-p16{x}-c8") for x in ("-prefix", ""))
    assert len({r.session for r in requests}) == 24 and on.num_preemptions == 0
    # What is sent here has answers drawn beforehand, which the server did not compute: only prompts are met again.
    before = {(r.session, r.turn): len(r.prompt_token_ids) for r in requests}
    due = sum(before[r.session, r.turn - 1] // 16 * 16 for r in requests if r.turn)
    recorded = predict_hits([replace(r, new_tokens=0) for r in requests], cache_state="cold", page_size=16)
    assert 0 < due <= on.prefix_cache_hits <= recorded.high
    assert recorded.high < predict_hits(requests, cache_state="cold", page_size=16).high
    assert off.prefix_cache_hits == 0
    assert on.prefill_tokens_scheduled + on.prefix_cache_hits == off.prefill_tokens_scheduled


def test_mooncake_replays_the_pages_of_its_trace():
    if not MOONCAKE.is_file():
        pytest.skip(f"no trace slices in {MOONCAKE.parents[1]}; set KVBENCH_TRACES to their folder")
    workload = load_workload(WORKLOADS / "mooncake.yaml", profile="cpu", overrides=[f"load.prompts.path={MOONCAKE}"])
    design, _ = plan_sweep(workload, (), check_configuration)
    cell = next(c for c in design.cells if c.cell_id == "paged-p8-prefix-trace")
    requests = requests_of(workload, cell, max_model_len=2048)
    trace = read_page_ids(MOONCAKE)
    ids = trace.take(np.flatnonzero(trace.arrival_s < 60))
    assert len(requests) == len(ids) == 218 and requests.notes["page_size_of_prompts"] == 8
    assert [len(r.prompt_token_ids) // 8 for r in requests] == (ids.prompt_tokens // 512).tolist()
    assert len({r.arrival_s for r in requests}) > 200  # spread over the clock's ticks of 3 s
