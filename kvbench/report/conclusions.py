"""The findings in words, below the headline: what paging bought, what it cost, and one paragraph a setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbench.common import text as words
from kvbench.report.comparisons import (
    HIGHER,
    LOWER,
    NOT_TOLD,
    SAME,
    UNCLEAR,
    Effect,
    PairedComparison,
    Ratio,
    best,
    effects,
    paging,
    spread,
)
from kvbench.report.provenance import code_paths
from kvbench.report.sentence import WORDS, bounds, effect, rivals, running
from kvbench.runs.kv_ledger import share_of_steps, swapped_bytes
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Run, number
from kvbench.workload.settings import effective, setting_title, value_words


@dataclass(frozen=True)
class Conclusion:
    """A heading and its points, each one a full sentence."""

    title: str
    points: tuple[str, ...]


def conclusions(run: Run) -> list[Conclusion]:
    """All conclusions the run allows, the most asked first."""
    found = []
    pairs = paging(run)
    if pairs:
        found.append(Conclusion("What paging bought", tuple(bought(pair) for pair in reversed(pairs))))
        found.append(Conclusion("What paging cost", (*cost(pairs), *code_paths(run))))
    if len(run.configs) > 1:
        found.append(Conclusion("Which configuration is best", tuple(_best(run, load) for load in reversed(run.loads))))
    settings: dict[str, list[Effect]] = {}
    for one in effects(run):
        if one.setting != "layout" or not pairs:
            settings.setdefault(one.setting, []).append(one)
    for setting, members in settings.items():
        found.append(
            Conclusion(f"{words.upper_first(setting_title(setting))}, changed alone", tuple(effect_summary(members)))
        )
    return found


def reservation(c: PairedComparison) -> str:
    """What contiguous sets aside for a request, next to what requests had; empty where it is not known."""
    slots = c.b.settings.get("max_model_len") or c.b.capacity.get("max_model_len") or c.b.capacity.get("page_size")
    requests = c.b.requests()
    by_length = effective(c.b.settings, "reservation") != "max"
    if not c.b.is_contiguous or by_length or not isinstance(slots, int) or requests.empty:
        return ""
    tokens = requests["prompt_tokens"] + requests["output_tokens"]
    return (
        f"{words.upper_first(c.b.name)} reserves {words.count(slots)} slots per request; the longest request here had "
        f"{words.plural(int(tokens.max()), 'token')}, the mean {words.count(float(tokens.mean()))}."
    )


def bought(c: PairedComparison) -> str:
    """Throughput, concurrency reached and p95 TTFT at one load."""
    text = f"At {c.load.label}: {_ratio('output tokens/s', c.throughput)}"
    mine, theirs = running(c.a), running(c.b)
    if mine is not None and theirs is not None:
        text += f"; {words.decimal(mine)} sequences running at once against {words.decimal(theirs)}"
    return text + f"; p95 TTFT {_values(c, 'ttft_ms', 'p95')}, {_ratio('ratio', c.ttft)}.{_invalid(c)}"


def cost(pairs: list[PairedComparison]) -> list[str]:
    """Slower tokens under load, preemptions, the kernel, page tables, waste."""
    low, high = pairs[0], pairs[-1]
    points = [
        f"At {high.load.label}: median TPOT {_values(high, 'tpot_ms', 'p50')}, {_ratio('ratio', high.tpot)}; "
        f"p95 ITL {_values(high, 'itl_ms', 'p95')}, {_ratio('ratio', high.itl)}."
        f"{_more_running(high)}{_invalid(high)}"
    ]
    preemptions, recomputed = (high.a.counter(f"{n}_total") for n in ("num_preemptions", "recomputed_tokens"))
    if preemptions is not None:
        points.append(
            f"{words.plural(preemptions, 'preemption')} and {words.plural(recomputed or 0, 'recomputed token')} "
            f"in {words.plural(len(high.a.repeats), 'repeat')} of {high.a.name} at {high.load.label}."
        )
    if low is not high:
        points.append(kernel_cost(low))
    memory = _memory(high)
    return [*points, *([memory] if memory else [])]


def kernel_cost(c: PairedComparison) -> str:
    """The page table's cost in the kernel: visible only where both layouts ran the same number of sequences."""
    mine, theirs = running(c.a), running(c.b)
    if c.tpot is None:
        return f"The kernel's cost cannot be told: no paired TPOT at {c.load.label}."
    if mine is None or theirs is None:
        return (
            f"At {c.load.label} {_ratio('median TPOT', c.tpot)}; how many sequences ran at once is not known, so "
            "this is not the kernel alone."
        )
    if abs(mine - theirs) > 0.1 * max(mine, theirs):
        return (
            f"The kernel's cost cannot be told from {c.load.label}: the layouts ran {words.decimal(mine)} and "
            f"{words.decimal(theirs)} sequences at once."
        )
    meaning = {
        SAME: "walking page tables cost nothing that shows",
        HIGHER: "walking page tables cost time",
        LOWER: "paged was not slower per token",
        UNCLEAR: "too few or too scattered repeats to tell what walking page tables costs",
    }[c.tpot.verdict]
    return (
        f"With the same number running ({words.decimal(mine)} and {words.decimal(theirs)} "
        f"at {c.load.label}): {_ratio('median TPOT', c.tpot)}: {meaning}.{_invalid(c)}"
    )


