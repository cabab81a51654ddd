"""``kvbench quality``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvbench.cli.options import OVERRIDES, PROFILE, OutputFile
from kvbench.common.errors import UsageError, say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvbench.runs.quality import QualityResult
    from kvbench.workload.file import Workload


@click.command()
@click.argument("workload_or_run", metavar="WORKLOAD|RUN", type=click.Path(path_type=Path))
@PROFILE
@OVERRIDES
@click.option(
    "--model",
    metavar="PATH",
    help="What answers: a model folder, or the name of one that ships (default: the workload's own where its weights "
    "are real, else kvbench-tiny).",
)
@click.option("--output", type=OutputFile(), metavar="FILE", help="Where the result goes (default: RUN/quality.json).")
def quality(
    workload_or_run: Path, profile: str | None, overrides: tuple[str, ...], model: str | None, output: Path | None
) -> int:
    """Measure what each configuration changes in the model's answers.

    Each is compared with contiguous KV in the model's own dtype, on the same prompts (workloads/quality, passkeys of
    every length, and of a model of its own the workload's first prompts): KL divergence, perplexity, equal greedy
    answers, passkeys, and the same answers while the KV pool is too small. A control (A/A), the baseline with other
    batch-mates, chunks and order, shows what rounding alone does; a limit is the control and a margin.

    A workload with random weights (load_format: dummy) is measured with kvbench-tiny, a small trained model: its
    configurations with that model's answers.

    It takes 10 to 15 s for each configuration with kvbench-tiny on 2 cores. Measure with the commit and the versions
    that the run was measured with: `kvbench gate` takes others only with --force.

    \b
    Examples:
      kvbench quality results/mixed/20260101T120000Z-1a2b3c4
      kvbench quality workloads/mixed.yaml -o model.path=models/Llama-3.1-8B --output quality.json

    \b
    Files written: quality.json in RUN, or --output's; of a workload none without --output.
    Exit codes: 0 measured, whatever the limits say (kvbench gate holds them), 2 bad input.
    """
    from rich.console import Console

    from kvbench.workload.file import load_workload

    if workload_or_run.is_dir():
        if profile or overrides:
            raise UsageError("a run that was measured cannot be changed: omit --profile and -o, or name the workload")
        measure_run(workload_or_run, Console(), model=model, output=output)
    else:
        workload = load_workload(workload_or_run, profile=profile, overrides=overrides)
        _measure(workload, (), Console(), model, output)
    return 0


def measure_run(folder: Path, console: Console, *, model: str | None = None, output: Path | None = None) -> None:
    """Measures the configurations of a run and writes its quality.json, or ``output``. Raises UsageError."""
    from kvbench.runs.quality import QUALITY

    _measure(*_of_run(folder), console, model, output or folder / QUALITY)


def _measure(workload: Workload, only: Sequence[str], console: Console, model: str | None, output: Path | None) -> None:
    """``only``: globs of cells; ``output``: None for none."""
    from kvbench.common.console import print_plain, print_table, status_line
    from kvbench.common.files import write_json
    from kvbench.common.text import plural
    from kvbench.quality.measure import measure
    from kvbench.targets.builtin import check_configuration
    from kvbench.workload.design import plan_sweep

    configurations = plan_sweep(workload, only, check_configuration)[0].configurations
    print_plain(console, f"quality: {plural(len(configurations), 'configuration')} of {workload.name}")
    with status_line(console, "loading") as status:
        result = measure(workload, configurations, model=model, say=status)
    print_table(console, _table(result), drop_first=("RMS Δp", "KLD p99"))
    for line in _sentences(result, output):
        print_plain(console, line)
    if output is not None:
        write_json(output, result.to_json())


def _of_run(folder: Path) -> tuple[Workload, tuple[str, ...]]:
    """The workload of a run, and the globs of its cells. Raises UsageError for a run of another engine."""
    from kvbench.common.git import git_state
    from kvbench.common.machine import versions
    from kvbench.runs.folder import open_run
    from kvbench.runs.quality import code_differences
    from kvbench.runs.resume import stored_workload

    manifest = open_run(folder).manifest()
    backend = manifest.get("backend") or "kvbench"
    if backend != "kvbench" or manifest.get("target"):
        raise UsageError(
            f"{folder} was measured on {manifest.get('target') or backend}, and only the built-in engine is measured "
            "here: remove kld and quality from the policy of this run"
        )
    if different := code_differences(git_state(), versions(), manifest):  # before the minutes that it takes
        say(f"warning: {'; '.join(different)}: `kvbench gate` takes these figures only with --force")
    return stored_workload(manifest), tuple(manifest.get("only") or ())


def _sentences(result: QualityResult, output: Path | None) -> Iterator[str]:
    """What each configuration breaks, what answered, what was left out, and where the file is."""
    for config_id, figures in result.configurations.items():
        for sentence in figures["outside"]:
            yield f"{config_id}: {sentence}"
    facts = result.facts
    of_whom = f"measured with {result.model}, beside the workload" if result.beside else "measured with its own model"
    yield f"{of_whom}: weights {result.weights}; {facts['seconds']:.0f} s"
    if facts["left_out"]:
        yield f"{facts['left_out']} of {facts['prompts'] + facts['left_out']} prompts are longer than the context"
    if result.note:
        yield result.note
    if output is not None:
        yield f"written: {output}"


def _table(result: QualityResult) -> Table:
    from kvbench.common.console import make_table

    heads = (
        "configuration", "KLD mean", "KLD p99", "RMS Δp", "perplexity", "equal answers", "passkeys", "full pool",
        "limits",
    )  # fmt: skip
    rows = [("control (A/A)", *_cells(result.control), "")]
    for config_id, figures in result.configurations.items():
        rows.append((config_id, *_cells(figures), "outside" if figures["outside"] else "within"))
    facts = result.facts
    what = f"{result.model} in {facts['dtype']} on {facts['device']}"
    title = f"{result.workload}, {what}: against contiguous KV in that dtype"
    return make_table(heads, rows, title=title)


def _cells(figures: Mapping[str, Any]) -> tuple[str, ...]:
    """0.0012 (0.0010 to 0.0014), ..., +0.12 %, 45 of 46, 63 of 64, 90 of 91"""
    greedy, passkey, pool = figures["greedy"], figures["passkey"], figures.get("full_pool")
    more = figures.get("perplexity_change")
    return (
        f"{figures['mean']:.2g} ({figures['mean_low']:.2g} to {figures['mean_high']:.2g})",
        f"{figures['p99']:.2g}",
        f"{figures['rms_dp']:.2%}",
        "–" if more is None else f"{more:+.2%}",
        f"{greedy['agree']} of {greedy['answers']}",
        f"{passkey['right']} of {passkey['asked']}",
        f"{pool['agree']} of {pool['answers']}" if pool else "–",
    )
