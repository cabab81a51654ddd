"""``kvbench gate counters`` and ``kvbench accept counters`` as commands, on this source and on mutants of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from kvbench.cli.gate_counters import accept, counters
from kvbench.common.errors import MeasurementError, UsageError
from tests.support.counter_files import Gate

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "import sys; from kvbench.cli.gate_counters import {0} as command; sys.exit(command(standalone_mode=False))"


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path)


def run(command, *arguments: object):
    """What the command returned or raised, and printed."""
    result = CliRunner().invoke(command, [str(each) for each in arguments], standalone_mode=False)
    if isinstance(result.exception, UsageError | MeasurementError):
        return result.exception.exit_code, str(result.exception)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output


def test_the_files_of_a_verdict(gate, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    gate.workload_path.write_text(gate.workload_path.read_text().replace("output: 12", "output: 13"))
    folder = tmp_path / "out"
    code, output = run(counters, gate.workload_path, "--lock", gate.lock_path, "--output-dir", folder)
    assert code == 1 and f"written: {folder / 'verdict.json'}" in output
    verdict = json.loads((folder / "verdict.json").read_text())
    assert (verdict["kind"], verdict["outcome"], verdict["exit_code"]) == ("counters", "fail", 1)
    cases = ElementTree.parse(folder / "junit.xml").getroot().iter("testcase")
    assert [case.find("failure") is not None for case in cases] == [False, False, False, True, True]
    assert "2 of 5 scenarios differ" in (tmp_path / "step.md").read_text().splitlines()[0]


def test_some_scenarios_only(gate):
    """A new or removed scenario alone fails as it does among all: its finding says to reproduce it so."""
    gate.workload_path.write_text(gate.workload_path.read_text().replace("reservation: [oracle]", "reservation: [max]"))
    for only, expected, words in (
        (("*-swap", "forks/*"), 0, ("PASS  all 3 scenarios",)),
        (("nothing*",), 5, ("nothing*", "'grow/*' (3)", "'forks/*' (2)")),
        (("grow/contiguous-max",), 1, ("new in the workload",)),
        (("grow/contiguous-oracle",), 1, ("no longer in the",)),
    ):
        globs = [word for glob in only for word in ("--only", glob)]
        code, output = run(counters, gate.workload_path, "--lock", gate.lock_path, *globs)
        assert code == expected and all(each in output for each in words), output


def test_an_engine_that_depends_on_a_hash_is_caught_and_cannot_be_accepted(gate, tmp_path):
    """A mutant of the source, twice; other mistakes are patched engines in tests/unit/gate/test_counter_gate.py."""
    source = tmp_path / "source"
    for package in ("engine", "kernels", "kvbench"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    scheduler = source / "engine" / "scheduling" / "scheduler.py"
    text, old = scheduler.read_text(), "self._share)"
    assert text.count(old) == 1, "the mutation no longer fits the source"
    scheduler.write_text(text.replace(old, "self._share, 4 + hash('share') % 8)"))
    before = gate.lock_path.read_bytes()
    env = {**os.environ, "PYTHONPATH": str(source), "COLUMNS": "200"}
    env["PYTHONHASHSEED"] = "0"  # the second run then has 1: by chance two seeds may agree
    files = (str(gate.workload_path), "--lock", str(gate.lock_path))
    for name, words in (("counters", files), ("accept", ("counters", *files, "--reason", "let it be"))):
        command = [sys.executable, "-c", COMMAND.format(name), *words]
        done = subprocess.run(command, env=env, cwd=source, capture_output=True, text=True, timeout=120)
        assert done.returncode == 4, done.stdout + done.stderr
        if name == "counters":
            assert "between" in done.stdout and len(done.stdout.splitlines()) < 50
    assert "nothing was accepted" in done.stderr and gate.lock_path.read_bytes() == before


def test_what_cannot_be_compared_is_no_pass(gate, tmp_path, monkeypatch):
    files = (gate.workload_path, "--lock", gate.lock_path)
    with monkeypatch.context() as patch:
        patch.setattr("kvbench.gate.counters.replay.sys.executable", shutil.which("false"))
        code, words = run(counters, *files)
    assert code == 4 and "the second run of the scenarios failed with exit code 1" in words
    code, words = run(accept, "counters", *files, "--reason", "  ")
    assert code == 2 and "--reason" in words
    assert run(counters, tmp_path / "none.yaml")[0] == 2
    gate.lock_path.write_text("{}")
    assert run(counters, *files)[0] == 2
    gate.lock_path.unlink()
    code, output = run(counters, *files)
    assert code == 5 and "accept: kvbench accept counters" in output
    code, output = run(accept, "counters", *files, "--reason", "  a new gate ")
    assert code == 0 and "the first lock file, 5 scenarios" in output and "reason: a new gate\n" in output
    assert run(counters, *files)[0] == 0
    monkeypatch.chdir(tmp_path)
    code, words = run(accept, "counters", "--reason", "r")  # outside of the repository
    assert code == 2 and str(tmp_path) in words
    assert run(counters, "--only", "async-forks/*")[0] == 0  # held against the lock that ships
