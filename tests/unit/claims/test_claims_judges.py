"""Whether a claim held: each rule on both sides of its limit, and where an interval straddles it."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
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


def rows(name, facts, *cases):
    """Cases of the table below: what was measured, made by ``facts``, and the word for it."""
    return [pytest.param(name, facts, case[:-1], case[-1]) for case in cases]


def one_ratio(name, setting):
    return lambda low, high: {name: Known({setting: effect(low, high)})}


def kernels(in_order, scattered):
    seconds = {RESERVED: [2.0, 2.0, 2.0], IN_ORDER: [2 * x for x in in_order], SCATTERED: [2 * x for x in scattered]}
    return {"paging-cost": KernelCost("cpu", "numba", 32, 1024, 16, seconds)}


def prefixes(one, five):
    return {
        f"prefix-{kind}": Known(ratios=lambda to, of, gain=gain: effect(1.0, 1.1) if of else effect(*gain))
        for kind, gain in (("one-shot", one), ("five-shot", five))
    }


def counted(names):
    return lambda *shares: {name: Known(counters={"shared": x}) for name, x in zip(names, shares, strict=True)}


def batched(*requests):
    counters = dict(zip(("max", "pow2", "oracle", "paged"), requests, strict=True))
    return {"useful-memory": Known(counters=counters)}


def two_ways(workload, batched, batched_otherwise):
    """Makes the counts of a workload whose second configuration has one setting off."""
    known = Known(counters={"max": batched, False: batched_otherwise})
    known.find = lambda **settings: SimpleNamespace(config_id=tuple(settings.values()))
    known.capacity = {(): Capacity(max_concurrency_at_max_len=15), (False,): Capacity(max_concurrency_at_max_len=4)}
    return {workload: known}


def rates(oracle, longest):
    return {"useful-memory": Known(ratios=lambda to, of: effect(*(oracle if of else longest)))}


LEVEL = dict.fromkeys(SIZES, effect(0.995, 1.004))
SLOWER = dict.fromkeys(SIZES, (0.9, 0.99))


def page_sizes(speeds, table_bytes=50):
    known = Known(LEVEL | {size: effect(*each) for size, each in speeds.items()})
    known.capacity["other"] = Capacity(page_table_bytes=table_bytes, kv_budget_bytes=10_000)
    return {"page-size": known}


def quantised(int8, int4_in_small_pages, others):
    def ratios(to, of):
        assert to["page_size"] == of["page_size"]  # each against the plain KV in pages of the same size
        small = to["page_size"] == 4 and to["kv_cache_dtype"].startswith("int4")
        return effect(*(int4_in_small_pages if small else int8 if to["kv_cache_dtype"].startswith("int8") else others))

    return {"quantised-kv": Known(ratios=ratios)}


def scales(int8, int4, int4_in_small_pages):
    shares = {
        (name, size): share for name, share in (("fp8_e4m3", 0), ("int8_per_token_head", int8)) for size in (4, 16)
    }
    shares |= {("int4_per_token_head", 16): int4, ("int4_per_token_head", 4): int4_in_small_pages}
    known = Known()
    known.find = lambda **settings: SimpleNamespace(config_id=tuple(settings.values()))
    known.capacity = {k: Capacity(scale_bytes_per_token=share, bytes_per_token=100) for k, share in shares.items()}
    return {"quantised-kv": known}


def left_free(little, much, itl):
    varied = [{}, {"watermark": 0.05}, {"watermark": 0.2}]
    speeds = {0.05: effect(*little), 0.2: effect(*much)}
    counters = {"num_preemptions_total": 9.0}
    return {"watermark": Known(speeds, p95={"itl": effect(*itl)}, varied=varied, counters=counters)}


def swapped(pages, moved, preemptions):
    """Of 100 slots that lay in preempted sequences, ``moved`` and kept ones, in ``pages`` pages."""
    counters = {"swapped_out_pages_total": pages, "swapped_out_slots_total": moved,
                "swap_kept_slots_total": 20.0 * (moved > 0), "num_preemptions_total": preemptions}  # fmt: skip
    return {"swap": Known({"recompute": effect(0.9, 0.95)}, counters=counters)}


def limited(name, preempted=3.0):
    """A batch limit that is too low costs throughput, one that is too high latency."""

    def facts(low, ttft, itl):
        limits = [{name.replace("-", "_"): value} for value in (16, 4, 64)]
        speeds, p95 = {4: effect(*low), 64: effect(0.99, 1.01)}, {"ttft": effect(*ttft), "itl": effect(*itl)}
        return {name: Known(speeds, p95, counters={"num_preemptions_total": preempted}, varied=limits)}

    return facts


def contexts(median, p95):
    budgets = [{"max_num_batched_tokens": value} for value in (1024, 128)]
    beside = Known(tpots={0.5: median, 0.95: p95}, varied=budgets)
    alone = Known(tpots={0.5: [10.0, 10.1, 9.9], 0.95: [10.0, 10.1, 9.9]})
    return {"long-contexts": beside, "long-contexts-none": alone}


def kinds(easy):
    gains = dict.fromkeys(KINDS, (1.5, 1.52)) | {"easy": easy}
    return {f"prompts-{kind}": Known({"paged": effect(*each)}) for kind, each in gains.items()}


def reserved(paged):
    slots = {"contiguous": {"tokens": 7.0, "waste": 93.0}, "paged": {"tokens": paged, "waste": 100.0 - paged}}
    return {"reservation": Known(slots=slots)}


def useful(*shares):
    slots = {
        kind: {"tokens": share, "waste": 90.0 - share, "fragmented": 10.0}
        for kind, share in zip(("max", "pow2", "oracle", "paged"), shares, strict=True)
    }
    return {"useful-memory": Known(slots=slots)}


def left(freed_after_s, next_served):
    pages = Abandoned(streams=6, owned_before=55.0, freed_after_s=freed_after_s, next_served=next_served)
    return {"served": ServedFacts({"pages": pages}, None)}


def disturbed(same, refused):
    sent = Malformed(6, 6, same, sent=8, refused=refused, seconds_alone=1.0, seconds_beside=1.1)
    return {"served": ServedFacts({}, sent)}


PREFIXES, BEAMS = ("one-shot", "five-shot", "unshared"), (2, 4, 6)
QUICK, LATE, MUCH, LITTLE = (0.8, 0.9), (1.2, 1.5), [30.0, 31.0, 29.5], [10.3, 10.2, 10.1]
EQUAL, PAGED_COST, FAR = [1.0, 1.001, 0.999], [1.04, 1.041, 1.04], [1.2, 1.21, 1.22]
SAVES, LOSES, EITHER, NEITHER = (1.1, 1.2), (0.8, 0.9), (0.9, 1.1), (0.99, 1.01)
UNKNOWN = [9.0, 16.0, 25.0]
LITTLE_GAIN = [(0.97, 1.03, HELD), (0.88, 0.94, HELD), (1.06, 1.1, DID_NOT_HOLD), (0.98, 1.06, UNDECIDED)]
LIMITS = [  # the low limit's throughput, the high one's TTFT and ITL
    ((0.6, 0.7), QUICK, LATE, HELD), ((0.6, 0.7), QUICK, (0.9, 1.01), DEPENDS), (NEITHER, QUICK, LATE, DEPENDS),
    (NEITHER, QUICK, (0.9, 0.95), DID_NOT_HOLD), ((0.6, 0.7), QUICK, (0.9, 1.3), UNDECIDED),
    ((0.95, 1.01), QUICK, LATE, UNDECIDED),
]  # fmt: skip
CASES = [
    *rows("mixed-lengths", one_ratio("mixed-lengths", "paged"),  # twice the throughput
          (2.1, 2.9, HELD), (1.6, 1.9, DID_NOT_HOLD), (1.9, 2.1, UNDECIDED), (None, None, UNDECIDED)),
    *rows("uniform-lengths", one_ratio("uniform-lengths", "paged"), *LITTLE_GAIN),  # a gain of at most 5 %
    *rows("single-user", one_ratio("single-user", "paged"), *LITTLE_GAIN),
    *rows("prefix-unshared", one_ratio("prefix-unshared", True),
          (0.9, 0.97, HELD), (0.985, 0.995, DID_NOT_HOLD), (1.1, 1.2, DID_NOT_HOLD), (0.97, 1.01, UNDECIDED)),
    *rows("paging-cost", kernels, (PAGED_COST, PAGED_COST, HELD), (EQUAL, EQUAL, DID_NOT_HOLD),  # 3 % or not
          (FAR, FAR, DID_NOT_HOLD), (EQUAL, FAR, DEPENDS), (PAGED_COST, FAR, DEPENDS),
          (EQUAL, [1.0, 1.06, 1.12], UNDECIDED), (EQUAL, [1.2, 1.3, 1.25], UNDECIDED)),  # at 95 % surely above 5 %
    *rows("prefix-shared", prefixes, ((1.5, 1.8), (3.0, 3.5), HELD), ((1.5, 1.8), (2.0, 2.5), DEPENDS),
          (SAVES, (2.0, 2.5), DID_NOT_HOLD), (LATE, (2.0, 2.5), UNDECIDED), (SAVES, (2.5, 3.5), UNDECIDED)),
    *rows("shared-tokens", counted([f"prefix-{kind}" for kind in PREFIXES]),
          (0.45, 0.58, 0.4, HELD), (0.45, 0.7, 0.0, DEPENDS), (0.3, 0.7, 0.0, DID_NOT_HOLD)),
    *rows("batched-at-once", batched,
          (7, 9.8, 13.6, 30.4, HELD), (7, 15, 14, 30, DEPENDS), (15, 15, 20, 30, DID_NOT_HOLD)),
    *rows("sustainable-rate", rates, ((1.8, 2.5), (3.0, 4.0), HELD), ((1.0, 1.2), (3.0, 4.0), DEPENDS),
          ((1.0, 1.2), (1.4, 1.5), DID_NOT_HOLD), ((1.6, 1.8), (1.4, 1.5), UNDECIDED),
          ((1.0, 1.2), (2.5, 3.0), UNDECIDED)),
    *rows("page-16", page_sizes, (SLOWER, HELD), (SLOWER | {64: (1.03, 1.05)}, DID_NOT_HOLD),
          (SLOWER | {8: (0.995, 1.01)}, DEPENDS), (SLOWER | {64: (0.98, 1.05)}, UNDECIDED)),
    *rows("small-pages", page_sizes, ({}, DID_NOT_HOLD), ({4: (0.9, 0.95)}, DEPENDS), ({8: (0.97, 1.01)}, UNDECIDED),
          ({}, 120, DEPENDS), ({8: (0.9, 0.95)}, 120, HELD), ({8: (0.97, 1.01)}, 120, UNDECIDED)),  # a large table
    *rows("quantised-kv", quantised, (SAVES, SAVES, SAVES, HELD), (LOSES, SAVES, SAVES, DEPENDS),
          (SAVES, LOSES, SAVES, DEPENDS), (LOSES, LOSES, LOSES, DID_NOT_HOLD), (EITHER, SAVES, SAVES, UNDECIDED),
          (SAVES, EITHER, SAVES, UNDECIDED)),
    *rows("scales-and-pages", scales,
          (5, 10, 20, HELD), (5, 10, 10, DEPENDS), (10, 10, 20, DEPENDS), (10, 10, 10, DID_NOT_HOLD)),
    *rows("swap-by-page", swapped, (5.0, 80.0, 9.0, HELD),  # 80 slots of 100
          (6.0, 80.0, 9.0, DID_NOT_HOLD), (0.0, 0.0, 0.0, UNDECIDED)),  # 96: pages are moved whole
    *rows("watermark", left_free, ((0.981, 1.0), (1.0, 1.019), (0.99, 1.01), HELD),
          ((0.981, 1.0), (1.021, 1.1), (0.9, 1.1), DID_NOT_HOLD),
          ((0.9, 0.979), (1.0, 1.019), (0.99, 1.01), DID_NOT_HOLD),
          ((0.981, 1.0), (1.0, 1.019), (0.5, 0.979), DID_NOT_HOLD),
          ((0.981, 1.0), (1.0, 1.021), (0.99, 1.01), UNDECIDED),
          ((0.981, 1.0), (1.0, 1.019), (0.979, 1.01), UNDECIDED)),
    *rows("max-num-seqs", limited("max-num-seqs"), *LIMITS, ((0.6, 0.7), LATE, (0.9, 1.01), HELD)),
    *rows("max-num-seqs", limited("max-num-seqs", preempted=0.0), ((0.6, 0.7), LATE, (0.9, 1.01), DEPENDS)),
    *rows("max-num-batched-tokens", limited("max-num-batched-tokens"), *LIMITS,
          ((0.6, 0.7), LATE, (0.9, 1.01), DEPENDS)),  # it does harm only to running streams
    *rows("long-contexts", contexts, (MUCH, MUCH, HELD), (LITTLE, LITTLE, DID_NOT_HOLD), (LITTLE, MUCH, DEPENDS),
          (LITTLE, UNKNOWN, UNDECIDED), (UNKNOWN, MUCH, UNDECIDED)),
    *rows("kinds-of-prompts", kinds, ((1.49, 1.53), HELD), ((2.0, 2.1), DID_NOT_HOLD), ((1.55, 1.7), UNDECIDED)),
    *rows("sharing-beam", counted([f"sharing-beam-{width}" for width in BEAMS]),
          (0.37, 0.5, 0.6, HELD), (0.29, 0.5, 0.6, DID_NOT_HOLD), (0.37, 0.5, 0.7, DID_NOT_HOLD)),
    *rows("reservation", reserved, (97.0, HELD), (90.0, DID_NOT_HOLD)),
    *rows("windows", partial(two_ways, "windows"), (12.0, 4.0, HELD), (11.9, 4.0, DID_NOT_HOLD)),
    *rows("latent-kv", partial(two_ways, "latent-kv"), (24.0, 3.0, HELD), (23.9, 3.0, DID_NOT_HOLD)),
    *rows("useful-memory", useful, (20.0, 27.0, 38.0, 96.0, HELD), (20.0, 40.0, 60.0, 96.0, DEPENDS),
          (50.0, 60.0, 70.0, 96.0, DID_NOT_HOLD), (20.0, 27.0, 38.0, 80.0, DID_NOT_HOLD)),
    *rows("abandoned", left, (0.02, True, DID_NOT_HOLD), (None, True, HELD), (0.02, False, HELD)),
    *rows("malformed", disturbed, (6, 8, DID_NOT_HOLD), (5, 8, HELD), (6, 7, HELD)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "facts", "measured", "word"), CASES)
def test_whether_a_claim_held(name, facts, measured, word):
    assert JUDGES[name](facts(*measured)).word == word


def test_reasons_and_evidence_name_what_decided():
    def verdict(name, facts):
        return JUDGES[name](facts)

    gain, loss = (one_ratio("single-user", "paged")(*ends) for ends in ((0.97, 1.03), (0.88, 0.94)))
    assert ["cost" in verdict("single-user", facts).evidence for facts in (gain, loss)] == [False, True]
    assert "pages of 8 " in verdict("page-16", page_sizes(SLOWER | {8: (0.995, 1.01)})).reason
    assert "64" in verdict("page-16", page_sizes(SLOWER | {64: (0.98, 1.05)})).reason
    assert "max and pow2" in verdict("useful-memory", useful(20.0, 40.0, 60.0, 96.0)).reason
    beams = counted([f"sharing-beam-{width}" for width in BEAMS])(0.37, 0.5, 0.6)
    assert "37.0%, 50.0%, 60.0%" in verdict("sharing-beam", beams).evidence


def test_one_launch_decides_nothing():
    one = dataclasses.replace(effect(2.5, 2.9), n=1)
    verdict = JUDGES["mixed-lengths"]({"mixed-lengths": Known({"paged": one})})
    assert verdict.word == UNDECIDED and "one launch" in verdict.reason
    assert JUDGES["kinds-of-prompts"]({f"prompts-{kind}": Known({"paged": one}) for kind in KINDS}).word == UNDECIDED
