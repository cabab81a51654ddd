"""Sends the requests of one load to simulated replicas, in the order of their virtual clocks.

    arrivals ──► due, by time ──► router ──► replica: queue, steps ──► finished requests
                     ▲                                                      │
                     └── the next turn of a conversation, the next of a user ◄┘

The replica whose clock is least takes the next step, unless a request is due before: then the router chooses a replica
for it. A router sees each replica as it is after its present step. Nothing is kept of a request once it has ended, so
memory grows with the requests that run and wait, and not with the load.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvbench.requests.request import RequestSpec, continued
from kvbench.simulation.cost.cost_model import StepTimer
from kvbench.simulation.cost.machine import Machine, SettingsByName
from kvbench_engine.config import EngineConfig
from kvbench_engine.engine import Engine
from kvbench_engine.execution.simulated_executor import SimulatedExecutor, VirtualClock
from kvbench_engine.kv.budget import KVCapacity
from kvbench_engine.kv.layouts import make_kv_manager
from kvbench_engine.scheduling.scheduler import QueueFull
from kvbench_engine.sequence import Request, SamplingParams, TokenOutput
from kvbench_engine.sequence import Sequence as Tokens


class Replica:
    """An engine of a fleet.

    number: among its replicas
    step_time: its cost model
    clock.now: the end of its last step, which began at ``step_began`` [s]
    """

    def __init__(
        self, config: EngineConfig, capacity: KVCapacity, vocab_size: int, step_time: StepTimer, number: int = 0
    ) -> None:
        self.number, self.step_time = number, step_time
        self.clock, self.step_began = VirtualClock(), 0.0
        pipelined = bool(config.async_scheduling)
        self._executor = SimulatedExecutor(vocab_size, step_time, self.clock, pipelined=pipelined)
        config = replace(config, async_scheduling=pipelined)
        self.engine = Engine(config, self._executor, make_kv_manager(config, capacity), self.clock)

    @classmethod
    def on(cls, machine: Machine, settings: SettingsByName, number: int = 0) -> Replica:
        """Makes an idle engine on ``machine``. Raises UsageError as ``Machine.settle`` does."""
        config, capacity = machine.settle(settings)
        return cls(config, capacity, machine.vocab_size, machine.step_timer(config), number)

    def rewind(self) -> None:
        """Sets the clock of an idle engine back to 0; its prefix cache stays."""
        assert not self.busy
        self._executor.rewind()
        self.step_began = 0.0

    @property
    def busy(self) -> bool:
        return self.engine.has_work()

    def add(self, request_id: str, spec: RequestSpec, at: float) -> Tokens:
        """Queues a request that arrives at ``at`` [s]. Raises ValueError where it can never fit, or the queue is full.

        An idle replica's clock goes on to ``at``; a busy one takes it when its present step ends.
        """
        if not self.busy:
            self.clock.now = max(self.clock.now, at)
        params = SamplingParams(spec.max_tokens, temperature=0.0, ignore_eos=True, **spec.answers)
        ids = spec.prompt_token_ids
        assert ids is not None, "a simulated engine knows tokens only"
        return self.engine.add_request(Request(request_id, ids, params, at, spec.priority))

    def step(self) -> list[TokenOutput]:
        """Computes one step; its tokens are there at ``clock.now``."""
        self.step_began = self.clock.now
        return self.engine.step()

    @property
    def seconds_by_class(self) -> Mapping[str, float]:
        """The seconds of all steps so far by class of operator, where the cost model tells them."""
        return getattr(self.step_time, "seconds", {})

    @property
    def cost_notes(self) -> list[str]:
        """Returns what a reader must know of the step times, such as how far they lie beyond a measured table."""
        return getattr(self.step_time, "notes", list)()

    @property
    def outstanding(self) -> int:
        """The number of sequences that run or wait."""
        scheduler = self.engine.scheduler
        return len(scheduler.running) + scheduler.num_waiting + scheduler.num_parked


TURNAROUND_S = 1e-3
"""The time from a user's last token to its next request at the engine, over HTTP on one machine: the step after the one
that ended an answer has begun when the next request comes, as in a real engine."""

Router = Callable[[RequestSpec, Sequence[Replica]], Replica]
"""Chooses a replica for a request."""


@dataclass(slots=True)
class EndedRequest:
    """A request that has ended.

    due, sent: when it was to be sent, and when it was [s]
    times: when its chunks came [s]; sequences: which of its sequences each belongs to; empty if it has one
    tokens: of each chunk; empty if each has one, as all do that are not chosen at the request's end
    cached: tokens of its prompt that the prefix cache served
    reason: ``length``, or why it failed: ``refused`` with ``error`` and the ``status`` that a server answers it with
    unsent: turns of its conversation that were not sent since it failed
    """

    spec: RequestSpec
    due: float
    sent: float
    replica: int
    times: list[float] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    cached: int = 0
    reason: str | None = None
    error: str | None = None
    status: int = 200
    unsent: int = 0

    @property
    def end(self) -> float:
        """The time at which its last chunk came, or it was refused [s]."""
        return self.times[-1] if self.times else self.sent

    @property
    def output_tokens(self) -> int:
        return sum(self.tokens) if self.tokens else len(self.times)


@dataclass(slots=True)
class _ConversationInPlay:
    """A list of requests that follow one another; ``turn``: index of the next; ``prompt``: what was sent last."""

    turns: Sequence[RequestSpec]
    turn: int = 0
    prompt: tuple[int, ...] = ()


@dataclass(slots=True)
class _RequestInFlight:
    ended: EndedRequest
    conversation: _ConversationInPlay
    left: int  # of its sequences
    plain: bool  # one sequence, whose tokens are not needed afterwards


def prime(replica: Replica, prefixes: Iterable[tuple[int, ...]]) -> None:
    """Computes the prompts one after another, so that the prefix cache holds them, and sets the clock back to 0."""
    turns = [[RequestSpec(i, "prefix", ids, None, 1)] for i, ids in enumerate(prefixes)]
    Drive([replica], turns, lambda ended: None, users=1).run()
    replica.rewind()


class Drive:
    """A load on ``replicas``.

    conversations: lists of requests that follow one another, in the order of their arrivals; read as needed
    users: a closed loop of so many, each with one request at a time; None: requests are sent at their ``arrival_s``
    most_in_flight: requests that the client has open at once in an open loop; None: no limit
    turnaround_s: from the end of a user's answer to its next request
    on_end: gets each request that has ended
    on_step: called after each step with its replica and the tokens that it gave
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        conversations: Iterable[Sequence[RequestSpec]],
        on_end: Callable[[EndedRequest], None],
        *,
        users: int | None = None,
        most_in_flight: int | None = None,
        turnaround_s: float = 0.0,
        router: Router = lambda spec, replicas: replicas[0],
        on_step: Callable[[Replica, Sequence[TokenOutput]], None] | None = None,
    ) -> None:
        self._replicas, self._on_end, self._router, self._on_step = replicas, on_end, router, on_step
        self._source: Iterator[Sequence[RequestSpec]] = iter(conversations)
        self._users, self._turnaround_s = users, turnaround_s
        self._most_in_flight = most_in_flight
        self._due: list[tuple[float, int, _ConversationInPlay]] = []  # a heap
        self._held: deque[tuple[float, _ConversationInPlay]] = deque()  # due, but the client has too many open
        self._in_flight: dict[str, _RequestInFlight] = {}
        self._numbers = itertools.count(1)

    def run(self) -> None:
        """Runs until every request has ended."""
        for _ in range(self._users or 1):
            self._plan_next(0.0)
        while True:
            busy = (replica for replica in self._replicas if replica.busy)
            first = min(busy, key=lambda replica: replica.clock.now, default=None)
            if self._due and (first is None or self._due[0][0] <= first.clock.now):
                due, _, conversation = heapq.heappop(self._due)
                if self._users is None and conversation.turn == 0:
                    self._plan_next(due)
                if self._is_full():
                    self._held.append((due, conversation))
                else:
                    self._send(due, due, conversation)
            elif first is not None:
                outputs = first.step()
                if self._on_step is not None:
                    self._on_step(first, outputs)
                for output in outputs:
                    self._take(first, output)
            else:
                return

    def _plan(self, due: float, conversation: _ConversationInPlay) -> None:
        heapq.heappush(self._due, (due, next(self._numbers), conversation))  # of two at once the first planned

    def _plan_next(self, now: float) -> None:
        """Plans the next conversation: of a user that is free ``now``, or at its arrival."""
        if (turns := next(self._source, None)) is not None:
            self._plan(turns[0].arrival_s or 0.0 if self._users is None else now, _ConversationInPlay(turns))

    def _is_full(self) -> bool:
        """Tests whether the client has as many requests open as it may."""
        return self._most_in_flight is not None and len(self._in_flight) >= self._most_in_flight

    def _send(self, due: float, now: float, conversation: _ConversationInPlay) -> None:
        spec = drawn = conversation.turns[conversation.turn]
        if spec.new_tokens:  # the conversation as it went
            spec = replace(spec, prompt_token_ids=conversation.prompt)
        replica = self._router(spec, self._replicas)
        ended = EndedRequest(drawn, due, now, replica.number)
        try:
            replica.add(request_id := str(next(self._numbers)), spec, now)
        except ValueError as error:
            ended.reason, ended.error = "refused", str(error)
            ended.status = 429 if isinstance(error, QueueFull) else 400
            self._end(ended, conversation, now)
            return
        conversation.prompt = spec.prompt_token_ids or ()
        plain = spec.n == 1 and spec.session is None and not spec.chooses
        self._in_flight[request_id] = _RequestInFlight(ended, conversation, spec.n, plain)

    def _take(self, replica: Replica, output: TokenOutput) -> None:
        request = self._in_flight[output.request_id]
        ended, now = request.ended, replica.clock.now
        ended.times.append(now)
        if not request.plain:
            if ended.spec.n > 1:
                ended.sequences.append(output.index)
            if ended.spec.chooses:
                ended.tokens.append(len(output.token_ids))
            if ended.spec.session is not None and output.index == 0:
                ended.token_ids += output.token_ids
        if output.finish_reason is None:
            return
        request.left -= 1
        ended.cached = max(ended.cached, output.num_cached_tokens)
        if not request.left:
            ended.reason = output.finish_reason
            del self._in_flight[output.request_id]
            self._end(ended, request.conversation, now)

    def _end(self, ended: EndedRequest, conversation: _ConversationInPlay, now: float) -> None:
        """Hands the request on, and plans what follows it: its next turn, a held request, its user's next one."""
        conversation.turn += 1
        if ended.error is not None:
            ended.unsent = len(conversation.turns) - conversation.turn
        self._on_end(ended)
        if ended.error is None and conversation.turn < len(conversation.turns):
            turn = conversation.turns[conversation.turn]
            if turn.new_tokens:
                answer = tuple(ended.token_ids)
                conversation.prompt = continued(turn, ended.spec, conversation.prompt, answer)
            self._plan(now + turn.think_s, conversation)
        elif self._users is not None:
            self._plan_next(now + self._turnaround_s)
        if self._held and not self._is_full():
            due, held = self._held.popleft()
            self._send(due, now, held)


CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD, BALANCE_REL_THRESHOLD = 64, 1.5  # requests; a factor
"""The rule and thresholds of SGLang's router (``cache_aware``, as documented for its gateway and for vLLM's router:
cache_threshold, balance_abs_threshold, balance_rel_threshold)."""


def round_robin() -> Router:
    """Returns the router that takes each replica in turn."""
    turns = itertools.count()
    return lambda spec, replicas: replicas[next(turns) % len(replicas)]


def least_loaded(spec: RequestSpec, replicas: Sequence[Replica]) -> Replica:
    """Chooses the replica with the fewest sequences that run or wait; of several, the first."""
    return min(replicas, key=lambda replica: replica.outstanding)


def prefix_aware(spec: RequestSpec, replicas: Sequence[Replica]) -> Replica:
    """Chooses the replica whose prefix cache holds most of the prompt, unless the load is too uneven.

    If the busiest replica has more than 64 requests more than the idlest, and more than 1.5 times as many, the least
    loaded one gets the request. Otherwise the replica with the longest cached prefix gets it if that is more than 0.3
    of the prompt; of several the least loaded one. Otherwise the least loaded one. Two things differ from SGLang's: it
    remembers which prompts it sent where, and this one knows what the caches hold, as a router does that is told of
    their changes (llm-d, NVIDIA Dynamo); and of a prompt that is in no cache, SGLang's goes to the replica with the
    smallest memory of prompts.
    """
    loads = [replica.outstanding for replica in replicas]
    most, least = max(loads), min(loads)
    uneven = most - least > BALANCE_ABS_THRESHOLD and most > BALANCE_REL_THRESHOLD * least
    cached = [0] if uneven else cached_tokens(spec, replicas)
    longest = max(cached)
    if longest <= CACHE_THRESHOLD * len(spec.prompt_token_ids or ()):
        return replicas[loads.index(least)]
    holders = [number for number, tokens in enumerate(cached) if tokens == longest]
    return replicas[min(holders, key=loads.__getitem__)]


def cached_tokens(spec: RequestSpec, replicas: Sequence[Replica]) -> list[int]:
    """Counts the tokens of the prompt that each replica's prefix cache holds; 0 without one."""
    prompt = Tokens.of(Request("", spec.prompt_token_ids or ()))
    caches = [getattr(replica.engine.kv, "prefix_cache", None) for replica in replicas]
    return [len(cache.match(prompt)) * cache.page_size if cache is not None else 0 for cache in caches]


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": round_robin,
    "least-loaded": lambda: least_loaded,
    "prefix-aware": lambda: prefix_aware,
}
