"""The options of ``kvbench load``: which go together, and how they change a workload into one load."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvbench.common.errors import UsageError
from kvbench.common.option_rules import check_exclusive, check_goes_with, flag
from kvbench.common.ports import free_port
from kvbench.common.text import plural
from kvbench.load.spec import ARRIVE_S
from kvbench.measure.instrument import Clients
from kvbench.sweep.requests import LoadOptions, ProcessOptions
from kvbench.workload.design import LoadPoint
from kvbench.workload.file import Workload, default_profile, load_workload
from kvbench.workload.from_options import COMMAND_LINE, changes_of_file, workload_text
from kvbench.workload.load_section import Slo
from kvbench.workload.options import Answers, PromptOptions

SLO_NAMES = tuple(name.removesuffix("_ms") for name in Slo.model_fields)

_DEPENDENT = {  # by option, those that do nothing without it
    "find_max_rate": ("min_rate", "max_rate", "tolerance", "max_runs", "max_minutes", "run_seconds"),
    "master": ("expect_workers", "bind_host", "bind_port"),
    "worker": ("master_host", "master_port"),
    "output_dir": ("resume",),
}
_EXCLUSIVE = {
    ("worker", "master"): "start the master on one machine and the workers on others",
    ("processes", "master"): "workers of this machine, or of others",
    ("find_max_rate", "master"): "a worker ends with its load, and a search has many; share each with --processes",
}
_OF_A_WORKER = ("worker", "master_host", "master_port")
_OF_A_LAUNCHED_SERVER = ("model", "engine", "sweep", "design")  # sections of a workload


def check_combination(given: Collection[str], overrides: Sequence[str]) -> None:
    """Raises UsageError for options that do not go together. ``given``: those on the command line."""
    check_exclusive(given, _EXCLUSIVE)
    if "worker" in given and (more := [name for name in given if name not in _OF_A_WORKER]):
        name = "the workload" if "workload" in more else flag(more[0])
        raise UsageError(f"--worker takes only --master-host and --master-port: give {name} to the master")
    needs = {name: [flag(needed)] for needed, names in _DEPENDENT.items() for name in names}
    check_goes_with(given, needs, [flag(name) for name in given])
    for text in overrides:
        if text.partition("=")[0].strip().partition(".")[0] in _OF_A_LAUNCHED_SERVER:
            raise UsageError(
                f"-o {text} says how `kvbench sweep` launches servers, and this one runs already: set it there, or "
                "leave it out"
            )


def workload_source(
    workload: str | None, prompts: PromptOptions, chosen: LoadOptions, *, profile: str | None, searching: bool
) -> tuple[str, str | None]:
    """The workload's file and None, or a name and the text of the workload that the options make. UsageError."""
    answers = Answers(**{name: getattr(prompts, name) for name in prompts.stated})
    if workload is not None:
        changes_of_file(answers)
        return workload, None
    answers = dataclasses.replace(answers, num_prompts=chosen.num_prompts)
    if searching or chosen.request_rate is not None:
        answers = dataclasses.replace(answers, request_rate=(chosen.request_rate or 1.0,))
    elif chosen.max_concurrency is not None:
        answers = dataclasses.replace(answers, concurrency=(chosen.max_concurrency,))
    return COMMAND_LINE, workload_text(answers, profile=profile or default_profile())


def choose_load(path: str | Path, chosen: LoadOptions, **how: Any) -> tuple[Workload, LoadPoint]:
    """Reads the workload with the load that ``chosen.at`` names (else its first), changed as the options say.

    ``how``: ``profile``, ``overrides`` and ``seed`` of ``load_workload``. Raises UsageError.
    """
    workload = load_workload(path, **how)
    points = {p.load_id: p for p in workload.load_points}
    point = workload.load_points[0] if chosen.at is None else points.get(chosen.at)
    if point is None:
        raise UsageError(f"--at {chosen.at!r} is no load of this workload: its loads are {', '.join(points)}")
    if chosen == LoadOptions(at=chosen.at):
        return workload, point
    changes = [f"load.{key}={json.dumps(value)}" for key, value in _changes(workload, point, chosen).items()]
    workload = load_workload(path, **{**how, "overrides": [*(how.get("overrides") or ()), *changes]})
    (point,) = workload.load_points
    return workload, point


def check_named_load(path: str | Path, chosen: LoadOptions, how: Mapping[str, Any], *, searching: bool) -> None:
    """Raises UsageError when --at names a load and other options contradict it."""
    if chosen.at is None:
        return
    _, point = choose_load(path, LoadOptions(at=chosen.at), **how)
    closed, rate, users = point.mode == "closed", chosen.request_rate, chosen.max_concurrency
    kind = f"a closed loop of {point.concurrency} users" if closed else f"an open loop at {point.request_rate}/s"
    contradictions = {
        "--find-max-rate searches in open loop": closed and searching,
        f"--request-rate is {rate}": rate is not None and (closed or point.request_rate not in (None, rate)),
        f"--max-concurrency is {users}": closed and users not in (None, point.concurrency),
    }
    for option, contradicts in contradictions.items():
        if contradicts:
            raise UsageError(f"--at {chosen.at} is {kind}, and {option}: leave one of them out")


