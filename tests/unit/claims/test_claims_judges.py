"""Whether a claim held: each rule on both sides of its limit, and where an interval straddles it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from kvbench.claims import judges
from kvbench.claims.catalogue import CLAIMS
from kvbench.claims.judges import DEPENDS, DID_NOT_HOLD, HELD, UNDECIDED
from kvbench.lockstep.intervals import Effect

SIZES = (1, 2, 4, 8, 32, 64)  # beside 16
JUDGES = {claim.name: claim.judge for claim in CLAIMS}


def effect(low: float, high: float) -> Effect:
    return Effect(math.sqrt(low * high), low, high, 3, within_launch=False, smallest_seen=0.01)


class Known:
    """A ``Measured`` with given answers. ``speeds``: by the values of the settings that differ from the baseline."""

    def __init__(self, speeds=None, p95=None, tpots=None, counters=None, slots=None, crossed=None, varied=None):
        self.launches, self._slots = 3, slots or {}
        self._speeds, self._p95, self._tpots = speeds or {}, p95 or {}, tpots or []
        self._counters, self._crossed = counters or {}, crossed
        capacity = {
            "page_table_bytes": 50, "kv_budget_bytes": 10_000, "max_model_len": 4096, "bytes_per_token": 2304,
            "scale_bytes_per_token": 256, "capacity_tokens": 8192, "dtype": "float32",
        }  # fmt: skip
        self.capacity = {"contiguous": capacity, "other": capacity}
        changed = varied or [{}, *({"page_size": size} for size in SIZES)]
        self.design = SimpleNamespace(configurations=[SimpleNamespace(varied=x, settings=x) for x in changed])

    def find(self, **settings):
        return SimpleNamespace(config_id="other")

    def speed(self, **to):
        return self._speeds[next(iter(to.values()))]

    def p95(self, metric, **to):
        return self._p95[metric]

    def tpots(self, cls, quantile, **settings):
        return self._tpots

    def interaction(self, one, other):
        return self._crossed

    def counters(self, **settings):
        return {"num_preemptions_total": 0.0, **self._counters}

    def slots(self, **settings):
        return self._slots[next(iter(settings.values()), "max")]

    def steps(self, **settings):
        return 87, 19.3

    def tokens_held(self, **settings):
        return 8192


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (2.1, 2.9, HELD),
        (2.6, 5.0, HELD),
        (1.6, 1.9, DID_NOT_HOLD),
        (1.9, 2.1, UNDECIDED),
        (math.nan, math.nan, UNDECIDED),
    ],
)
def test_mixed_lengths_asks_for_twice_the_throughput(low, high, word):
    assert JUDGES["mixed-lengths"]({"mixed-lengths": Known({"paged": effect(low, high)})}).word == word


@pytest.mark.parametrize("name", ["uniform-lengths", "single-user"])
@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(0.97, 1.03, HELD), (0.88, 0.94, HELD), (1.06, 1.1, DID_NOT_HOLD), (0.98, 1.06, UNDECIDED)],
)
def test_little_is_a_gain_of_at_most_5_percent(name, low, high, word):
    verdict = JUDGES[name]({name: Known({"paged": effect(low, high)})})
    assert verdict.word == word
    assert ("cost" in verdict.evidence) == (high < 0.95)


@pytest.mark.parametrize(
    ("low", "high", "word"), [(0.94, 0.96, HELD), (0.98, 1.0, DID_NOT_HOLD), (0.95, 1.0, UNDECIDED)]
)
def test_paging_costs_3_percent_or_not(low, high, word):
    assert JUDGES["paging-cost"]({"paging-cost": Known({"paged": effect(low, high)})}).word == word


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(0.9, 0.97, HELD), (0.985, 0.995, DID_NOT_HOLD), (1.1, 1.2, DID_NOT_HOLD), (0.97, 1.01, UNDECIDED)],
)
def test_prefix_caching_without_shared_prompts(low, high, word):
    assert JUDGES["prefix-unshared"]({"prefix-unshared": Known({True: effect(low, high)})}).word == word


@pytest.mark.parametrize(
    ("short", "long", "word"),
    [
        ((1.6, 1.8), (1.6, 1.7), HELD),
        ((1.6, 1.8), (1.2, 1.3), DEPENDS),
        ((1.1, 1.2), (1.1, 1.2), DID_NOT_HOLD),
        ((1.4, 1.6), (1.1, 1.2), UNDECIDED),
    ],
)
def test_prefix_caching_with_half_of_each_prompt_shared(short, long, word):
    found = {"prefix-shared-short": Known({True: effect(*short)}), "prefix-shared-long": Known({True: effect(*long)})}
    assert JUDGES["prefix-shared"](found).word == word


LEVEL = dict.fromkeys(SIZES, effect(0.995, 1.004))


def page_sizes(**speeds):
    return {"page-size": Known(LEVEL | {int(size[1:]): effect(*each) for size, each in speeds.items()})}


def test_16_is_best_if_the_others_are_slower_and_ties_are_named():
    slower = {f"_{size}": (0.9, 0.99) for size in SIZES}
    assert JUDGES["page-16"](page_sizes(**slower)).word == HELD
    assert JUDGES["page-16"](page_sizes(**slower | {"_64": (1.03, 1.05)})).word == DID_NOT_HOLD
    tie = JUDGES["page-16"](page_sizes(**slower | {"_8": (0.995, 1.01)}))
    assert tie.word == DEPENDS
    assert "pages of 8 " in tie.reason
    undecided = JUDGES["page-16"](page_sizes(**slower | {"_64": (0.98, 1.05)}))
    assert undecided.word == UNDECIDED
    assert "64" in undecided.reason


def test_small_pages_are_wasteful_by_their_table_or_their_speed():
    assert JUDGES["small-pages"](page_sizes()).word == DID_NOT_HOLD
    assert JUDGES["small-pages"](page_sizes(_4=(0.9, 0.95))).word == HELD
    assert JUDGES["small-pages"](page_sizes(_8=(0.97, 1.01))).word == UNDECIDED
    large_table = page_sizes()
    large_table["page-size"].capacity["other"]["page_table_bytes"] = 120
    assert JUDGES["small-pages"](large_table).word == HELD


@pytest.mark.parametrize(
    ("fp8", "int8", "int4", "word"),
    [
        ((1.1, 1.2), (1.1, 1.2), (1.1, 1.2), HELD),
        ((1.1, 1.2), (0.8, 0.9), (1.1, 1.2), DEPENDS),
        ((0.8, 0.9), (0.8, 0.9), (0.8, 0.9), DID_NOT_HOLD),
        ((1.1, 1.2), (0.9, 1.1), (1.1, 1.2), UNDECIDED),
    ],
)
def test_quantised_kv_is_faster(fp8, int8, int4, word):
    speeds = {"fp8_e4m3": effect(*fp8), "int8_per_token_head": effect(*int8), "int4_per_token_head": effect(*int4)}
    assert JUDGES["quantised-kv"]({"quantised-kv": Known(speeds)}).word == word


@pytest.mark.parametrize(
    ("low", "high", "word"), [(0.9, 0.94, HELD), (0.97, 1.02, DID_NOT_HOLD), (0.93, 0.99, UNDECIDED)]
)
def test_scales_weigh_more_in_small_pages(low, high, word):
    assert JUDGES["scales-and-pages"]({"quantised-kv": Known(crossed=effect(low, high))}).word == word


def test_swap_by_page_moves_less_than_whole_sequences():
    def verdict(moved, kept, preemptions=9.0):
        counters = {
            "swapped_out_slots_total": moved,
            "swap_kept_slots_total": kept,
            "num_preemptions_total": preemptions,
        }
        return JUDGES["swap-by-page"]({"swap": Known({"recompute": effect(0.9, 0.95)}, counters=counters)}).word

    assert verdict(80.0, 20.0) == HELD
    assert verdict(95.0, 5.0) == DID_NOT_HOLD
    assert verdict(0.0, 0.0, preemptions=0.0) == UNDECIDED


@pytest.mark.parametrize(
    ("low", "high", "itl", "word"),
    [
        ((0.6, 0.7), (0.99, 1.01), (1.2, 1.5), HELD),
        ((0.6, 0.7), (0.8, 0.9), (0.9, 1.01), HELD),
        ((0.6, 0.7), (0.99, 1.01), (0.9, 1.01), DEPENDS),
        ((0.99, 1.01), (0.99, 1.01), (1.2, 1.5), DEPENDS),
        ((0.99, 1.01), (0.99, 1.01), (0.9, 0.95), DID_NOT_HOLD),
        ((0.6, 0.7), (0.99, 1.01), (0.9, 1.3), UNDECIDED),
        ((0.95, 1.01), (0.8, 0.9), (1.2, 1.5), UNDECIDED),
    ],
)
def test_a_batch_limit_has_two_sides(low, high, itl, word):
    limits = [{"max_num_seqs": value} for value in (16, 4, 64)]
    p95 = {"ttft": effect(0.8, 0.9), "itl": effect(*itl)}
    known = Known({4: effect(*low), 64: effect(*high)}, p95, varied=limits)
    assert JUDGES["max-num-seqs"]({"max-num-seqs": known}).word == word


def test_long_contexts_slow_the_chats_beside_them():
    budgets = [{"max_num_batched_tokens": value} for value in (1024, 128)]
    alone = Known(tpots=[10.0, 10.1, 9.9])
    for values, word in (
        ([30.0, 31.0, 29.5], HELD),
        ([10.3, 10.2, 10.1], DID_NOT_HOLD),
        ([9.0, 16.0, 25.0], UNDECIDED),
    ):
        beside = Known(tpots=values, varied=budgets)
        assert JUDGES["long-contexts"]({"long-contexts": beside, "long-contexts-none": alone}).word == word


def test_average_prompts_stand_for_others_if_all_gain_alike():
    def verdict(easy):
        kinds = dict.fromkeys(judges.KINDS, (1.5, 1.52)) | {"easy": easy}
        found = {f"prompts-{kind}": Known({"paged": effect(*each)}) for kind, each in kinds.items()}
        return JUDGES["kinds-of-prompts"](found).word

    assert verdict((1.49, 1.53)) == HELD
    assert verdict((2.0, 2.1)) == DID_NOT_HOLD
    assert verdict((1.55, 1.7)) == UNDECIDED


def test_sharing_is_one_less_physical_over_logical_pages():
    def verdict(*saved):
        pages = [{"kv_page_steps_total_physical": 1000 * (1 - s), "kv_page_steps_total_logical": 1000.0} for s in saved]
        found = {f"sharing-beam-{width}": Known(counters=each) for width, each in zip((2, 4, 6), pages, strict=True)}
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
        facts = {"streams": 6, "owned_before": 55.0, "freed_after_s": freed, "next_served": served}
        return JUDGES["abandoned"]({"served": {"abandoned": {"pages": facts}}}).word

    assert kept(0.02, True) == DID_NOT_HOLD
    assert kept(None, True) == HELD
    assert kept(0.02, False) == HELD

    def disturbed(same, refused):
        facts = {"good": 6, "same_tokens": same, "sent": 8, "refused": refused}
        return JUDGES["malformed"]({"served": {"malformed": facts}}).word

    assert disturbed(6, 8) == DID_NOT_HOLD
    assert disturbed(5, 8) == HELD
    assert disturbed(6, 7) == HELD
