"""The rules of the claims: one function a claim judges what was measured, with its rule in the docstring.

A judge gets what was measured in the order that claims.yaml has. A verdict rests on a 95 % interval (99 % where the
rule says so) that lies wholly on one side of the rule's limit, or on exact counts. An interval that straddles a limit
leaves the claim undecided. The sentences are in sentences_en.toml.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.claims.kernel_cost import IN_ORDER, MOST_TIMINGS, RESERVED, SCATTERED, KernelCost
from kvbench.claims.measure import WorkloadFacts
from kvbench.claims.served import ServedFacts
from kvbench.common.text import listing, plural
from kvbench.common.wording import Wording
from kvbench.effects.comparison import MARGINS, Comparison, independent
from kvbench.lockstep.intervals import EARLY_CONFIDENCE, effect_of_values, with_confidence
from kvbench.metrics.definitions import ENGINE
from kvbench.report.comparisons import amount

HELD, DID_NOT_HOLD, DEPENDS, UNDECIDED = "held", "did not hold", "depends", "undecided"
VERDICTS = (HELD, DID_NOT_HOLD, DEPENDS, UNDECIDED)
LITTLE = 0.05  # a change of at most so much is "nothing" or "little"
_WORDING = Wording(Path(__file__).with_name("sentences_en.toml"))


@dataclass(frozen=True)
class ClaimVerdict:
    """The verdict on a claim.

    word: one of VERDICTS; evidence: its numbers; reason: why it is undecided, or on what it depends
    """

    word: str
    evidence: str
    reason: str = ""


def words(ratio: Comparison) -> str:
    """Writes a ratio with its interval: +65 % (+59.0 to +72.1), 2.7x (2.67 to 2.82)."""
    if ratio.low is None:
        return amount(ratio.ratio)
    low, high = (f"{x:.2f}" if ratio.ratio >= 2 else f"{100 * (x - 1):+.1f}" for x in (ratio.low, ratio.high))
    return f"{amount(ratio.ratio)} ({low} to {high})".replace("-", "\N{MINUS SIGN}")


def say(key: str, form: str | bool | None = None, **values: Any) -> str:
    """Writes a sentence of the TOML file, a ratio among its values with its interval."""
    written = {name: words(value) if isinstance(value, Comparison) else value for name, value in values.items()}
    return _WORDING.say(key, form, more=_WORDING.say("more"), **written)


def is_above(ratio: Comparison, limit: float) -> str:
    """Returns HELD if the interval lies above ``limit``, DID_NOT_HOLD if below, else or for one launch UNDECIDED."""
    if ratio.n == 1 or ratio.low is None:
        return UNDECIDED
    if ratio.low > limit:
        return HELD
    return DID_NOT_HOLD if ratio.high < limit else UNDECIDED


def is_below(ratio: Comparison, limit: float) -> str:
    """Returns HELD if the interval lies below ``limit``, DID_NOT_HOLD if above, else UNDECIDED."""
    return {HELD: DID_NOT_HOLD, DID_NOT_HOLD: HELD, UNDECIDED: UNDECIDED}[is_above(ratio, limit)]


def held_if(condition: bool) -> str:
    return HELD if condition else DID_NOT_HOLD


def all_of(parts: Sequence[str]) -> str:
    """Returns DID_NOT_HOLD if one part did not, UNDECIDED while one is open, else HELD."""
    return next((word for word in (DID_NOT_HOLD, UNDECIDED) if word in parts), HELD)


def any_of(parts: Sequence[str]) -> str:
    """Returns HELD if one part did, UNDECIDED while one is open, else DID_NOT_HOLD."""
    return next((word for word in (HELD, UNDECIDED) if word in parts), DID_NOT_HOLD)


def too_wide(ratio: Comparison, limit: str) -> str:
    """The reason why an interval decides nothing."""
    if ratio.n == 1 or ratio.low is None:
        return say("one_launch")
    return say("straddles", ratio=ratio, limit=limit)


def verdict(parts: Sequence[str], evidence: str, reason: str = "", depends: str = "") -> ClaimVerdict:
    """The verdict on a claim of several parts: undecided for ``reason`` while one is; ``depends``: how they differ."""
    if UNDECIDED in parts:
        return ClaimVerdict(UNDECIDED, evidence, reason)
    return ClaimVerdict(parts[0], evidence) if len(set(parts)) == 1 else ClaimVerdict(DEPENDS, evidence, depends)


def by_counts(parts: Mapping[str, bool], evidence: str, depends: str) -> ClaimVerdict:
    """Holds if all parts do, does not hold if none does; else the sentence ``depends`` names those that do."""
    names = listing([name for name, is_so in parts.items() if is_so])
    return verdict([held_if(is_so) for is_so in parts.values()], evidence, depends=say(depends, names=names))


# --- memory, counted exactly, and what it brings ---


def reservation(measured: WorkloadFacts) -> ClaimVerdict:
    """Holds if contiguous wastes at least 90 % of what it reserved, and pages at most 4 %."""
    slots = {layout: measured.slots(layout=layout) for layout in ("contiguous", "paged")}
    wasted = {layout: held["waste"] / (held["waste"] + held["tokens"]) for layout, held in slots.items()}
    length = measured.capacity_of().max_model_len
    chats = {
        "reserved_chats": measured.tokens_held() // length,
        "paged_chats": measured.tokens_held(layout="paged") // 300,
    }
    evidence = say("reservation", end=1 - 300 / 4096, **wasted, **chats)
    return ClaimVerdict(held_if(wasted["contiguous"] >= 0.9 and wasted["paged"] <= 0.04), evidence)


_RESERVATIONS: dict[str, dict[str, str]] = {
    "max": {},
    "pow2": {"reservation": "pow2"},
    "oracle": {"reservation": "oracle"},
    "pages": {"layout": "paged"},
}


def useful_memory(measured: WorkloadFacts) -> ClaimVerdict:
    """Holds if pages use at least 90 % of their slots and every kind of reservation at most 45 %.

    Depends if only some kinds of reservation do.

    Counted are slots that are reserved, or free in holes too small to reserve. Other free slots are left out.
    """
    useful = {}
    for kind, settings in _RESERVATIONS.items():
        slots = measured.slots(**settings)
        useful[kind] = slots["tokens"] / (slots["tokens"] + slots["waste"] + slots["fragmented"])
    evidence = say("useful_memory", **useful)
    if useful.pop("pages") < 0.9:
        return ClaimVerdict(DID_NOT_HOLD, evidence)
    wasteful = {kind: share <= 0.45 for kind, share in useful.items()}
    return by_counts(wasteful, evidence, "some_useful")


_PUBLISHED = {"max": 30.42 / 7.00, "pow2": 30.42 / 9.81, "oracle": 30.42 / 13.62}


def batched_at_once(measured: WorkloadFacts) -> ClaimVerdict:
    """Holds if pages over each reservation reach 0.8 of the published ratio, depends if over some, else does not."""
    batched = {kind: measured.batched(**settings) for kind, settings in _RESERVATIONS.items()}
    evidence = say("batched_at_once", **batched)
    reached = {kind: batched["pages"] / batched[kind] >= 0.8 * ratio for kind, ratio in _PUBLISHED.items()}
    return by_counts(reached, evidence, "some_batched")


def windows(measured: WorkloadFacts) -> ClaimVerdict:
    """Holds if at least 3 times as many sequences decode at once where pages that left a window are freed."""
    freed, kept = measured.batched(), measured.batched(free_outside_window=False)
    held = [measured.capacity_of(**kind).max_concurrency_at_max_len for kind in ({}, {"free_outside_window": False})]
    evidence = say("windows", freed=freed, kept=kept, times=freed / kept, most=held[0], before=held[1])
    return ClaimVerdict(held_if(freed >= 3 * kept), evidence)


def latent_kv(measured: WorkloadFacts) -> ClaimVerdict:
    """Holds if at least 8 times as many sequences decode at once where latent rows are kept."""
    latent, unfolded = measured.batched(), measured.batched(latent_kv=False)
    held = [measured.capacity_of(**kind).max_concurrency_at_max_len for kind in ({}, {"latent_kv": False})]
    times = latent / unfolded
    evidence = say("latent_kv", latent=latent, unfolded=unfolded, times=times, most=held[0], before=held[1])
    return ClaimVerdict(held_if(latent >= 8 * unfolded), evidence)


def sustainable_rate(measured: WorkloadFacts) -> ClaimVerdict:
    """Holds if pages surely give 1.7 times the throughput of exact reservations and 2.7 times that of the longest ones.

    The throughput of a burst stands for the highest rate: requests wait for most of it, but not at its end.
    """
    exact, longest = (measured.ratio({"layout": "paged"}, _RESERVATIONS[kind]) for kind in ("oracle", "max"))
    evidence = say("sustainable_rate", exact=exact, longest=longest)
    parts = is_above(exact, 1.7), is_above(longest, 2.7)
    reason = too_wide(exact, "1.7x") if parts[0] == UNDECIDED else too_wide(longest, "2.7x")
    return verdict(parts, evidence, reason, say("on_reservation"))


def mixed_lengths(measured: WorkloadFacts) -> ClaimVerdict:
    """Holds if the throughput is surely twice or more, does not hold if surely less than twice."""
    gain, before, after = measured.speed(layout="paged"), measured.steps(), measured.steps(layout="paged")
    evidence = say("mixed_lengths", gain=gain, before=before, after=after)
    return verdict([is_above(gain, 2.0)], evidence, too_wide(gain, "2.0x"))


def brings_little(measured: WorkloadFacts) -> ClaimVerdict:
    """Holds if the throughput surely rises by less than 5 %, does not hold if surely by more."""
    gain, preempted = measured.speed(layout="paged"), measured.counters(layout="paged")["num_preemptions_total"]
    evidence = say(
        "brings_little",
        gain=gain,
        costs=say("costs_here", is_below(gain, 1 - LITTLE) == HELD),
        reserved=measured.steps()[1],
        paged=measured.steps(layout="paged")[1],
        preemptions=plural(round(preempted), "preemption"),
    )
    return verdict([is_below(gain, 1 + LITTLE)], evidence, too_wide(gain, "+5 %"))


# --- pages ---


def page_16(measured: WorkloadFacts) -> ClaimVerdict:
    """Holds if 16 is surely faster than every other size. Not if another is surely over 2 % faster; else it depends.

    Surely is each by itself: of eight intervals one is off more often than of one.
    """
    sizes = sorted(configuration.varied["page_size"] for configuration in measured.design.configurations[1:])
    speeds = {size: measured.speed(page_size=size) for size in sizes}
    by_size = ", ".join(say("page_16_size", size=size, speed=speed) for size, speed in speeds.items())
    evidence = say("page_16", speeds=by_size)
    faster = {size: is_above(speed, 1 + MARGINS[ENGINE]) for size, speed in speeds.items()}
    if HELD in faster.values():
        return ClaimVerdict(DID_NOT_HOLD, evidence)
    if wide := [str(size) for size, word in faster.items() if word == UNDECIDED]:
        return ClaimVerdict(UNDECIDED, evidence, say("maybe_faster", sizes=listing(wide)))
    level = [str(size) for size, speed in speeds.items() if is_below(speed, 1.0) != HELD]
    if not level:
        return ClaimVerdict(HELD, evidence)
    return ClaimVerdict(DEPENDS, evidence, say("not_slower", sizes=listing(level)))


def small_pages(measured: WorkloadFacts) -> ClaimVerdict:
    """Holds if at 4 or 8 the table takes 1 % of the budget and speed surely drops 2 %.

    Depends if only one of both is so. The table's size is arithmetic.
    """
    tables, speeds = {}, {}
    for size in (1, 4, 8):
        capacity = measured.capacity_of(page_size=size)
        tables[size] = capacity.page_table_bytes / capacity.kv_budget_bytes
        speeds[size] = measured.speed(page_size=size)
    evidence = "; ".join(
        say("small_pages", size=size, share=share, speed=speeds[size]) for size, share in tables.items()
    )
    time = any_of([is_below(speeds[size], 1 - MARGINS[ENGINE]) for size in (4, 8)])
    memory = held_if(any(tables[size] >= 0.01 for size in (4, 8)))
    depends = say("only_wasted", memory == HELD)
    return verdict((memory, time), evidence, say("holds", limit="-2 %"), depends)


def sharing(low: float, high: float, *by_width: WorkloadFacts) -> ClaimVerdict:
    """Holds if 2, 4 and 6 answers all save 0.8 times the published least to 1.25 times the most."""
    saved = [measured.shared() for measured in by_width]
    shares = ", ".join(say("share", share=share) for share in saved)
    evidence = say("sharing", shares=shares, low=low, high=high)
    return ClaimVerdict(held_if(all(0.8 * low / 100 <= share <= 1.25 * high / 100 for share in saved)), evidence)


_COST_WORDS = {(DID_NOT_HOLD, DID_NOT_HOLD): "less", (HELD, DID_NOT_HOLD): "as said", (HELD, HELD): "more"}


def paging_cost(cost: KernelCost) -> ClaimVerdict:
    """Holds if the decode kernel surely takes 3 to 5 % longer on pages, in order and scattered.

    Depends if it is so, or less, or more for one of both only. The planning once a step, for all layers, is left out.
    An undecided kernel is timed again, up to 5 timings in all. Each look takes 99 % intervals, so that the looks at one
    ratio together err in at most 5 % (Bonferroni).
    """
    costs = {}
    for place in (IN_ORDER, SCATTERED):
        ratio = effect_of_values(cost.seconds[RESERVED], cost.seconds[place])
        costs[place] = with_confidence(ratio, EARLY_CONFIDENCE)
    sizes = {name: getattr(cost, name) for name in ("batch", "context", "page_size")}
    evidence = say("paging_cost", in_order=costs[IN_ORDER], scattered=costs[SCATTERED], **sizes)
    least, most = 1.03, 1.05
    sides = {}
    for place, ratio in costs.items():
        over_least, over_most = is_above(ratio, least), is_above(ratio, most)
        if UNDECIDED in (over_least, over_most):
            reason = say("timings_straddle", ratio=ratio, timings=cost.timings, most=MOST_TIMINGS)
            return ClaimVerdict(UNDECIDED, evidence, reason)
        sides[place] = _COST_WORDS[over_least, over_most]
    if len(set(sides.values())) == 1:
        return ClaimVerdict(held_if(sides[IN_ORDER] == "as said"), evidence)
    where = ", ".join(say("paging_side", side=side, place=place) for place, side in sides.items())
    return ClaimVerdict(DEPENDS, evidence, say("lie", where=where))


# --- prefixes ---


def prefix_unshared(measured: WorkloadFacts) -> ClaimVerdict:
    """Holds if prefix caching surely makes prompts that share nothing over 2 % slower, does not hold if surely not."""
    speed = measured.speed(enable_prefix_caching=True)
    evidence = say("prefix_unshared", speed=speed)
    return verdict([is_below(speed, 1 - MARGINS[ENGINE])], evidence, too_wide(speed, "-2 %"))


_CACHING = {"layout": "paged", "enable_prefix_caching": True}


def prefix_shared(one_shot: WorkloadFacts, five_shot: WorkloadFacts) -> ClaimVerdict:
    """Holds if both prefixes surely give at least 0.8 times the published throughput, depends if one does."""
    sides, parts, wide = [], [], ""
    for kind, measured, published in (("one-shot", one_shot, 1.67), ("five-shot", five_shot, 3.58)):
        gain, least = measured.ratio(_CACHING), 0.8 * published  # against exact reservations
        sides.append(is_above(gain, least))
        if sides[-1] == UNDECIDED:
            wide = too_wide(gain, f"{least:.2f}x")
        alone = measured.ratio(_CACHING, {"layout": "paged"})
        parts.append(say("prefix_kind", kind=kind, exact=gain, alone=alone))
    evidence = say("prefix_shared", tokens=five_shot.tokens_held(), kinds="; ".join(parts))
    return verdict(sides, evidence, wide, say("on_length"))


def shared_tokens(one_shot: WorkloadFacts, five_shot: WorkloadFacts, unshared: WorkloadFacts) -> ClaimVerdict:
    """Depends on the load, unless 40 to 60 % are shared behind a short, a long and no common prefix."""
    shared = {
        "behind a prefix of half of each request": one_shot.shared(**_CACHING),
        "behind one of four fifths": five_shot.shared(**_CACHING),
        "without a common prefix": unshared.shared(enable_prefix_caching=True),
    }
    loads = ", ".join(say("shared_load", share=share, load=load) for load, share in shared.items())
    evidence = say("shared_tokens", loads=loads)
    so_much = {load: 0.4 <= share <= 0.6 for load, share in shared.items()}
    return by_counts(so_much, evidence, "some_shared")


# --- KV formats, preemption, limits of a step ---

_QUANTISED = {"FP8": "fp8_e4m3", "INT8": "int8_per_token_head", "INT4": "int4_per_token_head"}


def quantised_kv(measured: WorkloadFacts) -> ClaimVerdict:
    """Holds if FP8, INT8 and INT4 are surely faster where memory is scarce, in pages of 16 and of 4."""
    sides, parts = [], []
    for name, dtype in _QUANTISED.items():
        speeds = [measured.ratio({"kv_cache_dtype": dtype, "page_size": size}, {"page_size": size}) for size in (16, 4)]
        more = measured.tokens_held(kv_cache_dtype=dtype) / measured.tokens_held()
        sides += [is_above(speed, 1.0) for speed in speeds]
        parts.append(say("quantised_format", name=name, times=more, large=speeds[0], small=speeds[1]))
    tokens, formats = measured.tokens_held(), "; ".join(parts)
    evidence = say("quantised_kv", dtype=measured.capacity_of().dtype, tokens=tokens, formats=formats)
    return verdict(sides, evidence, say("holds", limit="0"), say("on_format"))


def scales_and_pages(measured: WorkloadFacts) -> ClaimVerdict:
    """Holds if scales take a larger share of a token's bytes with fewer bits and with smaller pages.

    Fewer bits: INT4 against INT8. Smaller pages: 4 tokens against 16. Depends if only one of both is so.
    """

    def share(name: str, page_size: int) -> float:
        capacity = measured.capacity_of(kv_cache_dtype=_QUANTISED[name], page_size=page_size)
        return capacity.scale_bytes_per_token / capacity.bytes_per_token

    shares = {name: [share(name, size) for size in (16, 4)] for name in _QUANTISED}
    parts = [say("scales_format", name=name, large=large, small=small) for name, (large, small) in shares.items()]
    evidence = say("scales_and_pages", formats="; ".join(parts))
    grows = {
        "fewer bits": shares["INT4"][0] > shares["INT8"][0],
        "smaller pages": shares["INT4"][1] > shares["INT4"][0],
    }
    return by_counts(grows, evidence, "some_scales")


def swap_by_page(measured: WorkloadFacts) -> ClaimVerdict:
    """Holds if the pages moved to the host have at most 90 % of the slots of their whole sequences.

    Pages are moved whole. Whole sequences were not moved, their tokens were counted when they were swapped out.
    """
    counted, speed = measured.counters(), measured.speed(preemption_mode="recompute")
    pages, preemptions = counted["swapped_out_pages_total"], counted["num_preemptions_total"]
    whole = counted["swapped_out_slots_total"] + counted["swap_kept_slots_total"]
    if not preemptions:
        return ClaimVerdict(UNDECIDED, "", say("never_out"))
    moved = pages * measured.find().settings["page_size"]
    evidence = say(
        "swap_by_page",
        preemptions=plural(round(preemptions), "preemption"),
        pages=plural(round(pages), "page"),
        moved=moved,
        whole=whole,
        speed=speed,
    )
    return ClaimVerdict(held_if(moved <= 0.9 * whole), evidence)


def watermark(measured: WorkloadFacts) -> ClaimVerdict:
    """Holds if every share surely changes tokens/s and p95 ITL by less than 2 %. Not if one surely does by more.

    Against nothing left free.
    """

    def preemptions(share: float) -> str:
        return plural(round(measured.counters(watermark=share)["num_preemptions_total"]), "preemption")

    shares = [configuration.varied["watermark"] for configuration in measured.design.configurations[1:]]
    speeds = {share: measured.speed(watermark=share) for share in shares}
    p95s = {share: measured.p95("itl", watermark=share) for share in shares}
    rows = [
        say("watermark_share", share=100 * share, preemptions=preemptions(share), speed=speeds[share], itl=p95s[share])
        for share in shares
    ]
    evidence = say("watermark", none=preemptions(0.0), shares="; ".join(rows))
    margin, ratios = MARGINS[ENGINE], [*speeds.values(), *p95s.values()]
    bounds = [is_above(ratio, 1 - margin) for ratio in ratios] + [is_below(ratio, 1 + margin) for ratio in ratios]
    return verdict([all_of(bounds)], evidence, say("holds", limit="2 %"))


def max_num_seqs(measured: WorkloadFacts) -> ClaimVerdict:
    """Holds if the low value surely is over 2 % slower, and the high one preempts and worsens a p95.

    Surely by over 2 %, of TTFT or ITL.
    """
    setting = "max_num_seqs"
    preempted = measured.counters(max_num_seqs=_ends(measured, setting)[1])["num_preemptions_total"]
    counted = say("batch_limit_preemptions", preemptions=plural(round(preempted), "preemption"))
    return _batch_limit(measured, setting, ("ttft", "itl"), counted, harmless=not preempted)


def max_num_batched_tokens(measured: WorkloadFacts) -> ClaimVerdict:
    """Holds if the low value's speed and the high one's p95 ITL surely are over 2 % worse."""
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
    speed = {"slow": speeds[low], "fast": speeds[high]}
    evidence = say("batch_limit", low=low, high=high, preemptions=counted, **speed, **p95s)
    too_low = is_below(speeds[low], 1 - MARGINS[ENGINE])
    worse = any_of([is_above(p95s[metric], 1 + MARGINS[ENGINE]) for metric in metrics])
    too_high = DID_NOT_HOLD if harmless else worse
    reason = say("holds_of", value=low if too_low == UNDECIDED else high)
    depends = say("only_side", too_low == HELD)
    return verdict((too_low, too_high), evidence, reason, depends)


# --- kinds of prompts ---


def long_contexts(alone: WorkloadFacts, beside: WorkloadFacts) -> ClaimVerdict:
    """Holds if beside long contexts the chats' median and p95 TPOT surely are 1.5 times. Depends if one is.

    At the larger token budget. Both loads are measured one after the other, so the launches are not pairs (Welch's
    interval of log TPOT).
    """
    large, small = (configuration.settings["max_num_batched_tokens"] for configuration in beside.design.configurations)

    def ratio(quantile: float, tokens: int) -> Comparison:
        base, other = (chats.tpots("chat", quantile, max_num_batched_tokens=tokens) for chats in (alone, beside))
        return independent(f"p{100 * quantile:.0f}_tpot_ms", ENGINE, other, base)

    median, p95 = ratio(0.5, large), ratio(0.95, large)
    evidence = say(
        "long_contexts",
        median=median,
        p95=p95,
        large=large,
        small=small,
        median_small=ratio(0.5, small),
        p95_small=ratio(0.95, small),
    )
    parts = is_above(median, 1.5), is_above(p95, 1.5)
    reason = too_wide(median if parts[0] == UNDECIDED else p95, "1.5x")
    return verdict(parts, evidence, reason, say("on_whom"))


def kinds_of_prompts(
    easy: WorkloadFacts, average: WorkloadFacts, long: WorkloadFacts, production: WorkloadFacts
) -> ClaimVerdict:
    """Holds if each kind of prompts surely gains by pages within 10 % of what the average ones gain.

    The kinds are measured by themselves, so the errors of two gains add up in quadrature.
    """
    kinds = {"easy": easy, "average": average, "long": long, "production": production}
    gains = {kind: measured.speed(layout="paged") for kind, measured in kinds.items()}
    by_kind = ", ".join(say("kind_gain", kind=kind, gain=gain) for kind, gain in gains.items())
    evidence = say("kinds_of_prompts", gains=by_kind)
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
    return verdict([word], evidence, say("holds", limit="a difference of 10 %"))


# --- a server ---


def abandoned(facts: ServedFacts) -> ClaimVerdict:
    """Holds if a page is still owned 2 s after the clients left, or a request for all memory fails."""
    parts = []
    for name, left in facts.abandoned.items():
        ms = 1000 * (left.freed_after_s or 0.0)
        parts.append(
            say(
                "abandoned",
                name=name,
                streams=plural(left.streams, "stream"),
                pages=left.owned_before,
                after=say("abandoned_after", left.freed_after_s is not None, ms=ms),
                served=say("abandoned_served", left.next_served),
            )
        )
    kept = any(left.freed_after_s is None or not left.next_served for left in facts.abandoned.values())
    return ClaimVerdict(held_if(kept), "; ".join(parts))


def malformed(facts: ServedFacts) -> ClaimVerdict:
    """Holds if a good request failed or got other tokens, or a malformed one was not refused with its reason."""
    sent = facts.malformed
    evidence = say(
        "malformed", beside=1000 * sent.seconds_beside, alone=1000 * sent.seconds_alone, **dataclasses.asdict(sent)
    )
    return ClaimVerdict(held_if(sent.refused < sent.sent or sent.same_tokens < sent.good), evidence)
