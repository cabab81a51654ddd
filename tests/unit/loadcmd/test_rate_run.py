"""A whole rate search over a queue whose waiting times are known in closed form; every run kept and resumable."""

from __future__ import annotations

import io
import json
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from scipy.optimize import brentq

from kvbench.errors import EXIT_INCONCLUSIVE, EXIT_INVALID, EXIT_OK, MeasurementError, UsageError
from kvbench.load.probe import client_report, invalid_reasons
from kvbench.load.schema import LoadConfig
from kvbench.load_folder import LoadFolder
from kvbench.metrics import summarise
from kvbench.rate_plan import SearchPlan, Sizes, at_rate, mean_rate, require_searchable
from kvbench.rate_run import RateSearch, _visits, client_alone
from kvbench.rate_search import Bounds, parse_conditions

SERVICE_S = 0.1
N = 4000  # requests of a run


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
    """Stands in for a server: one request after the other, each SERVICE_S; its answer is one token at its end."""

    def __init__(self, invalid=lambda number: False):
        self.asked: list[tuple[float, int, int]] = []
        self.invalid = invalid

    def measure(self, rate, count, number, out):
        self.asked.append((rate, count, number))
        rng = np.random.default_rng([7, number])
        starts = np.cumsum(rng.exponential(1 / rate, count))
        ends, free = [], 0.0
        for start in starts:
            free = max(start, free) + SERVICE_S
            ends.append(free)
        rows = pd.DataFrame(
            {
                "index": range(count), "session": None, "class": "a", "t0": starts, "ts": starts, "first": ends,
                "last": ends, "end": ends, "chunk_times": [[e] for e in ends], "output_tokens": 1, "prompt_tokens": 4,
                "ok": True, "error_kind": None,
            }
        )  # fmt: skip
        rows.to_parquet(out / "requests.parquet")
        metrics = summarise(rows, {"mode": "open"}, {"ttft_ms": 500.0})
        bad = self.invalid(number)
        return {"valid": not bad, "invalid_reasons": ["foreign work"] if bad else [], "metrics": metrics}


@pytest.fixture
def new(tmp_path):
    """A search in a folder; ``.told``: what it printed."""

    def make(queue, slo="p95_ttft<=500ms", bounds=None, sizes=None, **fields):
        folder = LoadFolder(tmp_path / "out", {})
        folder.path.mkdir(exist_ok=True)
        console = Console(file=io.StringIO(), width=200)
        bounds = bounds or Bounds(1.0, 0.1, 100.0, 0.02)
        sizes = sizes or Sizes(N, 0.0)
        made = RateSearch(parse_conditions(slo), bounds, sizes, folder, queue.measure, console, **fields)
        made.told = console.file
        return made

    return make


def answer(search):
    return json.loads((search.folder.path / "search.json").read_text())


def test_the_capacity_of_a_queue_is_found(new):
    capacity = md1_capacity(0.95, 0.5)
    assert capacity < 0.8 / SERVICE_S  # well under saturation: the SLO binds, not the backlog
    queue = Queue()
    search = new(queue)
    assert search.run() == EXIT_OK
    found = answer(search)
    assert found["outcome"] == "found" and found["confirmed"]
    assert found["highest_rate_met"] == pytest.approx(capacity, rel=0.06)
    assert found["highest_rate_met"] < found["lowest_rate_not_met"] <= found["highest_rate_met"] * 1.02
    assert found["lowest_rate_not_met"] > capacity * 0.94
    assert len({number for _, _, number in queue.asked}) == len(queue.asked)  # other requests in every run
    assert "Highest rate that met p95_ttft<=500ms" in search.told.getvalue()
    sent_for = N / found["highest_rate_met"]
    assert f"({2 * N} requests in 2 runs that sent for {sent_for:.0f} s)" in found["answer"]


def test_several_conditions_hold_together(new):
    search = new(Queue(), "p95_ttft<=500ms,goodput>=99%")
    search.run()
    tighter = answer(search)["highest_rate_met"]
    assert tighter == pytest.approx(md1_capacity(0.99, 0.5), rel=0.06) and tighter < md1_capacity(0.95, 0.5) * 0.97


def test_a_saturated_queue_is_not_met_however_loose_the_slo(new):
    search = new(Queue(), "p95_e2el<=3600s", sizes=Sizes(400, 0.0))
    search.run()
    assert 9.0 < answer(search)["highest_rate_met"] < 11.5  # 10/s is what the queue can serve
    assert any("the backlog grew" in " ".join(run["reasons"]) for run in answer(search)["runs"])


