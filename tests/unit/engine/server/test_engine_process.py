"""The engine in a process of its own serves as the one on a thread does.

That it is noticed when it hangs or is killed, and stopped amid a step: tests/integration/test_server_process.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable

import pytest

from kvbench_engine.engine import Engine
from kvbench_engine.engine_loop import EngineUnavailable
from kvbench_engine.engine_process import ProcessEngine, start_process
from kvbench_engine.scheduling.scheduler import QueueFull
from kvbench_engine.sequence import Request, SamplingParams, TokenOutput
from tests.support.fake_engine import branching, fake_engine
from tests.unit.engine.server.test_async_engine import collect, on_loop, request


@contextlib.asynccontextmanager
async def started(make: Callable[[], Engine], **options: float) -> AsyncIterator[ProcessEngine]:
    child = start_process(lambda: contextlib.nullcontext(make()))
    try:
        engine = ProcessEngine(child, child.wait_loaded(), **options)
        await engine.start()
        yield engine
        assert await engine.shutdown(5)
    finally:
        child.stop()
        assert child.process.exitcode is not None


@on_loop
async def test_outputs_are_those_of_an_engine_on_a_thread() -> None:
    params = SamplingParams(max_tokens=5, n=2)
    async with started(lambda: fake_engine(branching)) as engine:
        outputs = await collect(engine, Request("r", (1, 2, 3), params, kv_facts=True))
        tokens = {i: [t for o in outputs if o.index == i for t in o.token_ids] for i in (0, 1)}
        assert tokens == {0: [100, 101, 102, 103, 104], 1: [100, 201, 202, 203, 204]}
        last = outputs[-1]
        assert isinstance(last, TokenOutput) and last.finish_reason == "length" and last.kv_facts.forked
        stats = await engine.stats()
        assert (stats.finished, stats.kv.pages_owned) == ({"length": 2}, 0)
        assert await engine.reset_prefix_cache()


@on_loop
async def test_messages_larger_than_the_socket_s_buffer_arrive_whole() -> None:
    longest = 400_000
    settings = {"kv_slots": longest, "max_model_len": longest, "max_num_batched_tokens": longest}
    async with started(lambda: fake_engine(vocab_size=longest, **settings)) as engine:
        streams = [
            asyncio.create_task(collect(engine, request(f"r{i}", 3, prompt)))
            for i, prompt in enumerate((3, 300_000, 5))
        ]
        for outputs in await asyncio.gather(*streams):
            assert [t for o in outputs for t in o.token_ids] == [100, 101, 102]
        assert (await engine.stats()).prompt_tokens == 300_008


@on_loop
async def test_a_full_queue_is_told_as_such() -> None:
    async with started(lambda: fake_engine(max_num_seqs=1, max_num_waiting=1, step_s=0.05)) as engine:
        running = await engine.submit([request("a", 100)])
        await running.get()
        await engine.submit([request("b")])
        with pytest.raises(QueueFull):
            await engine.submit([request("c")])


@on_loop
async def test_failed_steps_are_told_and_the_engine_goes_on() -> None:
    def failing() -> Engine:
        engine = fake_engine()
        launch, launches = engine.executor.launch, iter(range(100))

        def launched(plan):
            if next(launches) < 3:
                raise RuntimeError("no memory")
            return launch(plan)

        engine.executor.launch = launched
        return engine

    async with started(failing) as engine:
        for i in range(3):
            assert engine.failure is None
            (output,) = await collect(engine, request(str(i)))
            assert output.finish_reason == "error" and "no memory" in output.error
        assert "no memory" in engine.failure
        assert len(await collect(engine, request("well"))) == 4
        assert engine.failure is None


@on_loop
async def test_the_end_of_its_process_answers_what_waits_for_a_step_to_end() -> None:
    async with started(lambda: fake_engine(step_s=60)) as engine:
        reader = asyncio.create_task(collect(engine, request("r")))
        await asyncio.sleep(0.1)
        late = asyncio.create_task(engine.submit([request("late")]))
        await asyncio.sleep(0.1)
        os.kill(engine.process_ids()[1], signal.SIGKILL)
        with pytest.raises(EngineUnavailable, match="signal 9"):
            await late
        assert (await reader)[-1].finish_reason == "error"


def test_a_load_that_is_refused_or_dies_is_told() -> None:
    def refuse() -> contextlib.AbstractContextManager[Engine]:
        raise ValueError("there is no such model")

    def die() -> contextlib.AbstractContextManager[Engine]:
        os._exit(7)

    for load, error in ((refuse, ValueError), (die, ChildProcessError)):
        child = start_process(load)
        with pytest.raises(error, match="no such model" if error is ValueError else "7"):
            child.wait_loaded()
        child.stop()
