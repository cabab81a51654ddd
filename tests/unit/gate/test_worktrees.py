"""A git ref as a folder: the right files, and the user's checkout, index and hooks as they were."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from kvbench.common.errors import UsageError
from kvbench.gate.compare import worktrees
from kvbench.gate.compare.worktrees import check_out, find_commit, intact, remove
from tests.support.git_repo import commit_all, git, make_repo, write


@pytest.fixture
def repo(tmp_path):
    made = make_repo(tmp_path / "repo", {"a.txt": "one\n", "deep/b.txt": "b\n", ".gitignore": "*.log\n"})
    git(made, "tag", "v1")
    write(made, {"a.txt": "two\n"})
    commit_all(made, "second")
    return made


@pytest.mark.parametrize("ref", ["v1", "main~1", "HEAD^"])
def test_a_ref_becomes_a_folder_with_its_files(repo, tmp_path, ref):
    commit = find_commit(repo, ref)
    check_out(commit, tmp_path / "out" / "source")
    assert (tmp_path / "out" / "source" / "a.txt").read_text() == "one\n"
    assert commit.sha == git(repo, "rev-parse", "v1") and commit.subject == "first" and commit.changes is None
    assert commit.name == commit.sha[:10]
    assert intact(commit, tmp_path / "out" / "source")


def test_a_repository_is_found_from_a_folder_inside_it(repo):
    assert find_commit(repo / "deep", "v1").repo == repo


def test_the_users_checkout_and_index_are_left_alone(repo, tmp_path):
    write(repo, {"a.txt": "staged\n"})
    git(repo, "add", "a.txt")
    write(repo, {"a.txt": "edited\n", "new.txt": "n\n"})
    index = (repo / ".git" / "index").read_bytes()
    os.utime(repo / "deep" / "b.txt", (1, 1))  # a plain `git status` would now write the index anew
    for ref in ("v1", "HEAD", "."):
        check_out(find_commit(repo, ref), tmp_path / "out" / (ref.strip(".") or "tree"))
    assert (repo / ".git" / "index").read_bytes() == index
    assert (repo / "a.txt").read_text() == "edited\n"
    assert git(repo, "rev-parse", "--abbrev-ref", "HEAD") == "main"


def test_a_hook_is_not_run_and_its_variables_do_not_lead_elsewhere(repo, tmp_path, monkeypatch):
    hook = repo / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hooked\n")
    hook.chmod(0o755)
    other = make_repo(tmp_path / "other", {"c.txt": "c\n"})
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))  # as in a hook of the other repository
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    check_out(find_commit(repo, "v1"), tmp_path / "out")
    assert (tmp_path / "out" / "a.txt").read_text() == "one\n"
    assert not (tmp_path / "hooked").exists()


def test_the_working_tree_is_copied_as_it_is(repo, tmp_path):
    write(repo, {"a.txt": "edited\n", "new/n.txt": "n\n", "noise.log": "ignored\n"})
    (repo / "deep" / "b.txt").unlink()
    (repo / "link").symlink_to("a.txt")
    commit = find_commit(repo, ".")
    assert commit.changes and commit.sha == git(repo, "rev-parse", "HEAD")
    assert commit.name.startswith(f"{commit.sha[:10]}-dirty-")
    check_out(commit, tmp_path / "out")
    found = sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if not p.is_dir())
    assert found == [".gitignore", "a.txt", "link", "new/n.txt"]
    assert (tmp_path / "out" / "a.txt").read_text() == "edited\n"
    assert os.readlink(tmp_path / "out" / "link") == "a.txt"
    assert intact(commit, tmp_path / "out")


def test_other_contents_are_another_working_tree(repo):
    names = set()
    for text in ("x\n", "y\n"):
        write(repo, {"a.txt": text})
        names.add(find_commit(repo, ".").name)
    write(repo, {"a.txt": "x\n"})
    names.add(find_commit(repo, ".").name)
    assert len(names) == 2


def test_a_clean_working_tree_is_its_commit(repo):
    assert find_commit(repo, ".").changes is None
    assert find_commit(repo, ".").name == find_commit(repo, "HEAD").name


def test_a_working_tree_that_changes_while_it_is_copied_is_refused(repo, tmp_path):
    write(repo, {"a.txt": "x\n"})
    commit = find_commit(repo, ".")
    write(repo, {"a.txt": "y\n"})
    with pytest.raises(UsageError, match="changed while it was copied"):
        check_out(commit, tmp_path / "out")


def test_a_working_tree_with_huge_files_is_refused(repo, monkeypatch):
    monkeypatch.setattr(worktrees, "_LARGEST_COPY", 3)
    write(repo, {"a.txt": "more than three bytes\n"})
    with pytest.raises(UsageError, match="GiB of files"):
        find_commit(repo, ".")


def test_a_changed_or_lost_checkout_is_not_intact(repo, tmp_path):
    commit, folder = find_commit(repo, "v1"), tmp_path / "out"
    assert not intact(commit, folder)
    check_out(commit, folder)
    assert not intact(find_commit(repo, "HEAD"), folder)
    (folder / "a.txt").write_text("meddled\n")
    assert not intact(commit, folder)


def test_a_folder_that_somebody_removed_is_made_again(repo, tmp_path):
    commit, folder = find_commit(repo, "v1"), tmp_path / "out"
    check_out(commit, folder)
    shutil.rmtree(folder)  # git has it registered still
    check_out(commit, folder)
    assert intact(commit, folder)


def test_removing_leaves_nothing_behind(repo, tmp_path):
    folder = tmp_path / "out"
    check_out(find_commit(repo, "v1"), folder)
    assert len(git(repo, "worktree", "list").splitlines()) == 2
    remove(folder)
    assert not folder.exists() and len(git(repo, "worktree", "list").splitlines()) == 1


def test_a_shallow_clone_serves_for_what_it_has(repo, tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{repo}", str(clone)], check=True)
    check_out(find_commit(clone, "HEAD"), tmp_path / "out")
    assert (tmp_path / "out" / "a.txt").read_text() == "two\n"
    with pytest.raises(UsageError, match="shallow clone"):
        find_commit(clone, "v1~0")


@pytest.mark.parametrize("ref", ["nonsense", "-h", "--all", "a b", ""])
def test_what_is_no_commit_is_refused(repo, ref):
    with pytest.raises(UsageError, match="is no commit of"):
        find_commit(repo, ref)


def test_a_folder_without_git_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no git repository"):
        find_commit(tmp_path, "HEAD")
