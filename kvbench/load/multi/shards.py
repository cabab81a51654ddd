"""The sharing of one load among several processes: which requests and how many users each one gets. Pure functions.

Each worker runs its shard as a load of its own, from one time zero. In open loop the union of the shards' arrivals is
the whole schedule, to the request; in closed loop the shards' users sum to the concurrency, under a cap their places to
the cap, and conversations are dealt in proportion. A session stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.load.spec import LoadSpec
from kvbench.requests.request import Notes, RequestList, RequestSpec, conversations


@dataclass(frozen=True)
class Shard:
    """One worker's part. ``first_user``: how many users the workers before it have."""

    spec: LoadSpec
    requests: RequestList
    first_user: int


def split_evenly(total: int, parts: int) -> list[int]:
    """Splits ``total`` into ``parts`` whole numbers that differ by at most 1, the larger ones first."""
    least, more = divmod(total, parts)
    return [least + (k < more) for k in range(parts)]


def useful_workers(spec: LoadSpec, requests: Sequence[RequestSpec], wanted: int) -> int:
    """The workers that have work: of ``wanted``, no more than users (or places under the cap) and conversations."""
    places = spec.concurrency if spec.mode == "closed" else spec.max_concurrency
    return max(1, min(wanted, places or wanted, len(conversations(requests))))


def deal(requests: Sequence[RequestSpec], workers: int, places: int | None = None) -> list[list[RequestSpec]]:
    """The requests of each worker, in the order they have in ``requests``; each request goes to exactly one.

    Conversation k (a session, or a request that is part of none) goes to worker k mod ``workers``. With ``places``
    (users in closed loop, those under a cap in open loop) it goes to the worker that has place k mod ``places``, so
    that each place's share is the same although some workers have one more.
    """
    worker_of = {}
    for k, conversation in enumerate(conversations(requests)):
        for request in conversation:
            worker_of[request.index] = k % (places or workers) % workers
    shards: list[list[RequestSpec]] = [[] for _ in range(workers)]
    for request in requests:
        shards[worker_of[request.index]].append(request)
    return shards


def cap_note(spec: LoadSpec, workers: int) -> Notes:
    """Returns what load.json says of a cap that several processes share; empty where that is not so."""
    if spec.max_concurrency is None or workers < 2:
        return {}
    return {
        "max_concurrency": f"the cap of {spec.max_concurrency} is shared by {workers} load processes: a place that is "
        "free in one does not serve a request that waits in another, so that client queue and TTFT may be higher than "
        "with one process."
    }


def make_shards(spec: LoadSpec, requests: RequestList, workers: int) -> list[Shard]:
    """One shard a worker. ``workers``: no more than ``useful_workers``. Sums of users and of caps are the spec's."""
    users = split_evenly(spec.concurrency, workers) if spec.mode == "closed" else None
    caps = split_evenly(spec.max_concurrency, workers) if spec.max_concurrency else None
    shards = []
    for k, dealt in enumerate(deal(requests, workers, spec.concurrency if users else spec.max_concurrency)):
        own = {"processes": 1, "requests_file": "", "out_dir": ""}
        own |= {"concurrency": users[k]} if users else {}
        own |= {"max_concurrency": caps[k]} if caps else {}
        first_user = sum(users[:k]) if users else 0
        shards.append(Shard(spec.model_copy(update=own), RequestList(dealt, requests.notes), first_user))
    return shards
