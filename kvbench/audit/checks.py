"""The checks of an audit: pure functions of one result. Each says ok, broken, or what must be done to decide it.

The limits leave clean runs of five tools alone, and find what was planted in others (tests/data/audit.tar.xz: runs
against a server with known times).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from kvbench.audit.result import GAP, TPOT, TTFT, AuditedResult
from kvbench.audit.sentences import say
from kvbench.common.text import plural, shorten
from kvbench.gate.verdict.verdict import FAIL, INCONCLUSIVE, PASS, Outcome

OK, BROKEN, OPEN = PASS, FAIL, INCONCLUSIVE
_CACHED = 0.05  # of the prompt tokens
_FIGURES = 0.03  # by which a figure differs from what the file's own requests say
_COUNTS = 0.02  # by which two token counts differ
_CHUNK, _INFERRED_CHUNK = 1.1, 1.5  # tokens in a chunk: counted, and told from ITL and TPOT alone
_BUNCHED = 0.1  # median gap over mean gap
_CONCURRENCY = 0.9  # of what was asked
_LIMIT = 0.8  # of the most that may be in flight: then the limit holds requests back
_RATE = 0.95  # of what was asked, less what random arrivals vary by
_FAILED = 0.01  # of the requests
_WAIT, _WAIT_MS = 0.1, 20.0  # of the TTFT, in the client, and at least so long
_WAVES = 5  # of requests, so that the first and the last are a small part
_MISNAMED = 0.15
_PEAK_S = 2.0  # a peak by seconds says nothing of a shorter run
_REPORTED = ("p90", "p95", "p99")


@dataclass(frozen=True)
class CheckAnswer:
    """A check's answer about one result. ``advice``: what to run again so that it can be decided."""

    check: str
    outcome: Outcome
    sentence: str
    advice: str = ""

    @property
    def text(self) -> str:
        return "; ".join(filter(None, [self.sentence, self.advice]))


def audit(result: AuditedResult) -> list[CheckAnswer]:
    """Holds a result against itself, by every check that its tool's numbers are subject to."""
    return [answer for check in _CHECKS if (answer := check(result)) is not None]


def _answer(
    check: str, outcome: Outcome, result: AuditedResult, form: str | None = None, **values: object
) -> CheckAnswer:
    text = say(f"{check}.{form or {OK: 'ok', BROKEN: 'broken', OPEN: 'open'}[outcome]}", **values)
    advice = say("advice", advice=say(f"{check}.again", rerun=result.rerun)) if outcome == OPEN else ""
    return CheckAnswer(check, outcome, text, advice)


def _failures(result: AuditedResult) -> CheckAnswer:
    if result.failed is None:
        return _answer("failures", OPEN, result)
    every = result.sent
    if not every or result.failed <= _FAILED * every:
        return _answer("failures", OK, result, n=result.failed, every=every)
    reasons = [request.error.splitlines()[-1] for request in result.requests if request.error.strip()]
    why = shorten(max(set(reasons), key=reasons.count), 120).rstrip(": ") if reasons else ""
    form = "all" if not result.completed else "broken"
    return _answer("failures", BROKEN, result, form, n=result.failed, every=every, ok=result.completed, why=why)


def _cache(result: AuditedResult) -> CheckAnswer:
    if result.cached_share is None:
        return _answer("cache", OPEN, result)
    outcome = BROKEN if result.cached_share > _CACHED else OK
    return _answer("cache", outcome, result, percent=100 * result.cached_share)


def _chunks(result: AuditedResult) -> CheckAnswer:
    tokens, token = result.tokens_a_chunk, result.figure(TPOT)
    if tokens is None or (not result.counts_chunks and _CHUNK < tokens < _INFERRED_CHUNK):
        return _answer("chunks", OPEN, result)
    if tokens <= _CHUNK:
        return _answer("chunks", OK, result, tokens=tokens)
    called = result.titles.get(GAP) or result.titles.get(TPOT)
    return _answer("chunks", BROKEN, result, tokens=tokens, gap=result.gap_ms, token=token, called=called)


