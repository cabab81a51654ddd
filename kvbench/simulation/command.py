"""What ``kvbench simulate`` does with its options."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
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
from kvbench.simulation.choose import files_digest, machine_of, profile_of, simulated_workload
from kvbench.simulation.drive import ROUTERS
from kvbench.simulation.pool import RayOptions, map_simulations
from kvbench.simulation.run import (
    SimulationJob,
    job_at_rate,
    native_rate_of,
    reasons_missed,
    run_job,
    simulate,
    simulate_and_pack,
    sustainable_rate,
)
from kvbench.simulation.show import search_table, show
from kvbench.sweep.load_options import LoadOptions, check_named_load, choose_load, workload_source
from kvbench.sweep.rate_search import Condition, parse_conditions
from kvbench.workload.design import LoadPoint
from kvbench.workload.file import Workload
from kvbench.workload.settings import slug

_LEAST_REQUESTS = 200  # of a run of a search: more than a p95 needs
_FIRST_RATE = 1.0  # of a search over a closed loop


def simulate_command(*, given: Collection[str], workload: str | None, **options: Any) -> int:
    """The exit code. ``given``: which of the options stand on the command line. Raises UsageError."""
    needs = {name: ["--find-max-rate"] for name in ("run_seconds", "tolerance")}
    check_goes_with(given, needs, ["--find-max-rate"] if options["find_max_rate"] else [])
    check_goes_with(given, RAY_OPTIONS, [f"--executor {options['executor']}"])
    if options["router"] and max(options["replicas"]) == 1:
        raise UsageError(
            "--router chooses among replicas, and there is one: give --replicas 2 or more, or leave it out"
        )
    if workload is None and not options["model"]:
        raise UsageError("--model is missing: give for example --model llama-3.1-8b, or a workload file")
    conditions = _conditions(options["find_max_rate"], options["request_rate"])
    folder: Path | None = options["output_dir"]
    if folder is not None:
        if conditions:
            raise UsageError(
                "--find-max-rate keeps no files: leave --output-dir out, or simulate the rate that it finds"
            )
        check_output_dir(folder)
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"--output-dir {folder} is not empty: give a new one")
    jobs, notes = _jobs(workload, options)
    if any("goodput" in each.text for each in conditions) and any(job.load.slo is None for job in jobs):
        raise UsageError("--find-max-rate with goodput needs to know which requests are good: give --goodput as well, "
                         "such as 'ttft:500 tpot:50', or load.slo in the workload")  # fmt: skip
    for note in notes:
        say(f"note: {note}")
    console = Console()
    results = _results(jobs, conditions, options)
    if options["as_json"]:
        print_plain(console, json.dumps(as_stored(results if len(results) > 1 else results[0]), indent=1))
    elif conditions:
        search_table(console, results)
    else:
        show(console, results)
    if folder is not None:
        say(f"written to {folder}")
    return 0


def _simulated_elsewhere(jobs: Mapping[str, SimulationJob], at_once: int | None, ray: RayOptions) -> list[Any]:
    """What summary.json holds of each job; its files come back and are written here."""
    found = map_simulations(simulate_and_pack, jobs, at_once, ray)
    for job, (_, files) in zip(jobs.values(), found, strict=True):
        if job.folder is not None and files is not None:
            job.folder.mkdir(parents=True, exist_ok=True)
            unpack(files, job.folder)
    return [summary for summary, _ in found]


def _results(
    jobs: Sequence[SimulationJob], conditions: Sequence[Condition], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Of each job, in their order, while progress is told."""
    names = {job.name: job for job in jobs}
    ray = RayOptions(options["ray_address"], options["ray_wait"]) if options["executor"] == "ray" else None
    with status_line(Console(stderr=True), f"simulating {plural(len(jobs), 'load')}") as update:
        if conditions:
            how = {name: options[name] for name in ("run_seconds", "tolerance")}
            return map_simulations(partial(find_rate, conditions=conditions, **how), names, options["processes"], ray)
        if ray is not None:
            return _simulated_elsewhere(names, options["processes"], ray)
        if len(jobs) > 1:
            return map_simulations(simulate, names, options["processes"])

        def on_progress(ended: int, requests: int | None) -> None:
            update(f"simulating: {ended:,} {'requests' if requests is None else f'of {requests:,} requests'}")

        return [simulate(jobs[0], on_progress)]


def _conditions(slo: str | None, rates: Sequence[float] | None) -> tuple[Condition, ...]:
    """Of a search, which begins at one of ``rates``; none without a search."""
    if slo is not None and rates and (len(rates) > 1 or math.isinf(rates[0])):
        raise UsageError("--find-max-rate begins at one finite --request-rate: give one, or leave it out")
    try:
        return parse_conditions(slo) if slo is not None else ()
    except ValueError as error:
        raise UsageError(f"--find-max-rate: {error}") from None


