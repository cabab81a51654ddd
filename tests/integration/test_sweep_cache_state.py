"""The cache state that a load declares is checked against what the server says it served, and must be known."""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import pytest

from kvbench.common import foreign_cpu as contention
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.measure import server_state
from kvbench.measure import warm_up as warming
from kvbench.measure.http import HttpInstrument
from kvbench.measure.instrument import Job, Listener
from kvbench.measure.server import MeasuredServer
from kvbench.runs.folder import create_run
from kvbench.runs.results import LoadResult
from kvbench.runs.server_info import ServerInfo
from kvbench.sweep.block import BlockRunner
from kvbench.targets.running import OpenAITarget
from kvbench.workload.design import plan_sweep
from kvbench.workload.file import load_workload
from tests.support.loads import fake_server
from tests.support.sweep_parts import BUSY_MACHINE, TINY, Bench, Up, complaints, finished

CACHING = ("--enable-prefix-caching", "--page-size", "4")
NO_RESET = [{"path": "/reset_prefix_cache", "do": "status", "status": 404}]


def runner_of(workload, folder, url):
    return BlockRunner(HttpInstrument(Job(workload, folder, lambda: OpenAITarget(url))))


@pytest.fixture
def measure(tmp_path):
    """Runs the tiny workload once on a server that runs already; what is wrong, but for a busy machine."""

    def run(url, repeat=1, **load):
        engine = {key: value for key, value in TINY["engine"].items() if key != "page_size"}  # the server has its own
        path = Bench(tmp_path).write(engine=engine, sweep={}, load={"repeats": 1, **load})
        workload = load_workload(path, profile="cpu")
        folder = create_run(tmp_path / f"results{time.monotonic_ns()}", "tiny", "none")
        _, (planned,) = plan_sweep(workload, ())
        planned = dataclasses.replace(planned, repeat=repeat)
        runner = runner_of(workload, folder, url)
        assert runner.run_block(planned)
        assert runner.failures == []
        done = [json.loads(p.read_text()) for p in folder.path.glob("cells/*/loads/*/done.json")]
        assert {each["warm_up"]["in_flight"] for each in done} == {max(load.get("concurrency", [2]))}
        done = done[0]
        reasons = [r for r in done["invalid_reasons"] if not any(words in r for words in BUSY_MACHINE)]
        assert done["valid"] == (not done["invalid_reasons"])
        return reasons, done

    return run


def test_states_that_were_made_are_valid_and_a_reset_that_is_left_out_is_caught(measure, monkeypatch):
    with fake_server(*CACHING) as (_, url):
        for state in ("primed", "cold", "steady"):  # each but the first meets prompts of the one before
            reasons, done = measure(url, cache_state=state)
            assert reasons == [] and done["prefix_cache_bounds"]["high"] > 0
            assert (done["prefix_cache_bounds"]["low"] > 0) == (state == "primed")
        monkeypatch.setattr(server_state, "_reset", lambda target: True)
        (reason,), done = measure(url, cache_state="cold")
    assert not LoadResult.parse(done).is_disturbed, "it would be measured again"
    assert "it held prompts from before this load" in reason
    assert f"at most {done['prefix_cache_bounds']['high']} are possible" in reason


def test_a_warm_up_with_measured_prompts_is_caught(measure, monkeypatch):
    with fake_server(*CACHING, FAKE_FAULT="keep") as (_, url):  # its reset empties nothing
        assert measure(url, repeat=0)[0] == []  # the warm-up's prompts are others
    monkeypatch.setattr(warming, "_SEED", 0)
    monkeypatch.setattr(warming, "_shuffled", lambda request: list(request.prompt_token_ids))
    with fake_server(*CACHING, FAKE_FAULT="keep") as (_, url):
        (reason,) = measure(url, repeat=0)[0]
        assert "it held prompts from before this load" in reason


@pytest.mark.full
def test_a_priming_that_had_no_effect_is_caught(measure):
    with fake_server(*CACHING, FAKE_FAULT="forget") as (_, url):
        assert measure(url, cache_state="cold", concurrency=[1, 3])[0] == []  # one warm-up, for three users
        (reason,) = measure(url, cache_state="primed")[0]
        assert "the shared prefixes were not in it" in reason


