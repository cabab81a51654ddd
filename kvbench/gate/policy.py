"""ci/gates.yaml: what the gates hold a change to. Read strictly, so that a misspelt line is no silent pass.

    timing:     the paired comparison: when to look, what counts as slower, which cells belong together
    limits:     absolute limits on one run's results

Shares may be written ``1.5%`` or ``0.015``, sizes ``512MiB``. What is left out of ``timing:`` is as in DEFAULT_RULES.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from kvbench.common.errors import UsageError
from kvbench.common.schema import StrictModel, explain
from kvbench.gate.limits.judge import KINDS, KLD_STATISTICS, Limit
from kvbench.gate.timing.rules import DEFAULT_RULES, LEVELS, MOST_PAIRS, Look, MetricRule, TimingRules
from kvbench.runs.metric_names import check_name
from kvbench.workload.layers import parse_yaml

MAX_ALPHA = 0.05  # of all looks together: a gate that fails more often without a reason is not believed any more
MAX_ALPHA_PASS = 0.05


@dataclass(frozen=True)
class Policy:
    """``source``: the file, None where none was given."""

    timing: TimingRules
    limits: tuple[Limit, ...] = ()
    source: Path | None = None


def load_policy(path: Path | str | None) -> Policy:
    """The policy of a YAML file; with None the default rules and no limits.

    Raises:
        UsageError: the file cannot be read, or a value in it cannot be; one sentence a mistake.
    """
    if path is None:
        return Policy(DEFAULT_RULES)
    source = Path(path)
    try:
        text = source.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"there is no policy file {str(source)!r}: ci/gates.yaml is one to copy") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the policy file {str(source)!r} cannot be read: {error}") from None
    data = parse_yaml(text, source)
    if not isinstance(data, dict | None):
        raise UsageError(f"{source}: a policy is a mapping of timing and limits; this file is a {type(data).__name__}")
    try:
        file = _PolicyFile.model_validate(data or {})
    except ValidationError as error:
        raise UsageError(f"{source}: {' '.join(explain(error, ''))}") from None
    return Policy(file.timing.rules(), tuple(entry.limit() for entry in file.limits), source)


def _figure(value: Any) -> Any:
    """``1.5%`` -> 0.015, ``512MiB`` -> 536870912; numbers as floats; anything else is pydantic's to refuse."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    if not isinstance(value, str):
        return float(value)
    if match := re.fullmatch(r"\s*([+-]?\d+(?:\.\d+)?)\s*%\s*", value):
        return float(match[1]) / 100
    from engine.config import parse_bytes

    try:
        return float(parse_bytes(value))
    except ValueError:
        raise ValueError(f"{value!r} is no number: write for example 250, 1.5%, 0.015 or 512MiB.") from None


def _entries(value: Any) -> Any:
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{value!r} is no list; write each entry in a line that begins with a dash.")
    return tuple(value or ())


def _globs(value: Any) -> Any:
    return _entries([value] if isinstance(value, str) else value)


