"""The commits between GOOD and BAD: git's own bisect in a clone, reverted commits taken out, versions as commits.

The clone shares the repository's objects: the user's checkout, index and bisect state are not touched. A commit that a
later one reverts ("This reverts commit ...") cannot be why BAD is worse, but the commits between the two carry its
effect. They are tested as if it had been reverted right after them, which `git revert` does in the clone.

Versions of a package become commits of a repository of their own, each with its version in requirements.txt.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from kvbench.bisect.sentences import say
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.git import git, try_git
from kvbench.gate.compare.builds import Commit

INSTALL = "{python} -m pip install -r {worktree}/requirements.txt"  # builds a version of a package
_WHO = ("-c", "user.name=kvbench", "-c", "user.email=kvbench@localhost", "-c", "commit.gpgSign=false")
_REVERTS = re.compile(r"This reverts commit ([0-9a-f]{7,40})\b")
_VERSIONS = re.compile(r"Available versions: (.*)")
_INDEX_LIMIT_S = 120.0


@dataclass
class History:
    """A bisection from ``good`` to ``bad`` (full shas) in the clone ``folder`` of ``repo``.

    ``paths``: only commits that touch one of them are tested. ``skipped``: never tested, as the user wants.
    ``undone``: the commits that a later one reverts, and by which; of a part of a range those of the whole.
    """

    repo: Path
    folder: Path
    good: str
    bad: str
    first_parent: bool = False
    paths: Sequence[str] = ()
    skipped: Sequence[str] = ()
    undone: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        """Starts git's bisect. Raises UsageError where GOOD is not before BAD."""
        if not (self.folder / ".git").is_dir():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            git(self.folder.parent, "clone", "-q", "--shared", "--no-checkout", str(self.repo), self.folder.name)
        if try_git(self.folder, "merge-base", "--is-ancestor", self.good, self.bad) is None:
            before = try_git(self.folder, "merge-base", self.good, self.bad) or ""
            ends = {"good": self.good[:10], "bad": self.bad[:10], "base": before[:10]}
            raise UsageError(say("history.not_before", before == self.bad, **ends))
        if self.undone is None:
            self.undone = self._reverted()
        if self.paths and not git(self.folder, "rev-list", self.bad, "--not", self.good, "--", *self.paths).strip():
            raise UsageError(say("history.no_commit", paths=", ".join(self.paths)))
        try_git(self.folder, "bisect", "reset")
        how = ["--first-parent"] * self.first_parent
        git(self.folder, "bisect", "start", "--no-checkout", *how, self.bad, self.good, "--", *self.paths)
        if self.skipped:
            try_git(self.folder, "bisect", "skip", *self.skipped)

    def candidates(self) -> list[str]:
        """The commits of which one is the first bad one, as far as is known, the newest first."""
        goods = self._refs("good")
        how = ["--first-parent"] * self.first_parent
        listed = git(self.folder, "rev-list", *how, self._refs("bad")[0], "--not", *goods, "--", *self.paths)
        return listed.split()

    def next(self) -> str | None:
        """The commit that git wants tested; None when all are tested that can be."""
        left = set(self.candidates()) - {self._refs("bad")[0]} - set(self._refs("skip"))
        chosen = try_git(self.folder, "rev-parse", "--verify", "--quiet", "BISECT_HEAD") if left else None
        return chosen if chosen in left else None

    def mark(self, sha: str, answer: str) -> None:
        try_git(self.folder, "bisect", answer, sha)  # exit code 2: only skipped ones are left

    def commit(self, sha: str) -> Commit:
        """The commit to build for ``sha``, without what is reverted later. MeasurementError where git cannot do it."""
        subject = self._subject(sha)
        every = (self.undone or {}).items()
        carried = [undone for undone, by in every if self._has(sha, undone) and not self._has(sha, by)]
        if not carried:
            return Commit(self.repo, sha, sha, subject)
        scratch = self.folder.resolve().with_name("without-reverted")
        try:
            git(self.folder, "worktree", "add", "-q", "--force", "--detach", str(scratch), sha)
            for undone in carried:
                merge = ("-m", "1") if try_git(scratch, "rev-parse", "--verify", "--quiet", f"{undone}^2") else ()
                if try_git(scratch, *_WHO, "revert", "--no-edit", *merge, undone) is None:
                    raise MeasurementError(say("history.not_reverted", undone=undone[:10]))
            made = git(scratch, "rev-parse", "HEAD").strip()
            git(self.folder, "update-ref", f"refs/kvbench/{made}", made)
            # An object without a ref: whatever was built of the repository's other commits is kept and used.
            how = ("--no-write-fetch-head", "--no-tags", "--no-auto-maintenance")
            git(self.repo, "fetch", "-q", *how, str(self.folder.resolve()), f"refs/kvbench/{made}")
        finally:
            try_git(self.folder, "worktree", "remove", "--force", "--force", str(scratch))
        return Commit(self.repo, sha, made, subject)

    def title(self, sha: str) -> str:
        """Names a commit: 3fe141a2c0 'Batch the frees'."""
        return say("history.title", sha=sha[:10], subject=self._subject(sha))

    def _subject(self, sha: str) -> str:
        return git(self.folder, "log", "-1", "--format=%s", sha).strip()

    def parent(self, sha: str) -> str | None:
        """The first parent of a commit."""
        return try_git(self.folder, "rev-parse", "--verify", "--quiet", f"{sha}^1")

    def log(self) -> str:
        """The answers so far, as `git bisect replay` reads them."""
        return git(self.folder, "bisect", "log")

    def _reverted(self) -> dict[str, str]:
        """The commits that are reverted, and by which. A revert that is itself reverted counts as none."""
        listed = git(self.folder, "log", "--format=%H%x00%B%x01", self.bad, f"^{self.good}")
        bodies = dict(entry.strip().split("\0", 1) for entry in listed.split("\1") if entry.strip())
        undone: dict[str, str] = {}
        for sha, body in bodies.items():  # the newest first
            for short in _REVERTS.findall(body):
                whole = next((other for other in bodies if other.startswith(short)), None)
                if whole and sha not in undone:
                    undone[whole] = sha
        return undone

    def _has(self, sha: str, ancestor: str) -> bool:
        return try_git(self.folder, "merge-base", "--is-ancestor", ancestor, sha) is not None

    def _refs(self, kind: str) -> list[str]:
        pattern = "refs/bisect/bad" if kind == "bad" else f"refs/bisect/{kind}-*"
        return git(self.folder, "for-each-ref", "--format=%(objectname)", pattern).split()


