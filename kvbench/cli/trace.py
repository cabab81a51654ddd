"""``kvbench trace describe``: what a trace holds, as tables, JSON or a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvbench.cli.options import OutputFile


@click.group()
def trace() -> None:
    """Look at recorded traces of requests."""


@trace.command()
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--format", "name", default="auto", metavar="NAME", help="The trace's format (default: by its content).")
@click.option(
    "--page-size", type=click.IntRange(1), metavar="TOKENS",
    help="Tokens a page: of the trace's page ids (default: found from the lengths), or for texts (default: 16).",
)  # fmt: skip
@click.option(
    "--tokenizer", metavar="FOLDER", help="Count texts in tokens of this tokenizer, and find what they share."
)
@click.option("--pages", multiple=True, metavar="N[,N...]", help="Capacities of the prefix cache (default: a ladder).")
@click.option("--kv-bytes-per-token", type=click.IntRange(1), metavar="BYTES", help="Show capacities in bytes as well.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the tables.")
@click.option("--plot", type=OutputFile(), metavar="OUT.html", help="Write figures as a page, too.")
def describe(**options: Any) -> int:
    """Show what the trace in FILES holds.

    Lengths, rate, burstiness (cv of the gaps; Fano factor: variance over mean of the requests in windows of 1, 10 and
    60 s, 1 for Poisson), the ideal and the capacity-limited hit rate of a prefix cache, and the share of memory that
    reservations for the longest request would use. No model runs.

    FILES: one trace, or several files of one format that are one trace (sessions of agents, a file each). The format is
    found by the content: mooncake, qwen (Bailian), timed_trace (vLLM), guidellm, weka (kv-cache-tester), azure,
    burstgpt, vidur, servegen (its two files), sharegpt, questions (mt_bench, spec_bench), custom (vLLM), lmcache,
    single_turn and multi_turn (AIPerf).

    \b
    Examples:
      kvbench trace describe conversation_trace.jsonl --plot conversation.html
      kvbench trace describe AzureLLMInferenceTrace_conv.csv --json
      kvbench trace describe ShareGPT.json --tokenizer MODEL_DIR
    \b
    Exit codes: 0 shown, 2 bad input. No files are written but --plot's.
    """
    from kvbench.trace_analysis.commands import describe_command

    return describe_command(**options)
