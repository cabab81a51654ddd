"""Temporary folders: one's own, those of processes that live, and those of processes that were killed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvbench.targets.scratch import Scratch

HOLDER = """
import sys
from kvbench.targets.scratch import Scratch
mine = Scratch("kvbench-model-")
(mine.path / "weights").write_bytes(b"w")
print(mine.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holders(tmp_path):
    made = []

    def start() -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER], env={"TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        made.append(process)
        assert process.stdout
        return process, process.stdout.readline().strip()

    yield start
    for process in made:
        process.kill()
        process.communicate()


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(holders, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living, kept = holders()
    killed, left = holders()
    killed.kill()
    killed.wait()
    (tmp_path / "kvbench-model-foreign").mkdir()  # nobody's lock: not known to be ours
    (tmp_path / "kvbench-model-link").symlink_to(left)
    (tmp_path / "other").mkdir()
    own = Scratch("kvbench-model-")
    names = {path.name for path in tmp_path.iterdir()}
    expected = {kept.rpartition("/")[2], own.path.name, "kvbench-model-foreign", "kvbench-model-link", "other"}
    assert names == expected and living.poll() is None
    again = Scratch("kvbench-model-")
    assert own.path.is_dir() and again.path != own.path
    for each in (own, own, again):
        each.remove()
    assert not own.path.exists() and not again.path.exists()