def make_package_repository(folder: Path, package: str, versions: Sequence[str]) -> dict[str, str]:
    """Makes a repository with a commit for each version; the shas by version."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    git(folder, "init", "-q")
    shas = {}
    for version in versions:
        (folder / "requirements.txt").write_text(f"{package}=={version}\n", encoding="utf-8")
        git(folder, "add", "requirements.txt")
        git(folder, *_WHO, "commit", "-q", "-m", f"{package} {version}")
        shas[version] = git(folder, "rev-parse", "HEAD").strip()
    return shas


def versions_between(package: str, first: str, last: str) -> list[str]:
    """The released versions of a package from ``first`` to ``last``, by pip's index. Raises UsageError."""
    try:
        low, high = Version(first), Version(last)
    except InvalidVersion as error:
        raise UsageError(say("package.no_version", error=error)) from None
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INDEX_LIMIT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise UsageError(say("package.no_index", package=package, limit_s=_INDEX_LIMIT_S)) from None
    if not (match := _VERSIONS.search(done.stdout)):
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise UsageError(say("package.unknown", package=package, error=lines[-1] if lines else "pip did not say why"))
    listed = sorted(map(Version, match[1].split(", ")))
    versions = [str(version) for version in listed if low <= version <= high]
    if len(versions) < 2:
        near = ", ".join(map(str, listed[-8:]))
        raise UsageError(say("package.too_few", package=package, first=first, last=last, n=len(versions), near=near))
    return versions
