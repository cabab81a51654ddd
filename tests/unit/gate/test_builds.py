"""Builds of git refs: the right files and environment, made once, checked and shared; the user's checkout as it was."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import threading
from pathlib import Path

import numpy
import psutil
import pytest

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.packages import REPOSITORY
from kvbench.gate.compare import builds as module
from kvbench.gate.compare.builds import (
    Builds,
    builds_folder,
    check_out,
    find_commit,
    installed_versions,
    is_intact,
    is_kvbench,
    remove_source,
    running_layers,
    same_dependencies,
)
from tests.support.git_repo import commit_all, git, make_repo, make_tiny_kvbench, write


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_kvbench(tmp_path_factory.mktemp("tiny") / "repo")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Shared by the tests, so that the HEAD of ``tiny`` is built once."""
    return tmp_path_factory.mktemp("builds")


@pytest.fixture
def build(tiny, cache):
    with Builds(cache) as builds:
        return builds.build(find_commit(tiny, "HEAD"))


@pytest.fixture
def other(tmp_path, monkeypatch):
    """A project that is not kvbench and is built by a command, in an environment without pip."""
    make = module._make_venv
    monkeypatch.setattr(module, "_make_venv", lambda env, log, pip: make(env, log, pip=False))
    return make_repo(tmp_path / "other", {"serve.py": "print('hello')\n"})


@pytest.fixture
def repo(tmp_path):
    made = make_repo(tmp_path / "repo", {"a.txt": "one\n", "deep/b.txt": "b\n", ".gitignore": "*.log\n"})
    git(made, "tag", "v1")
    write(made, {"a.txt": "two\n"})
    commit_all(made, "second")
    return made


def test_a_build_is_kept_and_found_again_and_the_working_tree_is_another(tiny, cache, build):
    (build.folder / "numba").mkdir()
    os.utime(build.folder / "build.json", (1, 1))
    write(tiny, {"engine/new.py": "x = 1\n"})
    try:
        with Builds(cache) as builds:
            again = builds.build(build.commit)
            assert builds.build(build.commit) is again
            other = builds.build(find_commit(tiny, "."))
    finally:
        (tiny / "engine" / "new.py").unlink()
    assert (build.folder / "build.json").stat().st_mtime > 1  # its last use: by that the oldest goes
    assert not again.fresh and (again.folder, again.digest) == (build.folder, build.digest)
    assert other.fresh and other.folder != build.folder and other.digest == build.digest  # one environment
    assert build.env["NUMBA_CACHE_DIR"] != other.env["NUMBA_CACHE_DIR"]
    assert (other.source / "engine" / "new.py").is_file() and not (build.source / "engine" / "new.py").exists()
    facts = json.loads(json.dumps(other.facts()))
    assert facts["dirty"] and facts["ref"] == "." and facts["sha"] == build.commit.sha
    with Builds(cache, rebuild=True) as builds:
        assert builds.build(build.commit).fresh
    assert not (build.folder / "numba").exists()


def test_no_kvbench_is_among_the_layers_and_a_folder_that_cannot_be_made_is_named(monkeypatch, tmp_path, tiny):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert builds_folder() == tmp_path / "kvbench" / "builds"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard: to be ignored
    assert builds_folder() == Path.home() / ".cache" / "kvbench" / "builds"
    (tmp_path / "file").write_text("")
    with Builds(tmp_path / "file" / "builds") as builds, pytest.raises(MeasurementError, match=str(tmp_path)):
        builds.build(find_commit(tiny, "HEAD"))
    monkeypatch.setattr(sys, "path", ["", str(REPOSITORY), str(tiny), *sys.path, "/nowhere"])
    layers = running_layers()
    assert layers and not [p for p in layers if is_kvbench(p) or not p.is_dir()]
    assert Path(numpy.__file__).parent.parent in layers


@pytest.mark.parametrize("damage", ["half", "changed", "no_python", "other_format"])
def test_a_stale_or_half_built_one_is_built_anew(cache, build, damage):
    state = build.folder / "build.json"
    if damage == "half":
        state.unlink()
    elif damage == "changed":
        (build.source / "engine" / "__init__.py").write_text("x = 1\n")
    elif damage == "no_python":
        build.python.unlink()
    else:
        state.write_text(json.dumps({**json.loads(state.read_text()), "format": -1}))
    with Builds(cache) as builds:
        again = builds.build(build.commit)
    assert again.fresh and (again.source / "engine" / "__init__.py").read_text() == ""


