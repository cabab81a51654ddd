"""Time left, and what is printed where there is no terminal."""

from __future__ import annotations

import dataclasses
import io
import re
import threading
import time
from typing import Any

import pytest
from rich.console import Console

from kvbench.common.console import status_line
from kvbench.common.text import clock
from kvbench.effects.comparison import Call
from kvbench.runs.engine_time import EngineEffect, EngineTime
from kvbench.runs.results import LoadResult
from kvbench.sweep.progress import WINDOW_S, Estimator, LiveServer, SweepProgress, so_far
from kvbench.targets.choose import START_GUESS_S
from kvbench.targets.prometheus import MetricsSample
from kvbench.workload.design import make_design, plan_blocks
from kvbench.workload.load_section import load_point
from tests.support.sweep_parts import wait_until

LOADS = [load_point("closed", concurrency=c, rate=None, num_requests=8) for c in (1, 4)]
DESIGN = make_design({"layout": "paged", "page_size": 16}, {"page_size": [8]}, LOADS, "one_at_a_time")
CELLS = {cell.cell_id: cell for cell in DESIGN.cells}
GUESSES = {"c1": 1.0, "c4": 1.0}
BLOCKS = plan_blocks(DESIGN, 1, 0)
FIRST = BLOCKS[0].cells[0]


@pytest.fixture
def out():
    return io.StringIO()


def shown_in(out, terminal=False, width=60, blocks=BLOCKS, **how):
    """A display that writes to ``out``."""
    console = Console(file=out, force_terminal=terminal, width=width, color_system=None)
    return SweepProgress(console, blocks, Estimator(GUESSES), **how)


def test_what_is_decided_so_far_is_said_of_every_configuration_at_every_load():
    call = {1.3: Call.BETTER, 0.7: Call.WORSE, 1.0: Call.LEVEL, 1.01: Call.UNDECIDED}
    effects = [
        EngineEffect(
            cell=f"paged-{name}-c{users}", metric="output_throughput", ratio=ratio, low=ratio - 0.1, high=ratio + 0.1,
            call=call[ratio],
        )
        for name, users, ratio in (("p8", 1, 1.3), ("p8", 4, 0.7), ("p32", 1, 1.0), ("p32", 4, 1.01))
    ]  # fmt: skip
    measured = EngineTime(launches=2, seconds=65.0, effects=tuple(effects))
    design = make_design({"layout": "paged", "page_size": 16}, {"page_size": [8, 32]}, LOADS, "one_at_a_time")
    line = so_far(measured, design.only([cell for cell in design.cells if cell.cell_id != "paged-p8-c1"]))
    assert line.startswith("engine time after 2 launches, 1:05")
    assert "page 8 at c1 +30.0 % (+20.0 to +40.0), " in line and "page 8 at c4 -30.0 % (-40.0 to -20.0); " in line
    assert "level: " in line.split("; ")[-2] and line.endswith("page 32 at c4") and "undecided: " in line


def test_estimates_go_from_guess_to_measurement():
    estimator = Estimator({"c1": 10.0, "c4": 20.0})
    blocks = plan_blocks(DESIGN, 2, 0)
    assert estimator.total_s(blocks) == pytest.approx(4 * START_GUESS_S + 4 * 10 + 4 * 20)
    slow = Estimator({"c1": 10.0, "c4": 20.0}, 100.0)
    assert slow.total_s(blocks) == pytest.approx(4 * 100 + 4 * 10 + 4 * 20) and slow.guesses_starts
    slow.observe(CELLS["paged-p16-c1"], 10.0, server_start_s=90.0)
    assert slow.start_s() == 90.0 and not slow.guesses_starts
    estimator.observe(CELLS["paged-p16-c1"], 30.0, server_start_s=2.0)
    assert estimator.load_s(CELLS["paged-p16-c1"]) == 30.0  # the same cell
    assert estimator.load_s(CELLS["paged-p8-c1"]) == 30.0  # the same load elsewhere
    assert estimator.load_s(CELLS["paged-p8-c4"]) == 20.0  # the guess: none of that load is finished
    assert estimator.total_s(blocks) == pytest.approx(4 * 2.0 + 4 * 30 + 4 * 20)
    estimator.observe(CELLS["paged-p8-c1"], 50.0)
    assert estimator.load_s(CELLS["paged-p8-c1"]) == 50.0
    assert estimator.load_s(CELLS["paged-p16-c1"]) == 30.0


def test_a_block_is_expected_to_take_what_blocks_took_with_warm_up_and_the_servers_end():
    estimator, (block, *_) = Estimator(GUESSES), plan_blocks(DESIGN, 1, 0)
    for cell in block.cells:
        estimator.observe(cell, 10.0, server_start_s=3.0)
    estimator.observe_block(block, 30.0)
    assert estimator.total_s([block]) == pytest.approx(30.0)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (75.4, "1:15"), (4000, "1:06:40"), (-3, "0:00")])
