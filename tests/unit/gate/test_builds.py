"""Builds of git refs: made once, checked, shared, bounded in number; every way in which one cannot be made."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import psutil
import pytest

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.packages import HOUSE
from kvbench.gate.compare import builds as module
from kvbench.gate.compare import environments
from kvbench.gate.compare.builds import Builds, builds_folder
from kvbench.gate.compare.environments import ask, is_kvbench, require_source, running_layers, same_dependencies
from kvbench.gate.compare.worktrees import find_commit
from tests.support.git_repo import commit_all, git, make_repo, make_tiny_kvbench, write


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_kvbench(tmp_path_factory.mktemp("tiny") / "repo")


@pytest.fixture
def other(tmp_path):
    """A project that is not kvbench, and is built by a command."""
    return make_repo(tmp_path / "other", {"serve.py": "print('hello')\n"})


@pytest.fixture
def without_pip(monkeypatch):
    make = environments._make_venv
    monkeypatch.setattr(environments, "_make_venv", lambda env, log, pip: make(env, log, pip=False))


def imported(build, code):
    """What the build's Python prints, started as a server of it is, in a folder that has another kvbench."""
    env = {k: v for k, v in {**os.environ, **build.env}.items() if v is not None}
    done = subprocess.run([build.python, "-c", code], cwd=HOUSE, env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_layered_build_runs_its_own_source_with_our_dependencies(tiny, tmp_path):
    with Builds(tmp_path) as builds:
        build = builds.build(find_commit(tiny, "HEAD"))
        assert build.how == "layered" and build.fresh
        places = imported(build, "import engine, kernels, kvbench; print(engine.__file__, kvbench.__file__)").split()
        assert all(Path(place).is_relative_to(build.source) for place in places)
        assert imported(build, "import numpy; print(numpy.__file__)") == numpy.__file__
        assert imported(build, "import sys; print(sys.prefix)") == str(build.folder / "env")
        assert imported(build, "import sys; print(sys.flags.safe_path)") == "True"
        assert build.versions["numpy"] == numpy.__version__


def test_a_pythonpath_of_the_user_does_not_win(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HOUSE))
    with Builds(tmp_path) as builds:
        build = builds.build(find_commit(tiny, "HEAD"))
        assert Path(imported(build, "import engine; print(engine.__file__)")).is_relative_to(build.source)


def test_a_build_is_kept_and_found_again(tiny, tmp_path):
    commit = find_commit(tiny, "HEAD")
    with Builds(tmp_path) as builds:
        first = builds.build(commit)
        assert builds.build(commit) is first
    (first.folder / "numba").mkdir()
    os.utime(first.folder / "build.json", (1, 1))
    with Builds(tmp_path) as builds:
        again = builds.build(commit)
    assert (first.folder / "build.json").stat().st_mtime > 1  # its last use: by that the oldest goes
    assert not again.fresh and again.folder == first.folder and again.digest == first.digest
    assert (first.folder / "numba").is_dir()
    with Builds(tmp_path, rebuild=True) as builds:
        anew = builds.build(commit)
        assert anew.fresh and builds.build(commit) is anew
    assert not (first.folder / "numba").exists()


def test_two_sides_have_two_folders_and_one_environment(tiny, tmp_path):
    write(tiny, {"engine/new.py": "x = 1\n"})
    try:
        with Builds(tmp_path) as builds:
            base, candidate = (builds.build(find_commit(tiny, ref)) for ref in ("HEAD", "."))
    finally:
        (tiny / "engine" / "new.py").unlink()
    assert base.folder != candidate.folder and base.digest == candidate.digest
    assert base.env["NUMBA_CACHE_DIR"] != candidate.env["NUMBA_CACHE_DIR"]
    assert (candidate.source / "engine" / "new.py").is_file() and not (base.source / "engine" / "new.py").exists()
    facts = candidate.facts()
    assert facts["dirty"] and facts["ref"] == "." and facts["sha"] == base.commit.sha
    assert json.dumps(facts) and not base.facts()["dirty"]


