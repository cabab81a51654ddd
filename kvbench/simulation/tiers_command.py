"""``kvbench cache-sim --tiers``: what each tier of a prefix cache saves, in a table and in sentences."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench.capacity.gpus import parse_gpus
from kvbench.capacity.model import plan_model
from kvbench.common.console import make_table, print_plain, print_table
from kvbench.common.errors import UsageError
from kvbench.common.text import format_bytes
from kvbench.simulation.machine import Machine
from kvbench.simulation.tiers import FirstTokens, Tier, TieredSimulation, TierValue, parse_tiers, simulate_tiers
from kvbench.traces.model import file_names
from kvbench.traces.read import read_page_ids

_NOTHING = 0.005  # of the mean TTFT, below which a tier is said to save nothing
_GIB = 2**30


def tiers_command(
    *,
    trace: tuple[Path, ...],
    format: str,
    page_size: int | None,
    warm_up: int,
    model: str | None,
    kv_cache_dtype: str | None,
    tiers: str,
    device: str | None,
    policy: str | None,
    as_json: bool,
    html: Path | None,
) -> int:
    """Raises UsageError."""
    if model is None or device is None:
        raise UsageError(
            "--tiers needs --model and --device, whose prefill is weighed against loading: give for example --model "
            "llama-3.1-8b --device H100"
        )
    count, gpu = parse_gpus(device)
    machine, dtype = Machine(plan_model(model), gpu, count), kv_cache_dtype or "auto"
    sizes = parse_tiers(tiers, machine, dtype)
    try:
        read = read_page_ids(trace, format, page_size)
        assert read.page_size is not None
        with Console(stderr=True).status(f"replaying {len(read):,} requests"):
            result = simulate_tiers(read, FirstTokens(machine, read.page_size, sizes, dtype), policy or "lru", warm_up)
    except ValueError as error:
        raise UsageError(str(error)) from None
    title = f"{file_names(trace)}: {machine.model.name} on {machine.title}"
    if html is not None:
        from kvbench.simulation.tiers_figure import tiers_figure

        html.write_text(tiers_figure(result, title).to_html(include_plotlyjs=True), encoding="utf-8")
    if as_json:
        print(json.dumps({"trace": file_names(trace), **as_dict(result)}, indent=2))
        return 0
    console = Console()
    print_plain(console, title)
    print_table(console, make_table(*table(result), numbers_from=1))
    for line in [*answers(result), *facts(result)]:
        print_plain(console, line)
    if html is not None:
        print_plain(console, f"figure: {html}")
    return 0


def table(result: TieredSimulation) -> tuple[list[str], list[list[str]]]:
    """Heads, and a row for no cache and for each tier added."""
    heads = ["with", "pages", "hits, pages", "loaded", "mean TTFT", "p95 TTFT", "saves, mean", "p95", "mean, a GiB"]
    rows = []
    for before, value in zip((None, *result.values), result.values, strict=False):
        row = [value.tier.name.upper() if value.tier else "no cache"]
        row += [f"{value.num_pages:,}", f"{value.hits / result.pages:.2%}"] if value.tier else ["", ""]
        row += [f"{value.loaded / value.hits:.0%}" if value.hits and value is not result.values[1] else ""]
        row += [_time(value.mean_s), _time(value.p95_s)]
        if before is not None and value.tier is not None:
            row += [_time(before.mean_s - value.mean_s), _time(before.p95_s - value.p95_s), _a_gib(before, value)]
        rows.append(row + [""] * (len(heads) - len(row)))
    return heads, rows


def _a_gib(before: TierValue, value: TierValue) -> str:
    assert value.tier is not None
    return _time((before.mean_s - value.mean_s) / (value.tier.num_bytes / _GIB))


def _time(seconds: float) -> str:
    """Three digits, in seconds from 1 s on, else in ms; what rounds to nothing is 0."""
    if abs(seconds) >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) >= 1e-7 else "0"


def answers(result: TieredSimulation) -> list[str]:
    """A sentence on each tier, and one on all together."""
    words = []
    for before, value in zip(result.values, result.values[1:], strict=False):
        assert value.tier is not None
        saved, what = before.mean_s - value.mean_s, f"{format_bytes(value.tier.num_bytes)} of {value.tier.name.upper()}"
        if saved >= _NOTHING * before.mean_s:
            words.append(
                f"{what} saves {_time(saved)} of mean TTFT ({saved / before.mean_s:.0%}; p95: "
                f"{_time(before.p95_s - value.p95_s)})"
            )
        elif not value.hits:
            words.append(f"{what} saves nothing: no page is used again while it is there")
        elif not value.loaded:
            words.append(f"{what} saves nothing: each page in it is sooner computed again than loaded")
        else:
            words.append(f"{what} saves next to nothing ({_time(saved)} of mean TTFT)")
    first, last = result.values[0], result.values[-1]
    return [
        "; ".join(words) + ".",
        f"All together: {_time(first.mean_s)} without a cache, {_time(last.mean_s)} with it.",
    ]


def facts(result: TieredSimulation) -> list[str]:
    """What was counted, and how."""
    trace, times = result.trace, result.times
    counted = f"; the first {result.warm_up:,} warm the cache and are not counted" if result.warm_up else ""
    loads = [f"{tier.name.upper()} {_speed(tier)}" for tier in times.tiers if math.isfinite(tier.bytes_per_s)]
    cut = (
        f"{result.num_cut:,} requests are longer than HBM: of these its first pages only are looked up and kept."
        if result.num_cut
        else ""
    )
    lines = [
        f"Simulated: {len(trace):,} requests alone, one after another, so without queueing{counted}; steps of at most "
        f"{times.step_tokens:,} tokens, times from the {times.machine.cost_model}.",
        f"Pages of {trace.page_size} tokens ({format_bytes(times.page_bytes)}). HBM evicts the least recently used page"
        + (f", tiers below it {_POLICY[result.policy]}." if len(times.tiers) > 1 else "."),
        f"Loading: {', '.join(loads)}; a page is loaded where that is sooner than computing it." if loads else "",
        cut,
    ]
    return [line for line in lines if line]


_POLICY = {"lru": "too", "lfu": "the one that the fewest requests have used"}


def _speed(tier: Tier) -> str:
    return f"{tier.bytes_per_s / 1e9:.3g} GB/s after {_time(tier.latency_s)}"


def as_dict(result: TieredSimulation) -> dict[str, Any]:
    """What ``--json`` prints beside the trace's name. Times in seconds, rates are shares of all pages."""
    trace, times = result.trace, result.times
    rows = []
    for before, value in zip(result.values, result.values[1:], strict=False):
        tier = value.tier
        assert tier is not None
        below = math.isfinite(tier.bytes_per_s)
        rows.append(
            {
                "tier": tier.name,
                "bytes": tier.num_bytes,
                "bytes_per_s": tier.bytes_per_s if below else None,
                "latency_s": tier.latency_s if below else None,
                "num_pages": value.num_pages,
                "page_hits": value.hits,
                "page_hit_rate": value.hits / result.pages,
                "pages_not_computed": value.loaded,
                "mean_ttft_s": value.mean_s,
                "p95_ttft_s": value.p95_s,
                "saved_mean_ttft_s": before.mean_s - value.mean_s,
                "saved_p95_ttft_s": before.p95_s - value.p95_s,
            }
        )
    return {
        "simulated": True,
        "model": times.machine.model.name,
        "device": times.machine.gpu.name,
        "gpus": times.machine.gpus,
        "cost_model": times.machine.cost_model,
        "policy": result.policy,
        "format": trace.format,
        "page_size": trace.page_size,
        "page_bytes": times.page_bytes,
        "requests": len(trace),
        "warm_up_requests": result.warm_up,
        "pages": result.pages,
        "requests_longer_than_hbm": result.num_cut,
        "no_cache": {"mean_ttft_s": result.values[0].mean_s, "p95_ttft_s": result.values[0].p95_s},
        "tiers": rows,
    }
