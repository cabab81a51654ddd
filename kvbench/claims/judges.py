"""Whether a claim held, from what was measured: one function a claim, each with the rule in its docstring.

``found``: measurement -> ``Measured``, or for ``served`` its facts. A verdict rests on a 95 % interval that lies wholly
on one side of the rule's limit, or on exact counts. An interval that straddles a limit leaves the claim undecided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbench.claims.kernel_cost import IN_ORDER, RESERVED, SCATTERED
from kvbench.claims.measure import Measured
from kvbench.common.stats import welch_interval
from kvbench.common.text import listing, plural
from kvbench.lockstep.intervals import Effect, effect_of_values
from kvbench.report.comparisons import amount
from kvbench.runs.engine_time import LEVEL_WITHIN

HELD, DID_NOT_HOLD, DEPENDS, UNDECIDED = "held", "did not hold", "depends", "undecided"
VERDICTS = (HELD, DID_NOT_HOLD, DEPENDS, UNDECIDED)
LITTLE = 0.05  # a change of at most so much is "nothing" or "little"
Found = Mapping[str, Any]
KERNEL_COST, SERVED = "paging-cost", "served"  # the measurements without a workload
_MORE = "more launches would tell (--minutes)"


@dataclass(frozen=True)
class Verdict:
    """``word``: one of the four; ``evidence``: its numbers; ``reason``: why it is undecided, or on what it depends."""

    word: str
    evidence: str
    reason: str = ""


def words(effect: Effect) -> str:
    """+65 % (+59.0 to +72.1), 2.7x (2.67 to 2.82): a ratio with its interval."""
    if math.isnan(effect.low):
        return amount(effect.ratio)
    low, high = (f"{x:.2f}" if effect.ratio >= 2 else f"{100 * (x - 1):+.1f}" for x in (effect.low, effect.high))
    return f"{amount(effect.ratio)} ({low} to {high})".replace("-", "\N{MINUS SIGN}")


def compare(effect: Effect, limit: float) -> int:
    """1 if the interval lies above ``limit``, -1 if below, 0 if it straddles it, is not known, or is of one launch."""
    if effect.within_launch:
        return 0
    if effect.low > limit:
        return 1
    return -1 if effect.high < limit else 0


def _too_wide(effect: Effect, limit: str) -> str:
    if effect.within_launch or math.isnan(effect.low):
        return f"one launch does not tell how launches differ: {_MORE}"
    return f"the interval {words(effect)} holds {limit}: {_MORE}"


def _by_side(side: int, evidence: str, open_reason: str) -> Verdict:
    return Verdict({1: HELD, -1: DID_NOT_HOLD}[side], evidence) if side else Verdict(UNDECIDED, evidence, open_reason)


def _by_sides(sides: Sequence[int], evidence: str, open_reason: str, depends: str) -> Verdict:
    """Undecided while one side is open; held or not where all sides are the same; else it depends."""
    if 0 in sides or len(set(sides)) == 1:
        return _by_side(0 if 0 in sides else sides[0], evidence, open_reason)
    return Verdict(DEPENDS, evidence, depends)


def _any_of(sides: Sequence[int]) -> int:
    """1 if one side is, 0 while one is open, else -1."""
    return 1 if 1 in sides else min(sides, key=abs)


def _by_counts(so: Mapping[str, bool], evidence: str, depends: str) -> Verdict:
    """Held if all are so, did not hold if none is; else it ``depends``, with the names of those that are."""
    names = [name for name, each in so.items() if each]
    return _by_sides([1 if each else -1 for each in so.values()], evidence, "", depends.format(listing(names)))


# --- memory, counted exactly ---


def reservation(found: Found) -> Verdict:
    """Held if contiguous wastes at least 90 % of what it reserved, and pages at most 4 %."""
    measured = found["reservation"]
    wasted = {layout: _waste(measured.slots(layout=layout)) for layout in ("contiguous", "paged")}
    length = measured.capacity["contiguous"]["max_model_len"]
    at_once = measured.tokens_held() // length, measured.tokens_held(layout="paged") // 300
    evidence = (
        f"{wasted['contiguous']:.1%} of the reserved slots held no token, over all steps of the chats "
        f"({1 - 300 / 4096:.1%} at their end); in pages of 16 {wasted['paged']:.1%}. "
        f"The same bytes hold {at_once[0]} chats or {at_once[1]}"
    )
    return Verdict(HELD if wasted["contiguous"] >= 0.9 and wasted["paged"] <= 0.04 else DID_NOT_HOLD, evidence)


def _waste(slots: Mapping[str, float]) -> float:
    return slots["waste"] / (slots["waste"] + slots["tokens"])


_RESERVATIONS: dict[str, dict[str, str]] = {
    "max": {},
    "pow2": {"reservation": "pow2"},
    "oracle": {"reservation": "oracle"},
    "pages": {"layout": "paged"},
}


def useful_memory(found: Found) -> Verdict:
    """Held if pages use 90 % or more, and each kind of reservation 45 % or less; depends if only some kinds do.

    Counted are slots that are reserved, or free in holes too small to reserve. Other free slots are left out.
    """
    measured, useful = found["useful-memory"], {}
    for kind, settings in _RESERVATIONS.items():
        slots = measured.slots(**settings)
        useful[kind] = slots["tokens"] / (slots["tokens"] + slots["waste"] + slots["fragmented"])
    evidence = (
        f"{', '.join(f'{share:.1%} ({kind})' for kind, share in useful.items())} of the slots that are reserved or in "
        "holes hold a token; published 20.4, 26.8, 38.2 and 96.3 %"
    )
    if useful.pop("pages") < 0.9:
        return Verdict(DID_NOT_HOLD, evidence)
    wasteful = {kind: share <= 0.45 for kind, share in useful.items()}
    return _by_counts(wasteful, evidence, "on the reservation: {} use less than 45 %")


_PUBLISHED = {"max": 30.42 / 7.00, "pow2": 30.42 / 9.81, "oracle": 30.42 / 13.62}


def batched_at_once(found: Found) -> Verdict:
    """Held if pages over each reservation reach 0.8 of the published ratio, depends if over some, else did not hold."""
    batched = {kind: found["useful-memory"].batched(**settings) for kind, settings in _RESERVATIONS.items()}
    evidence = (
        f"{', '.join(f'{each:.1f} ({kind})' for kind, each in batched.items())} sequences decoded in a step while "
        "requests waited; published 7.0, 9.8, 13.6 and 30.4"
    )
    reached = {kind: batched["pages"] / batched[kind] >= 0.8 * ratio for kind, ratio in _PUBLISHED.items()}
    return _by_counts(reached, evidence, "on the reservation: as published over {} only")


SHARING_WIDTHS = (2, 4, 6)


def sharing(kind: str, low: float, high: float, found: Found) -> Verdict:
    """Held if 2, 4 and 6 answers all save between 0.8 times the published least and 1.25 times the published most."""
    saved = [found[f"{kind}-{width}"].shared() for width in SHARING_WIDTHS]
    evidence = f"{', '.join(f'{each:.1%}' for each in saved)} of the pages with 2, 4 and 6; published {low} to {high} %"
    held = all(0.8 * low / 100 <= each <= 1.25 * high / 100 for each in saved)
    return Verdict(HELD if held else DID_NOT_HOLD, evidence)


_CACHING = {"layout": "paged", "enable_prefix_caching": True}


def shared_tokens(found: Found) -> Verdict:
    """Depends on the load by its nature, unless 40 to 60 % are shared behind a short, a long and no common prefix."""
    shared = {
        "behind a prefix of half of each request": found["prefix-one-shot"].shared(**_CACHING),
        "behind one of four fifths": found["prefix-five-shot"].shared(**_CACHING),
        "without a common prefix": found["prefix-unshared"].shared(enable_prefix_caching=True),
    }
    evidence = ", ".join(f"{each:.0%} {load}" for load, each in shared.items()) + "; of the pages of running requests"
    so_much = {load: 0.4 <= each <= 0.6 for load, each in shared.items()}
    return _by_counts(so_much, evidence, "on how much of its requests a load has in common: only {}")


# --- engine time ---


def mixed_lengths(found: Found) -> Verdict:
    """Held if the throughput is surely twice or more, did not hold if surely less than twice."""
    measured = found["mixed-lengths"]
    gain, before, after = measured.speed(layout="paged"), measured.steps(), measured.steps(layout="paged")
    evidence = (
        f"{words(gain)} output tokens/s; {before[0]} steps of {before[1]:.1f} output tokens and {before[2]:.0f} ms in "
        f"reservations, {after[0]} of {after[1]:.1f} and {after[2]:.0f} ms in pages"
    )
    return _by_side(compare(gain, 2.0), evidence, _too_wide(gain, "2.0x"))


def sustainable_rate(found: Found) -> Verdict:
    """Held if pages surely give 1.7 times the throughput of exact reservations and 2.7 times that of the longest ones.

    The throughput of a burst stands for the highest rate: requests wait for most of it, but not at its end.
    """
    measured = found["useful-memory"]
    gains = {kind: measured.ratio({"layout": "paged"}, _RESERVATIONS[kind]) for kind in ("oracle", "max")}
    evidence = (
        f"output tokens/s of a burst of requests: {words(gains['oracle'])} against exact reservations, "
        f"{words(gains['max'])} against the longest; published 1.7x to 2.7x, and 2.7x to 8x"
    )
    sides = [compare(gains["oracle"], 1.7), compare(gains["max"], 2.7)]
    wide = _too_wide(gains["max"], "2.7x") if sides[0] else _too_wide(gains["oracle"], "1.7x")
    return _by_sides(sides, evidence, wide, "on the reservation")


def brings_little(name: str, found: Found) -> Verdict:
    """Held if the throughput surely rises by less than 5 %, did not hold if surely by more."""
    measured = found[name]
    gain, preempted = measured.speed(layout="paged"), measured.counters(layout="paged")["num_preemptions_total"]
    costs = ": pages cost here" if compare(gain, 1 - LITTLE) < 0 else ""
    evidence = (
        f"{words(gain)} output tokens/s{costs}; steps of {measured.steps()[1]:.1f} output tokens in reservations, of "
        f"{measured.steps(layout='paged')[1]:.1f} in pages with {plural(round(preempted), 'preemption')}"
    )
    return _by_side(-compare(gain, 1 + LITTLE), evidence, _too_wide(gain, "+5 %"))


def sweet_spot(found: Found) -> Verdict:
    """Held if 16 is surely faster than every other size; not if another is surely over 2 % faster; else it depends.

    Surely is each by itself: of eight intervals one is off more often than of one.
    """
    measured = found["page-size"]
    speeds = {size: measured.speed(page_size=size) for size in _page_sizes(measured)}
    evidence = "beside 16: " + ", ".join(f"{size} {words(each)}" for size, each in speeds.items())
    if any(compare(each, 1 + LEVEL_WITHIN) > 0 for each in speeds.values()):
        return Verdict(DID_NOT_HOLD, evidence)
    if wide := [str(size) for size, each in speeds.items() if compare(each, 1 + LEVEL_WITHIN) == 0]:
        return Verdict(UNDECIDED, evidence, f"pages of {listing(wide)} may be over 2 % faster: {_MORE}")
    level = [str(size) for size, each in speeds.items() if compare(each, 1.0) >= 0]
    if not level:
        return Verdict(HELD, evidence)
    return Verdict(DEPENDS, evidence, f"pages of {listing(level)} are not surely slower")


def _page_sizes(measured: Measured) -> list[int]:
    return sorted(each.varied["page_size"] for each in measured.design.configurations[1:])


def small_pages(found: Found) -> Verdict:
    """Held if at 4 or 8 the page table takes 1 % of the budget, and the speed surely is over 2 % below that of 16.

    Depends if only one of both is so. The table's size is arithmetic.
    """
    measured = found["page-size"]
    parts, speeds = [], {}
    for size in (1, 4, 8):
        known = measured.capacity[measured.find(page_size=size).config_id]
        speeds[size] = measured.speed(page_size=size)
        parts.append((size, known["page_table_bytes"] / known["kv_budget_bytes"]))
    evidence = "; ".join(
        f"page {size}: page table {share:.2%} of the budget, {words(speeds[size])} tokens/s" for size, share in parts
    )
    time = _any_of([-compare(speeds[size], 1 - LEVEL_WITHIN) for size in (4, 8)])
    memory = 1 if any(share >= 0.01 for size, share in parts if size > 1) else -1
    waste = "memory" if memory > 0 else "time"
    return _by_sides((memory, time), evidence, f"an interval holds -2 %: {_MORE}", f"on what: only {waste} is wasted")


def paging_cost(found: Found) -> Verdict:
    """Held if the decode kernel surely takes 3 to 5 % longer on pages than on reservations, in order and scattered.

    Depends if it is so, or less, or more for one of both only. The planning once a step, for all layers, is left out.
    """
    facts = found[KERNEL_COST]
    seconds = facts["seconds"]
    costs = {place: effect_of_values(seconds[RESERVED], seconds[place]) for place in (IN_ORDER, SCATTERED)}
    evidence = (
        f"decode kernel over {facts['batch']} contexts of {facts['context']:,} tokens, pages of {facts['page_size']} "
        f"against the same kernel on reservations: {words(costs[IN_ORDER])} time where the pages of a sequence lie in "
        f"order, {words(costs[SCATTERED])} where they are scattered"
    )
    least, most = 1.03, 1.05
    sides = {}
    for place, cost in costs.items():
        if 0 in (below := compare(cost, least), above := compare(cost, most)):
            return Verdict(UNDECIDED, evidence, _too_wide(cost, "+3 or +5 %"))
        sides[place] = "less" if below < 0 else "more" if above > 0 else "as said"
    if len(set(sides.values())) == 1:
        return Verdict(HELD if sides[IN_ORDER] == "as said" else DID_NOT_HOLD, evidence)
    where = ", ".join(f"{side} where they are {place}" for place, side in sides.items())
    return Verdict(DEPENDS, evidence, f"on how the pages lie: {where}")


def prefix_unshared(found: Found) -> Verdict:
    """Held if prefix caching surely makes prompts that share nothing over 2 % slower, did not hold if surely not."""
    speed = found["prefix-unshared"].speed(enable_prefix_caching=True)
    evidence = f"{words(speed)} output tokens/s with prefix caching where nothing is shared"
    return _by_side(-compare(speed, 1 - LEVEL_WITHIN), evidence, _too_wide(speed, "-2 %"))


_PREFIXES = {"one-shot": 1.67, "five-shot": 3.58}  # published throughput against exact reservations


def prefix_shared(found: Found) -> Verdict:
    """Held if both prefixes surely give at least 0.8 times the published throughput, depends if one does."""
    sides, parts, wide = [], [], ""
    for kind, published in _PREFIXES.items():
        measured = found[f"prefix-{kind}"]
        gain, least = measured.ratio(_CACHING), 0.8 * published
        sides.append(compare(gain, least))
        wide = _too_wide(gain, f"{least:.2f}x") if not sides[-1] else wide
        alone = measured.ratio(_CACHING, {"layout": "paged"})
        parts.append(f"{kind}: {words(gain)} against exact reservations, {words(alone)} against pages alone")
    published = listing([f"{each}x" for each in _PREFIXES.values()])
    evidence = f"memory for {measured.tokens_held():,} tokens; {'; '.join(parts)}; published {published}"
    return _by_sides(sides, evidence, wide, "on how long the prefix is")


_QUANTISED = {"FP8": "fp8_e4m3", "INT8": "int8_per_token_head", "INT4": "int4_per_token_head"}


def quantised_kv(found: Found) -> Verdict:
    """Held if FP8, INT8 and INT4 all are surely faster where memory is scarce, in pages of 16 and of 4 tokens."""
    measured, sides, parts = found["quantised-kv"], [], []
    for name, dtype in _QUANTISED.items():
        speeds = [measured.ratio({"kv_cache_dtype": dtype, "page_size": size}, {"page_size": size}) for size in (16, 4)]
        more = measured.tokens_held(kv_cache_dtype=dtype) / measured.tokens_held()
        sides += [compare(each, 1.0) for each in speeds]
        parts.append(
            f"{name} holds {more:.2f}x the tokens, {words(speeds[0])} tokens/s, {words(speeds[1])} in pages of 4"
        )
    before = measured.capacity[measured.find().config_id]["dtype"]
    evidence = (
        f"against KV in {before}, memory for {measured.tokens_held():,} tokens: {'; '.join(parts)}; quality was not "
        "measured (kvbench quality)"
    )
    return _by_sides(sides, evidence, f"an interval holds 0: {_MORE}", "on the format or the page size")


def scales_and_pages(found: Found) -> Verdict:
    """Held if scales take more of a token's bytes both in INT4 than in INT8 and in pages of 4 than of 16.

    Depends if only one of both is so.
    """
    measured = found["quantised-kv"]

    def share(name: str, page_size: int) -> float:
        settings = {"kv_cache_dtype": _QUANTISED[name], "page_size": page_size}
        known = measured.capacity[measured.find(**settings).config_id]
        return known["scale_bytes_per_token"] / known["bytes_per_token"]

    shares = {name: [share(name, size) for size in (16, 4)] for name in _QUANTISED}
    parts = [f"{name} {large:.1%} in pages of 16, {small:.1%} in pages of 4" for name, (large, small) in shares.items()]
    evidence = f"scales take of a token's bytes, by this engine's formats: {'; '.join(parts)}"
    grows = {
        "fewer bits": shares["INT4"][0] > shares["INT8"][0],
        "smaller pages": shares["INT4"][1] > shares["INT4"][0],
    }
    return _by_counts(grows, evidence, "on what shrinks: scales weigh more with {} only")


def swap_by_page(found: Found) -> Verdict:
    """Held if the pages that were moved to the host have at most nine tenths of the slots of their whole sequences.

    Pages are moved whole. Whole sequences were not moved, their tokens were counted when they were swapped out.
    """
    measured = found["swap"]
    counted, speed = measured.counters(), measured.speed(preemption_mode="recompute")
    pages, preemptions = counted["swapped_out_pages_total"], counted["num_preemptions_total"]
    whole = counted["swapped_out_slots_total"] + counted["swap_kept_slots_total"]
    if not preemptions:
        return Verdict(UNDECIDED, "", "memory never ran out, so nothing was swapped")
    moved = pages * measured.find().settings["page_size"]
    evidence = (
        f"{plural(round(preemptions), 'preemption')} moved {plural(round(pages), 'page')} to the host, {moved:,.0f} "
        f"slots; the whole sequences had {whole:,.0f} tokens; recompute instead of swap: {words(speed)} tokens/s"
    )
    return Verdict(HELD if moved <= 0.9 * whole else DID_NOT_HOLD, evidence)


def max_num_seqs(found: Found) -> Verdict:
    """Held if the low value surely is over 2 % slower, and the high one preempts and has a p95 surely so much worse.

    Of TTFT or ITL.
    """
    measured, setting = found["max-num-seqs"], "max_num_seqs"
    preempted = measured.counters(max_num_seqs=_ends(measured, setting)[1])["num_preemptions_total"]
    return _batch_limit(
        measured, setting, ("ttft", "itl"), f", {plural(round(preempted), 'preemption')}", harmless=not preempted
    )


def max_num_batched_tokens(found: Found) -> Verdict:
    """Held if the low value surely is over 2 % slower, and the high one's p95 ITL surely over 2 % worse."""
    return _batch_limit(found["max-num-batched-tokens"], "max_num_batched_tokens", ("itl",))


