"""What many streams cost the engine: HTTP on the engine's interpreter, and in a process of its own.

    python -m pytest tests/benchmarks/test_server_streams.py

``test_tokens_beside_streams``: the small model on this machine, output tokens/s as a client in another process reads
them. ``test_steps_beside_streams``: the server's engine plans and counts as always, and its device takes a fixed time a
step and none of the CPU's, like a GPU (``tests/support/timed_server.py``). ``step_ms`` and ``step_p99_ms``: the time
from step to step. ``host_ms``: what it is longer than the device's. ``itl_ms``: mean time between the events of a
stream as the client reads them. ``server_cores``: CPU of the server's processes. ``token_us``: CPU of the process that
serves HTTP, a token; the engine's own is in it unless that has a process. ``mode`` is the switch interval in ms
of one process (5 is Python's default), or two processes. Server and client share this machine's cores: with few of them
the second process has none of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import numpy as np
import psutil
import pytest
from bench_engine import RunningServer, launched, model_name, server, wait_for
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


def cpu_seconds(pid: int) -> tuple[float, float]:
    """The CPU time of a process, and of it and its children."""
    root = psutil.Process(pid)
    times = [sum(process.cpu_times()[:2]) for process in (root, *root.children(recursive=True))]
    return times[0], sum(times)


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


@pytest.fixture
def measure(benchmark):
    """Two readings while the streams of ``running`` are read: (events, when, cpu_seconds) at the begin and the end."""

    def of(running: RunningServer, streams: int) -> list[tuple[int, float, tuple[float, float]]]:
        readings = []
        with client(running.port, streams) as count:
            wait_for(lambda: count()[0] > 0)
            time.sleep(WARM_S)

            def read_twice() -> None:
                readings.append((*count(), cpu_seconds(running.pid)))
                time.sleep(SECONDS)
                readings.append((*count(), cpu_seconds(running.pid)))

            benchmark.pedantic(read_twice, rounds=1)
        return readings

    return of


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("streams", "step_ms"), LOADS)
def test_steps_beside_streams(benchmark, measure, tmp_path, streams: int, step_ms: int, mode: str) -> None:
    benchmark.group = f"{streams} streams, steps of {step_ms} ms"
    environment, log = {"STEP_S": str(step_ms / 1e3)}, tmp_path / "steps.csv"
    if mode != "two":
        environment["SWITCH_S"] = str(float(mode) / 1e3)
    flags = ("--async-scheduling", "--max-num-seqs", str(streams), "--step-log", str(log), PROCESSES[mode == "two"])
    with launched("tests.support.timed_server", *flags, environment=environment) as running:
        (events, begin, cpu), (events_2, end, cpu_2) = measure(running, streams)
    ends = [float(line.split(",")[0]) for line in log.read_text().splitlines()[1:]]
    gaps = np.diff([at for at in ends if begin <= at <= end]) * 1e3
    note(
        benchmark, step_ms=float(np.mean(gaps)), step_p99_ms=float(np.percentile(gaps, 99)),
        host_ms=float(np.mean(gaps)) - step_ms, itl_ms=(end - begin) * 1e3 * streams / (events_2 - events),
        server_cores=(cpu_2[1] - cpu[1]) / (end - begin), token_us=(cpu_2[0] - cpu[0]) * 1e6 / (events_2 - events),
    )  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize("streams", choose(full=[8, 64], quick=[64], smoke=[4]))
@pytest.mark.parametrize("flag", choose(full=PROCESSES, quick=PROCESSES, smoke=PROCESSES[:1]))
def test_tokens_beside_streams(benchmark, measure, streams: int, flag: str) -> None:
    benchmark.group = f"{model_name()}, {streams} streams"
    with server(flag, "--max-num-seqs", str(streams)) as running:
        (events, begin, _), (events_2, end, _) = measure(running, streams)
    note(benchmark, output_tokens_per_s=(events_2 - events) / (end - begin))
