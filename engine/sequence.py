"""Requests, their sequences and outputs."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

PENDING = -1
"""In ``Sequence.token_ids``: a token that is drawn on the device and whose id has not been read yet."""


@dataclass(frozen=True)
class SamplingParams:
    """The settings by which tokens are chosen and a request ends. Stop strings are the server's task.

    ``n`` sequences are returned. They are forks of one prompt: ``best_of`` of them run (None: n) and the n with the
    best mean log probability a token are returned. ``beam_width`` searches beams instead and returns the n best;
    ``length_penalty`` and ``early_stopping`` are as in transformers.
    """

    max_tokens: int = 16
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False  # True | False | "never"

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens cannot be {self.max_tokens}: it is at least 1")
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature cannot be {self.temperature}: it lies between 0 (greedy) and 100")
        if self.top_k < 0:
            raise ValueError(f"top_k cannot be {self.top_k}: it is 0 (off) or a positive number of tokens")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p cannot be {self.top_p}: it lies in (0, 1]")
        self._check_width()

    def _check_width(self) -> None:
        if self.n < 1:
            raise ValueError(f"n cannot be {self.n}: it is at least 1")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping cannot be {self.early_stopping!r}: it is true, false or 'never'")
        if self.beam_width is not None and self.best_of is not None:
            raise ValueError("best_of cannot go with beam search: a beam search keeps the best by itself; leave it out")
        for name, width in (("best_of", self.best_of), ("beam_width", self.beam_width)):
            if width is not None and width < self.n:
                raise ValueError(f"{name} {width} is less than n {self.n}: raise {name} or lower n")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def width(self) -> int:
        """Sequences that run side by side for one request."""
        return self.beam_width or self.best_of or self.n

    @property
    def chooses(self) -> bool:
        """Tests whether only the best of several sequences are returned, at the end."""
        return self.beam_width is not None or self.width > self.n


@dataclass(frozen=True)
class Request:
    """One prompt to complete. ``arrival_time`` in seconds of the engine's clock.

    ``priority``: lower goes first, under the priority policy. ``cache_salt``: prefix-cache pages are shared only
    between requests of the same salt, so that one client cannot learn from its TTFT what another has sent.
    ``kv_facts``: the last output of each sequence tells where its KV was.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    kv_facts: bool = False

    def __post_init__(self) -> None:
        if self.priority < 0:
            raise ValueError(f"priority cannot be {self.priority}: it is 0 (first) or more")