def test_every_run_is_kept_and_a_stopped_search_goes_on_from_them(new):
    whole = Queue()
    search = new(whole)
    search.run()
    runs = sorted((search.folder.path / "runs").iterdir())
    assert len(runs) == len(whole.asked) and all((run / "requests.parquet").is_file() for run in runs)
    first = json.loads((runs[0] / "metrics.json").read_text())
    assert first["trial"]["rate"] == 1.0 and first["trial"]["met"] and first["metrics"]["completed"] == N
    expected = answer(search)
    (runs[-1] / "metrics.json").unlink()  # stopped within its last run
    rest = Queue()
    again = new(rest)
    assert again.run() == EXIT_OK and rest.asked == whole.asked[-1:]  # the second run of the end that was not met
    assert answer(again) == expected
    done = Queue()
    assert new(done).run() == EXIT_OK and done.asked == []


def test_invalid_runs_count_for_nothing_and_two_in_a_row_end_the_search(new):
    once = Queue(invalid=lambda number: number == 3)
    search = new(once)
    assert search.run() == EXIT_OK
    assert [rate for rate, _, _ in once.asked[:5]] == [1, 2, 4, 4, 8]
    assert answer(search)["highest_rate_met"] == pytest.approx(md1_capacity(0.95, 0.5), rel=0.06)


def test_the_reason_of_invalid_runs_is_the_answer(new):
    search = new(Queue(invalid=lambda number: number >= 3))
    assert search.run() == EXIT_INVALID
    found = answer(search)
    assert found["outcome"] == "invalid" and found["highest_rate_met"] == 2 and "foreign work" in found["reason"]
    assert "foreign work" in search.told.getvalue()


def test_a_load_that_could_not_be_driven_is_as_an_invalid_run(new):
    class Broken(Queue):
        def measure(self, rate, count, number, out):
            if rate > 3:
                raise MeasurementError("the load client ended with exit code 4: refused")
            return super().measure(rate, count, number, out)

    search = new(Broken())
    assert search.run() == EXIT_INVALID and "refused" in answer(search)["reason"]
    assert [run["met"] for run in answer(search)["runs"]] == [True, True, None, None]
    repaired = Queue()
    again = new(repaired)
    assert again.run() == EXIT_OK and repaired.asked[0][0] == 4  # from where it was lost, with what was measured
    assert [run["met"] for run in answer(again)["runs"]][:3] == [True, True, True]


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
    monkeypatch.setattr("kvbench.rate_run.time", SimpleNamespace(monotonic=lambda: now[0]))

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
    assert [run["rate"] for run in told["runs"]] == [1000]
    rest = Queue()
    assert new(rest, bounds=bounds, sizes=few).run() == EXIT_OK and rest.asked[0][0] == 500


def test_too_few_requests_for_a_percentile_are_said_and_what_so_short_a_run_cannot_show(new):
    search = new(Queue(), bounds=Bounds(1.0, 0.1, 2.0), sizes=Sizes(50, 0.0, enough=False))
    search.run()
    text = answer(search)["answer"]
    assert "(100 requests in 2 runs that sent for 25 s, fewer than the 130 that a percentile needs)" in text
    assert "up to --max-rate 2" in text and "show an overload only from 24% on" in text  # sqrt(3 / 50)
    waiting = Sizes(1, 0.0, tolerance=0.05, patience_s=0.5)
    search = new(Queue(), bounds=Bounds(1.0, 0.1, 2.0), sizes=waiting)
    search.run()
    assert "Runs this short" not in answer(search)["answer"]


def test_a_trace_that_is_too_short_to_tell_is_not_called_invalid(new):
    class Long(Queue):
        def measure(self, rate, count, number, out):
            kept = super().measure(rate, count, number, out)
            rows = pd.read_parquet(out / "requests.parquet")
            rows["end"] = rows["t0"] + 500.0
            rows.to_parquet(out / "requests.parquet")
            return kept

    long = Long()
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


def test_a_run_has_enough_requests_for_its_percentiles_and_its_seconds():
    p95, p99 = parse_conditions("p95_ttft<=1s"), parse_conditions("p95_ttft<=1s,p99_e2el<=9s")
    assert Sizes(48, 20.0).requests(2.0, p95) == 130
    assert Sizes(48, 20.0).requests(2.0, p99) == 662
    assert Sizes(48, 20.0).requests(50.0, p95) == 1000
    assert Sizes(200, 20.0).requests(2.0, p95) == 200
    assert Sizes(30, 2.0, enough=False).requests(5.0, p99) == 30


CLASSES = [{"name": "a", "share": 1.0, "prompt_tokens": 8, "output_tokens": 4}]
OPEN = {
    "mode": "open", "request_rate": 4, "num_requests": 10, "prompts": {"kind": "synthetic", "classes": CLASSES},
}  # fmt: skip


