"""The engine's thread: outputs arrive in order, nothing hangs, whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator

import pytest

from engine.async_engine import AsyncEngine, EngineUnavailable
from engine.engine import Engine
from engine.sequence import Request, SamplingParams, TokenOutput
from tests.support.fake_engine import fake_engine


def request(name: str, max_tokens: int = 4, prompt: int = 3) -> Request:
    return Request(name, tuple(range(1, prompt + 1)), SamplingParams(max_tokens=max_tokens), time.monotonic())


@contextlib.asynccontextmanager
async def started(engine: Engine) -> AsyncIterator[AsyncEngine]:
    async_engine = AsyncEngine(engine)
    async_engine.start()
    try:
        async with asyncio.timeout(20):
            yield async_engine
    finally:
        assert await async_engine.shutdown(5)


async def collect(engine: AsyncEngine, one: Request) -> list[TokenOutput]:
    return [output async for output in engine.generate(one)]


def test_outputs_come_in_order_and_end() -> None:
    async def main() -> None:
        async with started(fake_engine()) as engine:
            results = await asyncio.gather(*[collect(engine, request(f"r{i}", 1 + i % 7)) for i in range(100)])
            for i, outputs in enumerate(results):
                assert [t for o in outputs for t in o.token_ids] == list(range(100, 101 + i % 7))
                assert [o.finish_reason for o in outputs] == [None] * (i % 7) + ["length"]
            stats = await engine.stats()
            assert stats.kv.pages_owned == 0
            assert stats.finished == {"length": 100}

    asyncio.run(main())


def test_a_step_wakes_the_loop_once_however_many_tokens_it_brought() -> None:
    async def main() -> None:
        async with started(fake_engine(step_s=0.01)) as engine:
            loop = asyncio.get_running_loop()
            wakes = 0
            wake = loop.call_soon_threadsafe

            def counted(*args: object, **kwargs: object) -> object:
                nonlocal wakes
                wakes += 1
                return wake(*args, **kwargs)

            loop.call_soon_threadsafe = counted
            stream = await engine.submit([request(f"r{i}", 20) for i in range(32)])
            tokens = 0
            while not stream.done:
                tokens += len(await stream.get())
            assert tokens == 32 * 20
            assert wakes <= 20 + 1  # a step each, and the reply to submit

    asyncio.run(main())


def test_cancelling_a_reader_aborts_its_request() -> None:
    async def main() -> None:
        async with started(fake_engine(step_s=0.005)) as engine:
            task = asyncio.create_task(collect(engine, request("r", 1000)))
            while (await engine.stats()).kv.pages_owned == 0:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stats = await engine.stats()
            assert (stats.num_requests_running, stats.kv.pages_owned) == (0, 0)
            assert stats.finished == {"abort": 1}

    asyncio.run(main())


def test_a_refused_request_leaves_none_of_its_companions() -> None:
    async def main() -> None:
        async with started(fake_engine(max_model_len=32)) as engine:
            with pytest.raises(ValueError, match="max_model_len"):
                await engine.submit([request("fits"), request("too long", prompt=40)])
            stats = await engine.stats()
            assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
            assert len(await collect(engine, request("fits"))) == 4  # its id is free again

    asyncio.run(main())


def test_a_failed_step_ends_the_running_requests_and_spares_the_waiting_ones() -> None:
    async def main() -> None:
        fake = fake_engine(max_num_seqs=2, step_s=0.01)
        async with started(fake) as engine:
            readers = [asyncio.create_task(collect(engine, request(f"r{i}", 50))) for i in range(3)]
            while (await engine.stats()).num_requests_running < 2:
                await asyncio.sleep(0.001)
            fake.executor.fail = RuntimeError("no memory")
            first, second = await readers[0], await readers[1]
            fake.executor.fail = None
            for outputs in (first, second):
                assert outputs[-1].finish_reason == "error"
                assert "no memory" in outputs[-1].error
            third = await readers[2]
            assert third[-1].finish_reason in ("length", "error")  # error only if it ran before the fault was mended
            assert len(await collect(engine, request("after"))) == 4
            assert engine.failure is None
            assert (await engine.stats()).kv.pages_owned == 0

    asyncio.run(main())


def test_steps_that_keep_failing_show_in_health_until_one_works() -> None:
    async def main() -> None:
        fake = fake_engine()
        fake.executor.fail = RuntimeError("broken")
        async with started(fake) as engine:
            for i in range(3):
                assert engine.failure is None
                assert (await collect(engine, request(f"r{i}")))[-1].finish_reason == "error"
            assert "broken" in engine.failure
            fake.executor.fail = None
            assert (await collect(engine, request("works")))[-1].finish_reason == "length"
            assert engine.failure is None

    asyncio.run(main())


def test_an_engine_that_cannot_clean_up_ends_everything_and_refuses_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_abort(request_id: str, reason: str = "abort", index: int | None = None) -> bool:
        raise AssertionError("the pool is corrupt")

    async def main() -> None:
        fake = fake_engine(max_num_seqs=2, step_s=0.01)
        async with started(fake) as engine:
            readers = [asyncio.create_task(collect(engine, request(f"r{i}", 50))) for i in range(5)]
            while (await engine.stats()).num_requests_running < 2:
                await asyncio.sleep(0.001)
            monkeypatch.setattr(fake, "abort", broken_abort)
            fake.executor.fail = RuntimeError("no memory")
            for outputs in await asyncio.gather(*readers):
                assert outputs[-1].finish_reason == "error"
            assert "the pool is corrupt" in engine.failure
            with pytest.raises(EngineUnavailable, match="the pool is corrupt"):
                await engine.submit([request("more")])
            assert (await engine.stats()).kv.pages_total > 0  # the last reading still answers

    asyncio.run(main())


def test_a_command_that_breaks_the_engine_still_gets_its_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_add(request: Request) -> None:
        raise TypeError("unheard of")

    async def main() -> None:
        fake = fake_engine()
        monkeypatch.setattr(fake, "add_request", broken_add)
        async with started(fake) as engine:
            with pytest.raises(EngineUnavailable, match="unheard of"):
                await engine.submit([request("r")])

    asyncio.run(main())


def test_shutdown_ends_streams_and_gives_pages_back() -> None:
    async def main() -> None:
        fake = fake_engine(step_s=0.005)
        async with started(fake) as engine:
            reader = asyncio.create_task(collect(engine, request("r", 1000)))
            while (await engine.stats()).kv.pages_owned == 0:
                await asyncio.sleep(0.005)
            assert await engine.shutdown(5)
            outputs = await reader
            assert outputs[-1].finish_reason == "abort"
            assert "shutting down" in outputs[-1].error
        assert fake.stats().kv.pages_owned == 0

    asyncio.run(main())


def test_shutdown_does_not_wait_for_an_endless_step() -> None:
    release = threading.Event()

    async def main() -> None:
        fake = fake_engine(lambda seq: release.wait(30) and 1)
        engine = AsyncEngine(fake)
        engine.start()
        reader = asyncio.create_task(collect(engine, request("r")))
        await asyncio.sleep(0.05)
        assert not await engine.shutdown(0.2)
        assert (await reader)[-1].finish_reason == "abort"
        release.set()

    asyncio.run(main())


def test_an_idle_engine_does_not_spin() -> None:
    async def main() -> None:
        async with started(fake_engine()) as engine:
            await collect(engine, request("r"))
            turns = 0
            has_work = engine.engine.has_work

            def counted() -> bool:
                nonlocal turns
                turns += 1
                return has_work()

            engine.engine.has_work = counted
            await asyncio.sleep(0.2)
            assert turns <= 2

    asyncio.run(main())


def test_stats_answer_while_a_step_takes_long() -> None:
    release = threading.Event()

    async def main() -> None:
        async with started(fake_engine(lambda seq: release.wait(30) and 1)) as engine:
            stream = await engine.submit([request("r", 1)])
            assert (await engine.stats(timeout_s=0.1)).steps == 0  # the reading from before: the step is not over
            release.set()
            assert [d.output.finish_reason for d in await stream.get()] == ["length"]

    asyncio.run(main())