class Drawn(NamedTuple):
    """The tokens that the executor drew for one sequence.

    One token, or one for each of its forks; for a beam its best continuations, best first. No token where the logits
    hold NaN or infinity, or none of them is finite: the request fails. ``logprobs``: natural logarithms, where the
    request needs them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


class KVFacts(NamedTuple):
    """The place of a sequence's KV, to find out why its tokens are wrong. Steps are numbered from 1.

    ``pages``: physical pages in their order when it ended, empty if it had left the device by then, of layers with
    windows those of the first group, -1 for what was freed; contiguous: the first slot of its reservation.
    ``page_size``: tokens; contiguous: of a reservation of max_model_len. ``swapped_pages``: pages that were moved to
    the host or were there already. ``forked``: it has siblings.
    """

    first_step: int
    last_step: int
    pages: tuple[int, ...]
    page_size: int
    cached_tokens: int
    preemptions: int
    recomputed_tokens: int
    swapped_pages: int
    forked: bool


class TokenOutput(NamedTuple):
    """New tokens of one of a request's ``n`` sequences. ``finish_reason`` is None until the last output."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None  # stop | length | abort | error
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache served
    error: str | None = None
    index: int = 0  # 0 .. n-1
    num_discarded: int = 0  # best_of: tokens of all candidates that are not returned, in the output of index 0
    kv_facts: KVFacts | None = None  # in the last output, where the request asks for it


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """One sequence of a request.

    ``token_ids`` is prompt then output. ``num_computed`` tokens have their KV in the cache; prefill and decode are
    the same: a sequence catches up with its tokens. ``num_cached`` of them came from the prefix cache.
    A request starts as one sequence; its siblings are forked when the prompt has been computed.

    While a step is in flight, the last ``num_pending`` tokens are ``PENDING``: their KV may be computed already, but
    only the device knows their ids. At most one is pending when a step is planned.
    """

    request: Request
    token_ids: list[int]
    num_prompt: int
    status: Status = Status.WAITING
    index: int = 0  # among the sequences of its request
    arrival: int = -1  # the scheduler's running number
    max_length: int = 0  # tokens of prompt and output at which it ends; set when it is queued
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    num_ever_computed: int = 0  # most computed before a preemption or its fork: below it, tokens are recomputed
    num_recomputed: int = 0  # tokens
    num_swapped_pages: int = 0  # to the host, over all preemptions; contiguous: reservations
    first_step: int = 0  # number of the step that computed its first tokens; 0: none has
    pending_forks: int = 0  # siblings to come once the prompt is computed
    num_candidates: int = 0  # beam: continuations wanted from each step; 0: not a beam
    silent: bool = False  # its tokens are not returned before the request's end
    num_pending: int = 0  # tokens at the end whose ids are not read yet
    blocked: bool = False  # computes nothing: a beam waiting for its siblings, or the last token is being drawn
    logprob: float = 0.0  # sum over the output, where the request needs it
    # physical page ids, those of all groups of layers for each page of tokens, -1 where it left the window;
    # contiguous: the reservation's base slot
    pages: list[int] = field(default_factory=list)
    trimmed_at: int = 0  # paged: tokens that were computed when pages outside the windows were freed last
    promised_pages: int = 0  # paged: pages that it was admitted for and has not taken
    host_pages: list[int] = field(default_factory=list)  # swapped out: its pages on the host, as in pages
    host_tokens: int = 0  # tokens whose KV is on the host
    prefix_node: int = 0  # the prefix cache's number of the last of its pages that was found there; 0: none
    prefix_depth: int = 0  # pages up to and including it
    row: int = -1  # row of the executor's page table while admitted
    first_scheduled: float | None = None
    first_token: float | None = None

    @classmethod
    def of(cls, request: Request) -> Sequence:
        prompt = list(request.prompt_token_ids)
        params = request.params
        return cls(request, prompt, len(prompt), pending_forks=params.width - 1, silent=params.chooses)

    def fork(self, index: int) -> Sequence:
        """A sibling with the same tokens. The KV manager forks the KV."""
        return Sequence(
            self.request,
            list(self.token_ids),
            self.num_prompt,
            index=index,
            arrival=self.arrival,
            max_length=self.max_length,
            num_cached=self.num_cached,
            num_ever_computed=max(self.num_ever_computed, self.num_computed),
            num_candidates=self.num_candidates,
            silent=self.silent,
            logprob=self.logprob,
            prefix_node=self.prefix_node,
            prefix_depth=self.prefix_depth,
            first_step=self.first_step,
            first_scheduled=self.first_scheduled,
            first_token=self.first_token,
        )

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_known(self) -> int:
        """Tokens whose ids are known: all but the pending ones at the end."""
        return len(self.token_ids) - self.num_pending

    @property
    def ending(self) -> bool:
        """Tests whether its last token is being drawn; nothing more is computed."""
        return self.blocked and not self.num_candidates

    def kv_facts(self, last_step: int, page_size: int, groups: int = 1) -> KVFacts | None:
        """The place of its KV, for a request that asks for it; call before the KV is freed."""
        if not self.request.kv_facts:
            return None
        counts = (self.num_cached, self.num_preemptions, self.num_recomputed, self.num_swapped_pages)
        forked = self.request.params.width > 1
        return KVFacts(self.first_step, last_step, tuple(self.pages[::groups]), page_size, *counts, forked)

    def expect_token(self) -> None:
        """Append the token that is being drawn as pending, or block the sequence if it is the last one."""
        if len(self.token_ids) + 1 < self.max_length:
            self.token_ids.append(PENDING)
            self.num_pending += 1
        else:
            self.blocked = True

    def take_token(self, token: int) -> None:
        """Store the id of the first pending token."""
        self.token_ids[-self.num_pending] = token
        self.num_pending -= 1

    def drop_pending(self) -> None:
        """Remove the pending tokens: the sequence ended before them."""
        if self.num_pending:
            del self.token_ids[-self.num_pending :]
            self.num_pending = 0

    def finish_reason(self, eos_token_ids: frozenset[int]) -> str | None:
        """The reason for which the last known token ends the sequence, or None. The token stays part of the output, as
        in vLLM.
        """
        length = len(self.token_ids) - self.num_pending
        newest, params = self.token_ids[length - 1], self.request.params
        if newest in params.stop_token_ids or (newest in eos_token_ids and not params.ignore_eos):
            return "stop"
        return "length" if length >= self.max_length else None