def _ends(measured: Measured, setting: str) -> tuple[int, int]:
    """The lowest and the highest value that was measured."""
    values = sorted(each.settings[setting] for each in measured.design.configurations)
    return values[0], values[-1]


def _batch_limit(
    measured: Measured, setting: str, metrics: Sequence[str], counted: str = "", harmless: bool = False
) -> Verdict:
    low, high = _ends(measured, setting)
    speeds = {value: measured.speed(**{setting: value}) for value in (low, high)}
    p95s = {metric: measured.p95(metric, **{setting: high}) for metric in ("ttft", "itl")}
    evidence = (
        f"{low}: {words(speeds[low])} tokens/s; {high}: {words(speeds[high])} tokens/s, p95 TTFT "
        f"{words(p95s['ttft'])}, p95 ITL {words(p95s['itl'])}{counted}"
    )
    too_low = -compare(speeds[low], 1 - LEVEL_WITHIN)
    too_high = -1 if harmless else _any_of([compare(p95s[metric], 1 + LEVEL_WITHIN) for metric in metrics])
    return _by_sides(
        (too_low, too_high),
        evidence,
        f"an interval of {high if too_low else low} holds 2 %: {_MORE}",
        f"on the side: only too {'low' if too_low > 0 else 'high'} costs here",
    )


