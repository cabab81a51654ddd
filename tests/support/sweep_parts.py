"""What tests of sweeps share: a tiny workload, servers and loads that are real or scripted, and the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
import unittest.mock
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from kvbench.cli.main import main
from kvbench.common.errors import MeasurementError
from kvbench.common.files import write_json
from kvbench.measure.http import HttpInstrument, TargetInstrument
from kvbench.metrics.latency import summarise
from kvbench.requests.request import RequestSpec
from kvbench.runs.results import LoadResult
from kvbench.runs.server_info import KVRoom, ServerInfo
from kvbench.sweep import order
from kvbench.targets.base import ModelFacts, Target
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


class Up(Target):
    """A server that is there, with room for ``tokens`` (None: it does not tell), unless it is ``gone``."""

    starts_cold = True

    def __init__(self, tokens: int | None = None, gone: bool = False) -> None:
        super().__init__("http://127.0.0.1:1")
        self.gone, self.model = gone, ModelFacts("m", 8192, 256)
        self.info = ServerInfo(capacity=KVRoom(capacity_tokens=tokens)) if tokens else ServerInfo()

    def start(self, settings: Any, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("up\n")

    def server_info(self) -> ServerInfo:
        return self.info

    def check_alive(self) -> None:
        if self.gone:
            raise MeasurementError("the server was killed")

    def reset_prefix_cache(self) -> bool:
        return True


def answered(requests: Sequence[RequestSpec]) -> pd.DataFrame:
    """Rows of requests of one user, each answered with its last token after 0.1 s."""
    rows = []
    for i, request in enumerate(requests):
        first, last = i + 0.05, i + 0.1
        rows.append({
            "index": i, "class": request.cls, "prompt_tokens": len(request.prompt_token_ids),
            "output_tokens": request.max_tokens, "t0": float(i), "ts": float(i), "first": first, "last": last,
            "end": last, "chunk_times": [first, last], "ok": True, "error_kind": None, "text": "x",
        })  # fmt: skip
    return pd.DataFrame(rows)


@dataclass
class Script:
    """Loads without a server and a client, which take no time.

    ``disturbed``: how often each load (cell id, repeat) will still be disturbed; ``results``: what else its result
    says; ``launches``: the blocks whose servers were started, in order.
    """

    disturbed: Counter[tuple[str, int]] = field(default_factory=Counter)
    results: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    launches: list[str] = field(default_factory=list)
    target: type[Target] = Up

    @property
    def instrument(self) -> type[TargetInstrument]:
        script = self

        class Scripted(TargetInstrument):
            def open(self, block: Any) -> None:
                script.launches.append(block.block_id)
                self.job = dataclasses.replace(self.job, new_target=script.target)
                super().open(block)

            def run(self, cell: Any, repeat: int, out: Path) -> LoadResult:
                result, load = super().run(cell, repeat, out), (cell.cell_id, repeat)
                script.disturbed[load] -= 1
                reasons = (DISTURBED,) if script.disturbed[load] >= 0 else ()
                told = {"valid": not reasons, "invalid_reasons": reasons, "disturbances": reasons}
                return result.model_copy(update=told | script.results.get(load, {}))

            def send(self, point: Any, requests: Any, requests_file: Path, out: Path) -> LoadResult:
                self.job.listener.load_progress(1, len(requests), 0, 0.1)
                rows = answered(requests)
                rows.to_parquet(out / "requests.parquet")
                write_json(out / "load.json", {})
                write_json(out / "counters.json", {})
                metrics = summarise(rows, {"mode": point.mode, "concurrency": point.concurrency})
                return LoadResult(metrics=metrics, wall_s=1.0)

        return Scripted


DISTURBED = "other processes used 0.50 of a core"


@dataclass
class Bench:
    """A folder with a workload; runs kvbench in it.

    ``script``: loads are as it says, and disturbed ones are measured again. Without it, loads over HTTP that run in
    this process count as undisturbed; else what else runs on the machine would decide what is launched and valid.
    """

    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    script: Script | None = None

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
            "KVBENCH_WAIT_IDLE": "2" if self.script else "0",  # minutes
            "GIT_DIR": str(self.folder / "no-git"),  # a commit while the tests run must not keep a run from resuming
        }
        return {**os.environ, **ours, **self.env, **env}

    def sweep(self, *arguments: str, fake: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        """``kvbench sweep`` in this process."""
        return self.kvbench(*self.command(*arguments, fake=fake)[3:], **env)

    def kvbench(self, *words: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
        """A command in this process, which has imported what it needs."""
        out, err, patch = io.StringIO(), io.StringIO(), unittest.mock.patch
        if script := self.script:
            patches = [patch("kvbench.sweep.instruments.find_plugin", lambda *named: script.instrument)]
        else:
            patches = [patch.object(order, "measures_again", lambda done, attempts: False),
                       patch.object(HttpInstrument, "send", undisturbed)]  # fmt: skip
        with contextlib.ExitStack() as stack:
            for each in (*patches, patch.dict(os.environ, self.environment(**env)), contextlib.chdir(cwd)):
                stack.enter_context(each)
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            with pytest.raises(SystemExit) as ended:
                main(list(words))
        assert "Traceback" not in err.getvalue() and "something unexpected" not in err.getvalue(), err.getvalue()
        return subprocess.CompletedProcess(words, ended.value.code, out.getvalue(), err.getvalue())

    def run(self, command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
        """A command in a process of its own."""
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment(**env), capture_output=True, text=True, check=False, timeout=100.0
        )
        assert "Traceback" not in done.stderr and "something unexpected" not in done.stderr, done.stderr
        return done

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """``kvbench sweep`` in a process of its own, which the test may signal."""
        return subprocess.Popen(
            self.command(*arguments), cwd=ROOT, env=self.environment(**env), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

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
