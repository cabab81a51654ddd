"""Sharing one load among several processes: nothing lost, nothing twice, sessions whole, sums exact."""

from __future__ import annotations

from collections import Counter

import pytest
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


@pytest.mark.parametrize(
    ("fields", "workers", "places", "requests"),
    [
        ({"mode": "closed", "concurrency": 7}, 3, [3, 2, 2], [30, 20, 20]),  # each user has 10 of 70 requests
        ({"mode": "open", "max_concurrency": 7}, 4, [2, 2, 2, 1], [20, 20, 20, 10]),  # each place, 10 arrivals
        ({"mode": "open"}, 3, [None] * 3, [24, 23, 23]),
    ],
)
def test_a_worker_with_more_users_or_places_has_more_requests(fields, workers, places, requests) -> None:
    schedule = RequestList([RequestSpec(i, "c", (i,), None, 1, 0.1 * i) for i in range(70)])
    shards = make_shards(spec(**fields), schedule, workers)
    assert [s.spec.concurrency or s.spec.max_concurrency for s in shards] == places
    assert [len(s.requests) for s in shards] == requests
    if fields["mode"] == "closed":
        assert [s.first_user for s in shards] == [0, 3, 5]
    else:  # spread over the whole schedule
        assert all(part.requests[0].index < workers < 70 - workers * 2 <= part.requests[-1].index for part in shards)
    assert useful_workers(spec(mode="open"), schedule, 100) == 70


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
