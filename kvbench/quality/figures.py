"""From what was measured of one configuration to its figures in quality.json. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbench.quality.free import Answers
from kvbench.quality.prompts import OF_TEXT, Prompt
from kvbench.quality.statistics import Positions, counted, interval_of, share_of

_DEPTH_PARTS = 5
_MOST_NAMED = 5


@dataclass(frozen=True)
class Measured:
    """What one engine predicted and answered. ``positions``: of the forced prompts, in their order; empty: unknown."""

    positions: Sequence[Positions]
    answers: Answers


def figures(
    forced: Sequence[Prompt],
    passkeys: Sequence[Prompt],
    measured: Measured,
    baseline: Answers,
    decode: Callable[[Sequence[int]], str],
    page_size: int,
) -> dict[str, Any]:
    """Of all prompts together and of each set. ``passkeys`` are asked for their answers alone."""
    by_set = {name: list(of) for name, of in itertools.groupby(range(len(forced)), lambda i: forced[i].set_name)}

    def predictions(of: Sequence[int], brief: bool = False) -> dict[str, Any]:
        if not measured.positions:
            return {}
        return _predictions([forced[i] for i in of], [measured.positions[i] for i in of], brief)

    sets = {
        name: {
            "prompts": len(of),
            **predictions(of, brief=True),
            "greedy": _greedy([forced[i] for i in of], measured.answers, baseline),
        }
        for name, of in by_set.items()
    }
    return {
        **predictions(range(len(forced))),
        "greedy": _greedy(forced, measured.answers, baseline),
        "passkey": _passkeys(
            [*(p for p in forced if p.depth is not None), *passkeys], measured.answers, decode, page_size
        ),
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
