"""Two results side by side: are they comparable, and their figures by one definition each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from kvbench.audit.checks import BROKEN, OK, OPEN, CheckAnswer
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


def pairs_to_compare(results: Sequence[Sequence[AuditedResult]]) -> Iterator[tuple[AuditedResult, AuditedResult]]:
    """Pairs each result with the first one at the same load, or the only results of two files.

    ``results``: of each file. A file may hold one load after another, which are not to be compared.
    """
    before: list[AuditedResult] = []
    for group in results:
        for result in group:
            partner = next((other for other in before if _load(other) == _load(result)), None)
            if partner is None and len(group) == len(results[0]) == 1 and result is not results[0][0]:
                partner = results[0][0]
            if partner is not None:
                yield partner, result
            before.append(result)


def _load(result: AuditedResult) -> tuple[object, ...]:
    return tuple(getattr(result.asked, name) for name in _ASKED)


def comparable(
    first: AuditedResult, second: AuditedResult, answers: Sequence[Sequence[CheckAnswer]] = ()
) -> CheckAnswer:
    """Tests whether two results may be compared: the same load and model, and neither is broken.

    ``answers``: of the checks of both.
    """
    reasons, unknown = [], []
    for name, title in _ASKED.items():
        a, b = getattr(first.asked, name), getattr(second.asked, name)
        if a is not None and b is not None and a != b:
            reasons.append(say("compare.differs", what=title, a=f"{a:g}", b=f"{b:g}"))
        elif (a is None) != (b is None):
            unknown.append(title)
    if first.model and second.model and first.model != second.model:
        reasons.append(say("compare.differs", what="model", a=first.model, b=second.model))
    for result, every in zip((first, second), answers, strict=False):
        if wrong := [a.check for a in every if a.outcome == BROKEN and a.check not in _NO_MATTER]:
            titles = ", ".join(say(f"{check}.title") for check in wrong)
            reasons.append(say("compare.faulty", name=result.name, checks=titles))
    if not reasons and (warm := _warm(first, second)):
        reasons.append(warm)
    also = [
        say("compare.differs", what=title, a=a, b=b)
        for title, a, b in (("seed", first.asked.seed, second.asked.seed), ("version", first.version, second.version))
        if a is not None and b is not None and a != b and first.tool == second.tool
    ]
    values = {"a": first.name, "b": second.name, "why": "; ".join(reasons), "what": listing(unknown)}
    outcome, form = (BROKEN, "broken") if reasons else (OPEN, "open") if unknown else (OK, "ok")
    advice = say("advice", advice=say("compare.again")) if outcome == OPEN else ""
    return CheckAnswer("compare", outcome, say(f"compare.{form}", also=listing(also), **values), advice)


def _warm(first: AuditedResult, second: AuditedResult) -> str:
    """Says that one of two runs of a command met a warm cache; empty where neither did."""
    ttfts, tokens = ([result.figure(name) for result in (first, second)] for name in (TTFT, TPOT))
    if _settings(first) != _settings(second) or not all((*ttfts, *tokens)):
        return ""
    (a, b), (cold, warm) = tokens, sorted(ttfts, reverse=True)
    if warm < _WARM * cold and abs(b / a - 1) < _SAME:
        return say("compare.warm", first=ttfts[0], second=ttfts[1])
    return ""


def _settings(result: AuditedResult) -> tuple[object, ...]:
    asked = (getattr(result.asked, field.name) for field in fields(Asked) if field.name != "seed")
    lengths = tuple(sorted(request.input_tokens or 0 for request in result.requests))
    return (result.tool, result.model, *asked, lengths)


def repeats_of(result: AuditedResult, results: Sequence[AuditedResult]) -> int:
    """Counts the runs of the same tool with the same settings; one that is given twice counts once."""
    return len({(other.duration_s, other.date) for other in results if _settings(other) == _settings(result)})


def shared_figures(first: AuditedResult, second: AuditedResult) -> list[SharedFigure]:
    """The figures that both results have, each by one definition whatever its tool calls it."""
    shared = []
    for latency, statistic in _FIGURES:
        a, b = (r.gap_ms if latency == GAP else r.figure(latency, statistic) for r in (first, second))
        if a and b:
            shared.append(SharedFigure(f"{latency} {statistic} [ms]", DEFINITIONS[latency], a, b))
    for name, definition in (("output_tokens_per_s", "tokens/s"), ("requests_per_s", "requests/s")):
        a, b = getattr(first, name), getattr(second, name)
        if a and b:
            shared.append(SharedFigure(definition, say("shared.successful"), a, b))
    return shared
