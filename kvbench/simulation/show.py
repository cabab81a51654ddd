"""Simulated figures on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kvbench.common.console import make_table, print_plain, print_table
from kvbench.common.text import count, decimal, listing, milliseconds, percent, plural, significant, tokens_per_s
from kvbench.metrics.definitions import METRICS
from kvbench.metrics.latency import SAMPLES_NEEDED
from kvbench.metrics.model import Distribution
from kvbench.runs.model import COST_NOTES
from kvbench.simulation.recorder import Figures, FleetFigures
from kvbench.simulation.run import Facts, RateSearch, Simulation

_LATENCIES = ("ttft", "tpot", "itl", "e2el", "client_queue")
_SHARE = 0.0005  # of the steps' time: less is not told
_SHOWN = ("mean", "p50", "p95", "p99", "max")

_Columns = Mapping[str, Callable[[Any], str]]
_OF_A_REPLICA: _Columns = {
    "requests": lambda f: count(f.completed),
    "tok/s": lambda f: tokens_per_s(f.output_throughput),
    "TTFT mean ms": lambda f: milliseconds(f.ttft_ms.mean),
    "p95": lambda f: milliseconds(f.ttft_ms.p95),
    "running peak": lambda f: count(f.running.peak),
    "KV peak": lambda f: percent(f.kv_usage.peak),
    "hit rate": lambda f: percent(f.hit_rate),
    "preempted": lambda f: count(f.num_preemptions),
}
_OF_A_LOAD: _Columns = {
    "req/s": lambda f: significant(f.request_throughput),
    "tok/s": lambda f: tokens_per_s(f.output_throughput),
    "TTFT mean ms": lambda f: milliseconds(f.ttft_ms.mean),
    "p95": lambda f: milliseconds(f.ttft_ms.p95),
    "TPOT mean ms": lambda f: milliseconds(f.tpot_ms.mean),
    "p95 ": lambda f: milliseconds(f.tpot_ms.p95),
    "E2EL p95 ms": lambda f: milliseconds(f.e2el_ms.p95),
    "running peak": lambda f: count(f.running.peak),
    "waiting peak": lambda f: count(f.waiting.peak),
    "KV peak": lambda f: percent(f.kv_usage.peak),
    "hit rate": lambda f: percent(f.hit_rate),
    "preempted": lambda f: count(f.num_preemptions),
    "imbalance": lambda f: (
        f"{f.imbalance['total_output_tokens']:.2f}x" if "total_output_tokens" in f.imbalance else "–"
    ),
}


def show(console: Console, results: Sequence[Simulation]) -> None:
    """One simulation in full, several in a table of one line each."""
    if len(results) > 1:
        print_table(console, _table("load", _OF_A_LOAD, ((r.facts.name, r.figures) for r in results), "simulated"))
        print_plain(console, _machine_line(results[0].facts))
        for result in results:
            for line in filter(None, [_failures(result.figures), *_cost_notes(result.figures)]):
                print_plain(console, f"{result.facts.name}: {line}")
        return
    facts, figures = results[0].facts, results[0].figures
    shown = {"TTFT": figures.ttft_ms, "  in the steady window": figures.steady_latency.ttft_ms}
    shown |= {METRICS[name].short: values for name, values in _latencies(figures).items()}
    rows = [
        (title, *(_entry(values, which) for which in _SHOWN), count(values.n))
        for title, values in shown.items()
        if values.n
    ]
    title = f"load {facts.name} · ms, simulated"
    print_table(console, make_table(("", *_SHOWN, "samples"), rows, title=title))
    for line in filter(None, _lines(facts, figures)):
        print_plain(console, line)
    if figures.replicas:
        numbered = ((str(number), replica) for number, replica in enumerate(figures.replicas))
        print_table(console, _table("replica", _OF_A_REPLICA, numbered, "each replica, simulated"))


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def _latencies(figures: Figures) -> dict[str, Distribution]:
    values = {name: getattr(figures, METRICS[name].path) for name in _LATENCIES}
    return {name: distribution for name, distribution in values.items() if distribution is not None}


def _entry(values: Distribution, which: str) -> str:
    return milliseconds(getattr(values, which)) + ("*" if which in values.uncertain else "")


def _table(head: str, columns: _Columns, figures: Iterable[tuple[str, Figures]], title: str) -> Table:
    rows = [(name, *(text(one) for text in columns.values())) for name, one in figures]
    return make_table((head, *(column.strip() for column in columns)), rows, title=title)


def _cost_notes(figures: FleetFigures) -> list[str]:
    return [f"of the step times: {note}" for note in figures.notes[COST_NOTES]]


def _lines(facts: Facts, f: FleetFigures) -> list[str]:
    lines = [
        f"{significant(f.request_throughput)} requests/s, {tokens_per_s(f.output_throughput)} output tokens/s, "
        f"{tokens_per_s(f.total_token_throughput)} with the prompts; {plural(f.completed, 'request')} in "
        f"{significant(f.duration_s)} s",
        f"running {count(f.running.peak)} at most, {decimal(f.running.mean)} on average; waiting "
        f"{count(f.waiting.peak)} and {decimal(f.waiting.mean)}; KV in use {percent(f.kv_usage.peak)} and "
        f"{percent(f.kv_usage.mean)}",
        _preemptions(f),
        _hits(f),
        _goodput(f),
        _phases(f),
        _classes(f),
        _failures(f),
        _lengths(f),
        _spread(f),
        _machine_line(facts),
        *_cost_notes(f),
    ]
    if any(values.uncertain for values in _latencies(f).values()):
        lines.append(f"* too few samples for this percentile: {SAMPLES_NEEDED}")
    return lines


def _preemptions(f: Figures) -> str:
    text = plural(f.num_preemptions, "preemption")
    if f.recomputed_tokens:
        text += f", {plural(f.recomputed_tokens, 'token')} computed again"
    if f.swapped_out_slots:
        text += f", {plural(f.swapped_out_slots, 'token')} swapped out"
    return text


def _hits(f: Figures) -> str:
    if f.hit_rate is None:
        return ""
    return (
        f"prefix cache: {percent(f.hit_rate)} of the prompts' tokens were hits ({count(f.prefix_cache_hits)} of "
        f"{count(f.prefix_cache_queries)})"
    )


def _goodput(f: Figures) -> str:
    if f.goodput is None or not f.request_throughput:
        return ""
    share = f.goodput / f.request_throughput
    return f"goodput: {significant(f.goodput)} requests/s met every limit, {percent(share)} of those answered"


def _shares(seconds: Mapping[str, float], total: float) -> list[tuple[float, str]]:
    """The share of each, the largest first."""
    return sorted(((value / total, name) for name, value in seconds.items()), reverse=True) if total else []


def _phases(f: Figures) -> str:
    """Shares of the steps' time; phases that overlap come to more than all of it."""
    shares = [(share, name) for share, name in _shares(f.phase_seconds, f.busy_s) if share > _SHARE]
    if not shares:
        return ""
    text = listing([f"{name} {percent(share)}" for share, name in shares])
    overlap = " (some overlap)" if sum(share for share, _ in shares) > 1.0005 else ""
    moved = f.move_seconds / f.busy_s
    moves = f", {percent(moved)} of it to move KV" if moved > _SHARE else ""
    return f"where the steps' time goes: {text}{overlap}{moves}; {count(f.steps)} steps"