def test_an_older_build_goes_and_one_in_use_stays(other, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 1)
    first_commit = find_commit(other, "HEAD")
    commit_all(other, "second")
    with Builds(tmp_path / "b", build_cmd="true") as builds:
        first = builds.build(first_commit)
        os.utime(first.folder / "build.json", (1, 1))
        with Builds(tmp_path / "b", build_cmd="true") as others:
            second = others.build(find_commit(other, "HEAD"))
        assert first.folder.is_dir() and second.folder.is_dir()
    with Builds(tmp_path / "b", build_cmd="true") as builds:
        builds.build(second.commit)
    assert not first.folder.exists() and second.folder.is_dir()
    assert str(first.source) not in git(other, "worktree", "list")


def test_a_build_that_another_kvbench_makes_is_waited_for(cache, build):
    waits = threading.Event()
    with (cache / f"{build.folder.name}.lock").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        def say(text):
            if "another kvbench" in text:
                waits.set()
                fcntl.flock(held, fcntl.LOCK_UN)

        with Builds(cache, tell=say) as builds:
            assert not builds.build(build.commit).fresh
    assert waits.is_set()
    with Builds(cache) as user, Builds(cache, rebuild=True, limit_s=0.1) as builds:  # not for ever
        user.build(build.commit)
        with pytest.raises(MeasurementError, match="another kvbench"):
            builds.build(build.commit)


def test_a_build_command_makes_the_environment(other, tmp_path):
    command = 'test "$VIRTUAL_ENV" && echo "{worktree}" > built && {python} -c "print(1)" && ls > listing'
    with Builds(tmp_path / "b", build_cmd=command) as builds:
        build = builds.build(find_commit(other, "HEAD"))
    assert build.how == "command" and (build.source / "built").read_text().strip() == str(build.source)
    assert "serve.py" in (build.source / "listing").read_text()
    assert build.env["PYTHONPATH"] is None and "NUMBA_CACHE_DIR" not in build.env
    assert build.env["PATH"].startswith(str(build.folder / "env" / "bin"))
    for again, same in ((command, True), ("true", False)):
        with Builds(tmp_path / "b", build_cmd=again) as builds:
            assert (builds.build(build.commit).folder == build.folder) == same


def test_a_build_that_fails_or_hangs_or_has_no_command_is_no_build(other, tmp_path):
    commit = find_commit(other, "HEAD")
    with Builds(tmp_path / "b") as builds, pytest.raises(UsageError, match="--build-cmd"):
        builds.build(commit)  # pip cannot build it
    for _ in range(2):
        with Builds(tmp_path, build_cmd="echo no compiler here; exit 3") as builds, \
                pytest.raises(MeasurementError, match=r"(?s)code 3.*\nno compiler here") as error:  # fmt: skip
            builds.build(commit)
    assert "no compiler here" in Path(str(error.value).split("its log is ")[1].split(",")[0]).read_text()
    with Builds(tmp_path / "c", build_cmd="sleep 61 & echo $! > pid; wait", limit_s=0.5) as builds, \
            pytest.raises(MeasurementError, match=r"more than 0\.5 s"):  # fmt: skip
        builds.build(commit)
    number = int(next((tmp_path / "c").glob("*/source/pid")).read_text())
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def test_other_dependencies_are_installed_by_pip_with_the_pins(other, tmp_path, monkeypatch):
    """pip itself is not run: its command line is checked."""
    commands, run = [], module.run_to_end

    def no_pip(command, log, limit_s, title, **rest):
        if "pip" not in command:
            return run(command, log, limit_s, title, **rest)
        commands.append(command)
        raise MeasurementError("stop here")

    write(other, {"pyproject.toml": "", "constraints.txt": ""})
    commit_all(other, "a project")
    monkeypatch.setattr(module, "run_to_end", no_pip)
    with Builds(tmp_path / "b") as builds, pytest.raises(MeasurementError, match="stop here"):
        builds.build(find_commit(other, "HEAD"))
    source = next((tmp_path / "b").glob("*/source"))
    assert commands[0][-4:] == ["-c", str(source / "constraints.txt"), "-e", str(source)]


@pytest.mark.parametrize(
    ("name", "old", "new", "same"),
    [
        ("constraints.txt", "numpy==", "# another comment\nnumpy==", True),
        ("constraints.txt", "numpy==", "numpy==9", False),
        ("pyproject.toml", 'name = "kvbench"', 'name = "kvbench2"', True),
        ("pyproject.toml", "[project]", "", False),
    ],
)
def test_same_dependencies(tmp_path, name, old, new, same):
    for each in ("pyproject.toml", "constraints.txt"):
        text = (REPOSITORY / each).read_text()
        (tmp_path / each).write_text(text.replace(old, new) if each == name else text)
    assert same_dependencies(tmp_path) == same


