"""ci/history_push.sh against a bare repository: runs are only added, and jobs that push at once all keep theirs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.git_repo import commit_all, git, write

SCRIPT = Path(__file__).resolve().parents[3] / "ci" / "history_push.sh"
BRANCH = "kvbench-history"


@pytest.fixture
def remote(tmp_path):
    """A bare repository with a branch of code."""
    bare, first = tmp_path / "remote.git", tmp_path / "first"
    git(tmp_path, "init", "-q", "--bare", str(bare))
    git(tmp_path, "clone", "-q", str(bare), str(first))
    write(first, {"engine.py": "code\n", ".gitignore": "results/\nhistory/\n"})
    commit_all(first, "code")
    git(first, "push", "-q", "origin", "HEAD:refs/heads/main")
    return bare


def _clone(remote: Path, name: str, **runs: str) -> Path:
    """A checkout of main, as a CI job has it, with runs to add: name -> content of its manifest.json."""
    clone = remote.parent / name
    git(remote.parent, "clone", "-q", "--branch", "main", str(remote), str(clone))
    (clone / ".git" / "info" / "exclude").write_text("*.json\n")
    for run, text in runs.items():
        write(clone, {f"history/mixed/{run}/manifest.json": text, f"history/mixed/{run}/cells/c1/summary.json": "{}"})
    return clone


def _environment(**more: str) -> dict[str, str]:
    plain = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return {**plain, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", **more}


def _push(clone: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    words = words or ("history",)
    command = ["bash", str(SCRIPT), *words]
    return subprocess.run(command, cwd=clone, env=_environment(**env), capture_output=True, text=True, timeout=100)


def _git_after(programs: Path, before: str) -> dict[str, str]:
    """The environment in which git does ``before`` first, a shell's text; $REAL is the PATH of git itself."""
    programs.mkdir()
    (programs / "git").write_text(f'#!/bin/sh\n{before}\nPATH="$REAL" exec git "$@"\n')
    (programs / "git").chmod(0o755)
    return {"REAL": os.environ["PATH"], "PATH": f"{programs}:{os.environ['PATH']}"}


def _manifests(remote: Path) -> dict[str, str]:
    names = git(remote, "ls-tree", "-r", "--name-only", BRANCH).splitlines()
    return {
        name.split("/")[2]: git(remote, "show", f"{BRANCH}:{name}") for name in names if name.endswith("manifest.json")
    }


def test_a_later_run_is_added_the_same_one_is_not_and_the_checkout_stays_as_it_is(remote):
    clone = _clone(remote, "one", r1="one")

    def state() -> tuple[str, ...]:
        questions = ("for-each-ref refs/heads", "status --porcelain", "symbolic-ref HEAD", "diff --cached")
        return tuple(git(clone, *each.split()) for each in questions)

    before = state()
    done = _push(clone, KVBENCH_HISTORY_NOTE="v1.2")
    assert done.returncode == 0 and state() == before, done.stderr
    assert git(remote, "log", "--format=%P|%s", BRANCH) == "|Runs of v1.2"  # an orphan
    names = git(remote, "ls-tree", "-r", "--name-only", BRANCH).splitlines()
    assert names == ["history/mixed/r1/cells/c1/summary.json", "history/mixed/r1/manifest.json"]
    later = _clone(remote, "two", r2="two")
    assert _push(later).returncode == 0
    assert _manifests(remote) == {"r1": "one", "r2": "two"}
    again = _push(later)
    assert again.returncode == 0 and "already" in again.stdout
    done = _push(_clone(remote, "three", r1="changed", r3="three"))  # a run with other contents is refused
    assert (done.returncode, done.stderr.splitlines()[1:]) == (1, ["history/mixed/r1/manifest.json"])
    assert git(remote, "rev-list", "--count", BRANCH) == "2"


@pytest.mark.parametrize("there", [False, True], ids=["both make the branch", "the branch is there"])
def test_who_is_overtaken_begins_again(remote, there):
    """The other job's push is made to come between this one's look at the branch and its push."""
    if there:
        assert _push(_clone(remote, "zero", r0="zero")).returncode == 0
    mine, other = _clone(remote, "mine", r1="one"), _clone(remote, "other", r2="two")
    before = """if [ "$1" = push ] && mkdir "$ONCE" 2>/dev/null; then
        (cd "$OTHER" && unset GIT_INDEX_FILE && PATH="$REAL" bash "$SCRIPT" history) || exit 9
    fi"""
    env = {"OTHER": str(other), "SCRIPT": str(SCRIPT), "ONCE": str(remote.parent / "once")}
    done = _push(mine, **_git_after(remote.parent / "bin", before), **env)
    assert done.returncode == 0, done.stderr
    assert "try 1 of 10 was refused" in done.stderr
    assert _manifests(remote) == {**({"r0": "zero"} if there else {}), "r1": "one", "r2": "two"}
    assert git(remote, "rev-list", "--count", "--merges", BRANCH) == "0"
    assert git(remote, "rev-list", "--count", BRANCH) == str(2 + there)


def test_what_cannot_be_done_is_said(remote):
    clone = _clone(remote, "job", r1="one")
    (clone / "empty").mkdir()
    for words in ((), ("missing",), ("empty",), ("history", "no..name"), ("history", "a", "b")):
        done = subprocess.run(["bash", str(SCRIPT), *words], cwd=clone, env=_environment(), capture_output=True)
        assert done.returncode == 2 and done.stderr, words
    gone = _push(clone, HISTORY_REMOTE=str(remote.parent / "nowhere"))
    assert gone.returncode == 4 and f"cannot read {BRANCH}" in gone.stderr
    hook = remote / "hooks" / "update"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    refused = _push(clone, HISTORY_TRIES="1")
    assert refused.returncode == 4 and "refused 1 times" in refused.stderr


def test_the_token_goes_through_gits_credential_helper(remote):
    """Asked for the password of an https remote, git gets the token, and no command line holds it."""
    clone = _clone(remote, "job", r1="one")
    log = remote.parent / "log"
    before = r"""echo "$@" >> "$LOG"
    if [ "$1" = ls-remote ]; then
        printf "protocol=https\nhost=example.org\n\n" | PATH="$REAL" git credential fill >> "$LOG.told"; exit 1
    fi"""
    env = {"LOG": str(log), "KVBENCH_HISTORY_TOKEN": "s3cret", "HISTORY_REMOTE": "https://example.org/x.git"}
    assert _push(clone, **_git_after(remote.parent / "bin", before), **env).returncode == 4
    assert "password=s3cret" in Path(f"{log}.told").read_text()
    assert "s3cret" not in log.read_text()
