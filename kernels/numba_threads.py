"""Runs the CPU kernels on torch's own OpenMP team, entered through GOMP_parallel.

The engine alternates torch GEMMs and decode attention, eight and more times a step. After a
parallel region torch's OpenMP threads spin for a while, waiting for the next one. Threads of
other runtimes then compete with them for the same cores. Measured on two cores, one
``mm [16, 512] x [512, 1408]`` then one decode attention over 16 x 1024 tokens, per layer:

    torch's own team, by GOMP_parallel    1.0 ms
    Numba threading layer omp             1.0 ms   (when it resolves to the very same libgomp)
    Numba threading layer workqueue       2.0 ms
    a Python thread pool over nogil code  1.9 ms

On a machine whose cores are shared with other busy processes that spinning is what hurts: with a
load of 5 on two cores, 8 layers of the above over 16 x 512 tokens took 87-209 ms (mean) by default and
20-28 ms with GOMP_SPINCOUNT=2000 or OMP_WAIT_POLICY=PASSIVE, which libgomp reads when torch is
imported. That is for the process that runs an engine to set, not for this package.

GOMP_parallel costs one call, shares the team that is awake already, and follows
``torch.set_num_threads``. Builds of torch without GNU OpenMP entry points run on one thread.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from numba import types

from kvbench_kernels.numba_memory import call_work, compile_c


class ThreadTeam(NamedTuple):
    """Addresses of C functions: GOMP_parallel, omp_get_thread_num, omp_get_num_threads."""

    parallel: int
    thread_num: int
    num_threads: int


@partial(compile_c, signature=types.void(types.intp, types.intp, types.uint32, types.uint32))
def run_serially(work, data, num_threads, flags):
    """Stands in for GOMP_parallel where torch brings no OpenMP: the worker on the calling thread."""
    call_work(work, data)


@partial(compile_c, signature=types.int32())
def serial_thread_num():
    """Stands in for omp_get_thread_num in run_serially."""
    return 0


@partial(compile_c, signature=types.int32())
def serial_num_threads():
    """Stands in for omp_get_num_threads in run_serially."""
    return 1


@cache
def thread_team() -> ThreadTeam:
    """The team of torch's OpenMP runtime, found through the libraries that torch links; else serial."""
    for library in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            runtime = ctypes.CDLL(str(library))
            names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
            return ThreadTeam(*(ctypes.cast(getattr(runtime, n), ctypes.c_void_p).value for n in names))
        except (OSError, AttributeError):
            continue
    return ThreadTeam(run_serially.address, serial_thread_num.address, serial_num_threads.address)
