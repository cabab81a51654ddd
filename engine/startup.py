"""What a process does before and while it imports torch and loads a model. Imports no torch."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

# How long an OpenMP thread of torch spins for its next work before it sleeps (GNU OpenMP's default is nearly for ever).
# A thread that spins may keep the event loop or the load generator off its core; one that sleeps is late at the next of
# some 100 parallel regions a step. Measured on 2 cores, output tokens/s of llama-32m in process, alone / with one core
# kept busy by another process: default 552 / 109, 20000 519 / 175, 2000 about 420 / 283; TPOT of 3 streams over HTTP:
# 30000 11.8 ms, 5000 13.7, 2000 14.9.
SPIN_COUNT = "20000"

# How long a thread of Python keeps the interpreter lock while another one waits for it (5 ms by default).
SWITCH_SECONDS = 0.0005


def set_spin_count(count: str = SPIN_COUNT) -> None:
    """Call before torch is imported, which reads it once."""
    os.environ.setdefault("GOMP_SPINCOUNT", count)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """While modules and the model are loaded: a fifth of the time is collecting garbage where there is none.

    Their objects are left out of later collections too, which would stop all streams meanwhile.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def only_what_serving_needs(compiles: bool) -> Iterator[None]:
    """TODO"""
    yield