def _classes(f: FleetFigures) -> str:
    """Shares of the steps' time by what is computed."""
    shares = _shares(f.seconds_by_class, sum(f.seconds_by_class.values()))
    return f"by what they do: {listing([f'{name} {percent(share)}' for share, name in shares])}" if shares else ""


def _failures(f: Figures) -> str:
    if not f.failed:
        return ""
    unsent = f", and {plural(f.not_sent, 'later turn')} not sent" if f.not_sent else ""
    return f"{plural(f.failed, 'request')} refused{unsent}; the first: {f.first_failure}"


def _lengths(f: FleetFigures) -> str:
    """What differs from the file's or the trace's lengths."""
    lines = []
    if (scale := f.notes.get("length_scale", 1.0)) != 1.0:
        lines.append(f"lengths x {scale:.4g} of those of the trace or the file")
    if left_out := f.notes.get("trace_requests_too_long"):
        lines.append(f"{plural(left_out, 'request')} of the trace left out, longer than max_model_len")
    return "; ".join(lines)


def _spread(f: FleetFigures) -> str:
    if not f.imbalance:
        return ""
    words = {"total_output_tokens": "tokens", "busy_s": "busy time"}
    parts = [f"{value:.2f}x the mean of {words[name]}" for name, value in f.imbalance.items()]
    return f"imbalance: the replica with the most has {listing(parts)}"


def _machine_line(facts: Facts) -> str:
    fleet = f"{facts.replica_count} replicas of " if facts.replica_count > 1 else ""
    return f"nothing is measured: {fleet}{facts.model} on {facts.machine}; step times: {facts.cost_model}"


def search_table(console: Console, results: Sequence[RateSearch]) -> None:
    """What ``find_rate`` found, a line each, and why the next higher rate missed."""
    rows = []
    for result in results:
        missed = min((trial for trial in result.trials if not trial.met), key=lambda trial: trial.rate, default=None)
        rate = "all that were tried" if result.max_rate is None else significant(result.max_rate)
        rate = "none meets it" if result.max_rate == 0 else rate
        why = f"at {significant(missed.rate)}/s: {'; '.join(missed.missed)}" if missed else ""
        rows.append((result.facts.name, rate, count(len(result.trials)), why))
    slo = " and ".join(results[0].slo)
    heads = ("load", "requests/s", "runs", "missed")
    print_table(console, make_table(heads, rows, title=f"highest rate that meets {slo}, simulated"))
    print_plain(console, _machine_line(results[0].facts))
