"""A load on simulated engines whose steps take a fixed time, against closed formulas."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.requests.request import RequestSpec
from kvbench.simulation.cost.cost_model import StepTimer
from kvbench.simulation.fleet.drive import ROUTERS, Drive, EndedRequest, Replica
from kvbench_engine.config import EngineConfig
from kvbench_engine.engine import Engine
from kvbench_engine.execution.null_executor import ReplayExecutor
from kvbench_engine.execution.simulated_executor import StepTime
from kvbench_engine.kv.budget import KVShape, LayerKV, capacity_of
from kvbench_engine.sequence import Request, SamplingParams

STEP = 0.1  # s
VOCAB = 50_000


def a_replica(
    step_time: StepTimer = lambda work: StepTime(STEP, execute=STEP),
    number: int = 0,
    budget: int = 64 * 2**20,
    **settings: object,
) -> Replica:
    config = EngineConfig(max_model_len=4096, **{"max_num_seqs": 64, "max_num_batched_tokens": 512, **settings})
    capacity = capacity_of(config, KVShape((LayerKV(1, 16, 16),), 2), budget)
    return Replica(config, capacity, VOCAB, step_time, number)


def spec(index: int, prompt: int = 10, output: int = 5, arrival: float | None = None, **more: object) -> RequestSpec:
    ids = tuple(np.random.default_rng(index).integers(16, VOCAB, prompt).tolist())
    return RequestSpec(index, "x", ids, None, output, arrival_s=arrival, **more)


def run(specs: list, replicas: list[Replica] | None = None, **how: object) -> list[EndedRequest]:
    ended: list[EndedRequest] = []
    conversations = [item if isinstance(item, list) else [item] for item in specs]
    Drive(replicas or [a_replica()], conversations, ended.append, **how).run()
    return sorted(ended, key=lambda one: one.spec.index)


def ttft(one: EndedRequest) -> float:
    return one.times[0] - one.due


@pytest.mark.parametrize("prompt", [1, 512, 513, 2000])
def test_one_user_waits_for_the_chunks_of_his_prompt_and_then_a_step_a_token(prompt: int) -> None:
    first, second = run([spec(0, prompt, 7), spec(1, prompt, 7)], users=1)
    chunks = -(-prompt // 512)
    assert ttft(first) == pytest.approx(chunks * STEP)
    assert np.diff(first.times) == pytest.approx([STEP] * 6)
    assert second.sent == first.times[-1] and second.times[-1] == pytest.approx(2 * (chunks + 6) * STEP)


def test_users_share_steps_and_those_beyond_the_batch_wait() -> None:
    ended = run([spec(i, 10, 5) for i in range(8)], [a_replica(max_num_seqs=4)], users=8)
    assert [round(ttft(one) / STEP) for one in ended] == [1] * 4 + [6] * 4
    assert all(one.sent == 0.0 for one in ended)


def test_an_open_loop_sends_whatever_the_engine_does_and_a_closed_one_waits_for_it() -> None:
    specs = [spec(i, 10, 20, arrival=i * 1.1 * STEP) for i in range(12)]
    opened = run(specs)
    closed = run(specs, users=2)
    assert [one.sent for one in opened] == [item.arrival_s for item in specs]
    assert max(one.times[-1] for one in opened) == pytest.approx((13 + 20) * STEP)  # the last comes in step 13
    assert max(one.times[-1] for one in closed) == pytest.approx(6 * 20 * STEP)


def test_a_queue_of_single_steps_waits_as_long_as_md1_says() -> None:
    """M/D/1: the mean wait before service is rho s / (2 (1 - rho)) (Pollaczek-Khinchine), rho = 0.7."""
    rho, many = 0.7, 4_000
    arrivals = np.cumsum(np.random.default_rng(1).exponential(STEP / rho, many))
    specs = [RequestSpec(i, "x", (16, 17), None, 1, arrival_s=float(due)) for i, due in enumerate(arrivals)]
    ended = run(specs, [a_replica(max_num_seqs=1, max_num_batched_tokens=16)])
    waits = np.array([ttft(one) - STEP for one in ended])
    assert waits.mean() == pytest.approx(rho * STEP / (2 * (1 - rho)), rel=0.12)
    assert waits.min() >= -1e-9


def test_a_conversation_goes_on_after_its_users_thought_with_what_was_answered() -> None:
    turns = [
        spec(0, 10, 5, session=3),
        spec(1, 40, 5, session=3, turn=1, think_s=2.0, new_tokens=25),
    ]
    sent: list[tuple[int, ...]] = []

    def router(chosen: RequestSpec, replicas: list[Replica]) -> Replica:
        sent.append(chosen.prompt_token_ids or ())
        return replicas[0]

    first, second = run([turns], users=1, router=router)
    assert second.due == pytest.approx(first.times[-1] + 2.0) and ttft(second) == pytest.approx(STEP)
    assert sent[1] == sent[0] + tuple(first.token_ids) + (turns[1].prompt_token_ids or ())[15:]
    assert len(first.token_ids) == 5


def test_a_client_with_too_many_open_holds_the_others_back() -> None:
    ended = run([spec(i, 10, 5, arrival=0.0) for i in range(6)], most_in_flight=2)
    assert [round(one.sent / STEP) for one in ended] == [0, 0, 5, 5, 10, 10]
    assert all(one.due == 0.0 for one in ended)


def test_what_can_never_run_is_refused_and_the_rest_goes_on() -> None:
    long = [spec(1, 4096, 5, session=1), spec(2, 20, 5, session=1, turn=1)]
    ended = run([spec(0), long, spec(3)], users=1)
    assert [one.spec.index for one in ended] == [0, 1, 3]  # nothing is sent after the turn that was refused
    assert ended[1].reason == "refused" and "4096" in (ended[1].error or "") and not ended[1].times
    assert [one.unsent for one in ended] == [0, 1, 0]
    full = run([spec(i, arrival=0.0) for i in range(9)], [a_replica(max_num_waiting=3, max_num_seqs=2)])
    assert [one.status for one in full].count(429) == 9 - (3 + 2)


def test_each_sequence_of_a_request_and_each_chosen_one_has_its_chunks() -> None:
    parallel, chosen = run([spec(0, 10, 4, n=3), spec(1, 10, 4, n=1, best_of=3)], users=1)
    assert sorted(parallel.sequences) == [0] * 4 + [1] * 4 + [2] * 4 and parallel.output_tokens == 12
    assert len(chosen.times) == 1 and chosen.tokens == [4] and chosen.output_tokens == 4


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_engine_does_what_it_does_without_a_clock(mode: str) -> None:
    """Its counters are those of the same requests through the executor of the counter gate, stepped to the end."""
    settings = {"enable_prefix_caching": True, "preemption_mode": mode, "swap_space": 2**20 if mode == "swap" else None}
    specs = [*shared(3, 40, gap=0.0), *(spec(100 + i, 300, 60, arrival=0.0) for i in range(20))]
    replica, other = (a_replica(budget=400_000, **settings) for _ in range(2))
    run(specs, [replica])
    bare = Engine(other.engine.config, ReplayExecutor(0, VOCAB, num_eos=0), other.engine.kv, lambda: 0.0)
    for item in specs:
        params = SamplingParams(item.max_tokens, temperature=0.0, ignore_eos=True)
        bare.add_request(Request(str(item.index), item.prompt_token_ids or (), params))
    while bare.has_work():
        bare.step()
    actual, expected = ({k: v for k, v in vars(engine.stats()).items() if not k.endswith("seconds") and k != "counters"}
                       for engine in (replica.engine, bare))  # fmt: skip
    assert actual == expected and actual["num_preemptions"] > 0
    assert replica.engine.stats().prefix_cache_hits == bare.stats().prefix_cache_hits > 0


def fleet(count: int, **settings: object) -> list[Replica]:
    return [a_replica(number=number, **settings) for number in range(count)]


def test_round_robin_splits_exactly() -> None:
    ended = run([spec(i, arrival=i * 0.01) for i in range(30)], fleet(3), router=ROUTERS["round-robin"]())
    assert [one.replica for one in ended] == [0, 1, 2] * 10


def test_least_loaded_replicas_are_never_more_than_one_apart() -> None:
    replicas, apart = fleet(3), []

    def router(chosen: RequestSpec, among: list[Replica]) -> Replica:
        apart.append(max(r.outstanding for r in among) - min(r.outstanding for r in among))
        return ROUTERS["least-loaded"]()(chosen, among)

    ended = run([spec(i, arrival=0.0) for i in range(31)], replicas, router=router)
    assert max(apart) == 1 and np.bincount([one.replica for one in ended]).tolist() == [11, 10, 10]


def shared(families: int, count: int, gap: float) -> list[RequestSpec]:
    prefixes = [spec(1000 + family, 160).prompt_token_ids or () for family in range(families)]
    order = np.random.default_rng(5).integers(0, families, count)
    return [
        RequestSpec(i, "x", prefixes[family] + (spec(i, 16).prompt_token_ids or ()), None, 4, arrival_s=i * gap)
        for i, family in enumerate(order)
    ]


def test_prefix_aware_routing_finds_each_prefix_again() -> None:
    """5 families of 10 pages on 4 replicas: each replica computes each prefix once, or one replica does."""
    hits = {}
    for name in ROUTERS:
        replicas = fleet(4, enable_prefix_caching=True)
        ended = run(shared(5, 200, gap=1.0), replicas, router=ROUTERS[name]())
        hits[name] = sum(one.cached for one in ended)
    assert hits["round-robin"] == (200 - 4 * 5) * 160
    assert hits["prefix-aware"] == (200 - 5) * 160


def test_prefix_aware_routing_leaves_a_replica_that_is_overloaded() -> None:
    """One prefix for all: its holder is chosen until it has more than 64 more than the other, and then by turns."""
    replicas = fleet(2, enable_prefix_caching=True, max_num_seqs=256, max_num_batched_tokens=4096)
    first, *rest = shared(1, 100, gap=0.0)
    specs = [first, *(RequestSpec(r.index, "x", r.prompt_token_ids, None, 50, arrival_s=1.0) for r in rest)]
    ended = run(specs, replicas, router=ROUTERS["prefix-aware"]())
    holder = ended[0].replica
    assert [one.replica == holder for one in ended[1:]] == [True] * 65 + [False, True] * 17
