"""The figures of a configuration in quality.json, made of what one engine predicted and answered. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import stats

from kvbench.common.text import and_more
from kvbench.metrics.canaries import ALPHA, chance_of_so_many
from kvbench.quality.prompts import OF_TEXT, Answers, Prompt
from kvbench.runs.quality import (
    Bin,
    CanariesAtFullPool,
    ConfigurationFigures,
    FullPoolFigures,
    Greedy,
    Passkeys,
    PromptFigures,
    is_beyond,
)

_RESAMPLES = 2000
_NAMES = {
    "mean": ("mean KLD", "nats"), "p99": ("p99 of the KLD", "nats"), "rms_dp": ("RMS change in probability", "%"),
    "perplexity_change": ("change of the perplexity", "%"), "greedy.share": ("share of equal greedy answers", "%"),
    "passkey.share": ("share of right passkeys", "%"),
}  # fmt: skip
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
    **settings: Any,
) -> ConfigurationFigures:
    """The figures of one engine over all prompts together, and of each set.

    ``positions``: of the ``forced`` prompts in their order, or none; ``passkeys`` are asked for their answers alone;
    ``settings``: other fields.
    """

    def predictions(indices: Sequence[int], *, brief: bool) -> dict[str, float | None]:
        if not positions:
            return {}
        return _predictions([forced[i] for i in indices], [positions[i] for i in indices], brief)

    def of_set(indices: Sequence[int]) -> PromptFigures:
        greedy = _greedy([forced[i] for i in indices], answers, baseline)
        return PromptFigures(prompts=len(indices), **predictions(indices, brief=True), greedy=greedy)

    by_set = itertools.groupby(range(len(forced)), lambda i: forced[i].set_name)
    asked = [*(prompt for prompt in forced if prompt.depth is not None), *passkeys]
    return ConfigurationFigures(
        **settings,
        page_size=page_size,
        **predictions(range(len(forced)), brief=False),
        greedy=_greedy(forced, answers, baseline),
        passkey=_passkeys(asked, answers, decode, page_size),
        sets={name: of_set(list(indices)) for name, indices in by_set},
    )


def _predictions(prompts: Sequence[Prompt], positions: Sequence[Positions], brief: bool) -> dict[str, float | None]:
    """The figures of all positions alike; the perplexity of the prompts that are texts."""
    numbers: dict[str, float | None] = {"positions": sum(len(prompt.loss) for prompt in positions)}
    if len(positions[0].kld):
        numbers |= _divergence(positions, brief)
    texts = [p for prompt, p in zip(prompts, positions, strict=True) if prompt.set_name in OF_TEXT and p.own.any()]
    losses = np.array([[p.loss[p.own].sum(), p.expected_loss[p.own].sum(), p.own.sum()] for p in texts])
    if texts:
        total = losses.sum(axis=0)
        numbers["perplexity_change"] = float(_worse(total))
        if not brief:
            numbers["perplexity"] = float(np.exp(total[0] / total[2]))
            numbers |= interval_of("perplexity_change", losses, _worse)
    if brief:
        return numbers
    squares = np.array([[np.square(p.change).sum(), len(p.change)] for p in positions])
    return numbers | interval_of("rms_dp", squares, lambda total: np.sqrt(total[..., 0] / total[..., 1]))


def _divergence(positions: Sequence[Positions], brief: bool) -> dict[str, float | None]:
    kld, decoded, same = (np.concatenate([getattr(p, name) for p in positions]) for name in ("kld", "decoded", "same"))
    numbers = {"mean": float(kld.mean()), "p99": float(np.quantile(kld, 0.99)), "same_argmax": float(same.mean())}
    if brief:
        return numbers
    sums = np.array([[p.kld.sum(), len(p.kld)] for p in positions])
    return numbers | {
        **interval_of("mean", sums, lambda total: total[..., 0] / total[..., 1]),
        "p95": float(np.quantile(kld, 0.95)),
        "max": float(kld.max()),
        "prompt_mean": statistics.fmean(kld[~decoded]),
        "decode_mean": statistics.fmean(kld[decoded]) if decoded.any() else None,
    }


def _worse(total: np.ndarray) -> np.ndarray:
    """Relative change of the perplexity, from both losses and the tokens ``[..., 3]``."""
    return np.expm1((total[..., 0] - total[..., 1]) / total[..., 2])


def _greedy(prompts: Sequence[Prompt], answers: Answers, baseline: Answers) -> Greedy:
    """Whole answers that are equal, all turns of one prompt together, and where the others part."""
    parted = []  # the first token that differs, of each prompt whose answers do
    for prompt in prompts:
        sides = (itertools.chain(*side[prompt.prompt_id]) for side in (answers, baseline))
        differ = (at for at, (a, b) in enumerate(zip(*sides, strict=True)) if a != b)
        parted += itertools.islice(differ, 1)
    agree = len(prompts) - len(parted)
    first = statistics.median(parted) if parted else None
    return Greedy(answers=len(prompts), agree=agree, **share_of(agree, len(prompts)), first_divergence=first)


def _passkeys(
    prompts: Sequence[Prompt], answers: Answers, decode: Callable[[Sequence[int]], str], page_size: int
) -> Passkeys:
    right = [prompt.is_right(decode(answers[prompt.prompt_id][-1])) for prompt in prompts]

    def bins(label: Callable[[Prompt], tuple[int, str]]) -> tuple[Bin, ...]:
        labels = [label(prompt) for prompt in prompts]
        order = sorted(range(len(prompts)), key=lambda i: labels[i][0])
        return counted([labels[i][1] for i in order], [right[i] for i in order])

    return Passkeys(
        asked=len(prompts),
        right=sum(right),
        **share_of(sum(right), len(prompts)),
        by_depth=bins(_depth_label),
        by_length=bins(_length_label),
        by_residue=bins(lambda prompt: (prompt.length % page_size, str(prompt.length % page_size))),
    )


def _depth_label(prompt: Prompt) -> tuple[int, str]:
    assert prompt.depth is not None
    part = min(int(prompt.depth * _DEPTH_PARTS), _DEPTH_PARTS - 1)
    step = 100 // _DEPTH_PARTS
    return part, f"{part * step} to {(part + 1) * step} %"


def _length_label(prompt: Prompt) -> tuple[int, str]:
    """Returns the power of two of a prompt's length, and its range in words: `257 to 512`."""
    power = (prompt.length - 1).bit_length()
    return power, f"{2 ** (power - 1) + 1} to {2**power}"


