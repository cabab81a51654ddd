"""The result of one load on a running server: metrics.json, and the same as a table and lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from kvbench.common.console import make_table, print_plain, print_table
from kvbench.common.text import calibration_words, failure_words, plural, slo_words
from kvbench.load.validity import MAX_SHORT_SHARE
from kvbench.measure.http import TargetInstrument
from kvbench.metrics.canaries import WRONG_ANSWERS
from kvbench.metrics.latency import (
    LATENCIES,
    LONG_OPEN,
    MIN_STEADY_REQUESTS,
    MIN_STEADY_SHARE,
    SAMPLES_NEEDED,
    SEVERAL_TOKENS,
    goodput_share,
    has_steady_latency,
    leading_latencies,
    steady_requests,
)
from kvbench.metrics.model import Plateau
from kvbench.requests.prefix_hits import OTHER_SEED, hit_notes
from kvbench.runs.aggregate import PLATEAU_HEADS, plateau_row, vllm_fields
from kvbench.workload.design import LoadPoint
from kvbench.workload.load_section import LoadConfig

_ROWS = (
    ("ttft_ms", "TTFT"),
    ("ttfo_ms", "  first output (TTFO)"),
    ("reasoning_ms", "  reasoning time"),
    ("client_queue_ms", "  queued in the client"),
    ("sequence_ttft_ms", "  of each sequence"),
    ("tpot_ms", "TPOT"),
    ("itl_ms", "ITL"),
    ("e2el_ms", "E2EL"),
)
_SHOWN = ("mean", "p50", "p90", "p95", "p99")


def stored(instrument: TargetInstrument, point: LoadPoint, result: Mapping[str, Any]) -> dict[str, Any]:
    """metrics.json: vLLM's fields, then everything under kvbench's own names."""
    server, target = instrument.server, instrument.server.target
    load = server.load
    return {
        **vllm_fields(
            result["metrics"],
            point,
            date=result["started_at"],
            backend=target.preset.name,
            model=target.model.name,
            burstiness=load.burstiness,
            max_concurrency=load.max_concurrency,
        ),
        "slo": load.slo.model_dump() if load.slo else None,
        "cache_state": load.cache_state,
        **{name: value for name, value in result.items() if name != "metrics"},
        "metrics": result["metrics"],
        "notes": [*target.notes],
        "lengths": lengths_of(load, instrument.requests, target.model.max_model_len),
        "prefix_caching": server.info.engine.enable_prefix_caching,
    }


def show(console: Console, load_id: str, kept: Mapping[str, Any]) -> None:
    """Prints ``kept`` (metrics.json): a table of latencies, further lines, and why the load is invalid."""
    metrics = kept["metrics"]
    steady, leading, shown = has_steady_latency(metrics), leading_latencies(metrics), []
    for name, title in _ROWS:
        values = leading.get(name) or {}
        if name != "ttfo_ms" or _figures(values) != _figures(leading.get("ttft_ms") or {}):
            shown.append((title, values))
        if steady and name in LATENCIES:
            shown.append(("  whole run", metrics[name]))
        elif name == "ttft_ms":
            shown.append(("  in the steady window", (metrics.get("steady_latency") or {}).get(name) or {}))
    rows = [(title, *_figures(values)) for title, values in shown if values.get("n")]
    plateaus = [plateau_row([Plateau.model_validate(plateau)]) for plateau in metrics.get("plateaus") or ()]
    if rows:
        head = f"load {load_id} · {'steady window' if steady else 'whole run'} · ms"
        print_table(console, make_table(("", *_SHOWN, "samples"), rows, title=head))
    if plateaus:
        print_table(console, make_table(PLATEAU_HEADS, plateaus, numbers_from=0, title="each plateau of the rate · ms"))
    for line in lines(kept):
        print_plain(console, line)
    if kept.get("refused"):
        print_plain(console, f"REFUSED: the server {kept['refused']}; do not compare it with loads that were served")
    if kept.get("wrong_answers"):
        print_plain(console, f"WRONG ANSWERS: {kept['wrong_answers']}; all of them are in {WRONG_ANSWERS}")
    for reason in kept["invalid_reasons"]:
        print_plain(console, f"INVALID: {reason}")


def _figures(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The mean, the percentiles and the number of samples of a latency, as the table shows them."""
    return *(_percentile(values, which) for which in _SHOWN), str(values.get("n"))