def _token_counts(result: AuditedResult) -> CheckAnswer:
    for what, expected, seen in result.token_counts:
        if abs(seen - expected) > _COUNTS * expected:
            return _answer("token_counts", BROKEN, result, what=what, expected=expected, seen=seen)
    lengths = [request.output_tokens for request in result.succeeded if request.output_tokens is not None]
    if lengths and not any(lengths):
        return _answer("token_counts", BROKEN, result, "none")
    return _answer("token_counts", OK if result.token_counts else OPEN, result)


def _client(result: AuditedResult) -> CheckAnswer:
    """Tests whether the client kept up: even chunks are read evenly, and requests start when they should."""
    bunching, tokens = result.bunching, result.tokens_a_chunk or 1.0
    late = _late(result)
    if bunching is not None and bunching < _BUNCHED and tokens <= _CHUNK:
        return _answer("client", BROKEN, result, "bunched", percent=100 * bunching)
    # Where a limit holds requests back, that is no want of CPU, and the check of the queue says it.
    limit, delivered = result.asked.limit, result.delivered_concurrency or 0.0
    if late and result.asked.concurrency is None and (limit is None or delivered < _LIMIT * limit):
        return _answer("client", BROKEN, result, "late", wait=result.queue_ms)
    if bunching is None and not (result.waits_count and result.queue_ms is not None):
        return _answer("client", OPEN, result)
    return _answer("client", OK, result)


def _late(result: AuditedResult) -> bool:
    """Tests whether requests waited in the client for longer than a part of the TTFT that is reported."""
    ttft = result.figure(TTFT)
    return bool(result.waits_count and result.queue_ms and ttft and result.queue_ms > max(_WAIT * ttft, _WAIT_MS))


def _queue(result: AuditedResult) -> CheckAnswer | None:
    """Tests whether TTFT leaves out how long requests waited in the client before they were sent."""
    if result.asked.rate is None:
        return None  # in a closed loop a request is made when there is room for it
    ttft = result.figure(TTFT)
    if _late(result):
        return _answer("queue", BROKEN, result, wait=result.queue_ms, ttft=ttft)
    if result.queue_ms is None or _kept_rate(result) is False:
        return _answer("queue", OPEN, result)
    return _answer("queue", OK, result, wait=result.queue_ms)


def _kept_rate(result: AuditedResult) -> bool | None:
    asked, every, latency_ms = result.asked.rate, result.sent, result.latency_ms
    starts = [request.start_s for request in result.requests if request.start_s is not None]
    arriving_s = (result.duration_s or 0.0) - latency_ms / 1e3 if latency_ms else 0.0
    if len(starts) == every > 1:
        arriving_s = max(starts) - min(starts)
    if not asked or not every or arriving_s <= 0:
        return None
    return every / arriving_s >= asked * (_RATE - 2.5 / math.sqrt(every))


def _load(result: AuditedResult) -> CheckAnswer:
    """Tests whether the concurrency or the rate that was asked for was delivered."""
    every = result.sent
    if result.asked.rate is not None:
        kept = _kept_rate(result)
        if kept is None:
            return _answer("load", OPEN, result)
        values = {"asked": result.asked.rate, "rate": every / (result.duration_s or math.inf)}
        return _answer("load", OK if kept else BROKEN, result, "ok" if kept else "rate", **values)
    asked, delivered = result.asked.concurrency, result.delivered_concurrency
    if asked is None or delivered is None or (result.failed or 0) > _FAILED * every:  # failures take no time
        return _answer("load", OPEN, result)
    # With few waves the ramp explains what is missing, and is said by its own check.
    waves = _waves(result)
    limit = asked * (_CONCURRENCY if waves is None or waves >= _WAVES else _CONCURRENCY / 2)
    return _answer("load", OK if delivered >= limit else BROKEN, result, asked=asked, delivered=delivered)


