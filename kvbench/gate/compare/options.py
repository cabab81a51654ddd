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
class PairOptions(SeedOptions, TargetOptions, ClientOptions, heading="The comparison"):
    """The options of pairs of servers."""

    workloads: tuple[str, ...] = option(
        "What is measured: a workload file. Repeatable; each is a class of its own in the verdict.",
        "--workload", default=(), metavar="FILE",
    )  # fmt: skip
    only: tuple[str, ...] = option("Only cells whose id matches. Repeatable.", default=(), metavar="GLOB")
    policy: ExistingFile | None = option(
        "Looks, floors, margins and classes, such as ci/gates.yaml (default: kvbench's own).", metavar="FILE"
    )
    max_minutes: Positive | None = option(
        "Stop after about N minutes, and judge the whole pairs: no launch, pair or repeat begins that would take "
        "longer, and what runs on is cut. Builds and the served check do not count."
    )
    method: Literal["auto", "lockstep", "launched"] = option(
        "lockstep: kvbench's own engine in its own time, both sides taking turns step by step; launched: servers one "
        "after the other, over HTTP. auto: lockstep where both sides can.",
        default="auto",
    )
    output_dir: Path = option(
        "The comparison goes to OUTPUT_DIR/compare/<UTC time>-<git sha>/.", default=Path("results")
    )
    resume: ExistingFolder | None = option(
        "Go on with the comparison in DIR, by the workloads and the policy that it began with; the verdict of one that "
        "is finished is shown again.",
        metavar="DIR",
    )
    force: bool = switch(
        "Compare though model, device or versions of the sides differ; with --resume: go on though code, versions or "
        "machine are others than when it began. Measure though --max-minutes allow too few pairs for any verdict."
    )
    repo: ExistingFolder | None = option(
        "The repository that git refs are looked up in (default: kvbench's own).", metavar="DIR", rare=True
    )
    build_cmd: str | None = option(
        "How a git ref of --repo is built, in its folder; {python} and {worktree} are replaced (default: pip install).",
        metavar="CMD", rare=True,
    )  # fmt: skip
    rebuild: bool = switch("Build git refs anew, though a build of them is kept.", rare=True)
    order_seed: Seed | None = option(
        "Seed of the order within the pairs (default: a new one each time, which is stored).", rare=True
    )
    runner_class: str | None = option(
        "Which machines have the noise of this one (default: processor, cores and GPUs).", metavar="NAME", rare=True
    )


@dataclass(frozen=True, kw_only=True)
class CompareOptions(PairOptions, heading="The comparison"):
    """The options of ``kvbench compare``."""

    base: str | None = argument("BASE", None)
    candidate: str | None = argument("CANDIDATE", None)
    noise: ExistingFile | None = option(
        "What `kvbench dev calibrate` wrote for this runner class (default: ci/noise/<class>.json, if there).",
        metavar="FILE", rare=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(PairOptions, heading="The calibration"):
    """The options of ``kvbench dev calibrate``."""

    side: str = argument("SIDE", "HEAD")
    pairs: int = option("Measure so many A/A pairs.", default=20, least=4, most=20)
    store: Folder = option("The noise goes to STORE/<runner class>.json.", default=Path("ci/noise"))
