"""How a rate search ends without the answer: time and runs over, runs too short, the client at its limit."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from kvbench.common.errors import EXIT_INCONCLUSIVE, EXIT_INVALID, EXIT_OK
from kvbench.load.validity import client_report, invalid_reasons
from kvbench.loadtest.max_rate.plan import Sizes
from kvbench.loadtest.max_rate.run import client_alone
from kvbench.loadtest.max_rate.search import Bounds
from tests.support.rate_queue import AllAtOnce, Queue, answer, md1_capacity


def test_the_number_of_runs_is_bounded(new):
    search = new(Queue(), bounds=Bounds(1.0, 0.1, 100.0, max_runs=3), sizes=Sizes(50, 0.0, enough=False))
    assert search.run() == EXIT_INCONCLUSIVE and len(answer(search)["runs"]) == 3
    assert "not confirmed" in answer(search)["answer"] and "--max-runs" in answer(search)["answer"]


def test_a_run_that_cannot_end_in_time_is_not_begun(new):
    queue = Queue()
    search = new(queue, "p99_ttft<=500ms", bounds=Bounds(0.5, 0.1, 100.0), sizes=Sizes(1, 20.0), limit_s=600.0)
    assert search.run() == EXIT_INCONCLUSIVE and queue.asked == []  # 662 requests at 0.5/s are 22 minutes
    assert answer(search)["outcome"] == "out of time"
    assert (
        "10 minutes were allowed (--max-minutes); the next run, at 0.5 requests/s, sends for 22.1"
        in (answer(search)["answer"])
    )


def test_a_run_that_outlasts_the_time_is_cut_and_run_again_on_resume(new, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("kvbench.loadtest.max_rate.run.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(Queue):
        """Its second run goes on and on; it looks at the time as a load does."""

        def measure(self, rate, count, number, out):
            self.search.check_time()
            if number == 2:
                self.asked.append((rate, count, number))
                (out / "client.log").write_text("half")
                now[0] = 61.0
                self.search.check_time()
            return super().measure(rate, count, number, out)

    few, bounds = Sizes(50, 0.0, enough=False), Bounds(1000.0, 0.1, 1e6)
    slow = Slow()
    slow.search = new(slow, bounds=bounds, sizes=few, limit_s=60.0)
    assert slow.search.run() == EXIT_INCONCLUSIVE and [number for _, _, number in slow.asked] == [1, 2]
    told = answer(slow.search)
    assert told["outcome"] == "out of time" and "the run at 500 requests/s was cut" in told["reason"]
    assert [run["rate"] for run in told["runs"]] == [1000] and slow.search.goes_on
    rest = Queue()
    again = new(rest, bounds=bounds, sizes=few)
    assert again.run() == EXIT_OK and rest.asked[0][0] == 500 and not again.goes_on


def test_a_trace_that_is_too_short_to_tell_is_not_called_invalid(new):
    long = AllAtOnce(500.0)
    search = new(long, "p95_ttft<=3600s", bounds=Bounds(1.0, 0.5, 2.0), sizes=Sizes(60, 0.0, fixed=True))
    assert search.run() == EXIT_INCONCLUSIVE
    assert [(rate, count) for rate, count, _ in long.asked] == [(1, 60), (1, 60)]
    assert answer(search)["outcome"] == "too short to tell"
    assert "invalid" not in search.told.getvalue().lower() and "too short to tell" in answer(search)["answer"]


CLIENT = client_report([], [0.04] * 5000, cpu_s=9.9, wall_s=10.0, mode="open")  # lagged, and used all of a core


class Busy(Queue):
    """A client that does not bear more than ``most`` requests/s, on a server that does."""

    def __init__(self, most, foreign=()):
        super().__init__()
        self.most, self.foreign = most, list(foreign)

    def measure(self, rate, count, number, out):
        kept = super().measure(rate, count, number, out)
        if rate <= self.most:
            return kept
        (out / "load.json").write_text(json.dumps({"client": CLIENT}))
        return kept | {"valid": False, "invalid_reasons": invalid_reasons(CLIENT, 0) + self.foreign}


def test_where_the_client_is_the_limit_the_answer_says_so(new):
    search = new(Busy(3.0), bounds=Bounds(1.0, 0.1, 100.0, 0.05))
    assert search.run() == EXIT_INCONCLUSIVE
    told = answer(search)
    assert told["outcome"] == "the client was the limit" and 3 / 1.05 <= told["highest_rate_met"] <= 3
    assert told["lowest_rate_not_met"] is None
    assert "the client, not the server, was the limit (the client's timestamps lagged" in told["answer"]
    assert "NOT MEASURED, the client was the limit" in search.told.getvalue()


def test_a_client_that_fails_above_the_servers_limit_does_not_hide_it(new):
    search = new(Busy(13.0), bounds=Bounds(5.0, 0.1, 100.0, 0.05))
    assert search.run() == EXIT_OK and answer(search)["highest_rate_met"] == pytest.approx(
        md1_capacity(0.95, 0.5), rel=0.08
    )


def test_a_run_that_others_disturbed_as_well_is_not_the_clients_limit(new):
    search = new(Busy(3.0, foreign=["other processes used 2 cores"]), bounds=Bounds(1.0, 0.1, 100.0, 0.05))
    assert search.run() == EXIT_INVALID and answer(search)["outcome"] == "invalid"


def test_whose_figures_made_a_run_invalid(tmp_path):
    lagged = invalid_reasons(CLIENT, 0)
    assert not client_alone({"invalid_reasons": ["the load client ended with exit code 4"]}, tmp_path)  # no load.json
    (tmp_path / "load.json").write_text(json.dumps({"client": CLIENT | {"processes": [{"name": "worker 2"}]}}))
    assert client_alone({"invalid_reasons": lagged}, tmp_path)
    assert client_alone({"invalid_reasons": [f"worker 2: {lagged[0]}"]}, tmp_path)
    assert not client_alone({"invalid_reasons": [*lagged, "3 requests were never finished"]}, tmp_path)
    calibrated = {"invalid_reasons": ["the client's ITL error"], "calibration": {"reasons": ["the client's ITL error"]}}
    assert client_alone(calibrated, tmp_path)
