"""``kvbench cache-sim``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvbench.cli.options import OutputFile

_NOT_WITH_TIERS = {
    "pages": "the sizes of the tiers say how many pages each holds",
    "kv_bytes_per_token": "the model tells the bytes",
}


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
    "--warm-up", type=click.IntRange(0), default=0, metavar="REQUESTS",
    help="The first so many only fill the cache and are not counted.",
)  # fmt: skip
@click.option("--kv-bytes-per-token", type=click.IntRange(1), metavar="BYTES", help="Show capacities in bytes as well.")
@click.option("--model", metavar="NAME", help="The same, from a model: a folder, a config JSON or a shipped config.")
@click.option("--kv-cache-dtype", metavar="DTYPE", help="With --model: auto, fp8_e4m3, int8_per_token_head, ...")
@click.option(
    "--tiers", metavar="NAME=SIZE[,...]",
    help="A cache of several tiers, such as hbm=40GiB,dram=40GiB@50GB/s,ssd=1TiB, and the TTFT that each saves; "
    "@SPEED and @LATENCY of loading are the device's link and a usual SSD's where they are not given.",
)  # fmt: skip
@click.option("--device", metavar="[Nx]NAME", help="--tiers: the GPUs, whose speed is simulated: H100, 4xA100-80GB.")
@click.option(
    "--policy", type=click.Choice(("lru", "lfu")),
    help="--tiers: what tiers below HBM evict: the page used longest ago, or by the fewest requests (default: lru).",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.option("--html", type=OutputFile(), metavar="PATH", help="Write the curve as a page, too.")
def cache_sim(**options: Any) -> int:
    """Show what a prefix cache would have hit on TRACE.

    The hits are shown by capacity, up to those of a cache without limit.

    TRACE has page ids: JSONL with hash_ids and input_length (Mooncake, Qwen/Bailian), or a session of
    kv-cache-tester (JSON; several files are several sessions, one after another). Its requests go one after another
    through the engine's own page pool and prefix cache (least recently used pages are evicted first); no model runs.

    \b
    Examples:
      kvbench cache-sim conversation_trace.jsonl
      kvbench cache-sim conversation_trace.jsonl --pages 1k,5k,20k --model llama-3.1-8b --html curve.html
      kvbench cache-sim conversation_trace.jsonl --tiers dram=40GiB,ssd=1TiB --model llama-3.1-8b --device H100
    \b
    Exit codes: 0 shown, 2 bad input. No files are written but --html's.
    """
    from kvbench.common.option_rules import check_exclusive, check_goes_with

    tiers = {name: options.pop(name) for name in ("tiers", "device", "policy")}
    given = [name for name, value in (options | tiers).items() if value is not None and value != ()]
    check_goes_with(given, dict.fromkeys(("policy", "device"), ("--tiers",)), ["--tiers"] if tiers["tiers"] else [])
    check_exclusive(given, {("tiers", other): why for other, why in _NOT_WITH_TIERS.items()})
    if tiers["tiers"] is None:
        from kvbench.trace_analysis.commands import cache_sim_command

        return cache_sim_command(**options)
    from kvbench.simulation.fleet.tiers import tiers_command

    return tiers_command(**{name: options[name] for name in options if name not in _NOT_WITH_TIERS}, **tiers)
