"""The engine's thread with steps that overlap: what a step brought is delivered while the next one runs."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from engine.async_engine import AsyncEngine
from engine.engine import Engine
from engine.sequence import Request, SamplingParams
from tests.support.fake_engine import fake_engine


class GatedHandle:
    def __init__(self, gate: threading.Semaphore, drawn: list, fail: list[Exception]):
        self._gate, self._drawn, self._fail = gate, drawn, fail

    def tokens(self) -> list:
        assert self._gate.acquire(timeout=20), "nobody computed the step"
        if self._fail:
            raise self._fail.pop()
        return self._drawn


class Gated:
    """An engine whose steps are computed one by one, when ``compute`` says so."""

    def __init__(self):
        self.engine: Engine = fake_engine(async_scheduling=True)
        self.gate = threading.Semaphore(0)
        self.launched = 0
        self.fail: list[Exception] = []
        launch = self.engine.executor.launch

        def gated(plan):
            self.launched += 1
            return GatedHandle(self.gate, launch(plan).tokens(), self.fail)

        self.engine.executor.launch = gated

    def compute(self, steps: int = 1) -> None:
        self.gate.release(steps)


def request(name: str, max_tokens: int) -> Request:
    return Request(name, (1, 2, 3), SamplingParams(max_tokens=max_tokens), time.monotonic())


def run(main) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await main()

    asyncio.run(bounded())


async def wait_until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_tokens_of_a_step_are_delivered_while_the_next_one_runs():
    async def main() -> None:
        gated = Gated()
        engine = AsyncEngine(gated.engine)
        engine.start()
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

    run(main)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8])
def test_the_last_step_is_read_though_nobody_waits_behind_it(max_tokens):
    async def main() -> None:
        engine = AsyncEngine(fake_engine(async_scheduling=True))
        engine.start()
        for name in "ab":
            outputs = [output async for output in engine.generate(request(name, max_tokens))]
            assert [token for output in outputs for token in output.token_ids] == list(range(100, 100 + max_tokens))
            assert outputs[-1].finish_reason == "length"
        assert not engine.engine.has_work()
        assert await engine.shutdown(5)

    run(main)


def test_a_stop_token_ends_the_stream_at_once():
    """The step behind it draws one token more, of which nobody hears."""

    async def main() -> None:
        gated = Gated()
        engine = AsyncEngine(gated.engine)
        engine.start()
        one = Request("a", (1, 2, 3), SamplingParams(max_tokens=50, stop_token_ids=(101,)), time.monotonic())
        stream = await engine.submit([one])
        gated.compute(2)
        tokens: list[int] = []
        while not stream.done:
            tokens += [token for delivery in await stream.get() for token in delivery.output.token_ids]
        assert tokens == [100, 101]
        assert gated.launched == 3 and engine.engine.has_work()
        gated.compute()
        await wait_until(lambda: not engine.engine.has_work())
        assert (await engine.stats()).kv.pages_owned == 0
        assert await engine.shutdown(5)

    run(main)


def test_a_read_that_fails_ends_its_requests_and_the_engine_goes_on():
    async def main() -> None:
        gated = Gated()
        engine = AsyncEngine(gated.engine)
        engine.start()
        stream = await engine.submit([request("a", 5)])
        gated.fail.append(RuntimeError("an illegal memory access"))
        gated.compute()
        (delivery,) = await stream.get()
        assert delivery.output.finish_reason == "error" and "illegal memory access" in delivery.output.error
        gated.compute(10)
        outputs = [output async for output in engine.generate(request("b", 3))]
        assert [token for output in outputs for token in output.token_ids] == [100, 101, 102]
        assert engine.failure is None
        assert await engine.shutdown(5)

    run(main)


def test_three_failed_reads_in_a_row_are_no_health():
    """Each of them comes after a launch that went well."""

    async def main() -> None:
        gated = Gated()
        engine = AsyncEngine(gated.engine)
        engine.start()
        for i in range(3):
            assert engine.failure is None
            stream = await engine.submit([request(str(i), 5)])
            gated.fail.append(RuntimeError("an illegal memory access"))
            gated.compute()
            await stream.get()
        await wait_until(lambda: engine.failure is not None)
        assert "the last 3 steps failed" in engine.failure
        gated.compute(10)
        assert [output async for output in engine.generate(request("well", 2))]
        assert engine.failure is None
        assert await engine.shutdown(5)

    run(main)


def test_an_abort_and_the_end_with_a_step_in_flight():
    async def main() -> None:
        gated = Gated()
        engine = AsyncEngine(gated.engine)
        engine.start()
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

    run(main)
