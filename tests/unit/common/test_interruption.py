"""A signal ends a sweep, wherever it arrives."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from kvbench.common.errors import Interrupted
from kvbench.common.signals import Interruption


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_raised_once_and_handlers_are_put_back(number):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]

    def interrupted():
        with Interruption() as interruption:
            try:
                os.kill(os.getpid(), number)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)  # an impatient second one does not disturb the way out
                interruption.check()

    with pytest.raises(Interrupted) as raised:
        interrupted()
    assert raised.value.signal_name == number.name
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_that_arrives_where_exceptions_are_dropped_is_not_lost(monkeypatch):
    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)

    class Finaliser:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)

    with Interruption() as interruption:
        interruption.check()
        Finaliser()
        assert [type(d.exc_value) for d in dropped] == [Interrupted]
        with pytest.raises(Interrupted):
            interruption.check()
