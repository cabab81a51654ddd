"""Requests of several sequences on the engine's thread: each ends by itself, none is forgotten, whatever fails."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest

from engine.async_engine import AsyncEngine, OutputStream
from engine.scheduling.scheduler import QueueFull
from engine.sequence import Request, SamplingParams, TokenOutput
from tests.support.fake_engine import branching, fake_engine
from tests.unit.engine.server.test_async_engine import collect, request, started


def siblings(name: str, n: int, max_tokens: int = 4, **params: object) -> Request:
    return Request(name, (1, 2, 3), SamplingParams(max_tokens=max_tokens, n=n, **params))


async def drain(stream: OutputStream) -> dict[tuple[str, int], list[TokenOutput]]:
    found = defaultdict(list)
    while not stream.done:
        for delivery in await stream.get():
            found[delivery.output.request_id, delivery.output.index].append(delivery.output)
    return found


async def busy(engine: AsyncEngine, running: int) -> None:
    while (await engine.stats()).num_requests_running < running:
        await asyncio.sleep(0.001)


def test_each_sibling_says_its_own_and_ends_by_itself() -> None:
    async def main() -> None:
        async with started(fake_engine(branching)) as engine:
            stream = await engine.submit([siblings("a", 3, 4, stop_token_ids=(202,)), siblings("b", 2, 3)])
            found = await drain(stream)
            tokens = {key: [t for o in outputs for t in o.token_ids] for key, outputs in found.items()}
            assert tokens == {
                ("a", 0): [100, 101, 102, 103],
                ("a", 1): [100, 201, 202],
                ("a", 2): [100, 301, 302, 303],
                ("b", 0): [100, 101, 102],
                ("b", 1): [100, 201, 202],
            }
            assert [found["a", i][-1].finish_reason for i in range(3)] == ["length", "stop", "length"]
            stats = await engine.stats()
            assert stats.finished == {"length": 4, "stop": 1}
            assert stats.forks == 3
            assert stats.kv.pages_owned == 0
            assert not engine._streams
            assert not engine._live

    asyncio.run(main())


def test_stopping_one_sibling_leaves_the_others_to_go_on() -> None:
    async def main() -> None:
        async with started(fake_engine(branching, step_s=0.002)) as engine:
            stream = await engine.submit([siblings("r", 3, 40)])
            counts = [0, 0, 0]
            while not stream.done:
                for delivery in await stream.get():
                    counts[delivery.output.index] += len(delivery.output.token_ids)
                if counts[1] >= 2:
                    stream.stop("r", 1)
            assert counts[0] == counts[2] == 40
            assert 2 <= counts[1] < 40
            stats = await engine.stats()
            assert stats.finished == {"length": 2, "stop": 1}
            assert stats.kv.pages_owned == 0

    asyncio.run(main())


def test_stopping_the_last_open_sibling_ends_the_request() -> None:
    async def main() -> None:
        async with started(fake_engine(branching, step_s=0.002)) as engine:
            stream = await engine.submit([siblings("r", 2, 1000)])
            await stream.get()
            stream.stop("r", 0)
            stream.stop("r", 0)  # once more does nothing
            stream.stop("r", 1)
            while not stream.done:
                await stream.get()
            stats = await engine.stats()
            assert stats.finished == {"stop": 2}
            assert (stats.num_requests_running, stats.kv.pages_owned) == (0, 0)
            assert not engine._streams
            assert not engine._live

    asyncio.run(main())


def test_closing_the_stream_aborts_all_that_are_left() -> None:
    async def main() -> None:
        async with started(fake_engine(branching, step_s=0.002)) as engine:
            stream = await engine.submit([siblings("a", 3, 1000), siblings("b", 2, 1000)])
            await stream.get()
            stream.stop("a", 2)
            stream.close()
            stats = await engine.stats()
            assert stats.finished == {"stop": 1, "abort": 4}
            assert (stats.num_requests_running, stats.kv.pages_owned) == (0, 0)
            assert not engine._streams
            assert len(await collect(engine, request("a"))) == 4  # its id is free again

    asyncio.run(main())


def test_a_choice_among_candidates_comes_whole_and_best_first() -> None:
    async def main() -> None:
        fake = fake_engine(branching)
        fake.executor.logprob = lambda seq: -0.1 if seq.index == 2 else -0.5 if seq.index == 0 else -1.0
        async with started(fake) as engine:
            stream = await engine.submit([siblings("r", 2, 3, best_of=4)])
            found = await drain(stream)
            assert {key: [o.token_ids for o in outputs] for key, outputs in found.items()} == {
                ("r", 0): [(100, 301, 302)],
                ("r", 1): [(100, 101, 102)],
            }
            assert [found["r", i][0].num_discarded for i in range(2)] == [6, 0]
            assert (await engine.stats()).kv.pages_owned == 0

    asyncio.run(main())


def test_a_full_queue_takes_none_of_a_request_of_several_prompts() -> None:
    async def main() -> None:
        fake = fake_engine(max_num_seqs=1, max_num_waiting=2, step_s=0.005)
        async with started(fake) as engine:
            running = asyncio.create_task(collect(engine, request("running", 50)))
            await busy(engine, 1)
            waiting = asyncio.create_task(collect(engine, request("waiting", 2)))
            while (await engine.stats()).num_requests_waiting < 1:
                await asyncio.sleep(0.001)
            with pytest.raises(QueueFull, match="2"):
                await engine.submit([request("one more"), request("too many")])
            assert (await engine.stats()).num_requests_waiting == 1
            assert len(engine._streams) == 2
            assert len(await running) == 50
            assert len(await waiting) == 2
            assert len(await collect(engine, request("one more"))) == 4

    asyncio.run(main())


def test_a_failed_step_ends_every_sibling_and_spares_the_waiting_ones() -> None:
    async def main() -> None:
        fake = fake_engine(branching, max_num_seqs=3, step_s=0.01)
        async with started(fake) as engine:
            stream = await engine.submit([siblings("r", 3, 500)])
            await busy(engine, 3)
            stream.stop("r", 1)
            late = asyncio.create_task(collect(engine, siblings("late", 3, 3)))
            while (await engine.stats()).num_requests_waiting < 1:
                await asyncio.sleep(0.001)
            fake.executor.fail = RuntimeError("no memory")
            found = await drain(stream)
            fake.executor.fail = None
            for index in (0, 2):
                assert found["r", index][-1].finish_reason == "error"
                assert "no memory" in found["r", index][-1].error
            outputs = await late
            assert sorted(o.index for o in outputs if o.finish_reason == "length") == [0, 1, 2]
            assert (await engine.stats()).kv.pages_owned == 0

    asyncio.run(main())


def test_a_step_that_fails_before_it_chose_anybody_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_schedule() -> None:
        raise RuntimeError("lost its place")

    async def main() -> None:
        fake = fake_engine()
        async with started(fake) as engine:
            with monkeypatch.context() as patched:
                patched.setattr(fake.scheduler, "schedule", broken_schedule)
                outputs = await collect(engine, siblings("r", 2))
            assert [(o.index, o.finish_reason) for o in outputs] == [(0, "error"), (1, "error")]
            assert len(await collect(engine, request("works"))) == 4

    asyncio.run(main())


def test_shutdown_ends_every_sibling() -> None:
    async def main() -> None:
        fake = fake_engine(branching, step_s=0.005)
        async with started(fake) as engine:
            reader = asyncio.create_task(collect(engine, siblings("r", 3, 1000)))
            await busy(engine, 3)
            assert await engine.shutdown(5)
            outputs = await reader
            assert sorted(o.index for o in outputs if o.finish_reason == "abort") == [0, 1, 2]
        assert fake.stats().kv.pages_owned == 0

    asyncio.run(main())
