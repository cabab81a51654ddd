"""``kvbench simulate``: its options as jobs, and their figures on the terminal."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvbench import __version__
from kvbench.common.console import make_table, print_plain, print_table, status_line
from kvbench.common.errors import UsageError, say
from kvbench.common.files import as_stored, check_output_dir, unpack
from kvbench.common.git import git_state
from kvbench.common.option_rules import RAY_OPTIONS, check_goes_with
from kvbench.common.text import count, decimal, listing, milliseconds, percent, plural, ratio, significant, tokens_per_s
from kvbench.metrics.definitions import METRICS
from kvbench.metrics.latency import SAMPLES_NEEDED
from kvbench.metrics.model import Distribution
from kvbench.runs.results import COST_NOTES
from kvbench.simulation.choose import machine_facts, machine_of, profile_of, simulated_workload
from kvbench.simulation.fleet.drive import ROUTERS
from kvbench.simulation.fleet.pool import RayOptions, map_simulations
from kvbench.simulation.fleet.recorder import FleetFigures, SimulatedFigures
from kvbench.simulation.request import SimulateRequest
from kvbench.simulation.run import (
    FIRST_RATE,
    SimulatedRateSearch,
    Simulation,
    SimulationFacts,
    SimulationJob,
    find_rate,
    simulate,
    simulate_and_pack,
)
from kvbench.sweep.load_options import check_named_load, choose_load, workload_source
from kvbench.sweep.rate_search import Condition, parse_conditions
from kvbench.sweep.requests import LoadOptions
from kvbench.workload.design import LoadPoint
from kvbench.workload.file import Workload
from kvbench.workload.options import PromptOptions
from kvbench.workload.settings import slug


def simulate_command(request: SimulateRequest) -> int:
    """Runs the command; its exit code. Raises UsageError."""
    given, workload = request.given, request.workload
    needs = {name: ["--find-max-rate"] for name in ("run_seconds", "tolerance")}
    check_goes_with(given, needs, ["--find-max-rate"] if request.find_max_rate else [])
    check_goes_with(given, RAY_OPTIONS, [f"--executor {request.executor}"])
    if request.router and max(request.replicas) == 1:
        raise UsageError(
            "--router chooses among replicas, and there is one: give --replicas 2 or more, or leave it out"
        )
    if workload is None and not request.model:
        raise UsageError("--model is missing: give for example --model llama-3.1-8b, or a workload file")
    conditions = _conditions(request.find_max_rate, request.request_rate)
    folder: Path | None = request.output_dir
    if folder is not None:
        if conditions:
            raise UsageError(
                "--find-max-rate keeps no files: leave --output-dir out, or simulate the rate that it finds"
            )
        check_output_dir(folder)
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"--output-dir {folder} is not empty: give a new one")
    jobs, notes = _jobs(request)
    if any("goodput" in condition.text for condition in conditions) and any(job.load.slo is None for job in jobs):
        raise UsageError(
            "--find-max-rate with goodput needs to know which requests are good: give --goodput as well, such as "
            "'ttft:500 tpot:50', or load.slo in the workload"
        )
    for note in notes:
        say(f"note: {note}")
    console = Console()
    results = _run_all(jobs, conditions, request)
    if request.as_json:
        facts = [result.to_json() for result in results]
        print_plain(console, json.dumps(as_stored(facts if len(facts) > 1 else facts[0]), indent=1))
    elif conditions:
        search_table(console, results)
    else:
        show(console, results)
    if folder is not None:
        say(f"written to {folder}")
    return 0


def _conditions(slo: str | None, rates: Sequence[float] | None) -> tuple[Condition, ...]:
    """The conditions of a search, which begins at one of ``rates``; none without a search."""
    if slo is not None and rates and (len(rates) > 1 or math.isinf(rates[0])):
        raise UsageError("--find-max-rate begins at one finite --request-rate: give one, or leave it out")
    try:
        return parse_conditions(slo) if slo is not None else ()
    except ValueError as error:
        raise UsageError(f"--find-max-rate: {error}") from None


def _run_all(jobs: Sequence[SimulationJob], conditions: Sequence[Condition], request: SimulateRequest) -> list[Any]:
    """Returns what came of each job, a ``Simulation`` or with conditions a search, and tells progress."""
    by_name = {job.name: job for job in jobs}
    ray = RayOptions(request.ray_address, request.ray_wait) if request.executor == "ray" else None
    with status_line(Console(stderr=True), f"simulating {plural(len(jobs), 'load')}") as update:
        if conditions:
            how = {name: getattr(request, name) for name in ("run_seconds", "tolerance")}
            search = partial(find_rate, conditions=conditions, **how)
            return map_simulations(search, by_name, request.processes, ray)
        if ray is not None:
            packed = map_simulations(simulate_and_pack, by_name, request.processes, ray)
            for job, (_, files) in zip(jobs, packed, strict=True):
                if job.folder is not None and files is not None:
                    job.folder.mkdir(parents=True, exist_ok=True)
                    unpack(files, job.folder)
            return [result for result, _ in packed]
        if len(jobs) > 1:
            return map_simulations(simulate, by_name, request.processes)

        def on_progress(ended: int, requests: int | None) -> None:
            update(f"simulating: {ended:,} {'requests' if requests is None else f'of {requests:,} requests'}")

        return [simulate(jobs[0], on_progress)]


def _jobs(request: SimulateRequest) -> tuple[list[SimulationJob], Sequence[str]]:
    """A job for each rate or number of users, each number of replicas and each router; and notes. Raises UsageError."""
    jobs: list[SimulationJob] = []
    notes: Sequence[str] = ()
    routers, code = tuple(dict.fromkeys(request.router)) or (next(iter(ROUTERS)),), git_state()
    for rate, users in itertools.product(request.request_rate or (None,), request.max_concurrency or (None,)):
        loaded, point, notes = _load(rate, users, request)
        assert loaded.simulate is not None
        machine = machine_of(loaded.simulate, str(loaded.engine["model"]))
        config, capacity = machine.settle(loaded.engine)
        machine.step_timer(config)  # what cannot be is said before anything runs
        load_name = point.load_id
        if request.find_max_rate:
            load_name = "trace" if loaded.load.arrivals == "trace" else "open loop"
        if users is not None and point.mode == "open":
            load_name += f" at most {users} in flight"
        for replicas, router in itertools.product(request.replicas, routers):
            name = load_name + (f", {plural(replicas, 'replica')}, {router}" if max(request.replicas) > 1 else "")
            facts = SimulationFacts(
                name=name,
                machine=machine.title,
                **machine_facts(machine, loaded.simulate),
                replica_count=replicas,
                router=router if replicas > 1 else None,
                seed=loaded.seed,
                engine={**loaded.engine, "model": machine.model.name, "max_model_len": config.max_model_len},
                kv_slots=capacity.num_slots,
                load=loaded.load.model_dump(mode="json", exclude_none=True),
                load_id=point.load_id,
                kvbench=__version__,
                git=dict(code),
            )
            fleet = (loaded.engine, loaded.load, point, loaded.seed, replicas, router, request.output_dir, facts)
            jobs.append(SimulationJob(name, loaded.simulate, str(loaded.engine["model"]), *fleet))
    if len(jobs) > 1:
        jobs = [replace(job, folder=job.folder and job.folder / slug(job.name)) for job in jobs]
    return jobs, notes


def _load(rate: float | None, users: int | None, request: SimulateRequest) -> tuple[Workload, LoadPoint, Sequence[str]]:
    """The workload with one load, as it runs on the machine of the options, and notes on what differs."""
    overrides, searching = list(request.overrides), bool(request.find_max_rate)
    if request.workload is None:
        overrides[:0] = ["engine.kv_budget=null", "engine.max_model_len=null"]  # what device and model have
    elif request.dataset_path:
        overrides.insert(0, "engine.max_model_len=null")  # the model's own: a trace has its lengths
    how = {"profile": profile_of(request), "overrides": overrides, "seed": request.seed}
    chosen = LoadOptions(
        at=request.at,
        request_rate=rate,
        burstiness=request.burstiness,
        max_concurrency=users,
        num_prompts=request.num_prompts,
        goodput=request.goodput,
    )
    prompts = request.part(PromptOptions)
    path, text = workload_source(request.workload, prompts, chosen, profile=how["profile"], searching=searching)
    check_named_load(path, chosen, {"text": text, **how}, searching=searching)
    loaded, point = choose_load(path, chosen, text=text, **how)
    if searching and loaded.load.arrivals in ("ramp", "step"):
        raise UsageError(
            f"--find-max-rate needs one rate a run, and this load's arrivals are a {loaded.load.arrivals}: use poisson "
            "or a trace (-o load.arrivals=poisson)"
        )
    if searching and point.mode == "closed":
        loaded, point = choose_load(path, replace(chosen, request_rate=FIRST_RATE), text=text, **how)
    made, notes = simulated_workload(loaded, request, overrides)
    return made, point, notes


_LATENCIES = ("ttft", "tpot", "itl", "e2el", "client_queue")
_SHARE = 0.0005  # of the steps' time: less is not told
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
    """One simulation in full, several in a table of one line each."""
    if len(results) > 1:
        print_table(console, _table("load", {r.facts.name: r.figures for r in results}, "simulated"))
        print_plain(console, _machine_line(results[0].facts))
        for result in results:
            for line in [*_failures(result.figures), *_cost_notes(result.figures)]:
                print_plain(console, f"{result.facts.name}: {line}")
        return
    facts, figures = results[0].facts, results[0].figures
    shown = {"TTFT": figures.ttft_ms, "  in the steady window": figures.steady_latency.ttft_ms}
    shown |= {METRICS[name].short: values for name, values in _latencies(figures).items()}
    rows = []
    for title, values in shown.items():
        entries = [milliseconds(getattr(values, which)) + "*" * (which in values.uncertain) for which in _SHOWN]
        rows += [(title, *entries, count(values.n))] if values.n else []
    title = f"load {facts.name} · ms, simulated"
    print_table(console, make_table(("", *_SHOWN, "samples"), rows, title=title))
    lines = [*_load_lines(figures), *_step_lines(figures), *_failures(figures), *_length_lines(figures)]
    lines += [_machine_line(facts), *_cost_notes(figures)]
    if any(values.uncertain for values in _latencies(figures).values()):
        lines.append(f"* too few samples for this percentile: {SAMPLES_NEEDED}")
    for line in lines:
        print_plain(console, line)
    if figures.replicas:
        numbered = {str(number): replica for number, replica in enumerate(figures.replicas)}
        print_table(console, _table("replica", numbered, "each replica, simulated"))


def _latencies(figures: SimulatedFigures) -> dict[str, Distribution]:
    values = {name: getattr(figures, METRICS[name].path) for name in _LATENCIES}
    return {name: distribution for name, distribution in values.items() if distribution.n}


def _table(what: str, figures: Mapping[str, SimulatedFigures], title: str) -> Table:
    columns = [(head, text) for table, head, text in _COLUMNS if table in (what, "both")]
    rows = [(name, *(text(values) for _, text in columns)) for name, values in figures.items()]
    return make_table((what, *(head for head, _ in columns)), rows, title=title)


def _load_lines(f: FleetFigures) -> Iterator[str]:
    yield (
        f"{significant(f.request_throughput)} requests/s, {tokens_per_s(f.output_throughput)} output tokens/s, "
        f"{tokens_per_s(f.total_token_throughput)} with the prompts; {plural(f.completed, 'request')} in "
        f"{significant(f.duration_s)} s"
    )
    yield (
        f"running {count(f.running.peak)} at most, {decimal(f.running.mean)} on average; waiting "
        f"{count(f.waiting.peak)} and {decimal(f.waiting.mean)}; KV in use {percent(f.kv_usage.peak)} and "
        f"{percent(f.kv_usage.mean)}"
    )
    preempted = plural(f.num_preemptions, "preemption")
    for tokens, what in ((f.recomputed_tokens, "computed again"), (f.swapped_out_slots, "swapped out")):
        preempted += f", {plural(tokens, 'token')} {what}" if tokens else ""
    yield preempted
    if f.hit_rate is not None:
        yield (
            f"prefix cache: {percent(f.hit_rate)} of the prompts' tokens were hits ({count(f.prefix_cache_hits)} of "
            f"{count(f.prefix_cache_queries)})"
        )
    if f.goodput is not None and f.request_throughput:
        share = percent(f.goodput / f.request_throughput)
        yield f"goodput: {significant(f.goodput)} requests/s met every limit, {share} of those answered"


def _shares(seconds: Mapping[str, float], total: float) -> list[tuple[float, str]]:
    """The share of each, the largest first."""
    return sorted(((value / total, name) for name, value in seconds.items()), reverse=True) if total else []


def _step_lines(f: FleetFigures) -> Iterator[str]:
    """Yields shares of the steps' time by phase, more than all of it where they overlap, and by operator."""
    if phases := [(share, name) for share, name in _shares(f.phase_seconds, f.busy_s) if share > _SHARE]:
        overlap = " (some overlap)" if sum(share for share, _ in phases) > 1.0005 else ""
        moved = f.move_seconds / f.busy_s
        moves = f", {percent(moved)} of it to move KV" if moved > _SHARE else ""
        text = listing([f"{name} {percent(share)}" for share, name in phases])
        yield f"where the steps' time goes: {text}{overlap}{moves}; {count(f.steps)} steps"
    if classes := _shares(f.seconds_by_class, sum(f.seconds_by_class.values())):
        yield f"by what they do: {listing([f'{name} {percent(share)}' for share, name in classes])}"