def test_a_load_at_another_rate_is_the_same_but_for_rate_and_number():
    load = LoadConfig.model_validate(OPEN)
    changed = at_rate(load, 7.5, 33)
    assert changed.request_rate == (7.5,) and changed.count_for(7.5) == 33
    assert changed.prompts == load.prompts
    timed = LoadConfig.model_validate({**OPEN, "num_requests": None, "duration_s": 20})
    assert at_rate(timed, 7.5, 33).count_for(7.5) == 33 and not at_rate(timed, 7.5, 33).counted_by_time
    talk = LoadConfig.model_validate({**OPEN, "num_requests": None, "sessions": {"num_sessions": 4, "turns": 2}})
    assert at_rate(talk, 7.5, 33).sessions.num_sessions == (33,)


def test_a_trace_is_played_faster(tmp_path):
    trace = {"kind": "trace", "path": str(tmp_path / "t.csv"), "rate_scale": 2.0}
    load = LoadConfig.model_validate({"mode": "open", "arrivals": "trace", "prompts": trace})
    assert at_rate(load, 6.0, 99, native_rate=4.0).prompts.rate_scale == pytest.approx(3.0)
    arrivals = [type("R", (), {"arrival_s": t})() for t in (0.0, None, 1.0, 2.0)]
    assert mean_rate(arrivals) == pytest.approx(1.0)
    with pytest.raises(UsageError, match="all at once"):
        mean_rate(arrivals[:1])


def test_loads_without_one_rate_are_refused():
    ramp = {"arrivals": "ramp", "ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 9}
    load = LoadConfig.model_validate({**OPEN, "request_rate": None, **ramp})
    with pytest.raises(UsageError, match="arrivals are a ramp"):
        require_searchable(load, parse_conditions("p95_ttft<=1s"))
    with pytest.raises(UsageError, match="needs an SLO"):
        require_searchable(LoadConfig.model_validate(OPEN), parse_conditions("goodput>=90%"))


def test_bounds_follow_from_the_first_rate_and_what_is_given_wins():
    plan = SearchPlan("p95_ttft<=1s", None, None, None, 0.05, 9, 20.0, None, 60.0)
    bounds = plan.bounds(4.0)
    assert (bounds.start, bounds.low, bounds.high, bounds.max_runs) == (4.0, 4.0 / 64, 4096.0, 9)
    assert plan.bounds(None).start == 1.0
    tight = SearchPlan("p95_ttft<=1s", None, 6.0, 8.0, 0.05, 9, 20.0, None, 60.0)
    assert tight.bounds(4.0).start == 6.0 and tight.bounds(40.0).start == 8.0
    with pytest.raises(UsageError, match="--find-max-rate: 'p95' is no condition"):
        _ = SearchPlan("p95", None, None, None, 0.05, 9, 20.0, None, 60.0).parsed


def test_a_run_that_is_too_short_to_show_a_backlog_is_repeated_longer(new):
    class Slow(Queue):
        """As many at once as come, 40 s each: nothing of a backlog shows in 20 s of arrivals."""

        def measure(self, rate, count, number, out):
            kept = super().measure(rate, count, number, out)
            rows = pd.read_parquet(out / "requests.parquet")
            rows["end"] = rows["t0"] + 40.0
            rows.to_parquet(out / "requests.parquet")
            return kept

    slow = Slow()
    search = new(slow, "p95_ttft<=3600s", bounds=Bounds(1.0, 0.5, 2.0), sizes=Sizes(20, 20.0, enough=False))
    assert search.run() == EXIT_OK
    assert [(rate, count) for rate, count, _ in slow.asked] == [(1, 20), (1, 160), (2, 320), (2, 320)]
    assert "too short to tell" in answer(search)["runs"][0]["reasons"][0]
    (search.folder.path / "runs" / "04-r2" / "metrics.json").unlink()
    rest = Slow()
    new(rest, "p95_ttft<=3600s", bounds=Bounds(1.0, 0.5, 2.0), sizes=Sizes(20, 20.0, enough=False)).run()
    assert [(rate, count) for rate, count, _ in rest.asked] == [(2, 320)]  # it still knows how long is long enough


def test_a_conversation_is_in_flight_from_its_first_turn_to_its_last(new, tmp_path):
    rows = pd.DataFrame(
        {"index": [0, 1, 2, 3], "session": [5, 5, None, None], "t0": [0.0, 4.0, 1.0, 2.0], "end": [1.0, 6.0, 3.0, 9.0]}
    )
    rows.to_parquet(tmp_path / "r.parquet")
    starts, ends = _visits(tmp_path / "r.parquet")
    assert sorted(zip(starts, ends, strict=True)) == [(0.0, 6.0), (1.0, 3.0), (2.0, 9.0)]
