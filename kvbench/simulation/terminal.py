"""The figures of simulations on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kvbench.common.console import make_table, print_plain, print_table
from kvbench.common.text import count, decimal, listing, milliseconds, percent, plural, ratio, significant, tokens_per_s
from kvbench.metrics.definitions import METRICS
from kvbench.metrics.latency import SAMPLES_NEEDED
from kvbench.metrics.model import Distribution
from kvbench.runs.results import COST_NOTES
from kvbench.simulation.fleet.recorder import FleetFigures, SimulatedFigures
from kvbench.simulation.run import SimulatedRateSearch, Simulation, SimulationFacts
from kvbench.simulation.wording import sentence

_LATENCIES = ("ttft", "tpot", "itl", "e2el", "client_queue")
_LEAST_SHARE = 0.0005  # of the steps' time that is shown
_SHOWN = ("mean", "p50", "p95", "p99", "max")

_COLUMNS: Sequence[tuple[str, str, Callable[[Any], str]]] = (
    ("replica", "requests", lambda f: count(f.completed)),
    ("load", "req/s", lambda f: significant(f.request_throughput)),
    ("both", "tok/s", lambda f: tokens_per_s(f.output_throughput)),
    ("both", "TTFT mean ms", lambda f: milliseconds(f.ttft_ms.mean)),
    ("both", "p95", lambda f: milliseconds(f.ttft_ms.p95)),
    ("load", "TPOT mean ms", lambda f: milliseconds(f.tpot_ms.mean)),
    ("load", "p95", lambda f: milliseconds(f.tpot_ms.p95)),
    ("load", "E2EL p95 ms", lambda f: milliseconds(f.e2el_ms.p95)),
    ("both", "running peak", lambda f: count(f.running.peak)),
    ("load", "waiting peak", lambda f: count(f.waiting.peak)),
    ("both", "KV peak", lambda f: percent(f.kv_usage.peak)),
    ("both", "hit rate", lambda f: percent(f.hit_rate)),
    ("both", "preempted", lambda f: count(f.num_preemptions)),
    ("load", "imbalance", lambda f: ratio(f.imbalance.get("total_output_tokens"))),
)
"""A column of the tables of loads and replicas: which of them has it, its head, and its text."""


def show(console: Console, results: Sequence[Simulation]) -> None:
    """Prints one simulation in full, several in a table of one line each."""
    if len(results) > 1:
        print_table(console, _table("load", {r.facts.name: r.figures for r in results}, "simulated"))
        print_plain(console, _machine_line(results[0].facts))
        for result in results:
            for line in [*_failures(result.figures), *_cost_notes(result.figures)]:
                print_plain(console, sentence("terminal.of_load", load=result.facts.name, line=line))
        return
    facts, figures = results[0].facts, results[0].figures
    latencies = {METRICS[name].short: getattr(figures, METRICS[name].path) for name in _LATENCIES}
    shown = {"TTFT": figures.ttft_ms, "  in the steady window": figures.steady_latency.ttft_ms, **latencies}
    rows = [(title, *_entries(values)) for title, values in shown.items() if values.n]
    title = sentence("terminal.table_title", name=facts.name)
    print_table(console, make_table(("", *_SHOWN, "samples"), rows, title=title))
    lines = [*_load_lines(figures), *_step_lines(figures), *_failures(figures), *_length_lines(figures)]
    lines += [_machine_line(facts), *_cost_notes(figures)]
    if any(values.n and values.uncertain for values in latencies.values()):
        lines.append(sentence("terminal.uncertain", needed=SAMPLES_NEEDED))
    for line in lines:
        print_plain(console, line)
    if figures.replicas:
        numbered = {str(number): replica for number, replica in enumerate(figures.replicas)}
        print_table(console, _table("replica", numbered, "each replica, simulated"))


def _entries(values: Distribution) -> list[str]:
    """Writes ``_SHOWN`` of a latency, with a star where the samples are too few, and the number of samples."""
    shown = [milliseconds(getattr(values, which)) + "*" * (which in values.uncertain) for which in _SHOWN]
    return [*shown, count(values.n)]


def _table(what: str, figures: Mapping[str, SimulatedFigures], title: str) -> Table:
    columns = [(head, text) for table, head, text in _COLUMNS if table in (what, "both")]
    rows = [(name, *(text(values) for _, text in columns)) for name, values in figures.items()]
    return make_table((what, *(head for head, _ in columns)), rows, title=title)


def _load_lines(figures: FleetFigures) -> Iterator[str]:
    yield sentence(
        "terminal.load",
        requests_per_s=significant(figures.request_throughput),
        output=tokens_per_s(figures.output_throughput),
        total=tokens_per_s(figures.total_token_throughput),
        requests=plural(figures.completed, "request"),
        seconds=significant(figures.duration_s),
    )
    running, waiting, kv = figures.running, figures.waiting, figures.kv_usage
    peaks = {"running": count(running.peak), "waiting": count(waiting.peak), "kv": percent(kv.peak)}
    means = {"running_mean": decimal(running.mean), "waiting_mean": decimal(waiting.mean), "kv_mean": percent(kv.mean)}
    yield sentence("terminal.levels", **peaks, **means)
    yield sentence(
        "terminal.preempted",
        preemptions=plural(figures.num_preemptions, "preemption"),
        recomputed=sentence("terminal.recomputed", n=figures.recomputed_tokens),
        swapped=sentence("terminal.swapped", n=figures.swapped_out_slots),
    )
    if figures.hit_rate is not None:
        counts = {"hits": count(figures.prefix_cache_hits), "queries": count(figures.prefix_cache_queries)}
        yield sentence("terminal.cache", share=percent(figures.hit_rate), **counts)
    if figures.goodput is not None and figures.request_throughput:
        share = percent(figures.goodput / figures.request_throughput)
        yield sentence("terminal.goodput", rate=significant(figures.goodput), share=share)


def _shares(seconds: Mapping[str, float], total: float) -> list[tuple[float, str]]:
    """Computes the share of each, the largest first."""
    return sorted(((value / total, name) for name, value in seconds.items()), reverse=True) if total else []


def _share_words(shares: Sequence[tuple[float, str]]) -> str:
    return listing([sentence("terminal.share", name=name, share=percent(share)) for share, name in shares])


def _step_lines(figures: FleetFigures) -> Iterator[str]:
    """Yields shares of the steps' time by phase, more than all of it where they overlap, and by operator."""
    phases = [(share, name) for share, name in _shares(figures.phase_seconds, figures.busy_s) if share > _LEAST_SHARE]
    if phases:
        overlap = moves = ""
        if sum(share for share, _ in phases) > 1 + _LEAST_SHARE:
            overlap = sentence("terminal.overlap")
        moved = figures.move_seconds / figures.busy_s
        if moved > _LEAST_SHARE:
            moves = sentence("terminal.moves", share=percent(moved))
        steps = {"steps": count(figures.steps), "shares": _share_words(phases)}
        yield sentence("terminal.phases", overlap=overlap, moves=moves, **steps)
    if classes := _shares(figures.seconds_by_class, sum(figures.seconds_by_class.values())):
        yield sentence("terminal.classes", shares=_share_words(classes))