def _memory(c: PairedComparison) -> str:
    parts = []
    tables = spread(c.a.observed("page_table_bytes"))
    if tables is not None:
        parts.append(f"page tables peaked at {words.data_size(tables.median)}")
    waste = [(cell.name, spread(cell.observed("waste_share"))) for cell in (c.a, c.b)]
    if all(s for _, s in waste):
        parts.append(
            "slots reserved but unused: "
            + " against ".join(f"{words.percent(s.median)} ({name})" for name, s in waste if s)
        )
    return f"{words.upper_first('; '.join(parts))}." if parts else ""


def _best(run: Run, load: MeasuredLoad) -> str:
    top = best(run, load)
    if top is None:
        return f"At {load.label}: no valid cell."
    s = top.throughput
    name = f"{top.cell.name} has the highest median," if top.unclear_with else f"{top.cell.name} with"
    if top.by_default:
        name = f"only {top.cell.name} was validly measured, with"
    return (
        f"At {load.label}: {name} {words.tokens_per_s(s.median)} output tokens/s "
        f"({bounds(s.low, s.high, s.n, repeats=False)}){''.join(f'; {text}' for text in rivals(top))}."
    )


def effect_summary(members: list[Effect]) -> list[str]:
    """One sentence a value of a setting: its effect on output tokens/s at each load."""
    values: dict[object, list[Effect]] = {}
    for one in members:
        values.setdefault(str(one.value), []).append(one)
    sentences = []
    for group in values.values():
        first = group[0]
        parts = [
            f"{_ratio('', e.comparison.throughput).strip()} at {e.comparison.load.short}"
            f"{'' if e.comparison.valid else ' (invalid)'}"
            for e in reversed(group)
        ]
        mine, theirs = (value_words(first.setting, value) for value in (first.value, first.baseline_value))
        sentences.append(
            f"{words.upper_first(mine)} instead of {theirs}: output tokens/s {'; '.join(parts)}{_by_the_way(group)}."
        )
    return sentences


def _by_the_way(group: list[Effect]) -> str:
    """What a setting changes besides throughput, for the settings whose purpose that is."""
    first, pair = group[0], group[-1].comparison
    if first.setting == "enable_prefix_caching":
        hits = [words.percent(e.hit_rate) for e in reversed(group) if e.hit_rate is not None]
        rate = f"; measured hit rate {words.listing(hits)} of prompt tokens" if hits else ""
        return rate + _of_steps(pair.a if first.value else pair.b, "hash_seconds", "hashing")
    if first.setting == "kv_cache_dtype":
        mine, theirs = (number(cell.capacity.get("capacity_tokens")) for cell in (pair.a, pair.b))
        if mine and theirs:
            return f"; the same bytes hold {words.count(mine)} tokens instead of {words.count(theirs)}"
    if first.setting == "reservation":
        many, few = running(pair.a), running(pair.b)
        if many is not None and few is not None:
            side = f"{words.decimal(many)} sequences running at once instead of {words.decimal(few)}"
            return f"; at {pair.load.short} {side}"
    if first.setting == "preemption_mode":
        if [cell.counter("num_preemptions_total") for cell in (pair.a, pair.b)] == [0, 0]:
            return f"; nothing was preempted at {pair.load.short}"
        again = [cell.counter("recomputed_tokens_total") for cell in (pair.a, pair.b)]
        swapping = pair.a if first.value == "swap" else pair.b
        moved = swapped_bytes(swapping)
        if None not in again and moved is not None:
            return (
                f"; at {pair.load.short} {words.data_size(moved)} swapped out, and "
                f"{words.plural(again[0] or 0, 'token')} recomputed instead of {words.count(again[1])}"
            ) + _of_steps(swapping, "swap_seconds", "moving")
    return ""