def _percentile(values: Mapping[str, Any], which: str) -> str:
    if values.get(which) is None:
        return "-"
    return f"{values[which]:.1f}" + ("*" if which in (values.get("uncertain") or ()) else "")


def lines(kept: Mapping[str, Any]) -> list[str]:
    """What is not in the table, one sentence each."""
    metrics = kept["metrics"]
    sentences = [_warm_up(kept), _lengths(kept), _prompts(kept), *_remarks(metrics)]
    sentences += [_throughput(metrics), _reasoning(metrics), _goodput(kept)]
    sentences += [*_requests(metrics), _canaries(metrics), _cache(kept)]
    if any(plateau.get("steady_start_s") is None for plateau in metrics.get("plateaus") or ()):
        sentences.append(
            "a plateau without figures had no steady part: the server did not keep up with its rate, or it was short"
        )
    sentences += [_client(metrics), _calibration(kept), _server(kept)]
    latencies = [leading_latencies(metrics).get(name) or {} for name, _ in _ROWS]
    if any(values.get("n") and values.get("uncertain") for values in latencies):
        sentences.append(f"* too few samples for this percentile: {SAMPLES_NEEDED}")
    return [text for text in sentences if text]


def _warm_up(kept: Mapping[str, Any]) -> str:
    """Failures of the warm-up; those of the load are counted separately."""
    warm = kept.get("warm_up") or {}
    if not warm.get("failures"):
        return ""
    text = f"warm-up: {warm['answered']} of {warm['requests']} requests were answered"
    return f"{text}, after {warm['failures']} failed attempts (the last: {warm['last']})"


def _lengths(kept: Mapping[str, Any]) -> str:
    """The factor of the file's or the trace's lengths; with ``auto`` it depends on the server."""
    lengths = kept.get("lengths")
    if not lengths:
        return ""
    text = f"lengths x {lengths['scale']:.4g}"
    if lengths["auto"]:
        text += f" (length_scale: auto, for the server's max_model_len {lengths['max_model_len']:,})"
    return text + f", longest prompt with its output: {lengths['longest_total_tokens']:,} tokens"


def _prompts(kept: Mapping[str, Any]) -> str:
    """A sentence on the tokens that prompts came to on the server, beside those that were drawn."""
    added = kept.get("prompt_tokens_added")
    if not added or not any(added):
        return ""
    least, median, most = added
    spread = "" if least == most else f" ({least:+d} to {most:+d})"
    template = kept.get("template_tokens")
    of_template = "" if template is None else f", {template} of them by its chat template"
    word = "more" if median >= 0 else "fewer"
    return f"prompts: the server counts {abs(median):g} tokens {word} than were drawn{spread}{of_template}"


def lengths_of(load: LoadConfig, requests: Sequence[Any], max_model_len: int | None) -> dict[str, Any] | None:
    """metrics.json's ``lengths``: how those of ``requests`` were scaled; None where nothing was or could be."""
    wanted = getattr(load.prompts, "length_scale", 1.0)
    scale = getattr(requests, "notes", {}).get("length_scale")  # not of a trace's texts, which are never cut
    if wanted == 1.0 or (scale is None and load.prompts.kind == "trace"):
        return None
    totals = [len(r.prompt_token_ids) + r.max_tokens for r in requests if r.prompt_token_ids is not None]
    return {
        "scale": 1.0 if scale is None else scale,
        "auto": wanted == "auto",
        "max_model_len": max_model_len,
        "longest_total_tokens": max(totals, default=None),
    }


