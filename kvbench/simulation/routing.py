"""Which replica of a fleet gets a request.

- ``round-robin``: each in turn.
- ``least-loaded``: the one with the fewest sequences that run or wait; of several, the first.
- ``prefix-aware``: the one whose prefix cache holds most of the prompt, by the rule and the thresholds of SGLang's
  router (``cache_aware``, as documented for its gateway and for vLLM's router: cache_threshold 0.3,
  balance_abs_threshold 64, balance_rel_threshold 1.5). If the busiest replica has more than 64 requests more than the
  idlest, and more than 1.5 times as many, the least loaded one gets the request. Otherwise the replica with the
  longest cached prefix gets it if that is more than 0.3 of the prompt; of several the least loaded one. Otherwise the
  least loaded one. Two things differ: SGLang's router remembers which prompts it sent where, and this one knows what
  the caches hold, as a router does that is told of their changes (llm-d, NVIDIA Dynamo); and of a prompt that is in no
  cache, SGLang's goes to the replica with the smallest memory of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.sequence import Request
from engine.sequence import Sequence as Tokens
from kvbench.requests.request import RequestSpec
from kvbench.simulation.drive import Router
from kvbench.simulation.replica import Replica

CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD, BALANCE_REL_THRESHOLD = 64, 1.5  # requests; a factor


def round_robin() -> Router:
    turn = -1

    def choose(spec: RequestSpec, replicas: Sequence[Replica]) -> Replica:
        nonlocal turn
        turn = (turn + 1) % len(replicas)
        return replicas[turn]

    return choose


def least_loaded() -> Router:
    return lambda spec, replicas: min(replicas, key=lambda replica: replica.outstanding)


def prefix_aware() -> Router:
    def choose(spec: RequestSpec, replicas: Sequence[Replica]) -> Replica:
        loads = [replica.outstanding for replica in replicas]
        most, least = max(loads), min(loads)
        if most - least > BALANCE_ABS_THRESHOLD and most > BALANCE_REL_THRESHOLD * least:
            return replicas[loads.index(least)]
        cached = cached_tokens(spec, replicas)
        longest = max(cached)
        if longest <= CACHE_THRESHOLD * len(spec.prompt_token_ids or ()):
            return replicas[loads.index(least)]
        holders = [which for which, tokens in enumerate(cached) if tokens == longest]
        return replicas[min(holders, key=loads.__getitem__)]

    return choose


def cached_tokens(spec: RequestSpec, replicas: Sequence[Replica]) -> list[int]:
    """Tokens of the prompt that each replica's prefix cache holds; 0 without one."""
    prompt = Tokens.of(Request("", spec.prompt_token_ids or ()))
    caches = [getattr(replica.engine.kv, "prefix_cache", None) for replica in replicas]
    return [len(cache.match(prompt)) * cache.page_size if cache is not None else 0 for cache in caches]


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "prefix-aware": prefix_aware,
}
