"""``kvbench compare`` and ``kvbench calibrate``: pairs of freshly launched servers, judged or taken as noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvbench.cli.options import NO_CALIBRATION, OVERRIDES, PROFILE, SEED, TARGET_OPTIONS, FiniteRange, add_options
from kvbench.common.errors import UsageError

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)

_SHARED = (
    click.option("--workload", "workloads", multiple=True, metavar="FILE",
                 help="What is measured: a workload file. Repeatable; each is a class of its own in the verdict."),
    PROFILE,
    OVERRIDES,
    SEED,
    click.option("--only", multiple=True, metavar="GLOB", help="Only cells whose id matches. Repeatable."),
    click.option("--policy", type=_FILE, metavar="FILE",
                 help="Looks, floors, margins and classes, such as ci/gates.yaml (default: kvbench's own)."),
    click.option("--repo", type=_FOLDER, metavar="DIR", help="Where git refs are looked for (default: kvbench's own)."),
    click.option("--build-cmd", metavar="CMD", help="How a git ref of --repo is built, in its folder; {python} and "
                 "{worktree} are replaced (default: pip install)."),
    click.option("--rebuild", is_flag=True, help="Build git refs anew, though a build of them is kept."),
    click.option("--start-timeout", type=FiniteRange(min=1), help="Seconds for a server to be ready."),
    click.option("--method", type=click.Choice(["auto", "lockstep", "launched"]), default="auto",
                 show_default=True,
                 help="lockstep: kvbench's own engine in its own time, both sides taking turns step by step; "
                 "launched: servers one after the other, over HTTP. auto: lockstep where both sides can."),
    click.option("--max-minutes", type=FiniteRange(min=0, min_open=True), metavar="N",
                 help="Nothing is begun that would not end by then, by what it took before: no first launch, no pair, "
                 "no repeat of a disturbed one; what runs on is cut. The pairs that are whole are judged. Builds and "
                 "the served check do not count."),
    NO_CALIBRATION,
    click.option("--output-dir", type=click.Path(path_type=Path), default="results", show_default=True,
                 help="The comparison goes to OUTPUT_DIR/compare/<UTC time>-<git sha>/."),
    click.option("--order-seed", type=click.IntRange(0, 2**32 - 1),
                 help="Seed of the order within the pairs (default: a new one each time, which is stored)."),
    click.option("--force", is_flag=True,
                 help="Compare though model, device or versions of the sides differ; with --resume: go on though "
                 "code, versions or machine are others than when it began. Measure though --max-minutes hold too few "
                 "pairs for any verdict."),
    click.option("--resume", type=_FOLDER, metavar="DIR",
                 help="Go on with the comparison in DIR, by the workloads and the policy that it began with; "
                 "the verdict of one that is finished is shown again."),
    click.option("--runner-class", metavar="NAME",
                 help="Which machines have the noise of this one (default: processor, cores and GPUs)."),
)  # fmt: skip


_shared = add_options(*_SHARED, *TARGET_OPTIONS)


@click.command()
@click.argument("base", required=False)
@click.argument("candidate", required=False)
@_shared
@click.option(
    "--noise", type=_FILE, metavar="FILE",
    help="What `kvbench calibrate` wrote for this runner class (default: ci/noise/<class>.json, if there).",
)  # fmt: skip
def compare(**options: Any) -> int:
    """Say whether CANDIDATE is slower than BASE, and why.

    The verdict is FAIL, PASS or INCONCLUSIVE.

    Each side is a git ref (built in a worktree and environment of its own, kept in ~/.cache/kvbench/builds; `.` is the
    working tree), a launch command with {port}, a URL, settings (page_size=16,enable_prefix_caching=true), or the
    folder of a stored run.

    A pair is a fresh launch of each side under the same requests: of the built-in engine both at once, in turns step by
    step and in engine time, with a short check over HTTP at the end; else servers one after the other, in random order.
    After 8, 12 and 16 pairs p95 TTFT, p95 ITL and throughput are judged per cell, class and overall by sign-flip max-T,
    held against floors and margins; the first look that decides ends the comparison, and so does --max-minutes, with a
    look at what there is.

    \b
    Examples:
      kvbench compare main HEAD --workload workloads/ci_timing.yaml
      kvbench compare v1.2 . --workload workloads/mixed.yaml --max-minutes 60 --policy ci/gates.yaml
      kvbench compare page_size=16 page_size=32 --workload workloads/mixed.yaml -o 'sweep={}'
      kvbench compare 'vllm serve {model} --port {port}' 'vllm serve {model} --port {port} --block-size 32'
          --preset vllm --workload workloads/mixed.yaml -o 'sweep={}'
      kvbench compare results/mixed/<run> results/mixed/<other run>
      kvbench compare --resume results/compare/<run>

    \b
    Files written, in results/compare/<UTC time>-<git sha>/:
      verdict.json, junit.xml, summary.md   the verdict for programs, for CI, for people; pairs.html: the pairs drawn
      benchmark-{bigger,smaller}-is-better.json   the candidate's values for github-action-benchmark
      pairs.csv                             one row a pair, cell and metric
      served.json                           single requests to the servers of both sides, round by round
      manifest.json                         both sides, the order, the machine
      base/, candidate/                     raw samples and counters of every load, laid out as a sweep's

    \b
    Exit codes:
      0    PASS: every change is shown to be within its margin
      1    FAIL: a slowdown is shown, and it is above its floor
      2    usage or bad input, the sides differ in model, device, versions or requests, or --max-minutes hold too few
           pairs for any verdict (see --force); no verdict
      3    INCONCLUSIVE, with the smallest slowdown that would have been seen and the pairs that are needed; also
           where --max-minutes were over before the first pair was whole
      4    INVALID: a pair could not be measured, a build failed, or the disk is full
      5    nothing was compared
      130  interrupted; go on with --resume
    """
    from kvbench.gate.compare.request import CompareRequest
    from kvbench.gate.compare.run import compare_command

    _refuse_changes(options["resume"])
    return compare_command(CompareRequest(**options))


@click.command()
@click.argument("side", required=False)
@_shared
@click.option("--pairs", type=click.IntRange(4, 20), default=20, show_default=True, help="A/A pairs.")
@click.option("--store", type=click.Path(path_type=Path, file_okay=False), default="ci/noise", show_default=True,
              help="The noise goes to STORE/<runner class>.json.")  # fmt: skip
def calibrate(**options: Any) -> int:
    """Measure the noise of this machine in A/A pairs.

    SIDE (default: HEAD) is compared with itself, in pairs as `compare` runs them. What is left between two equal sides
    is what a gate cannot see through. The noise of this class of runners is stored, and warnings say which floors and
    margins are below what it can see; `compare` repeats them.

    \b
    Examples:
      kvbench calibrate --workload workloads/ci_timing.yaml
      kvbench calibrate 'vllm serve {model} --port {port}' --preset vllm --workload workloads/mixed.yaml -o 'sweep={}'

    \b
    Exit codes: 0 stored, 2 usage or bad input, 4 a pair could not be measured, 130 interrupted (go on with --resume).
    Files written: STORE/<runner class>.json, and the pairs as `compare` does.
    """
    from kvbench.gate.compare.request import CompareRequest
    from kvbench.gate.compare.run import calibrate_pairs_command

    _refuse_changes(options["resume"])
    side = options.pop("side") or "HEAD"
    return calibrate_pairs_command(CompareRequest(base=side, candidate=side, **options))


def _refuse_changes(resumed: Path | None) -> None:
    """Raises UsageError for an option that would change the comparison that is resumed."""
    from kvbench.gate.compare.request import OF_AN_EXECUTION

    context = click.get_current_context()
    for parameter in context.command.params if resumed is not None else ():
        given = context.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
        if given and parameter.name not in OF_AN_EXECUTION:
            name = parameter.human_readable_name if isinstance(parameter, click.Argument) else parameter.opts[0]
            raise UsageError(
                f"{name} cannot change a comparison that has begun ({resumed}): leave it out, or start a new one "
                "without --resume"
            )
