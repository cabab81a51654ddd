"""What a full pool shows: planted errors of a KV cache, by canaries alone, and answers that did not come."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvbench.quality import measure
from kvbench.quality.full_pool import FullPool
from kvbench.requests.canaries import as_request
from kvbench.workload.file import load_workload
from tests.support.canaries import canary
from tests.support.hf_parts import one_thread
from tests.support.kv_mutants import MUTANTS
from tests.support.loads import ROOT

EXACT = {name: planted for name, planted in MUTANTS.items() if "kv_cache_dtype" not in planted[1]}
MAIN_RING = ("half a page compared",)
SETTINGS = {"model": "kvbench-tiny", "device": "cpu", "num_threads": 1, "max_num_seqs": 16, "max_model_len": 1024}


@pytest.fixture(scope="module")
def group() -> Iterator[measure.WeightsGroup]:
    """kvbench-tiny with its canaries and no other prompt."""
    with one_thread():
        workload = load_workload(ROOT / "workloads" / "mixed.yaml", profile="cpu")
        members = {"base": measure.Subject.of(SETTINGS, None)}
        made = measure.WeightsGroup(workload, members, False, lambda text: None)
        made.material = dataclasses.replace(made.material, forced=())
        made.expected = {}
        yield made


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in MAIN_RING)) for name in EXACT]
)
def test_an_error_that_crashes_nothing_is_a_wrong_canary_at_a_full_pool(group, name):
    plant, settings = EXACT[name]
    config = measure.Subject.of(SETTINGS | settings, None).config
    with plant() as fired:
        pool = group.full_pool_of(config, set())
    assert fired.times and pool.canaries.wrong > 0


def test_an_answer_that_is_short_of_a_token_and_one_that_never_came_are_lost():
    requests = [as_request(canary(str(i)), i, answers=2 - i % 2) for i in range(3)]
    pool = FullPool(SimpleNamespace(on_step=None), requests)
    pool.answers = {(0, 0): [8, 9], (0, 1): [8], (1, 0): [4, 9], (2, 0): [8, 9]}
    assert list(pool.lost()) == [(0, 1, 1), (2, 1, 0)] and len(pool.problems) == 2
