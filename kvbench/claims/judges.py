"""The rules of the claims: one function a claim judges what was measured, with its rule in the docstring.

A judge gets what was measured in the order that claims.yaml has. A verdict rests on a 95 % interval that lies wholly on
one side of the rule's limit, or on exact counts. An interval that straddles a limit leaves the claim undecided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.claims.kernel_cost import IN_ORDER, RESERVED, SCATTERED, KernelCost
from kvbench.claims.measure import WorkloadFacts
from kvbench.claims.served import ServedFacts
from kvbench.common.text import listing, plural
from kvbench.effects.comparison import MARGINS, Comparison, independent
from kvbench.lockstep.intervals import effect_of_values
from kvbench.metrics.definitions import ENGINE
from kvbench.report.comparisons import amount

HELD, DID_NOT_HOLD, DEPENDS, UNDECIDED = "held", "did not hold", "depends", "undecided"
VERDICTS = (HELD, DID_NOT_HOLD, DEPENDS, UNDECIDED)
MORE = "more launches would tell (--minutes)"
LITTLE = 0.05  # a change of at most so much is "nothing" or "little"


@dataclass(frozen=True)
class ClaimVerdict:
    """``word``: one of VERDICTS; ``evidence``: its numbers; ``reason``: why it is undecided, or on what it depends."""

    word: str
    evidence: str
    reason: str = ""


def words(ratio: Comparison) -> str:
    """+65 % (+59.0 to +72.1), 2.7x (2.67 to 2.82): a ratio with its interval."""
    if ratio.low is None:
        return amount(ratio.ratio)
    low, high = (f"{x:.2f}" if ratio.ratio >= 2 else f"{100 * (x - 1):+.1f}" for x in (ratio.low, ratio.high))
    return f"{amount(ratio.ratio)} ({low} to {high})".replace("-", "\N{MINUS SIGN}")


def is_above(ratio: Comparison, limit: float) -> str:
    """HELD if the interval lies above ``limit``, DID_NOT_HOLD if below, else UNDECIDED, as one launch always is."""
    if ratio.n == 1 or ratio.low is None:
        return UNDECIDED
    return HELD if ratio.low > limit else DID_NOT_HOLD if ratio.high < limit else UNDECIDED


def is_below(ratio: Comparison, limit: float) -> str:
    """HELD if the interval lies below ``limit``, DID_NOT_HOLD if above, else UNDECIDED."""
    return {HELD: DID_NOT_HOLD, DID_NOT_HOLD: HELD, UNDECIDED: UNDECIDED}[is_above(ratio, limit)]


def held_if(condition: bool) -> str:
    return HELD if condition else DID_NOT_HOLD


def any_of(parts: Sequence[str]) -> str:
    """HELD if one part did, UNDECIDED while one is open, else DID_NOT_HOLD."""
    return next((word for word in (HELD, UNDECIDED) if word in parts), DID_NOT_HOLD)


def too_wide(ratio: Comparison, limit: str) -> str:
    """The reason why an interval decides nothing."""
    if ratio.n == 1 or ratio.low is None:
        return f"one launch does not tell how launches differ: {MORE}"
    return f"the interval {words(ratio)} holds {limit}: {MORE}"


def verdict(parts: Sequence[str], evidence: str, reason: str = "", depends: str = "") -> ClaimVerdict:
    """The verdict on a claim of several parts: undecided for ``reason`` while one is; ``depends``: how they differ."""
    if UNDECIDED in parts:
        return ClaimVerdict(UNDECIDED, evidence, reason)
    return ClaimVerdict(parts[0], evidence) if len(set(parts)) == 1 else ClaimVerdict(DEPENDS, evidence, depends)


def by_counts(parts: Mapping[str, bool], evidence: str, depends: str) -> ClaimVerdict:
    """Held if all parts are so, did not hold if none is; else it ``depends``, with the names of those that are."""
    names = [name for name, is_so in parts.items() if is_so]
    return verdict([held_if(is_so) for is_so in parts.values()], evidence, depends=depends.format(listing(names)))


# --- memory, counted exactly, and what it brings ---


def reservation(measured: WorkloadFacts) -> ClaimVerdict:
    """Held if contiguous wastes at least 90 % of what it reserved, and pages at most 4 %."""
    slots = {layout: measured.slots(layout=layout) for layout in ("contiguous", "paged")}
    wasted = {layout: held["waste"] / (held["waste"] + held["tokens"]) for layout, held in slots.items()}
    length = measured.capacity_of().max_model_len
    at_once = measured.tokens_held() // length, measured.tokens_held(layout="paged") // 300
    evidence = (
        f"{wasted['contiguous']:.1%} of the reserved slots held no token, over all steps of the chats "
        f"({1 - 300 / 4096:.1%} at their end); in pages of 16 {wasted['paged']:.1%}. "
        f"The same bytes hold {at_once[0]} chats or {at_once[1]}"
    )
    return ClaimVerdict(held_if(wasted["contiguous"] >= 0.9 and wasted["paged"] <= 0.04), evidence)


_RESERVATIONS: dict[str, dict[str, str]] = {
    "max": {},
    "pow2": {"reservation": "pow2"},
    "oracle": {"reservation": "oracle"},
    "pages": {"layout": "paged"},
}


def useful_memory(measured: WorkloadFacts) -> ClaimVerdict:
    """Held if pages use 90 % or more, and each kind of reservation 45 % or less; depends if only some kinds do.

    Counted are slots that are reserved, or free in holes too small to reserve. Other free slots are left out.
    """
    useful = {}
    for kind, settings in _RESERVATIONS.items():
        slots = measured.slots(**settings)
        useful[kind] = slots["tokens"] / (slots["tokens"] + slots["waste"] + slots["fragmented"])
    evidence = (
        f"{', '.join(f'{share:.1%} ({kind})' for kind, share in useful.items())} of the slots that are reserved or in "
        "holes hold a token; published 20.4, 26.8, 38.2 and 96.3 %"
    )
    if useful.pop("pages") < 0.9:
        return ClaimVerdict(DID_NOT_HOLD, evidence)
    wasteful = {kind: share <= 0.45 for kind, share in useful.items()}
    return by_counts(wasteful, evidence, "on the reservation: {} use less than 45 %")


_PUBLISHED = {"max": 30.42 / 7.00, "pow2": 30.42 / 9.81, "oracle": 30.42 / 13.62}


def batched_at_once(measured: WorkloadFacts) -> ClaimVerdict:
    """Held if pages over each reservation reach 0.8 of the published ratio, depends if over some, else did not hold."""
    batched = {kind: measured.batched(**settings) for kind, settings in _RESERVATIONS.items()}
    evidence = (
        f"{', '.join(f'{count:.1f} ({kind})' for kind, count in batched.items())} sequences decoded in a step while "
        "requests waited; published 7.0, 9.8, 13.6 and 30.4"
    )
    reached = {kind: batched["pages"] / batched[kind] >= 0.8 * ratio for kind, ratio in _PUBLISHED.items()}
    return by_counts(reached, evidence, "on the reservation: as published over {} only")


def sustainable_rate(measured: WorkloadFacts) -> ClaimVerdict:
    """Held if pages surely give 1.7 times the throughput of exact reservations and 2.7 times that of the longest ones.

    The throughput of a burst stands for the highest rate: requests wait for most of it, but not at its end.
    """
    exact, longest = (measured.ratio({"layout": "paged"}, _RESERVATIONS[kind]) for kind in ("oracle", "max"))
    evidence = (
        f"output tokens/s of a burst of requests: {words(exact)} against exact reservations, "
        f"{words(longest)} against the longest; published 1.7x to 2.7x, and 2.7x to 8x"
    )
    parts = is_above(exact, 1.7), is_above(longest, 2.7)
    reason = too_wide(exact, "1.7x") if parts[0] == UNDECIDED else too_wide(longest, "2.7x")
    return verdict(parts, evidence, reason, "on the reservation")


def mixed_lengths(measured: WorkloadFacts) -> ClaimVerdict:
    """Held if the throughput is surely twice or more, did not hold if surely less than twice."""
    gain, before, after = measured.speed(layout="paged"), measured.steps(), measured.steps(layout="paged")
    evidence = (
        f"{words(gain)} output tokens/s; {before[0]} steps of {before[1]:.1f} output tokens and {before[2]:.0f} ms in "
        f"reservations, {after[0]} of {after[1]:.1f} and {after[2]:.0f} ms in pages"
    )
    return verdict([is_above(gain, 2.0)], evidence, too_wide(gain, "2.0x"))


def brings_little(measured: WorkloadFacts) -> ClaimVerdict:
    """Held if the throughput surely rises by less than 5 %, did not hold if surely by more."""
    gain, preempted = measured.speed(layout="paged"), measured.counters(layout="paged")["num_preemptions_total"]
    costs = ": pages cost here" if is_below(gain, 1 - LITTLE) == HELD else ""
    evidence = (
        f"{words(gain)} output tokens/s{costs}; steps of {measured.steps()[1]:.1f} output tokens in reservations, of "
        f"{measured.steps(layout='paged')[1]:.1f} in pages with {plural(round(preempted), 'preemption')}"
    )
    return verdict([is_below(gain, 1 + LITTLE)], evidence, too_wide(gain, "+5 %"))


# --- pages ---


def page_16(measured: WorkloadFacts) -> ClaimVerdict:
    """Held if 16 is surely faster than every other size; not if another is surely over 2 % faster; else it depends.

    Surely is each by itself: of eight intervals one is off more often than of one.
    """
    sizes = sorted(configuration.varied["page_size"] for configuration in measured.design.configurations[1:])
    speeds = {size: measured.speed(page_size=size) for size in sizes}
    evidence = "beside 16: " + ", ".join(f"{size} {words(speed)}" for size, speed in speeds.items())
    faster = {size: is_above(speed, 1 + MARGINS[ENGINE]) for size, speed in speeds.items()}
    if HELD in faster.values():
        return ClaimVerdict(DID_NOT_HOLD, evidence)
    if wide := [str(size) for size, word in faster.items() if word == UNDECIDED]:
        return ClaimVerdict(UNDECIDED, evidence, f"pages of {listing(wide)} may be over 2 % faster: {MORE}")
    level = [str(size) for size, speed in speeds.items() if is_below(speed, 1.0) != HELD]
    if not level:
        return ClaimVerdict(HELD, evidence)
    return ClaimVerdict(DEPENDS, evidence, f"pages of {listing(level)} are not surely slower")


def small_pages(measured: WorkloadFacts) -> ClaimVerdict:
    """Held if at 4 or 8 the page table takes 1 % of the budget, and the speed surely is over 2 % below that of 16.

    Depends if only one of both is so. The table's size is arithmetic.
    """
    tables, speeds = {}, {}
    for size in (1, 4, 8):
        capacity = measured.capacity_of(page_size=size)
        tables[size] = capacity.page_table_bytes / capacity.kv_budget_bytes
        speeds[size] = measured.speed(page_size=size)
    evidence = "; ".join(
        f"page {size}: page table {share:.2%} of the budget, {words(speeds[size])} tokens/s"
        for size, share in tables.items()
    )
    time = any_of([is_below(speeds[size], 1 - MARGINS[ENGINE]) for size in (4, 8)])
    memory = held_if(any(tables[size] >= 0.01 for size in (4, 8)))
    waste = "memory" if memory == HELD else "time"
    return verdict((memory, time), evidence, f"an interval holds -2 %: {MORE}", f"on what: only {waste} is wasted")


def sharing(low: float, high: float, *by_width: WorkloadFacts) -> ClaimVerdict:
    """Held if 2, 4 and 6 answers all save between 0.8 times the published least and 1.25 times the published most."""
    saved = [measured.shared() for measured in by_width]
    evidence = f"{', '.join(f'{x:.1%}' for x in saved)} of the pages with 2, 4 and 6; published {low} to {high} %"
    return ClaimVerdict(held_if(all(0.8 * low / 100 <= share <= 1.25 * high / 100 for share in saved)), evidence)


def paging_cost(cost: KernelCost) -> ClaimVerdict:
    """Held if the decode kernel surely takes 3 to 5 % longer on pages than on reservations, in order and scattered.

    Depends if it is so, or less, or more for one of both only. The planning once a step, for all layers, is left out.
    """
    costs = {place: effect_of_values(cost.seconds[RESERVED], cost.seconds[place]) for place in (IN_ORDER, SCATTERED)}
    evidence = (
        f"decode kernel over {cost.batch} contexts of {cost.context:,} tokens, pages of {cost.page_size} "
        f"against the same kernel on reservations: {words(costs[IN_ORDER])} time where the pages of a sequence lie in "
        f"order, {words(costs[SCATTERED])} where they are scattered"
    )
    least, most = 1.03, 1.05
    sides = {}
    for place, ratio in costs.items():
        over_least, over_most = is_above(ratio, least), is_above(ratio, most)
        if UNDECIDED in (over_least, over_most):
            return ClaimVerdict(UNDECIDED, evidence, too_wide(ratio, "+3 or +5 %"))
        sides[place] = "less" if over_least == DID_NOT_HOLD else "more" if over_most == HELD else "as said"
    if len(set(sides.values())) == 1:
        return ClaimVerdict(held_if(sides[IN_ORDER] == "as said"), evidence)
    where = ", ".join(f"{side} where they are {place}" for place, side in sides.items())
    return ClaimVerdict(DEPENDS, evidence, f"on how the pages lie: {where}")


# --- prefixes ---


def prefix_unshared(measured: WorkloadFacts) -> ClaimVerdict:
    """Held if prefix caching surely makes prompts that share nothing over 2 % slower, did not hold if surely not."""
    speed = measured.speed(enable_prefix_caching=True)
    evidence = f"{words(speed)} output tokens/s with prefix caching where nothing is shared"
    return verdict([is_below(speed, 1 - MARGINS[ENGINE])], evidence, too_wide(speed, "-2 %"))


_CACHING = {"layout": "paged", "enable_prefix_caching": True}


def prefix_shared(one_shot: WorkloadFacts, five_shot: WorkloadFacts) -> ClaimVerdict:
    """Held if both prefixes surely give at least 0.8 times the published throughput, depends if one does."""
    sides, parts, wide = [], [], ""
    for kind, measured, published in (("one-shot", one_shot, 1.67), ("five-shot", five_shot, 3.58)):
        gain, least = measured.ratio(_CACHING), 0.8 * published  # against exact reservations
        sides.append(is_above(gain, least))
        wide = too_wide(gain, f"{least:.2f}x") if sides[-1] == UNDECIDED else wide
        alone = measured.ratio(_CACHING, {"layout": "paged"})
        parts.append(f"{kind}: {words(gain)} against exact reservations, {words(alone)} against pages alone")
    evidence = f"memory for {five_shot.tokens_held():,} tokens; {'; '.join(parts)}; published 1.67x and 3.58x"
    return verdict(sides, evidence, wide, "on how long the prefix is")


def shared_tokens(one_shot: WorkloadFacts, five_shot: WorkloadFacts, unshared: WorkloadFacts) -> ClaimVerdict:
    """Depends on the load by its nature, unless 40 to 60 % are shared behind a short, a long and no common prefix."""
    shared = {
        "behind a prefix of half of each request": one_shot.shared(**_CACHING),
        "behind one of four fifths": five_shot.shared(**_CACHING),
        "without a common prefix": unshared.shared(enable_prefix_caching=True),
    }
    evidence = ", ".join(f"{share:.0%} {load}" for load, share in shared.items()) + "; of the pages of running requests"
    so_much = {load: 0.4 <= share <= 0.6 for load, share in shared.items()}
    return by_counts(so_much, evidence, "on how much of its requests a load has in common: only {}")


# --- KV formats, preemption, limits of a step ---

_QUANTISED = {"FP8": "fp8_e4m3", "INT8": "int8_per_token_head", "INT4": "int4_per_token_head"}


def quantised_kv(measured: WorkloadFacts) -> ClaimVerdict:
    """Held if FP8, INT8 and INT4 all are surely faster where memory is scarce, in pages of 16 and of 4 tokens."""
    sides, parts = [], []
    for name, dtype in _QUANTISED.items():
        speeds = [measured.ratio({"kv_cache_dtype": dtype, "page_size": size}, {"page_size": size}) for size in (16, 4)]
        more = measured.tokens_held(kv_cache_dtype=dtype) / measured.tokens_held()
        sides += [is_above(speed, 1.0) for speed in speeds]
        parts.append(
            f"{name} holds {more:.2f}x the tokens, {words(speeds[0])} tokens/s, {words(speeds[1])} in pages of 4"
        )
    evidence = (
        f"against KV in {measured.capacity_of().dtype}, memory for {measured.tokens_held():,} tokens: "
        f"{'; '.join(parts)}; quality was not measured (kvbench quality)"
    )
    return verdict(sides, evidence, f"an interval holds 0: {MORE}", "on the format or the page size")


def scales_and_pages(measured: WorkloadFacts) -> ClaimVerdict:
    """Held if scales take more of a token's bytes both in INT4 than in INT8 and in pages of 4 than of 16.

    Depends if only one of both is so.
    """

    def share(name: str, page_size: int) -> float:
        capacity = measured.capacity_of(kv_cache_dtype=_QUANTISED[name], page_size=page_size)
        return capacity.scale_bytes_per_token / capacity.bytes_per_token

    shares = {name: [share(name, size) for size in (16, 4)] for name in _QUANTISED}
    parts = [f"{name} {large:.1%} in pages of 16, {small:.1%} in pages of 4" for name, (large, small) in shares.items()]
    evidence = f"scales take of a token's bytes, by this engine's formats: {'; '.join(parts)}"
    grows = {
        "fewer bits": shares["INT4"][0] > shares["INT8"][0],
        "smaller pages": shares["INT4"][1] > shares["INT4"][0],
    }
    return by_counts(grows, evidence, "on what shrinks: scales weigh more with {} only")


def swap_by_page(measured: WorkloadFacts) -> ClaimVerdict:
    """Held if the pages that were moved to the host have at most nine tenths of the slots of their whole sequences.

    Pages are moved whole. Whole sequences were not moved, their tokens were counted when they were swapped out.
    """
    counted, speed = measured.counters(), measured.speed(preemption_mode="recompute")
    pages, preemptions = counted["swapped_out_pages_total"], counted["num_preemptions_total"]
    whole = counted["swapped_out_slots_total"] + counted["swap_kept_slots_total"]
    if not preemptions:
        return ClaimVerdict(UNDECIDED, "", "memory never ran out, so nothing was swapped")
    moved = pages * measured.find().settings["page_size"]
    evidence = (
        f"{plural(round(preemptions), 'preemption')} moved {plural(round(pages), 'page')} to the host, {moved:,.0f} "
        f"slots; the whole sequences had {whole:,.0f} tokens; recompute instead of swap: {words(speed)} tokens/s"
    )
    return ClaimVerdict(held_if(moved <= 0.9 * whole), evidence)


def max_num_seqs(measured: WorkloadFacts) -> ClaimVerdict:
    """Held if the low value surely is over 2 % slower, and the high one preempts and has a p95 surely so much worse.

    Of TTFT or ITL.
    """
    setting = "max_num_seqs"
    preempted = measured.counters(max_num_seqs=_ends(measured, setting)[1])["num_preemptions_total"]
    counted = f", {plural(round(preempted), 'preemption')}"
    return _batch_limit(measured, setting, ("ttft", "itl"), counted, harmless=not preempted)


def max_num_batched_tokens(measured: WorkloadFacts) -> ClaimVerdict:
    """Held if the low value surely is over 2 % slower, and the high one's p95 ITL surely over 2 % worse."""
    return _batch_limit(measured, "max_num_batched_tokens", ("itl",))


