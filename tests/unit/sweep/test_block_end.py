"""A block ends where it is told to, and leaves no server; a sweep ends where nothing is answered."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import Mock

import pytest

from kvbench.common.errors import Interrupted, MeasurementError
from kvbench.measure.http import HttpInstrument, TargetInstrument
from kvbench.measure.instrument import Job
from kvbench.metrics.model import LoadMetrics
from kvbench.runs.folder import create_run
from kvbench.runs.results import LoadResult
from kvbench.sweep.block import BlockRunner, Unanswered, why_unanswered
from kvbench.sweep.order import Measured
from kvbench.sweep.run import UnansweredError, _ends_without_answers
from kvbench.targets.base import Target
from kvbench.workload.design import plan_sweep
from kvbench.workload.file import load_workload
from tests.support.sweep_parts import Bench, Up


class Starting(Target):
    """A server whose start takes until it is told to end."""

    def __init__(self):
        self.stop = Mock()

    def start(self, settings, log):
        for _ in range(10):
            self.check()
        pytest.fail("it was not told")


def test_a_start_asks_whether_to_go_on(tmp_path):
    workload = load_workload(Bench(tmp_path).write(sweep={}), profile="cpu")
    _, blocks = plan_sweep(workload, ())
    target, asked = Starting(), []

    def check():
        asked.append(1)
        if len(asked) == 3:
            raise Interrupted("SIGTERM")

    job = Job(workload, create_run(tmp_path, "tiny", "none"), lambda: target, check=check)
    runner = BlockRunner(HttpInstrument(job))
    with pytest.raises(Interrupted):
        runner.run_block(blocks[0])
    target.stop.assert_called_once()


ANSWERED = {"completed": 1, "failed": 5}
LATE = {"timeout": {"message": "not done within 1 s", "requests": 6}}
UNANSWERED = {"completed": 0, "failed": 6, "failure_messages": LATE}


@pytest.fixture
def sent(tmp_path):
    """Runs a block of three loads that end so; what the sweep is told of those that were sent."""

    def run(*ends, on_sent=None, target=None, **load):
        path = Bench(tmp_path).write(sweep={}, load={"concurrency": [1, 2, 3], **load})
        workload = load_workload(path, profile="cpu")
        told, results = [], iter(ends)

        class Ending(TargetInstrument):
            def send(self, *arguments):
                if isinstance(end := next(results), dict):
                    return LoadResult.parse({"metrics": end})
                error = MeasurementError("the server stopped answering")
                error.after, error.answered = end, int(end.split()[1]) if end.startswith("after") else None
                self.target.gone = self.target.gone or end == "dies"
                raise error

        folder = create_run(tmp_path / "results", "tiny", "none")
        hook = on_sent or (lambda cell, unanswered: told.append(unanswered and unanswered.reason))
        runner = BlockRunner(Ending(Job(workload, folder, lambda: target or Up())), on_sent=hook)
        runner.run_block(plan_sweep(workload, ())[1][0])
        return told

    return run


def test_a_load_that_was_sent_tells_why_it_was_not_answered(sent):
    assert sent(UNANSWERED, ANSWERED, ANSWERED) == [
        '6 of 6 requests failed: timeout: "not done within 1 s"',
        None,
        None,
    ]
    (hung,) = sent("after 0 of 6 requests", "after 1 of 6 requests", "")  # some were answered; none was sent
    assert hung == "after 0 of 6 requests: the server stopped answering"
    assert sent("after 0 of 6 requests", *3 * ["dies"], target=Up(gone=True)) == []  # a server of ours that died


@pytest.mark.parametrize(("reset", "state", "starts"), [(None, "cold", 3), (True, "cold", 1), (None, "steady", 1)])
def test_a_server_that_cannot_empty_its_cache_is_started_for_each_load(sent, monkeypatch, reset, state, starts):
    monkeypatch.setattr(Up, "reset_prefix_cache", lambda self: reset)
    started = []
    monkeypatch.setattr(Up, "start", lambda self, settings, log: started.append(log))
    assert sent(*3 * [ANSWERED], cache_state=state) == [None] * 3 and len(started) == starts


@pytest.mark.parametrize(
    ("before", "ends", "goes_on"),
    [
        ({}, (UNANSWERED,), False),
        ({}, ("after 0 of 6 requests",), False),
        ({}, (ANSWERED, UNANSWERED, UNANSWERED), True),
        ({("a", 1): {"metrics": ANSWERED}}, 3 * (UNANSWERED,), True),  # before --resume
        ({("a", 1): {"metrics": UNANSWERED}}, (UNANSWERED,), False),
    ],
)
def test_a_load_without_an_answer_ends_a_sweep_unless_there_was_one_before(tmp_path, sent, before, ends, goes_on):
    load = load_workload(Bench(tmp_path).write(load={"timeout_s": 5.0}), profile="cpu").load
    on_sent = _ends_without_answers(load, 2, Measured({load: LoadResult.parse(done) for load, done in before.items()}))
    if goes_on:
        sent(*ends, on_sent=on_sent)
        return
    with pytest.raises(UnansweredError) as error:
        sent(*ends, on_sent=on_sent)
    assert "-o load.timeout_s=15 (it is 5)" in str(error.value)


@pytest.mark.parametrize(
    ("load", "smaller"),
    [
        ({"concurrency": 2}, "-o load.concurrency=1,"),
        ({"concurrency": 1}, "shorter prompts and outputs"),
        ({"mode": "open", "concurrency": None, "request_rate": 3.0}, "-o load.request_rate=1.5,"),
        ({"mode": "open", "concurrency": None, "request_rate": "inf"}, "shorter prompts and outputs"),
    ],
)
def test_what_would_be_a_smaller_load_is_an_option_to_copy(tmp_path, load, smaller):
    workload = load_workload(Bench(tmp_path).write(load=load), profile="cpu")
    cell = plan_sweep(workload, ())[0].cells[0]
    with pytest.raises(UnansweredError, match=f"send .*{smaller}"):
        _ends_without_answers(workload.load, 2, Measured({}))(cell, Unanswered("late"))


REJECTED = UNANSWERED | {"rejected_by_server": 6}


@pytest.mark.parametrize(
    ("configurations", "loads", "ends_at"),
    [
        (2, [("a", REJECTED), ("a", REJECTED), ("b", ANSWERED), ("a", UNANSWERED)], None),  # whatever block is first
        (2, [("b", ANSWERED), ("a", REJECTED), ("a", REJECTED)], None),
        (3, [("a", REJECTED), ("b", REJECTED)], 1),
        (1, [("a", REJECTED)], 0),  # no other is planned
        (2, [("a", REJECTED | {"rejected_by_server": 5})], 0),
        (2, [("a", REJECTED), ("b", UNANSWERED)], 1),
    ],
)
def test_a_configuration_that_rejects_every_request_is_a_finding_whatever_the_order(
    tmp_path, configurations, loads, ends_at
):
    workload = load_workload(Bench(tmp_path).write(), profile="cpu")
    on_sent = _ends_without_answers(workload.load, configurations, Measured({}))
    for position, (config_id, metrics) in enumerate(loads):
        cell = Mock(configuration=Mock(config_id=config_id), load=Mock(concurrency=2, request_rate=None, timeout_s=5.0))
        with pytest.raises(UnansweredError) if position == ends_at else nullcontext():
            on_sent(cell, why_unanswered(LoadMetrics.model_validate(metrics)))
