"""The statistics of `kvbench quality`: intervals of 95 % over prompts, shares, the logits of two engines. Pure.

Tokens of one prompt are not independent: every interval takes prompts as its units.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    import torch

_RESAMPLES = 2000
_BLOCK_ELEMENTS = 2**19  # logits at once in float64, which stay in a core's cache


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float

    def named(self, name: str) -> dict[str, float]:
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def interval_of(columns: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> Interval:
    """Bootstrap interval (BCa, Efron 1987) of a statistic of sums over prompts, always the same for the same numbers.

    ``columns``: ``[prompts, k]``; ``statistic``: sums ``[..., k]`` -> ``[...]``. No width where all prompts are alike.
    """
    value = float(statistic(columns.sum(axis=0)))
    if len(columns) < 2:
        return Interval(value, value, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of resamples that are all alike
        found = stats.bootstrap(
            (np.arange(len(columns)),),
            lambda picked, axis=-1: statistic(columns[picked].sum(axis=-2)),
            n_resamples=_RESAMPLES,
            batch=_RESAMPLES,
            vectorized=True,
            random_state=np.random.default_rng(0),
        ).confidence_interval
    low, high = (value if np.isnan(end) else float(end) for end in found)
    return Interval(value, min(low, value), max(high, value))


def share_of(right: int, asked: int) -> dict[str, float]:
    """share, low and high by Wilson's interval, which has a width at 0 and 100 % too, where a bootstrap has none."""
    if not asked:
        return {}
    low, high = stats.binomtest(right, asked).proportion_ci(method="wilson")
    return {"share": right / asked, "low": float(low), "high": float(high)}


def counted(labels: Iterable[str], right: Sequence[bool]) -> list[dict[str, Any]]:
    """{of, asked, right} of each label, in the order in which they first come."""
    found: dict[str, dict[str, Any]] = {}
    for label, good in zip(labels, right, strict=True):
        row = found.setdefault(label, {"of": label, "asked": 0, "right": 0})
        row["asked"] += 1
        row["right"] += bool(good)
    return list(found.values())


@dataclass(frozen=True)
class Positions:
    """Of each position of one prompt, in order, what two engines predict of the token that follows. ``[N]`` each.

    ``kld``: KL(expected || got) [nats]; ``change``: of the probability of the token that follows;
    ``expected_loss`` and ``loss``: minus its log probability [nats], float64. ``same``: whether the likeliest token is
    the same; like ``kld`` empty where only the probability of the token that follows is known. ``decoded``: whether the
    position was computed alone, as decodes are, and not in a chunk of its prompt; ``own``: whether the token that
    follows is the prompt's own and no answer.
    """

    kld: np.ndarray
    change: np.ndarray
    expected_loss: np.ndarray
    loss: np.ndarray
    same: np.ndarray
    decoded: np.ndarray
    own: np.ndarray


def compare_logits(
    expected: torch.Tensor, got: torch.Tensor, following: torch.Tensor, decoded: np.ndarray, own: np.ndarray
) -> Positions:
    """Two engines' logits ``[N, vocab]`` of the same tokens, in float64; ``following [N]``: the next token of each.

    Negative KLDs of rounding (1e-17) become 0.
    """
    import torch

    parts: list[tuple[torch.Tensor, ...]] = []
    block = max(1, _BLOCK_ELEMENTS // expected.shape[-1])
    for one, other, token in zip(*(each.split(block) for each in (expected, got, following)), strict=True):
        log_p, log_q = one.double().log_softmax(-1), other.double().log_softmax(-1)
        p = log_p.exp()
        terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
        old, new = (log.gather(1, token[:, None])[:, 0] for log in (log_p, log_q))
        same = one.argmax(-1) == other.argmax(-1)
        parts.append((terms.sum(-1).clamp_min(0.0), new.exp() - old.exp(), -old, -new, same))
    return Positions(*(torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)), decoded, own)
