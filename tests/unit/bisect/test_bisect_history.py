"""Git's bisect in a clone: what it leaves alone, what it takes out, and what it cannot do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbench.bisect import history as module
from kvbench.bisect.history import History, make_package_repository, versions_between
from kvbench.common.errors import MeasurementError, UsageError
from tests.support.git_repo import commit_all, git, make_repo, write


@pytest.fixture
def repo(tmp_path):
    """A main line of six commits with a merged branch of two in the middle; the shas by name."""
    folder, shas = make_repo(tmp_path / "repo", {"a": "0"}), {}
    shas["good"] = git(folder, "rev-parse", "HEAD")

    def commit(name, **files):
        write(folder, files)
        shas[name] = commit_all(folder, name)

    commit("one", a="1")
    git(folder, "checkout", "-q", "-b", "side")
    commit("left", b="1")
    commit("right", b="2")
    git(folder, "checkout", "-q", "main")
    commit("two", a="2")
    git(folder, "merge", "-q", "--no-ff", "-m", "merge", "side")
    shas["merge"] = git(folder, "rev-parse", "HEAD")
    commit("three", a="3")
    return folder, shas


def opened(tmp_path, repo, **how):
    folder, shas = repo
    return History(folder, tmp_path / "search" / "clone", shas["good"], shas["three"], **how)


def search(history, first_bad):
    """Answers as a history whose commits from ``first_bad`` on are bad; what was asked, and what is left."""
    asked = []
    while (sha := history.next()) is not None:
        asked.append(sha)
        history.mark(sha, "bad" if history._has(sha, first_bad) else "good")
    return asked, history.candidates()


def test_every_commit_is_found_and_the_repository_is_left_alone(tmp_path, repo):
    folder, shas = repo
    (folder / "a").write_text("changed")
    before = [git(folder, *words) for words in (("status", "--porcelain"), ("for-each-ref",), ("worktree", "list"))]
    for name in ("one", "left", "right", "two", "merge", "three"):
        asked, left = search(opened(tmp_path, repo), shas[name])
        assert left == [shas[name]] and len(asked) <= 4
    after = [git(folder, *words) for words in (("status", "--porcelain"), ("for-each-ref",), ("worktree", "list"))]
    assert after == before and not (folder / ".git" / "BISECT_LOG").exists()


def test_first_parents_name_the_merge_and_paths_leave_commits_out(tmp_path, repo):
    shas = repo[1]
    asked, left = search(opened(tmp_path, repo, first_parent=True), shas["left"])
    assert left == [shas["merge"]] and not {shas["left"], shas["right"]} & set(asked)
    asked, left = search(opened(tmp_path / "paths", repo, paths=("b",)), shas["right"])
    assert left == [shas["right"]] and set(asked) <= {shas["left"], shas["right"]}


def test_skipped_commits_leave_a_range(tmp_path, repo):
    shas = repo[1]
    history = opened(tmp_path, repo, skipped=[shas["left"], shas["right"]])
    asked, left = search(history, shas["left"])
    assert not {shas["left"], shas["right"]} & set(asked)
    assert {shas["left"], shas["right"]} <= set(left) and history.next() is None


def test_ends_that_are_not_in_one_line_are_refused_with_where_they_part(tmp_path, repo):
    folder, shas = repo
    with pytest.raises(UsageError, match=shas["one"][:10]):
        History(folder, tmp_path / "clone", shas["two"], shas["right"])


def test_what_is_reverted_later_is_taken_out_between(tmp_path):
    folder = make_repo(tmp_path / "repo", {"a": "0", "b": "0"})
    shas = [git(folder, "rev-parse", "HEAD")]
    for files in ({"a": "slow"}, {"b": "1"}):
        write(folder, files)
        shas.append(commit_all(folder, str(files)))
    git(folder, "revert", "--no-edit", shas[1])
    shas.append(git(folder, "rev-parse", "HEAD"))
    write(folder, {"b": "2"})
    shas.append(commit_all(folder, "last"))
    history, refs = History(folder, tmp_path / "clone", shas[0], shas[-1]), git(folder, "for-each-ref")
    texts = []
    for sha in shas:
        commit = history.commit(sha)
        texts.append(tuple(git(commit.repo, "show", f"{commit.sha}:{name}") for name in "ab"))
    assert texts == [("0", "0"), ("0", "0"), ("0", "1"), ("0", "1"), ("0", "2")]
    assert [history.commit(sha).sha == sha for sha in shas] == [True, False, False, True, True]
    assert {history.commit(sha).repo for sha in shas} == {folder}  # whose builds are kept
    assert git(folder, "for-each-ref") == refs and not (folder / ".git" / "FETCH_HEAD").exists()
    # A revert that is reverted leaves the commit in place.
    git(folder, "revert", "--no-edit", shas[3])
    again = History(folder, tmp_path / "again", shas[0], git(folder, "rev-parse", "HEAD"))
    assert again.commit(shas[2]).sha == shas[2]


def test_a_reverted_merge_is_taken_out(tmp_path, repo, monkeypatch):
    folder, shas = repo
    git(folder, "revert", "--no-edit", "-m", "1", shas["merge"])
    monkeypatch.chdir(tmp_path)
    history = History(folder, Path("clone"), shas["good"], git(folder, "rev-parse", "HEAD"))
    commit = history.commit(shas["three"])
    assert "b" not in git(folder, "ls-tree", "--name-only", commit.sha).split()
    assert git(folder, "show", f"{commit.sha}:a") == "3"


def test_a_revert_that_git_cannot_make_earlier_is_said(tmp_path):
    folder = make_repo(tmp_path / "repo", {"a": "0\n"})
    shas = [git(folder, "rev-parse", "HEAD")]
    for text in ("1\n", "2\n", "1\n"):
        write(folder, {"a": text})
        shas.append(commit_all(folder, text))
    git(folder, "revert", "--no-edit", shas[1])
    history = History(folder, tmp_path / "clone", shas[0], git(folder, "rev-parse", "HEAD"))
    with pytest.raises(MeasurementError, match=shas[1][:10]):
        history.commit(shas[2])
    assert history.commit(shas[1]).sha != shas[1]  # the scratch folder is free again


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """Replaces the Python that runs pip by a script."""

    def replace(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(module, "sys", SimpleNamespace(executable=str(path)))

    return replace


def test_versions_become_commits(tmp_path, pip):
    pip("echo 'some-engine (2.0)'; echo 'Available versions: 2.0rc1, 1.10, 1.9.1, 1.9, 1.2, 0.9'")
    versions = versions_between("some-engine", "1.2", "2.0")
    assert versions == ["1.2", "1.9", "1.9.1", "1.10", "2.0rc1"]
    shas = make_package_repository(tmp_path / "versions", "some-engine", versions)
    for version in versions:
        assert git(tmp_path / "versions", "show", f"{shas[version]}:requirements.txt") == f"some-engine=={version}"
    history = History(tmp_path / "versions", tmp_path / "clone", shas["1.2"], shas["2.0rc1"])
    assert search(history, shas["1.9.1"])[1] == [shas["1.9.1"]]
    for first, last, said in (("1.10", "1.10", "1 versions"), ("one", "2", "one")):
        with pytest.raises(UsageError, match=said):
            versions_between("some-engine", first, last)


def test_an_unknown_package_is_said_with_what_pip_says(pip):
    pip("echo 'ERROR: No matching distribution found for nothing' >&2; exit 1")
    with pytest.raises(UsageError, match="No matching distribution"):
        versions_between("nothing", "1", "2")
