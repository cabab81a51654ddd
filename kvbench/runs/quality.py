"""quality.json: what each configuration changes in the model's answers, as `kvbench quality` measured it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from kvbench.common.records import Number, Record, read_record
from kvbench.runs.results import GitState, Manifest
from kvbench.runs.server_info import OutlierFacts

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


class _Measured(Record):
    """Figures of broken KV may be no numbers: they are stored as null, and break every limit."""

    model_config = ConfigDict(allow_inf_nan=True)


class Bin(Record):
    """Right answers to a part of the passkeys. ``of``: "0 to 20 %", "257 to 512", "3" (prompt length mod page size)."""

    of: str
    asked: int
    right: int


class Greedy(_Measured):
    """The whole answers that are equal: share with its interval; median position [tokens] at which others differ."""

    answers: int = 0
    agree: int = 0
    share: float | None = None
    low: float | None = None
    high: float | None = None
    first_divergence: Number | None = None


class Passkeys(_Measured):
    """Exact answers to passkeys; share with its interval, absent where none was asked."""

    asked: int = 0
    right: int = 0
    share: float | None = None
    low: float | None = None
    high: float | None = None
    by_depth: tuple[Bin, ...] = ()
    by_length: tuple[Bin, ...] = ()
    by_residue: tuple[Bin, ...] = ()


class CanariesRight(Record):
    """The model's canary file, alone on an idle engine."""

    asked: int
    right: int


class CanariesAtFullPool(Record):
    """The answers to the canary file; ``which``: names of the first wrong ones.

    wrong_with_room: how many of the distinct ones are wrong on an idle engine
    """

    answered: int
    distinct: int
    wrong: int
    which: tuple[str, ...] = ()
    wrong_with_room: int = 0


class FullPoolFigures(Record):
    """Prompts and canaries again while the pool is too small. ``wrong``: names of the first answers that differ.

    problems: what does not add up in the pool
    """

    answers: int
    agree: int
    passkey_asked: int
    passkey_right: int
    wrong: tuple[str, ...] = ()
    preemptions: int = 0
    swapped_pages: int = 0
    evicted_pages: int = 0
    forks: int = 0
    problems: tuple[str, ...] = ()
    canaries: CanariesAtFullPool | None = None


class PromptFigures(_Measured):
    """The predictions and answers of one engine, beside the baseline. Absent fields were not measured.

    mean, p99: KL divergence of a token [nats]; same_argmax: share of the positions whose likeliest token is the same
    perplexity_change: relative, 0.01 is 1 % worse
    """

    prompts: int | None = None
    positions: int | None = None
    mean: float | None = None
    p99: float | None = None
    same_argmax: float | None = None
    perplexity_change: float | None = None
    greedy: Greedy = Greedy()


class ConfigurationFigures(PromptFigures):
    """The figures of a configuration, or of the control, with 95 % intervals.

    rms_dp: root mean square of the change in probability of the token that follows; kv_outliers: as /server_info has
    sets: by the name of a prompt set; canaries: absent without a canary file
    measured: what it was asked itself: all prompts, or only those at a full pool
    like: id of the configuration that it answers like, whose figures with room these are; None: they are its own
    outside: sentences, one for each limit that it breaks; empty within all
    """

    measured: Literal["all", "full_pool"] = "all"
    like: str | None = None
    kv_cache_dtype: str | None = None
    layout: str | None = None
    page_size: int | None = None
    kv_outliers: OutlierFacts = OutlierFacts()
    mean_low: float | None = None
    mean_high: float | None = None
    p95: float | None = None
    max: float | None = None
    prompt_mean: float | None = None
    decode_mean: float | None = None
    rms_dp: float | None = None
    rms_dp_low: float | None = None
    rms_dp_high: float | None = None
    perplexity: float | None = None
    perplexity_change_low: float | None = None
    perplexity_change_high: float | None = None
    passkey: Passkeys = Passkeys()
    full_pool: FullPoolFigures | None = None
    canaries: CanariesRight | None = None
    sets: Mapping[str, PromptFigures] = {}
    outside: tuple[str, ...] = ()

    def value(self, name: str) -> float | None:
        """One figure, such as ``mean`` or ``passkey.share``; None where it was not measured."""
        node: Any = self
        for part in name.split("."):
            node = getattr(node, part, None)
        return float(node) if isinstance(node, int | float) else None


