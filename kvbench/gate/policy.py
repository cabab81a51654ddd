"""The rules and limits of the gates, from ci/gates.yaml. Unknown keys are refused, so that no typo goes unnoticed.

    timing:     the paired comparison: when to look, what counts as slower, which cells belong together
    limits:     absolute limits on one run's results

Shares may be written ``1.5%`` or ``0.015``, sizes ``512MiB``. What ``timing:`` leaves out is as in DEFAULT_RULES.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from kvbench.common.errors import UsageError
from kvbench.common.packages import find_file
from kvbench.common.parsing import kind_of
from kvbench.common.records import Record
from kvbench.common.schema import StrictModel, explain
from kvbench.common.text import parse_bytes
from kvbench.gate.sentences import say
from kvbench.gate.timing.rules import DEFAULT_RULES, LEVELS, MOST_PAIRS, Look, MetricRule, TimingRules
from kvbench.runs.metric_names import check_name
from kvbench.workload.file import parse_yaml

MAX_ALPHA = 0.05  # false alarms of all looks together: a gate that fails more often without a reason is ignored
MAX_ALPHA_PASS = 0.05
KINDS = ("metric", "slo", "ratio", "kld", "quality")  # as the file writes them; an slo is the metric goodput_share
KLD_STATISTICS = ("mean", "p95", "p99", "max", "same_argmax")
WITHIN = "within"
QUALITY_FIGURES = (WITHIN, "perplexity_change", "rms_dp", "greedy", "passkey", "full_pool_wrong")
_DIGEST_LENGTH = 12  # hexadecimal digits


@dataclass(frozen=True)
class GateLimit:
    """An entry of ``limits:``.

    ``what``: a metric, the statistic of a KLD, or one of ``QUALITY_FIGURES``, of which WITHIN has no bounds.
    ``low``, ``high``: inclusive. ``cells``: globs, see ``matches``. ``every``: hold each repeat instead of their
    median. ``of``, ``to``: globs of the configurations of a ratio; empty for paged over contiguous, the two that differ
    least.
    """

    kind: Literal["metric", "ratio", "kld", "quality"]
    what: str
    low: float | None = None
    high: float | None = None
    cells: tuple[str, ...] = ("*",)
    every: bool = False
    of: tuple[str, ...] = ()
    to: tuple[str, ...] = ()
    name: str | None = None

    @property
    def label(self) -> str:
        kinds = {"metric": "", "ratio": "ratio of ", "kld": "KLD ", "quality": "quality "}
        return self.name or f"{kinds[self.kind]}{self.what}"

    def excess(self, value: float) -> float:
        """Returns by how much ``value`` is beyond the limit; 0 or less within it."""
        beyond = [-math.inf]
        if self.high is not None:
            beyond.append(value - self.high)
        if self.low is not None:
            beyond.append(self.low - value)
        return max(beyond)


def matches(name: str, globs: Iterable[str]) -> bool:
    """Tests whether a glob fits ``name``, ``<workload>/<cell id>``; a glob without a slash is of the cell id."""
    last = name.rpartition("/")[2]
    return any(fnmatchcase(name if "/" in glob else last, glob) for glob in globs)


class StoredPolicy(Record):
    """The timing rules that a comparison began with, and the file that they came from."""

    file: str | None
    digest: str
    rules: TimingRules


@dataclass(frozen=True)
class Policy:
    """The rules and limits of the gates. ``source``: the file, None for kvbench's own rules."""

    timing: TimingRules
    limits: tuple[GateLimit, ...] = ()
    source: Path | None = None

    @property
    def digest(self) -> str:
        rules = json.dumps(dataclasses.asdict(self.timing))  # unsorted: the first class that matches a cell counts
        return hashlib.sha256(rules.encode()).hexdigest()[:_DIGEST_LENGTH]

    def facts(self) -> dict[str, str]:
        return {"policy": str(self.source or "kvbench's own rules"), "policy_digest": self.digest}

    def stored(self) -> StoredPolicy:
        """The policy for the manifest of a comparison, without the limits."""
        return StoredPolicy(file=self.source and str(self.source), digest=self.digest, rules=self.timing)

    @classmethod
    def of(cls, stored: StoredPolicy | None) -> Policy:
        """The policy that a comparison was begun with; the default one where it does not tell."""
        if stored is None:
            return cls(DEFAULT_RULES)
        return cls(stored.rules, source=Path(stored.file) if stored.file else None)


def load_policy(path: Path | str | None) -> Policy:
    """The policy of a YAML file; with None the default rules and no limits. Raises UsageError for a mistake in it."""
    if path is None:
        return Policy(DEFAULT_RULES)
    source = find_file(Path(path))
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(say("policy.unreadable", path=source, error=error)) from None
    data = parse_yaml(text, source)
    if not isinstance(data, dict | None):
        raise UsageError(say("policy.no_mapping", path=source, kind=kind_of(data)))
    try:
        file = _PolicyFile.model_validate(data or {})
    except ValidationError as error:
        raise UsageError(f"{source}: {' '.join(explain(error, ''))}") from None
    return Policy((file.timing or _TimingSection()).rules(), tuple(e.limit() for e in file.limits or ()), source)


def _figure(value: Any) -> Any:
    """Reads ``1.5%`` as 0.015 and ``512MiB`` as 536870912; pydantic refuses what is no number then."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    if not isinstance(value, str):
        return float(value)
    if match := re.fullmatch(r"\s*([+-]?\d+(?:\.\d+)?)\s*%\s*", value):
        return float(match[1]) / 100
    try:
        return float(parse_bytes(value))
    except ValueError:
        raise ValueError(say("policy.no_number", value=value)) from None


def _slo(share: float) -> float:
    """Refuses what is no share below 1, with what to write instead."""
    if share >= 1:
        raise ValueError(say("policy.slo", share=share))
    return share


def _metric_entry(value: Any) -> Any:
    """Reads ``off``, which is YAML's false, as None."""
    if value is None or value is True:
        raise ValueError(say("policy.empty_metric"))
    return None if value is False else value


