"""Simulated figures on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from kvbench.common.console import make_table, print_plain, print_table
from kvbench.common.text import count, decimal, listing, milliseconds, percent, plural, significant, tokens_per_s
from kvbench.metrics.latency import SAMPLES_NEEDED
from kvbench.runs.model import COST_NOTES

_LATENCIES = {
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "itl_ms": "ITL",
    "e2el_ms": "E2EL",
    "client_queue_ms": "client queue",
}
_SHARE = 0.0005  # of the steps' time: less is not told
_SHOWN = ("mean", "p50", "p95", "p99", "max")


def show(console: Console, results: Sequence[Mapping[str, Any]]) -> None:
    """One simulation in full, several in a table of one line each."""
    if len(results) > 1:
        print_table(console, _comparison(results))
        print_plain(console, _machine_line(results[0]))
        for result in results:
            told = [_failures(result), *(f"of the step times: {note}" for note in result["notes"][COST_NOTES])]
            for line in filter(None, told):
                print_plain(console, f"{result['name']}: {line}")
        return
    (result,) = results
    shown = {"TTFT": result["ttft_ms"], "  in the steady window": result["steady_latency"]["ttft_ms"]}
    shown |= {title: result[name] for name, title in _LATENCIES.items() if name in result}
    rows = [
        (title, *(_entry(values, which) for which in _SHOWN), count(values["n"]))
        for title, values in shown.items()
        if values["n"]
    ]
    title = f"load {result['name']} · ms, simulated"
    print_table(console, make_table(("", *_SHOWN, "samples"), rows, title=title))
    for line in _lines(result):
        print_plain(console, line)
    if "replicas" in result:
        heads = (
            "replica",
            "requests",
            "tok/s",
            "TTFT mean ms",
            "p95",
            "running peak",
            "KV peak",
            "hit rate",
            "preempted",
        )
        rows = [_replica_row(number, each) for number, each in enumerate(result["replicas"])]
        print_table(console, make_table(heads, rows, title="each replica, simulated"))


def _entry(values: Mapping[str, Any], which: str) -> str:
    return milliseconds(values[which]) + ("*" if which in values["uncertain"] else "")


def _replica_row(number: int, each: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(number), count(each["completed"]), tokens_per_s(each["output_throughput"]),
        milliseconds(each["ttft_ms"]["mean"]), milliseconds(each["ttft_ms"]["p95"]), count(each["running"]["peak"]),
        percent(each["kv_usage"]["peak"]), percent(_hit_rate(each)), count(each["num_preemptions"]),
    )  # fmt: skip


def _comparison(results: Sequence[Mapping[str, Any]]) -> Any:
    heads = ("load", "req/s", "tok/s", "TTFT mean ms", "p95", "TPOT mean ms", "p95", "E2EL p95 ms", "running peak",
             "waiting peak", "KV peak", "hit rate", "preempted", "imbalance")  # fmt: skip
    rows = [
        (
            r["name"], significant(r["request_throughput"]), tokens_per_s(r["output_throughput"]),
            milliseconds(r["ttft_ms"]["mean"]), milliseconds(r["ttft_ms"]["p95"]),
            milliseconds(r["tpot_ms"]["mean"]), milliseconds(r["tpot_ms"]["p95"]), milliseconds(r["e2el_ms"]["p95"]),
            count(r["running"]["peak"]), count(r["waiting"]["peak"]), percent(r["kv_usage"]["peak"]),
            percent(_hit_rate(r)), count(r["num_preemptions"]), _imbalance(r) or "–",
        )
        for r in results
    ]  # fmt: skip
    return make_table(heads, rows, title="simulated")


def _hit_rate(result: Mapping[str, Any]) -> float | None:
    queries = result["prefix_cache_queries"]
    return result["prefix_cache_hits"] / queries if queries else None


def _imbalance(result: Mapping[str, Any]) -> str:
    over = (result.get("imbalance") or {}).get("total_output_tokens")
    return "" if over is None else f"{over:.2f}x"


def _lines(result: Mapping[str, Any]) -> list[str]:
    level = {name: result[name] for name in ("running", "waiting", "kv_usage")}
    found = [
        f"{significant(result['request_throughput'])} requests/s, {tokens_per_s(result['output_throughput'])} output "
        f"tokens/s, {tokens_per_s(result['total_token_throughput'])} with the prompts; "
        f"{plural(result['completed'], 'request')} in {significant(result['duration_s'])} s",
        f"running {count(level['running']['peak'])} at most, {decimal(level['running']['mean'])} on average; waiting "
        f"{count(level['waiting']['peak'])} and {decimal(level['waiting']['mean'])}; KV in use "
        f"{percent(level['kv_usage']['peak'])} and {percent(level['kv_usage']['mean'])}",
        _preemptions(result),
        _hits(result),
        _goodput(result),
        _phases(result),
        _classes(result),
        _failures(result),
        _lengths(result),
        _spread(result),
        _machine_line(result),
        *(f"of the step times: {note}" for note in result["notes"][COST_NOTES]),
    ]
    if any(values["uncertain"] for name in _LATENCIES if (values := result.get(name))):
        found.append(f"* too few samples for this percentile: {SAMPLES_NEEDED}")
    return [line for line in found if line]


def _preemptions(result: Mapping[str, Any]) -> str:
    text = plural(result["num_preemptions"], "preemption")
    if result["recomputed_tokens"]:
        text += f", {plural(result['recomputed_tokens'], 'token')} computed again"
    if result["swapped_out_slots"]:
        text += f", {plural(result['swapped_out_slots'], 'token')} swapped out"
    return text


def _hits(result: Mapping[str, Any]) -> str:
    if (rate := _hit_rate(result)) is None:
        return ""
    return (
        f"prefix cache: {percent(rate)} of the prompts' tokens were hits "
        f"({count(result['prefix_cache_hits'])} of {count(result['prefix_cache_queries'])})"
    )


def _goodput(result: Mapping[str, Any]) -> str:
    if "goodput" not in result or not result["request_throughput"]:
        return ""
    share = result["goodput"] / result["request_throughput"]
    return f"goodput: {significant(result['goodput'])} requests/s met every limit, {percent(share)} of those answered"


def _phases(result: Mapping[str, Any]) -> str:
    """Shares of the steps' time; phases that overlap come to more than all of it."""
    busy = result["busy_s"]
    shares = sorted(
        ((s / busy, name) for name, s in result["phase_seconds"].items() if busy and s / busy > _SHARE), reverse=True
    )
    if not shares:
        return ""
    text = listing([f"{name} {percent(share)}" for share, name in shares])
    overlap = " (some overlap)" if sum(share for share, _ in shares) > 1.0005 else ""
    moves = (
        f", {percent(result['move_seconds'] / busy)} of it to move KV"
        if busy and result["move_seconds"] / busy > _SHARE
        else ""
    )
    return f"where the steps' time goes: {text}{overlap}{moves}; {count(result['steps'])} steps"


