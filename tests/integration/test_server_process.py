"""The server as a process: what it prints, how it refuses to start, how it stops."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from kvbench.common.foreign_cpu import tree_cpu_s
from kvbench_engine.server.__main__ import main
from kvbench_engine.server.arguments import build_parser

ROOT = Path(__file__).parents[2]
STOP_SECONDS = 5


@contextlib.contextmanager
def running(step_s: float, *flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "tests.support.scripted_server", "--port", "0", *flags]
    env = {**os.environ, "SCRIPTED_STEP_S": str(step_s)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        ready = process.stdout.readline()
        assert ready.startswith("ready http://127.0.0.1:"), ready + process.stderr.read()
        yield process, int(ready.rsplit(":", 1)[1])
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("processes", ["--no-frontend-multiprocessing", "--frontend-multiprocessing"])
@pytest.mark.parametrize(("number", "step_s"), [(signal.SIGTERM, 0.01), (signal.SIGINT, 30.0)])
def test_a_signal_stops_it_within_five_seconds_ends_the_streams_and_completes_the_step_log(
    number: signal.Signals, step_s: float, processes: str, tmp_path: Path
) -> None:
    log = tmp_path / "steps.csv"
    with running(step_s, processes, "--step-log", str(log)) as (process, port):
        if step_s < 1:
            body = {"prompt": [5, 6], "max_tokens": 12, "n": 2}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=20).json()
            assert answer["usage"]["completion_tokens"] == 24
        with asking(port, {"prompt": [5], "max_tokens": 1000, "stream": True}) as sock:
            if step_s < 1:
                assert b"data: " in sock.recv(65536) + sock.recv(65536)
            else:
                time.sleep(0.3)  # the first step holds the engine's thread now
            os.killpg(process.pid, number)  # as a terminal does, and kvbench
            out, err = process.communicate(timeout=STOP_SECONDS)
            received = b"".join(iter(lambda: sock.recv(65536), b""))
    assert (process.returncode, out, "Traceback" in err) == (0, "", False), err
    if step_s < 1:
        assert b"shutting down" in received and b"[DONE]" not in received
        header, *lines = log.read_text().splitlines()
        rows = [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]
        assert [int(row["decode_tokens"]) for row in rows[1:12]] == [2] * 11
        assert sum(int(row["prefill_tokens"]) for row in rows) == 3


def asking(port: int, body: dict[str, Any]) -> socket.socket:
    """A connection on which the request has been sent."""
    raw = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", port), timeout=10)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
    return sock


def server_info(port: int) -> dict[str, Any]:
    return httpx.get(f"http://127.0.0.1:{port}/server_info", timeout=20).json()


def wait_until(condition: Callable[[], bool]) -> None:
    """Fails after 5 s."""
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_engine_s_process_that_hangs_or_is_killed_shows_in_health_and_its_end_ends_the_streams() -> None:
    """And both processes count as the server, for its own metrics and for kvbench's account of CPU and memory."""
    with running(0.001, "--frontend-multiprocessing", "--watchdog-timeout", "0.5") as (process, port):
        url = f"http://127.0.0.1:{port}"
        info = server_info(port)
        child = psutil.Process(info["engine_pid"])
        assert info["pid"] == process.pid and child.ppid() == process.pid
        before = child.cpu_times().user, tree_cpu_s(process.pid)
        httpx.post(f"{url}/v1/completions", json={"prompt": [5], "max_tokens": 1000}, timeout=20)
        after = child.cpu_times().user, tree_cpu_s(process.pid)
        assert 0 < after[0] - before[0] <= after[1] - before[1]
        text = httpx.get(f"{url}/metrics", timeout=20).text
        resident = float(re.search(r"^kvbench:process_resident_bytes (\S+)$", text, re.MULTILINE)[1])
        both = child.memory_info().rss + psutil.Process(process.pid).memory_info().rss
        assert abs(resident - both) < 0.05 * both

        body = {"prompt": [5], "max_tokens": 1000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            engine = child.pid
            os.kill(engine, signal.SIGSTOP)
            wait_until(lambda: httpx.get(f"{url}/health", timeout=20).status_code == 503)
            assert "has ended no step" in httpx.get(f"{url}/health", timeout=20).json()["error"]["message"]
            os.kill(engine, signal.SIGCONT)
            wait_until(lambda: httpx.get(f"{url}/health", timeout=20).status_code == 200)
            os.kill(engine, signal.SIGKILL)
            events = [line for line in lines if line]
        assert "signal 9" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
        health = httpx.get(f"{url}/health", timeout=20)
        assert health.status_code == 503 and "signal 9" in health.json()["error"]["message"]
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=20).status_code == 503
        assert httpx.get(f"{url}/metrics", timeout=20).status_code == 200  # the last reading
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_SECONDS) == 0
        assert "signal 9" in process.stderr.read()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel kills the child of a killed parent")
