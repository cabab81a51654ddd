"""The engine's thread: outputs arrive in order, each sequence ends by itself, nothing hangs, whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from kvbench_engine.async_engine import AsyncEngine, OutputStream
from kvbench_engine.engine import Engine
from kvbench_engine.engine_loop import EngineUnavailable
from kvbench_engine.sequence import Request, SamplingParams, TokenOutput
from tests.support.fake_engine import branching, fake_engine


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an asynchronous test, for 60 s at most."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(60):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def request(name: str, max_tokens: int = 4, prompt: int = 3) -> Request:
    return Request(name, tuple(range(1, prompt + 1)), SamplingParams(max_tokens=max_tokens), time.monotonic())


@contextlib.asynccontextmanager
async def started(engine: Engine) -> AsyncIterator[AsyncEngine]:
    async_engine = AsyncEngine(engine)
    await async_engine.start()
    try:
        yield async_engine
    finally:
        assert await async_engine.shutdown(5)


async def busy(engine: AsyncEngine, running: int) -> None:
    while (await engine.stats()).num_requests_running < running:
        await asyncio.sleep(0.001)


async def collect(engine: AsyncEngine, one: Request) -> list[TokenOutput]:
    stream = await engine.submit([one])
    outputs = []
    while not stream.done:
        outputs += [delivery.output for delivery in await stream.get()]
    return outputs


@pytest.mark.parametrize("overlap", [False, True])
@on_loop
async def test_outputs_come_in_order_and_end(overlap: bool) -> None:
    async with started(fake_engine(async_scheduling=overlap)) as engine:
        results = await asyncio.gather(*[collect(engine, request(f"r{i}", 1 + i % 7)) for i in range(30)])
        for i, outputs in enumerate(results):
            assert [t for o in outputs for t in o.token_ids] == list(range(100, 101 + i % 7))
            assert [o.finish_reason for o in outputs] == [None] * (i % 7) + ["length"]
        stats = await engine.stats()
        assert (stats.kv.pages_owned, stats.finished) == (0, {"length": 30})
        assert not engine.engine.has_work()


@on_loop
async def test_a_step_wakes_the_loop_once_however_many_tokens_it_brought() -> None:
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


@on_loop
async def test_an_engine_that_cannot_clean_up_ends_everything_and_refuses_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_abort(request_id: str, reason: str = "abort", index: int | None = None) -> bool:
        raise AssertionError("the pool is corrupt")

    fake = fake_engine(max_num_seqs=2, step_s=0.01)
    async with started(fake) as engine:
        readers = [asyncio.create_task(collect(engine, request(f"r{i}", 50))) for i in range(5)]
        await busy(engine, 2)
        monkeypatch.setattr(fake, "abort", broken_abort)
        fake.executor.fail = RuntimeError("no memory")
        for outputs in await asyncio.gather(*readers):
            assert outputs[-1].finish_reason == "error"
        assert "the pool is corrupt" in engine.failure
        with pytest.raises(EngineUnavailable, match="the pool is corrupt"):
            await engine.submit([request("more")])
        assert (await engine.stats()).kv.pages_total > 0  # the last reading still answers


@on_loop
async def test_a_command_that_breaks_the_engine_still_gets_its_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_add(request: Request) -> None:
        raise TypeError("unheard of")

    fake = fake_engine()
    monkeypatch.setattr(fake, "add_request", broken_add)
    async with started(fake) as engine:
        with pytest.raises(EngineUnavailable, match="unheard of"):
            await engine.submit([request("r")])


@on_loop
async def test_an_idle_engine_does_not_spin() -> None:
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


# Several sequences of one request.


def siblings(name: str, n: int, max_tokens: int = 4, **params: object) -> Request:
    return Request(name, (1, 2, 3), SamplingParams(max_tokens=max_tokens, n=n, **params))


async def drain(stream: OutputStream) -> dict[tuple[str, int], list[TokenOutput]]:
    found = defaultdict(list)
    while not stream.done:
        for delivery in await stream.get():
            found[delivery.output.request_id, delivery.output.index].append(delivery.output)
    return found


@on_loop
async def test_stopping_the_last_open_sibling_ends_the_request() -> None:
    async with started(fake_engine(branching, step_s=0.002)) as engine:
        stream = await engine.submit([siblings("r", 2, 1000)])
        await stream.get()
        stream.stop("r", 0)
        stream.stop("r", 0)  # once more does nothing
        engine.abort("r", "stop", 0)  # nor does this
        stream.stop("r", 1)
        while not stream.done:
            await stream.get()
        engine.abort("r")  # nor this
        stats = await engine.stats()
        assert stats.finished == {"stop": 2}
        assert (stats.num_requests_running, stats.kv.pages_owned) == (0, 0)
        assert not engine._streams
        assert not engine._engine_loop._live


@on_loop
async def test_a_failed_step_ends_every_sibling_and_spares_the_waiting_ones() -> None:
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


@on_loop
async def test_a_step_that_fails_before_it_chose_anybody_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_schedule() -> None:
        raise RuntimeError("lost its place")

    fake = fake_engine()
    async with started(fake) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(fake.scheduler, "schedule", broken_schedule)
            outputs = await collect(engine, siblings("r", 2))
        assert [(o.index, o.finish_reason) for o in outputs] == [(0, "error"), (1, "error")]
        assert len(await collect(engine, request("works"))) == 4


# Steps that overlap.


class GatedHandle:
    def __init__(self, gated: Gated, drawn: list):
        self._gated, self._drawn = gated, drawn

    def tokens(self) -> list:
        assert self._gated.gate.acquire(timeout=20), "nobody computed the step"
        if self._gated.fail:
            raise self._gated.fail.pop()
        return self._drawn


class Gated:
    """An engine whose steps are computed one by one, when ``compute`` says so."""

    def __init__(self, **settings: object):
        self.engine: Engine = fake_engine(**{"async_scheduling": True} | settings)
        self.gate = threading.Semaphore(0)
        self.launched = 0
        self.fail: list[Exception] = []
        launch = self.engine.executor.launch

        def gated(plan):
            self.launched += 1
            return GatedHandle(self, launch(plan).tokens())

        self.engine.executor.launch = gated

    def compute(self, steps: int = 1) -> None:
        self.gate.release(steps)


async def begun(gated: Gated, **options: float) -> AsyncEngine:
    engine = AsyncEngine(gated.engine, **options)
    await engine.start()
    return engine


@on_loop
async def test_tokens_of_a_step_are_delivered_while_the_next_one_runs():
    gated = Gated()
    engine = await begun(gated)
    stream = await engine.submit([request("a", 5)])
    for step in range(1, 6):
        ahead = min(step + 1, 5)
        await wait_until(lambda ahead=ahead: gated.launched >= ahead)
        assert gated.launched == ahead, "one step ahead and no more; none beyond the foreseen end"
        gated.compute()  # step number ``step``, and not the one that was launched behind it
        (delivery,) = await stream.get()
        assert delivery.output.token_ids == (99 + step,)
        assert (delivery.output.finish_reason == "length") == (step == 5)
    assert stream.done
    assert (await engine.stats()).kv.pages_owned == 0
    assert await engine.shutdown(5)


@on_loop
async def test_three_failed_reads_in_a_row_show_in_health_until_one_works():
    """Each of them comes after a successful launch."""
    gated = Gated()
    engine = await begun(gated)
    for i in range(3):
        assert engine.failure is None
        stream = await engine.submit([request(str(i), 5)])
        gated.fail.append(RuntimeError("an illegal memory access"))
        gated.compute()
        (delivery,) = await stream.get()
        assert delivery.output.finish_reason == "error" and "illegal memory access" in delivery.output.error
    await wait_until(lambda: engine.failure is not None)
    assert "the last 3 steps failed" in engine.failure
    gated.compute(10)
    assert [output.token_ids for output in await collect(engine, request("well", 2))] == [(100,), (101,)]
    assert engine.failure is None
    assert await engine.shutdown(5)


@on_loop
async def test_an_engine_that_hangs_shows_in_health_until_its_next_step_though_that_has_no_output():
    gated = Gated(async_scheduling=False, max_num_seqs=2, max_num_batched_tokens=2)
    engine = await begun(gated, watchdog_timeout_s=0.1)
    stream = await engine.submit([request("a", 1, prompt=6)])  # two steps without a token, then one with it
    for _ in range(3):
        await asyncio.sleep(0.15)
        engine.ping()  # the first question comes after the limit, and does not begin the wait again
        assert "has ended no step" in engine.failure
        gated.compute()
        await wait_until(lambda: engine.failure is None)
    await stream.get()
    aborted = await engine.submit([request("b", 50, prompt=2)])
    gated.compute()
    await aborted.get()
    aborted.close()
    await asyncio.sleep(0.15)
    assert engine.failure is None, "nobody waits for it"
    gated.compute(2)
    assert await engine.shutdown(5)


@on_loop
async def test_a_submit_that_is_cancelled_leaves_nothing_behind():
    gated = Gated(async_scheduling=False)
    engine = await begun(gated)
    other = await engine.submit([request("a", 3)])
    await wait_until(lambda: gated.launched == 1)  # in a step, the engine takes no command
    cancelled = asyncio.create_task(engine.submit([siblings("b", 2, 1000), request("c", 1000)]))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    gated.compute(1000)
    assert len((await drain(other))["a", 0]) == 3
    stats = await engine.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.kv.pages_owned) == (0, 0, 0)
    assert stats.generation_tokens == 3
    assert not engine._streams
    assert await engine.shutdown(5)


@on_loop
async def test_an_abort_and_the_end_with_a_step_in_flight():
    gated = Gated()
    engine = await begun(gated)
    stream = await engine.submit([request("a", 50)])
    await wait_until(lambda: gated.launched == 2)
    engine.abort("a")
    gated.compute(3)
    stats = await engine.stats()
    assert (stats.kv.pages_owned, stats.finished) == (0, {"abort": 1})
    assert not stream.done, "an aborted stream is nobody's to end"
    again = await engine.submit([request("b", 500)])
    await wait_until(lambda: gated.launched > 3)
    ended = asyncio.create_task(engine.shutdown(5))
    await asyncio.sleep(0)
    gated.compute(3)
    assert await ended
    assert (await again.get())[-1].output.finish_reason == "abort"
    assert gated.engine.stats().num_requests_running == 0