def test_clock(seconds, text):
    assert clock(seconds) == text


def done(metrics, **more):
    return LoadResult.parse({"metrics": metrics, **more})


def test_one_plain_line_a_load_without_a_terminal(out):
    metrics = {"steady_output_throughput": 123.45, "ttft_ms": {"p95": 20.0}, "failed": 0}
    with shown_in(out) as progress:
        progress.status("starting")
        for cell, more in zip(BLOCKS[0].cells, ({}, {"server_start_s": 2.0}), strict=True):
            progress.load_started(cell, 1, 8)
            progress.load_progress(4, 8, 0, 0.5)
            progress.load_finished(cell, 1, done(metrics, **more))
        progress.load_failed(BLOCKS[1].cells[0], 1, "the server died [x]")
    first, second, third = out.getvalue().splitlines()
    assert first.startswith(f"[1/4] {FIRST.cell_id} repeat 1: 123.5 output tok/s, TTFT p95 20 ms")
    assert first.endswith("left, a guess)") and second.endswith("left)")
    assert "FAILED: the server died [x]" in third  # brackets are not markup


MOST = {"server_error": {"message": "Context size has been exceeded.", "requests": 32}}
REFUSED = {"completed": 20, "failed": 32, "failure_messages": MOST}
WINDOW = {"output_throughput": 60.0, "ttft_ms": {"p95": 700.0}}


@pytest.mark.parametrize(
    ("metrics", "refused", "says", "not_said"),
    [
        (WINDOW | {"steady_output_throughput": 80.0, "steady_latency": {"ttft_ms": {"p95": 200.0, "n": 8}}}, None,
         "80.0 output tok/s, TTFT p95 200 ms  (", "whole run"),
        (WINDOW, None, "60.0 output tok/s (whole run), TTFT p95 700 ms (whole run)  (", "REFUSED"),
        (REFUSED, None, '32 of 52 requests failed: "Context size has been exceeded."', "REFUSED"),
        (REFUSED, "served 20 of 52 requests", "REFUSED: served 20 of 52 requests", "invalid"),
    ],
)  # fmt: skip
def test_the_line_of_a_load_says_what_its_figures_are_of_and_what_was_refused(out, metrics, refused, says, not_said):
    with shown_in(out) as progress:
        progress.load_finished(FIRST, 1, done(metrics, refused=refused))
    assert says in out.getvalue() and not_said not in out.getvalue()


def test_a_long_load_and_a_slow_start_are_heard_of_without_a_terminal(out):
    with shown_in(out, quiet_s=0.02) as progress:
        progress.status("starting the server of [a]")
        wait_until(lambda: re.search(r"\[1/4, about .*\] starting the server of \[a\]: 0:0", out.getvalue()))
        progress.load_started(FIRST, 1, 8)
        progress.status("calibrating")  # after the load was announced
        progress.load_progress(3, 8, 1, 0.5)
        wait_until(lambda: f"{FIRST.cell_id} repeat 1: 3/8 requests, 1 failed, 0:0" in out.getvalue())
    assert not any(thread.name == "progress" for thread in threading.enumerate())  # and no more when it has ended


def test_a_long_load_of_its_own_is_heard_of_without_a_terminal(out):
    with status_line(Console(file=out), "warming up [x]", quiet_s=0.02) as update:
        wait_until(lambda: "warming up [x]" in out.getvalue())
        update("r1: 84/130 requests")
        wait_until(lambda: "r1: 84/130 requests" in out.getvalue())


def test_time_left_falls_to_zero():
    progress = SweepProgress(Console(file=io.StringIO()), BLOCKS, Estimator({"c1": 100.0, "c4": 100.0}))
    assert progress.time_left_s() == pytest.approx(400 + 2 * START_GUESS_S)
    progress.loads_begin_in(1000)  # engine time, before the loads
    assert progress.time_left_s() == pytest.approx(1400 + 2 * START_GUESS_S, abs=1)
    progress.loads_begin_in(0)
    for block in BLOCKS:
        for cell in block.cells:
            progress.load_failed(cell, 1, "x")
    assert progress.time_left_s() == 0


BUSY = {"num_requests_running": 18.0, "num_requests_waiting": 14.0, "kv_cache_usage_perc": 0.934}
IDLE = {"num_requests_running": 1.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.02}
SERVER = "412 tok/s, 18 running, 14 waiting, KV 93 %"


def reading(ago_s: float, tokens: float | None = None, gauges: Any = None) -> MetricsSample:
    counters = {} if tokens is None else {"generation_tokens_total": tokens}
    return MetricsSample(time.perf_counter() - ago_s, BUSY if gauges is None else gauges, counters)


def readings() -> list[MetricsSample]:
    """Two readings, the last one just now; 1,648 tokens in the 4 s between them."""
    return [reading(4.0, 0.0), reading(0.0, 1648.0)]


