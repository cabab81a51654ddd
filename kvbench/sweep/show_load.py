"""Shows one load: its line in a sweep, its table and sentences, and metrics.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict
from rich.console import Console

from kvbench.common.console import make_table, print_plain, print_table
from kvbench.common.records import Record
from kvbench.common.text import calibration_words, plural, slo_words
from kvbench.load.validity import MAX_SHORT_SHARE
from kvbench.measure.http import TargetInstrument
from kvbench.measure.words import PLATEAU_HEADS, plateau_row
from kvbench.metrics.canaries import WRONG_ANSWERS
from kvbench.metrics.definitions import Metric, latencies
from kvbench.metrics.latency import LONG_OPEN, SAMPLES_NEEDED, SEVERAL_TOKENS
from kvbench.metrics.model import (
    MIN_STEADY_REQUESTS,
    MIN_STEADY_SHARE,
    ClientFigures,
    Distribution,
    LoadMetrics,
    failed_words,
    failure_words,
)
from kvbench.requests.prefix_hits import OTHER_SEED, hit_notes
from kvbench.requests.request import RequestList
from kvbench.runs.aggregate import vllm_fields
from kvbench.runs.results import LoadResult
from kvbench.sweep.rate_search import Trial
from kvbench.workload.design import LoadPoint
from kvbench.workload.load_section import LoadConfig

_BELOW_ANOTHER = {  # metric -> its title where another row stands above it
    "ttfo": "  first output (TTFO)", "reasoning": "  reasoning time", "client_queue": "  queued in the client",
    "sequence_ttft": "  of each sequence",
}  # fmt: skip
_NOT_SHOWN = ("ttft_send",)  # in metrics.json alone
_TWICE = ("ttft", "tpot", "itl", "e2el")  # shown of the whole run, too, where the steady window leads
_SHOWN = ("mean", "p50", "p90", "p95", "p99")


class ScaledLengths(Record):
    """The scale of the lengths of a file's or a trace's requests; ``auto``: for the server's longest sequence."""

    scale: float
    auto: bool
    max_model_len: int | None = None
    longest_total_tokens: int | None = None


class StoredLoad(LoadResult):
    """metrics.json: a load's result with what its workload declared, and vLLM's fields. ``trial``: of a search."""

    model_config = ConfigDict(extra="allow")

    slo: Mapping[str, float | None] | None = None
    cache_state: str = ""
    notes: tuple[str, ...] = ()
    lengths: ScaledLengths | None = None
    prefix_caching: bool | None = None
    trial: Trial | None = None


def stored_load(instrument: TargetInstrument, point: LoadPoint, result: LoadResult) -> StoredLoad:
    """metrics.json of the load that was measured last."""
    server, target = instrument.server, instrument.server.target
    load = server.load
    fields = vllm_fields(
        result.metrics,
        point,
        date=result.started_at,
        backend=target.preset.name,
        model=target.model.name,
        burstiness=load.burstiness,
        max_concurrency=load.max_concurrency,
    )
    return StoredLoad(
        **fields,
        slo=load.slo.model_dump() if load.slo else None,
        cache_state=load.cache_state,
        notes=tuple(target.notes),
        lengths=lengths_of(load, instrument.requests, target.model.max_model_len),
        prefix_caching=server.info.engine.enable_prefix_caching,
        **result.fields(),
    )


def lengths_of(load: LoadConfig, requests: RequestList, max_model_len: int | None) -> ScaledLengths | None:
    """Tells how the lengths of ``requests`` were scaled; None where nothing was or could be."""
    wanted = getattr(load.prompts, "length_scale", 1.0)
    scale = requests.notes.get("length_scale")  # not of a trace's texts, which are never cut
    if wanted == 1.0 or (scale is None and load.prompts.kind == "trace"):
        return None
    totals = [len(r.prompt_token_ids) + r.max_tokens for r in requests if r.prompt_token_ids is not None]
    return ScaledLengths(
        scale=1.0 if scale is None else scale,
        auto=wanted == "auto",
        max_model_len=max_model_len,
        longest_total_tokens=max(totals, default=None),
    )