def _changes(workload: Workload, point: LoadPoint, chosen: LoadOptions) -> dict[str, Any]:
    """The values under ``load:`` that leave one load point."""
    load, burstiness = workload.load, chosen.burstiness
    count = chosen.num_prompts or load.count_for(point.concurrency if point.mode == "closed" else point.request_rate)
    changes: dict[str, Any] = {}
    if count:
        changes["num_requests" if load.sessions is None else "sessions.num_sessions"] = count
    if chosen.num_prompts and load.duration_s is not None:
        changes["duration_s"] = None
    if chosen.goodput:
        changes["slo"] = parse_goodput(chosen.goodput)
    if chosen.canaries is not None:
        changes["canaries"] = parse_canaries(chosen.canaries)
    if point.mode == "closed" and chosen.request_rate is None:
        if burstiness is not None:
            raise UsageError(f"--burstiness {burstiness:g} needs --request-rate: a closed loop draws no gaps")
        users = chosen.max_concurrency or point.concurrency
        if count and users and count < users:
            unit = "request" if load.sessions is None else "conversation"
            raise UsageError(
                f"{plural(count, unit)} cannot keep {plural(users, 'user')} busy at once: give --num-prompts {users} "
                f"or more, or --max-concurrency {count} or less"
            )
        return changes | {"concurrency": [users]}
    rate = point.request_rate if chosen.request_rate is None else chosen.request_rate
    changes |= {"mode": "open", "concurrency": None}
    if rate is not None:
        changes["request_rate"] = ["inf" if math.isinf(rate) else rate]
    if chosen.max_concurrency is not None:
        changes["max_concurrency"] = chosen.max_concurrency
    if burstiness is not None:
        if rate is not None and math.isinf(rate):
            raise UsageError(f"--burstiness {burstiness:g} shapes gaps, and --request-rate inf has none: omit one")
        changes |= {"arrivals": "gamma", "burstiness": burstiness}
    return changes


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """Parses ``ttft:200 tpot:50`` [ms], as vllm bench serve takes it. Raises UsageError."""
    limits: dict[str, float] = {}
    for word in " ".join(words).replace(",", " ").split():
        name, _, text = word.partition(":")
        name = name.removesuffix("_ms")
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if name not in SLO_NAMES or not 0 < value < math.inf:
            raise UsageError(
                f"--goodput {word!r} is not NAME:MS: write for example --goodput 'ttft:200 tpot:50'; the names are "
                f"{', '.join(SLO_NAMES)}"
            )
        limits[f"{name}_ms"] = value
    if not limits:
        raise UsageError("--goodput is empty: write for example --goodput 'ttft:200 tpot:50'")
    return limits


def parse_canaries(text: str) -> dict[str, Any]:
    """Parses ``0.1`` or ``0.1:FILE`` as ``load.canaries`` has it. Raises UsageError."""
    share, _, file = text.partition(":")
    try:
        return {"share": float(share), "file": str(Path(file).resolve()) if Path(file).is_file() else file or None}
    except ValueError:
        raise UsageError(f"--canaries {text!r} is not SHARE or SHARE:FILE: write for example --canaries 0.1") from None


def client_processes(options: ProcessOptions) -> tuple[Clients, str]:
    """The processes that send the load, and how to start those on other machines; empty: this machine sends it.

    Raises UsageError where a master cannot listen.
    """
    if not options.master:
        return Clients({"processes": options.processes} if options.processes else {}), ""
    host, port, count = options.bind_host, options.bind_port, options.expect_workers
    free_port(port, host, port_option="--bind-port", host_option="--bind-host")
    values = {"--expect-workers": count, "--bind-host": host, "--bind-port": port, "--arrive-timeout": ARRIVE_S}
    arguments = ("--master", *(str(word) for pair in values.items() for word in pair))
    notice = (
        f"waiting up to {ARRIVE_S:g} s for {plural(count, 'worker')} at {host}:{port}; on each machine: kvbench load "
        f"--worker --master-host {'HOST' if host in ('0.0.0.0', '::', '*') else host} --master-port {port}. "
        "Workers get the prompts in clear text: use a network of your own, and set one KVBENCH_LOAD_TOKEN "
        "on every machine"
    )
    return Clients({}, arguments, count), notice


def become_worker(options: ProcessOptions) -> NoReturn:
    """Replaces this process by the load process of a worker, which ends with its load."""
    master = ("--master-host", options.master_host, "--master-port", str(options.master_port))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "kvbench.load", "--worker", *master])