def _ends(measured: WorkloadFacts, setting: str) -> tuple[int, int]:
    """The lowest and the highest value that was measured."""
    values = sorted(configuration.settings[setting] for configuration in measured.design.configurations)
    return values[0], values[-1]


def _batch_limit(
    measured: WorkloadFacts, setting: str, metrics: Sequence[str], counted: str = "", harmless: bool = False
) -> ClaimVerdict:
    low, high = _ends(measured, setting)
    speeds = {value: measured.speed(**{setting: value}) for value in (low, high)}
    p95s = {metric: measured.p95(metric, **{setting: high}) for metric in ("ttft", "itl")}
    evidence = (
        f"{low}: {words(speeds[low])} tokens/s; {high}: {words(speeds[high])} tokens/s, p95 TTFT "
        f"{words(p95s['ttft'])}, p95 ITL {words(p95s['itl'])}{counted}"
    )
    too_low = is_below(speeds[low], 1 - MARGINS[ENGINE])
    worse = any_of([is_above(p95s[metric], 1 + MARGINS[ENGINE]) for metric in metrics])
    too_high = DID_NOT_HOLD if harmless else worse
    return verdict(
        (too_low, too_high),
        evidence,
        f"an interval of {low if too_low == UNDECIDED else high} holds 2 %: {MORE}",
        f"on the side: only too {'low' if too_low == HELD else 'high'} costs here",
    )


