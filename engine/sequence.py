"""The nouns of the engine: what a client asks for, and how far it has got."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Text stops are the server's business: the engine knows only ids."""

    max_tokens: int = 16
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens cannot be {self.max_tokens}: it is at least 1")
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature cannot be {self.temperature}: it lies between 0 (greedy) and 100")
        if self.top_k < 0:
            raise ValueError(f"top_k cannot be {self.top_k}: it is 0 (off) or a positive number of tokens")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p cannot be {self.top_p}: it lies in (0, 1]")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(frozen=True)
class Request:
    """One prompt to complete. ``arrival_time`` in seconds of the engine's clock."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    arrival_time: float = 0.0


@dataclass(frozen=True)
class TokenOutput:
    """What one step gave to one request. ``finish_reason`` is None while it goes on."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None  # stop | length | abort | error
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache served
    error: str | None = None


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """A request on its way through the engine.

    ``token_ids`` is prompt then output. ``num_computed`` tokens have their KV in the cache; prefill and decode are
    the same thing, a sequence catching up with its tokens. ``num_cached`` of them came from the prefix cache.
    """

    request: Request
    token_ids: list[int]
    status: Status = Status.WAITING
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    num_ever_computed: int = 0  # high-water mark of num_computed: what lies below it is computed again
    pages: list[int] = field(default_factory=list)  # physical page ids; contiguous: the reservation's base slot
    page_hashes: list[bytes] = field(default_factory=list)  # prefix-cache key of each full page, made once
    row: int = -1  # row of the executor's page table while admitted
    first_scheduled: float | None = None
    first_token: float | None = None

    @classmethod
    def of(cls, request: Request) -> Sequence:
        return cls(request, list(request.prompt_token_ids))

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    def finish_reason(self, eos_token_ids: frozenset[int], max_model_len: int) -> str | None:
        """Whether the newest token ends the sequence. The token itself stays part of the output, as in vLLM."""
        params, newest = self.request.params, self.token_ids[-1]
        if newest in params.stop_token_ids or (not params.ignore_eos and newest in eos_token_ids):
            return "stop"
        if self.num_output >= params.max_tokens or self.num_tokens >= max_model_len:
            return "length"
        return None
