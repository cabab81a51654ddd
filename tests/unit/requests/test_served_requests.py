"""When requests were admitted, from the times of their tokens: the built-in engine tells whether it is right."""

from __future__ import annotations

import dataclasses
import random

import pandas as pd
import pytest

from kvbench.requests.cache_simulation import CacheReplay, prompts_sent, served_requests
from kvbench.requests.request import RequestSpec
from kvbench_engine import lockstep
from kvbench_engine.lockstep import SteppedEngine
from tests.support.engine_parts import small_engine


def spec(index: int, prompt, **more) -> RequestSpec:
    return RequestSpec(index, "a", tuple(prompt), None, more.pop("max_tokens", 4), **more)


def rows(*each: dict) -> pd.DataFrame:
    return pd.DataFrame([{"index": i, **row} for i, row in enumerate(each)])


def row(ts: float, chunks, cached: int = 0, ids=None) -> dict:
    return {
        "ts": ts, "first": chunks[0] if chunks else None, "chunk_times": chunks, "cached_tokens": cached,
        "output_tokens": len(chunks), "output_token_ids": ids,
    }  # fmt: skip


def times(found) -> list[tuple[float, float, float]]:
    return [(one.admitted, one.computed, one.ended) for one in found]


@pytest.mark.parametrize("step_s", [0.05, 0.002])
def test_steps_are_told_apart_whatever_stream_is_read_first(step_s):
    requests = [spec(i, range(10 * i, 10 * i + 5)) for i in range(3)]
    each = [(0.0, [1.0, 2.01, 3.0]), (0.1, [2.0, 3.01]), (1.01, [3.02])]
    table = rows(*(row(ts * step_s, [chunk * step_s for chunk in chunks]) for ts, chunks in each))
    assert times(served_requests(requests, table)) == [(0, 1, 3), (1, 2, 3), (2, 3, 3)]


@pytest.mark.parametrize("step_s", [0.05, 0.002])
def test_a_request_is_in_no_step_that_had_ended_when_it_was_sent(step_s):
    """One user, one token a request: no request tells two steps apart by itself."""
    table = rows(row(0.0, [step_s]), row(1.1 * step_s, [2 * step_s]))
    assert times(served_requests([spec(0, [1, 2]), spec(1, [3, 4])], table)) == [(0, 1, 1), (1, 2, 2)]


def test_a_prompt_longer_than_the_rest_of_a_step_was_admitted_in_an_earlier_one():
    """10 tokens a step: the first prompt takes 8 of step 1, the second 2 of it and the rest of step 2."""
    requests = [spec(0, range(8)), spec(1, range(20, 31))]
    table = rows(row(0.0, [1.0, 2.0, 3.0]), row(0.0, [2.0, 3.0]))
    assert times(served_requests(requests, table, 10))[1] == (0, 2, 3)
    assert times(served_requests(requests, table))[1] == (1, 2, 3)  # not known to be split
    assert served_requests(requests, table, 10)[1].chunks == ((1, 2),)
    told = rows(row(0.0, [1.0, 2.0, 3.0]), row(0.0, [2.0, 3.0], cached=4))  # 7 tokens fit into step 2
    assert times(served_requests(requests, told, 10))[1] == (1, 2, 3)
    late = rows(row(0.0, [1.0, 2.0, 3.0]), row(1.001, [2.0, 3.0]))  # step 1 was over
    assert times(served_requests(requests, late, 10))[1] == (1, 2, 3)


def test_a_prompt_that_fits_no_step_before_its_last_one_began_with_what_was_left_there():
    """10 tokens a step. Step 2: one decodes, the second prompt takes 6, so that the third gets 3."""
    requests = [spec(0, [1, 2]), spec(1, range(10, 16)), spec(2, range(20, 24))]
    table = rows(row(0.0, [1.0, 2.0, 3.0]), row(0.5, [2.0, 3.0]), row(0.5, [3.0]))
    assert times(served_requests(requests, table, 10))[2] == (1, 3, 3)
    short = [*requests[:2], spec(2, range(20, 23))]  # it would have ended in step 2: it was not in it
    assert times(served_requests(short, table, 10))[2] == (2, 3, 3)


def test_requests_without_a_token_are_left_out_and_one_chunk_may_hold_a_whole_output():
    whole = row(0.0, [1.0]) | {"output_tokens": 5}
    found = served_requests([spec(0, [1, 2]), spec(1, [3])], rows(whole, row(0.0, [])))
    assert [one.prompt for one in found] == [(1, 2)] and found[0].num_output == 5
    assert CacheReplay(found, 2).hits(4) == [0]


