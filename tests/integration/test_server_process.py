"""The server as a process: what it prints, how it refuses to start, how it stops."""

from __future__ import annotations

import contextlib
import http.client
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

from engine.server.__main__ import main
from kvbench.common.foreign_cpu import tree_cpu_s

ROOT = Path(__file__).parents[2]
KVBENCH = (sys.executable, "-m", "kvbench")
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


PROCESSES = pytest.mark.parametrize("processes", ["--no-frontend-multiprocessing", "--frontend-multiprocessing"])


@PROCESSES
@pytest.mark.parametrize(("number", "step_s"), [(signal.SIGTERM, 0.01), (signal.SIGINT, 30.0)])
def test_a_signal_stops_it_within_five_seconds_and_ends_the_streams(
    number: signal.Signals, step_s: float, processes: str
) -> None:
    with running(step_s, processes) as (process, port):
        body = json.dumps({"prompt": [5], "max_tokens": 1000, "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            if step_s < 1:
                assert b"data: " in sock.recv(65536) + sock.recv(65536)
            else:
                time.sleep(0.3)  # the first step holds the engine's thread now
            os.killpg(process.pid, number)  # as a terminal does, and kvbench
            out, err = process.communicate(timeout=STOP_SECONDS)
            received = b"".join(iter(lambda: sock.recv(65536), b""))
        assert process.returncode == 0, err
        assert "Traceback" not in err
        assert out == ""
        if step_s < 1:
            assert b"shutting down" in received
            assert b"[DONE]" not in received


def server_info(port: int) -> dict[str, Any]:
    return httpx.get(f"http://127.0.0.1:{port}/server_info", timeout=20).json()


def wait_until(condition: Callable[[], bool]) -> None:
    """Fails after 5 s."""
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_engine_s_process_that_hangs_or_is_killed_shows_in_health_and_its_end_ends_the_streams() -> None:
    with running(0.01, "--frontend-multiprocessing", "--watchdog-timeout", "0.5") as (process, port):
        url = f"http://127.0.0.1:{port}"
        body = {"prompt": [5], "max_tokens": 1000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            engine = server_info(port)["engine_pid"]
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
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
            body = json.dumps({"prompt": [5], "max_tokens": 10}).encode()
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            time.sleep(0.3)  # it is in a step now, and reads nothing
            process.kill()
            wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))


def test_both_processes_count_as_the_server() -> None:
    """For its own metrics, and for kvbench's account of CPU and memory."""
    with running(0.001, "--frontend-multiprocessing") as (process, port):
        info = server_info(port)
        engine = psutil.Process(info["engine_pid"])
        assert info["pid"] == process.pid and engine.ppid() == process.pid
        body = {"prompt": [5], "max_tokens": 1000}
        before = engine.cpu_times().user, tree_cpu_s(process.pid)
        httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=20)
        after = engine.cpu_times().user, tree_cpu_s(process.pid)
        assert 0 < after[0] - before[0] <= after[1] - before[1]
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=20).text
        resident = float(re.search(r"^kvbench:process_resident_bytes (\S+)$", text, re.MULTILINE)[1])
        both = engine.memory_info().rss + psutil.Process(process.pid).memory_info().rss
        assert abs(resident - both) < 0.05 * both