def test_an_engine_s_process_does_not_outlive_a_server_that_is_killed() -> None:
    with running(30.0, "--frontend-multiprocessing") as (process, port):
        engine = psutil.Process(server_info(port)["engine_pid"])
        with asking(port, {"prompt": [5], "max_tokens": 10}):
            time.sleep(0.3)  # it is in a step now, and reads nothing
            process.kill()
            wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--page-size", "0"], "page_size cannot be 0"),
        (["--device", "cpu", "--kv-budget", "48MiB", "--max-model-len", "4096", "--port", "0"], "kv_budget"),
        (["--host", "203.0.113.7", "--port", "0"], "203.0.113.7"),
        (["--model", "/nowhere/model", "--port", "0"], "/nowhere/model"),
        (["--step-log", "/nowhere/steps.csv", "--port", "0"], "/nowhere/steps.csv"),
        (["--watchdog-timeout", "nan", "--port", "0"], "watchdog_timeout cannot be nan"),
        (["--tokenizer", "/nowhere/tok", "--model", "llama-32m", "--port", "0"], "/nowhere/tok"),
    ],
)
def test_impossible_settings_are_one_sentence(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and named in err


def test_a_port_in_use_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--port", str(port)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"127.0.0.1:{port}" in err and "--port" in err


NEEDLESS = (
    "accelerate", "gevent", "kvbench.load", "locust", "matplotlib", "pandas", "plotly", "scipy.optimize", "sklearn",
    "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.onnx",
    "transformers", "transformers.models", "transformers.processing_utils", "triton",
)  # fmt: skip


def test_the_example_of_its_help_serves_and_imports_only_what_serving_needs() -> None:
    """Its budget holds no sequence of the model's own length: the length is lowered, in one line.

    What is not needed takes a third of the time of all imports. What ``engine.startup`` has put in the place of a
    module is not counted: that module's code has not run.
    """
    code = """
import sys
import kvbench_engine.engine_loop
from kvbench.__main__ import main
def told(self):
    while self._run_once():
        print(*(name for name, module in sys.modules.items() if type(module).__name__ != "_OnDemand"), flush=True)
        own(self)
own, kvbench_engine.engine_loop.EngineLoop.run = kvbench_engine.engine_loop.EngineLoop.run, told
sys.exit(main())
"""
    example = shlex.split(re.search(r"example: kvbench (.*)", build_parser("kvbench serve").format_help())[1])
    command = [sys.executable, "-c", code, *example[: example.index("--port")], "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        ready = process.stdout.readline()
        assert re.fullmatch(r"ready http://127\.0\.0\.1:\d+\n", ready), process.stderr.read()
        length = httpx.get(f"{ready.split()[1]}/v1/models", timeout=20).json()["data"][0]["max_model_len"]
        assert httpx.get(f"{ready.split()[1]}/metrics", timeout=20).status_code == 200  # a command wakes the loop
        modules = set(process.stdout.readline().split())
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=STOP_SECONDS)
    finally:
        process.kill()
    lowered, *phases = err.splitlines()
    assert process.returncode == 0 and 1024 < length < 4096
    assert f" {length} " in lowered and "--kv-budget" in lowered
    assert len(phases) >= 3 and all(line.startswith("loading llama-32m: ") for line in phases)
    assert {"torch", "transformers.modeling_utils", "kvbench_kernels.numba_backend"} <= modules
    assert not {name for name in NEEDLESS if name in modules}
