"""The load client's process, watched: what it is told, and what becomes of one that misbehaves."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from kvbench.common import processes
from kvbench.common.errors import MeasurementError
from kvbench.load import launch
from kvbench.load.spec import LoadSpec, read_spec
from kvbench.targets.base import reason_of
from kvbench.workload.load_section import LoadConfig, load_point

PROMPTS = {"kind": "synthetic", "classes": [{"name": "a", "share": 1.0, "prompt_tokens": 8, "output_tokens": 4}]}


@pytest.mark.parametrize(("concurrency", "rate"), [(3, None), (None, 2.5)])
def test_the_client_is_told_the_whole_load(tmp_path, concurrency, rate):
    mode = "closed" if concurrency else "open"
    load = LoadConfig.model_validate(
        {"mode": mode, "concurrency": concurrency, "request_rate": rate, "num_requests": 5, "prompts": PROMPTS}
        | {"timeout_s": 9, "connect_timeout_s": 2, "first_byte_timeout_s": 3, "idle_timeout_s": 4}
    )
    point = load_point(mode, concurrency=concurrency, rate=rate, num_requests=5)
    where = {"base_url": "http://127.0.0.1:1", "requests_file": str(tmp_path / "r"), "out_dir": str(tmp_path)}
    spec = LoadSpec.of(load, point, model="m", send_priority=True, dialect={"done_marker": False}, **where)
    spec.write(tmp_path / "spec.json")
    read = read_spec(tmp_path / "spec.json")
    assert read == spec and not read.dialect.done_marker
    assert (read.mode, read.concurrency, read.request_rate) == (mode, concurrency, rate)
    phases = (read.connect_timeout_s, read.first_byte_timeout_s, read.idle_timeout_s, read.timeout_s)
    assert phases == (2, 3, 4, 9)


def client(monkeypatch, code):
    """``code`` in place of the load client."""
    real = processes.launch
    started = []

    def launch(command, **options):
        started.append(real([sys.executable, "-c", code], **options))
        return started[-1]

    monkeypatch.setattr(processes, "launch", launch)
    return started


def drive(tmp_path, total=1, **options):
    spec = LoadSpec(
        base_url="", model="", mode="closed", concurrency=1, requests_file="", out_dir=str(tmp_path), timeout_s=1.0
    )
    launch.drive(spec, total=total, limit_s=20, on_progress=lambda *a: None, **options)


def test_a_client_that_does_not_end_is_stopped_with_a_sentence(tmp_path, monkeypatch):
    started = client(monkeypatch, "import os, time; os.close(1); time.sleep(60)")
    monkeypatch.setattr(launch, "_EXIT_LIMIT_S", 0.2)
    with pytest.raises(MeasurementError, match=r"closed its output but did not end within 0\.2 s"):
        drive(tmp_path)
    assert started[0].returncode is not None


def test_the_phases_are_told_in_order_while_the_client_lives(tmp_path, monkeypatch):
    lines = "".join(f'print(\'{{"event": "{e}"}}\', flush=True)\n' for e in ("begin", "measured", "end"))
    started = client(monkeypatch, lines + "import time; time.sleep(0.3)")
    seen = []
    drive(tmp_path, on_phase=lambda phase, pid: seen.append((phase, pid == started[0].pid, started[0].poll())))
    assert seen == [("begin", True, None), ("measured", True, None)]


@pytest.mark.parametrize("phase", ["start", "begin", "measured"])
def test_a_client_that_hangs_is_stopped_long_before_the_load_would_have_to_end(tmp_path, monkeypatch, phase):
    said = "" if phase == "start" else f'print(\'{{"event": "{phase}"}}\', flush=True)\n'
    started = client(monkeypatch, said + "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    monkeypatch.setattr(launch, "_SILENCE_S", {"start": 9.0, "begin": 9.0, "measured": 9.0} | {phase: 0.7})
    stop = processes.stop
    monkeypatch.setattr(processes, "stop", lambda process, grace_s: stop(process, 0.1))
    with pytest.raises(MeasurementError, match=r"hung \(it said nothing for 1 s\) and was stopped"):
        drive(tmp_path)
    assert started[0].returncode in (-signal.SIGTERM, -signal.SIGKILL)  # stopped ones are continued to take the TERM


LOST = """import sys; print("a note\\nkvbench load: the worker b was lost", file=sys.stderr); """
SAYS = """
import json, sys, time
for event in ("begin", "progress"):
    print(json.dumps({"event": event, "done": 9, "total": 40, "failed": 2, "elapsed_s": 1.0}), flush=True)
"""


def test_what_ends_a_load_tells_after_how_many_answers(tmp_path, monkeypatch):
    def killed():
        raise MeasurementError("the server was killed")

    client(monkeypatch, SAYS + "time.sleep(60)")
    with pytest.raises(MeasurementError, match=r"^after 7 of 40 requests: the server was killed$") as failed:
        drive(tmp_path, total=40, check=killed)

    class Server:
        def check_alive(self):
            raise MeasurementError("out of memory")

    assert reason_of(Server(), failed.value) == "after 7 of 40 requests: out of memory"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (SAYS + "sys.exit(4)", r"^after 7 of 40 requests: the load client ended with exit code 4"),
        ("""print('{"event": "end", "error": "the disk is full"}'); raise SystemExit(4)""",  # its log cannot be written
         "ended with exit code 4: the disk is full"),
        (LOST + "raise SystemExit(4)", "^the worker b was lost$"),  # what it says itself is passed on as it is
        (LOST + "raise SystemExit(1)", "ended with exit code 1: a note\nkvbench load: the worker"),  # but no crash
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", r"was killed by signal 9.*memory.*: \(it said"),
    ],
)  # fmt: skip
def test_what_a_client_that_ends_early_says(tmp_path, monkeypatch, code, said):
    client(monkeypatch, code)
    with pytest.raises(MeasurementError, match=said):
        drive(tmp_path, total=40)


def test_a_process_that_outlives_kill_is_given_up(monkeypatch):
    class Stuck:
        pid = 2**22 + 5  # no such process
        mark = "none"
        known = frozenset()

        def remember(self):
            return frozenset()

        def wait(self, timeout):
            raise subprocess.TimeoutExpired("x", timeout)

        def release_watchdog(self):
            pass

    assert processes.stop(Stuck(), grace_s=0.1) == -9