@pytest.mark.parametrize("damage", ["half", "meddled", "no_python", "other_format"])
def test_a_stale_or_half_built_one_is_built_anew(tiny, tmp_path, damage):
    commit = find_commit(tiny, "HEAD")
    with Builds(tmp_path) as builds:
        build = builds.build(commit)
    state = build.folder / "build.json"
    if damage == "half":
        state.unlink()
    elif damage == "meddled":
        (build.source / "engine" / "__init__.py").write_text("x = 1\n")
    elif damage == "no_python":
        build.python.unlink()
    else:
        state.write_text(json.dumps({**json.loads(state.read_text()), "format": -1}))
    with Builds(tmp_path) as builds:
        again = builds.build(commit)
    assert again.fresh and (again.source / "engine" / "__init__.py").read_text() == ""


def test_an_older_build_goes_and_one_in_use_stays(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 1)
    commits = []
    for name in ("one", "two"):
        write(tiny, {f"engine/{name}.py": ""})
        commit_all(tiny, name)
        commits.append(find_commit(tiny, "HEAD"))
    with Builds(tmp_path) as builds:
        first = builds.build(commits[0])
        os.utime(first.folder / "build.json", (1, 1))
        with Builds(tmp_path) as others:
            second = others.build(commits[1])
            assert first.folder.is_dir() and second.folder.is_dir()
    os.utime(first.folder / "build.json", (1, 1))
    with Builds(tmp_path) as builds:
        builds.build(commits[1])
    assert not first.folder.exists() and second.folder.is_dir()
    assert str(first.source) not in git(tiny, "worktree", "list")


def test_a_build_that_another_kvbench_makes_is_waited_for(tiny, tmp_path):
    commit, said = find_commit(tiny, "HEAD"), []
    with Builds(tmp_path) as builds:
        build = builds.build(commit)
    with (tmp_path / f"{build.folder.name}.lock").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        release = threading.Timer(0.5, fcntl.flock, (held, fcntl.LOCK_UN))
        release.start()
        began = time.monotonic()
        with Builds(tmp_path, say=said.append) as builds:
            assert not builds.build(commit).fresh
        assert time.monotonic() - began >= 0.4
        release.join()
    assert any("another kvbench" in line for line in said)


def test_a_lock_is_not_waited_for_for_ever(tiny, tmp_path):
    commit = find_commit(tiny, "HEAD")
    with Builds(tmp_path) as user, Builds(tmp_path, rebuild=True, limit_s=0.1) as builds:
        user.build(commit)
        with pytest.raises(MeasurementError, match="another kvbench has held"):
            builds.build(commit)


def test_a_build_command_makes_the_environment(other, tmp_path, without_pip):
    command = 'test "$VIRTUAL_ENV" && echo "{worktree}" > built && {python} -c "print(1)" && ls > listing'
    with Builds(tmp_path / "b", build_cmd=command) as builds:
        build = builds.build(find_commit(other, "HEAD"))
        assert build.how == "command" and (build.source / "built").read_text().strip() == str(build.source)
        assert "serve.py" in (build.source / "listing").read_text()
        assert "PYTHONPATH" in build.env and build.env["PYTHONPATH"] is None and "NUMBA_CACHE_DIR" not in build.env
        assert build.env["PATH"].startswith(str(build.folder / "env" / "bin"))
    with Builds(tmp_path / "b", build_cmd=command) as builds:
        assert not builds.build(find_commit(other, "HEAD")).fresh
    with Builds(tmp_path / "b", build_cmd="true") as builds:  # another command is another build
        assert builds.build(find_commit(other, "HEAD")).folder != build.folder


def test_a_build_command_that_fails_says_why(other, tmp_path, without_pip):
    with Builds(tmp_path / "b", build_cmd="echo no compiler here; exit 3") as builds:
        with pytest.raises(
            MeasurementError, match=r"(?s)--build-cmd ended with exit code 3.*\nno compiler here"
        ) as error:
            builds.build(find_commit(other, "HEAD"))
        log = Path(str(error.value).split("its log is ")[1].split(",")[0])
        assert "no compiler here" in log.read_text()
    with Builds(tmp_path / "b", build_cmd="echo no compiler here; exit 3") as builds, pytest.raises(MeasurementError):
        builds.build(find_commit(other, "HEAD"))  # what failed is not taken for a build