def test_the_machine_of_a_load_is_recorded_and_judged_and_a_display_gets_the_readings(measure, monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(Listener, "server_read", lambda self, sample: told.append(sample))
    monkeypatch.setattr(contention, "foreign_limit", lambda *args: -1000.0)  # however idle this machine is
    with fake_server() as (_, url):
        reasons, done = measure(url)
    assert reasons == [] and done["prefix_cache_bounds"] == {"low": 0, "high": 0}  # without caching none is possible
    (counters,) = tmp_path.glob("results*/*/*/cells/*/loads/*/counters.json")
    assert len(told) == json.loads(counters.read_text())["polls"] > 0
    assert {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"} <= told[-1].gauges.keys()
    if sys.platform == "linux":
        machine = done["machine"]
        assert min(machine[f"{who}_cpu_cores"] for who in ("foreign", "server", "client")) >= 0
        assert machine["cores"] >= 1 and machine["seconds"] > 0
        assert not done["valid"] and LoadResult.parse(done).is_disturbed
        assert any(reason.startswith("other processes used") for reason in done["invalid_reasons"])


@pytest.mark.full
def test_a_server_that_cannot_empty_its_cache_is_measured_only_as_it_is(measure):
    with fake_server(*CACHING, fire=NO_RESET) as (_, url):
        reason = measure(url, cache_state="primed")[0][0]
        assert "the state of the prefix cache is not known" in reason and "-o load.cache_state=steady" in reason
        reasons, done = measure(url)  # which declares none
        assert reasons == [] and "from_before" in done["prefix_cache"] and done["prefix_cache"]["state"] == "steady"


@pytest.mark.full
def test_a_server_of_ours_that_cannot_empty_its_cache_is_launched_for_each_load(tmp_path):
    """Nobody knew before: its first answer says so, and from then on a load that needs the cache cold has its own."""
    bench = Bench(tmp_path, {"KVBENCH_NO_CALIBRATION": "1", "FIRE": json.dumps(NO_RESET)})
    engine = TINY["engine"] | {"enable_prefix_caching": True}
    path = bench.write(engine=engine, sweep={}, load={"concurrency": [1, 2], "repeats": 1})
    done = bench.sweep(str(path), "--no-report")
    assert done.returncode == 0, done.stdout + done.stderr
    assert complaints(bench.only_run()) == [] and len(finished(bench.only_run())) == len(bench.launches) == 2
    assert len(list((bench.only_run() / "logs").glob("*.log"))) == 2


def test_a_target_that_is_gone_after_the_first_block_costs_the_others_and_not_the_sweep(tmp_path):
    path = Bench(tmp_path).write(sweep={})
    workload = load_workload(path, profile="cpu")
    _, blocks = plan_sweep(workload, ())
    folder = create_run(tmp_path / "results", "tiny", "none")
    with fake_server() as (_, url):
        runner = runner_of(workload, folder, url)
        assert runner.run_block(blocks[0])
    assert not runner.run_block(blocks[1])
    assert "did not answer" in runner.failures[0].reason
    fresh = runner_of(workload, folder, url)
    with pytest.raises(UsageError, match="did not answer"):
        fresh.run_block(blocks[0])  # at the very start it is the user's mistake


def test_a_warm_up_that_hangs_is_a_measurement_error(tmp_path, monkeypatch):
    workload = load_workload(Bench(tmp_path).write(load={"timeout_s": 0.1}), profile="cpu")
    monkeypatch.setattr(warming, "_MARGIN_S", 0.0)
    monkeypatch.setattr(Up, "complete", lambda *args: time.sleep(0.5), raising=False)
    subject = MeasuredServer(workload.load, 0, Up(), {}, ServerInfo(), None, lambda: None)
    with pytest.raises(MeasurementError, match="warm-up request was not answered within"):
        warming.warm_up(subject, workload.load_points[0])