def long_contexts(found: Found) -> Verdict:
    """Held if beside long contexts the chats' median and p95 TPOT surely are 1.5 times or more; depends if one is.

    At the larger token budget. Both loads are measured one after the other, so the launches are not pairs (Welch's
    interval of log TPOT).
    """
    beside, alone = found["long-contexts"], found["long-contexts-none"]
    large, small = (each.settings["max_num_batched_tokens"] for each in beside.design.configurations)

    def ratio(quantile: float, tokens: int) -> Effect:
        logs = [np.log(each.tpots("chat", quantile, max_num_batched_tokens=tokens)) for each in (alone, beside)]
        ends = (math.exp(end) for end in welch_interval(*logs))
        return Effect(math.exp(logs[1].mean() - logs[0].mean()), *ends, len(logs[1]), False, math.nan)

    median, p95 = ratio(0.5, large), ratio(0.95, large)
    evidence = (
        f"one request in ten is long; the chats' median TPOT beside them: {words(median)} with {large:,} tokens a "
        f"step, {words(ratio(0.5, small))} with {small:,}; their p95 TPOT: {words(p95)} and {words(ratio(0.95, small))}"
    )
    sides = [compare(median, 1.5), compare(p95, 1.5)]
    wide = _too_wide(p95 if sides[0] else median, "1.5x")
    return _by_sides(sides, evidence, wide, "on whom: the slowest chats much, most of them little")