# --- kinds of prompts ---


def long_contexts(alone: WorkloadFacts, beside: WorkloadFacts) -> ClaimVerdict:
    """Held if beside long contexts the chats' median and p95 TPOT surely are 1.5 times or more; depends if one is.

    At the larger token budget. Both loads are measured one after the other, so the launches are not pairs (Welch's
    interval of log TPOT).
    """
    large, small = (configuration.settings["max_num_batched_tokens"] for configuration in beside.design.configurations)

    def ratio(quantile: float, tokens: int) -> Comparison:
        base, other = (each.tpots("chat", quantile, max_num_batched_tokens=tokens) for each in (alone, beside))
        return independent(f"p{100 * quantile:.0f}_tpot_ms", ENGINE, other, base)

    median, p95 = ratio(0.5, large), ratio(0.95, large)
    evidence = (
        f"one request in ten is long; the chats' median TPOT beside them: {words(median)} with {large:,} tokens a "
        f"step, {words(ratio(0.5, small))} with {small:,}; their p95 TPOT: {words(p95)} and {words(ratio(0.95, small))}"
    )
    parts = is_above(median, 1.5), is_above(p95, 1.5)
    reason = too_wide(median if parts[0] == UNDECIDED else p95, "1.5x")
    return verdict(parts, evidence, reason, "on whom: the slowest chats much, most of them little")


