"""From what was measured of one configuration to its figures in quality.json. Pure."""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from kvbench.quality.prompts import OF_TEXT, Answers, Prompt

_RESAMPLES = 2000
_DEPTH_PARTS = 5
_MOST_NAMED = 5


def figures(
    forced: Sequence[Prompt],
    passkeys: Sequence[Prompt],
    positions: Sequence[Positions],
    answers: Answers,
    baseline: Answers,
    decode: Callable[[Sequence[int]], str],
    page_size: int,
) -> dict[str, Any]:
    """The figures of one engine over all prompts together, and of each set.

    ``positions``: of the ``forced`` prompts, in their order; empty: unknown. ``passkeys`` are asked for their answers
    alone. ``answers``: of the engine to all of them.
    """
    by_set = {name: list(of) for name, of in itertools.groupby(range(len(forced)), lambda i: forced[i].set_name)}

    def predictions(of: Sequence[int], brief: bool = False) -> dict[str, Any]:
        if not positions:
            return {}
        return _predictions([forced[i] for i in of], [positions[i] for i in of], brief)

    sets = {
        name: {
            "prompts": len(of),
            **predictions(of, brief=True),
            "greedy": _greedy([forced[i] for i in of], answers, baseline),
        }
        for name, of in by_set.items()
    }
    return {
        **predictions(range(len(forced))),
        "greedy": _greedy(forced, answers, baseline),
        "passkey": _passkeys([*(p for p in forced if p.depth is not None), *passkeys], answers, decode, page_size),
        "sets": sets,
    }


def _predictions(prompts: Sequence[Prompt], positions: Sequence[Positions], brief: bool) -> dict[str, Any]:
    """KLD and change in probability, all positions alike; the perplexity of the prompts that are texts."""
    found: dict[str, Any] = {"positions": sum(len(each.loss) for each in positions)}
    if len(positions[0].kld):
        found |= _divergence(positions, brief)
    texts = [p for prompt, p in zip(prompts, positions, strict=True) if prompt.set_name in OF_TEXT and p.own.any()]
    losses = np.array([[p.loss[p.own].sum(), p.expected_loss[p.own].sum(), p.own.sum()] for p in texts])
    if texts:
        found |= {"perplexity_change": float(_worse(losses.sum(axis=0)))}
    if brief:
        return found
    if texts:
        total = losses.sum(axis=0)
        found |= {"perplexity": float(np.exp(total[0] / total[2]))}
        found |= interval_of(losses, _worse).named("perplexity_change")
    squares = np.array([[np.square(p.change).sum(), len(p.change)] for p in positions])
    return found | interval_of(squares, lambda total: np.sqrt(total[..., 0] / total[..., 1])).named("rms_dp")


def _divergence(positions: Sequence[Positions], brief: bool) -> dict[str, Any]:
    """What the distributions over the whole vocabulary tell."""
    kld, decoded, same = (np.concatenate([getattr(p, of) for p in positions]) for of in ("kld", "decoded", "same"))
    found = {
        "mean": float(kld.mean()),
        "p99": float(np.quantile(kld, 0.99)),
        "same_argmax": float(same.mean()),
    }
    if brief:
        return found
    sums = np.array([[p.kld.sum(), len(p.kld)] for p in positions])
    return found | {
        **interval_of(sums, lambda total: total[..., 0] / total[..., 1]).named("mean"),
        "p95": float(np.quantile(kld, 0.95)),
        "max": float(kld.max()),
        "prompt_mean": statistics.fmean(kld[~decoded]),
        "decode_mean": statistics.fmean(kld[decoded]) if decoded.any() else None,
    }


def _worse(total: np.ndarray) -> np.ndarray:
    """Relative change of the perplexity, from both losses and the tokens ``[..., 3]``."""
    return np.expm1((total[..., 0] - total[..., 1]) / total[..., 2])


def _greedy(prompts: Sequence[Prompt], answers: Answers, baseline: Answers) -> dict[str, Any]:
    """Whole answers that are equal, all turns of one prompt together, and where the others part."""
    parted = [_first_difference(answers[prompt.prompt_id], baseline[prompt.prompt_id]) for prompt in prompts]
    places = [place for place in parted if place is not None]
    agree = len(parted) - len(places)
    first = statistics.median(places) if places else None
    return {"answers": len(parted), "agree": agree, **share_of(agree, len(parted)), "first_divergence": first}


def _first_difference(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> int | None:
    pairs = zip(itertools.chain(*one), itertools.chain(*other), strict=True)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), None)


def _passkeys(
    prompts: Sequence[Prompt], answers: Answers, decode: Callable[[Sequence[int]], str], page_size: int
) -> dict[str, Any]:
    right = [each.is_right(decode(answers[each.prompt_id][-1])) for each in prompts]

    def by(label: Callable[[Prompt], tuple[int, str]]) -> list[dict[str, Any]]:
        labels = [label(each) for each in prompts]
        order = sorted(range(len(prompts)), key=lambda i: labels[i][0])
        return counted([labels[i][1] for i in order], [right[i] for i in order])

    return {
        "asked": len(prompts),
        "right": sum(right),
        **share_of(sum(right), len(prompts)),
        "by_depth": by(_depth_label),
        "by_length": by(_length_label),
        "by_residue": by(lambda each: (each.length % page_size, str(each.length % page_size))),
    }


def _depth_label(prompt: Prompt) -> tuple[int, str]:
    assert prompt.depth is not None
    part = min(int(prompt.depth * _DEPTH_PARTS), _DEPTH_PARTS - 1)
    step = 100 // _DEPTH_PARTS
    return part, f"{part * step} to {(part + 1) * step} %"


def _length_label(prompt: Prompt) -> tuple[int, str]:
    """Its power of two: 257 to 512."""
    power = (prompt.length - 1).bit_length()
    return power, f"{2 ** (power - 1) + 1} to {2**power}"


def full_pool_figures(
    asked: int,
    wrong: Sequence[str],
    passkeys: Sequence[bool],
    counters: Mapping[str, float],
    problems: Sequence[str] = (),
    canaries: Sequence[tuple[str, bool]] = (),
    wrong_with_room: Collection[str] = (),
) -> dict[str, Any]:
    """``asked``: answers that are known; ``wrong``: names of those that differ; ``passkeys``: which are right.

    ``problems``: what does not add up in the pool. ``canaries``: of each answer its canary and whether it is right;
    ``wrong_with_room``: those that are answered wrongly on an idle engine.
    """
    names = {name for name, _ in canaries}
    events = ("preemptions", "swapped_pages", "evicted_pages", "forks")
    return {
        "answers": asked,
        "agree": asked - len(wrong),
        "passkey_asked": len(passkeys),
        "passkey_right": sum(passkeys),
        "wrong": list(dict.fromkeys(wrong))[:_MOST_NAMED],
        **{name: int(counters[name]) for name in events},
        "problems": list(problems)[:_MOST_NAMED],
        "canaries": {
            "answered": len(canaries),
            "distinct": len(names),
            "wrong": sum(not right for _, right in canaries),
            "which": list(dict.fromkeys(name for name, right in canaries if not right))[:_MOST_NAMED],
            "wrong_with_room": len(names & set(wrong_with_room)),
        },
    }


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
