"""What many streams cost the engine: HTTP on the engine's interpreter, and in a process of its own.

    python -m pytest tests/benchmarks/test_server_streams.py

``test_tokens_beside_streams``: the small model on this machine, output tokens/s as a client in another process reads
them. ``test_steps_beside_streams``: the server's engine plans and counts as always, and its device takes a fixed time a
step and none of the CPU's, like a GPU (``tests/support/timed_server.py``). ``step_ms`` and ``step_p99_ms``: the time
from step to step. ``host_ms``: what it is longer than the device's. ``itl_ms``: mean time between the events of a
stream as the client reads them. ``server_cores``: CPU of the server's processes. ``mode`` is the switch interval in ms
of one process (5 is Python's default), or two processes. Server and client share this machine's cores: with few of them
the second process has none of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import pytest
from bench_engine import model_name, server
from bench_timing import choose, note

LOADS = choose(full=[(64, 5), (256, 20), (256, 5)], quick=[(64, 5)], smoke=[(4, 5)])  # (streams, ms a step)
MODES = choose(full=["5", "0.5", "0.1", "two"], quick=["5", "0.5", "two"], smoke=["two"])
TOKENS = choose(full=4000, quick=4000, smoke=1000)
PROCESSES = ["--no-frontend-multiprocessing", "--frontend-multiprocessing"]
WARM_S, SECONDS = choose(full=2.0, quick=1.0, smoke=0.2), choose(full=4.0, quick=2.0, smoke=0.3)


async def _stream(port: int, counts: list[int], number: int) -> None:
    body = {"prompt": [5] * 16, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    raw = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
    while data := await reader.read(65536):
        counts[number] += data.count(b"data: ")


def _client(port: int, streams: int, pipe: Connection) -> None:
    """Reads all streams until told to end; answers "count" with the events so far, and 0 before all have begun."""

    async def run() -> None:
        counts = [0] * streams
        tasks = [asyncio.create_task(_stream(port, counts, number)) for number in range(streams)]
        while True:
            await asyncio.sleep(0.005)
            if pipe.poll():
                if pipe.recv() == "end":
                    break
                pipe.send((sum(counts) if all(counts) else 0, time.monotonic()))
        for task in tasks:
            task.cancel()

    asyncio.run(run())


def cpu_seconds(pid: int) -> float:
    """Of a process and its children."""
    root = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:2]) for each in (root, *root.children(recursive=True)))


@contextlib.contextmanager
def client(port: int, streams: int) -> Iterator[Callable[[], tuple[int, float]]]:
    """Reads the streams while the block runs; the function tells (events, when)."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_client, args=(port, streams, theirs), daemon=True)
    process.start()

    def count() -> tuple[int, float]:
        ours.send("count")
        assert ours.poll(20), "the client does not answer"
        return ours.recv()

    try:
        yield count
    finally:
        ours.send("end")
        process.join(5)
        process.kill()


@contextlib.contextmanager
def timed_server(step_ms: int, mode: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    environment = {**os.environ, "STEP_S": str(step_ms / 1e3)}
    if mode == "two":
        flags += ("--frontend-multiprocessing",)
    else:
        flags += ("--no-frontend-multiprocessing",)
        environment["SWITCH_S"] = str(float(mode) / 1e3)
    command = [sys.executable, "-m", "tests.support.timed_server", "--port", "0", "--async-scheduling", *flags]
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        ready = process.stdout.readline()
        assert ready.startswith("ready http://127.0.0.1:"), ready
        yield process, int(ready.rsplit(":", 1)[1])
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("streams", "step_ms"), LOADS)
def test_steps_beside_streams(benchmark, tmp_path, streams: int, step_ms: int, mode: str) -> None:
    benchmark.group = f"{streams} streams, steps of {step_ms} ms"
    log = tmp_path / "steps.csv"
    flags = ("--max-num-seqs", str(streams), "--step-log", str(log))
    found = {}
    with timed_server(step_ms, mode, *flags) as (process, port), client(port, streams) as count:
        deadline = time.monotonic() + 30
        while not count()[0]:
            assert time.monotonic() < deadline, "the streams have not begun"
            time.sleep(0.05)
        time.sleep(WARM_S)

        def measure() -> None:
            began = (*count(), cpu_seconds(process.pid))
            time.sleep(SECONDS)
            found["readings"] = began, (*count(), cpu_seconds(process.pid))

        benchmark.pedantic(measure, rounds=1)
    (events, begin, cpu), (events_2, end, cpu_2) = found["readings"]
    ends = [float(line.split(",")[0]) for line in log.read_text().splitlines()[1:]]
    gaps = np.diff([at for at in ends if begin <= at <= end]) * 1e3
    note(
        benchmark, step_ms=float(np.mean(gaps)), step_p99_ms=float(np.percentile(gaps, 99)),
        host_ms=float(np.mean(gaps)) - step_ms, itl_ms=(end - begin) * 1e3 * streams / (events_2 - events),
        server_cores=(cpu_2 - cpu) / (end - begin),
    )  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize("streams", choose(full=[8, 64], quick=[64], smoke=[4]))
@pytest.mark.parametrize("flag", choose(full=PROCESSES, quick=PROCESSES, smoke=PROCESSES[:1]))
def test_tokens_beside_streams(benchmark, streams: int, flag: str) -> None:
    benchmark.group = f"{model_name()}, {streams} streams"
    with server(flag, "--max-num-seqs", str(streams)) as port, client(port, streams) as count:
        deadline = time.monotonic() + 60
        while not count()[0]:
            assert time.monotonic() < deadline, "the streams have not begun"
            time.sleep(0.05)
        time.sleep(WARM_S)
        found = {}

        def measure() -> None:
            began = count()
            time.sleep(SECONDS)
            found["readings"] = began, count()

        benchmark.pedantic(measure, rounds=1)
    (events, begin), (events_2, end) = found["readings"]
    note(benchmark, output_tokens_per_s=(events_2 - events) / (end - begin))