def kinds_of_prompts(
    easy: WorkloadFacts, average: WorkloadFacts, long: WorkloadFacts, production: WorkloadFacts
) -> ClaimVerdict:
    """Held if what pages bring to each other kind of prompts surely is within 10 % of what the average ones gain.

    The kinds are measured by themselves, so the errors of two gains add up in quadrature.
    """
    kinds = {"easy": easy, "average": average, "long": long, "production": production}
    gains = {kind: measured.speed(layout="paged") for kind, measured in kinds.items()}
    evidence = "pages bring: " + ", ".join(f"{kind} {words(gain)}" for kind, gain in gains.items())
    usual = gains.pop("average")
    parts = []
    for gain in gains.values():
        half = math.hypot(math.log1p(gain.half_width), math.log1p(usual.half_width))
        off = abs(math.log(gain.ratio / usual.ratio))
        if 1 in (gain.n, usual.n) or not abs(off - math.log(1.1)) > half:
            parts.append(UNDECIDED)
        else:
            parts.append(held_if(off < math.log(1.1)))
    # One kind that differs is enough.
    word = next((word for word in (DID_NOT_HOLD, UNDECIDED) if word in parts), HELD)
    return verdict([word], evidence, f"an interval holds a difference of 10 %: {MORE}")


# --- a server ---


