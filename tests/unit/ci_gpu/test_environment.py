"""The environment of the parts: wheels from a folder on top of what is here."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from ci.gpu import environment as environment_module
from ci.gpu import record, requirements
from ci.gpu.environment import PartEnvironment, prepare

WHEELS_SCRIPT = Path(__file__).resolve().parents[3] / "ci" / "gpu_wheels.sh"


def make_wheel(folder: Path, name: str) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "answer = 42\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.mark.full
def test_wheels_go_into_an_environment_that_sees_what_is_here(tmp_path, monkeypatch):
    """A missing wheel is a note, and costs the others nothing. Nothing is changed outside the folder."""
    pytest.importorskip("pip")
    wheels, home = tmp_path / "wheels", tmp_path / "home"
    wheels.mkdir()
    home.mkdir()
    make_wheel(wheels, "kvbench_probe_wheel")
    wanted = ("kvbench_probe_wheel", "kvbench_probe_missing", "numpy")  # the last one is here
    monkeypatch.setattr(environment_module, "read_requirements", lambda: dict.fromkeys(wanted, ""))
    found = prepare(home, wheels)
    assert found.python.startswith(str(home))
    missing = found.missing(
        ["kvbench_probe_wheel", "kvbench_probe_missing", "torch", "triton", "json", "no.such.thing"]
    )
    assert missing == ["kvbench_probe_missing", "no.such.thing"]
    assert len(found.notes) == 1 and found.notes[0].startswith("kvbench_probe_missing could not be installed")
    assert PartEnvironment().missing(["kvbench_probe_wheel"]) == ["kvbench_probe_wheel"]
    assert record.versions(found.python)["torch"] == record.versions(sys.executable)["torch"]


@pytest.fixture
def with_pip(tmp_path, monkeypatch):
    """Prepare an environment of ``names`` with ``script`` in pip's place: the notes, and the names of each call."""

    def of(script: str, names: list[str], until: float = math.inf) -> tuple[list[str], list[list[str]]]:
        monkeypatch.setattr(environment_module, "read_requirements", lambda: dict.fromkeys(names, ""))
        calls, real = [], subprocess.run

        def run(command, **how):
            if "pip" not in command:
                return real(command, **how)
            calls.append(command[command.index("--constraint") + 2 :])
            return real([sys.executable, "-c", script], **how)

        monkeypatch.setattr(environment_module.subprocess, "run", run)
        return prepare(tmp_path / "home", tmp_path, until).notes, calls

    return of


def test_pip_stops_at_the_end_of_its_time(with_pip, tmp_path):
    """One that hangs is stopped, the names left over are not tried one by one, and the summary tells all of them."""
    started = time.monotonic()
    notes, calls = with_pip("import time; time.sleep(600)", ["kvbench_probe_a", "kvbench_probe_b"], started + 1.0)
    assert time.monotonic() - started < 60
    assert calls == [["kvbench_probe_a", "kvbench_probe_b"]]
    assert notes == [f"no time left to install kvbench_probe_a, kvbench_probe_b from {tmp_path.name}"]


def test_what_pip_says_is_told_without_the_paths_of_this_machine(with_pip):
    said = "ERROR: bad wheel '/home/me/w/a-1.whl' (file:///home/me/w/a-1.whl), see https://pip.pypa.io/help and a/b"
    ((note,), _) = with_pip(f"import sys; sys.exit({said!r})", ["kvbench_probe_a"])
    assert note.endswith("ERROR: bad wheel 'a-1.whl' (a-1.whl), see https://pip.pypa.io/help and a/b")


def test_without_wheels_this_python_is_used_as_it_is(tmp_path):
    assert prepare(tmp_path, None).python == sys.executable
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["D", "--bogus"], ["D", "--skip"], ["D", "--python", "4"]])
def test_filling_a_folder_of_wheels_needs_a_folder_and_known_options(tmp_path, arguments):
    done = subprocess.run([str(WHEELS_SCRIPT), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and done.stderr.startswith("ci/gpu_wheels.sh: error: ") and "--help" in done.stderr
    assert not list(tmp_path.iterdir())


FAKE_PIP = """#!/bin/sh
case "$*" in *ci.gpu.requirements*) exec REAL "$@" ;; esac
while [ $# -gt 0 ]; do
  case "$1" in
    --dest) folder="$2" ;;
    --requirement) cp "$2" "$folder/list" ;;
    --python-version) version="$2" ;;
  esac
  shift
done
for name in Small_Thing-1.0 numpy-2.0 click-8.0; do : > "$folder/$name-cp312.whl"; done
echo "$version" > "$folder/version"
"""


def test_the_wheels_are_those_of_the_requirements_and_what_the_machine_has_is_left_out(tmp_path):
    fake = tmp_path / "python"
    fake.write_text(FAKE_PIP.replace("REAL", sys.executable))
    fake.chmod(0o755)
    folder = tmp_path / "wheels"
    command = [str(WHEELS_SCRIPT), str(folder), "--python", "3.11", "--skip", "small-thing,absent"]
    done = subprocess.run(command, env={**os.environ, "PYTHON": str(fake)}, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and "1 wheels" in done.stdout, done.stderr
    assert (folder / "version").read_text() == "3.11\n"
    assert (folder / "list").read_text().splitlines() == list(requirements.read_requirements().values())
    assert [path.name for path in folder.glob("*.whl")] == ["click-8.0-cp312.whl"]
