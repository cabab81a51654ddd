"""The files of a simulated load, against what follows from step times that are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvbench.capacity.gpus import find_gpu
from kvbench.capacity.model import plan_model
from kvbench.measure.instrument import Job
from kvbench.measure.server import MeasuredServer
from kvbench.metrics.latency import SESSION_BROKEN
from kvbench.requests.request import RequestList, RequestSpec
from kvbench.runs.folder import RunFolder
from kvbench.simulation.cost.machine import Machine
from kvbench.simulation.fleet.drive import Replica
from kvbench.simulation.instrument import SimulatedInstrument, SimulatedTarget
from kvbench.targets.base import ModelFacts
from kvbench.targets.prometheus import parse_metrics
from kvbench.workload.load_section import LoadConfig, load_point
from kvbench_engine.config import EngineConfig
from kvbench_engine.execution.simulated_executor import StepTime, StepWork
from kvbench_engine.kv.budget import KVShape, LayerKV, capacity_of
from kvbench_engine.server.metrics import ServerMetrics, readings

STEP_S = 0.01  # whatever a step computes
SETTINGS = {"page_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512}


class Known(SimulatedTarget):
    """An engine whose steps all take ``STEP_S``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(Machine(plan_model("llama-3.1-8b"), find_gpu("L4")), {})
        self._config = EngineConfig.from_mapping({**SETTINGS, **settings, "kv_budget": 1 << 20})
        self.model = ModelFacts("known", 1000, 512)
        self.restart()

    def restart(self) -> None:
        capacity = capacity_of(self._config, KVShape((LayerKV(1, 4, 4),), 2), self._config.kv_budget or 0)
        self.replica = Replica(self._config, capacity, 1000, self._time)

    def _time(self, work: StepWork) -> StepTime:
        return StepTime(STEP_S, execute=STEP_S)


def request(index: int, prompt: int = 16, out: int = 5, **more: Any) -> RequestSpec:
    ids = tuple((7 * index + i) % 997 for i in range(prompt))
    return RequestSpec(index, "any", ids, None, out, **more)


def measure(requests: list[RequestSpec], out: Path, target: Known | None = None, **load: Any) -> Any:
    instrument, point = instrument_of(requests, out, target or Known(), **load)
    return instrument.send(point, RequestList(requests), out, out)


def instrument_of(requests: list[RequestSpec], out: Path, target: Known, **load: Any) -> tuple[Any, Any]:
    closed = all(one.arrival_s is None for one in requests)
    how = {"mode": "closed", "concurrency": [1]} if closed else {"mode": "open", "request_rate": [1]}
    prompts = {"kind": "synthetic", "classes": [{"name": "any", "share": 1, "prompt_tokens": 16, "output_tokens": 5}]}
    config = LoadConfig.model_validate({**how, "num_requests": len(requests), "prompts": prompts, **load})
    users = config.concurrency[0] if closed and config.concurrency else None
    point = load_point(how["mode"], concurrency=users, rate=None if closed else 1.0, num_requests=len(requests))
    instrument = SimulatedInstrument(Job(None, RunFolder(out), lambda: target))
    instrument.server = MeasuredServer(config, 0, target, SETTINGS, target.server_info(), None, lambda: None)
    return instrument, point


def test_latencies_are_those_of_the_steps(tmp_path: Path) -> None:
    """A prompt of 130 tokens takes three steps of 64, so 30 ms to its first token, then 10 ms a token.

    Between two requests of a user 1 ms passes.
    """
    done = measure([request(i, prompt=130, out=5) for i in range(3)], tmp_path)
    metrics = done.metrics
    assert done.valid and metrics.completed == 3
    assert metrics.ttft_ms.p50 == pytest.approx(30) and metrics.ttft_ms.max == pytest.approx(30)
    assert metrics.tpot_ms.p50 == pytest.approx(10) and metrics.itl_ms.p95 == pytest.approx(10)
    assert metrics.duration_s == pytest.approx(3 * 0.07 + 2 * 0.001)
    assert metrics.output_throughput == pytest.approx(15 / 0.212)
    counters = json.loads((tmp_path / "counters.json").read_text())
    assert counters["steps_total"] == 21 and counters["step_time_seconds_total_execute"] == pytest.approx(0.21)
    assert "process_resident_bytes_peak" not in counters and "hash_seconds_total" not in counters


