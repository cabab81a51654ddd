"""Every client of the engine's loop gets its own tokens, whoever comes, goes or fails beside it, through both ports."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from kvbench_engine.async_engine import EngineClient, OutputStream
from kvbench_engine.engine_loop import Command, EngineLoop
from kvbench_engine.engine_process import Loaded, ProcessEngine, _Frames, _SocketPort
from kvbench_engine.sequence import Request, SamplingParams
from tests.support.engine_parts import CountingExecutor, expected_outputs, small_engine

LONGEST, VOCAB, EOS = 40, 23, (0,)


class ThreadPort:
    """Calls the client at once, as the event loop would."""

    def __init__(self, client: EngineClient):
        self.client, self.commands = client, []

    def receive(self, wait: bool) -> list[Command]:
        commands, self.commands = self.commands, []
        return commands

    def send(self, event: str, *args) -> None:
        self.client.report(event, *args)


class ProcessPort(ThreadPort):
    """Sends what another process would read, in pieces of the socket's choice."""

    def send(self, event: str, *args) -> None:
        _SocketPort.send(SimpleNamespace(_socket=SimpleNamespace(sendall=self._arrive)), event, *args)

    def _arrive(self, data: bytes) -> None:
        for at in range(0, len(data), 100):
            self.client.data_received(data[at : at + 100])


def client_of(engine) -> ProcessEngine:
    loaded = Loaded(engine.config, engine.model_info, engine.capacity, engine.stats(), {})
    return ProcessEngine(SimpleNamespace(frames=_Frames()), loaded)


def requests(rng: random.Random) -> list[Request]:
    made = []
    for number in range(25):
        prompt = tuple(rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 12)))
        how = {"max_tokens": rng.randrange(1, 25), "n": rng.choice([1, 1, 1, 2]), "ignore_eos": rng.random() < 0.5}
        made.append(Request(str(number), prompt, SamplingParams(temperature=0.0, **how), priority=rng.randrange(3)))
    return made


@pytest.mark.parametrize("port_type", [ThreadPort, ProcessPort])
@pytest.mark.parametrize("seed", range(12))
def test_each_stream_gets_its_own_tokens(seed, port_type):
    rng = random.Random(seed)
    executor = CountingExecutor(VOCAB, EOS)
    engine = small_engine(
        rng.choice([60, 120, 400]), executor, page_size=rng.choice([1, 3, 4]), max_num_seqs=rng.choice([3, 6]),
        max_num_batched_tokens=rng.choice([8, 32]), max_model_len=LONGEST, async_scheduling=rng.random() < 0.6,
        scheduling_policy=rng.choice(["fcfs", "priority"]),
    )  # fmt: skip
    port = port_type(client_of(engine))
    made = requests(rng)
    loop, coming, left, streams = EngineLoop(engine, port), made.copy(), set(), {}
    tokens: dict[tuple[str, int], list[int]] = {}
    while coming or engine.has_work():
        if coming and rng.random() < 0.3:
            one = coming.pop()
            streams[one.request_id] = OutputStream([one], lambda *_: None)
            port.client._streams[one.request_id] = streams[one.request_id]
            port.commands.append(Command("add", ([one],)))
        if streams and rng.random() < 0.05:
            gone = rng.choice(sorted(streams))
            left.add(gone)
            port.commands.append(Command("remove", (gone, "abort", rng.choice([None, 0]))))
        if rng.random() < 0.02:
            executor.fail_at = "start"
        loop._run_once()
        executor.fail_at = None
        engine.check_integrity()
        for name, stream in streams.items():
            deliveries, stream._ready = stream._ready, []
            for delivery in deliveries:
                assert delivery.output.request_id == name
                tokens.setdefault((name, delivery.output.index), []).extend(delivery.output.token_ids)
                if delivery.output.finish_reason == "error":
                    left.add(name)
    for one in made:
        alone = Request("x", one.prompt_token_ids, one.params)
        expected = expected_outputs(alone, LONGEST, CountingExecutor(VOCAB, EOS))
        for index, (whole, _) in expected.items():
            own = tuple(tokens.get((one.request_id, index), ()))
            assert own == (whole[: len(own)] if one.request_id in left else whole)
    assert len(left) < len(made)
