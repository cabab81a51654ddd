"""``kvbench gate``: `kvbench gate counters ...`, and anything else is a folder of results. Imports are lazy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from kvbench.cli.gate_counters import counters
from kvbench.common.options import DefaultGroup, Folder, Options, argument, option, switch, takes


@click.group(cls=DefaultGroup, default="results", context_settings={"help_option_names": ["-h", "--help"]})
def gate() -> None:
    """Judge results, or the engine's counters, for CI.

    \b
    kvbench gate RESULTS [--policy FILE] [--output-dir DIR] [--force]
      RESULTS is the folder of a sweep, held to the absolute limits of the policy (and its canaries to their answers,
      with or without a policy), or that of a comparison, whose stored pairs are judged again by its own rules, or by
      the policy's. More: kvbench gate results --help
    kvbench gate counters [WORKLOAD]
      Replays fixed workloads by step, without arithmetic, and compares every counter with ci/counters.lock.json.

    \b
    Examples:
      kvbench gate results/mixed/20260101T120000Z-1a2b3c4 --policy ci/gates.yaml
      kvbench gate results/compare/20260101T120000Z-1a2b3c4
      kvbench gate counters workloads/ci_counters.yaml

    \b
    Exit codes:
      0  pass
      1  a regression: a limit is broken, the candidate is slower, a counter differs, a canary was answered wrongly
      2  usage or bad input, such as a mistake in the policy, or a comparison that is not finished
      3  inconclusive (comparisons): too few pairs to tell
      4  invalid: an invalid cell, an incomplete run, a metric that nobody measured
      5  nothing was compared: no limit, no cell
    """


@dataclass(frozen=True, kw_only=True)
class JudgeRequest(Options):
    """The request of ``kvbench gate RESULTS``."""

    results: Path = argument("RESULTS")
    policy: Path | None = option("A file with limits and rules, such as ci/gates.yaml.", metavar="FILE")
    output_dir: Folder | None = option(
        "The folder for verdict.json, junit.xml and summary.md (default: RESULTS; for a comparison that another policy "
        "judges, RESULTS/judged-<policy's name>).",
        metavar="DIR",
    )
    force: bool = switch("Judge although what is compared differs in code, versions or machine.")


@takes(JudgeRequest, hidden=True)
def results(request: JudgeRequest) -> int:
    """Hold a sweep's run to the absolute limits of a policy, or judge the pairs of a comparison again.

    A limit holds the median over a cell's repeats; with `every: true` in the policy, each repeat. Which limits there
    are: ci/gates.yaml, which is commented and made to be copied. A comparison is judged once it is finished.

    \b
    Examples:
      kvbench gate results/mixed/20260101T120000Z-1a2b3c4 --policy ci/gates.yaml
      kvbench gate results/mixed/20260101T120000Z-1a2b3c4 --policy ci/gates.yaml --output-dir verdict
    \b
    Files written: verdict.json, junit.xml, summary.md, pairs.html where there are pairs or ratios, and
    benchmark-bigger-is-better.json and benchmark-smaller-is-better.json for github-action-benchmark; in GitHub Actions
    the step summary and up to 5 annotations.
    Exit codes: 0 all hold, 1 one is broken, 2 usage, 3 inconclusive, 4 invalid, 5 nothing was compared.
    """
    from kvbench.common.errors import UsageError, say
    from kvbench.gate.compare.conclude import judge_again
    from kvbench.gate.compare.folder import is_comparison
    from kvbench.gate.limits import judge_sweep, sweep_benchmarks
    from kvbench.gate.policy import load_policy
    from kvbench.gate.verdict.outputs import report_verdict, write_benchmarks

    rules = load_policy(request.policy)
    folder = request.results
    if not folder.is_dir():
        raise UsageError(f"there is no folder {str(folder)!r}: give the folder of a sweep or of a comparison")
    if is_comparison(folder):
        verdict, folder = judge_again(folder, rules, force=request.force)
    else:
        verdict = judge_sweep(folder, rules, force=request.force)
    folder = request.output_dir or folder
    code = report_verdict(verdict, folder)
    if verdict.kind == "limits":
        try:
            benchmarks = sweep_benchmarks(request.results / "summary.csv", verdict.facts["workload"])
        except UsageError as error:  # the verdict stands
            benchmarks = []
            say(f"note: {error}")
        for path in write_benchmarks(benchmarks, folder):
            click.echo(f"written: {path}")
    return code


gate.add_command(results)
gate.add_command(counters)
