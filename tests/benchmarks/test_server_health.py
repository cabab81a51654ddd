"""How long /health takes while the engine computes as much as it can: is the event loop starved?

    python -m pytest tests/benchmarks/test_server_health.py

The server is a process of its own with the shipped 32M model; 32 streams in a closed loop, in another process, keep it
full: prompts of 64 to 512 tokens, 32 to 128 tokens out. A third asks /health every 20 ms, each time over a connection
of its own. The target: under 100 ms. Figures in ms in ``extra_info``: health_p50_ms, health_p99_ms, health_max_ms, with
idle_p50_ms from before the load and the output tokens/s that the server delivered meanwhile. On a machine with other
work to do they say more about that work.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import random
import time

import numpy as np
import pytest
from bench_engine import model_name, server, wait_for
from bench_timing import choose, note

from kvbench_engine.model.spec import find_model

STREAMS = choose(full=32, quick=32, smoke=4)
POLLS, PAUSE_S = choose(full=300, quick=100, smoke=5), 0.02
WARM_S = choose(full=3.0, quick=3.0, smoke=0.1)  # until all streams have begun


async def _stream(port: int, vocab_size: int, number: int) -> None:
    """One user: a request, its stream to the end, and again."""
    rng = random.Random(number)
    while True:
        prompt = [rng.randrange(1, vocab_size) for _ in range(rng.choice((64, 128, 256, 512)))]
        body = {"prompt": prompt, "max_tokens": rng.choice((32, 64, 128)), "stream": True, "ignore_eos": True}
        raw = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        while await reader.read(65536):
            pass
        writer.close()


def _load(port: int, vocab_size: int) -> None:
    async def users() -> None:
        await asyncio.gather(*(_stream(port, vocab_size, number) for number in range(STREAMS)))

    os.nice(5)  # the client may not be what holds the server up
    with contextlib.suppress(OSError, KeyboardInterrupt):  # the server has gone
        asyncio.run(users())


def ask(port: int, path: str = "/health") -> tuple[float, bytes]:
    """Milliseconds from before connecting to after the whole reply."""
    started = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    assert reply.status == 200
    return (time.perf_counter() - started) * 1e3, body


def poll(port: int, count: int) -> list[float]:
    times = []
    for _ in range(count):
        times.append(ask(port)[0])
        time.sleep(PAUSE_S)
    return times


def metric(port: int, name: str) -> float:
    text = ask(port, "/metrics")[1].decode()
    (value,) = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
    return float(value)


@pytest.mark.parametrize("max_num_batched_tokens", choose(full=[512, 2048], quick=[512], smoke=[512]))
def test_health_at_full_load(benchmark, max_num_batched_tokens: int) -> None:
    vocab_size = find_model(model_name()).text_config["vocab_size"]
    benchmark.group = f"health of the server with {STREAMS} streams"
    flags = ("--max-num-batched-tokens", str(max_num_batched_tokens), "--max-num-seqs", str(STREAMS))
    with server(*flags) as running:
        port = running.port
        idle = poll(port, 20)
        load = multiprocessing.get_context("fork").Process(target=_load, args=(port, vocab_size), daemon=True)
        load.start()
        try:
            wait_for(lambda: metric(port, "kvbench:num_requests_running") >= STREAMS * 0.75)
            time.sleep(WARM_S)
            before, started = metric(port, "kvbench:generation_tokens_total"), time.perf_counter()
            busy = benchmark.pedantic(poll, args=(port, POLLS), rounds=1)
            rate = (metric(port, "kvbench:generation_tokens_total") - before) / (time.perf_counter() - started)
        finally:
            load.terminate()
            load.join()
    assert rate > 0, "the load has ended before the measurement"
    p50, p99 = np.percentile(busy, [50, 99])
    note(
        benchmark, health_p50_ms=float(p50), health_p99_ms=float(p99), health_max_ms=max(busy),
        idle_p50_ms=float(np.median(idle)), output_tokens_per_s=rate,
    )  # fmt: skip
