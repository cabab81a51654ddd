"""``kvbench quality``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvbench.cli.options import OVERRIDES, PROFILE, OutputFile
from kvbench.common.errors import UsageError, say


@click.command()
@click.argument("workload_or_run", metavar="WORKLOAD|RUN", type=click.Path(path_type=Path))
@PROFILE
@OVERRIDES
@click.option("--prompts", type=click.IntRange(1, 10_000), default=16, show_default=True, help="How many are fed.")
@click.option(
    "--output-tokens", type=click.IntRange(1, 100_000), default=64, show_default=True,
    help="Greedy tokens after each prompt, at most; no more than the workload asks for.",
)  # fmt: skip
@click.option("--output", type=OutputFile(), metavar="FILE", help="Where the result goes (default: RUN/quality.json).")
def quality(
    workload_or_run: Path,
    profile: str | None,
    overrides: tuple[str, ...],
    prompts: int,
    output_tokens: int,
    output: Path | None,
) -> int:
    """Measure how far a quantised KV cache moves what the model predicts.

    For every configuration whose kv_cache_dtype is quantised, the built-in engine computes the same tokens twice, with
    that KV and with KV in the model's own dtype: the workload's prompts, and the greedy continuation of the latter, so
    that KV written by decodes is read as well. Reported is KL(reference || quantised) over the vocabulary, position by
    position, in nats, and how often the likeliest token is the same. `kld:` limits of `kvbench gate` hold it.

    It takes minutes on a CPU, 1 to 4 for workloads/mixed.yaml on 2 cores; fewer --prompts take less. Measure with
    the commit and the versions that the run was measured with: `kvbench gate` takes others only with --force.

    With random weights (load_format: dummy) the KLD is much smaller than a trained model's, and the result says so.

    \b
    Examples:
      kvbench quality results/mixed/20260101T120000Z-1a2b3c4
      kvbench quality workloads/mixed.yaml -o model.path=models/Llama-3.1-8B --output quality.json
    \b
    Files written: quality.json in RUN, or --output's; of a workload none without --output.
    Exit codes: 0 measured, 2 bad input, such as no quantised KV in it.
    """
    from rich.console import Console

    from kvbench.common.console import print_plain, print_table
    from kvbench.common.files import write_json
    from kvbench.common.git import git_state
    from kvbench.common.machine import versions
    from kvbench.common.text import plural
    from kvbench.quality.measure import measure, quantised
    from kvbench.runs.folder import open_run
    from kvbench.runs.quality import QUALITY, code_differences
    from kvbench.runs.resume import stored_workload
    from kvbench.workload.file import load_workload

    only: tuple[str, ...] = ()
    if workload_or_run.is_dir():
        if profile or overrides:
            raise UsageError("a run that was measured cannot be changed: omit --profile and -o, or name the workload")
        manifest = open_run(workload_or_run).manifest()
        backend = manifest.get("backend") or "kvbench"
        if backend != "kvbench" or manifest.get("target"):
            raise UsageError(
                f"{workload_or_run} was measured on {manifest.get('target') or backend}, and only the built-in engine "
                "shows its logits: remove kld from the policy of this run"
            )
        if different := code_differences(git_state(), versions(), manifest):  # before the minutes that it takes
            say(f"warning: {'; '.join(different)}: `kvbench gate` takes this KLD only with --force")
        workload = stored_workload(manifest)
        only, output = tuple(manifest.get("only") or ()), output or workload_or_run / QUALITY
    else:
        workload = load_workload(workload_or_run, profile=profile, overrides=overrides)
    console = Console()
    configurations = quantised(workload, only)
    console.print(
        f"{plural(len(configurations), 'configuration')} with a quantised KV, at most {plural(prompts, 'prompt')} each"
    )
    with console.status("loading") as status:
        result = measure(workload, configurations, prompts=prompts, output_tokens=output_tokens, say=status.update)
    print_table(console, _table(result))
    lines = [f"weights: {result.weights}", result.note]
    if output is not None:
        write_json(output, result.to_json())
        lines.append(f"written: {output}")
    for line in filter(None, lines):
        print_plain(console, line)
    return 0


def _table(result: Any) -> Any:
    from kvbench.common.console import make_table

    facts, parts = result.facts, ("mean", "p95", "p99", "max", "prompt_mean", "decode_mean")
    heads = ("configuration", "positions", "mean", "p95", "p99", "max", "prompts", "decodes", "same token")
    rows = [
        (
            config_id,
            f"{figures['positions']:,}",
            *(f"{figures[part]:.2e}" for part in parts),
            f"{figures['same_argmax']:.2%}",
        )
        for config_id, figures in result.configurations.items()
    ]
    title = (
        f"{result.workload}: KL divergence of a quantised KV in nats, {facts['prompts']} prompts, {facts['dtype']} on "
        f"{facts['device']}"
    )
    return make_table(heads, rows, title=title)
