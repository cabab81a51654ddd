"""Prints the test files of the full ring that a change touches: ``python -m ci.touched [BASE]``.

A file is touched if the change touches it, or a module that it imports, at any distance. A data file of a package
touches the package. BASE is a commit (default: the last one that is older than a day). Nothing is printed if nothing is
touched.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import grimp

PACKAGES = ("kvbench", "engine", "kernels", "ci", "tests")
FULL = "pytest.mark.full"


def changed_since(base: str | None) -> list[str]:
    """Lists the files that differ from ``base``, relative to the repository's root."""
    if base is None:
        older = ["git", "rev-list", "-1", "--before=1 day ago", "HEAD"]
        base = subprocess.run(older, capture_output=True, text=True, check=True).stdout.strip()
        if not base:
            return [str(path) for package in PACKAGES for path in Path(package).rglob("*.py")]  # all is new
    names = ["git", "diff", "--name-only", base]
    return subprocess.run(names, capture_output=True, text=True, check=True).stdout.split()


def touched_modules(files: Iterable[str], graph: grimp.ImportGraph) -> set[str]:
    """Returns the modules that ``files`` are or belong to, and all that import these at any distance."""
    touched: set[str] = set()
    for file in map(PurePosixPath, files):
        name = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        changed = {name}
        if file.suffix != ".py":
            name = ".".join(file.parent.parts)
            changed = {name, *graph.find_descendants(name)} if name in graph.modules else set()
        touched |= changed
        for module in changed & graph.modules:
            touched |= graph.find_downstream_modules(module)
    return touched


def imports_of(path: Path) -> set[str]:
    """Returns the modules and names that a test file imports, as dotted names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def touched_tests(base: str | None, tests: Iterable[Path]) -> list[Path]:
    """Lists those of ``tests`` that belong to the full ring and are touched by what changed since ``base``."""
    files = changed_since(base)
    modules = touched_modules(files, grimp.build_graph(*PACKAGES, cache_dir=None))
    return [
        path
        for path in tests
        if FULL in path.read_text(encoding="utf-8") and (str(path) in files or imports_of(path) & modules)
    ]


if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else None
    print(*touched_tests(given, sorted(Path("tests").rglob("test_*.py"))), sep="\n")
