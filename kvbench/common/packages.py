"""The packages that belong together.

PyPI has another package that is imported as ``kernels`` (Hugging Face's). Where that one comes first, nothing here
would work, and the errors would not say why.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvbench.common.errors import UsageError

REPOSITORY = Path(__file__).resolve().parents[2]


def foreign_package(name: str) -> str | None:
    """Finds where another package of that name would be imported from; None when it is ours. Imports nothing."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return "nowhere (it is not installed)"
    places = [Path(p).resolve() for p in spec.submodule_search_locations or ()]
    places += [Path(spec.origin).resolve().parent] if spec.origin else []
    return None if REPOSITORY / name in places else str(places[0] if places else spec.origin)


def check_packages() -> None:
    """Raises UsageError when ``kernels`` or ``engine`` is another package than ours."""
    for name in ("kernels", "engine"):
        if place := foreign_package(name):
            raise UsageError(
                f"the package {name!r} would be imported from {place}, and kvbench's own is in {REPOSITORY / name}: "
                "another distribution uses that import name (Hugging Face's is called `kernels`); install kvbench in "
                "a virtual environment of its own"
            )
