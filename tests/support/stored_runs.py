"""The names of tests/support/synthetic_run.py that the history's tests import from here."""

from tests.support.synthetic_run import FIRST, MACHINE, repeat, write_run

__all__ = ["FIRST", "MACHINE", "repeat", "write_run"]
