"""Writes one CSV line per engine step: its work, and the use of all KV slots after it."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from typing import TextIO

from kvbench_engine.counters import StepRecord
from kvbench_engine.kv.manager import LEDGER, KVStats

FLUSH_SECONDS = 1.0  # the file lags behind by at most this
_STEP = tuple(field.name for field in dataclasses.fields(StepRecord) if field.name != "kv")
_KV = tuple(field.name for field in dataclasses.fields(KVStats))
COLUMNS = ("time_s", *_STEP, *(f"kv_{name}" for name in _KV), *(f"ledger_{place}" for place in LEDGER))
"""``time_s``: seconds of the monotonic clock at the end of the step, as in the stamps of a stream; then the fields of
``StepRecord``, those of ``KVStats`` behind ``kv_``, and slots by place behind ``ledger_`` (they add up to
``kv_slots_total``)."""

_log = logging.getLogger(__name__)


class StepLog:
    """Overwrites ``path``, header first. Call ``write`` on the engine's thread, ``close`` on any.

    Raises:
        ValueError: the file cannot be written; one sentence.
    """

    def __init__(self, path: str):
        self.path = path
        self._lock = threading.Lock()
        self._flushed = time.monotonic()
        try:
            self._file: TextIO | None = open(path, "w", buffering=2**16, encoding="ascii")  # noqa: SIM115
            self._file.write(",".join(COLUMNS) + "\n")
            self._file.flush()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ValueError(f"the step log {path!r} cannot be written ({reason}): choose another --step-log") from None

    def write(self, record: StepRecord) -> None:
        """Write one line. A disk error ends the log, not the engine."""
        now, kv = time.monotonic(), record.kv
        ledger = kv.ledger()
        values = [f"{now:.6f}"]
        values += [str(getattr(record, name)) for name in _STEP]
        values += [str(getattr(kv, name)) for name in _KV]
        values += [str(ledger[place]) for place in LEDGER]
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(",".join(values) + "\n")
                idle = not record.running and not record.waiting  # the next step may be far away
                if idle or now - self._flushed >= FLUSH_SECONDS:
                    self._file.flush()
                    self._flushed = now
            except OSError as error:
                _log.warning("the step log %r ends here: %s", self.path, error)
                self._close()

    def close(self) -> None:
        """Flush and close; further calls do nothing."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:
            _log.warning("the last lines of the step log %r are lost: %s", self.path, error)
