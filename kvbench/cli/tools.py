"""Commands of the command line that run no server: cache-sim and tune. Imports are lazy, as in ``kvbench.cli.main``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvbench.cli.option_types import FiniteRange, OutputFile


@click.command(name="cache-sim")
@click.argument("trace", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--format", default="auto", metavar="NAME", help="The trace's format (default: found by its content).")
@click.option(
    "--pages", multiple=True, metavar="N[,N...]",
    help="Pages in the pool, such as 1k,5k,20k. Repeatable. (Default: 1, 2, 5, 10 ... from the longest request up to "
    "where nothing is evicted.)",
)  # fmt: skip
@click.option(
    "--page-size", type=click.IntRange(1), metavar="TOKENS",
    help="Tokens a page of the trace (default: found from the lengths; Mooncake's is 512).",
)  # fmt: skip
@click.option(
    "--warm-up",
    type=click.IntRange(0),
    default=0,
    metavar="REQUESTS",
    help="The first so many only fill the cache and are not counted.",
)
@click.option("--kv-bytes-per-token", type=click.IntRange(1), metavar="BYTES", help="Show capacities in bytes as well.")
@click.option("--model", metavar="NAME", help="The same, from a model: a folder, a config JSON or a shipped config.")
@click.option("--kv-cache-dtype", metavar="DTYPE", help="With --model: auto, fp8_e4m3, int8_per_token_head, ...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.option("--html", type=OutputFile(), metavar="PATH", help="Write the curve as a page, too.")
def cache_sim(**options: Any) -> int:
    """Show what a prefix cache would have hit on TRACE, against its capacity, and the infinite cache's ceiling.

    TRACE has page ids: JSONL with hash_ids and input_length (Mooncake, Qwen/Bailian), or a session of
    kv-cache-tester (JSON; several files are several sessions, one after another). Its requests go one after another
    through the engine's own page pool and prefix cache (least recently used pages are evicted first); no model runs.

    \b
    Examples:
      kvbench cache-sim conversation_trace.jsonl
      kvbench cache-sim conversation_trace.jsonl --pages 1k,5k,20k --model llama-3.1-8b --html curve.html
    \b
    Exit codes: 0 shown, 2 bad input. No files are written but --html's.
    """
    from kvbench.trace_analysis.commands import cache_sim_command

    return cache_sim_command(**options)


@click.command()
@click.option("--kernel", multiple=True, type=click.Choice(["decode", "prefill"]), default=("decode", "prefill"))
@click.option(
    "--kv-cache-dtype", multiple=True, metavar="DTYPE", default=("auto", "fp8_e4m3", "int8_per_token_head"),
    show_default=True, help="auto, fp8_e4m3, fp8_e5m2, int8_per_token_head or int4_per_token_head. Repeatable.",
)  # fmt: skip
@click.option(
    "--head-dim", multiple=True, metavar="D[/DV]", default=("128", "64"), show_default=True,
    help="Head dim, or those of K and V. Repeatable.",
)  # fmt: skip
@click.option(
    "--group", multiple=True, type=click.IntRange(1, 64), default=(4,), show_default=True,
    help="Query heads of a KV head; up to 16 are alike to the kernels. Repeatable.",
)  # fmt: skip
@click.option(
    "--page-size", multiple=True, type=click.IntRange(1, 1 << 20), default=(16, 1, 256), show_default=True,
    help="Tokens a page; others take the nearest. Repeatable.",
)  # fmt: skip
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option(
    "--max-minutes", type=FiniteRange(min=0, min_open=True), default=30.0, show_default=True,
    help="When to stop; what was measured by then is written.",
)  # fmt: skip
@click.option(
    "--output-dir", type=click.Path(path_type=Path), help="Where the table goes (default: where kernels look for it)."
)
def tune(**options: Any) -> int:
    """Find the fastest tiles of the GPU attention kernels on this machine's GPU and write them into a table.

    Every candidate is first checked against float64, then timed with CUDA events; the fastest is timed again in turns
    with the computed default and replaces it if it is clearly faster. The engine uses the table from its next start on;
    commit it, and everybody with such a GPU does.

    \b
    Examples:
      kvbench tune
      kvbench tune --kernel decode --kv-cache-dtype auto --head-dim 128 --max-minutes 5
    \b
    Files written: kernels/tuned/sm_XX.json (of the GPU's architecture), added to if it is of the same GPU and versions.
    Exit codes: 0 written, 2 bad input or no CUDA device, 4 a kernel's own default gives wrong numbers.
    """
    from kvbench.cli.tune import tune_command

    return tune_command(**options)
