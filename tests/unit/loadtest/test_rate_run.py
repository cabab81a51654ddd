"""A whole rate search over a queue whose waiting times are known in closed form; every run kept and resumable."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from kvbench.common.errors import EXIT_INVALID, EXIT_OK, MeasurementError
from kvbench.loadtest.max_rate.plan import Sizes
from kvbench.loadtest.max_rate.run import _visits
from kvbench.loadtest.max_rate.search import Answer, Bounds
from kvbench.loadtest.max_rate.text import say
from tests.support.rate_queue import SERVICE_S, AllAtOnce, N, Queue, answer, md1_capacity


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


def test_two_invalid_runs_in_a_row_count_for_nothing(new):
    once = Queue(invalid=lambda number: number in (3, 4))
    search = new(once)
    assert search.run() == EXIT_OK
    assert [rate for rate, _, _ in once.asked[:6]] == [1, 2, 4, 4, 4, 8]
    assert answer(search)["highest_rate_met"] == pytest.approx(md1_capacity(0.95, 0.5), rel=0.06)


def test_the_reason_of_invalid_runs_is_the_answer(new):
    search = new(Queue(invalid=lambda number: number >= 3))
    assert search.run() == EXIT_INVALID
    found = answer(search)
    assert found["outcome"] == "invalid" and found["highest_rate_met"] == 2 and "foreign work" in found["reason"]
    assert "foreign work" in search.told.getvalue() and found["answer"].endswith("foreign work.")
    assert [run["rate"] for run in found["runs"]] == [1, 2, 4, 4, 4]


def test_runs_that_are_measured_again_leave_nothing_behind(new):
    new(Queue(invalid=lambda number: number >= 3)).run()
    again = new(Queue(), bounds=Bounds(1.0, 0.1, 2.0))  # which needs fewer runs than there were
    assert again.run() == EXIT_OK
    assert sorted(p.name for p in (again.folder.path / "runs").iterdir()) == [r["run"] for r in answer(again)["runs"]]


def test_where_no_run_told_anything_nothing_is_said_to_be_missed(new):
    search = new(Queue(invalid=lambda number: True))
    assert search.run() == EXIT_INVALID and len(answer(search)["runs"]) == 3
    told = answer(search)["answer"]
    assert told.startswith("Not known whether any rate meets p95_ttft<=500ms") and "No rate met" not in told


def test_a_rate_below_which_nothing_was_judged_is_not_the_lowest_that_was_tried(new):
    search = new(Queue(invalid=lambda number: number > 1), bounds=Bounds(50.0, 0.1, 100.0))
    assert search.run() == EXIT_INVALID
    told = answer(search)["answer"]
    assert "50 requests/s, the lowest that was judged, did not" in told and "No rate met" not in told


def test_a_run_is_announced_before_it_begins_with_its_length_and_why_it_is_longer_than_asked(new):
    class Watched(Queue):
        """What had been said as each run began."""

        def measure(self, rate, count, number, out):
            before.append(search.told.getvalue())
            return super().measure(rate, count, number, out)

    before: list[str] = []
    search = new(Watched(), bounds=Bounds(1.0, 0.1, 2.0), sizes=Sizes(10, 3.0))
    search.run()
    first = "run 1: 1 requests/s, 130 requests, about 2:10 (--run-seconds 3 are only 3 arrivals, but p95 needs 130)"
    assert before[0].strip() == first
    assert "run 2: 2 requests/s, 130 requests, about 1:05" in before[1] and "about 1:05" not in before[0]


def test_a_load_that_could_not_be_driven_is_as_an_invalid_run(new):
    class Broken(Queue):
        def measure(self, rate, count, number, out):
            if rate > 3:
                raise MeasurementError("the load client ended with exit code 4: refused")
            return super().measure(rate, count, number, out)

    search = new(Broken())
    assert search.run() == EXIT_INVALID and "refused" in answer(search)["reason"] and search.goes_on
    assert [run["met"] for run in answer(search)["runs"]] == [True, True, None, None, None]
    repaired = Queue()
    again = new(repaired)
    assert again.run() == EXIT_OK and repaired.asked[0][0] == 4  # from where it was lost, with what was measured
    assert [run["met"] for run in answer(again)["runs"]][:3] == [True, True, True]


def test_too_few_requests_for_a_percentile_are_said_and_what_so_short_a_run_cannot_show(new):
    search = new(Queue(), bounds=Bounds(1.0, 0.1, 2.0), sizes=Sizes(50, 0.0, enough=False))
    search.run()
    text = answer(search)["answer"]
    few = "50 completed in the smallest, fewer than the 130 that a percentile needs"
    assert f"(100 requests in 2 runs that sent for 25 s, {few})" in text
    assert "up to --max-rate 2" in text and "show an overload only from 24% on" in text  # sqrt(3 / 50)
    waiting = Sizes(1, 0.0, tolerance=0.05, patience_s=0.5)
    search = new(Queue(), bounds=Bounds(1.0, 0.1, 2.0), sizes=waiting)
    search.run()
    assert "Runs this short" not in answer(search)["answer"]


def test_runs_are_not_added_up_to_what_one_percentile_needs(new):
    search = new(Queue(), bounds=Bounds(1.0, 0.1, 2.0), sizes=Sizes(70, 0.0, enough=False))
    search.run()
    assert "(140 requests in 2 runs that sent for 35 s, 70 completed in the smallest, fewer" in answer(search)["answer"]

    def said(requests, failed):
        rows = [row | {"requests": requests, "arrivals": requests, "failed": failed} for row in search.rows]
        return say(Answer("found", 2.0, None, True), search.conditions, rows, search.bounds, search.sizes)

    assert "(260 requests in 2 runs that sent for 65 s)" in said(130, 0)
    assert "129 completed in the smallest, fewer than the 130" in said(130, 1)


def test_a_rate_of_conversations_is_called_one_and_a_run_sends_as_long_as_they_begin(new):
    search = new(Queue(), bounds=Bounds(1.0, 0.1, 2.0), sizes=Sizes(200, 0.0, unit="conversations"))
    search.run()
    assert "run 1: 1 conversations/s, 200 conversations" in search.told.getvalue()
    assert "run 1: 1 conversations/s: met" in search.told.getvalue() and "requests/s" not in search.told.getvalue()
    rows = [row | {"requests": 800} for row in search.rows]  # four turns each
    text = say(Answer("found", 2.0, None, True), search.conditions, rows, search.bounds, search.sizes)
    assert "2 conversations/s (1600 requests in 2 runs that sent for 100 s)" in text


def test_a_run_that_is_too_short_to_show_a_backlog_is_repeated_longer(new):
    slow = AllAtOnce(40.0)
    search = new(slow, "p95_ttft<=3600s", bounds=Bounds(1.0, 0.5, 2.0), sizes=Sizes(20, 20.0, enough=False))
    assert search.run() == EXIT_OK
    assert [(rate, count) for rate, count, _ in slow.asked] == [(1, 20), (1, 160), (2, 320), (2, 320)]
    assert "too short to tell" in answer(search)["runs"][0]["reasons"][0]
    (search.folder.path / "runs" / "04-r2" / "metrics.json").unlink()
    rest = AllAtOnce(40.0)
    new(rest, "p95_ttft<=3600s", bounds=Bounds(1.0, 0.5, 2.0), sizes=Sizes(20, 20.0, enough=False)).run()
    assert [(rate, count) for rate, count, _ in rest.asked] == [(2, 320)]  # it still knows how long is long enough


def test_the_table_is_not_cut_where_lines_are_short(new):
    search = new(Queue(), "p95_ttft<=500ms,p99_e2el<=9s", bounds=Bounds(1.0, 0.1, 2.0))
    search.console.width = 40
    search.run()
    lines = search.told.getvalue().splitlines()
    head = next(line for line in lines if "p95 ttft ms" in line)
    assert "p99 e2el ms" in head and "in flight" in head and "…" not in search.told.getvalue()


def test_a_conversation_is_in_flight_from_its_first_turn_to_its_last(new, tmp_path):
    rows = pd.DataFrame(
        {"index": [0, 1, 2, 3], "session": [5, 5, None, None], "t0": [0.0, 4.0, 1.0, 2.0], "end": [1.0, 6.0, 3.0, 9.0]}
    )
    rows.to_parquet(tmp_path / "r.parquet")
    starts, ends = _visits(tmp_path / "r.parquet")
    assert sorted(zip(starts, ends, strict=True)) == [(0.0, 6.0), (1.0, 3.0), (2.0, 9.0)]
