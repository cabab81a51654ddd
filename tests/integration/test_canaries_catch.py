"""Canaries at a full pool catch errors of the KV cache that crash nothing, and stay quiet otherwise."""

from __future__ import annotations

import pytest

from kvbench_engine.config import KV_CACHE_DTYPES
from kvbench_engine.engine import Engine
from kvbench_engine.kv.page_pool import PagePool
from kvbench_engine.sequence import TokenOutput
from tests.support.kv_mutants import MUTANTS
from tests.support.pressed import COPY, FORKS, LOST, PAGES, PASSKEY, REPEAT, alarms, pressed

pytestmark = pytest.mark.full

MODES = {
    "contiguous": {"layout": "contiguous"},
    "recompute": {"preemption_mode": "recompute"},
    "swap and prefix caching": {"preemption_mode": "swap", "enable_prefix_caching": True},
}
SEED = 1
FEW = {"count": 16, "longest": 300}
# The checks that must be among those that notice; fewer canaries would do for most.
CAUGHT_BY = {
    "page of another sequence": {PASSKEY, COPY, REPEAT},
    "stale page after eviction": {PASSKEY, COPY, REPEAT, PAGES},
    "scales of 1.0, int8": {PASSKEY},
    "scales of 1.0, int4": {PASSKEY},
    "scales of 1.0, fp8_e4m3": {PASSKEY},
    "scales of 1.0, fp8_e5m2": {PASSKEY},
    "fork without copy": {PASSKEY, FORKS},
    "wrong position after recompute": {PASSKEY},
    "half a page compared": {PASSKEY, REPEAT},
    "swap in out of order, pages of 64": {PASSKEY, COPY},
    "swap in out of order, pages of 16": {COPY, FORKS},
    "prefix hit one page too long": {PASSKEY, REPEAT},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_an_error_of_the_kv_cache_is_caught_and_the_run_says_by_which_check(name):
    plant, settings = MUTANTS[name]
    sizes = {"longest": 300} if "kv_cache_dtype" in settings else {}  # nothing is right then
    with plant() as fired:
        run = pressed(SEED, **sizes, **settings)
    assert fired.times
    assert CAUGHT_BY[name] <= set(run.caught_by)
    assert alarms(run, settings.get("kv_cache_dtype", "auto"))


def test_a_page_that_is_never_given_back_is_told_though_every_answer_is_right(monkeypatch):
    release, kept = PagePool.release, {}

    def keep_one(pool: PagePool, page: int) -> None:  # of each pool: an engine that starts has one of its own
        if pool in kept or pool.ref_count[page] > 1:
            return release(pool, page)
        kept[pool] = page

    monkeypatch.setattr(PagePool, "release", keep_one)
    run = pressed(SEED, count=4, longest=300)
    assert kept and run.caught_by == (PAGES,) and not run.wrong
    assert alarms(run, "auto") and alarms(run, "fp8_e4m3")


def test_an_answer_that_does_not_come_is_told(monkeypatch):
    step = Engine.step
    lost = {("3", 0), ("0", 1)}  # an answer, and a fork's

    def forgetful(engine: Engine) -> list[TokenOutput]:
        return [each for each in step(engine) if (each.request_id, each.index) not in lost]

    monkeypatch.setattr(Engine, "step", forgetful)
    run = pressed(SEED, count=6, longest=300)
    assert {(str(each.request), each.answer) for each in run.findings if each.check == LOST} == lost
    assert not run.wrong and alarms(run, "auto") and alarms(run, "int4_per_token_head")


def test_a_wrong_answer_comes_with_what_replays_it():
    plant, settings = MUTANTS["fork without copy"]
    with plant():
        first, again = (pressed(SEED, count=12, **settings) for _ in range(2))
    assert first.findings == again.findings  # the seed is all that it takes
    found = next(each for each in first.findings if each.check == PASSKEY)
    assert found.seed == SEED and found.canary.startswith(PASSKEY) and found.expected != found.got
    assert found.place.step > 0 and len(set(found.place.page_table)) == len(found.place.page_table) > 1


@pytest.mark.parametrize(
    ("kv_cache_dtype", "mode"),
    [
        pytest.param(dtype, mode, marks=() if dtype == "auto" or mode == "recompute" else pytest.mark.full)
        for dtype in KV_CACHE_DTYPES
        for mode in MODES
    ],
)
def test_no_alarm_without_an_error(kv_cache_dtype, mode):
    run = pressed(SEED, **FEW, kv_cache_dtype=kv_cache_dtype, **MODES[mode])
    assert run.asked >= 16 and run.counters["waiting_steps"] > 0
    assert not alarms(run, kv_cache_dtype)


SOUND = (
    {},
    {"enable_prefix_caching": True},
    {"preemption_mode": "swap", "page_size": 64},
    {"preemption_mode": "swap", "page_size": 16},
)


@pytest.fixture(scope="module")
def sound():
    """The runs that catch, without the error: those in full precision. Of the others, the runs above are the same."""
    assert all(settings in SOUND for _, settings in MUTANTS.values() if "kv_cache_dtype" not in settings)
    return [pressed(SEED, **settings) for settings in SOUND]


def test_the_runs_that_catch_find_nothing_without_the_error(sound):
    assert [run.findings for run in sound] == [()] * len(SOUND)


def test_the_pool_of_the_runs_that_catch_is_full_and_everything_happens_that_moves_kv(sound):
    assert all(run.counters["peak_usage"] > 0.85 and run.counters["preemptions"] > 0 for run in sound)
    counters = [run.counters for run in sound]
    assert all(each["recomputed_tokens"] > 0 and each["copied_pages"] > 0 and each["forks"] > 0 for each in counters)
    assert counters[1]["evicted_pages"] > 0 and counters[1]["prefix_hit_tokens"] > 0
    assert counters[2]["swapped_pages"] > 0 and counters[3]["swapped_pages"] > 0