Figure = Annotated[float, BeforeValidator(_figure), Field(allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(_figure), Field(gt=0, lt=1)]
Slo = Annotated[float, AfterValidator(_slo), BeforeValidator(_figure), Field(gt=0)]
_AS_LIST = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
Globs = Annotated[list[str], _AS_LIST, Field(min_length=1)]


class _LookEntry(StrictModel):
    """A look. ``alpha``: the chance of a false alarm that it may spend; ``alpha_pass``: that of a false pass."""

    pairs: int = Field(ge=2, le=MOST_PAIRS)
    alpha: Share
    alpha_pass: Share | None = None


_Margins = create_model("_Margins", __base__=StrictModel, **dict.fromkeys(LEVELS, (Share | None, None)))


class _MetricEntry(StrictModel):
    """A metric. ``floor``: the least change that can fail; ``margins``: the largest one that still passes, by level."""

    floor: Share | None = None
    margins: _Margins = _Margins()

    def rule(self, usual: MetricRule) -> MetricRule:
        margins = {**usual.margins, **self.margins.model_dump(exclude_none=True)}
        return replace(usual, floor=self.floor or usual.floor, margins=margins)


_Metric = Annotated[_MetricEntry | None, BeforeValidator(_metric_entry)]
_ENTRIES = {rule.name: (_Metric, _MetricEntry()) for rule in DEFAULT_RULES.metrics}
_Metrics = create_model("_Metrics", __base__=StrictModel, **_ENTRIES)


class _TimingSection(StrictModel):
    """The section ``timing``: a metric that is ``off`` is not judged, one that is not named by the default rules."""

    looks: list[_LookEntry] | None = None
    metrics: _Metrics = _Metrics()
    classes: dict[str, Globs] = Field(default_factory=dict)

    def rules(self) -> TimingRules:
        """The rules of the section. Raises UsageError for rules that cannot decide anything."""
        entries = [(getattr(self.metrics, rule.name), rule) for rule in DEFAULT_RULES.metrics]
        looks = DEFAULT_RULES.looks
        if self.looks is not None:  # looks that do not say their own share the chance of a false pass evenly
            shared = MAX_ALPHA_PASS / max(1, len(self.looks))
            looks = tuple(
                Look(look.pairs, look.alpha, look.alpha_pass or max(shared, 2.0**-look.pairs)) for look in self.looks
            )
        classes = {name: tuple(g if "/" in g else f"*/{g}" for g in globs) for name, globs in self.classes.items()}
        return TimingRules(tuple(entry.rule(rule) for entry, rule in entries if entry), looks, classes or None)

    @model_validator(mode="after")
    def _is_sound(self) -> _TimingSection:
        for rule in self.rules().metrics:
            for level, margin in rule.margins.items():
                if margin < rule.floor:
                    names = {"metric": rule.name, "level": level, "margin": margin, "floor": rule.floor}
                    raise ValueError(say("policy.margin_below_floor", **names))
        for name, most in (("alpha", MAX_ALPHA), ("alpha_pass", MAX_ALPHA_PASS)):
            spent = sum(getattr(look, name) or 0.0 for look in self.looks or ())
            if spent > most + 1e-12:
                raise ValueError(say("policy.alpha_spent", name=name, spent=spent, most=most))
        return self


class _LimitEntry(StrictModel):
    """A limit of one of ``KINDS``, with ``max`` or ``min``; ``slo`` and ``quality: within`` need neither."""

    name: str | None = Field(default=None, min_length=1)
    metric: str | None = None
    slo: Slo | None = None
    ratio: str | None = None
    kld: Literal[KLD_STATISTICS] | None = None
    quality: Literal[QUALITY_FIGURES] | None = None
    cells: Globs = Field(default=["*"])
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

    @model_validator(mode="after")
    def _one_limit(self) -> _LimitEntry:
        kinds = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            given = " and ".join(kinds) or "nothing to hold"
            raise ValueError(say("policy.one_kind", given=given, kinds=", ".join(KINDS)))
        bounds = [bound for bound in (self.min, self.max) if bound is not None]
        (kind,), is_ratio, itself = kinds, kinds == ["ratio"], kinds == ["slo"] or self.quality == WITHIN
        wrong = {
            "slo_bounds": kind == "slo" and bounds,
            "within_bounds": self.quality == WITHIN and bounds,
            "no_bounds": not itself and not bounds,
            "crossed_bounds": bounds != sorted(bounds),
            "no_ratio": not is_ratio and (self.of or self.to),
            "half_ratio": bool(self.of) != bool(self.to),
        }
        for key, is_wrong in wrong.items():
            if is_wrong:
                values = {"what": getattr(self, kind), "slo": self.slo, "min": self.min, "max": self.max}
                raise ValueError(say(f"policy.{key}", **values))
        return self

    def limit(self) -> GateLimit:
        cells, dividends, to = (tuple(globs or ()) for globs in (self.cells, self.of, self.to))
        if self.slo is not None:
            return GateLimit("metric", "goodput_share", self.slo, None, cells, self.every, name=self.name)
        kind = next(kind for kind in KINDS if getattr(self, kind) is not None)
        return GateLimit(kind, getattr(self, kind), self.min, self.max, cells, self.every, dividends, to, self.name)


class _PolicyFile(StrictModel):
    timing: _TimingSection | None = None
    limits: list[_LimitEntry] | None = None