KINDS = ("easy", "average", "long", "production")


def kinds_of_prompts(found: Found) -> Verdict:
    """Held if what pages bring to each other kind of prompts surely is within 10 % of what the average ones gain.

    The kinds are measured by themselves, so the errors of two gains add up in quadrature.
    """
    gains = {kind: found[f"prompts-{kind}"].speed(layout="paged") for kind in KINDS}
    evidence = "pages bring: " + ", ".join(f"{kind} {words(each)}" for kind, each in gains.items())
    average = gains.pop("average")
    sides = []
    for each in gains.values():
        half = math.hypot(math.log1p(each.half_width), math.log1p(average.half_width))
        ratio = math.log(each.ratio / average.ratio)
        if each.within_launch or average.within_launch:
            half = math.inf
        sides.append(-1 if abs(ratio) - half > math.log(1.1) else 1 if abs(ratio) + half < math.log(1.1) else 0)
    reason = f"an interval holds a difference of 10 %: {_MORE}"
    return _by_side(min(sides), evidence, reason)


# --- a server ---


def abandoned(found: Found) -> Verdict:
    """Held if any page is still owned 2 s after the clients left, or a request for the whole memory then failed."""
    facts, parts, kept = found[SERVED]["abandoned"], [], False
    for name, each in facts.items():
        freed = each["freed_after_s"]
        after = "still some 2 s later" if freed is None else f"none {1000 * freed:.0f} ms later"
        served = "was served" if each["next_served"] else "failed"
        parts.append(
            f"{name}: {plural(each['streams'], 'stream')} left with {each['owned_before']:.0f} pages, {after}, then a "
            f"request for the whole memory {served}"
        )
        kept = kept or freed is None or not each["next_served"]
    return Verdict(HELD if kept else DID_NOT_HOLD, "; ".join(parts))


def malformed(found: Found) -> Verdict:
    """Held if a good request failed or got other tokens, or a malformed one was not refused with its reason."""
    facts = found[SERVED]["malformed"]
    evidence = (
        f"{facts['refused']} of {facts['sent']} malformed requests were refused with a reason, while "
        f"{facts['running']} of {facts['good']} good requests ran; {facts['same_tokens']} of these had the same tokens "
        f"as without, after {1000 * facts['seconds']['beside']:.0f} ms, without after "
        f"{1000 * facts['seconds']['alone']:.0f} (one round each)"
    )
    harmless = facts["refused"] == facts["sent"] and facts["same_tokens"] == facts["good"]
    return Verdict(DID_NOT_HOLD if harmless else HELD, evidence)