def test_later_turns_hold_the_servers_own_answers():
    turns = [
        spec(0, [1, 2], session=5, turn=0),
        spec(1, [1, 2, 70, 71, 3], session=5, turn=1, new_tokens=1),
        spec(2, [1, 2, 70, 71, 3, 72, 4], session=5, turn=2, new_tokens=1),
    ]
    answers = {0: (8, 9), 1: (6,), 2: None}
    assert prompts_sent(turns, answers) == {0: (1, 2), 1: (1, 2, 8, 9, 3), 2: (1, 2, 8, 9, 3, 6, 4)}
    unknown = answers | {0: None}  # its ids were not returned: the drawn answer was sent
    assert prompts_sent(turns, unknown)[1] == (1, 2, 70, 71, 3)
    assert prompts_sent(turns, {0: (8, 9), 2: None}) == {0: (1, 2)}  # it ended with the second
    recorded = [dataclasses.replace(turn, new_tokens=0) for turn in turns]
    assert prompts_sent(recorded, answers)[1] == (1, 2, 70, 71, 3)
    told = rows(row(0, [1, 2], ids=[8, 9]), row(3, [4, 5], ids=[6]), row(5, [6]))
    first, second, third = (served_requests(turns, told[:count])[-1] for count in (1, 2, 3))
    assert (first.output, second.output) == ((8, 9), ())  # of the second one of two ids came
    assert second.prompt == (1, 2, 8, 9, 3) and third.prompt == (1, 2, 8, 9, 3, 72, 4)


def engine_load(monkeypatch, seed: int, *, slots: int, users: int | None, page: int, step_tokens: int):
    """A load in the real engine, a second a step: its requests, and their rows as a client would see them."""
    draw = random.Random(seed)
    shared = [[draw.randrange(90) for _ in range(40)] for _ in range(4)]
    requests, arrival = [], 0.0
    for index in range(80):
        beginning = draw.choice([*shared, []])[: draw.randrange(1, 40)]
        prompt = beginning + [draw.randrange(90) for _ in range(draw.randrange(1, 20))]
        arrival += draw.expovariate(0.15)
        requests.append(spec(index, prompt, max_tokens=draw.randrange(1, 16), arrival_s=arrival))
    engine = small_engine(
        slots, page_size=page, enable_prefix_caching=True, max_model_len=80, max_num_seqs=8,
        max_num_batched_tokens=step_tokens,
    )  # fmt: skip
    now, step = [0.0], engine.step

    def one_second():
        outputs = step()
        now[0] += 1.0
        return outputs

    monkeypatch.setattr(lockstep.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(engine, "step", one_second)
    stepped = SteppedEngine(engine)
    jobs = [[list(r.prompt_token_ids), r.max_tokens, None if users else r.arrival_s, 0] for r in requests]
    stepped.load(jobs, users, temperature=0.0, ignore_eos=True, keep_cache=False)
    while not stepped.ended:
        stepped.turn(16)
    monkeypatch.undo()
    served = stepped.result()["requests"]
    return requests, rows(*(row(ts, chunks, cached, ids) for _, ts, chunks, _, cached, _, ids in served))


@pytest.mark.parametrize(("users", "slots"), [(1, 160), (4, 160), (4, 400), (12, 400), (12, 4000), (None, 160)])
def test_the_simulation_hits_what_the_engine_hits(monkeypatch, users, slots):
    """Also where it does not see what it is held against: ``cached_tokens`` only tells how long a prompt took."""
    seen = blind = told = prompt_tokens = 0
    for seed in range(3):
        requests, table = engine_load(monkeypatch, seed, slots=slots, users=users, page=4, step_tokens=16)
        served = served_requests(requests, table, 16)
        seen += sum(CacheReplay(served, 4).hits(slots // 4))
        untold = served_requests(requests, table.drop(columns="cached_tokens"), 16)
        blind += sum(CacheReplay(untold, 4).hits(slots // 4))
        told += int(table["cached_tokens"].sum())
        prompt_tokens += sum(len(one.prompt) for one in served)
    assert told > 0.2 * prompt_tokens
    assert max(abs(seen - told), abs(blind - told)) <= 0.002 * prompt_tokens