def _failures(f: SimulatedFigures) -> list[str]:
    unsent = f", and {plural(f.not_sent, 'later turn')} not sent" if f.not_sent else ""
    text = f"{plural(f.failed, 'request')} refused{unsent}; the first: {f.first_failure}"
    return [text] if f.failed else []


def _length_lines(f: FleetFigures) -> Iterator[str]:
    lengths = []
    if (scale := f.notes.get("length_scale", 1.0)) != 1.0:
        lengths.append(f"lengths x {scale:.4g} of those of the trace or the file")
    if left_out := f.notes.get("trace_requests_too_long"):
        lengths.append(f"{plural(left_out, 'request')} of the trace left out, longer than max_model_len")
    if lengths:
        yield "; ".join(lengths)
    words = {"total_output_tokens": "tokens", "busy_s": "busy time"}
    if parts := [f"{ratio(value)} the mean of {words[name]}" for name, value in f.imbalance.items()]:
        yield f"imbalance: the replica with the most has {listing(parts)}"


def _cost_notes(figures: FleetFigures) -> list[str]:
    return [f"of the step times: {note}" for note in figures.notes[COST_NOTES]]


def _machine_line(facts: SimulationFacts) -> str:
    fleet = f"{facts.replica_count} replicas of " if facts.replica_count > 1 else ""
    return f"nothing is measured: {fleet}{facts.model} on {facts.machine}; step times: {facts.cost_model}"


def search_table(console: Console, results: Sequence[SimulatedRateSearch]) -> None:
    """Prints what ``find_rate`` returned, a line each, and why the next higher rate missed."""
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