def abandoned(facts: ServedFacts) -> ClaimVerdict:
    """Held if any page is still owned 2 s after the clients left, or a request for the whole memory then failed."""
    parts = []
    for name, left in facts.abandoned.items():
        after = (
            "still some 2 s later" if left.freed_after_s is None else f"none {1000 * left.freed_after_s:.0f} ms later"
        )
        served = "was served" if left.next_served else "failed"
        parts.append(
            f"{name}: {plural(left.streams, 'stream')} left with {left.owned_before:.0f} pages, {after}, then a "
            f"request for the whole memory {served}"
        )
    kept = any(left.freed_after_s is None or not left.next_served for left in facts.abandoned.values())
    return ClaimVerdict(held_if(kept), "; ".join(parts))


def malformed(facts: ServedFacts) -> ClaimVerdict:
    """Held if a good request failed or got other tokens, or a malformed one was not refused with its reason."""
    sent = facts.malformed
    evidence = (
        f"{sent.refused} of {sent.sent} malformed requests were refused with a reason, while "
        f"{sent.running} of {sent.good} good requests ran; {sent.same_tokens} of these had the same tokens "
        f"as without, after {1000 * sent.seconds_beside:.0f} ms, without after "
        f"{1000 * sent.seconds_alone:.0f} (one round each)"
    )
    return ClaimVerdict(held_if(sent.refused < sent.sent or sent.same_tokens < sent.good), evidence)
