"""Two results side by side: are they comparable, and their figures by one definition each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from kvbench.audit.checks import BROKEN, OK, OPEN, Answer, audit
from kvbench.audit.result import DEFINITIONS, E2EL, GAP, TPOT, TTFT, Asked, AuditedResult
from kvbench.audit.sentences import say
from kvbench.common.text import listing

_ASKED = {
    "concurrency": "concurrency", "rate": "rate", "input_tokens": "prompt tokens", "output_tokens": "output tokens",
}  # fmt: skip
_WARM, _SAME = 0.5, 0.1  # TTFT of a warm run over that of the cold one; by which the time a token may differ
_NO_MATTER = ("runs", "samples", "names")  # what is broken in one file alone, and does not make two differ
_FIGURES = ((TTFT, "p50"), (TTFT, "p99"), (TPOT, "mean"), (GAP, "mean"), (E2EL, "mean"))


@dataclass(frozen=True)
class SharedFigure:
    """A figure that both results have by one definition. ``name``: with its statistic; latencies in ms."""

    name: str
    definition: str
    first: float
    second: float


def comparable(first: AuditedResult, second: AuditedResult) -> Answer:
    """Tests whether two results may be compared: the same load and model, and neither is broken."""
    reasons, unknown = [], []
    for name, title in _ASKED.items():
        a, b = getattr(first.asked, name), getattr(second.asked, name)
        if a is not None and b is not None and a != b:
            reasons.append(say("compare.differs", what=title, a=f"{a:g}", b=f"{b:g}"))
        elif (a is None) != (b is None):
            unknown.append(title)
    if first.model and second.model and first.model != second.model:
        reasons.append(say("compare.differs", what="model", a=first.model, b=second.model))
    for result in (first, second):
        wrong = [a.check for a in audit(result) if a.outcome == BROKEN and a.check not in _NO_MATTER]
        if wrong:
            titles = ", ".join(say(f"{check}.title") for check in wrong)
            reasons.append(say("compare.faulty", name=result.name, checks=titles))
    if not reasons and (warm := _warm(first, second)):
        reasons.append(warm)
    values = {"a": first.name, "b": second.name, "why": "; ".join(reasons), "what": listing(unknown)}
    outcome, form = (BROKEN, "broken") if reasons else (OPEN, "open") if unknown else (OK, "ok")
    advice = say("advice", advice=say("compare.again")) if outcome == OPEN else ""
    return Answer("compare", outcome, say(f"compare.{form}", **values), advice)


def _warm(first: AuditedResult, second: AuditedResult) -> str:
    """Says that the same command met a warm cache the second time; empty where it did not."""
    ttfts, tokens = ([result.figure(name) for result in (first, second)] for name in (TTFT, TPOT))
    if first.tool != second.tool or _settings(first) != _settings(second) or not all((*ttfts, *tokens)):
        return ""
    (cold, warm), (a, b) = ttfts, tokens
    if warm < _WARM * cold and abs(b / a - 1) < _SAME:
        return say("compare.warm", first=cold, second=warm)
    return ""


def _settings(result: AuditedResult) -> tuple[object, ...]:
    asked = (getattr(result.asked, field.name) for field in fields(Asked) if field.name != "seed")
    lengths = tuple(sorted(request.input_tokens or 0 for request in result.requests))
    return (result.tool, result.model, *asked, lengths)


def repeats_of(result: AuditedResult, results: Sequence[AuditedResult]) -> int:
    """Counts the results that the same tool measured with the same settings."""
    return sum(_settings(other) == _settings(result) for other in results)


def shared_figures(first: AuditedResult, second: AuditedResult) -> list[SharedFigure]:
    """The figures that both results have, each by one definition whatever its tool calls it."""
    shared = []
    for latency, statistic in _FIGURES:
        a, b = (_mean_gap(r) if latency == GAP else r.figure(latency, statistic) for r in (first, second))
        if a and b:
            shared.append(SharedFigure(f"{latency} {statistic} [ms]", DEFINITIONS[latency], a, b))
    for name, definition in (("output_tokens_per_s", "tokens/s"), ("requests_per_s", "requests/s")):
        a, b = getattr(first, name), getattr(second, name)
        if a and b:
            shared.append(SharedFigure(definition, say("shared.successful"), a, b))
    return shared


def _mean_gap(result: AuditedResult) -> float | None:
    """The mean gap between chunks: as told, or the time a token times the tokens of a chunk."""
    token, tokens = result.figure(TPOT), result.tokens_a_chunk
    return result.figure(GAP) or (token * tokens if token and tokens else None)
