"""The environment of the parts: wheels from a folder on top of what is here."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from ci.gpu import environment as environment_module
from ci.gpu import record
from ci.gpu.environment import Environment, prepare


def make_wheel(folder: Path, name: str) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "answer = 42\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


def test_wheels_go_into_an_environment_that_sees_what_is_here(tmp_path, monkeypatch):
    """A missing wheel is a note, and costs the others nothing. Nothing is changed outside the folder."""
    pytest.importorskip("pip")
    wheels, home = tmp_path / "wheels", tmp_path / "home"
    wheels.mkdir()
    home.mkdir()
    make_wheel(wheels, "kvbench_probe_wheel")
    (tmp_path / "wanted.txt").write_text("# names\nkvbench_probe_wheel\nkvbench_probe_missing\nnumpy  # is here\n")
    monkeypatch.setattr(environment_module, "REQUIREMENTS", tmp_path / "wanted.txt")
    found = prepare(home, wheels)
    assert found.python.startswith(str(home))
    missing = found.missing(
        ["kvbench_probe_wheel", "kvbench_probe_missing", "torch", "triton", "json", "no.such.thing"]
    )
    assert missing == ["kvbench_probe_missing", "no.such.thing"]
    assert len(found.notes) == 1 and found.notes[0].startswith("kvbench_probe_missing could not be installed")
    assert Environment().missing(["kvbench_probe_wheel"]) == ["kvbench_probe_wheel"]
    assert record.versions(found.python)["torch"] == record.versions(sys.executable)["torch"]


def test_without_wheels_this_python_is_used_as_it_is(tmp_path):
    assert prepare(tmp_path, None).python == sys.executable
    assert not list(tmp_path.iterdir())