def full_pool_figures(
    asked: int,
    wrong: Sequence[str],
    passkeys: Sequence[bool],
    counters: Mapping[str, int],
    problems: Sequence[str] = (),
    canaries: Sequence[tuple[str, bool]] = (),
    wrong_with_room: Collection[str] = (),
) -> FullPoolFigures:
    """The figures of ``asked`` answers, of which those of the prompts ``wrong`` differ; ``passkeys``: which are right.

    ``canaries``: the canary of each answer, and whether it is right; ``wrong_with_room``: on an idle engine.
    """
    names = {name for name, _ in canaries}
    return FullPoolFigures(
        answers=asked,
        agree=asked - len(wrong),
        passkey_asked=len(passkeys),
        passkey_right=sum(passkeys),
        wrong=tuple(dict.fromkeys(wrong))[:_MOST_NAMED],
        **counters,
        problems=tuple(problems)[:_MOST_NAMED],
        canaries=CanariesAtFullPool(
            answered=len(canaries),
            distinct=len(names),
            wrong=sum(not right for _, right in canaries),
            which=tuple(dict.fromkeys(name for name, right in canaries if not right))[:_MOST_NAMED],
            wrong_with_room=len(names & set(wrong_with_room)),
        ),
    )


def interval_of(name: str, columns: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> dict[str, float]:
    """A statistic of sums over prompts, with its bootstrap interval (BCa, Efron 1987) as ``_low`` and ``_high``.

    ``columns``: ``[prompts, k]``; ``statistic``: sums ``[..., k]`` -> ``[...]``. No width where all prompts are alike.
    """
    value = float(statistic(columns.sum(axis=0)))
    if len(columns) < 2:
        return {name: value, f"{name}_low": value, f"{name}_high": value}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of resamples that are all alike
        interval = stats.bootstrap(
            (np.arange(len(columns)),),
            lambda picked, axis=-1: statistic(columns[picked].sum(axis=-2)),
            n_resamples=_RESAMPLES,
            batch=_RESAMPLES,
            vectorized=True,
            random_state=np.random.default_rng(0),
        ).confidence_interval
    low, high = (value if np.isnan(end) else float(end) for end in interval)
    return {name: value, f"{name}_low": min(low, value), f"{name}_high": max(high, value)}


def share_of(right: int, asked: int) -> dict[str, float]:
    """Computes a share with its low and high end by Wilson's interval.

    It has a width at 0 and 100 % too, where a bootstrap has none."""
    if not asked:
        return {}
    low, high = stats.binomtest(right, asked).proportion_ci(method="wilson")
    return {"share": right / asked, "low": float(low), "high": float(high)}


def counted(labels: Iterable[str], right: Sequence[bool]) -> tuple[Bin, ...]:
    """A bin of each label, in the order in which they first come."""
    by_label: dict[str, list[bool]] = {}
    for label, good in zip(labels, right, strict=True):
        by_label.setdefault(label, []).append(bool(good))
    return tuple(Bin(of=label, asked=len(answers), right=sum(answers)) for label, answers in by_label.items())


@dataclass(frozen=True)
class Positions:
    """The predictions of two engines for the token after each position of one prompt, in order. ``[N]`` each.

    ``kld``: KL(expected || got) [nats]; ``change``: of the probability of the token that follows;
    ``expected_loss`` and ``loss``: minus its log probability [nats], float64. ``same``: whether the likeliest token is
    the same; like ``kld`` empty where only the probability of the token that follows is known. ``decoded``: whether the
    position was computed alone, as decodes are, and not in a chunk of its prompt; ``own``: whether the token that
    follows is the prompt's own and no answer; ``likeliest``: the second engine's likeliest token, empty where unknown.
    """

    kld: np.ndarray
    change: np.ndarray
    expected_loss: np.ndarray
    loss: np.ndarray
    same: np.ndarray
    decoded: np.ndarray
    own: np.ndarray
    likeliest: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


def outside_of(figures: ConfigurationFigures, limits: Mapping[str, float | None]) -> list[str]:
    """Writes a sentence for each limit that the figures of a configuration break, or cannot be held to."""
    sentences = []
    for name, limit in limits.items():
        what, unit = _NAMES[name]
        measured = figures.value(name)
        if measured is None or limit is None or not (math.isfinite(measured) and math.isfinite(limit)):
            sentences.append(f"its {what} or the control's is not a number")
            continue
        for value, where in ((measured, ""), (_at_full_pool(figures.full_pool, name), " at a full pool")):
            if value is not None and is_beyond(name, value, limit):
                shown, bound = (
                    f"{100 * number:.3g} %" if unit == "%" else f"{number:.3g} {unit}" for number in (value, limit)
                )
                sentences.append(f"its {what}{where} is {shown}, the limit is {bound}")
    problems = figures.full_pool.problems if figures.full_pool else ()
    sentences += [f"its pool does not add up when it is full: {problem}" for problem in problems]
    return sentences + list(_wrong_canaries(figures))


def _at_full_pool(pool: FullPoolFigures | None, name: str) -> float | None:
    """The share of right answers at a full pool that has the limit of the figure ``name``."""
    if pool is None:
        return None
    right, asked = {
        "greedy.share": (pool.agree, pool.answers),
        "passkey.share": (pool.passkey_right, pool.passkey_asked),
    }.get(name, (0, 0))
    return right / asked if asked else None


def _wrong_canaries(figures: ConfigurationFigures) -> Iterator[str]:
    """Writes on canaries: one wrong is an error in full precision, and where no KV dtype is told.

    A quantised KV may answer as many wrongly at a full pool as with room.
    """
    is_exact = figures.kv_cache_dtype in (None, "auto")
    alone, full = figures.canaries, figures.full_pool.canaries if figures.full_pool else None
    if is_exact and alone and (off := alone.asked - alone.right):
        yield f"{off} of its {alone.asked} canaries are answered wrongly, and none may be in full precision"
    if full and full.wrong:
        off, distinct = full.wrong_with_room, full.distinct
        chance = chance_of_so_many(full.wrong, full.answered, distinct, off, distinct)
        why = "none may be in full precision" if is_exact else f"with room {off} of {distinct} are (p = {chance:.2g})"
        if is_exact or chance < ALPHA:
            names = and_more(full.which, 3)
            wrong = f"{full.wrong} of its {full.answered} canaries are answered wrongly at a full pool ({names})"
            yield f"{wrong}, and {why}"