def test_a_package_from_elsewhere_or_a_python_that_does_not_start_is_refused(tmp_path):
    """Otherwise another engine would be measured."""
    for name in module.PACKAGES:
        write(tmp_path / "source", {f"{name}/__init__.py": ""})
    with pytest.raises(MeasurementError, match="does not start"):
        installed_versions(tmp_path, "layered")
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={REPOSITORY} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with pytest.raises(MeasurementError, match=f"would import 'kvbench' from {REPOSITORY}"):
        installed_versions(tmp_path, "layered")
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    with pytest.raises(MeasurementError, match="would import 'kvbench' from nowhere"):
        installed_versions(tmp_path, "layered")


# --- source


def test_a_ref_becomes_a_folder_with_its_files_and_is_made_again_after_somebody_removed_it(repo, tmp_path):
    commit, folder = find_commit(repo / "deep", "main~1"), tmp_path / "out" / "source"
    assert not is_intact(commit, folder)
    check_out(commit, folder)
    assert (folder / "a.txt").read_text() == "one\n" and is_intact(commit, folder)
    assert commit.repo == repo and commit.sha == git(repo, "rev-parse", "v1")
    assert (commit.subject, commit.changes, commit.name) == ("first", None, commit.sha[:10])
    assert not is_intact(find_commit(repo, "HEAD"), folder)
    (folder / "a.txt").write_text("changed\n")
    assert not is_intact(commit, folder)
    shutil.rmtree(folder)  # git has it registered still
    check_out(commit, folder)
    assert is_intact(commit, folder) and len(git(repo, "worktree", "list").splitlines()) == 2
    remove_source(folder)
    assert not folder.exists() and len(git(repo, "worktree", "list").splitlines()) == 1


def test_the_users_checkout_index_and_hooks_are_left_alone(repo, tmp_path, monkeypatch):
    hook = repo / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hooked\n")
    hook.chmod(0o755)
    write(repo, {"a.txt": "staged\n"})
    git(repo, "add", "a.txt")
    write(repo, {"a.txt": "edited\n", "new.txt": "n\n"})
    index = (repo / ".git" / "index").read_bytes()
    os.utime(repo / "deep" / "b.txt", (1, 1))  # a plain `git status` would now write the index anew
    other = make_repo(tmp_path / "other", {"c.txt": "c\n"})
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))  # as in a hook of the other repository
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    for ref in ("v1", "HEAD", "."):
        check_out(find_commit(repo, ref), tmp_path / "out" / (ref.strip(".") or "tree"))
    assert (repo / ".git" / "index").read_bytes() == index
    assert (repo / "a.txt").read_text() == "edited\n"
    assert (tmp_path / "out" / "v1" / "a.txt").read_text() == "one\n"
    assert git(repo, "rev-parse", "--abbrev-ref", "HEAD") == "main" and not (tmp_path / "hooked").exists()


def test_the_working_tree_is_copied_as_it_is_and_named_after_its_contents(repo, tmp_path, monkeypatch):
    assert find_commit(repo, ".").name == find_commit(repo, "HEAD").name
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
    assert os.readlink(tmp_path / "out" / "link") == "a.txt" and is_intact(commit, tmp_path / "out")
    write(repo, {"a.txt": "again\n"})
    assert find_commit(repo, ".").name != commit.name
    with pytest.raises(UsageError, match="changed while it was copied"):
        check_out(commit, tmp_path / "late")
    write(repo, {"a.txt": "edited\n"})
    assert find_commit(repo, ".").name == commit.name
    monkeypatch.setattr(module, "_LARGEST_COPY", 3)
    with pytest.raises(UsageError, match="gitignore"):
        find_commit(repo, ".")


def test_what_is_no_commit_is_refused(repo, tmp_path, tmp_path_factory):
    for ref in ("nonsense", "-h", "a b", ""):
        with pytest.raises(UsageError, match="is no commit of"):
            find_commit(repo, ref)
    with pytest.raises(UsageError, match="--repo"):
        find_commit(tmp_path_factory.mktemp("no_git"), "HEAD")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repo}", "clone")
    check_out(find_commit(tmp_path / "clone", "HEAD"), tmp_path / "out")
    assert (tmp_path / "out" / "a.txt").read_text() == "two\n"
    with pytest.raises(UsageError, match="shallow clone"):
        find_commit(tmp_path / "clone", "v1~0")
