"""Sharing one load among several processes: nothing lost, nothing twice, sessions whole, sums exact."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvbench.load.multi.shards import cap_note, deal, make_shards, split_evenly, useful_workers
from kvbench.load.spec import LoadSpec
from kvbench.requests.request import RequestList, RequestSpec


def spec(**fields: object) -> LoadSpec:
    base = {"base_url": "http://h:1", "model": "m", "requests_file": "r", "out_dir": "o", "timeout_s": 5.0}
    return LoadSpec.model_validate(base | fields)


@st.composite
def loads(draw: st.DrawFn) -> RequestList:
    """Up to 60 requests, some of them in sessions whose turns are mixed among the others in order of turn."""
    owners = draw(st.lists(st.one_of(st.none(), st.integers(0, 6)), min_size=1, max_size=60))
    turns: Counter[int] = Counter()
    out = []
    for index, owner in enumerate(owners):
        turn = 0 if owner is None else turns[owner]
        if owner is not None:
            turns[owner] += 1
        arrival = None if turn else index * 0.01
        out.append(RequestSpec(index, "c", (index,), None, 4, arrival, session=owner, turn=turn))
    return RequestList(out, {"seed": 7})


@given(st.integers(0, 5000), st.integers(1, 300))
def test_split_is_exact_and_even(total: int, parts: int) -> None:
    shares = split_evenly(total, parts)
    assert len(shares) == parts
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


@given(loads(), st.integers(1, 12), st.one_of(st.none(), st.integers(1, 20)))
def test_every_request_goes_to_exactly_one_worker_and_sessions_stay_whole(
    requests: RequestList, workers: int, users: int | None
) -> None:
    dealt = deal(requests, workers, users)
    assert len(dealt) == workers
    assert sorted(r.index for part in dealt for r in part) == list(range(len(requests)))
    home = {}
    for number, part in enumerate(dealt):
        assert [r.index for r in part] == sorted(r.index for r in part)  # the schedule's order is kept
        for request in part:
            if request.session is not None:
                assert home.setdefault(request.session, number) == number
    union = sorted(r.arrival_s for part in dealt for r in part if r.arrival_s is not None)
    assert union == sorted(r.arrival_s for r in requests if r.arrival_s is not None)


def test_in_closed_loop_a_worker_with_more_users_has_more_requests() -> None:
    """7 users of 3 workers are 3, 2 and 2: of 70 requests each user has 10."""
    requests = RequestList([RequestSpec(i, "c", (i,), None, 1) for i in range(70)])
    shards = make_shards(spec(mode="closed", concurrency=7), requests, 3)
    assert [s.spec.concurrency for s in shards] == [3, 2, 2]
    assert [len(s.requests) for s in shards] == [30, 20, 20]
    assert [s.first_user for s in shards] == [0, 3, 5]


def test_under_a_cap_a_worker_with_more_places_has_more_requests() -> None:
    """5 places of 4 workers are 2, 1, 1 and 1: of 50 arrivals each place has 10, spread over the whole schedule."""
    requests = RequestList([RequestSpec(i, "c", (i,), None, 1, 0.1 * i) for i in range(50)])
    shards = make_shards(spec(mode="open", max_concurrency=5), requests, 4)
    assert [s.spec.max_concurrency for s in shards] == [2, 1, 1, 1]
    assert [len(s.requests) for s in shards] == [20, 10, 10, 10]
    assert [r.index for r in shards[1].requests] == list(range(1, 50, 5))


def test_a_shared_cap_is_noted() -> None:
    capped, free = spec(mode="open", max_concurrency=5), spec(mode="open")
    assert "5 is shared by 4 load processes" in cap_note(capped, 4)["max_concurrency"]
    assert cap_note(capped, 1) == cap_note(free, 4) == {}


@given(loads(), st.integers(1, 12), st.integers(1, 30))
def test_users_and_caps_sum_to_those_of_the_load_and_no_worker_is_idle(
    requests: RequestList, asked: int, places: int
) -> None:
    closed, capped = spec(mode="closed", concurrency=places), spec(mode="open", max_concurrency=places)
    for load in (closed, capped):
        workers = useful_workers(load, requests, asked)
        assert 1 <= workers <= asked
        shards = make_shards(load, requests, workers)
        assert all(len(s.requests) for s in shards)
        shares = [s.spec.concurrency if load.mode == "closed" else s.spec.max_concurrency for s in shards]
        assert sum(shares) == places
        assert min(shares) >= 1
        assert all(s.requests.notes == {"seed": 7} for s in shards)
        assert all(s.spec.base_url == load.base_url and s.spec.processes == 1 for s in shards)


def test_without_a_cap_open_loop_has_none_in_any_worker() -> None:
    requests = RequestList([RequestSpec(i, "c", (i,), None, 1, 0.0) for i in range(9)])
    assert [s.spec.max_concurrency for s in make_shards(spec(mode="open"), requests, 3)] == [None] * 3
    assert useful_workers(spec(mode="open"), requests, 20) == 9