def _failures(figures: SimulatedFigures) -> list[str]:
    if not figures.failed:
        return []
    unsent = sentence("terminal.unsent", n=figures.not_sent)
    requests = plural(figures.failed, "request")
    return [sentence("terminal.refused", requests=requests, unsent=unsent, why=figures.first_failure)]


def _length_lines(figures: FleetFigures) -> Iterator[str]:
    lengths = []
    if (scale := figures.notes.get("length_scale", 1.0)) != 1.0:
        lengths.append(sentence("terminal.scaled", scale=scale))
    if left_out := figures.notes.get("trace_requests_too_long"):
        lengths.append(sentence("terminal.too_long", requests=plural(left_out, "request")))
    if lengths:
        yield "; ".join(lengths)
    parts = [sentence("terminal.imbalance_part", name, ratio=ratio(most)) for name, most in figures.imbalance.items()]
    if parts:
        yield sentence("terminal.imbalance", parts=listing(parts))


def _cost_notes(figures: FleetFigures) -> list[str]:
    return [sentence("terminal.cost_note", note=note) for note in figures.notes[COST_NOTES]]


def _machine_line(facts: SimulationFacts) -> str:
    replicas, source = facts.replica_count, facts.cost_model
    return sentence("terminal.machine", n=replicas, model=facts.model, machine=facts.machine, source=source)


def show_search(console: Console, results: Sequence[SimulatedRateSearch]) -> None:
    """Prints what ``find_rate`` returned, a line each, and why the next higher rate missed."""
    rows = []
    for result in results:
        missed = min((trial for trial in result.trials if not trial.met), key=lambda trial: trial.rate, default=None)
        why = ""
        if missed is not None:
            why = sentence("terminal.missed", rate=significant(missed.rate), why="; ".join(missed.missed))
        rate = {None: "all that were tried", 0: "none meets it"}.get(result.max_rate) or significant(result.max_rate)
        rows.append((result.facts.name, rate, count(len(result.trials)), why))
    title = sentence("terminal.search_title", slo=" and ".join(results[0].slo))
    print_table(console, make_table(("load", "requests/s", "runs", "missed"), rows, title=title))
    print_plain(console, _machine_line(results[0].facts))
