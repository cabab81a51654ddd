"""``kvbench cache-sim``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvbench.common.options import (
    Count,
    NotNegativeCount,
    Options,
    OutputFile,
    argument,
    option,
    switch,
    takes,
)

_NOT_WITH_TIERS = {
    "pages": "the sizes of the tiers say how many pages each holds",
    "kv_bytes_per_token": "the model tells the bytes",
}


@dataclass(frozen=True, kw_only=True)
class TierOptions(Options, heading="Tiers"):
    """The options of a cache of several tiers."""

    tiers: str | None = option(
        "A cache of several tiers, such as hbm=40GiB,dram=40GiB@50GB/s,ssd=1TiB, and the TTFT that each saves; @SPEED "
        "and @LATENCY of loading are the device's link and a usual SSD's where they are not given.",
        metavar="NAME=SIZE[,...]",
    )
    device: str | None = option(
        "With --tiers: the GPUs, whose speed is simulated: H100, 4xA100-80GB.", metavar="[Nx]NAME"
    )
    policy: Literal["lru", "lfu"] | None = option(
        "With --tiers: the page that tiers below HBM evict: lru, the one used longest ago (default); lfu, the one used "
        "by the fewest requests."
    )


@dataclass(frozen=True, kw_only=True)
class CacheSimRequest(TierOptions):
    """The request of ``kvbench cache-sim``."""

    trace: tuple[Path, ...] = argument("TRACE")
    format: str = option("The trace's format (default: found by its content).", default="auto", metavar="NAME")
    pages: tuple[str, ...] = option(
        "Pages in the pool, such as 1k,5k,20k. Repeatable. (Default: 1, 2, 5, 10 ... from the longest request up to "
        "where nothing is evicted.)",
        default=(), metavar="N[,N...]",
    )  # fmt: skip
    page_size: Count | None = option(
        "Tokens a page of the trace (default: found from the lengths; Mooncake's is 512).", metavar="TOKENS"
    )
    warm_up: NotNegativeCount = option(
        "Let the first N requests only fill the cache, without counting them.", default=0, metavar="REQUESTS"
    )
    kv_bytes_per_token: Count | None = option("Show capacities in bytes as well.", metavar="BYTES")
    model: str | None = option(
        "Show capacities in bytes of this model: a folder, a config JSON or the name of one that ships.", metavar="NAME"
    )
    kv_cache_dtype: str | None = option(
        "With --model: how K and V are stored: auto, fp8_e4m3, int8_per_token_head, ...", metavar="DTYPE"
    )
    as_json: bool = switch("Print JSON instead of the table.", "--json")
    html: OutputFile | None = option("Write the curve as a page, too.", metavar="PATH")


@takes(CacheSimRequest)
def cache_sim(request: CacheSimRequest) -> int:
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

    tiers = request.part(TierOptions).values()
    options = {name: value for name, value in request.values().items() if name not in tiers}
    stated = request.stated
    check_goes_with(stated, dict.fromkeys(("policy", "device"), ("--tiers",)), ["--tiers"] if request.tiers else [])
    check_exclusive(stated, {("tiers", other): why for other, why in _NOT_WITH_TIERS.items()})
    if request.tiers is None:
        from kvbench.trace_analysis.commands import cache_sim_command

        return cache_sim_command(**options)
    from kvbench.simulation.fleet.tiers import tiers_command

    return tiers_command(**{name: options[name] for name in options if name not in _NOT_WITH_TIERS}, **tiers)
