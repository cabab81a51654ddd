"""``kvbench cache-sim --tiers``: what each tier of a prefix cache saves, in a table, in sentences and drawn."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench.capacity.fit import GIB
from kvbench.capacity.gpus import parse_gpus
from kvbench.capacity.model import plan_model
from kvbench.common.errors import UsageError
from kvbench.common.text import format_bytes
from kvbench.simulation.machine import Machine
from kvbench.simulation.tiers import FirstTokens, TieredSimulation, TierValue, parse_tiers, simulate_tiers
from kvbench.trace_analysis.commands import print_cache
from kvbench.traces.model import file_names
from kvbench.traces.read import read_page_ids

_NOTHING = 0.005  # of the mean TTFT, below which a tier is said to save nothing
_HEADS = ["with", "pages", "hits, pages", "loaded", "mean TTFT", "p95 TTFT", "saves, mean", "p95", "mean, a GiB"]
_POLICY = {"lru": "too", "lfu": "the one that the fewest requests have used"}


def tiers_command(
    trace: tuple[Path, ...],
    *,
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
        html.write_text(_figure(result, title).to_html(include_plotlyjs=True), encoding="utf-8")
    if as_json:
        print(json.dumps({"trace": file_names(trace), **as_dict(result)}, indent=2))
    else:
        print_cache(title, _HEADS, _rows(result), [*answers(result), *facts(result)], html, numbers_from=1)
    return 0


def _rows(result: TieredSimulation) -> list[list[str]]:
    """A row for no cache and for each tier added."""
    rows = [["no cache", "", "", "", _time(result.mean_ttft_s), _time(result.p95_ttft_s), "", "", ""]]
    for tier in result.tiers:
        loads = tier.page_hits and tier is not result.tiers[0]
        saved_a_gib = tier.saved_mean_ttft_s / (tier.bytes / GIB)
        times = (tier.mean_ttft_s, tier.p95_ttft_s, tier.saved_mean_ttft_s, tier.saved_p95_ttft_s, saved_a_gib)
        loaded = f"{tier.pages_not_computed / tier.page_hits:.0%}" if loads else ""
        rows.append([tier.title, f"{tier.num_pages:,}", f"{tier.page_hit_rate:.2%}", loaded, *map(_time, times)])
    return rows


def _time(seconds: float) -> str:
    """Three digits, in seconds from 1 s on, else in ms; what rounds to nothing is 0."""
    if abs(seconds) >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) >= 1e-7 else "0"


def answers(result: TieredSimulation) -> list[str]:
    """A sentence on each tier, and one on all together."""
    words = "; ".join(f"{format_bytes(tier.bytes)} of {tier.title} {_saves(tier)}" for tier in result.tiers)
    without, with_all = _time(result.mean_ttft_s), _time(result.tiers[-1].mean_ttft_s)
    return [f"{words}.", f"All together: {without} without a cache, {with_all} with it."]


def _saves(tier: TierValue) -> str:
    saved, before = tier.saved_mean_ttft_s, tier.mean_ttft_s + tier.saved_mean_ttft_s
    if saved >= _NOTHING * before:
        return f"saves {_time(saved)} of mean TTFT ({saved / before:.0%}; p95: {_time(tier.saved_p95_ttft_s)})"
    if not tier.page_hits:
        return "saves nothing: no page is used again while it is there"
    if not tier.pages_not_computed:
        return "saves nothing: each page in it is sooner computed again than loaded"
    return f"saves next to nothing ({_time(saved)} of mean TTFT)"


def facts(result: TieredSimulation) -> list[str]:
    """What was counted, and how."""
    trace, times = result.trace, result.times
    counted = f"; the first {result.warm_up:,} warm the cache and are not counted" if result.warm_up else ""
    loads = [
        f"{tier.title} {tier.bytes_per_s / 1e9:.3g} GB/s after {_time(tier.latency_s or 0.0)}"
        for tier in result.tiers
        if tier.bytes_per_s is not None
    ]
    below = f", tiers below it {_POLICY[result.policy]}" if len(result.tiers) > 1 else ""
    lines = [
        f"Simulated: {len(trace):,} requests alone, one after another, so without queueing{counted}; steps of at most "
        f"{times.step_tokens:,} tokens, times from the {times.machine.cost_model}.",
        f"Pages of {trace.page_size} tokens ({format_bytes(times.page_bytes)}). HBM evicts the least recently used page"
        f"{below}.",
    ]
    if loads:
        lines.append(f"Loading: {', '.join(loads)}; a page is loaded where that is sooner than computing it.")
    if result.num_cut:
        lines.append(
            f"{result.num_cut:,} requests are longer than HBM: of these its first pages only are looked up and kept."
        )
    return lines


def as_dict(result: TieredSimulation) -> dict[str, Any]:
    """What ``--json`` prints beside the trace's name."""
    trace, times = result.trace, result.times
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
        "no_cache": {"mean_ttft_s": result.mean_ttft_s, "p95_ttft_s": result.p95_ttft_s},
        "tiers": [dataclasses.asdict(tier) for tier in result.tiers],
    }


def _figure(result: TieredSimulation, title: str) -> Any:
    """Mean and p95 TTFT as one tier after another is added, and the pages that each hits; ``title``: inside it."""
    from plotly.subplots import make_subplots

    from kvbench.report.style import CONTIGUOUS, OTHERS, PAGED, finish, safe

    names = ["no cache", *(tier.title for tier in result.tiers)]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for name, colour, times in (
        ("mean TTFT", PAGED, [result.mean_ttft_s, *(tier.mean_ttft_s for tier in result.tiers)]),
        ("p95 TTFT", CONTIGUOUS, [result.p95_ttft_s, *(tier.p95_ttft_s for tier in result.tiers)]),
    ):
        figure.add_bar(
            x=names, y=[seconds * 1e3 for seconds in times], name=name, marker={"color": colour},
            hovertemplate=f"%{{y:,.1f}} ms {name}<extra></extra>", row=1, col=1,
        )  # fmt: skip
    figure.add_bar(
        x=names, y=[0.0, *(tier.page_hits / result.pages * 100 for tier in result.tiers)], row=2, col=1,
        name="pages hit in the tier", marker={"color": OTHERS[0]}, hovertemplate="%{y:.2f} % of pages<extra></extra>",
    )  # fmt: skip
    finish(figure, 520)
    figure.update_yaxes(title_text="TTFT with it, ms", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="hits, % of pages", rangemode="tozero", row=2, col=1)
    top = {"text": safe(f"Simulated: {title}"), "y": 0.95, "yanchor": "top"}
    figure.update_layout(title=top, margin={"t": 96, "b": 56})
    return figure
