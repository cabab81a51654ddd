"""Prints the test files of the full ring that a change touches: ``python -m ci.touched [BASE]``.

A file is touched if it changed or uses a touched one: imports it, launches it, reads it as data, or names the plug-in
in it. Strings count like imports, so processes and lazy imports are seen. BASE is a commit (default: the last one that
is older than a day); files that git does not know yet have changed. Nothing is printed if nothing is touched.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

SHIPPED = ("kvbench", "engine", "kernels")
PACKAGES = (*SHIPPED, "ci", "tests")
FULL = "pytest.mark.full"
EVERY_TEST = ("constraints.txt", "pyproject.toml")  # each test depends on them
MODULE = re.compile(rf"(?<![\w./-])(?:kvbench_)?(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
LOADER = re.compile(r'"-m"|importlib')  # text of a file that loads modules by their names


def git(*words: str) -> list[str]:
    """Lists the lines that a git command prints."""
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.splitlines()


def changed_since(base: str | None) -> list[str]:
    """Lists the files that differ from ``base``, relative to the repository's root."""
    base = base or next(iter(git("rev-list", "-1", "--before=1 day ago", "HEAD")), None)
    tracked = git("diff", "--name-only", "--no-renames", base) if base else git("ls-files")  # without a base: all
    return tracked + git("ls-files", "--others", "--exclude-standard")


class Tree:
    """The files of a repository, and which use which.

    files: paths relative to the root, from which they are read. users: the files that use a file, directly.
    """

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self.root, self.files = root, set(files)
        self.by_folder = defaultdict[str, set[str]](set)  # modules
        self.by_name = defaultdict[str, set[str]](set)  # all files, by their last part
        for file in self.files:
            self.by_name[PurePosixPath(file).name].add(file)
            if file.endswith(".py"):
                self.by_folder[str(PurePosixPath(file).parent)].add(file)
        self.plugins = defaultdict[str, set[str]](set)  # modules, by the word that loads them
        for group in tomllib.loads(self.read("pyproject.toml"))["project"]["entry-points"].values():
            for words, place in group.items():
                self.plugins[words.split()[-1]] |= self.module(place.split(":")[0])
        self.fixtures = {
            file: {node.name for node in ast.parse(self.read(file)).body if isinstance(node, ast.FunctionDef)}
            for file in self.by_name["conftest.py"]
        }
        self.users = defaultdict[str, set[str]](set)
        for file in self.files:
            for used in self.uses(file) if file.endswith(".py") and file.startswith(PACKAGES) else ():
                self.users[used].add(file)
            if not file.endswith(".py"):
                self.users[file] |= self.readers(file)

    def touched_by(self, changed: Iterable[str]) -> set[str]:
        """Returns the files that changed, and all that use them at any distance."""
        new, touched = set(changed), set[str]()
        for file in [file for file in new if file in EVERY_TEST or file.endswith("conftest.py")]:
            folder = "tests/" if file in EVERY_TEST else file.removesuffix("conftest.py")
            new |= {other for other in self.files if other.startswith(folder)}
        while new:
            touched |= new
            new = {user for file in new for user in self.users[file]} - touched
        return touched

    def read(self, file: str) -> str:
        """Reads a file; one that is gone is empty."""
        path = self.root / file
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def module(self, dotted: str, folder: str = "", parts: int = 1) -> set[str]:
        """Finds the module, of that many parts or more, that a dotted name names or begins with."""
        words = dotted.removeprefix("kvbench_").split(".")  # engine/ and kernels/ are imported so
        for count in range(len(words), parts - 1, -1):
            path = folder + "/".join(words[:count])
            if modules := {f"{path}.py", f"{path}/__init__.py"} & self.files:
                return modules
        return set()

    def readers(self, file: str) -> set[str]:
        """Finds the modules next to a data file: its namesake, and in a shipped package the nearest above it."""
        path = PurePosixPath(file)
        namesake = {str(path.with_suffix(".py"))} & self.files
        folders = path.parents if path.parts[0] in SHIPPED else ()
        return namesake | next((self.by_folder[str(f)] for f in folders if self.by_folder[str(f)]), set())

    def uses(self, file: str) -> Iterator[str]:
        """Yields the files that a module uses, and some that do not exist."""
        text, folder = self.read(file), PurePosixPath(file).parent
        tree = ast.parse(text)
        docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    yield from self.module(prefix + alias.name) or self.module(prefix + alias.name, f"{folder}/")
            elif isinstance(node, ast.arg):
                conftests = {str(above / "conftest.py") for above in (folder, *folder.parents)}
                yield from (conftest for conftest in conftests if node.arg in self.fixtures.get(conftest, ()))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                yield from self.named(node.value, folder)
                if not file.startswith(SHIPPED):
                    yield from self.plugins.get(node.value, ())
                if LOADER.search(text):
                    yield from self.loaded(node.value)

    def named(self, text: str, folder: PurePosixPath) -> Iterator[str]:
        """Yields the files that a string names: as modules, by a path, by a pattern, or by a name that no other has."""
        for dotted in MODULE.findall(text):
            for module in self.module(dotted, parts=2):
                yield from (module, module.replace("__init__.py", "__main__.py"))
        if text.endswith(".py") and "*" in text:
            yield from (file for file in self.by_folder[str(folder)] if PurePosixPath(file).match(text))
        elif "." in text and not re.search(r"\s", text):
            same_name = self.by_name[PurePosixPath(text).name]
            yield from same_name if len(same_name) == 1 else same_name & {text, str(folder / text)}

    def loaded(self, text: str) -> Iterator[str]:
        """Yields the modules that a string loads: the main one of a package, all those of ``package.``."""
        yield f"{text}/__main__.py"
        if text.endswith("."):
            yield from self.by_folder.get(text[:-1].removeprefix("kvbench_").replace(".", "/"), ())


def touched_tests(tree: Tree, changed: Iterable[str]) -> list[str]:
    """Lists the test files of the full ring that a change of these files touches."""
    tests = (file for file in tree.touched_by(changed) if re.fullmatch(r"tests/(.*/)?test_\w+\.py", file))
    return sorted(file for file in tests if FULL in tree.read(file))


if __name__ == "__main__":
    all_files = git("ls-files", "--cached", "--others", "--exclude-standard")
    changed = changed_since(sys.argv[1] if len(sys.argv) > 1 else None)
    print(*touched_tests(Tree(Path(), all_files), changed), sep="\n")
