"""The request of ``kvbench simulate``: its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.common.options import Count, Folder, Integers, Numbers, Options, Positive, argument, option, switch
from kvbench.sweep.requests import ClusterOptions, MachineOptions
from kvbench.workload.options import PromptOptions, SeedOptions

_LOAD = "The load"


@dataclass(frozen=True, kw_only=True)
class SimulatedModel(MachineOptions, heading="The simulated machine"):
    """The options of the machine, and of the model that runs on it."""

    model: str | None = option(
        "A model that `kvbench plan` knows, or its config.json (default: the workload's).", metavar="NAME"
    )


@dataclass(frozen=True, kw_only=True)
class SimulatedLoad(Options, heading=_LOAD):
    """The options that change the load; several rates or numbers of users are several simulations."""

    at: str | None = option(
        "The load of WORKLOAD to send: c32 has 32 users, r4 has 4 requests/s (default: the first).",
        metavar="LOAD",
    )
    max_concurrency: Integers = option(
        "Closed loop: the users. Open loop: most requests in flight.",
        "--concurrency", "--max-concurrency", default=(), metavar="N[,N]",
    )  # fmt: skip
    request_rate: Numbers = option(
        "Open loop at R requests/s (conversations/s where the workload has them); inf: all at once.",
        default=(), metavar="R[,R]",
    )  # fmt: skip
    num_prompts: Count | None = option("Requests of the load, or conversations where the workload has them.")
    goodput: tuple[str, ...] = option(
        "Limits that a good request keeps, such as 'ttft:200 tpot:50'. Repeatable.",
        default=(), metavar="NAME:MS", rare=True,
    )  # fmt: skip
    burstiness: Positive | None = option(
        "Gamma-distributed gaps: below 1 burstier than Poisson, above 1 more regular.", metavar="B", rare=True
    )


@dataclass(frozen=True, kw_only=True)
class FleetOptions(Options, heading="A fleet"):
    """The options of several engines behind a router."""

    replicas: Integers = option(
        "Simulate N engines, each with GPUs and a prefix cache of its own.", default=(1,), metavar="N[,N]"
    )
    router: tuple[Literal["round-robin", "least-loaded", "prefix-aware"], ...] = option(
        "How requests are shared among replicas (default: round-robin). Given several times: each is simulated, and "
        "they are compared.",
        default=(),
    )


@dataclass(frozen=True, kw_only=True)
class SimulatedSearch(Options, heading="With --find-max-rate"):
    """The options of a search for the highest rate."""

    find_max_rate: str | None = option(
        "Search the highest request rate that meets SLO: conditions such as p95_ttft<=500ms,p99_itl<=50ms or "
        "goodput>=95%, as `kvbench load` has them.",
        metavar="SLO",
    )
    run_seconds: Positive = option("Let requests arrive for at least N seconds in each run.", default=120.0, rare=True)
    tolerance: float = option(
        "Stop once the best rate and the next that missed are this close (0.02: within 2 %).",
        default=0.02, least=0.001, most=0.5, rare=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SimulateRequest(
    SimulatedModel, PromptOptions, SimulatedLoad, SeedOptions, FleetOptions, SimulatedSearch, ClusterOptions,
    heading="The simulation",
):  # fmt: skip
    """The request of ``kvbench simulate``."""

    workload: str | None = argument("WORKLOAD", None)
    as_json: bool = switch("Print JSON instead of the tables.", "--json")
    output_dir: Folder | None = option(
        "Keep figures and requests there; it must be new or empty (default: keep nothing).", metavar="DIR"
    )
    processes: Count | None = option("Run N simulations at once (default: one a core).", rare=True)
