"""Sweeps whose server is killed, hung, or answers nonsense: an end within a bound, a sentence, a run to go on with.

They run beside one another, since most of them only wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.support.fire_bench import EITHER, Ended, FireBench, kinds, resumed_as_it_should
from tests.support.sweep_parts import complaints, finished, manifest

# name: (the endpoint that is struck, how, further fields of the rule, the reason told, repeats)
LOST = {
    "info killed": ("/server_info", "kill", {}, "the server was killed by signal 9", 1),
    "warm-up drip": ("plain", "drip_body", {}, "/v1/completions did not answer", 1),
    "warm-up page": ("plain", "page", {}, "200: <h1>hello", 1),
    "reset 500": ("/reset_prefix_cache", "status", {}, "/reset_prefix_cache answered 500", 1),
    "metrics endless": ("/metrics", "flood", {"from_s": 0.1}, "the answer is longer than 64 MiB", 1),
    "stream killed": ("stream", "mid_kill", {"first": 3}, "killed by signal 9", 2),
}
MOST_S = 120.0
# name: (load, rules)
MEASURED = {
    "few fail": (
        {"num_requests": 120, "concurrency": [8], "timeout_s": 10.0},
        [{"path": "stream", "do": "status", "status": 503, "first": 7, "count": 1}],
    ),
    "refused": (  # nobody listens for a moment: what is open goes on, and the second load finds the server again
        {"concurrency": [1, 2], "num_requests": 6},
        [{"path": "stream", "do": "refuse", "seconds": 0.5, "first": 3, "count": 1}],
    ),
}


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory) -> Iterator[dict[str, Future[tuple[FireBench, Ended]]]]:
    def lost(name: str) -> tuple[FireBench, Ended]:
        path, do, more, _, repeats = LOST[name]
        bench = FireBench(tmp_path_factory.mktemp(name.replace(" ", "-")))
        count = {} if path in ("/metrics", "plain") else {"count": 1}  # one poll or warm-up that fails is only counted
        rule = {"path": path, "do": do, "once_a_launch": str(bench.folder / "spent"), **count, **more}
        return bench, bench.fire(bench.workload(repeats=repeats), rules=[rule], FAKE_TOKEN_S="0.03")

    def measured(name: str) -> tuple[FireBench, Ended]:
        load, rules = MEASURED[name]
        bench = FireBench(tmp_path_factory.mktemp(name.replace(" ", "-")))
        return bench, bench.fire(bench.workload(repeats=1, **load), rules=rules)

    with ThreadPoolExecutor(4) as pool:
        yield {n: pool.submit(lost, n) for n in LOST} | {n: pool.submit(measured, n) for n in MEASURED}


@pytest.mark.parametrize("name", LOST)
def test_a_server_that_fails_costs_its_loads_and_a_sentence(sweeps, name):
    *_, words, repeats = LOST[name]
    bench, done = sweeps[name].result()
    found = manifest(bench.only_run())
    assert done.code == 4 and not done.left
    assert done.seconds < MOST_S
    assert found["status"] == "incomplete"
    (failure,) = found["failures"]
    assert failure["repeat"] == 1 and words in failure["reason"], failure
    assert failure["reason"] in done.output and "--resume" in done.output
    assert len(finished(bench.only_run())) == repeats - 1  # the other launch was measured


def test_resume_measures_what_was_lost_and_nothing_again(sweeps):
    bench, _ = sweeps["stream killed"].result()
    resumed_as_it_should(bench, loads=2)


def test_a_share_of_failures_within_the_limit_is_counted_and_no_more(sweeps):
    bench, done = sweeps["few fail"].result()
    run = bench.only_run()
    assert done.code in EITHER and manifest(run)["status"] == "complete"
    assert kinds(run) == {"1": {"http_error": 1}} and complaints(run) == []
    assert "1 failed" in done.output


def test_failures_beyond_the_limit_make_the_load_invalid_and_the_next_one_is_measured(sweeps):
    bench, done = sweeps["refused"].result()
    run = bench.only_run()
    assert done.code == 4 and manifest(run)["status"] == "complete" and not done.left
    (reason,) = complaints(run)
    assert "of 6 requests failed" in reason and "refused" in reason
    assert len(finished(run)) == 2