def one_line(done: LoadResult) -> str:
    """Writes ``412.3 output tok/s, TTFT p95 210 ms``, with what is wrong with the load."""
    metrics = done.metrics
    steady, ttft = metrics.steady_output_throughput, metrics.leading_latencies.ttft_ms.p95
    text = f"{steady or metrics.output_throughput or 0.0:.1f} output tok/s{'' if steady else ' (whole run)'}"
    if ttft is not None:
        text += f", TTFT p95 {ttft:.0f} ms{'' if metrics.has_steady_latency else ' (whole run)'}"
    if metrics.failed:
        text += f", {failed_words(metrics.failure_messages, metrics.failed, metrics.sent)}"
    if done.invalid_reasons:
        text += f"  invalid: {'; '.join(done.invalid_reasons)}"
    if done.refused:
        text += f"  REFUSED: {done.refused}"
    return text + (f"  WRONG ANSWERS: {done.wrong_answers}" if done.wrong_answers else "")


def show(console: Console, load_id: str, kept: StoredLoad) -> None:
    """Prints a table of latencies, further lines, and why the load is invalid."""
    metrics = kept.metrics
    if rows := _table_rows(metrics):
        head = f"load {load_id} · {'steady window' if metrics.has_steady_latency else 'whole run'} · ms"
        print_table(console, make_table(("", *_SHOWN, "samples"), rows, title=head))
    if metrics.plateaus:
        plateaus = [plateau_row([plateau]) for plateau in metrics.plateaus]
        print_table(console, make_table(PLATEAU_HEADS, plateaus, numbers_from=0, title="each plateau of the rate · ms"))
    for line in lines(kept):
        print_plain(console, line)
    if kept.refused:
        print_plain(console, f"REFUSED: the server {kept.refused}; do not compare it with loads that were served")
    if kept.wrong_answers:
        print_plain(console, f"WRONG ANSWERS: {kept.wrong_answers}; all of them are in {WRONG_ANSWERS}")
    for reason in kept.invalid_reasons:
        print_plain(console, f"INVALID: {reason}")


def _table_rows(metrics: LoadMetrics) -> list[tuple[str, ...]]:
    """The title, the statistics and the number of samples of each latency that any request has."""
    leading, shown = metrics.leading_latencies, []
    for metric in _latencies():
        values = leading.distribution(metric.path)
        figures = _figures(metric, values)
        if metric.name != "ttfo" or figures != _figures(metric, leading.ttft_ms):
            shown.append((values.n, _BELOW_ANOTHER.get(metric.name, metric.short), figures))
        if metric.name in _TWICE and metrics.has_steady_latency:
            whole = metrics.distribution(metric.path)
            shown.append((whole.n, "  whole run", _figures(metric, whole)))
        elif metric.name == "ttft" and metrics.steady_latency:
            steady = metrics.steady_latency.ttft_ms
            shown.append((steady.n, "  in the steady window", _figures(metric, steady)))
    return [(title, *figures) for samples, title, figures in shown if samples]


def _latencies() -> list[Metric]:
    """The latencies of the table, in the order of METRICS."""
    return [metric for metric in latencies() if metric.name not in _NOT_SHOWN]


def _figures(metric: Metric, values: Distribution) -> tuple[str, ...]:
    """The statistics of a latency, those of too few samples with a star, and the number of samples."""
    shown = []
    for statistic in _SHOWN:
        value, star = getattr(values, statistic), "*" if statistic in values.uncertain else ""
        shown.append("-" if value is None else f"{value:.{metric.digits}f}{star}")
    return *shown, str(values.n)


def lines(kept: StoredLoad) -> list[str]:
    """Writes what is not in the table, one sentence each."""
    metrics = kept.metrics
    sentences = [_warm_up(kept), _lengths(kept.lengths), _prompts(kept), *_remarks(metrics)]
    sentences += [_throughput(metrics), _reasoning(metrics), _goodput(kept)]
    sentences += [*_requests(metrics), _canaries(metrics), _cache(kept)]
    if any(plateau.steady_start_s is None for plateau in metrics.plateaus):
        sentences.append(
            "a plateau without figures had no steady part: the server did not keep up with its rate, or it was short"
        )
    sentences += [_client(metrics.client), _calibration(kept.calibration)]
    if kept.machine.foreign_cpu_cores is not None:
        sentences.append(f"other processes on this machine used {kept.machine.foreign_cpu_cores:.2f} of a core")
    shown = (metrics.leading_latencies.distribution(metric.path) for metric in _latencies())
    if any(values.n and values.uncertain for values in shown):
        sentences.append(f"* too few samples for this percentile: {SAMPLES_NEEDED}")
    return [text for text in sentences if text]


def _warm_up(kept: LoadResult) -> str:
    """Failures of the warm-up; those of the load are counted separately."""
    warm = kept.warm_up
    if not warm or not warm.failures:
        return ""
    text = f"warm-up: {warm.answered} of {warm.requests} requests were answered"
    return f"{text}, after {warm.failures} failed attempts (the last: {warm.last})"


