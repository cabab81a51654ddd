"""What the sweep's integration tests share: a tiny workload, the fake server, and running the command line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import unittest.mock
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.cli.main import main
from kvbench.measure.http import HttpInstrument
from kvbench.runs.results import LoadResult
from kvbench.sweep import order
from tests.support.loads import FAKE, ROOT

# A busy test machine may make the client late and take cores from the server; that is not what is tested here.
BUSY_MACHINE = ("the client", "other processes used", "the host took")

TINY: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "model": {"config": "llama-32m"},
    "engine": {"layout": "paged", "page_size": 16, "kv_budget": "65MiB", "max_model_len": 256, "max_num_seqs": 8},
    "sweep": {"layout": ["contiguous"]},
    "load": {
        "concurrency": [2],
        "num_requests": 6,
        "repeats": 2,
        "timeout_s": 20.0,
        "prompts": {
            "kind": "synthetic",
            "shared_prefix": {"tokens": 8, "share": 0.5},
            "classes": [{"name": "a", "share": 1.0, "prompt_tokens": [4, 32], "output_tokens": [4, 12]}],
        },
    },
}


@dataclass
class Bench:
    """A folder with a workload; runs kvbench in it.

    ``again``: disturbed loads are invalid and are measured again. Without it, loads that run in this process count as
    undisturbed; else what else runs on the machine would decide what is launched and what is valid.
    """

    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 100.0
    again: bool = False

    def write(self, name: str = "tiny.yaml", **sections: Any) -> Path:
        """TINY with ``load`` keys and whole sections replaced."""
        data = json.loads(json.dumps(TINY))
        data["load"] |= sections.pop("load", {})
        path = self.folder / name
        path.write_text(yaml.safe_dump(data | sections))
        return path

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def launches(self) -> list[dict[str, Any]]:
        """One entry a server launch, with its pid and flags."""
        path = self.folder / "launches.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def command(self, *arguments: str, fake: bool = True) -> list[str]:
        extra = ["--output-dir", str(self.results)]
        extra += ["--serve-cmd", f"{sys.executable} {FAKE}"] if fake else []
        return [sys.executable, "-m", "kvbench", "sweep", *arguments, *extra]

    def environment(self, **env: str) -> dict[str, str]:
        ours = {
            "FAKE_LAUNCHES": str(self.folder / "launches.jsonl"),
            "TMPDIR": str(self.folder),
            "NO_COLOR": "1",
            "KVBENCH_WAIT_IDLE": "2" if self.again else "0",  # minutes
            "GIT_DIR": str(self.folder / "no-git"),  # a commit while the tests run must not keep a run from resuming
        }
        return {**os.environ, **ours, **self.env, **env}

    def sweep(self, *arguments: str, fake: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        """``kvbench sweep`` in this process."""
        return self.kvbench(*self.command(*arguments, fake=fake)[3:], **env)

    def kvbench(self, *words: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
        """A command in this process, which has imported what it needs."""
        out, err = io.StringIO(), io.StringIO()
        measures_again = order.measures_again if self.again else lambda done, attempts: False
        send = HttpInstrument.send if self.again else undisturbed
        with (
            unittest.mock.patch.object(order, "measures_again", measures_again),
            unittest.mock.patch.object(HttpInstrument, "send", send),
            unittest.mock.patch.dict(os.environ, self.environment(**env)),
            contextlib.chdir(cwd),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            main(list(words))
        assert "Traceback" not in err.getvalue() and "something unexpected" not in err.getvalue(), err.getvalue()
        return subprocess.CompletedProcess(words, ended.value.code, out.getvalue(), err.getvalue())

    def run(self, command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment(**env), capture_output=True, text=True, check=False,
            timeout=self.timeout_s,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        assert "something unexpected" not in done.stderr, done.stderr
        return done

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            cwd=ROOT,
            env=self.environment(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def only_run(self) -> Path:
        (run,) = self.results.glob("*/*")
        return run


_SEND = HttpInstrument.send


def undisturbed(*arguments: Any) -> LoadResult:
    """``HttpInstrument.send`` as on a machine where nothing else runs."""
    found = _SEND(*arguments)
    reasons = tuple(reason for reason in found.invalid_reasons if not any(words in reason for words in BUSY_MACHINE))
    valid = not (reasons or found.refused or found.wrong_answers)
    return found.model_copy(update={"valid": valid, "invalid_reasons": reasons, "disturbances": ()})


def finished(run: Path) -> dict[tuple[str, str], float]:
    """(cell, repeat) -> time of its done.json."""
    return {(p.parts[-4], p.parts[-2]): p.stat().st_mtime for p in run.glob("cells/*/loads/[0-9]*/done.json")}


def manifest(run: Path) -> dict[str, Any]:
    return json.loads((run / "manifest.json").read_text())


def complaints(run: Path) -> list[str]:
    """Why loads are invalid, apart from a machine that is busy."""
    found = [r for p in run.glob("cells/*/summary.json") for r in json.loads(p.read_text())["invalid_reasons"]]
    return [reason for reason in found if not any(words in reason for words in BUSY_MACHINE)]


def wait_until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the awaited never happened"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def end(process: subprocess.Popen[str], number: int) -> tuple[int, str]:
    """Signal it; (exit code, output). Fails when it takes more than 20 s."""
    process.send_signal(number)
    try:
        output, _ = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, output
