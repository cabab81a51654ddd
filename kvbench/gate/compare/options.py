"""The options of ``kvbench compare`` and ``kvbench dev calibrate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvbench.common.options import ExistingFile, ExistingFolder, Folder, Positive, Seed, argument, option, switch
from kvbench.sweep.requests import ClientOptions
from kvbench.targets.options import TargetOptions
from kvbench.workload.options import SeedOptions


@dataclass(frozen=True, kw_only=True)
class SeriesOptions(SeedOptions, TargetOptions, ClientOptions, heading="The comparison"):
    """The options of pairs of servers, whatever is asked of them."""

    workloads: tuple[str, ...] = option(
        "Measure this workload file. Repeatable; each is a class of its own in the verdict.",
        "--workload", default=(), metavar="FILE",
    )  # fmt: skip
    only: tuple[str, ...] = option("Measure only cells whose id matches. Repeatable.", default=(), metavar="GLOB")
    method: Literal["auto", "lockstep", "launched"] = option(
        "lockstep: engines in their own time, both sides taking turns step by step (kvbench's own, and those with an "
        "adapter); launched: servers one after the other, over HTTP. auto: lockstep where both sides can.",
        default="auto",
    )
    repo: ExistingFolder | None = option(
        "The repository that git refs are looked up in (default: kvbench's own, of a wheel the working folder's).",
        metavar="DIR", rare=True
    )
    build_cmd: str | None = option(
        "The command that builds a git ref of --repo, in its folder; {python} and {worktree} are replaced (default: "
        "pip install).",
        metavar="CMD", rare=True,
    )  # fmt: skip
    rebuild: bool = switch("Build git refs again, even where a build is kept.", rare=True)
    order_seed: Seed | None = option(
        "Seed of the order within the pairs (default: a new one each time, which is stored).", rare=True
    )

@dataclass(frozen=True, kw_only=True)
class PairOptions(SeriesOptions, heading="The comparison"):
    """The options of a comparison."""

    policy: Path | None = option(
        "A file with the rules of the verdict (looks, floors, margins, classes), such as ci/gates.yaml (default: "
        "kvbench's own).",
        metavar="FILE",
    )
    max_minutes: Positive | None = option(
        "Stop after about N minutes, and judge the whole pairs: no launch, pair or repeat begins that would take "
        "longer, and what runs on is cut. Builds and the served check do not count."
    )
    output_dir: Path = option(
        "The comparison goes to OUTPUT_DIR/compare/<UTC time>-<git sha>/.", default=Path("results")
    )
    resume: ExistingFolder | None = option(
        "Go on with the comparison in DIR, with the workloads and policy that it began with. A finished one shows its "
        "verdict again.",
        metavar="DIR",
    )
    force: bool = switch(
        "Compare sides that differ in model, device or versions; with --resume, go on though code, versions or machine "
        "changed; and measure though --max-minutes allow too few pairs for a verdict."
    )
    runner_class: str | None = option(
        "The name of the machines that have the noise of this one (default: made of processor, cores and GPUs).",
        metavar="NAME",
        rare=True,
    )


@dataclass(frozen=True, kw_only=True)
class CompareOptions(PairOptions, heading="The comparison"):
    """The options of ``kvbench compare``."""

    base: str | None = argument("BASE", None)
    candidate: str | None = argument("CANDIDATE", None)
    candidate_python: str | None = option(
        "The Python of the candidate, where --target-python is that of the base: two versions of an engine. Sides that "
        "are left out have the workload's settings.",
        metavar="PATH",
    )
    noise: ExistingFile | None = option(
        "The file that `kvbench dev calibrate` wrote for this runner class (default: ci/noise/<class>.json, if there).",
        metavar="FILE", rare=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(PairOptions, heading="The calibration"):
    """The options of ``kvbench dev calibrate``."""

    side: str = argument("SIDE", "HEAD")
    pairs: int = option("Measure N pairs of the side with itself.", default=20, least=4, most=20)
    store: Folder = option("The noise goes to STORE/<runner class>.json.", default=Path("ci/noise"))
