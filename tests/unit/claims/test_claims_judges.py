"""Whether a claim held: each rule on both sides of its limit, and where an interval straddles it."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest

from kvbench.claims.catalogue import CLAIMS
from kvbench.claims.judges import DEPENDS, DID_NOT_HOLD, HELD, UNDECIDED
from kvbench.claims.kernel_cost import IN_ORDER, RESERVED, SCATTERED, KernelCost
from kvbench.claims.served import Abandoned, Malformed, ServedFacts
from kvbench.effects.comparison import Call, Comparison
from kvbench.metrics.definitions import ENGINE, THROUGHPUT
from kvbench.runs.results import Capacity

SIZES = (1, 2, 4, 8, 32, 64)  # beside 16
JUDGES = {claim.name: claim.verdict for claim in CLAIMS.values()}
KINDS = ("easy", "average", "long", "production")


def effect(low: float | None, high: float | None) -> Comparison:
    ratio = math.sqrt(low * high) if low and high else 2.0
    return Comparison(THROUGHPUT, ENGINE, ratio, low, high, 3, Call.UNDECIDED, smallest=0.01)


class Known:
    """``WorkloadFacts`` with given answers. ``speeds``: by the values of the settings that differ from the baseline."""

    def __init__(self, speeds=None, p95=None, tpots=None, counters=None, slots=None, varied=None, ratios=None):
        self.launches, self._slots = 3, slots or {}
        self._speeds, self._p95, self._tpots = speeds or {}, p95 or {}, tpots or {}
        self._counters, self._ratios = counters or {}, ratios
        capacity = Capacity(
            page_table_bytes=50, kv_budget_bytes=10_000, max_model_len=4096, bytes_per_token=2304,
            scale_bytes_per_token=256, capacity_tokens=8192, dtype="float32",
        )  # fmt: skip
        self.capacity = {"contiguous": capacity, "other": capacity}
        changed = varied or [{}, *({"page_size": size} for size in SIZES)]
        self.design = SimpleNamespace(configurations=[SimpleNamespace(varied=x, settings=x) for x in changed])

    def find(self, **settings):
        return SimpleNamespace(config_id="other", settings={"page_size": 16})

    def capacity_of(self, **settings):
        return self.capacity[self.find(**settings).config_id]

    def speed(self, **to):
        return self._speeds[next(iter(to.values()))]

    def p95(self, metric, **to):
        return self._p95[metric]

    def tpots(self, cls, quantile, **settings):
        return self._tpots[quantile]

    def ratio(self, to, of=None):
        return self._ratios(to, of or {})

    def shared(self, **settings):
        return self._counters["shared"]

    def batched(self, **settings):
        return self._counters[next(iter(settings.values()), "max")]

    def counters(self, **settings):
        return {"num_preemptions_total": 0.0, **self._counters}

    def slots(self, **settings):
        return self._slots[next(iter(settings.values()), "max")]

    def steps(self, **settings):
        return 87, 19.3, 60.0

    def tokens_held(self, **settings):
        return 8192


@pytest.mark.parametrize(
    ("name", "setting", "low", "high", "word"),
    [
        *(("mixed-lengths", "paged", *row) for row in (  # twice the throughput
            (2.1, 2.9, HELD), (1.6, 1.9, DID_NOT_HOLD), (1.9, 2.1, UNDECIDED), (None, None, UNDECIDED),
        )),
        *((name, "paged", *row) for name in ("uniform-lengths", "single-user") for row in (  # a gain of at most 5 %
            (0.97, 1.03, HELD), (0.88, 0.94, HELD), (1.06, 1.1, DID_NOT_HOLD), (0.98, 1.06, UNDECIDED),
        )),
        *(("prefix-unshared", True, *row) for row in (
            (0.9, 0.97, HELD), (0.985, 0.995, DID_NOT_HOLD), (1.1, 1.2, DID_NOT_HOLD), (0.97, 1.01, UNDECIDED),
        )),
    ],
)  # fmt: skip
def test_claims_of_one_ratio(name, setting, low, high, word):
    verdict = JUDGES[name]({name: Known({setting: effect(low, high)})})
    assert verdict.word == word
    assert ("cost" in verdict.evidence) == (name in ("uniform-lengths", "single-user") and high < 0.95)


def test_one_launch_decides_nothing():
    one = dataclasses.replace(effect(2.5, 2.9), n=1)
    verdict = JUDGES["mixed-lengths"]({"mixed-lengths": Known({"paged": one})})
    assert verdict.word == UNDECIDED and "one launch" in verdict.reason
    kinds = {f"prompts-{kind}": Known({"paged": one}) for kind in KINDS}
    assert JUDGES["kinds-of-prompts"](kinds).word == UNDECIDED


@pytest.mark.parametrize(
    ("in_order", "scattered", "word"),
    [
        ([1.04, 1.041, 1.04], [1.04, 1.041, 1.039], HELD),
        ([1.0, 1.001, 0.999], [1.001, 1.0, 1.002], DID_NOT_HOLD),
        ([1.2, 1.21, 1.22], [1.2, 1.21, 1.22], DID_NOT_HOLD),
        ([1.0, 1.001, 0.999], [1.2, 1.3, 1.25], DEPENDS),
        ([1.04, 1.041, 1.04], [1.2, 1.3, 1.25], DEPENDS),
        ([1.0, 1.001, 0.999], [1.0, 1.06, 1.12], UNDECIDED),
    ],
)
def test_paging_costs_3_percent_or_not(in_order, scattered, word):
    seconds = {RESERVED: [2.0, 2.0, 2.0], IN_ORDER: [2 * x for x in in_order], SCATTERED: [2 * x for x in scattered]}
    facts = KernelCost("cpu", "numba", 32, 1024, 16, seconds)
    assert JUDGES["paging-cost"]({"paging-cost": facts}).word == word


@pytest.mark.parametrize(
    ("one", "five", "word"),
    [
        ((1.5, 1.8), (3.0, 3.5), HELD),
        ((1.5, 1.8), (2.0, 2.5), DEPENDS),
        ((1.1, 1.2), (2.0, 2.5), DID_NOT_HOLD),
        ((1.2, 1.5), (2.0, 2.5), UNDECIDED),
        ((1.1, 1.2), (2.5, 3.5), UNDECIDED),
    ],
)
def test_a_shared_prefix_against_exact_reservations(one, five, word):
    found = {
        f"prefix-{kind}": Known(ratios=lambda to, of, gain=gain: effect(1.0, 1.1) if of else effect(*gain))
        for kind, gain in (("one-shot", one), ("five-shot", five))
    }
    assert JUDGES["prefix-shared"](found).word == word


@pytest.mark.parametrize(
    ("name", "counted", "word"),
    [
        ("shared-tokens", (0.45, 0.58, 0.4), HELD),
        ("shared-tokens", (0.45, 0.7, 0.0), DEPENDS),
        ("shared-tokens", (0.3, 0.7, 0.0), DID_NOT_HOLD),
        ("batched-at-once", (7, 9.8, 13.6, 30.4), HELD),
        ("batched-at-once", (7, 15, 14, 30), DEPENDS),
        ("batched-at-once", (15, 15, 20, 30), DID_NOT_HOLD),
    ],
)
def test_claims_of_what_a_batch_holds(name, counted, word):
    if name == "shared-tokens":
        kinds = ("prefix-one-shot", "prefix-five-shot", "prefix-unshared")
        known = {kind: Known(counters={"shared": share}) for kind, share in zip(kinds, counted, strict=True)}
    else:
        counters = dict(zip(("max", "pow2", "oracle", "paged"), counted, strict=True))
        known = {"useful-memory": Known(counters=counters)}
    assert JUDGES[name](known).word == word


@pytest.mark.parametrize(
    ("oracle", "longest", "word"),
    [
        ((1.8, 2.5), (3.0, 4.0), HELD),
        ((1.0, 1.2), (3.0, 4.0), DEPENDS),
        ((1.0, 1.2), (1.4, 1.5), DID_NOT_HOLD),
        ((1.6, 1.8), (1.4, 1.5), UNDECIDED),
        ((1.0, 1.2), (2.5, 3.0), UNDECIDED),
    ],
)
def test_what_rate_pages_sustain(oracle, longest, word):
    known = Known(ratios=lambda to, of: effect(*(oracle if of else longest)))
    assert JUDGES["sustainable-rate"]({"useful-memory": known}).word == word


LEVEL = dict.fromkeys(SIZES, effect(0.995, 1.004))


def page_sizes(**speeds):
    return {"page-size": Known(LEVEL | {int(size[1:]): effect(*each) for size, each in speeds.items()})}


def test_16_is_best_if_the_others_are_slower_and_ties_are_named():
    slower = {f"_{size}": (0.9, 0.99) for size in SIZES}
    assert JUDGES["page-16"](page_sizes(**slower)).word == HELD
    assert JUDGES["page-16"](page_sizes(**slower | {"_64": (1.03, 1.05)})).word == DID_NOT_HOLD
    tie = JUDGES["page-16"](page_sizes(**slower | {"_8": (0.995, 1.01)}))
    assert tie.word == DEPENDS and "pages of 8 " in tie.reason
    undecided = JUDGES["page-16"](page_sizes(**slower | {"_64": (0.98, 1.05)}))
    assert undecided.word == UNDECIDED and "64" in undecided.reason


def test_small_pages_are_wasteful_by_their_table_or_their_speed():
    assert JUDGES["small-pages"](page_sizes()).word == DID_NOT_HOLD
    assert JUDGES["small-pages"](page_sizes(_4=(0.9, 0.95))).word == DEPENDS
    assert JUDGES["small-pages"](page_sizes(_8=(0.97, 1.01))).word == UNDECIDED
    for speeds, word in (({}, DEPENDS), ({"_8": (0.9, 0.95)}, HELD), ({"_8": (0.97, 1.01)}, UNDECIDED)):
        large_table = page_sizes(**speeds)
        large_table["page-size"].capacity["other"] = Capacity(page_table_bytes=120, kv_budget_bytes=10_000)
        assert JUDGES["small-pages"](large_table).word == word


@pytest.mark.parametrize(
    ("int8", "int4_in_small_pages", "others", "word"),
    [
        ((1.1, 1.2), (1.1, 1.2), (1.1, 1.2), HELD),
        ((0.8, 0.9), (1.1, 1.2), (1.1, 1.2), DEPENDS),
        ((1.1, 1.2), (0.8, 0.9), (1.1, 1.2), DEPENDS),
        ((0.8, 0.9), (0.8, 0.9), (0.8, 0.9), DID_NOT_HOLD),
        ((0.9, 1.1), (1.1, 1.2), (1.1, 1.2), UNDECIDED),
        ((1.1, 1.2), (0.9, 1.1), (1.1, 1.2), UNDECIDED),
    ],
)
def test_quantised_kv_is_faster(int8, int4_in_small_pages, others, word):
    def ratios(to, of):
        assert to["page_size"] == of["page_size"]  # each against the plain KV in pages of the same size
        small = to["page_size"] == 4 and to["kv_cache_dtype"].startswith("int4")
        return effect(*(int4_in_small_pages if small else int8 if to["kv_cache_dtype"].startswith("int8") else others))

    assert JUDGES["quantised-kv"]({"quantised-kv": Known(ratios=ratios)}).word == word


@pytest.mark.parametrize(
    ("int8", "int4", "int4_in_small_pages", "word"),
    [(5, 10, 20, HELD), (5, 10, 10, DEPENDS), (10, 10, 20, DEPENDS), (10, 10, 10, DID_NOT_HOLD)],
)
def test_scales_weigh_more_where_data_shrinks(int8, int4, int4_in_small_pages, word):
    shares = {
        (name, size): share for name, share in (("fp8_e4m3", 0), ("int8_per_token_head", int8)) for size in (4, 16)
    }
    shares |= {("int4_per_token_head", 16): int4, ("int4_per_token_head", 4): int4_in_small_pages}
    known = Known()
    known.find = lambda **settings: SimpleNamespace(config_id=tuple(settings.values()))
    known.capacity = {k: Capacity(scale_bytes_per_token=share, bytes_per_token=100) for k, share in shares.items()}
    assert JUDGES["scales-and-pages"]({"quantised-kv": known}).word == word


def test_swap_by_page_moves_less_than_whole_sequences():
    def verdict(pages, moved, kept, preemptions=9.0):
        counters = {
            "swapped_out_pages_total": pages,
            "swapped_out_slots_total": moved,
            "swap_kept_slots_total": kept,
            "num_preemptions_total": preemptions,
        }
        return JUDGES["swap-by-page"]({"swap": Known({"recompute": effect(0.9, 0.95)}, counters=counters)}).word

    assert verdict(5.0, 80.0, 20.0) == HELD  # 80 slots of 100
    assert verdict(6.0, 80.0, 20.0) == DID_NOT_HOLD  # 96: pages are moved whole
    assert verdict(0.0, 0.0, 0.0, preemptions=0.0) == UNDECIDED


@pytest.mark.parametrize(
    ("low", "itl", "word"),
    [
        ((0.6, 0.7), (1.2, 1.5), HELD),
        ((0.6, 0.7), (0.9, 1.01), DEPENDS),
        ((0.99, 1.01), (1.2, 1.5), DEPENDS),
        ((0.99, 1.01), (0.9, 0.95), DID_NOT_HOLD),
        ((0.6, 0.7), (0.9, 1.3), UNDECIDED),
        ((0.95, 1.01), (1.2, 1.5), UNDECIDED),
    ],
)
@pytest.mark.parametrize("name", ["max-num-seqs", "max-num-batched-tokens"])
def test_a_batch_limit_has_two_sides(name, low, itl, word):
    limits = [{name.replace("-", "_"): value} for value in (16, 4, 64)]
    p95 = {"ttft": effect(0.8, 0.9), "itl": effect(*itl)}
    known = Known(
        {4: effect(*low), 64: effect(0.99, 1.01)}, p95, counters={"num_preemptions_total": 3.0}, varied=limits
    )
    assert JUDGES[name]({name: known}).word == word


def test_too_many_sequences_do_harm_only_if_they_preempt_and_too_many_tokens_only_to_running_streams():
    late = {"ttft": effect(1.2, 1.5), "itl": effect(0.9, 1.01)}
    for name, preempted, word in (
        ("max-num-seqs", 0.0, DEPENDS),
        ("max-num-seqs", 3.0, HELD),
        ("max-num-batched-tokens", 3.0, DEPENDS),
    ):
        limits = [{name.replace("-", "_"): value} for value in (16, 4, 64)]
        speeds = {4: effect(0.6, 0.7), 64: effect(0.99, 1.01)}
        known = Known(speeds, late, counters={"num_preemptions_total": preempted}, varied=limits)
        assert JUDGES[name]({name: known}).word == word


def test_long_contexts_slow_the_chats_beside_them():
    budgets = [{"max_num_batched_tokens": value} for value in (1024, 128)]
    much, little, unknown = [30.0, 31.0, 29.5], [10.3, 10.2, 10.1], [9.0, 16.0, 25.0]
    alone = Known(tpots={0.5: [10.0, 10.1, 9.9], 0.95: [10.0, 10.1, 9.9]})
    for median, p95, word in (
        (much, much, HELD),
        (little, little, DID_NOT_HOLD),
        (little, much, DEPENDS),
        (little, unknown, UNDECIDED),
        (unknown, much, UNDECIDED),
    ):
        beside = Known(tpots={0.5: median, 0.95: p95}, varied=budgets)
        assert JUDGES["long-contexts"]({"long-contexts": beside, "long-contexts-none": alone}).word == word


def test_average_prompts_stand_for_others_if_all_gain_alike():
    def verdict(easy):
        kinds = dict.fromkeys(KINDS, (1.5, 1.52)) | {"easy": easy}
        found = {f"prompts-{kind}": Known({"paged": effect(*each)}) for kind, each in kinds.items()}
        return JUDGES["kinds-of-prompts"](found).word

    assert verdict((1.49, 1.53)) == HELD
    assert verdict((2.0, 2.1)) == DID_NOT_HOLD
    assert verdict((1.55, 1.7)) == UNDECIDED


def test_sharing_is_within_reach_of_what_was_published():
    def verdict(*saved):
        pairs = zip((2, 4, 6), saved, strict=True)
        found = {f"sharing-beam-{width}": Known(counters={"shared": share}) for width, share in pairs}
        return JUDGES["sharing-beam"](found)

    held = verdict(0.37, 0.5, 0.6)
    assert held.word == HELD
    assert "37.0%, 50.0%, 60.0%" in held.evidence
    assert verdict(0.29, 0.5, 0.6).word == DID_NOT_HOLD
    assert verdict(0.37, 0.5, 0.7).word == DID_NOT_HOLD


def test_memory_claims_are_judged_by_exact_counts():
    slots = {"contiguous": {"tokens": 7.0, "waste": 93.0}, "paged": {"tokens": 97.0, "waste": 3.0}}
    assert JUDGES["reservation"]({"reservation": Known(slots=slots)}).word == HELD
    slots["paged"] = {"tokens": 90.0, "waste": 10.0}
    assert JUDGES["reservation"]({"reservation": Known(slots=slots)}).word == DID_NOT_HOLD

    def useful(**shares):
        counted = {kind: {"tokens": s, "waste": 90.0 - s, "fragmented": 10.0} for kind, s in shares.items()}
        return JUDGES["useful-memory"]({"useful-memory": Known(slots=counted)})

    assert useful(max=20.0, pow2=27.0, oracle=38.0, paged=96.0).word == HELD
    some = useful(max=20.0, pow2=40.0, oracle=60.0, paged=96.0)
    assert some.word == DEPENDS
    assert "max and pow2" in some.reason
    assert useful(max=50.0, pow2=60.0, oracle=70.0, paged=96.0).word == DID_NOT_HOLD
    assert useful(max=20.0, pow2=27.0, oracle=38.0, paged=80.0).word == DID_NOT_HOLD


def test_a_server_keeps_no_memory_of_clients_that_left_and_refuses_malformed_requests():
    def kept(freed, served):
        left = Abandoned(streams=6, owned_before=55.0, freed_after_s=freed, next_served=served)
        return JUDGES["abandoned"]({"served": ServedFacts({"pages": left}, None)}).word

    assert kept(0.02, True) == DID_NOT_HOLD
    assert kept(None, True) == HELD
    assert kept(0.02, False) == HELD

    def disturbed(same, refused):
        sent = Malformed(6, 6, same, sent=8, refused=refused, seconds_alone=1.0, seconds_beside=1.1)
        return JUDGES["malformed"]({"served": ServedFacts({}, sent)}).word

    assert disturbed(6, 8) == DID_NOT_HOLD
    assert disturbed(5, 8) == HELD
    assert disturbed(6, 7) == HELD
