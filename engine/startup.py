"""What a process does before and while it imports torch and loads a model. Imports no torch."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

# How long an OpenMP thread of torch spins for its next work before it sleeps (GNU OpenMP's default is nearly for ever).
# A thread that spins may keep the event loop or the load generator off its core; one that sleeps is late at the next of
# some 100 parallel regions a step. Measured on 2 cores, output tokens/s of llama-32m in process, alone / with one core
# kept busy by another process: default 552 / 109, 20000 519 / 175, 2000 about 420 / 283; TPOT of 3 streams over HTTP:
# 30000 11.8 ms, 5000 13.7, 2000 14.9.
SPIN_COUNT = "20000"

# How long a thread of Python keeps the interpreter lock while another one waits for it, in a process whose event loop
# serves the streams of its engine's thread. Measured on 2 cores, 256 streams, a device that takes 5 ms a step, time
# from step to step at 5 ms (Python's default) / 0.5 / 0.1: 8.0 ms, 6.7, 7.1; in another sitting the last two 5.8 and
# 5.7, so they are not told apart (medians of four undisturbed runs each).
SWITCH_SECONDS = 0.0001


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
    """While transformers is imported and a model is loaded: leave out what no served model calls.

    Of transformers: training losses (scipy), offloading (accelerate) and sharding over processes
    (torch.distributed.tensor), each of which it takes as not installed. Of torch, unless the model ``compiles``:
    torch._dynamo with torch._inductor, which transformers imports only for decorators that matter to torch.compile.
    """
    import torch

    compiler = contextlib.nullcontext() if compiles else _compiler_on_demand()
    distributed = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        with _hidden("scipy"), _hidden("accelerate"), compiler:
            yield
    finally:
        torch.distributed.is_available = distributed


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """While transformers is imported for its tokenizers alone, in a process that computes nothing."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would warn that there is no torch
    with _hidden("torch"):
        yield


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
    """As if ``package`` were not installed, in all threads; does nothing if it is imported already."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


_COMPILER = "torch._dynamo"


class _CompilerOnDemand(types.ModuleType):
    """In the place of torch._dynamo: decorators that only mark a function for it leave the function as it is.

    Whatever else is asked of it comes from the real module, which is imported then.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of the import system
            raise AttributeError(name)
        if sys.modules.get(_COMPILER) is self:
            _withdraw(self)
        return getattr(importlib.import_module(_COMPILER), name)


def _mark(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A decorator, with or without arguments, that changes nothing."""
    return (lambda decorated: decorated) if function is None else function


@contextlib.contextmanager
def _compiler_on_demand() -> Iterator[None]:
    """torch._dynamo is imported only if more than its decorators is needed. Its submodules stay what they are."""
    if _COMPILER in sys.modules:
        yield
        return
    module, spec = _CompilerOnDemand(_COMPILER), importlib.util.find_spec(_COMPILER)
    assert spec is not None and spec.submodule_search_locations is not None
    module.__spec__, module.__path__ = spec, list(spec.submodule_search_locations)
    for name in ("allow_in_graph", "assume_constant_result", "disable", "disallow_in_graph"):
        setattr(module, name, _mark)
    sys.modules[_COMPILER] = module
    try:
        yield
    finally:
        _withdraw(module)


def _withdraw(module: types.ModuleType) -> None:
    """Let the next import of torch._dynamo find the real one."""
    if sys.modules.get(_COMPILER) is module:
        del sys.modules[_COMPILER]
    torch = sys.modules["torch"]
    if vars(torch).get("_dynamo") is module:
        delattr(torch, "_dynamo")
