"""Work in a run folder: locked, and ended in order by a signal, a full disk and an error."""

from __future__ import annotations

import errno
import os
import signal
import sys

import pytest

from kvbench.cli.run_guarded import guarded
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.runs.work import kept, work_in

GO_ON = kept("kvbench sweep --resume out")


@pytest.fixture(autouse=True)
def _hangup_is_not_ignored():
    """Under nohup the tests begin with SIGHUP ignored, and an ignored one stays so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def ended_by(path, do):
    """What was told, and how often the folder was closed, by work that ``do`` ends."""
    told, closed = [], []
    try:
        with work_in(path, GO_ON, told.append) as work:
            work.close = lambda: closed.append(1)
            do(work)
            return told, closed, "done"
    except Exception as error:
        return told, closed, error
    return told, closed, "interrupted"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_work_and_names_the_way_on(tmp_path, number):
    told, closed, end = ended_by(tmp_path, lambda work: os.kill(os.getpid(), number))
    assert end == "interrupted" and len(closed) == 1
    assert told == [f"stopped by {number.name}; {GO_ON}"]


def test_a_hangup_that_nohup_has_ignored_stays_ignored(tmp_path):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _, _, end = ended_by(tmp_path, lambda work: os.kill(os.getpid(), signal.SIGHUP))
    assert end == "done"


def test_a_second_signal_does_not_interrupt_the_closing_and_handlers_are_put_back(tmp_path):
    closed, before = [], [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with work_in(tmp_path, GO_ON, lambda text: None) as work:
        work.close = lambda: closed.append(os.kill(os.getpid(), signal.SIGINT))
        os.kill(os.getpid(), signal.SIGTERM)
    assert closed == [None] and [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_terminal_that_is_gone_does_not_turn_an_interruption_into_an_error(tmp_path):
    def gone(text):
        raise OSError(errno.EIO, "Input/output error")

    with work_in(tmp_path, GO_ON, gone):
        os.kill(os.getpid(), signal.SIGHUP)


def test_output_that_nobody_reads_closes_the_folder_and_ends_with_141(tmp_path, capsys):
    told, closed = [], []

    def run():
        with work_in(tmp_path, GO_ON, told.append) as work:
            work.close = lambda: closed.append(1)
            try:
                raise BrokenPipeError
            except BrokenPipeError:
                sys.exit(1)  # as rich does
        return 0

    assert guarded(run) == 141 and closed == [1] and told == []
    assert "SIGPIPE" in capsys.readouterr().err


@pytest.mark.parametrize("closes", [True, False])
def test_a_full_disk_is_a_measurement_error_with_the_folder_and_the_way_on(tmp_path, capsys, closes):
    def fill(work):
        if not closes:
            work.close = lambda: fill(work)
        raise OSError(errno.ENOSPC, "No space left on device")

    _, closed, end = ended_by(tmp_path, fill)
    assert isinstance(end, MeasurementError) and str(tmp_path) in str(end) and GO_ON not in str(end)
    assert len(closed) == closes and GO_ON in capsys.readouterr().err


def test_other_errors_close_the_folder_and_stay_what_they_are(tmp_path, capsys):
    def fails(error):
        def do(work):
            raise error

        return ended_by(tmp_path, do)[1:]

    for error in (ZeroDivisionError(), UsageError("wrong"), OSError(errno.ECHILD, "no child")):
        assert fails(error) == ([1], error)
    assert capsys.readouterr().err == ""
    died = MeasurementError("the server died")
    assert fails(died) == ([1], died) and GO_ON in capsys.readouterr().err
