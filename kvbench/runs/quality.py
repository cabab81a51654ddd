"""quality.json: what each configuration changes in the model's answers, as `kvbench quality` measured it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.files import read_json
from kvbench.common.text import and_more
from kvbench.metrics.canaries import ALPHA, chance_of_so_many

QUALITY, FORMAT = "quality.json", "kvbench-quality/2"
_VERSIONS = ("kvbench", "torch", "transformers")

MARGINS = {
    # llama.cpp's table of quantised weights of Llama 3 8B (tools/perplexity/README.md) has q8_0, which passes for free
    # of loss, at a KLD of 0.0014 and an RMS change of 1.2 %, and q6_K at 0.0057 and 2.3 %: the margins lie between.
    "mean": 0.002,
    "rms_dp": 0.015,
    # Ten times the mean's: beyond it with a mean within, few positions are wrong and not all of them a little.
    "p99": 0.02,
    # q6_K of the same table costs 0.5 %, q5_K_S 1.8 %.
    "perplexity_change": 0.01,
    # One near tie decides the rest of an answer. kvbench-tiny in bfloat16 gives 73 % (64 to 81) of float32's answers to
    # these prompts, and nobody calls bfloat16 a loss. INT8 gives as many; a margin at that figure would be a coin toss.
    "greedy.share": -0.3,
    # Answers of a few tokens, each clear of a tie where the model knows them: about one of 64 more may be wrong.
    "passkey.share": -0.02,
}
"""By how much a figure may be worse than the control's worse end: what rounding alone does, and as much as is cheap."""
_WORSE_END = {"greedy.share": "greedy.low", "passkey.share": "passkey.low", "p99": "p99"}  # else <name>_high
_NAMES = {
    "mean": ("mean KLD", "nats"), "p99": ("p99 of the KLD", "nats"), "rms_dp": ("RMS change in probability", "%"),
    "perplexity_change": ("change of the perplexity", "%"), "greedy.share": ("share of equal greedy answers", "%"),
    "passkey.share": ("share of right passkeys", "%"),
}  # fmt: skip
# The same limit at a full pool: figure -> its count and the count of all.
_AT_FULL_POOL = {"greedy.share": ("agree", "answers"), "passkey.share": ("passkey_right", "passkey_asked")}


@dataclass(frozen=True)
class QualityResult:
    """What `kvbench quality` measured of each configuration of a run, against the contiguous full-precision baseline.

    ``model``: what it was measured with; ``beside``: that is not the run's own model (whose weights are random).
    ``control``: the A/A arm, the baseline against itself with other batch-mates, chunks and order: what rounding does.
    ``limits``: name of a figure -> the worst value within the limits, which is the control's and a margin.
    ``configurations``: configuration id -> figures (``control`` has the same), each interval of 95 %:

    kv_cache_dtype, layout, page_size
    positions; mean, mean_low, mean_high, p95, p99, max, prompt_mean, decode_mean: KL divergence of a token [nats]
    same_argmax: share of the positions whose likeliest token is the same
    rms_dp, rms_dp_low, rms_dp_high: root mean square of the change in probability of the token that follows
    perplexity; perplexity_change, perplexity_change_low, perplexity_change_high: relative, 0.01 is 1 % worse
    greedy: {answers, agree, share, low, high, first_divergence}: whole answers that are equal; median position [tokens]
    passkey: {asked, right, share, low, high, by_depth, by_length, by_residue}: exact answers; lists of
        {of, asked, right}, ``of`` a text such as "0 to 20 %", "257 to 512", "3" (prompt length mod page size)
    full_pool: {answers, agree, passkey_asked, passkey_right, wrong, preemptions, swapped_pages, evicted_pages,
        forks, problems, canaries}: the same prompts again while the pool is too small; ``wrong``: names of the first
        wrong answers; ``problems``: what does not add up in the pool; ``canaries``: {answered, distinct, wrong, which,
        wrong_with_room}, of answers to the canary file's, which come on top of the prompts; ``which``: names of the
        first wrong ones; ``wrong_with_room``: how many of the distinct ones are wrong on an idle engine
    canaries: {asked, right}: of the model's canary file, alone on an idle engine; absent without one
    sets: name of a prompt set -> {prompts, positions, mean, p99, same_argmax, perplexity_change, greedy}
    outside: sentences, one for each limit that it breaks; empty within all

    Of a running server (`kvbench quality --url`) ``workload`` is its URL and ``server`` the one configuration, without
    kv_cache_dtype, layout, KLD and full_pool, and without perplexity and rms_dp where it tells no probabilities.
    """

    workload: str
    model: str
    beside: bool
    weights: str  # of which model folder, or random ones of which seed; all of them if there are several
    configurations: Mapping[str, Mapping[str, Any]]
    control: Mapping[str, Any]
    limits: Mapping[str, float]
    weights_fingerprint: str = ""  # as the built-in server tells it; empty for several sets of weights
    git: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""  # of random weights, whose quality says little
    facts: Mapping[str, Any] = field(default_factory=dict)  # device, dtype, prompts, time

    def differs_from(self, manifest: Mapping[str, Any]) -> list[str]:
        """How commit, versions and weights differ from those in a run's manifest, one phrase each."""
        there = None if self.beside else (manifest.get("model") or {}).get("weights_fingerprint")
        weights = _different({"set of weights": self.weights_fingerprint or None}, {"set of weights": there})
        return code_differences(self.git, self.versions, manifest) + weights

    @property
    def random_weights(self) -> bool:
        """Whether some of the weights were random: such a KLD says little about quality, and ``note`` says so."""
        return bool(self.note)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **self.__dict__}