def _classes(result: Mapping[str, Any]) -> str:
    """Shares of the steps' time by what is computed."""
    classes = result.get("seconds_by_class") or {}
    shares = sorted(((seconds / sum(classes.values()), name) for name, seconds in classes.items()), reverse=True)
    return f"by what they do: {listing([f'{name} {percent(share)}' for share, name in shares])}" if shares else ""


def _failures(result: Mapping[str, Any]) -> str:
    if not result["failed"]:
        return ""
    unsent = f", and {plural(result['not_sent'], 'later turn')} not sent" if result["not_sent"] else ""
    return f"{plural(result['failed'], 'request')} refused{unsent}; the first: {result['first_failure']}"


def _lengths(result: Mapping[str, Any]) -> str:
    """What differs from the file's or the trace's lengths."""
    notes, found = result["notes"], []
    if (scale := notes.get("length_scale", 1.0)) != 1.0:
        found.append(f"lengths x {scale:.4g} of those of the trace or the file")
    if left_out := notes.get("trace_requests_too_long"):
        found.append(f"{plural(left_out, 'request')} of the trace left out, longer than max_model_len")
    return "; ".join(found)


def _spread(result: Mapping[str, Any]) -> str:
    if not (over := result.get("imbalance")):
        return ""
    words = {"total_output_tokens": "tokens", "busy_s": "busy time"}
    parts = [f"{value:.2f}x the mean of {words[name]}" for name, value in over.items()]
    return f"imbalance: the replica with the most has {listing(parts)}"


def _machine_line(result: Mapping[str, Any]) -> str:
    fleet = f"{result['replica_count']} replicas of " if result["replica_count"] > 1 else ""
    return f"nothing is measured: {fleet}{result['model']} on {result['machine']}; step times: {result['cost_model']}"


def search_table(console: Console, results: Sequence[Mapping[str, Any]]) -> None:
    """What ``find_rate`` found, a line each, and why the next higher rate missed."""
    rows = []
    for result in results:
        missed = min((t for t in result["trials"] if not t["met"]), key=lambda t: t["rate"], default=None)
        rate = "all that were tried" if result["always_met"] else significant(result["max_rate"] or 0.0)
        rate = rate if result["max_rate"] != 0 else "none meets it"
        why = f"at {significant(missed['rate'])}/s: {'; '.join(missed['missed'])}" if missed else ""
        rows.append((result["name"], rate, count(len(result["trials"])), why))
    slo = " and ".join(results[0]["slo"])
    heads = ("load", "requests/s", "runs", "missed")
    print_table(console, make_table(heads, rows, title=f"highest rate that meets {slo}, simulated"))
    print_plain(console, _machine_line(results[0]))