def _jobs(workload: str | None, options: Mapping[str, Any]) -> tuple[list[SimulationJob], Sequence[str]]:
    """A job for each rate or number of users, each number of replicas and each router; and notes. Raises UsageError."""
    jobs: list[SimulationJob] = []
    notes: Sequence[str] = ()
    for rate, users in itertools.product(options["request_rate"] or (None,), options["max_concurrency"] or (None,)):
        loaded, point, notes = _load(workload, rate, users, options)
        assert loaded.simulate is not None
        model = str(loaded.engine["model"])
        machine = machine_of(loaded.simulate, model)
        machine.step_timer(machine.settle(loaded.engine)[0])  # what cannot be is said before anything runs
        load_name = point.load_id
        if options["find_max_rate"]:
            load_name = "trace" if loaded.load.arrivals == "trace" else "open loop"
        if users is not None and point.mode == "open":
            load_name += f" at most {users} in flight"
        for replicas, router in itertools.product(options["replicas"], _routers(options)):
            name = load_name + (f", {plural(replicas, 'replica')}, {router}" if max(options["replicas"]) > 1 else "")
            how = (loaded.engine, loaded.load, point, loaded.seed, replicas, router)
            jobs.append(SimulationJob(name, loaded.simulate, model, *how))
    code = git_state()
    return [_with_facts(job, options, len(jobs), code) for job in jobs], notes


def _load(
    workload: str | None, rate: float | None, users: int | None, options: Mapping[str, Any]
) -> tuple[Workload, LoadPoint, Sequence[str]]:
    """The workload with one load, as it runs on the machine of the options, and notes on what differs."""
    overrides, searching = list(options["overrides"]), bool(options["find_max_rate"])
    if workload is None:
        overrides[:0] = ["engine.kv_budget=null", "engine.max_model_len=null"]  # what device and model have
    elif options["dataset_path"]:
        overrides.insert(0, "engine.max_model_len=null")  # the model's own: a trace has its lengths
    how = {"profile": profile_of(options), "overrides": overrides, "seed": options["seed"]}
    more = (options["burstiness"], users, options["num_prompts"], tuple(options["goodput"]))
    chosen = LoadOptions(options["at"], rate, *more)
    path, text = workload_source(workload, {**options, **how}, chosen, searching=searching)
    check_named_load(path, chosen, {"text": text, **how}, searching=searching)
    loaded, point = choose_load(path, chosen, text=text, **how)
    if searching and loaded.load.arrivals in ("ramp", "step"):
        raise UsageError(
            f"--find-max-rate needs one rate a run, and this load's arrivals are a {loaded.load.arrivals}: use poisson "
            "or a trace (-o load.arrivals=poisson)"
        )
    if searching and point.mode == "closed":
        loaded, point = choose_load(path, replace(chosen, request_rate=_FIRST_RATE), text=text, **how)
    made, notes = simulated_workload(loaded, options, overrides)
    return made, point, notes


def _routers(options: Mapping[str, Any]) -> Sequence[str]:
    return tuple(dict.fromkeys(options["router"])) or (next(iter(ROUTERS)),)


def _with_facts(job: SimulationJob, options: Mapping[str, Any], jobs: int, code: Mapping[str, Any]) -> SimulationJob:
    """With what summary.json holds beside the figures, and the folder of its files. ``code``: kvbench's commit."""
    machine = machine_of(job.section, job.model)
    config, capacity = machine.settle(job.settings)
    facts = {
        "machine": machine.title,
        "cost_model": machine.cost_model,
        "model": machine.model.name,
        **job.section.model_dump(include={"device", "tensor_parallel", "ops", "calibration"}),
        "files_sha256": files_digest(machine, job.section),
        "replica_count": job.replicas,
        "router": job.router if job.replicas > 1 else None,
        "seed": job.seed,
        "engine": {**job.settings, "model": machine.model.name, "max_model_len": config.max_model_len},
        "kv_slots": capacity.num_slots,
        "load": job.load.model_dump(mode="json", exclude_none=True),
        "load_id": job.point.load_id,
        "kvbench": __version__,
        "git": code,
    }
    folder: Path | None = options["output_dir"]
    if folder is not None and jobs > 1:
        folder = folder / slug(job.name)
    return replace(job, facts=facts, folder=folder)


def find_rate(
    job: SimulationJob, *, conditions: Sequence[Condition], run_seconds: float, tolerance: float
) -> dict[str, Any]:
    """The highest rate that meets ``conditions``, and each rate that was tried."""
    trials: list[dict[str, Any]] = []
    first = native_rate_of(job) if job.load.arrivals == "trace" else job.point.request_rate or _FIRST_RATE

    def meets(rate: float) -> bool:
        tried = job_at_rate(job, rate, run_seconds, _LEAST_REQUESTS)
        result = run_job(tried)
        missed = reasons_missed(result, conditions)
        trials.append({"rate": rate, "met": not missed, "missed": missed, "requests": result.figures["completed"]})
        return not missed

    found = sustainable_rate(meets, first, tolerance)
    answer = None if found == float("inf") else found
    return {"simulated": True, "name": job.name, **job.facts, "slo": [c.text for c in conditions],
            "max_rate": answer, "always_met": answer is None, "trials": trials}  # fmt: skip
