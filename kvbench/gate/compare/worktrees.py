"""A git ref as a folder with its source: a worktree outside the repository, or a copy of the working tree as it is.

The user's checkout, index and hooks are left alone: git is run without optional locks, without hooks, and without the
variables by which a hook that runs kvbench would point it at the user's index.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from kvbench.common.errors import UsageError
from kvbench.common.git import git

WORKING_TREE = "."
_LARGEST_COPY = 1 << 30


@dataclass(frozen=True)
class Commit:
    """One state of a repository's files.

    ``repo``: its top folder; ``ref``: as it was asked for; ``sha``, ``subject``: of the commit, for a changed working
    tree of the one below it. ``changes``: digest of the files where they are not those of the commit, else None.
    """

    repo: Path
    ref: str
    sha: str
    subject: str
    changes: str | None = None

    @property
    def name(self) -> str:
        """Short, and other for other files: of a run's folder, a cache, a table."""
        return self.sha[:10] + (f"-dirty-{self.changes[:8]}" if self.changes else "")


def find_commit(repo: Path, ref: str) -> Commit:
    """What ``ref`` names in ``repo``; ``.``: the working tree as it is. Raises UsageError."""
    top = top_folder(repo)
    if top is None:
        raise UsageError(
            f"{str(repo)!r} is no git repository (or git is not installed), so {ref!r} cannot be built from it: give "
            "--repo PATH, or compare launch commands, URLs or settings"
        )
    sha = find_sha(top, "HEAD" if ref == WORKING_TREE else ref)
    if sha is None:
        raise UsageError(
            f"{ref!r} is no commit of {top}: give a branch, a tag, a sha or `.`; a shallow clone has only its newest "
            f"commits (git fetch --depth 1 origin {ref} brings one)"
        )
    subject = git(top, "log", "-1", "--format=%s", sha).strip()
    changes = _changes(top) if ref == WORKING_TREE else None
    return Commit(top, ref, sha, subject, changes)


def top_folder(repo: Path) -> Path | None:
    """The top of the working tree that ``repo`` lies in, None where there is none."""
    try:
        return Path(git(repo, "rev-parse", "--show-toplevel").strip())
    except UsageError:
        return None


def find_sha(top: Path, ref: str) -> str | None:
    """The commit that a ref names; None: none."""
    if not ref or ref.startswith("-") or any(c.isspace() or c == "\0" for c in ref):
        return None
    try:
        return git(top, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").strip() or None
    except UsageError:
        return None


def names(top: Path) -> list[str]:
    """Its branches and tags."""
    return git(top, "for-each-ref", "--format=%(refname:short)", "refs/heads", "refs/remotes", "refs/tags").split()


def check_out(commit: Commit, folder: Path) -> None:
    """Writes the files of ``commit`` into ``folder``, which is not there yet. Raises UsageError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if commit.changes is None:
        # Twice --force: an earlier folder of this name may be registered still, though somebody has removed it.
        git(commit.repo, "worktree", "add", "--force", "--force", "--detach", str(folder), commit.sha)
        return
    for name in _listed(commit.repo):
        source, to = commit.repo / name, folder / name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, to, follow_symlinks=False)
    if (now := _changes(commit.repo)) != commit.changes:
        raise UsageError(
            f"the working tree {commit.repo} changed while it was copied ({commit.changes[:8]} to {(now or '')[:8]}): "
            "start again once nothing writes into it, or compare a commit"
        )


def intact(commit: Commit, folder: Path) -> bool:
    """Whether ``folder`` still holds the files of ``commit``, and its tracked files are unchanged."""
    if not folder.is_dir():
        return False
    if commit.changes is not None:
        return True  # a copy of its own, named after its contents
    try:
        top = git(folder, "rev-parse", "--show-toplevel").strip()
        if Path(top).resolve() != folder.resolve() or find_sha(folder, "HEAD") != commit.sha:
            return False
        return not git(folder, "status", "--porcelain", "--untracked-files=no").strip()
    except UsageError:
        return False


def remove(folder: Path) -> None:
    """Takes the folder away, and the repository's note of it where it is a worktree."""
    if (folder / ".git").is_file():
        with contextlib.suppress(UsageError):
            common = git(folder, "rev-parse", "--path-format=absolute", "--git-common-dir").strip()
            git(Path(common), "worktree", "remove", "--force", "--force", str(folder))
    shutil.rmtree(folder, ignore_errors=True)


def _changes(top: Path) -> str | None:
    """Digest of every file that git knows or would add, None where they are those of HEAD."""
    if not git(top, "status", "--porcelain", "--untracked-files=all").strip():
        return None
    digest, total = hashlib.sha256(), 0
    for name in _listed(top):
        path = top / name
        state = path.lstat()
        total += state.st_size
        if total > _LARGEST_COPY:
            raise UsageError(
                f"the working tree {top} holds more than {_LARGEST_COPY >> 30} GiB of files that git does not ignore: "
                "compare a commit, or put large files into .gitignore"
            )
        content = os.readlink(path).encode() if stat.S_ISLNK(state.st_mode) else path.read_bytes()
        digest.update(f"{name}\0{state.st_mode:o}\0{len(content)}\0".encode(errors="surrogateescape"))
        digest.update(content)
    return digest.hexdigest()


def _listed(top: Path) -> list[str]:
    """Tracked files that are there and new ones that git does not ignore; without folders (other repositories)."""
    names = git(top, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return [n for n in sorted({*names} - {""}) if (top / n).is_symlink() or (top / n).is_file()]
