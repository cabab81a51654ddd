"""The hits that a prefix cache should have had in a load, by replaying its prompts. Pure functions.

A request finds the whole pages that it begins with at its admission, holds all its pages until its end, and gives them
back last page first. A free page that still holds a prompt's prefix is a cached page. Admissions are measured
(``served_requests``), not simulated: a request that ran had its pages, so where a measured time is wrong the pool is
overdrawn, and nothing is left for the cache until pages come back. So an endless cache never hits less than a smaller
one.

The rules are those of paged engines (vLLM's, and the built-in one's in ``engine/kv``): a page is known by all tokens
up to its end, at least one token of a prompt is computed, empty pages are taken before cached ones, and a page that
was computed twice is cached once. Not simulated: preemption, swapping, several samples of one prompt.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.requests.prefix_hits import common_beginning, shared_beginnings
from kvbench.requests.request import RequestSpec, continued, conversations

if TYPE_CHECKING:
    import pandas as pd

Ids = tuple[int, ...]
_SILENCE_S = 0.003  # the chunks of one step came 0.1 ms apart on 2 busy cores, and 99.9 % of them within 3 ms
COLUMNS = ("index", "ts", "first", "chunk_times", "cached_tokens", "output_tokens", "output_token_ids")
_COMPUTED, _ENDED, _GROWS, _ADMITTED = range(4)  # the order of what happens at one time: between two steps
_NO_PAGE = 0  # what the first page of a prompt follows


@dataclass(frozen=True)
class ServedRequest:
    """One request as the server worked on it, by any clock.

    ``admitted`` < ``computed`` <= ``ended``, and < if there is more than one output token.
    ``prompt``, ``output``: token ids; no output where the server did not return all its ids.
    ``num_output``: how many tokens the output had, whether their ids are known or not.
    ``admitted``: when its prompt was looked up; what was computed or ended by then is seen.
    ``computed``: when the KV of its prompt was there: at its first token.
    ``chunks``: of a prompt computed in several steps: (when, how many of its tokens were there), before ``computed``.
    """

    prompt: Ids
    admitted: float
    computed: float
    ended: float
    output: Ids = ()
    num_output: int = 1
    chunks: tuple[tuple[float, int], ...] = ()

    @property
    def kept(self) -> Ids:
        """The tokens that others can reuse once it has ended; the KV of the last one is never computed."""
        return self.prompt + self.output[:-1]


def shared_tokens(requests: Sequence[ServedRequest], primed: Sequence[Ids] = ()) -> list[int]:
    """The leading tokens of each prompt that another request or a primed prompt shares. [requests]

    What a cache would hit that is endless and has seen the whole load before.
    """
    every = [request.kept for request in requests] + list(primed)
    shared = shared_beginnings(every, range(len(every)))
    return [min(tokens, len(r.prompt) - 1) for r, tokens in zip(requests, shared, strict=False)]


def endless_hits(requests: Sequence[ServedRequest], primed: Sequence[Ids] = ()) -> list[int]:
    """Hits [tokens] in an endless cache with pages of one token that starts with ``primed`` prompts. [requests]

    The longest beginning that a prompt has in common with any of a sorted list is in common with a neighbour there.
    """
    cached = sorted(primed)
    hits = [0] * len(requests)
    for _, what, index, count in _events(requests):
        request = requests[index]
        if what == _COMPUTED:
            insort(cached, request.prompt[:count])
        elif what == _ENDED and len(request.output) > 1:
            insort(cached, request.kept)
        elif what == _ADMITTED:
            at = bisect_left(cached, request.prompt)
            beginnings = [common_beginning(request.prompt, other) for other in cached[max(0, at - 1) : at + 1]]
            hits[index] = min(max(beginnings, default=0), len(request.prompt) - 1)
    return hits


class CacheReplay:
    """The requests of one load and their pages, to be replayed through caches of several sizes and policies."""

    def __init__(self, requests: Sequence[ServedRequest], page_size: int, primed: Sequence[Ids] = ()) -> None:
        """Puts ``primed`` in front: prompts that the server computed before the load, one after another."""
        start = min((r.admitted for r in requests), default=0.0) - len(primed)
        before = [ServedRequest(p, start + i, start + i + 0.5, start + i + 0.5) for i, p in enumerate(primed)]
        self._num_primed = len(before)
        self._requests = [*before, *requests]
        self._page_size = page_size
        self._parent, self._depth = [_NO_PAGE], [0]  # by a page's number
        numbers: dict[tuple[int, Ids], int] = {}
        self._pages = [self._numbered(request.kept, numbers) for request in self._requests]
        self._events = _events(self._requests, page_size)

    def _numbered(self, tokens: Ids, numbers: dict[tuple[int, Ids], int]) -> list[int]:
        """Returns a number for each full page; equal if all tokens up to the pages' ends are equal."""
        size, page, pages = self._page_size, _NO_PAGE, []
        for at in range(0, len(tokens) // size * size, size):
            before, page = page, numbers.setdefault((page, tokens[at : at + size]), len(self._parent))
            if page == len(self._parent):
                self._parent.append(before)
                self._depth.append(self._depth[before] + 1)
            pages.append(page)
        return pages

    def hits(self, num_pages: int | None = None, *, best: bool = False) -> list[int]:
        """Hits [tokens] in a cache of ``num_pages`` (None: endless). [requests]

        Given up is the least recently used page or, with ``best``, the page that is looked up again last (Belady, IBM
        Systems Journal 5, 1966): while requests do not overlap, no other order hits more.
        """
        order = _FurthestUse(self._uses(), self._depth) if best else _LeastRecentlyUsed()
        pool = _Pool(math.inf if num_pages is None else num_pages, order, self._parent)
        held: list[list[int | None]] = [[] for _ in self._requests]
        hits = [0] * len(self._requests)
        for _, what, index, count in self._events:
            request, pages, own = self._requests[index], self._pages[index], held[index]
            if what == _ADMITTED:
                shared = pool.share(pages[: self._lookups(request)])
                hits[index] = shared * self._page_size
                own += pages[:shared]
                pool.take(own, -(-len(request.prompt) // self._page_size) - shared)
            elif what == _GROWS:
                pool.take(own, 1)
            elif what == _COMPUTED:
                pool.offer(own, pages[: count // self._page_size])
            else:
                pool.offer(own, pages)
                pool.release(own)
        return hits[self._num_primed :]

    def _lookups(self, request: ServedRequest) -> int:
        return (len(request.prompt) - 1) // self._page_size

    def _uses(self) -> list[list[tuple[int, bool]]]:
        """Lists (number of an admission, whether it looks the page up or computes it anyway). [pages], ascending

        The first admission has the number 1.
        """
        uses: list[list[tuple[int, bool]]] = [[] for _ in self._parent]
        admissions = (index for _, what, index, _ in self._events if what == _ADMITTED)
        for number, index in enumerate(admissions, 1):
            for position, page in enumerate(self._pages[index]):
                uses[page].append((number, position < self._lookups(self._requests[index])))
        return uses


def _events(requests: Sequence[ServedRequest], page_size: int | None = None) -> list[tuple[float, int, int, int]]:
    """Lists (time, kind of event, index of the request, tokens computed) in order, ties in the requests' order.

    With ``page_size``, also when each page of an output is taken: the output is taken to grow evenly.
    """
    events = []
    for index, request in enumerate(requests):
        length, last = len(request.prompt), request.num_output - 1
        assert request.admitted < request.computed <= request.ended and (request.computed < request.ended or not last)
        events += [(when, _COMPUTED, index, count) for when, count in (*request.chunks, (request.computed, length))]
        events += [(request.ended, _ENDED, index, length + last), (request.admitted, _ADMITTED, index, 0)]
        if page_size is not None and last:
            pace = (request.ended - request.computed) / last
            starts = range(-(-length // page_size) * page_size, length + last, page_size)
            events += [(request.computed + pace * (start - length), _GROWS, index, start) for start in starts]
    return sorted(events)


class _LeastRecentlyUsed(OrderedDict[int, None]):
    """Free pages, of which the one that has been free for longest goes first."""

    def add(self, page: int) -> None:
        self[page] = None

    remove = OrderedDict.__delitem__

    def take(self, following: Mapping[int, set[int]]) -> int:
        return self.popitem(last=False)[0]

    def admission(self) -> None: ...


class _FurthestUse:
    """Free pages, of which the one with the furthest next use goes first; of several, the deepest in its prompt.

    A page that is computed anyway before it is next looked up has no use until then, but cached pages that follow it
    may have one: they go before it. The next use of a free page changes only when it was computed anyway, since an
    admission that looks it up takes it out.
    """

    def __init__(self, uses: Sequence[Sequence[tuple[int, bool]]], depth: Sequence[int]) -> None:
        self._uses, self._depth = uses, depth
        self._admissions = 0
        self._computed: dict[int, list[int]] = {}  # by the number of an admission: pages that it computes anyway
        for page, numbers in enumerate(uses):
            for number, looked_up in numbers:
                if not looked_up:
                    self._computed.setdefault(number, []).append(page)
        self._keys: dict[int, tuple[float, int, int]] = {}
        self._heap: list[tuple[float, int, int]] = []  # also keys of pages that were removed

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, page: int) -> None:
        uses = self._uses[page]
        at = bisect_right(uses, self._admissions, key=lambda use: use[0])
        number, looked_up = uses[at] if at < len(uses) else (0, False)
        key = (-number if looked_up else -math.inf, -self._depth[page], page)
        self._keys[page] = key
        heapq.heappush(self._heap, key)

    def remove(self, page: int) -> None:
        del self._keys[page]

    def take(self, following: Mapping[int, set[int]]) -> int:
        """Removes a page and returns it. ``following``: the cached pages that follow each page."""
        passed = []
        while self._heap:
            key = heapq.heappop(self._heap)
            if self._keys.get(key[2]) != key:
                continue
            if not following.get(key[2]):
                break
            passed.append(key)
        else:
            key = passed.pop(0)  # what follows each of them is held
        for other in passed:
            heapq.heappush(self._heap, other)
        del self._keys[key[2]]
        return key[2]

    def admission(self) -> None:
        for page in self._computed.get(self._admissions, ()):
            if page in self._keys:
                self.add(page)
        self._admissions += 1


class _Pool:
    """The pages of a cache. ``empty``: of them, those that hold nothing; negative: overdrawn.

    Of a request, ``own`` are the pages that it holds, in order: the number of a cached page, None for any other.
    A cached page can be found only behind the page that it follows. Where that one is given up, so is this one, unless
    it is held: then its holder, at its end, offers its copy of the other one.
    """

    def __init__(self, num_pages: float, order: _LeastRecentlyUsed | _FurthestUse, parent: Sequence[int]) -> None:
        self.empty = num_pages
        self._order = order
        self._parent = parent
        self._holders: dict[int, int] = {_NO_PAGE: 1}  # of each cached page: how many requests hold it; 0: in ``order``
        self._following: dict[int, set[int]] = {}

    def share(self, pages: Sequence[int]) -> int:
        """Counts the leading ``pages`` that are cached, for an admission; they are held from now on."""
        self._order.admission()
        for count, page in enumerate(pages):
            holders = self._holders.get(page)
            if holders is None:
                return count
            if not holders:
                self._order.remove(page)
            self._holders[page] = holders + 1
        return len(pages)

    def take(self, own: list[int | None], count: int) -> None:
        """Adds ``count`` pages without content: empty ones first, then cached ones."""
        self._make_room(count)
        self.empty -= count
        own += [None] * count

    def offer(self, own: list[int | None], pages: Sequence[int]) -> None:
        """Caches a request's first ``pages``, which are computed, where no other request's copy is cached."""
        for position, page in enumerate(pages):
            if page not in self._holders:
                own[position] = page
                self._holders[page] = 1
                self._following.setdefault(self._parent[page], set()).add(page)

    def release(self, own: list[int | None]) -> None:
        """Gives all pages back, the last one first: the end of a prompt is shared less often than its beginning."""
        for page in reversed(own):
            if page is None:
                self.empty += 1
                continue
            self._holders[page] -= 1
            if not self._holders[page]:
                self._order.add(page)
        own.clear()
        self._make_room(0)

    def _make_room(self, count: int) -> None:
        while self.empty < count and len(self._order):
            self._give_up(self._order.take(self._following))

    def _give_up(self, page: int) -> None:
        """Makes a page empty that is not in ``order``, and those that follow it and are not held."""
        self._following[self._parent[page]].discard(page)
        gone = [page]
        for page in gone:  # grows as it goes
            del self._holders[page]
            self.empty += 1
            for after in [other for other in self._following.get(page, ()) if not self._holders[other]]:
                self._order.remove(after)
                self._following[page].remove(after)
                gone.append(after)


def served_requests(
    requests: Sequence[RequestSpec], rows: pd.DataFrame, step_tokens: int | None = None
) -> list[ServedRequest]:
    """The requests that got a token, in the order in which they were sent, by what the client measured.

    An engine works in steps, and in a step each running request gets tokens once. So the chunks of all requests
    together tell the steps apart, and all times here are numbers of steps, from 1: unlike the client's clock they do
    not depend on which of two streams of one step is read first.

    Args:
        requests: as drawn, with token ids.
        rows: their ``COLUMNS`` of requests.parquet, of one repeat.
        step_tokens: how many tokens the engine computes in a step at most; None: not known, or a prompt is never split.
    """
    seen = [_SeenRequest.of(row) for row in rows.reindex(columns=COLUMNS).sort_values("ts").to_dict("records")]
    answered = {request.index: request for request in seen if len(request.chunks)}
    prompts = prompts_sent(requests, {index: request.answer for index, request in answered.items()})
    sent = [request for index, request in answered.items() if index in prompts]
    moments = [request.ts for request in sent]
    steps = _steps([request.chunks for request in sent], moments)
    computed = [len(prompts[request.index]) - request.cached for request in sent]
    served = []
    prefills = _prefills(steps, moments, computed, step_tokens)
    for request, prefill, first, last in zip(sent, prefills, steps.first, steps.last, strict=True):
        ended = last if last > first or request.tokens <= 1 else first + 0.5  # all of it in one chunk
        there = itertools.accumulate(prefill.values(), initial=request.cached)
        chunks = tuple(zip(prefill, itertools.islice(there, 1, None), strict=True))[:-1]
        admitted, output, count = min(prefill) - 1, request.answer or (), max(1, request.tokens)
        served.append(ServedRequest(prompts[request.index], admitted, first, ended, output, count, chunks))
    return served


def prompts_sent(requests: Sequence[RequestSpec], answers: Mapping[int, Ids | None]) -> dict[int, Ids]:
    """Token ids of the prompts as they were sent, by index: later turns hold the server's own answers.

    ``answers``: of the requests that were answered, by index; None where not all ids are known. A turn after one that
    was not answered was not sent.
    """
    sent: dict[int, Ids] = {}
    for turns in conversations(requests):
        before: RequestSpec | None = None
        for turn in turns:
            if turn.index not in answers:
                break
            ids = turn.prompt_token_ids or ()
            if before is not None and turn.new_tokens:
                ids = continued(turn, before, sent[before.index], answers[before.index])
            sent[turn.index] = ids
            before = turn
    return sent


@dataclass(frozen=True)
class _SeenRequest:
    """A request as the client saw it: when it was sent, and its ``chunks`` with tokens arrived, both [s].

    ``cached``: tokens of the prompt, ``tokens``: of the output, by the usage. ``answer``: its token ids; None where the
    server did not return all of them.
    """

    index: int
    ts: float
    chunks: np.ndarray
    cached: int
    tokens: int
    answer: Ids | None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> _SeenRequest:
        """Reads the ``COLUMNS`` of a row."""
        tokens, times, ids = _count(row["output_tokens"]), _listed(row["chunk_times"]), _listed(row["output_token_ids"])
        if not len(times) and row["first"] is not None and not math.isnan(row["first"]):
            times = np.array([row["first"]])
        answer = tuple(ids.tolist()) if len(ids) and len(ids) == tokens else None
        return cls(int(row["index"]), row["ts"], times.astype(float), _count(row["cached_tokens"]), tokens, answer)


def _listed(value: Any) -> np.ndarray:
    return np.empty(0) if value is None or isinstance(value, float) else np.asarray(value)


def _count(value: Any) -> int:
    return 0 if value is None or math.isnan(value) else int(value)


@dataclass(frozen=True)
class _Steps:
    """Numbers the steps from 1; 0 stands for the time before the load.

    ``began`` [s]: when a step had begun: the first token of the one before arrived. [steps + 1]

    ``decodes``: requests that got a token which is not their first. [steps + 1]
    ``first``, ``last``: the steps of each request's first and last token. [requests]
    """

    began: list[float]
    decodes: list[int]
    first: list[int]
    last: list[int]


def _steps(chunks: Sequence[np.ndarray], sent: Sequence[float]) -> _Steps:
    """Tells the steps apart by their chunks.

    Two chunks of one request are of two steps; so are a chunk and the first one of a request sent after it. Where other
    chunks arrived between the two, the steps are parted at the longest silence. A long silence always parts two steps:
    that of prompts only, or one whose requests all ended in it, has no chunks of the same requests around it.
    """
    times = np.concatenate([np.empty(0), *chunks])
    order = np.argsort(times, kind="stable")
    owners = np.repeat(np.arange(len(chunks)), [len(own) for own in chunks])[order].tolist()
    times, gaps = times[order].tolist(), np.diff(times[order], prepend=-math.inf).tolist()
    starts = [0]  # of each step: its first chunk
    latest = [-1] * len(chunks)  # chunk of each request
    for at, owner in enumerate(owners):
        before = latest[owner] if latest[owner] >= 0 else bisect_right(times, sent[owner], starts[-1], at) - 1
        if before >= starts[-1]:
            starts.append(max(range(before + 1, at + 1), key=gaps.__getitem__))
        elif at and gaps[at] >= _SILENCE_S:
            starts.append(at)
        latest[owner] = at
    step_of = np.repeat(np.arange(1, len(starts) + 1), np.diff([*starts, len(times)])).tolist()
    first, last = [0] * len(chunks), [0] * len(chunks)
    decodes = [0] * (len(starts) + 1)
    for step, owner in zip(step_of, owners, strict=True):
        decodes[step] += first[owner] > 0
        first[owner], last[owner] = first[owner] or step, step
    began = [-math.inf, -math.inf, *(times[start] for start in starts[:-1])]
    return _Steps(began[: len(starts) + 1], decodes, first, last)


def _prefills(
    steps: _Steps, sent: Sequence[float], tokens: Sequence[int], step_tokens: int | None
) -> list[dict[int, int]]:
    """The number of tokens of each prompt that each step computed, from that of its admission on. [requests]

    ``tokens``: how many of each prompt were computed. First come, first served: what the decodes leave of a step is
    spent on the prompts in order. The last part of a prompt is computed in the step of its first token. The prompt
    begins as early as that allows, but after the request was sent. It begins in the step that ran when it was sent only
    if it would otherwise not be done in time.
    """
    if step_tokens is None:
        return [{step: count} for step, count in zip(steps.first, tokens, strict=True)]
    left = [max(0, step_tokens - decodes) for decodes in steps.decodes]
    prefills: list[dict[int, int]] = [{}] * len(sent)
    latest = 1
    for request in sorted(range(len(sent)), key=lambda r: (steps.first[r], sent[r])):
        start = end = steps.first[request]
        need, before = tokens[request], 0  # before ``end``
        next_one = bisect_left(steps.began, sent[request])
        running = bisect_right(steps.began, sent[request]) - 1
        while start > max(latest, running):
            too_late = before + left[end] < need
            if not too_late and (start <= next_one or before + left[start - 1] >= need):
                break
            start -= 1
            before += left[start]
        while start < end and not left[start]:
            start += 1
        latest = start
        spent = prefills[request] = {}
        for step in range(start, end + 1):
            spent[step] = min(left[step], need)
            left[step] -= spent[step]
            need -= spent[step]
    return prefills