def _of_steps(cell: MeasuredCell, seconds: str, what: str) -> str:
    share = share_of_steps(cell, seconds)
    return "" if share is None else f"; {what} took {words.percent(share)} of the step time"


def _ratio(noun: str, r: Ratio | None) -> str:
    if r is None:
        return f"{noun} not comparable"
    verdict = f"{WORDS[r.verdict]}, " if r.verdict in (SAME, UNCLEAR) else ""
    return f"{noun} {verdict}{effect(r, repeats=False)}"


def _values(c: PairedComparison, metric: str, which: str) -> str:
    def one(cell: MeasuredCell) -> str:
        value, uncertain = cell.percentile(metric, which)
        return words.ms(value) + ("*" if uncertain else "")

    return f"{one(c.a)} against {one(c.b)}"


def _more_running(c: PairedComparison) -> str:
    mine, theirs = running(c.a), running(c.b)
    slower = c.tpot is not None and c.tpot.verdict == HIGHER
    if slower and mine is not None and theirs is not None and mine > 1.1 * theirs:
        return f" Meanwhile {words.decimal(mine)} sequences shared each step instead of {words.decimal(theirs)}."
    return ""


def _invalid(c: PairedComparison) -> str:
    return "" if c.valid else " Invalid measurement, not to be relied on."


@dataclass(frozen=True)
class Tile:
    """A key number: what it is, the number, what it is compared with."""

    label: str
    value: str
    note: str


def tiles(run: Run) -> list[Tile]:
    """Three or four numbers for the top of the page."""
    pairs = paging(run)
    if not run.cells:
        return []
    if pairs and pairs[-1].throughput is not None:
        return _paging_tiles(pairs[-1])
    load = run.loads[-1]
    top = best(run, load)
    if top is None:
        return []
    cell, s = top.cell, top.throughput
    found = [
        Tile(
            f"output tokens/s at {load.short}",
            words.tokens_per_s(s.median),
            f"{cell.name}; {bounds(s.low, s.high, s.n)}",
        )
    ]
    for label, metric, which in (
        ("p95 TTFT", "ttft_ms", "p95"),
        ("median TPOT", "tpot_ms", "p50"),
        ("p95 ITL", "itl_ms", "p95"),
    ):
        value, uncertain = cell.percentile(metric, which)
        found.append(Tile(f"{label} at {load.short}", words.ms(value) + ("*" if uncertain else ""), cell.name))
    return found


def _paging_tiles(c: PairedComparison) -> list[Tile]:
    assert c.throughput is not None
    r = c.throughput
    found = [
        Tile(
            f"throughput at {c.load.short}",
            words.ratio(r.median),
            f"{c.a.name} / {c.b.name}; {words.spread(r.low, r.high, r.n)}"
            + (f"; {NOT_TOLD}" if r.verdict == UNCLEAR else ""),
        )
    ]
    mine, theirs = running(c.a), running(c.b)
    if mine is not None and theirs is not None:
        found.append(Tile("sequences running at once", words.decimal(mine), f"{c.b.name}: {words.decimal(theirs)}"))
    renderings: tuple[tuple[str, str, str, Callable[[float | None], str]], ...] = (
        ("p95 TTFT", "ttft_ms", "p95", words.ms),
        ("median TPOT", "tpot_ms", "p50", words.ms),
    )
    for label, metric, which, render in renderings:
        (a, doubt_a), (b, doubt_b) = c.a.percentile(metric, which), c.b.percentile(metric, which)
        found.append(Tile(label, render(a) + "*" * doubt_a, f"{c.b.name}: {render(b)}{'*' * doubt_b}"))
    return found