def test_a_build_command_that_hangs_is_stopped(other, tmp_path, without_pip):
    command = "sleep 61 & echo $! > pid; wait"
    said = r"--build-cmd took more than 0\.5 s and was stopped"
    with Builds(tmp_path / "b", build_cmd=command, limit_s=0.5) as builds, pytest.raises(MeasurementError, match=said):
        builds.build(find_commit(other, "HEAD"))
    (pid,) = (tmp_path / "b").glob("*/source/pid")
    number = int(pid.read_text())
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def test_what_pip_cannot_build_is_refused(other, tmp_path):
    with Builds(tmp_path / "b") as builds, pytest.raises(UsageError, match=r"neither pyproject\.toml nor setup\.py"):
        builds.build(find_commit(other, "HEAD"))


def test_other_dependencies_are_installed_by_pip_with_the_pins(tiny, tmp_path, monkeypatch):
    """pip itself is not run: what it is asked is."""
    asked = []

    def run(command, log, limit_s, title, **rest):
        asked.append(command)
        raise MeasurementError("stop here")

    write(tiny, {"constraints.txt": (HOUSE / "constraints.txt").read_text() + "left-pad==1.0\n"})
    commit_all(tiny, "another pin")
    make = environments._make_venv
    monkeypatch.setattr(environments, "_make_venv", lambda env, log, pip: make(env, log, pip=False))
    try:
        with Builds(tmp_path) as builds:
            commit = find_commit(tiny, "HEAD")
            real = environments._run
            monkeypatch.setattr(environments, "_run", lambda c, *a, **k: (run if "pip" in c else real)(c, *a, **k))
            with pytest.raises(MeasurementError, match="stop here"):
                builds.build(commit)
    finally:
        git(tiny, "reset", "-q", "--hard", "HEAD~1")
    source = next(p for p in tmp_path.glob("*/source"))
    ((*_, constraint, pins, editable, place),) = asked
    assert (constraint, editable) == ("-c", "-e") and pins == str(source / "constraints.txt") and place == str(source)


def test_same_dependencies(tmp_path):
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((HOUSE / name).read_text())
    assert same_dependencies(tmp_path)
    pins = (tmp_path / "constraints.txt").read_text()
    (tmp_path / "constraints.txt").write_text("# another comment\n" + "\n".join(reversed(pins.splitlines())))
    assert same_dependencies(tmp_path)
    (tmp_path / "constraints.txt").write_text(pins.replace("numpy==", "numpy==9"))
    assert not same_dependencies(tmp_path)
    (tmp_path / "constraints.txt").write_text(pins)
    project = (tmp_path / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(project.replace('"numpy>=2.0"', '"numpy>=2.1"'))
    assert not same_dependencies(tmp_path)
    (tmp_path / "pyproject.toml").write_text(project.replace('name = "kvbench"', 'name = "kvbench2"'))
    assert same_dependencies(tmp_path)
    (tmp_path / "pyproject.toml").unlink()
    assert not same_dependencies(tmp_path)


def test_a_package_from_elsewhere_is_refused(tiny, tmp_path):
    """As if an installed kvbench won over the source: then another engine would be measured."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    found = ask(Path(sys.executable), {"PYTHONPATH": f"{tmp_path}{os.pathsep}{tiny}", "PYTHONSAFEPATH": "1"})
    assert found.packages["engine"] == str(tiny / "engine" / "__init__.py")
    with pytest.raises(MeasurementError, match=f"would import 'kernels' from {tmp_path}"):
        require_source(found, tiny)
    with pytest.raises(MeasurementError, match="would import 'engine' from nowhere"):
        require_source(environments.Environment(Path("p"), {"engine": None}, {}), tiny)


def test_a_python_that_does_not_start_says_so(tmp_path):
    with pytest.raises(MeasurementError, match="does not start"):
        ask(tmp_path / "none", {})


def test_no_kvbench_is_among_the_layers(monkeypatch, tiny):
    monkeypatch.setattr(sys, "path", ["", str(HOUSE), str(tiny), *sys.path, "/nowhere"])
    layers = running_layers()
    assert layers and not [p for p in layers if is_kvbench(p) or not p.is_dir()]
    assert Path(numpy.__file__).parent.parent in layers


def test_a_cache_that_cannot_be_written_says_where(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with Builds(tmp_path / "file" / "builds") as builds, pytest.raises(MeasurementError, match="builds"):
        builds.build(find_commit(tiny, "HEAD"))


def test_where_builds_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert builds_folder() == tmp_path / "kvbench" / "builds"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard: to be ignored
    assert builds_folder() == Path.home() / ".cache" / "kvbench" / "builds"
