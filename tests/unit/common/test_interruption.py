"""A signal ends a sweep, wherever it arrives."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from kvbench.common.errors import Interrupted, Interruption


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