def _lengths(lengths: ScaledLengths | None) -> str:
    """The factor of the file's or the trace's lengths; with ``auto`` it depends on the server."""
    if not lengths:
        return ""
    text = f"lengths x {lengths.scale:.4g}"
    if lengths.auto:
        text += f" (length_scale: auto, for the server's max_model_len {lengths.max_model_len:,})"
    return text + f", longest prompt with its output: {lengths.longest_total_tokens:,} tokens"


def _prompts(kept: LoadResult) -> str:
    """A sentence on the tokens that prompts came to on the server, beside those that were drawn."""
    if not kept.prompt_tokens_added or not any(kept.prompt_tokens_added):
        return ""
    least, median, most = kept.prompt_tokens_added
    spread = "" if least == most else f" ({least:+g} to {most:+g})"
    template = "" if kept.template_tokens is None else f", {kept.template_tokens} of them by its chat template"
    word = "more" if median >= 0 else "fewer"
    return f"prompts: the server counts {abs(median):g} tokens {word} than were drawn{spread}{template}"


def _remarks(metrics: LoadMetrics) -> list[str]:
    """Sentences on what a reader of the table must know, where it is so."""
    per_chunk, open_share = metrics.tokens_per_chunk or 0.0, metrics.open_after_last_share or 0.0
    in_window = metrics.steady_start_s is not None
    remarks = (
        (
            metrics.completed and in_window and not metrics.has_steady_latency,
            f"latencies are of the whole run: {metrics.steady_requests} of {metrics.completed} requests came in "
            f"the steady window, and {MIN_STEADY_REQUESTS} and {MIN_STEADY_SHARE:.0%} of all are needed: send more",
        ),
        (
            per_chunk >= SEVERAL_TOKENS and metrics.itl_ms.n,
            f"{per_chunk:.1f} tokens a chunk: ITL is between chunks, TPOT is the time of a token",
        ),
        (
            open_share > LONG_OPEN,
            f"streams stayed open for {metrics.open_after_last_p50_ms or 0.0:.0f} ms (median) after their last chunk, "
            f"{open_share:.1%} of the requests' time: E2EL ends with the last chunk, the next request of a user waits "
            "for the stream's end",
        ),
        (
            metrics.unstreamed_tokens,
            f"{metrics.unstreamed_tokens:,} of {metrics.total_output_tokens:,} output tokens were reasoning that was "
            "not streamed: TTFT is of the first token that came, TPOT of those from then on",
        ),
    )
    return [text for holds, text in remarks if holds]


def _throughput(metrics: LoadMetrics) -> str:
    steady = metrics.steady_output_throughput
    over_all = f"{metrics.output_throughput or 0:.1f} over the whole run ({metrics.duration_s:.1f} s)"
    if steady is None:
        why = f": {metrics.steady_note}" if metrics.steady_note else ""
        return f"output tokens/s: {over_all}, no steady window{why}"
    window = (metrics.steady_end_s or 0.0) - (metrics.steady_start_s or 0.0)
    requests = metrics.steady_request_throughput or 0.0
    steady_words = f"{steady:.1f} over the steady window ({window:.1f} s)"
    return f"output tokens/s: {steady_words}; {over_all}; requests/s in the steady window: {requests:.2f}"


def _reasoning(metrics: LoadMetrics) -> str:
    """Output tokens a second without reasoning, and how much of the output was reasoning; empty without any."""
    whole, steady = metrics.non_reasoning_output_throughput, metrics.steady_non_reasoning_output_throughput
    if whole is None:
        return ""
    text = f"without reasoning: {'' if steady is None else f'{steady:.1f} over the steady window; '}{whole:.1f} "
    reasoning, silent = metrics.total_reasoning_tokens, metrics.without_output
    text += "over the whole run"
    if reasoning is not None:
        text += f"; {reasoning:,} of {metrics.total_output_tokens:,} output tokens were reasoning"
    missing = f"; {plural(silent, 'request')} reasoned to the end, without a TTFO" if silent else ""
    return f"output tokens/s {text}{missing}"


def _goodput(kept: StoredLoad) -> str:
    metrics, words = kept.metrics, slo_words(kept.slo)
    if metrics.goodput is None or not words:
        return ""
    share = f"{metrics.goodput_share or 0:.1%} of the requests sent"
    text = f"goodput: {metrics.goodput:.2f} requests/s ({share}) met {words}"
    steady = metrics.steady_goodput
    return text + (f"; {steady:.2f} requests/s over the steady window" if steady is not None else "")


