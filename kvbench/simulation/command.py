"""Runs the request of ``kvbench simulate`` as jobs."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench import __version__
from kvbench.common.console import print_plain, status_line
from kvbench.common.errors import UsageError, say
from kvbench.common.files import as_stored, check_output_dir, unpack
from kvbench.common.git import git_state
from kvbench.common.option_rules import RAY_OPTIONS, check_goes_with
from kvbench.common.text import plural
from kvbench.simulation.choose import machine_facts, machine_of, profile_of, simulated_workload
from kvbench.simulation.fleet.drive import ROUTERS
from kvbench.simulation.fleet.pool import RayOptions, map_simulations
from kvbench.simulation.request import SimulateRequest
from kvbench.simulation.run import (
    FIRST_RATE,
    SimulationFacts,
    SimulationJob,
    find_rate,
    simulate,
    simulate_and_pack,
)
from kvbench.simulation.terminal import show, show_search
from kvbench.simulation.wording import sentence
from kvbench.sweep.load_options import check_named_load, choose_load, workload_source
from kvbench.sweep.rate_search import Condition, parse_conditions
from kvbench.sweep.requests import LoadOptions
from kvbench.workload.design import LoadPoint
from kvbench.workload.file import Workload
from kvbench.workload.options import PromptOptions
from kvbench.workload.settings import slug


def simulate_command(request: SimulateRequest) -> int:
    """Runs the command and returns its exit code. Raises UsageError."""
    given, workload = request.given, request.workload
    needs = {name: ["--find-max-rate"] for name in ("run_seconds", "tolerance")}
    check_goes_with(given, needs, ["--find-max-rate"] if request.find_max_rate else [])
    check_goes_with(given, RAY_OPTIONS, [f"--executor {request.executor}"])
    if request.router and max(request.replicas) == 1:
        raise UsageError(sentence("command.router"))
    if workload is None and not request.model:
        raise UsageError(sentence("command.no_model"))
    conditions = _conditions(request.find_max_rate, request.request_rate)
    folder: Path | None = request.output_dir
    if folder is not None:
        if conditions:
            raise UsageError(sentence("command.no_files"))
        check_output_dir(folder)
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(sentence("command.not_empty", folder=folder))
    jobs, notes = _jobs(request)
    if any("goodput" in condition.text for condition in conditions) and any(job.load.slo is None for job in jobs):
        raise UsageError(sentence("command.no_slo"))
    for note in notes:
        say(sentence("command.note", note=note))
    console = Console()
    results = _run_all(jobs, conditions, request)
    if request.as_json:
        facts = [result.to_json() for result in results]
        print_plain(console, json.dumps(as_stored(facts if len(facts) > 1 else facts[0]), indent=1))
    elif conditions:
        show_search(console, results)
    else:
        show(console, results)
    if folder is not None:
        say(sentence("command.written", folder=folder))
    return 0


def _conditions(slo: str | None, rates: Sequence[float] | None) -> tuple[Condition, ...]:
    """Reads the conditions of a search, which begins at one of ``rates``; none without a search."""
    if slo is not None and rates and (len(rates) > 1 or math.isinf(rates[0])):
        raise UsageError(sentence("command.one_rate"))
    try:
        return parse_conditions(slo) if slo is not None else ()
    except ValueError as error:
        raise UsageError(sentence("command.bad_condition", error=error)) from None


def _run_all(jobs: Sequence[SimulationJob], conditions: Sequence[Condition], request: SimulateRequest) -> list[Any]:
    """Returns what came of each job, a ``Simulation`` or with conditions a search, and tells progress."""
    by_name = {job.name: job for job in jobs}
    ray = RayOptions(request.ray_address, request.ray_wait) if request.executor == "ray" else None
    with status_line(Console(stderr=True), sentence("command.simulating", loads=plural(len(jobs), "load"))) as update:
        if conditions:
            limits = {"run_seconds": request.run_seconds, "tolerance": request.tolerance}
            search = partial(find_rate, conditions=conditions, **limits)
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
            key = "command.progress_without_end" if requests is None else "command.progress"
            update(sentence(key, ended=ended, requests=requests))

        return [simulate(jobs[0], on_progress)]


def _jobs(request: SimulateRequest) -> tuple[list[SimulationJob], Sequence[str]]:
    """Makes a job for each rate or number of users, each number of replicas and each router; and notes."""
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
            load_name = sentence("command.capped", load=load_name, users=users)
        for replicas, router in itertools.product(request.replicas, routers):
            name = load_name
            if max(request.replicas) > 1:
                engines = plural(replicas, "replica")
                name = sentence("command.fleet", load=load_name, replicas=engines, router=router)
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
    """Reads the workload with one load, as it runs on the machine of the options, and notes on what differs."""
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
        raise UsageError(sentence("command.changing_rate", arrivals=loaded.load.arrivals))
    if searching and point.mode == "closed":
        loaded, point = choose_load(path, replace(chosen, request_rate=FIRST_RATE), text=text, **how)
    made, notes = simulated_workload(loaded, request, overrides)
    return made, point, notes