def test_settings_that_the_engine_s_process_refuses_are_one_sentence() -> None:
    flags = ["--frontend-multiprocessing", "--port", "0", "--kv-budget", "48MiB", "--max-model-len", "4096"]
    command = [sys.executable, "-m", "engine.server", "--device", "cpu", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "kv_budget" in done.stderr


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "engine.server", "--port", str(port)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"127.0.0.1:{port}" in done.stderr and "--port" in done.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--page-size", "0"], "page_size cannot be 0"),
        (["--port", "99999"], "port cannot be 99999"),
        (["--host", "203.0.113.7", "--port", "0"], "203.0.113.7"),
        (["--model", "/nowhere/model", "--port", "0"], "/nowhere/model"),
        (["--step-log", "/nowhere/steps.csv", "--port", "0"], "/nowhere/steps.csv"),
        (["--swap-space", "much", "--port", "0"], "'much' is not a size"),
        (["--max-num-waiting", "0", "--port", "0"], "max_num_waiting cannot be 0"),
        (["--watchdog-timeout", "nan", "--port", "0"], "watchdog_timeout cannot be nan"),
        (["--tokenizer", "/nowhere/tok", "--model", "llama-32m", "--port", "0"], "/nowhere/tok"),
    ],
)
def test_impossible_settings_are_one_sentence(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and named in err


def test_the_example_of_its_help_serves_and_says_what_it_does_until_then() -> None:
    """Its budget holds no sequence of the model's own length: the length is lowered, in one line."""
    text = subprocess.run([*KVBENCH, "serve", "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
    example = shlex.split(re.search(r"example: kvbench (.*)", text)[1])
    command = [*KVBENCH, *example[: example.index("--port")], "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        ready = process.stdout.readline()
        assert re.fullmatch(r"ready http://127\.0\.0\.1:\d+\n", ready), process.stderr.read()
        length = httpx.get(f"{ready.split()[1]}/v1/models", timeout=20).json()["data"][0]["max_model_len"]
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=STOP_SECONDS)
    finally:
        process.kill()
    lowered, *phases = err.splitlines()
    assert (process.returncode, out) == (0, "") and 1024 < length < 4096
    assert f" {length} " in lowered and "--kv-budget" in lowered
    assert len(phases) >= 3 and all(line.startswith("loading llama-32m: ") for line in phases)


TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    "max_position_embeddings": 512,
}  # fmt: skip
NEEDLESS = (
    "accelerate", "gevent", "kvbench.load", "locust", "matplotlib", "pandas", "plotly", "scipy.optimize", "sklearn",
    "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.onnx",
    "transformers", "transformers.models", "transformers.processing_utils", "triton",
)  # fmt: skip


def test_what_serving_does_not_need_is_not_imported(tmp_path: Path) -> None:
    """By a server that is ready on a CPU: these take a third of the time of all imports.

    What ``engine.startup`` has put in the place of a module is not counted: that module's code has not run.
    """
    model = tmp_path / "tiny.json"
    model.write_text(json.dumps(TINY))
    code = """
import sys
import engine.engine_loop
from kvbench.__main__ import main
def told(self):
    while self._run_once():
        print(*(name for name, module in sys.modules.items() if type(module).__name__ != "_OnDemand"), flush=True)
        own(self)
own, engine.engine_loop.EngineLoop.run = engine.engine_loop.EngineLoop.run, told
sys.exit(main())
"""
    flags = ["--model", str(model), "--device", "cpu", "--port", "0"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", *flags], cwd=ROOT, stdout=pipe, stderr=pipe, text=True
    )
    try:
        ready = process.stdout.readline()
        assert ready.startswith("ready http://127.0.0.1:"), ready + process.stderr.read()
        assert httpx.get(f"{ready.split()[1]}/metrics", timeout=20).status_code == 200  # a command wakes the loop
        modules = set(process.stdout.readline().split())
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=STOP_SECONDS)
    finally:
        process.kill()
    assert {"torch", "transformers.modeling_utils", "kernels.numba_backend"} <= modules
    assert not {name for name in NEEDLESS if name in modules}


@PROCESSES
def test_the_step_log_is_complete_when_the_server_has_stopped(tmp_path: Path, processes: str) -> None:
    path = tmp_path / "steps.csv"
    with running(0.01, "--step-log", str(path), processes) as (process, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": [5, 6], "max_tokens": 12, "n": 2}))
        usage = json.loads(connection.getresponse().read())["usage"]
        connection.close()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=STOP_SECONDS)
        assert process.returncode == 0, err
    header, *lines = path.read_text().splitlines()
    assert header.startswith("time_s,step,prefill_tokens,decode_tokens,")
    rows = [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]
    assert usage["completion_tokens"] == 24
    assert sum(int(row["prefill_tokens"]) for row in rows) == 2
    assert sum(int(row["decode_tokens"]) for row in rows) == 22