@pytest.mark.parametrize(("state", "cached"), [("cold", [0, 0]), ("primed", [32, 32]), ("steady", [32, 48])])
def test_the_prefix_cache_is_in_the_state_that_a_load_declares(tmp_path: Path, state: str, cached: list[int]) -> None:
    """A steady one knows the shared prefix at the first load, and the whole prompt but its last page at the next."""
    requests = [request(0, prompt=64, prefix_tokens=32)]
    instrument, point = instrument_of(requests, tmp_path, Known(enable_prefix_caching=True), cache_state=state)
    for number, expected in enumerate(cached):
        out = tmp_path / str(number)
        out.mkdir()
        instrument.send(point, RequestList(requests), out, out)
        frame = pd.read_parquet(out / "requests.parquet")
        assert frame["cached_tokens"].tolist() == [expected] and frame["t0"].tolist() == [0.0]
        assert frame["first"].tolist() == pytest.approx([STEP_S])  # what was computed before takes no time of the load


def test_gauges_tell_how_long_requests_ran_in_a_load_with_long_pauses(tmp_path: Path) -> None:
    """Little's law: the mean number that runs is the arrivals a second times the time that each takes."""
    requests = [request(i, out=200, arrival_s=10.0 * i) for i in range(40)]
    done = measure(requests, tmp_path)
    frame = pd.read_parquet(tmp_path / "server.parquet")
    assert 50 < len(frame) <= 400 and frame["t"].is_monotonic_increasing
    counters = json.loads((tmp_path / "counters.json").read_text())
    expected = 40 * 2.0 / done.metrics.duration_s
    assert counters["num_requests_running_mean"] == pytest.approx(expected, rel=0.02)


def test_a_request_that_the_queue_does_not_take_is_refused_by_the_server(tmp_path: Path) -> None:
    """Of 10 at once one runs (max_num_seqs 1), one waits, and the other eight are answered 429."""
    target = Known(max_num_seqs=1, max_num_waiting=1)
    done = measure([request(i, arrival_s=0.0) for i in range(10)], tmp_path, target)
    frame = pd.read_parquet(tmp_path / "requests.parquet")
    assert not done.valid and done.refused and not done.invalid_reasons
    assert done.metrics.completed in (1, 2) and set(frame.loc[~frame["ok"], "http_status"]) == {429.0}


def test_turns_after_a_refused_one_are_not_sent(tmp_path: Path) -> None:
    turns = [request(i, arrival_s=0.0, session=i, turn=0) for i in range(4)]
    turns += [request(4 + i, prompt=32, session=i, turn=1, new_tokens=11) for i in range(4)]
    sessions = {"num_sessions": 4, "turns": 2}
    measure(turns, tmp_path, Known(max_num_seqs=1, max_num_waiting=1), sessions=sessions, num_requests=None)
    frame = pd.read_parquet(tmp_path / "requests.parquet").set_index("index")
    refused = frame.index[frame["http_status"] == 429]
    first = [index for index in refused if index < 4]
    assert first and all(frame.loc[index + 4, "error_kind"] == SESSION_BROKEN for index in first)
    assert list(frame.index) == list(range(8))


def test_waiting_in_the_client_counts_as_queued(tmp_path: Path) -> None:
    measure([request(i, arrival_s=0.0) for i in range(3)], tmp_path, max_concurrency=1)
    frame = pd.read_parquet(tmp_path / "requests.parquet")
    assert np.allclose(frame["queued_s"], [0.0, 0.05, 0.1]) and np.allclose(frame["t0"], 0.0)


def test_readings_are_what_a_reader_of_the_metrics_page_has() -> None:
    target = Known(preemption_mode="swap")
    target.replica.add("one", request(0), 0.0)
    target.replica.step()
    engine = target.replica.engine
    page = ServerMetrics(engine.config, engine.capacity, engine.stats(), ()).exposition(engine.stats()).decode()
    parsed, (gauges, counters) = parse_metrics(page, 0.0), readings(engine.stats())
    assert gauges == {name: value for name, value in parsed.gauges.items() if name != "process_resident_bytes"}
    assert counters.items() <= parsed.counters.items()
    missing = {name for name in parsed.counters.keys() - counters.keys() if not name.endswith(("_sum", "_count"))}
    assert {name.partition("_total")[0] for name in missing} <= {
        "hash_seconds", "request_success", "request_failure", "http_requests"
    }  # fmt: skip