_COUNTS = {  # figures of the client, shown where they are not 0
    "short_outputs": "outputs ended before the length that ignore_eos asked for",
    "reopened_connections": "kept connections had been closed by the server and were opened anew",
    "prompt_token_mismatches": "prompts of which the server counted other tokens than were sent",
}


def _requests(metrics: LoadMetrics) -> list[str]:
    kinds = ", ".join(f"{kind} {n}" for kind, n in metrics.failure_kinds.items())
    parts = [f"requests: {metrics.completed} completed, {metrics.failed} failed" + (f" ({kinds})" if kinds else "")]
    if metrics.not_sent:
        parts.append(f"{metrics.not_sent} later turns of their conversations were not sent")
    parts += [f"{n} {words}" for name, words in _COUNTS.items() if (n := getattr(metrics.client, name))]
    asked, came = metrics.client.asked_output_tokens or 0, metrics.total_output_tokens
    if came < (1 - MAX_SHORT_SHARE) * asked:
        means = (tokens / metrics.completed for tokens in (came, asked))
        parts.append("answers had {:.1f} tokens on average, and {:.1f} were asked for at most".format(*means))
    most, first = failure_words(metrics.failure_messages, metrics.sent, kinds=True), metrics.first_failure
    return [
        "; ".join(parts),
        f"most frequent failures: {most}" if most else "",
        f"the first failure: {first}" if first and len(metrics.failure_messages) != 1 else "",
    ]


def _canaries(metrics: LoadMetrics) -> str:
    canaries = metrics.canaries
    if not canaries or not canaries.sent:
        return ""
    text = f"canaries: {canaries.sent} sent, {canaries.answered} answered, {canaries.wrong} wrongly"
    return text + (f"; the first: {canaries.first_wrong}" if canaries.wrong else "")


_MAY_REMEMBER = f"if the server was sent these prompts before, it may have kept them: {OTHER_SEED}"


def _cache(kept: StoredLoad) -> str:
    cache, bounds = kept.prefix_cache, kept.prefix_cache_bounds
    doubt = f", not verified ({cache.unverified})" if cache.unverified else ""
    text = f"prefix cache, {kept.cache_state}{doubt}: "
    if kept.prefix_caching is False:
        return text + "none, the server has prefix caching off"
    notes = hit_notes(cache)
    if kept.cache_state == "steady" and cache.hits != 0 and (cache.hits is None or not bounds):
        notes.append(_MAY_REMEMBER)
    if cache.hits is None or not cache.queries:
        return "; ".join((text + ("hit rate not known" if cache.hits is None else "no token was looked up"), *notes))
    text += f"{cache.hits / cache.queries:.1%} of {cache.queries:,.0f} prompt tokens hit"
    text += f", possible {bounds.low / cache.queries:.1%} to {bounds.high / cache.queries:.1%}" if bounds else ""
    return "; ".join((text, *notes))


_CLIENT = {  # figures of the client, and how they are written
    "schedule_slip_p99_ms": "schedule slip p99 {:.2f} ms",
    "turnaround_p50_ms": "its own pause between an answer and the next request p50 {:.2f} ms",
    "turnaround_p99_ms": "p99 {:.2f} ms",
    "turnaround_share": "{:.1%} of users' time",
    "cpu_s_per_1000_output_tokens": "{:.3f} CPU seconds per 1,000 output tokens",
    "cpu_fraction": "{:.0%} of a core",
}


def _client(client: ClientFigures) -> str:
    by_kernel = client.lag_source == "kernel stamps"
    parts = []
    if client.lag_p99_ms is not None:
        parts.append(f"timestamp lag p99 {client.lag_p99_ms:.2f} ms ({client.lag_source or 'loop probe'})")
    elif by_kernel:
        parts.append(f"timestamps are the kernel's (its own loop: lag p99 {client.loop_lag_p99_ms or 0:.2f} ms)")
    if client.lag_judged is False:
        parts.append("whose lag only the calibration tells" if by_kernel else "too few chunks to judge their lag")
    parts += [form.format(value) for name, form in _CLIENT.items() if (value := getattr(client, name)) is not None]
    return f"client: {', '.join(parts)}" if parts else ""


def _calibration(calibration: Mapping[str, Any] | None) -> str:
    if not calibration:
        return "client: not calibrated (`kvbench dev calibrate-client` tells how well it measures on its machine)"
    return f"calibration at {calibration_words(calibration['settings'], calibration['figures'])}"