Figure = Annotated[float, BeforeValidator(_figure), Field(allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(_figure), Field(gt=0, lt=1)]
Globs = Annotated[tuple[str, ...], BeforeValidator(_globs), Field(min_length=1)]


class _LookEntry(StrictModel):
    """``alpha``: the chance of a false alarm that this look may spend; ``alpha_pass``: that of a false pass."""

    pairs: int = Field(ge=2, le=MOST_PAIRS)
    alpha: Share
    alpha_pass: Share | None = None

    @model_validator(mode="after")
    def _reachable(self) -> _LookEntry:
        least = 2.0**-self.pairs
        for name, alpha in (("alpha", self.alpha), ("alpha_pass", self.alpha_pass)):
            if alpha is not None and alpha < least:
                raise ValueError(
                    f"{name} {alpha:g} cannot be reached with {self.pairs} pairs, whose smallest p value is 2^-"
                    f"{self.pairs} = {least:.2g}: take more pairs or a larger {name}."
                )
        return self

    def look(self, looks: int) -> Look:
        """``looks``: how many there are, which share the chance of a false pass evenly where nothing is said."""
        passes = MAX_ALPHA_PASS / looks if self.alpha_pass is None else self.alpha_pass
        return Look(self.pairs, self.alpha, max(passes, 2.0**-self.pairs))


class _MetricEntry(StrictModel):
    """What is left out is as in DEFAULT_RULES. ``floor``: the least change that can fail; ``margins``: the largest
    slowdown that still passes."""

    floor: Share | None = None
    margins: dict[str, Share] = Field(default_factory=dict)

    @field_validator("margins", mode="before")
    @classmethod
    def _levels(cls, value: Any) -> Any:
        return _known_keys(value, LEVELS, "a level")


class _TimingSection(StrictModel):
    """``metrics``: one that is ``off`` is not judged, one that is not named is judged by the default rules."""

    looks: Annotated[tuple[_LookEntry, ...], BeforeValidator(_entries)] | None = None
    metrics: dict[str, _MetricEntry | None] = Field(default_factory=dict)
    classes: dict[str, Globs] = Field(default_factory=dict)

    @field_validator("metrics", mode="before")
    @classmethod
    def _known_metrics(cls, value: Any) -> Any:
        value = _known_keys(value, tuple(rule.name for rule in DEFAULT_RULES.metrics), "a metric of the timing gate")
        for name, entry in value.items() if isinstance(value, Mapping) else ():
            if entry is None or entry is True:
                raise ValueError(f"{name} says nothing; give floor or margins, write off, or remove the line.")
        return {k: v or None for k, v in value.items()} if isinstance(value, Mapping) else value

    @field_validator("looks")
    @classmethod
    def _affordable(cls, looks: tuple[_LookEntry, ...] | None) -> tuple[_LookEntry, ...] | None:
        pairs = [look.pairs for look in looks or ()]
        if looks is not None and not looks:
            raise ValueError("an empty list never looks; give one such as {pairs: 8, alpha: 0.01}.")
        if pairs != sorted(set(pairs)):
            raise ValueError(f"the looks are after {pairs} pairs; name each once, in ascending order.")
        for name, most in (("alpha", MAX_ALPHA), ("alpha_pass", MAX_ALPHA_PASS)):
            spent = sum(getattr(look, name) or 0.0 for look in looks or ())
            if spent > most + 1e-12:
                raise ValueError(
                    f"the {name}s of the looks add up to {spent:g}, the limit is {most:g}: every look spends its own; "
                    "lower some."
                )
        return looks

    def rules(self) -> TimingRules:
        metrics = [rule for rule in map(self._rule, DEFAULT_RULES.metrics) if rule is not None]
        looks = DEFAULT_RULES.looks
        if self.looks is not None:
            looks = tuple(look.look(len(self.looks)) for look in self.looks)
        classes = {name: tuple(g if "/" in g else f"*/{g}" for g in globs) for name, globs in self.classes.items()}
        return replace(DEFAULT_RULES, looks=looks, metrics=tuple(metrics), classes=classes or None)

    def _rule(self, rule: MetricRule) -> MetricRule | None:
        entry = self.metrics.get(rule.name, _MetricEntry())
        if entry is None:
            return None
        floor = rule.floor if entry.floor is None else entry.floor
        return replace(rule, floor=floor, margins={**rule.margins, **entry.margins})

    @model_validator(mode="after")
    def _judges_something(self) -> _TimingSection:
        rules = [rule for rule in map(self._rule, DEFAULT_RULES.metrics) if rule is not None]
        if not rules:
            raise ValueError("metrics leaves every metric out; keep at least one.")
        for rule in rules:
            for level, margin in rule.margins.items():
                if margin < rule.floor:
                    raise ValueError(
                        f"metrics.{rule.name}: the {level} margin {margin:.2%} is below the floor {rule.floor:.2%}, so "
                        "nothing between them could pass or fail; raise the margin or lower the floor."
                    )
        return self


class _LimitEntry(StrictModel):
    """One of ``metric``, ``slo``, ``ratio``, ``kld``, with ``max`` or ``min``."""

    name: str | None = Field(default=None, min_length=1)
    metric: str | None = None
    slo: Share | None = None
    ratio: str | None = None
    kld: str | None = None
    cells: Globs = ("*",)
    of: Globs | None = None
    to: Globs | None = None
    max: Figure | None = None
    min: Figure | None = None
    every: bool = False

    @field_validator("metric", "ratio")
    @classmethod
    def _is_metric(cls, value: str | None) -> str | None:
        if value is not None:
            check_name(value)
        return value

    @field_validator("kld")
    @classmethod
    def _is_statistic(cls, value: str | None) -> str | None:
        if value is not None and value not in KLD_STATISTICS:
            raise ValueError(f"{value!r} is no figure of a KLD; use one of {', '.join(KLD_STATISTICS)}.")
        return value

    @model_validator(mode="after")
    def _one_limit(self) -> _LimitEntry:
        kinds = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            given = f"both {' and '.join(kinds)}" if kinds else "nothing to hold"
            raise ValueError(f"this limit has {given}; give exactly one of {', '.join(KINDS)}.")
        if kinds == ["slo"] and (self.max is not None or self.min is not None):
            raise ValueError(f"slo {self.slo:g} is the limit itself, the least share; remove max and min.")
        if kinds != ["slo"] and self.max is None and self.min is None:
            raise ValueError(f"the limit of {getattr(self, kinds[0])} is missing; give max or min.")
        if self.max is not None and self.min is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}, which nothing can meet; swap them.")
        if kinds != ["ratio"] and (self.of is not None or self.to is not None):
            raise ValueError("of and to belong to a ratio; remove them, or write ratio: instead.")
        if (self.of is None) != (self.to is None):
            raise ValueError("of and to go together; give both, or neither for paged against contiguous.")
        return self

    def limit(self) -> Limit:
        kind = next(kind for kind in KINDS if getattr(self, kind) is not None)
        if kind == "slo":
            return Limit("metric", "goodput_share", self.slo, None, self.cells, self.every, name=self.name)
        what = getattr(self, kind)
        return Limit(kind, what, self.min, self.max, self.cells, self.every, self.of or (), self.to or (), self.name)


class _PolicyFile(StrictModel):
    timing: _TimingSection = Field(default_factory=_TimingSection)
    limits: Annotated[tuple[_LimitEntry, ...], BeforeValidator(_entries)] = ()

    @field_validator("timing", mode="before")
    @classmethod
    def _left_empty(cls, value: Any) -> Any:
        return {} if value is None else value


def _known_keys(value: Any, known: tuple[str, ...], what: str) -> Any:
    for key in value if isinstance(value, Mapping) else ():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use {', '.join(known)}."
            raise ValueError(f"{key!r} is not {what}; {hint}")
    return value
