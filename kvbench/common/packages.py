"""Finds kvbench's own files: in its repository, or in the packages that pip has installed.

A file has the same name in both: ``workloads/mixed.yaml``, ``ci/gates.yaml``, ``engine/models/kvbench-tiny``.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from kvbench import IS_INSTALLED
from kvbench.common.errors import UsageError

REPOSITORY = Path(__file__).resolve().parents[2]  # the folder that holds the packages, where they are installed
IS_CHECKOUT = (REPOSITORY / "pyproject.toml").is_file()
SHIPPED = REPOSITORY if IS_CHECKOUT else REPOSITORY / "kvbench" / "shipped"  # setup.py
ENGINE, KERNELS = (REPOSITORY / f"{'' if IS_CHECKOUT else 'kvbench_'}{name}" for name in ("engine", "kernels"))
ENGINE_MODULE = "kvbench_engine" if IS_INSTALLED else "engine"  # of `python -m`
WORKLOADS = SHIPPED / "workloads"
ENGINE_NEEDS = ("torch", "transformers", "safetensors", "numba")


def missing_for_engine() -> list[str]:
    """Lists the packages that the built-in engine needs and that are not installed."""
    return [name for name in ENGINE_NEEDS if find_spec(name) is None]


def require_engine(what: str) -> None:
    """Raises UsageError where the packages that the built-in engine computes with are not installed.

    ``what``: that needs them, as the subject of a sentence.
    """
    if missing := missing_for_engine():
        raise UsageError(
            f"{what} needs the built-in engine, and {', '.join(missing)} cannot be imported: pip install "
            "'kvbench[engine]'"
        )


def shipped_path(name: str) -> Path:
    """Returns the place of a file or folder that kvbench may ship under this name."""
    first, _, rest = name.partition("/")
    return ENGINE / rest if first == "engine" else SHIPPED / name


def shipped_name(path: Path) -> str | None:
    """Returns the name that kvbench ships a file or folder under, None for one of the user's."""
    if path.is_relative_to(ENGINE):
        return (Path("engine") / path.relative_to(ENGINE)).as_posix()
    return path.relative_to(SHIPPED).as_posix() if path.is_relative_to(SHIPPED) else None


def find_file(path: Path) -> Path:
    """Returns a file of the user's, else the one that kvbench ships: as workloads/mixed.yaml, or as mixed."""
    candidates = (path, shipped_path(str(path)), WORKLOADS / f"{path}.yaml")
    return next((candidate for candidate in candidates if candidate.is_file()), path)