@pytest.mark.parametrize(
    ("samples", "width", "lines"),
    [
        # tokens are those of the last seconds, and the gauges those of the last reading
        (lambda: [reading(100.0, 0.0, IDLE), reading(WINDOW_S - 1, 50_000.0, IDLE), reading(0.0, 51_648.0)], 80,
         [SERVER]),
        (readings, 42, [SERVER]),
        (readings, 41, ["412 tok/s, 18 running, KV 93 %"]),
        (readings, 20, ["412 tok/s, KV 93 %"]),
        (readings, 10, ["412 tok/s"]),
        (lambda: [], 80, []),  # what a server does not tell is not shown
        (lambda: [reading(0.0, gauges={})], 80, []),
        (lambda: [reading(1.0), reading(0.0, gauges={"num_requests_running": 2.0})], 80, ["2 running"]),
        (lambda: [reading(0.0, 7.0)], 80, ["18 running, 14 waiting, KV 93 %"]),  # one reading is no rate
        (lambda: [reading(WINDOW_S + 2, 0.0), reading(WINDOW_S + 1, 400.0)], 80, []),  # it is read no more
    ],
)  # fmt: skip
def test_what_a_live_line_says_of_a_server_and_leaves_out_where_it_is_narrow(samples, width, lines):
    server = LiveServer()
    for each in samples():
        server.take(each)
    assert list(server.rows(width)) == lines


def test_while_a_load_runs_its_server_is_shown_too_in_a_row_of_its_own_or_in_the_same_line():
    for terminal in (True, False):
        out = io.StringIO()
        with shown_in(out, terminal, 80, quiet_s=0.02) as progress:
            progress.load_started(FIRST, 1, 8)
            for each in readings():
                progress.server_read(each)
            progress.load_progress(5, 8, 0, 1.0)
            between = r"\s*\n" if terminal else ", "
            pattern = rf"{FIRST.cell_id} repeat 1: 5/8 requests, 0:0\d{between}{SERVER}"
            wait_until(lambda out=out, pattern=pattern: re.search(pattern, out.getvalue()))
            progress.load_failed(FIRST, 1, "x")
            said = len(out.getvalue())
            wait_until(lambda out=out, said=said: "between loads" in out.getvalue()[said:])
            progress.load_started(BLOCKS[0].cells[1], 1, 8)  # nothing is known of its server yet
            wait_until(lambda out=out: f"{BLOCKS[0].cells[1].cell_id} repeat 1: 0:0" in out.getvalue())
            assert "running" not in out.getvalue()[said:]


@pytest.mark.parametrize("width", [120, 80, 60, 46, 30])
def test_a_narrow_terminal_shows_fewer_figures_and_no_cut_ones(out, width):
    with shown_in(out, True, width) as progress:
        progress.load_started(FIRST, 1, 8)
        for each in readings():
            progress.server_read(each)
        progress.load_progress(5, 8, 1, 61.0)
        wait_until(lambda: "KV 93 %" in out.getvalue())
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip("\r") for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= width and "…" not in out.getvalue() and FIRST.cell_id in out.getvalue()
    left_out = [words not in out.getvalue() for words in ("a guess", "requests", ", 0:0", "left", "failed", "5/8")]
    assert left_out == sorted(left_out, reverse=True), "the least important ones go first"
    assert sum(left_out) == {120: 0, 80: 1, 60: 3, 46: 4, 30: 6}[width]


def places(out) -> list[str]:
    return [line.split(" ")[0] for line in out.getvalue().splitlines()]


def test_a_load_that_is_measured_again_counts_once(out):
    with shown_in(out) as progress:
        for cell in (cell for block in BLOCKS for cell in block.cells):
            progress.load_failed(cell, 1, "disturbed")
        progress.expect([dataclasses.replace(BLOCKS[0], cells=(FIRST,))])
        progress.load_failed(FIRST, 1, "disturbed again")
    assert places(out) == ["[1/4]", "[2/4]", "[3/4]", "[4/4]", "[4/4]"]


def test_where_the_time_decides_how_many_loads_there_are_their_number_is_about_right(out):
    blocks = plan_blocks(DESIGN, 2, 0)
    with shown_in(out, blocks=blocks[:2], grows=True) as progress:
        progress.load_failed(blocks[0].cells[0], 1, "x")
        progress.expect([dataclasses.replace(blocks[0], cells=blocks[0].cells[1:]), *blocks[1:]])
        progress.load_failed(blocks[0].cells[1], 1, "x")
    assert places(out) == ["[1/~4]", "[2/~8]"]


def test_a_text_that_changes_is_asked_for_whenever_it_is_shown(out):
    shares = [12]
    with shown_in(out, quiet_s=0.02) as progress:
        progress.status(lambda: f"engine time, {shares[0]} % done")
        wait_until(lambda: "engine time, 12 % done: 0:0" in out.getvalue())
        shares[0] = 13
        wait_until(lambda: "engine time, 13 % done: 0:0" in out.getvalue())
