"""Speeds up a process that imports torch and loads a model. Imports no torch."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

# Spins of torch's OpenMP threads for their next work before they sleep (GNU OpenMP's default is nearly for ever).
# A thread that spins may keep the event loop or the load generator off its core; one that sleeps is late at the next of
# some 100 parallel regions a step. Measured on 2 cores, output tokens/s of llama-32m in process, alone / with one core
# kept busy by another process: default 552 / 109, 20000 519 / 175, 2000 about 420 / 283; TPOT of 3 streams over HTTP:
# 30000 11.8 ms, 5000 13.7, 2000 14.9.
SPIN_COUNT = "20000"

# Seconds a Python thread keeps the interpreter lock while another one waits for it, in a process whose event loop
# serves the streams of its engine's thread. Measured on 2 cores, 256 streams, a device that takes 5 ms a step, time
# from step to step at 5 ms (Python's default) / 0.5 / 0.1: 8.0 ms, 6.7, 7.1; in another sitting the last two 5.8 and
# 5.7, so they are not told apart (medians of four undisturbed runs each).
SWITCH_SECONDS = 0.0001


def set_spin_count(count: str = SPIN_COUNT) -> None:
    """Set OpenMP's spin count. Call before torch is imported, which reads it once."""
    os.environ.setdefault("GOMP_SPINCOUNT", count)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Stop garbage collection while modules and the model are loaded, where it takes a fifth of the time.

    Their objects are left out of later collections too, which would stop all streams meanwhile.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


LEFT_OUT = (  # packages that transformers imports if installed, and no served model calls
    "scipy",  # for training losses
    "sklearn",  # for assisted generation; needs scipy
    "accelerate",  # for offloading
)


@contextlib.contextmanager
def only_what_serving_needs(compiles: bool) -> Iterator[None]:
    """Leave out what no served model calls, while transformers is imported and a model is loaded.

    Left out of transformers: its package's own code (``_transformers_on_demand``), ``LEFT_OUT`` and sharding over
    processes (torch.distributed.tensor), which are taken as not installed. Left out of torch, unless the model
    ``compiles``: torch._dynamo with torch._inductor, which transformers imports only for decorators that matter to
    torch.compile.
    """
    import torch

    distributed = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        with contextlib.ExitStack() as hidden:
            for package in LEFT_OUT:
                hidden.enter_context(_hidden(package))
            if not compiles:
                hidden.enter_context(_compiler_on_demand())
            with _hidden("kernels"):  # PyPI's, which transformers would use
                _transformers_on_demand()
                import transformers.modeling_utils  # noqa: F401
            yield
    finally:
        torch.distributed.is_available = distributed


def import_engine(*more: str, compiles: bool) -> None:
    """Import what builds engines, the model that ships (the base of many others) and ``more``, in half the time."""
    with no_garbage_collection(), only_what_serving_needs(compiles):
        for module in ("kvbench_engine.build", "transformers.models.llama.modeling_llama", *more):
            importlib.import_module(module)


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Leave torch out while transformers is imported for its tokenizers, in a process that computes nothing."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would warn that there is no torch
    with _hidden("torch"):
        _transformers_on_demand()
        yield


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Hide ``package`` from imports in all threads; does nothing if it is imported already."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


class _OnDemand(types.ModuleType):
    """A stand-in for a module, whose own code runs when an unknown name is asked for.

    ``values``: names and their values. ``places``: names, each with the submodule that defines it; one that has moved
    in another release is found by the module's own code. Submodules are imported as ever.
    """

    def __init__(self, name: str, values: Mapping[str, Any], places: Mapping[str, str] | None = None):
        super().__init__(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        self.__spec__, self.__file__, self.__package__ = spec, spec.origin, spec.parent
        if spec.submodule_search_locations is not None:
            self.__path__ = list(spec.submodule_search_locations)
        vars(self).update(values)
        self._places = places or {}
        sys.modules[name] = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # read by the import system
            raise AttributeError(name)
        submodule = f"{self.__name__}.{name}"
        if "__path__" in vars(self) and importlib.util.find_spec(submodule) is not None:
            return importlib.import_module(submodule)
        if name in self._places:
            with contextlib.suppress(ImportError, AttributeError):
                return getattr(importlib.import_module(f"{self.__name__}.{self._places[name]}"), name)
        self.withdraw()
        return getattr(importlib.import_module(self.__name__), name)

    def withdraw(self) -> None:
        """Let the next import find the module itself."""
        package, _, name = self.__name__.rpartition(".")
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        if package in sys.modules and vars(sys.modules[package]).get(name) is self:
            delattr(sys.modules[package], name)


_PLACES = {
    "AttentionInterface": "modeling_utils",
    "AutoConfig": "models.auto.configuration_auto",
    "AutoModelForCausalLM": "models.auto.modeling_auto",
    "AutoTokenizer": "models.auto.tokenization_auto",
    "PreTrainedConfig": "configuration_utils",
    "PreTrainedModel": "modeling_utils",
    "PreTrainedTokenizer": "tokenization_python",
    "PreTrainedTokenizerFast": "tokenization_utils_tokenizers",
}


def _transformers_on_demand() -> None:
    """Import transformers without reading the files of all models, which takes 0.3 s.

    transformers and transformers.models read them, and transformers.processing_utils, which models import for a name of
    typing.
    """
    if "transformers" in sys.modules:
        return
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return
    package = _OnDemand("transformers", {"__version__": version}, _PLACES)
    _OnDemand("transformers.models", {})
    _OnDemand("transformers.processing_utils", {"Unpack": typing.Unpack})
    getattr(package, "dependency_versions_check", None)  # raises ImportError, as the package itself does


_COMPILER = "torch._dynamo"


def _mark(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A decorator, with or without arguments, that changes nothing."""
    return (lambda decorated: decorated) if function is None else function


@contextlib.contextmanager
def _compiler_on_demand() -> Iterator[None]:
    """Import torch._dynamo only if more is needed than decorators that mark a function for it."""
    if _COMPILER in sys.modules:
        yield
        return
    decorators = ("allow_in_graph", "assume_constant_result", "disable", "disallow_in_graph")
    module = _OnDemand(_COMPILER, dict.fromkeys(decorators, _mark))
    try:
        yield
    finally:
        module.withdraw()