def _remarks(metrics: Mapping[str, Any]) -> list[str]:
    """Sentences on what a reader of the table must know, where it is so."""
    per_chunk, open_share = (metrics.get(name) or 0.0 for name in ("tokens_per_chunk", "open_after_last_share"))
    open_ms, unstreamed = metrics.get("open_after_last_p50_ms") or 0.0, metrics.get("unstreamed_tokens") or 0
    remarks = (
        (
            metrics["completed"] and metrics.get("steady_start_s") is not None and not has_steady_latency(metrics),
            f"latencies are of the whole run: {steady_requests(metrics)} of {metrics['completed']} requests came in "
            f"the steady window, and {MIN_STEADY_REQUESTS} and {MIN_STEADY_SHARE:.0%} of all are needed: send more",
        ),
        (
            per_chunk >= SEVERAL_TOKENS and (metrics.get("itl_ms") or {}).get("n"),
            f"{per_chunk:.1f} tokens a chunk: ITL is between chunks, TPOT is the time of a token",
        ),
        (
            open_share > LONG_OPEN,
            f"streams stayed open for {open_ms:.0f} ms (median) after their last chunk, {open_share:.1%} of the "
            "requests' time: E2EL ends with the last chunk, the next request of a user waits for the stream's end",
        ),
        (
            unstreamed,
            f"{unstreamed:,} of {metrics['total_output_tokens']:,} output tokens were reasoning that was not streamed: "
            "TTFT is of the first token that came, TPOT of those from then on",
        ),
    )
    return [text for holds, text in remarks if holds]


def _throughput(metrics: Mapping[str, Any]) -> str:
    whole, steady = metrics.get("output_throughput"), metrics.get("steady_output_throughput")
    over_all = f"{whole or 0:.1f} over the whole run ({metrics['duration_s']:.1f} s)"
    if steady is None:
        why = metrics.get("steady_note")
        return f"output tokens/s: {over_all}, no steady window" + (f": {why}" if why else "")
    window = metrics["steady_end_s"] - metrics["steady_start_s"]
    requests = metrics.get("steady_request_throughput") or 0.0
    steady_words = f"{steady:.1f} over the steady window ({window:.1f} s)"
    return f"output tokens/s: {steady_words}; {over_all}; requests/s in the steady window: {requests:.2f}"


def _reasoning(metrics: Mapping[str, Any]) -> str:
    """Output tokens a second without reasoning, and how much of the output was reasoning; empty without any."""
    whole, steady = (metrics.get(f"{when}non_reasoning_output_throughput") for when in ("", "steady_"))
    if whole is None:
        return ""
    text = f"without reasoning: {'' if steady is None else f'{steady:.1f} over the steady window; '}{whole:.1f} "
    total, reasoning = metrics["total_output_tokens"], metrics["total_reasoning_tokens"]
    share = "" if reasoning is None else f"; {reasoning:,} of {total:,} output tokens were reasoning"
    silent = metrics["without_output"]
    missing = f"; {plural(silent, 'request')} reasoned to the end, without a TTFO" if silent else ""
    return f"output tokens/s {text}over the whole run{share}{missing}"


def _goodput(kept: Mapping[str, Any]) -> str:
    metrics, words = kept["metrics"], slo_words(kept.get("slo"))
    if metrics.get("goodput") is None or not words:
        return ""
    share = goodput_share(metrics)
    text = f"goodput: {metrics['goodput']:.2f} requests/s ({share or 0:.1%} of the requests sent) met {words}"
    steady = metrics.get("steady_goodput")
    return text + (f"; {steady:.2f} requests/s over the steady window" if steady is not None else "")


_COUNTS = {  # figures of the client, shown where they are not 0
    "short_outputs": "outputs ended before the length that ignore_eos asked for",
    "reopened_connections": "kept connections had been closed by the server and were opened anew",
    "prompt_token_mismatches": "prompts of which the server counted other tokens than were sent",
}