def figure(figures: Mapping[str, Any], name: str) -> float | None:
    """One of a configuration's figures, such as ``mean`` or ``passkey.share``; None where it was not measured."""
    outer, _, inner = name.partition(".")
    value = figures.get(outer)
    value = value.get(inner) if inner and isinstance(value, Mapping) else value
    return float(value) if isinstance(value, int | float) else None


def limits_of(control: Mapping[str, Any]) -> dict[str, float]:
    """Of each figure the worst value within the limits, by the A/A arm's figures."""
    ends = {name: figure(control, _WORSE_END.get(name, f"{name}_high")) for name in MARGINS}
    return {name: end + MARGINS[name] for name, end in ends.items() if end is not None}


def is_beyond(name: str, value: float, limit: float) -> bool:
    """Whether a figure breaks its limit, which is the least value of a share and the largest of all others."""
    return value < limit if MARGINS[name] < 0 else value > limit


def outside_of(figures: Mapping[str, Any], limits: Mapping[str, float]) -> list[str]:
    """A sentence for each limit that the figures of a configuration break, or cannot be held to."""
    found = []
    for name, limit in limits.items():
        what, unit = _NAMES[name]
        measured = figure(figures, name)
        if measured is None or not (math.isfinite(measured) and math.isfinite(limit)):
            found.append(f"its {what} or the control's is not a number")
            continue
        at_full_pool = figures.get("full_pool") or {}
        right, asked = (at_full_pool.get(key) for key in _AT_FULL_POOL.get(name, ("", "")))
        pool = right / asked if asked else None
        for value, where in ((measured, ""), (pool, " at a full pool")):
            if value is not None and is_beyond(name, value, limit):
                value, bound = (
                    f"{100 * each:.3g} %" if unit == "%" else f"{each:.3g} {unit}" for each in (value, limit)
                )
                found.append(f"its {what}{where} is {value}, the limit is {bound}")
    problems = (figures.get("full_pool") or {}).get("problems") or ()
    found += [f"its pool does not add up when it is full: {each}" for each in problems]
    return found + list(_wrong_canaries(figures))


def _wrong_canaries(figures: Mapping[str, Any]) -> Iterator[str]:
    """In full precision one is an error; a quantised KV may answer as many wrongly at a full pool as with room.

    A server whose KV dtype nobody told counts as one in full precision.
    """
    exact = figures.get("kv_cache_dtype", "auto") == "auto"
    alone, full = figures.get("canaries"), (figures.get("full_pool") or {}).get("canaries")
    if exact and alone and (off := alone["asked"] - alone["right"]):
        yield f"{off} of its {alone['asked']} canaries are answered wrongly, and none may be in full precision"
    if full and (wrong := full["wrong"]):
        off, distinct = full["wrong_with_room"], full["distinct"]
        chance = chance_of_so_many(wrong, full["answered"], distinct, off, distinct)
        why = "none may be in full precision" if exact else f"with room {off} of {distinct} are (p = {chance:.2g})"
        names = and_more(full["which"], 3)
        if exact or chance < ALPHA:
            yield f"{wrong} of its {full['answered']} canaries are answered wrongly at a full pool ({names}), and {why}"


def code_differences(git: Mapping[str, Any], versions: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """How commit and versions differ from those in a run's manifest: ``torch 2.1, of the run 2.0``."""
    run = {"commit": (manifest.get("git") or {}).get("sha"), **(manifest.get("versions") or {})}
    return _different({"commit": git.get("sha"), **{name: versions.get(name) for name in _VERSIONS}}, run)


def _different(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """A value that one side does not tell is no difference."""
    both = {name: (str(value), str(there[name])) for name, value in here.items() if value and there.get(name)}
    return [f"{name} {ours[:12]}, of the run {theirs[:12]}" for name, (ours, theirs) in both.items() if ours != theirs]


def read_quality(folder: Path) -> QualityResult | None:
    """What was measured for the run in ``folder``; None if nothing was. Raises UsageError for a damaged file."""
    path = folder / QUALITY
    if not path.is_file():
        return None
    data = read_json(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UsageError(f"{path} is not of the format {FORMAT}: run `kvbench quality {folder}` again")
    try:
        return QualityResult(**{key: value for key, value in data.items() if key != "format"})
    except TypeError:
        raise UsageError(f"{path} is damaged: run `kvbench quality {folder}` again") from None
