"""A simulated engine whose host works while the GPU computes: when steps begin and end."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvbench.requests.request import RequestSpec
from kvbench.simulation.fleet.drive import Drive, Replica
from kvbench_engine.config import EngineConfig
from kvbench_engine.execution.simulated_executor import StepTime
from kvbench_engine.kv.budget import KVShape, LayerKV, capacity_of

GPU = 0.010


def times_of(host, *, overlapped, arrivals=(0.0,), tokens=20):
    config = EngineConfig(max_model_len=256, max_num_seqs=8, kv_budget=1 << 20, async_scheduling=overlapped)
    shape = KVShape((LayerKV(1, 8, 8),), 2)
    timer = lambda work: StepTime(host + GPU, schedule=host, execute=GPU)  # noqa: E731
    replica = Replica(config, capacity_of(config, shape, 1 << 20), 100, timer)
    ended = []
    load = [[RequestSpec(i, "x", (i, 5, 6), None, tokens, arrival_s=at)] for i, at in enumerate(arrivals)]
    Drive([replica], load, ended.append).run()
    ended.sort(key=lambda end: end.spec.index)
    return [end.times for end in ended], replica


@pytest.mark.parametrize(("host", "step"), [(0.004, GPU), (0.0, GPU), (0.015, 0.015)])
def test_overlapped_the_longer_one_of_host_and_gpu_paces_the_steps(host, step):
    (times,), replica = times_of(host, overlapped=True)
    assert times[0] == pytest.approx(max(host + GPU, 2 * host))  # it is read when the second one is planned
    gaps = [b - a for a, b in pairwise(times[2:-1])]
    assert gaps == pytest.approx([step] * len(gaps))
    assert replica.engine.stats().num_requests_running == 0 and not replica.busy


def test_without_overlap_host_and_gpu_take_turns():
    (times,), _ = times_of(0.004, overlapped=False)
    assert times == pytest.approx([0.014 * (i + 1) for i in range(20)])


def test_overlapped_a_request_waits_for_the_step_that_is_planned_already():
    """The second comes while step 3 runs and step 4 is planned: it is in step 5, and in step 4 without overlap."""
    _, late = times_of(0.0, overlapped=True, arrivals=(0.0, 0.025))[0]
    assert late[0] == pytest.approx(0.050)
    _, soon = times_of(0.0, overlapped=False, arrivals=(0.0, 0.025))[0]
    assert soon[0] == pytest.approx(0.040)


def test_overlap_changes_no_token_and_leaks_no_page():
    runs = [times_of(0.001, overlapped=overlapped, arrivals=(0.0, 0.004, 0.2))[1] for overlapped in (True, False)]
    made = [replica.engine.stats() for replica in runs]
    assert made[0].generation_tokens == made[1].generation_tokens == 60
    assert made[0].kv.pages_owned == 0