def _waves(result: AuditedResult) -> float | None:
    """Counts the requests that each user sent; of an open loop the duration over a request's latency."""
    if users := result.asked.concurrency:
        return result.sent / users if result.sent else None
    latency_ms = result.latency_ms
    return result.duration_s / (latency_ms / 1e3) if result.duration_s and latency_ms else None


def _ramp(result: AuditedResult) -> CheckAnswer:
    waves = _waves(result)
    if waves is None:
        return _answer("ramp", OPEN, result)
    return _answer("ramp", OK if waves >= _WAVES else BROKEN, result, waves=waves)


def _samples(result: AuditedResult) -> CheckAnswer | None:
    """Tests whether there is a sample beyond the highest percentile that people quote."""
    names = [name for name in _REPORTED if result.figure(TTFT, name) is not None]
    if not names or not result.completed:
        return None
    needed = {name: math.ceil(100 / (100 - int(name[1:]))) for name in names}
    wrong = [name for name in names if result.completed < needed[name]]
    worst = wrong[0] if wrong else names[-1]
    values = {"n": result.completed, "name": worst, "needed": needed[worst]}
    return _answer("samples", BROKEN if wrong else OK, result, **values)


def _peak(result: AuditedResult) -> CheckAnswer | None:
    peak, mean = result.peak_tokens_per_s, result.output_tokens_per_s
    if peak is None or not mean or (result.duration_s or 0.0) < _PEAK_S:
        return None
    return _answer("peak", BROKEN if peak < mean else OK, result, peak=peak, mean=mean)


def _names(result: AuditedResult) -> CheckAnswer | None:
    if result.misnamed is None:
        return None
    name, value, what, by_name = result.misnamed
    outcome = BROKEN if abs(value / by_name - 1) > _MISNAMED else OK
    return _answer("names", outcome, result, name=name, value=value, what=what, by_name=by_name)


def _runs(result: AuditedResult) -> CheckAnswer:
    return _answer("runs", OK if result.runs > 1 else OPEN, result, runs=plural(result.runs, "run"))


def _figures(result: AuditedResult) -> CheckAnswer | None:
    """Holds the reported rates and means against the requests that are in the same file."""
    pairs = []
    if not result.rates_are_means:
        pairs.append(("requests/s", result.requests_per_s, _rate(result, result.completed)))
    if result.succeeded and len(result.succeeded) == result.completed:
        tokens, ttfts = ([getattr(r, name) for r in result.succeeded] for name in ("output_tokens", "ttft_s"))
        if None not in tokens and not result.rates_are_means:
            pairs.append(("output tokens/s", result.output_tokens_per_s, _rate(result, sum(tokens))))
        if None not in ttfts:
            pairs.append(("mean TTFT [ms]", result.figure(TTFT), 1e3 * sum(ttfts) / len(ttfts)))
            pairs.append(("median TTFT [ms]", result.figure(TTFT, "p50"), 1e3 * statistics.median(ttfts)))
    pairs = [(name, reported, own) for name, reported, own in pairs if reported and own]
    if not pairs:
        return None
    for name, reported, own in pairs:
        if abs(reported - own) > _FIGURES * own:
            return _answer("figures", BROKEN, result, name=name, reported=reported, own=own)
    return _answer("figures", OK, result, n=len(pairs))


def _rate(result: AuditedResult, count: float | None) -> float | None:
    return count / result.duration_s if count and result.duration_s else None


_CHECKS: tuple[Callable[[AuditedResult], CheckAnswer | None], ...] = (
    _failures, _figures, _cache, _chunks, _token_counts, _client, _queue, _load, _ramp, _samples, _peak, _names, _runs,
)  # fmt: skip


def check_names() -> list[str]:
    """The names of the checks, as --allow takes them."""
    return [check.__name__.lstrip("_") for check in _CHECKS]
