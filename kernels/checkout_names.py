"""Lets the folders of a checkout be imported as `engine` and `kernels`: by scripts, and as earlier commits called them.

    python -m engine.server          of a commit that lies somewhere and is not installed
    from kernels import get_backend  of a script that measures two commits: whichever the import path has first

Each module is there once: ``engine.config`` is ``kvbench_engine.config``, and both come from the checkout whose folder
was found, not from one that is installed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_CHECKOUT = Path(__file__).resolve().parents[1]
_FOLDERS = ("engine", "kernels")
_PREFIX = "kvbench_"


class CheckoutNames(MetaPathFinder, Loader):
    """Finds ``kvbench_engine`` and ``kvbench_kernels`` in this checkout, and the modules below ``shared`` names."""

    checkout = _CHECKOUT

    def __init__(self) -> None:
        self.shared = set[str]()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.startswith(_PREFIX) and (folder := fullname.removeprefix(_PREFIX)) in _FOLDERS:
            file = _CHECKOUT / folder / "__init__.py"
            return spec_from_file_location(fullname, file, submodule_search_locations=[str(file.parent)])
        if fullname.partition(".")[0] not in self.shared or not (real := find_spec(_PREFIX + fullname)):
            return None
        is_package = real.submodule_search_locations is not None
        spec = spec_from_loader(fullname, self, origin=real.origin, is_package=is_package)
        spec.has_location = True
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(_PREFIX + spec.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = module.__spec__.loader_state  # the import system has set that of the other name

    def get_code(self, fullname: str) -> CodeType:
        """Returns the code that ``python -m`` runs."""
        real = find_spec(_PREFIX + fullname)
        return real.loader.get_code(real.name)


def finder() -> CheckoutNames:
    """Returns this checkout's finder, which looks before all others. Each package runs this file for itself."""
    for other in sys.meta_path:
        if type(other).__name__ == CheckoutNames.__name__ and other.checkout == _CHECKOUT:
            return other
    sys.meta_path.insert(0, CheckoutNames())
    return sys.meta_path[0]


def share(folder: str) -> None:
    """Makes the package that is imported as ``folder`` the one that is imported as ``kvbench_<folder>``.

    Raises ImportError where the process has imported that one from another checkout.
    """
    names, package = finder(), import_module(_PREFIX + folder)
    if Path(package.__file__).resolve().parent != _CHECKOUT / folder:
        raise ImportError(f"{_PREFIX}{folder} is imported from {package.__file__} already: import {folder} before")
    sys.modules[folder] = package
    names.shared.add(folder)