def _requests(metrics: Mapping[str, Any]) -> list[str]:
    kinds = ", ".join(f"{kind} {n}" for kind, n in (metrics.get("failure_kinds") or {}).items())
    parts = [
        f"requests: {metrics['completed']} completed, {metrics['failed']} failed" + (f" ({kinds})" if kinds else "")
    ]
    if unsent := metrics.get("not_sent"):
        parts.append(f"{unsent} later turns of their conversations were not sent")
    client, first = metrics.get("client") or {}, metrics.get("first_failure")
    parts += [f"{client[name]} {words}" for name, words in _COUNTS.items() if client.get(name)]
    asked, came = client.get("asked_output_tokens") or 0, metrics.get("total_output_tokens") or 0
    if came < (1 - MAX_SHORT_SHARE) * asked:
        means = (tokens / metrics["completed"] for tokens in (came, asked))
        parts.append("answers had {:.1f} tokens on average, and {:.1f} were asked for at most".format(*means))
    sent = metrics["completed"] + metrics["failed"]
    most = failure_words(metrics.get("failure_messages") or {}, sent, kinds=True)
    return [
        "; ".join(parts),
        f"most frequent failures: {most}" if most else "",
        f"the first failure: {first}" if first and len(metrics.get("failure_messages") or {}) != 1 else "",
    ]


def _canaries(metrics: Mapping[str, Any]) -> str:
    found = metrics.get("canaries")
    if not found:
        return ""
    text = f"canaries: {found['sent']} sent, {found['answered']} answered, {found['wrong']} wrongly"
    return text + (f"; the first: {found['first_wrong']}" if found["wrong"] else "")


_MAY_REMEMBER = f"if the server was sent these prompts before, it may have kept them: {OTHER_SEED}"


def _cache(kept: Mapping[str, Any]) -> str:
    cache = kept.get("prefix_cache") or {}
    hits, queries, bounds = cache.get("hits"), cache.get("queries"), kept.get("prefix_cache_bounds")
    doubt = cache.get("unverified")
    text = f"prefix cache, {kept['cache_state']}{f', not verified ({doubt})' if doubt else ''}: "
    if kept.get("prefix_caching") is False:
        return text + "none, the server has prefix caching off"
    notes = hit_notes(cache)
    if kept["cache_state"] == "steady" and hits != 0 and (hits is None or not bounds):
        notes.append(_MAY_REMEMBER)
    if hits is None or not queries:
        return "; ".join((text + ("hit rate not known" if hits is None else "no token was looked up"), *notes))
    text += f"{hits / queries:.1%} of {queries:,.0f} prompt tokens hit"
    text += f", possible {bounds['low'] / queries:.1%} to {bounds['high'] / queries:.1%}" if bounds else ""
    return "; ".join((text, *notes))


def _client(metrics: Mapping[str, Any]) -> str:
    client = metrics.get("client") or {}
    by_kernel = client.get("lag_source") == "kernel stamps"
    parts = []
    if client.get("lag_p99_ms") is not None:
        parts.append(f"timestamp lag p99 {client['lag_p99_ms']:.2f} ms ({client.get('lag_source', 'loop probe')})")
    elif by_kernel:
        parts.append(f"timestamps are the kernel's (its own loop: lag p99 {client['loop_lag_p99_ms'] or 0:.2f} ms)")
    if client.get("lag_judged") is False:
        parts.append("whose lag only the calibration tells" if by_kernel else "too few chunks to judge their lag")
    figures = {
        "schedule_slip_p99_ms": "schedule slip p99 {:.2f} ms",
        "turnaround_p50_ms": "its own pause between an answer and the next request p50 {:.2f} ms",
        "turnaround_p99_ms": "p99 {:.2f} ms",
        "turnaround_share": "{:.1%} of users' time",
        "cpu_s_per_1000_output_tokens": "{:.3f} CPU seconds per 1,000 output tokens",
        "cpu_fraction": "{:.0%} of a core",
    }
    parts += [form.format(client[name]) for name, form in figures.items() if client.get(name) is not None]
    return f"client: {', '.join(parts)}" if parts else ""


_UNCALIBRATED = "client: not calibrated (`kvbench calibrate-client` tells how well it measures on its machine)"


def _calibration(kept: Mapping[str, Any]) -> str:
    found = kept.get("calibration")
    return f"calibration at {calibration_words(found['settings'], found['figures'])}" if found else _UNCALIBRATED


def _server(kept: Mapping[str, Any]) -> str:
    foreign = (kept.get("machine") or {}).get("foreign_cpu_cores")
    return "" if foreign is None else f"other processes on this machine used {foreign:.2f} of a core"
