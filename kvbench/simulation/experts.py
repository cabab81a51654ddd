"""How many experts of a layer the tokens of a step go through."""

from __future__ import annotations

EVENNESS = 2.0
"""How evenly tokens spread over experts. From LLMServingSim (docs/docs/simulator/moe-expert-routing.md), which counted
110,640 calls of Qwen3-30B-A3B's router: 0.87 of the experts that even routing reaches in the middle of the range, 0.94
of them in a full decode batch. 2.0 gives 0.87 at 16 tokens and 0.96 at 128."""


def active_experts(tokens: int, experts: int, per_token: int, evenness: float = EVENNESS) -> float:
    """Expected experts with at least one of ``tokens`` tokens, each of which goes to ``per_token`` of ``experts``.

    An expert's popularity is taken as gamma-distributed with the shape ``evenness``: infinite where all experts are
    alike, the smaller the more tokens go to few of them.
    """
    if tokens <= 1:
        return float(per_token)
    reached = experts * (1 - (1 + tokens * per_token / experts / evenness) ** -evenness)
    return min(float(experts), max(float(per_token), reached))
