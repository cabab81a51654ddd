"""The requests of ``kvbench sweep`` and ``kvbench load``: their options, and those that a simulation shares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from kvbench.common.options import (
    Count,
    ExistingFile,
    ExistingFolder,
    FiniteRange,
    Folder,
    NotNegative,
    Options,
    Port,
    Positive,
    argument,
    option,
    switch,
)
from kvbench.common.ports import LOCUST_PORT
from kvbench.targets.options import RunningServerOptions, TargetOptions
from kvbench.workload.options import Answers, FormOptions, PromptOptions

_RUN = "The run"
_SEARCH = "With --find-max-rate"
_SEVERAL = "Load from several processes"


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Options, heading="A simulated machine"):
    """The options of a machine that need not be here; the same names stand in a workload's ``simulate`` section."""

    device: str | None = option(
        "The GPUs, as H200 or 4xA100-80GB (default: the workload's simulate.device).", metavar="[Nx]NAME"
    )
    tensor_parallel: int | None = option(
        "N GPUs share the model (default: the number in --device).", least=1, most=64, rare=True
    )
    ops: ExistingFolder | None = option(
        "A folder of measured operator times, in place of the device's data sheet.", metavar="FOLDER", rare=True
    )
    calibration: ExistingFile | None = option(
        "The file that `kvbench dev calibrate-model` wrote.", metavar="FILE", rare=True
    )


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(Options, heading="On a Ray cluster", rare=True):
    """The options of work that a Ray cluster does."""

    executor: Literal["local", "ray"] = option(
        "Where the work is done: on this machine, or on the machines of a Ray cluster.", default="local"
    )
    ray_address: str | None = option(
        "With --executor ray: the cluster's head (default: of the cluster that this machine is in).",
        metavar="HOST:PORT",
    )
    ray_wait: NotNegative = option(
        "With --executor ray: wait at most S seconds for a machine that has free what is needed.",
        default=60.0, metavar="S",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ClientOptions(Options, heading=_RUN):
    """The options of the load client."""

    no_calibration: bool = switch(
        "Do not calibrate the load client first; the results say so.", rare=True, envvar="KVBENCH_NO_CALIBRATION"
    )


@dataclass(frozen=True, kw_only=True)
class SweepRequest(Answers, TargetOptions, FormOptions, MachineOptions, ClusterOptions, ClientOptions, heading=_RUN):
    """The request of ``kvbench sweep``."""

    workload: str | None = argument("WORKLOAD", None)
    repeats: int | None = option("Measure every cell N times, each time on a fresh server.", least=1, most=1000)
    max_minutes: Positive | None = option(
        "Stop after about N minutes. Every cell's first repeat is measured in any case, further ones where they decide "
        "most (default: the workload's max_minutes, else all repeats).",
    )
    only: tuple[str, ...] = option(
        "Measure only cells whose id matches ('paged-*-c32'); with --resume, cells of that run. Repeatable.",
        default=(), metavar="GLOB",
    )  # fmt: skip
    resume: str | None = option(
        "Go on with an interrupted run: that in RUN_DIR, or the latest incomplete run of WORKLOAD.",
        is_flag=False, flag_value="latest", metavar="[RUN_DIR]",
    )  # fmt: skip
    dry_run: bool = switch("Check everything, print cells left, order and time; launch nothing.")
    output_dir: Path = option("The folder for results.", default=Path("results"))
    simulate: bool = switch(
        "Measure nothing: simulate the built-in engine on --device, which need not be here. The results are marked as "
        "simulated."
    )
    instrument: str | None = option(
        "What runs the loads: http (default), simulated, or the name of an instrument that another package added.",
        metavar="NAME", rare=True,
    )  # fmt: skip
    force: bool = switch(
        "With --resume: go on though code, versions or machine differ from the run's start.", rare=True
    )
    wait_idle_minutes: NotNegative = option(
        "Wait at most N minutes until other programs leave the machine alone: after two disturbed loads in a row, then "
        "end early; before a disturbed load is measured again, then leave it. 0: never wait.",
        "--wait-idle", default=2.0, envvar="KVBENCH_WAIT_IDLE", rare=True,
    )  # fmt: skip
    lockstep_minutes: NotNegative | None = option(
        "Measure engine time for at most N minutes before the loads: the engines of all configurations (kvbench's own, "
        "and those with an adapter) take turns step by step, until every effect on throughput is decided; a slow "
        "machine may take three times that for two launches. 0: not measured (default: 3, 6 for engines of other "
        "projects, or as the run was begun).",
        rare=True,
    )  # fmt: skip
    no_quality: bool = switch(
        "Do not measure at the end what the built-in engine's configurations change in answers; `kvbench quality` can "
        "follow later.",
        rare=True, envvar="KVBENCH_NO_QUALITY",
    )  # fmt: skip
    no_report: bool = switch("Keep the raw results only; `kvbench report` can follow later.", rare=True)
    port: Port = option("Port of the launched server (default: a free one).", default=0, rare=True)
    device_resource: str | None = option(
        "With --executor ray: only machines with this Ray resource, such as accelerator_type:H100 (default: GPUs where "
        "the workload runs on GPUs, else CPUs).",
        metavar="NAME", rare=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Options, heading="The load"):
    """The options that change the load; None: as the workload has it. ``request_rate`` [1/s] may be infinite."""

    at: str | None = option(
        "The load of WORKLOAD to send: c32 has 32 users, r4 has 4 requests/s (default: the first).",
        metavar="LOAD",
    )
    max_concurrency: Count | None = option(
        "Closed loop: the users. Open loop: most requests in flight; the time that others wait in the client is in "
        "their TTFT, and shown apart.",
        "--concurrency", "--max-concurrency",
    )  # fmt: skip
    request_rate: Annotated[float, FiniteRange(min=0, min_open=True, inf=True)] | None = option(
        "Open loop at R requests/s (conversations/s where the workload has them), whatever the server does; inf: all "
        "at once.",
        metavar="R",
    )
    num_prompts: Count | None = option(
        "Requests of the load, or conversations where the workload has them (--find-max-rate: of a run, at least).",
    )
    goodput: tuple[str, ...] = option(
        "Limits that a good request keeps, such as 'ttft:200 tpot:50'. Repeatable.", default=(), metavar="NAME:MS"
    )
    burstiness: Positive | None = option(
        "Gamma-distributed gaps: below 1 burstier than Poisson, above 1 more regular.", metavar="B", rare=True
    )
    canaries: str | None = option(
        "Mix in requests whose right answers are known: 0.1 is one in ten. FILE: from `kvbench dev canaries`, or a "
        "set's name (default: the set that has the model's name).",
        metavar="SHARE[:FILE]", rare=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class UrlOptions(RunningServerOptions, heading="The server"):
    """The options of a server that runs already, and its address."""

    url: str | None = option(
        "The server, e.g. http://127.0.0.1:8000 (with or without /v1).", "--url", "--base-url", metavar="URL"
    )


@dataclass(frozen=True, kw_only=True)
class SearchOptions(Options, heading=_SEARCH):
    """The options of a search for the highest rate."""

    find_max_rate: str | None = option(
        "Search the highest request rate that meets SLO, with a 95 % interval: conditions such as "
        "p95_ttft<=500ms,p99_itl<=50ms or goodput>=95% (of the requests, with --goodput); < and > are read as <= and "
        ">=.",
        metavar="SLO",
    )
    max_minutes: Positive = option(
        "Stop the search after N minutes: a run that cannot end by then is not begun, or is cut.", default=60.0
    )
    tolerance: float = option(
        "Stop once the 95 % interval is this narrow, as a share of the rate.",
        default=0.1, least=0.01, most=0.5, rare=True,
    )  # fmt: skip
    min_rate: Positive | None = option("The lowest rate tried (default: 1/64 of the first).", metavar="R", rare=True)
    max_rate: Positive | None = option(
        "The highest rate tried (default: 1024 times the first).", metavar="R", rare=True
    )
    max_runs: int = option("Stop after N runs, disturbed ones included.", default=40, least=1, most=1000, rare=True)
    run_seconds: NotNegative = option(
        "Let requests arrive for at least N seconds in each run. Without --num-prompts a run also lasts until an "
        "overload of half the --tolerance would show: for the limit on TTFT or E2EL over that, or for 3 / that^2 "
        "arrivals.",
        default=20.0, rare=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(Options, heading=_SEVERAL, rare=True):
    """The options that share a load among processes."""

    processes: int | None = option(
        "Share the load among N processes of this machine (default: the workload's load.processes).",
        least=1, most=1000,
    )  # fmt: skip
    master: bool = switch("Share the load among workers on other machines, and wait for them.")
    expect_workers: int = option("With --master: wait for N workers.", default=1, least=1, most=1000)
    bind_host: str = option(
        "With --master: listen for workers at this address, e.g. 0.0.0.0 on a network of your own.",
        default="127.0.0.1", metavar="HOST",
    )  # fmt: skip
    bind_port: int = option(
        "With --master: the port to listen at.", default=LOCUST_PORT, least=1, most=65535, metavar="PORT"
    )
    worker: bool = switch("Be a worker of the master at --master-host; nothing else is needed.")
    master_host: str = option("With --worker: the master's address.", default="127.0.0.1", metavar="HOST")
    master_port: int = option(
        "With --worker: the master's port.", default=LOCUST_PORT, least=1, most=65535, metavar="PORT"
    )


@dataclass(frozen=True, kw_only=True)
class LoadRequest(
    UrlOptions, PromptOptions, LoadOptions, FormOptions, SearchOptions, ProcessOptions, ClientOptions, heading=_RUN
):
    """The request of ``kvbench load``."""

    workload: str | None = argument("WORKLOAD", None)
    output_dir: Folder | None = option(
        "Keep manifest, raw samples and metrics there; it must be new or empty (default: keep nothing).", metavar="DIR"
    )
    resume: bool = switch("With --output-dir: go on with what was begun there, or measure an invalid load again.")
    num_warmups: int = option(
        "Send N requests of the load's shape first, never measured; then as many short ones at once as the load has in "
        "flight. 0: none of either.",
        default=4, least=0, most=1000, rare=True,
    )  # fmt: skip
