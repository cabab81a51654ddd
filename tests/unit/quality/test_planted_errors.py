"""Errors of a KV cache, planted into the engine: canaries at a full pool show them, without any other question."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from kvbench.quality import measure
from kvbench.workload.file import load_workload
from tests.support.hf_parts import one_thread
from tests.support.kv_mutants import MUTANTS
from tests.support.loads import ROOT

EXACT = {name: planted for name, planted in MUTANTS.items() if "kv_cache_dtype" not in planted[1]}
MAIN_RING = ("page of another sequence", "wrong position after recompute", "hash collision served")
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
    if name in MAIN_RING:
        sound = group.full_pool_of(config, set())
        assert not sound.canaries.wrong and not sound.problems and sound.preemptions > 10
    with plant() as fired:
        pool = group.full_pool_of(config, set())
    assert fired.times and pool.canaries.wrong > 0
