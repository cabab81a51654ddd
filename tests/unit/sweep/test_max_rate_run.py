"""A whole rate search over a queue whose waiting times are known in closed form; every run kept and resumable."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from scipy.optimize import brentq

from kvbench.calibration.calibrate import CalibrationSettings
from kvbench.common.errors import EXIT_INCONCLUSIVE, EXIT_INVALID, EXIT_OK, MeasurementError
from kvbench.load.client_figures import Clocked, client_figures
from kvbench.load.validity import invalid_reasons
from kvbench.metrics.latency import summarise
from kvbench.metrics.model import LoadMetrics
from kvbench.sweep.load_folder import LoadFolder
from kvbench.sweep.rate_run import RateSearch, RunLength, answer_sentence, client_alone, request_times
from kvbench.sweep.rate_search import Bounds, RateInterval, SearchAnswer, parse_conditions
from kvbench.sweep.show_load import StoredLoad
from tests.unit.calibration.test_calibration import taken

TWO_RATES = Bounds(1.0, 0.1, 2.0, 0.2)
AT_LEAST = RateInterval(1.9, None, None)
SERVICE_S = 0.1
N = 500  # requests of a run
CLIENT = client_figures([], [0.04] * 5000, [Clocked(cpu_s=9.9)], "open", 10.0)  # lagged, and used all of a core


def waiting_cdf(t: float, rate: float, service: float) -> float:
    """P(wait <= t) of an M/D/1 queue (Erlang 1909; Tijms, "A First Course in Stochastic Models", 2003, sec. 9.2)."""
    rho = rate * service
    terms = [
        (-rate * (t - k * service)) ** k / math.factorial(k) * math.exp(rate * (t - k * service))
        for k in range(int(t / service) + 1)
    ]
    return (1 - rho) * math.fsum(terms)


def md1_capacity(quantile: float, limit_s: float) -> float:
    """The rate at which that quantile of the time in an M/D/1 queue of SERVICE_S equals ``limit_s``."""
    return brentq(lambda rate: waiting_cdf(limit_s - SERVICE_S, rate, SERVICE_S) - quantile, 0.01, 0.999 / SERVICE_S)


class Queue:
    """Stands in for a server: one request after the other, each SERVICE_S; its answer is one token at its end.

    ``invalid``: whether the run of that number is disturbed by other work. ``client_limit``: the highest rate that the
    client can send. ``in_parallel_s``: seconds of each request, as many at once as come. ``runs``: rate, requests and
    number of each.
    """

    def __init__(self, invalid=lambda number: False, client_limit=math.inf, in_parallel_s=None):
        self.runs: list[tuple[float, int, int]] = []
        self.invalid, self.client_limit, self.in_parallel_s = invalid, client_limit, in_parallel_s

    def folder(self, rate, number):
        """That of a run, as a load leaves it."""
        path = self.path / "runs" / f"{number:02d}-r{rate:g}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def measure(self, rate, count, number):
        self.runs.append((rate, count, number))
        starts = np.cumsum(np.random.default_rng([7, number]).exponential(1 / rate, count))
        answered, free = [], 0.0
        for start in starts:
            free = max(start, free) + SERVICE_S
            answered.append(free)
        rows = pd.DataFrame(
            {
                "index": range(count), "session": None, "class": "a", "t0": starts, "ts": starts, "first": answered,
                "last": answered, "end": answered, "chunk_times": [[e] for e in answered], "output_tokens": 1,
                "prompt_tokens": 4, "ok": True, "error_kind": None,
            }
        )  # fmt: skip
        metrics = summarise(rows, {"mode": "open"}, {"ttft_ms": 500.0})
        if self.in_parallel_s is not None:
            rows["end"] = rows["t0"] + self.in_parallel_s
        out = self.folder(rate, number)
        rows.to_parquet(out / "requests.parquet")
        reasons = ["foreign work"] if self.invalid(number) else []
        if rate > self.client_limit:
            own = invalid_reasons(CLIENT, 0)
            (out / "load.json").write_text(json.dumps({"client": CLIENT.to_json(), "invalid_reasons": own}))
            reasons += own
        return StoredLoad(valid=not reasons, invalid_reasons=tuple(reasons), metrics=metrics)


def answer(search):
    return json.loads((search.folder.path / "search.json").read_text())


@pytest.fixture
def new(tmp_path):
    """A search in a folder; ``.printed``: what it printed."""

    def make(queue, slo="p95_ttft<=500ms", bounds=None, length=None, width=200, **fields):
        folder = LoadFolder(tmp_path / "out", {})
        queue.path = folder.path
        folder.path.mkdir(exist_ok=True)
        console = Console(file=io.StringIO(), width=width)
        bounds, length = bounds or Bounds(1.0, 0.1, 100.0), length or RunLength(N, 0.0)
        search = RateSearch(parse_conditions(slo), bounds, length, folder, queue.measure, console, **fields)
        search.printed = console.file
        return search

    return make


def test_a_rate_at_which_answers_are_wrong_is_missed(new):
    class Forgetful(Queue):
        def measure(self, rate, count, number):
            wrong = "1 of 9 canaries was answered wrongly" if rate > 2.5 else None
            kept = super().measure(rate, count, number)
            return kept.model_copy(update={"valid": not wrong, "wrong_answers": wrong})

    search = new(Forgetful())
    assert search.run() == EXIT_OK
    assert 2.5 / 1.1 < answer(search)["max_rate"] < 2.5 * 1.1
    assert "missed: wrong answers" in search.printed.getvalue()


def test_the_capacity_of_a_queue_is_found_and_a_stopped_search_goes_on_from_its_runs(new):
    capacity = md1_capacity(0.95, 0.5)
    assert capacity < 0.8 / SERVICE_S  # well under saturation: the SLO binds, not the growth of the queue
    whole, length = Queue(), RunLength(2000, 0.0)
    search = new(whole, length=length)
    assert search.run() == EXIT_OK
    found = answer(search)
    known = found["interval"]
    assert found["outcome"] == "found" and known["confidence"] == 0.95
    assert known["low"] <= capacity <= known["high"] <= known["low"] * 1.1
    assert known["low"] < found["max_rate"] < known["high"]
    assert len({number for _, _, number in whole.runs}) == len(whole.runs)  # other requests in every run
    assert f"{len(whole.runs)} runs with {2000 * len(whole.runs):,} requests" in found["answer"]
    assert f"{known['low']:.2f} to {known['high']:.2f}" in found["answer"]
    runs = sorted((search.folder.path / "runs").iterdir())
    assert len(runs) == len(whole.runs) and all((run / "requests.parquet").is_file() for run in runs)
    first = json.loads((runs[0] / "metrics.json").read_text())
    assert first["trial"]["rate"] == 1.0 and first["trial"]["met"] and first["metrics"]["completed"] == 2000
    assert all(bool(row["missed"]) == (row["met"] is False) for row in found["runs"])
    assert "missed: p95 ttft" in search.printed.getvalue()
    (runs[-1] / "metrics.json").unlink()  # stopped within its last run
    rest = Queue()
    again = new(rest, length=length)
    assert again.run() == EXIT_OK and rest.runs == whole.runs[-1:]
    assert answer(again) == found
    done = Queue()
    assert new(done, length=length).run() == EXIT_OK and done.runs == []


def test_six_invalid_runs_end_the_search_with_their_reason_and_are_measured_again(new):
    search = new(Queue(invalid=lambda number: number >= 3))
    assert search.run() == EXIT_INVALID and search.can_continue
    found = answer(search)
    assert found["outcome"] == "invalid" and "foreign work" in found["reason"]
    assert found["interval"]["high"] is None and 1 < found["interval"]["low"] <= 2
    assert found["reason"] in search.printed.getvalue()
    assert [run["rate"] for run in found["runs"]] == [1, 2, *[4] * 6]
    again = new(Queue(), bounds=TWO_RATES)  # which needs fewer runs than there were
    assert again.run() == EXIT_OK
    assert sorted(p.name for p in (again.folder.path / "runs").iterdir()) == [r["run"] for r in answer(again)["runs"]]


@pytest.mark.parametrize("first_invalid", [1, 2])
def test_without_a_rate_that_met_the_slo_no_lower_end_is_claimed(new, first_invalid):
    search = new(Queue(invalid=lambda number: number >= first_invalid), bounds=Bounds(50.0, 0.1, 100.0))
    assert search.run() == EXIT_INVALID
    found = answer(search)
    assert found["max_rate"] is None
    if first_invalid == 1:
        assert found["interval"] is None and "Not known" in found["answer"]
    else:
        assert found["interval"]["low"] is None and "less than" in found["answer"]


def test_a_load_that_could_not_be_driven_is_as_an_invalid_run(new):
    class Broken(Queue):
        def measure(self, rate, count, number):
            if rate > 3:
                raise MeasurementError("the load client ended with exit code 4: refused")
            return super().measure(rate, count, number)

    bounds = Bounds(1.0, 0.1, 4.0, 0.2)
    search = new(Broken(), bounds=bounds)
    assert search.run() == EXIT_INVALID and "refused" in answer(search)["reason"] and search.can_continue
    assert [run["met"] for run in answer(search)["runs"]] == [True, True, *[None] * 6]
    repaired = Queue()
    again = new(repaired, bounds=bounds)
    assert again.run() == EXIT_OK and repaired.runs[0][0] == 4  # from where it was lost, with what was measured
    assert [run["met"] for run in answer(again)["runs"]][:3] == [True, True, True]


def test_what_the_answer_says_of_the_runs_behind_it(new):
    few, printed_before = RunLength(70, 0.0, enough=False, unit="conversations"), []

    class Watched(Queue):
        def measure(self, *run):
            printed_before.append(search.printed.getvalue())
            return super().measure(*run)

    search = new(Watched(), bounds=TWO_RATES, length=few, width=40)
    assert search.run() == EXIT_OK
    text, runs = answer(search)["answer"], len(search.runs)
    assert f"{runs} runs with {70 * runs} requests" in text and "70 completed" in text and "130" in text
    assert "at least" in text and "--max-rate is 2" in text and "21%" in text  # sqrt(3 / 70): the least overload shown
    assert "run 1: 1 conversations/s, 70 conversations" in printed_before[0] and "run 2:" not in printed_before[0]
    assert "…" not in search.printed.getvalue(), "the table is not cut where lines are short"

    def sentence(requests, failed, length, interval=AT_LEAST):
        runs = [
            dataclasses.replace(
                run, requests=requests, failed=failed, trial=dataclasses.replace(run.trial, arrivals=requests)
            )
            for run in search.runs
        ]
        return answer_sentence(SearchAnswer("found", interval), search.conditions, runs, search.bounds, length)

    assert "fewer" not in sentence(130, 0, few) and "129 completed" in sentence(130, 1, few)
    assert "overload" not in sentence(130, 0, RunLength(1, 0.0, overload=0.05, patience_s=0.5))
    whole = sentence(130, 0, few, RateInterval(1.9, 1.95, 2.0))
    assert "1.95 conversations/s (95 % interval 1.90 to 2.00)" in whole
    assert "less than 2.00 conversations/s" in sentence(130, 0, few, RateInterval(None, None, 2.0))


def test_a_run_that_is_too_short_to_show_a_growing_queue_is_repeated_longer(new):
    loose, bounds, length = "p95_ttft<=3600s", Bounds(1.0, 0.5, 2.0), RunLength(20, 20.0, enough=False)
    slow = Queue(in_parallel_s=40.0)
    search = new(slow, loose, bounds, length)
    assert search.run() == EXIT_OK
    assert [(rate, count) for rate, count, _ in slow.runs[:3]] == [(1, 20), (1, 160), (2, 320)]
    assert answer(search)["runs"][0]["cause"] == "too short to tell"
    (search.folder.path / "runs" / f"{len(slow.runs):02d}-r2" / "metrics.json").unlink()
    rest = Queue(in_parallel_s=40.0)
    new(rest, loose, bounds, length).run()
    assert [(rate, count) for rate, count, _ in rest.runs] == [(2, 320)]  # it still knows how long is long enough


def test_a_trace_that_is_too_short_to_tell_is_not_called_invalid(new):
    long = Queue(in_parallel_s=500.0)
    search = new(long, "p95_ttft<=3600s", Bounds(1.0, 0.5, 2.0), RunLength(60, 0.0, fixed=True))
    assert search.run() == EXIT_INCONCLUSIVE and not search.can_continue
    assert [(rate, count) for rate, count, _ in long.runs] == [(1, 60), (1, 60)]
    assert answer(search)["outcome"] == "too short to tell"
    assert "invalid" not in search.printed.getvalue().lower()


def test_a_run_that_cannot_end_in_time_is_not_begun(new):
    queue = Queue()
    search = new(queue, "p99_ttft<=500ms", Bounds(0.5, 0.1, 100.0), RunLength(1, 20.0), limit_s=600.0)
    assert search.run() == EXIT_INCONCLUSIVE and queue.runs == []  # 662 requests at 0.5/s are 22 minutes
    assert answer(search)["outcome"] == "out of time"
    assert "--max-minutes" in answer(search)["reason"] and "22:04" in answer(search)["reason"]


def test_a_run_that_outlasts_the_time_is_cut_and_run_again_on_resume(new, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("kvbench.sweep.rate_run.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(Queue):
        """Its second run goes on and on; it looks at the time as a load does."""

        def measure(self, rate, count, number):
            self.search.check_time()
            if number == 2:
                self.runs.append((rate, count, number))
                (self.folder(rate, number) / "client.log").write_text("half")
                now[0] = 61.0
                self.search.check_time()
            return super().measure(rate, count, number)

    few, bounds = RunLength(50, 0.0, enough=False), Bounds(1000.0, 0.1, 1e6)
    slow = Slow()
    slow.search = new(slow, bounds=bounds, length=few, limit_s=60.0)
    assert slow.search.run() == EXIT_INCONCLUSIVE and [number for _, _, number in slow.runs] == [1, 2]
    found = answer(slow.search)
    assert found["outcome"] == "out of time" and "500" in found["reason"]
    assert [run["rate"] for run in found["runs"]] == [1000] and slow.search.can_continue
    rest = Queue()
    again = new(rest, bounds=bounds, length=few)
    assert again.run() != EXIT_INVALID and rest.runs[0][0] == 500 and not again.can_continue


def test_where_the_client_is_the_limit_the_answer_says_so(new):
    search = new(Queue(client_limit=3.0), bounds=Bounds(1.0, 0.1, 100.0))
    assert search.run() == EXIT_INCONCLUSIVE
    found = answer(search)
    assert found["outcome"] == "the client was the limit" and 3 / 1.15 <= found["interval"]["low"] <= 3
    assert found["interval"]["high"] is None and "the client's timestamps lagged" in found["answer"]


def test_a_run_that_others_disturbed_as_well_is_not_the_clients_limit(new):
    search = new(Queue(invalid=lambda number: number > 1, client_limit=1.0), bounds=Bounds(1.0, 0.1, 2.0, 0.05))
    assert search.run() == EXIT_INVALID and answer(search)["outcome"] == "invalid"


def test_whose_figures_made_a_run_invalid(tmp_path):
    def of(*reasons, **more):
        return StoredLoad(invalid_reasons=reasons, metrics=LoadMetrics(), **more)

    lagged = invalid_reasons(CLIENT, 0)
    assert not client_alone(of("the load client ended with exit code 4"), tmp_path)  # no load.json
    client = CLIENT.to_json() | {"processes": [{"name": "worker 2"}]}
    of_load = [*lagged, f"worker 2: {lagged[0]}", "3 requests were never finished"]
    (tmp_path / "load.json").write_text(json.dumps({"client": client, "invalid_reasons": of_load}))
    assert client_alone(of(*lagged), tmp_path)
    assert client_alone(of(f"worker 2: {lagged[0]}"), tmp_path)
    assert not client_alone(of(*lagged, "3 requests were never finished"), tmp_path)
    why = "the client's ITL error"
    failed = taken(CalibrationSettings(4), (why,)).to_json()
    assert client_alone(of(why, calibration=failed), tmp_path)
    assert not client_alone(of(why, calibration=failed, disturbances=(why,)), tmp_path)


def test_a_conversation_is_in_flight_from_its_first_turn_to_its_last(tmp_path):
    rows = pd.DataFrame(
        {"index": [0, 1, 2, 3], "session": [5, 5, None, None], "t0": [0.0, 4.0, 1.0, 2.0], "end": [1.0, 6.0, 3.0, 9.0]}
    )
    rows.to_parquet(tmp_path / "r.parquet")
    assert sorted(zip(*request_times(tmp_path / "r.parquet"), strict=True)) == [(0.0, 6.0), (1.0, 3.0), (2.0, 9.0)]
