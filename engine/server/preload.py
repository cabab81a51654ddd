"""Imports what a server needs that computes on a CPU, for a process that forks itself into servers.

It sets OpenMP up as a server does, since that is read with torch; it starts no threads and computes nothing. A server
whose model is compiled, or whose engine has a process of its own (on a GPU), imports less or other modules and is
started plainly.
"""

from __future__ import annotations

import contextlib
import importlib

from engine.startup import no_garbage_collection, only_what_serving_needs, set_spin_count

_NEEDED = (
    "engine.build",
    "engine.server.__main__",
    "engine.server.http",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
    "transformers.models.llama.modeling_llama",  # of the model that ships, and the base of many others
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
)
_NEEDED_IF_INSTALLED = ("kernels.numba_backend", "uvicorn.loops.uvloop")


def _import_all() -> None:
    set_spin_count()
    with no_garbage_collection(), only_what_serving_needs(compiles=False):
        for module in _NEEDED:
            importlib.import_module(module)
        for module in _NEEDED_IF_INSTALLED:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)


_import_all()