class QualityFacts(Record):
    """The questions and their model. ``measurements``: configurations that were asked all of them.

    not_measured: what a server does not tell, or a model beside the run's own does not keep
    """

    model_config = ConfigDict(extra="allow")

    device: str = ""
    dtype: str = ""
    prompts: int = 0
    left_out: int = 0
    measurements: int = 0
    seconds: float = 0.0
    not_measured: tuple[str, ...] = ()


class QualityResult(_Measured):
    """The quality of each configuration of a run, against the contiguous full-precision baseline.

    model: what it was measured with; beside: that is not the run's own model (whose weights are random)
    weights: of which model folder, or random ones of which seed; all of them if there are several
    weights_fingerprint: as the built-in server tells it; empty for several sets of weights
    control: the A/A arm, the baseline against itself with other batch-mates, chunks and order: what rounding does
    limits: name of a figure -> the worst value within the limits, which is the control's and a margin
    note: of random weights, whose quality says little

    Of a running server (`kvbench quality --url`) ``workload`` is its URL and ``server`` the one configuration, without
    kv_cache_dtype, layout, KLD and full_pool, and without perplexity and rms_dp where it tells no probabilities.
    """

    FORMAT: ClassVar[str] = FORMAT

    workload: str
    model: str
    beside: bool
    weights: str
    configurations: Mapping[str, ConfigurationFigures]
    control: ConfigurationFigures
    limits: Mapping[str, float | None]
    weights_fingerprint: str = ""
    git: GitState = GitState()
    versions: Mapping[str, str | None] = {}
    note: str = ""
    facts: QualityFacts = QualityFacts()

    def differs_from(self, manifest: Manifest) -> list[str]:
        """Lists how commit, versions and weights differ from those in a run's manifest, one phrase each."""
        weights = None if self.beside else (manifest.model or {}).get("weights_fingerprint")
        return [
            *code_differences(self.git, self.versions, manifest),
            *_different("set of weights", self.weights_fingerprint, weights),
        ]

    @property
    def followers(self) -> dict[str, list[str]]:
        """Configurations that were asked at a full pool only, by the one whose other figures they share."""
        by_leader: dict[str, list[str]] = {}
        for config_id, figures in self.configurations.items():
            if figures.like and figures.measured == "full_pool":
                by_leader.setdefault(figures.like, []).append(config_id)
        return by_leader

    @property
    def random_weights(self) -> bool:
        """Tests whether some of the weights were random: such a KLD says little about quality, and ``note`` says so."""
        return bool(self.note)


def figure(figures: ConfigurationFigures | None, name: str) -> float | None:
    """One of a configuration's figures, such as ``mean`` or ``passkey.share``; None where it was not measured."""
    return figures.value(name) if figures else None


def limits_of(control: ConfigurationFigures) -> dict[str, float]:
    """The worst value of each figure within the limits, by the A/A arm's figures."""
    ends = {name: control.value(_WORSE_END.get(name, f"{name}_high")) for name in MARGINS}
    return {name: end + MARGINS[name] for name, end in ends.items() if end is not None}


def is_beyond(name: str, value: float, limit: float) -> bool:
    """Tests whether a figure breaks its limit: the least value for a share, the largest for all others."""
    return value < limit if MARGINS[name] < 0 else value > limit


def code_differences(git: GitState, versions: Mapping[str, str | None], manifest: Manifest) -> list[str]:
    """Lists how commit and versions differ from those in a run's manifest: ``torch 2.1, of the run 2.0``."""
    differences = list(_different("commit", git.sha, manifest.git.sha))
    for name in _VERSIONS:
        differences += _different(name, versions.get(name), manifest.versions.get(name))
    return differences


def _different(name: str, here: str | None, there: str | None) -> Iterator[str]:
    """Names two values that differ; one that a side does not tell is no difference."""
    if here and there and here != there:
        yield f"{name} {here[:12]}, of the run {there[:12]}"


def read_quality(folder: Path) -> QualityResult | None:
    """Reads what was measured for the run in ``folder``; None if nothing was. Raises UsageError for a damaged file."""
    path = folder / QUALITY
    return read_record(QualityResult, path, f"run `kvbench quality {folder}` again") if os.path.lexists(path) else None
