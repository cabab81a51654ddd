"""Imports what a server needs that computes on a CPU, for a process that forks itself into servers.

It sets OpenMP up as a server does, since that is read with torch; it starts no threads and computes nothing. A server
whose model is compiled, or whose engine has a process of its own (on a GPU), imports less or other modules and is
started plainly.
"""

from __future__ import annotations

import importlib.util

from kvbench_engine.startup import import_engine, set_spin_count

_NEEDED = (
    "kvbench_engine.server.__main__",
    "kvbench_engine.server.http",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
)
_NEEDED_IF_INSTALLED = {"numba": "kvbench_kernels.numba_backend", "uvloop": "uvicorn.loops.uvloop"}  # package: module


def _import_all() -> None:
    set_spin_count()
    installed = [module for package, module in _NEEDED_IF_INSTALLED.items() if importlib.util.find_spec(package)]
    import_engine(*_NEEDED, *installed, compiles=False)


_import_all()
