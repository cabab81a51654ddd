"""Unit costs: what a load is made of with known ones must give them back, and predict it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvbench.requests.request import RequestSpec
from kvbench.simulation.calibrate.predict import ReplayedLoad, predicted_metrics, replay, step_ends, works_of
from kvbench.simulation.cost import unit_costs
from kvbench.simulation.cost.unit_costs import UNITS, MeasuredSteps, UnitCostModel, UnitCosts, fit_unit_costs
from kvbench_engine.config import EngineConfig
from kvbench_engine.planning import plan_engine

COSTS = {"step": 5e-3, "token": 2e-4, "token beyond 64": 1e-4, "prefill pair": 2e-7, "drawn token": 3e-5}
KNOWN = UnitCosts({name: COSTS.get(name, 0.0) for name in UNITS}, {"auto": 1.5e-6, "int8_per_token_head": 6e-7})


def load_of(seed: int, users: int, **settings: object) -> ReplayedLoad:
    config = {"model": "llama-32m", "kv_budget": "48MiB", "max_model_len": 1024, "max_num_seqs": 32, **settings}
    plan = plan_engine(EngineConfig.from_mapping(config), on_cpu=True)
    assert plan.capacity is not None
    rng = np.random.default_rng(seed)
    lengths = zip(rng.integers(8, 600, 24).tolist(), rng.integers(4, 60, 24).tolist(), strict=True)
    requests = [
        RequestSpec(i, "any", tuple(rng.integers(0, 8192, long).tolist()), None, out)
        for i, (long, out) in enumerate(lengths)
    ]
    return ReplayedLoad(plan.config, plan.capacity, 8192, requests, users)


def measured(load: ReplayedLoad, noise: float = 0.0, seed: int = 0) -> MeasuredSteps:
    """The load as an engine with the known costs computes it; ``noise``: standard deviation of a step's time."""
    real = replay(load, UnitCostModel(KNOWN, load.config.kv_cache_dtype))
    works, ends, ended = works_of(load)
    at = step_ends(ends, ended, [one.times for one in real])
    steps = unit_costs.measured(load.config.kv_cache_dtype, works, at, 0.0)
    rng = np.random.default_rng(seed)
    return replace(steps, seconds=steps.seconds * np.exp(rng.normal(0.0, noise, len(steps.seconds))))


@pytest.fixture(scope="module")
def loads() -> list[ReplayedLoad]:
    return [
        load_of(1, 2), load_of(2, 24), load_of(3, 6),
        load_of(4, 24, kv_cache_dtype="int8_per_token_head"), load_of(5, 3, kv_cache_dtype="int8_per_token_head"),
    ]  # fmt: skip


def test_known_costs_are_found_from_the_times_of_the_tokens_alone(loads: list[ReplayedLoad]) -> None:
    actual = fit_unit_costs(measured(load) for load in loads)
    for name, seconds in COSTS.items():
        assert actual.units[name] == pytest.approx(seconds, rel=0.02), name
    assert actual.context == pytest.approx(KNOWN.context, rel=0.02)


def test_a_load_with_memory_short_is_predicted_from_others_although_every_step_is_noisy(
    loads: list[ReplayedLoad],
) -> None:
    actual = fit_unit_costs(measured(load, noise=0.1, seed=i) for i, load in enumerate(loads))
    other = load_of(9, 16, kv_budget="20MiB")
    ours, real = predicted_metrics(other, actual), predicted_metrics(other, KNOWN)
    assert real.completed == 24
    for metric, path in (("output_throughput", None), ("ttft_ms", "p95"), ("tpot_ms", "mean"), ("itl_ms", "p95")):
        pair = [one.value(metric if path is None else f"{metric}.{path}") for one in (ours, real)]
        assert pair[0] == pytest.approx(pair[1], rel=0.04), metric


@pytest.mark.parametrize("users", [1, None])
def test_a_replay_begins_at_zero_whatever_its_cache_was_primed_with(users: int | None) -> None:
    load = load_of(1, 1, enable_prefix_caching=True)
    requests = [replace(one, prefix_tokens=8, arrival_s=None if users else 0.0) for one in load.requests[:1]]
    loads = [replace(load, requests=requests, users=users, primed=primed) for primed in (False, True)]
    (cold,), (primed,) = (replay(load, UnitCostModel(KNOWN, "auto")) for load in loads)
    assert cold.due == primed.due == 0.0
    assert primed.times[0] <= cold.times[0] + 1e-9  # no step of the priming is in it


def test_interrupted_steps_do_not_become_costs_of_the_others(loads: list[ReplayedLoad]) -> None:
    disturbed = []
    for load in loads:
        steps = measured(load, noise=0.02)
        steps.seconds[::40] += 0.1  # another program had the core
        disturbed.append(steps)
    actual = fit_unit_costs(disturbed)
    again = 0.0
    for load in loads:
        timer = UnitCostModel(actual, load.config.kv_cache_dtype)
        again += sum(timer(work).total for work in works_of(load)[0])
    assert again == pytest.approx(sum(one.seconds.sum() for one in disturbed), rel=1e-6)  # the time is all there,
    shares = [actual.units[name] / COSTS[name] for name in ("token", "prefill pair")]
    assert max(shares) / min(shares) == pytest.approx(1.0, abs=0.15)  # spread over all costs alike


def test_a_kv_dtype_that_no_load_had_is_charged_as_auto_and_said(loads: list[ReplayedLoad]) -> None:
    actual = fit_unit_costs(measured(load) for load in loads[:3])
    assert not UnitCostModel(actual, "auto").notes() and UnitCostModel(actual, "int8_per_token_head").notes()
    works, _, _ = works_of(loads[3])
    assert [UnitCostModel(actual, "int8_per_token_head")(w).total for w in works] == [
        UnitCostModel(actual, "auto")(w).total for w in works
    ]
