"""A soak: what its clients ask for, drawn from one seed; clients that check every answer; the server at a full pool."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.http_server import ServerClient

VOCAB, MAX_MODEL_LEN, MAX_NUM_SEQS = 256, 96, 24
LONGEST_PROMPT, LONGEST_OUTPUT = 56, 12
ANSWER, LEAVE_EARLY, LEAVE_MID, BAD = "answer", "leave_early", "leave_mid", "bad"
SHARES = {ANSWER: 0.76, LEAVE_EARLY: 0.08, LEAVE_MID: 0.09, BAD: 0.07}
STOPS = list("abcdefghijklmnop")  # one of them comes about every 16 tokens


@dataclass(frozen=True)
class Ask:
    """One request. ``choices``: how many come back if it is answered."""

    kind: str
    body: bytes
    stream: bool = False
    choices: int = 1
    max_tokens: int = 0
    status: int = 200  # that it gets, unless the queue is full
    leave_after: float = 0.0  # LEAVE_EARLY: seconds; LEAVE_MID: events
    probe: int | None = None  # which of the probes this is: its answer is known

    def http(self) -> bytes:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(self.body)}\r\n\r\n"
        return head.encode() + self.body


def probes(seed: int, count: int = 24) -> list[Ask]:
    """Greedy requests whose answers, taken from an idle server, must come again under pressure."""
    rng = random.Random(seed)
    asks = []
    for index in range(count):
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, LONGEST_PROMPT))]
        body = {"prompt": prompt, "max_tokens": rng.randint(4, LONGEST_OUTPUT), "temperature": 0, "ignore_eos": True}
        body |= [{}, {"n": 2}, {"use_beam_search": True, "n": 2, "best_of": 3}][index % 3]
        raw = json.dumps({**body, "return_token_ids": True}).encode()
        asks.append(Ask(ANSWER, raw, False, body.get("n", 1), body["max_tokens"], probe=index))
    return asks


def plan(seed: int, count: int, known: Sequence[Ask]) -> list[Ask]:
    """``count`` requests: a tenth of them probes, the rest as ``SHARES`` says."""
    rng = random.Random(seed + 1)
    prefixes = [[rng.randrange(1, VOCAB) for _ in range(rng.choice((8, 16, 30)))] for _ in range(8)]
    kinds = rng.choices(list(SHARES), list(SHARES.values()), k=count)
    return [
        rng.choice(known) if rng.random() < 0.1 else _bad(rng) if kind == BAD else _good(rng, kind, prefixes)
        for kind in kinds
    ]


def _good(rng: random.Random, kind: str, prefixes: list[list[int]]) -> Ask:
    prompt = list(rng.choice(prefixes)) if rng.random() < 0.5 else []
    prompt += [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, LONGEST_PROMPT - len(prompt)))]
    max_tokens = rng.randint(1, LONGEST_OUTPUT)
    stream = kind == LEAVE_MID or rng.random() < 0.5
    n = rng.choices((1, 2, 3, 4), (60, 20, 12, 8))[0]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "n": n, "return_token_ids": True}
    body |= {"ignore_eos": rng.random() < 0.5, "seed": rng.randrange(2**32), "priority": rng.randrange(3)}
    beams = {"use_beam_search": True, "best_of": rng.randint(n, 4), "length_penalty": rng.choice((0.0, 1.0, 2.0))}
    kinds_of_answers = ({}, beams, {"best_of": rng.randint(n, 6)}, {"stop": STOPS}, {"cache_salt": rng.choice("xy")})
    body |= rng.choices(kinds_of_answers, (55, 12, 10, 13, 10))[0]
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    early = 0.0 if rng.random() < 0.3 else rng.uniform(0, 0.06)
    leave = early if kind == LEAVE_EARLY else float(rng.randint(1, 6))
    return Ask(kind, json.dumps(body).encode(), stream, n, max_tokens, leave_after=leave)


def _bad(rng: random.Random) -> Ask:
    prompt = [rng.randrange(1, VOCAB) for _ in range(8)]
    wrong: list[tuple[int, dict[str, Any]]] = [
        (400, {"prompt": [VOCAB + 5]}),
        (400, {"prompt": prompt, "max_tokens": MAX_MODEL_LEN}),
        (404, {"prompt": prompt, "model": "another"}),
        (422, {"prompt": prompt, "n": MAX_NUM_SEQS + 1}),
        (422, {"prompt": "no tokenizer has this few ids"}),
    ]
    status, body = rng.choice(wrong)
    return Ask(BAD, json.dumps(body).encode(), status=status)


# The clients.

PATIENCE_S = 60.0  # no single answer takes longer, or the server has stalled
FULL_QUEUE_PAUSE_S = 0.05


@dataclass
class Tally:
    """What the clients saw. ``statuses`` of the requests that were read to their end."""

    done: int = 0  # planned requests
    sent: int = 0  # requests: more, because a request that a full queue refuses is sent again
    statuses: Counter[int] = field(default_factory=Counter)
    left: int = 0  # gone before their answer was complete
    choices_answered: int = 0
    choices_left: int = 0  # requested by the clients that left
    probes: int = 0


class Connection:
    """One keep-alive connection, opened when needed; as light as can be."""

    def __init__(self, port: int):
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, raw: bytes) -> None:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        self._streams[1].write(raw)

    def leave(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
        self._streams = None

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self._streams[0].readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
        return int(lines[0].split(" ")[1]), headers

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        size = int(await self._streams[0].readline(), 16)
        return (await self._streams[0].readexactly(size + 2))[:-2]

    async def body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self._streams[0].readexactly(int(headers["content-length"]))
        parts = []
        while part := await self.chunk():
            parts.append(part)
        return b"".join(parts)


class Soak:
    """``asks`` sent by ``workers`` clients side by side. ``at``: called after so many requests, for measurements."""

    def __init__(self, port: int, answers: dict[int, Any], at: dict[int, Callable[[], None]] | None = None):
        self.tally = Tally()
        self._port = port
        self._answers = answers  # of the probes
        self._at = dict(at or {})

    async def run(self, asks: Iterable[Ask], workers: int) -> Tally:
        queue = deque(asks)
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work(queue))
        return self.tally

    async def _work(self, queue: deque[Ask]) -> None:
        connection = Connection(self._port)
        try:
            while queue:
                ask = queue.popleft()
                async with asyncio.timeout(PATIENCE_S):
                    while not await self._taken(connection, ask):
                        await asyncio.sleep(FULL_QUEUE_PAUSE_S)
                self.tally.done += 1
                if measure := self._at.pop(self.tally.done, None):
                    measure()
        finally:
            connection.leave()

    async def _taken(self, connection: Connection, ask: Ask) -> bool:
        """Send ``ask`` and take what comes; False when the queue was full."""
        await connection.send(ask.http())
        self.tally.sent += 1
        if ask.kind == LEAVE_EARLY:
            await asyncio.sleep(ask.leave_after)
            return self._leave(connection, ask)
        status, headers = await connection.head()
        if ask.kind == LEAVE_MID and status == 200:
            for _ in range(int(ask.leave_after)):
                if not await connection.chunk():
                    break
            return self._leave(connection, ask)
        body = await connection.body(headers)
        self.tally.statuses[status] += 1
        if status == 429:
            assert int(headers["retry-after"]) >= 1, headers
            return False
        if ask.kind == BAD or status != 200:
            assert status == ask.status, (ask, status, body)
            assert json.loads(body)["error"]["message"], body
        else:
            self._check(ask, body)
        return True

    def _leave(self, connection: Connection, ask: Ask) -> bool:
        connection.leave()
        self.tally.left += 1
        self.tally.choices_left += ask.choices
        return True

    def _check(self, ask: Ask, body: bytes) -> None:
        """Every choice is there, has ended, and ``length`` means max_tokens."""
        said: list[list[int]] = [[] for _ in range(ask.choices)]
        reasons: list[str | None] = [None] * ask.choices
        choices, usage = _events(body) if ask.stream else (json.loads(body)["choices"], json.loads(body)["usage"])
        for choice in choices:
            index = choice["index"]
            assert reasons[index] is None, f"choice {index} went on after its end"
            said[index] += choice["token_ids"]
            reasons[index] = choice["finish_reason"]
        for tokens, reason in zip(said, reasons, strict=True):
            assert reason in ("length", "stop"), (ask, reasons)
            assert len(tokens) == ask.max_tokens if reason == "length" else 1 <= len(tokens) <= ask.max_tokens
        assert usage["completion_tokens"] >= sum(map(len, said))
        self.tally.choices_answered += ask.choices
        if ask.probe is not None:
            self.tally.probes += 1
            known = self._answers.setdefault(ask.probe, said)
            assert said == known, f"probe {ask.probe} was answered otherwise on the idle server"


def _events(body: bytes) -> tuple[list[Any], Any]:
    parts = body.split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""], parts[-3:]
    events = [json.loads(part.removeprefix(b"data: ")) for part in parts[:-2]]
    return [choice for event in events for choice in event["choices"]], events[-1]["usage"]


# The server.

ROOT = Path(__file__).parents[2]
PAGE_SIZE, PAGES = 4, 96
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": VOCAB,
    "max_position_embeddings": MAX_MODEL_LEN, "initializer_range": 0.5, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
SLOT_BYTES = (32 + 32) * 4
INT8_SLOT_BYTES = 2 * (32 + 4)  # codes and a float32 scale, of K and of V
SETTINGS = (
    "--dtype float32 --device cpu --num-threads 1 --max-num-batched-tokens 64 --max-num-waiting 20 "
    f"--scheduling-policy priority --page-size {PAGE_SIZE} --max-model-len {MAX_MODEL_LEN} "
    f"--max-num-seqs {MAX_NUM_SEQS}"
)


def memory_flags(slot_bytes: int, swap: bool) -> tuple[str, ...]:
    """``PAGES`` pages on the device and, to swap to, an eighth as many on the host, so that it fills too."""
    slots, table_bytes = PAGES * PAGE_SIZE, MAX_NUM_SEQS * -(-MAX_MODEL_LEN // PAGE_SIZE) * 8
    budget = ("--kv-budget", str(slots * slot_bytes + table_bytes))
    if not swap:
        return (*budget, "--preemption-mode", "recompute")
    return (*budget, "--preemption-mode", "swap", "--swap-space", str(slots // 8 * slot_bytes))


@dataclass(frozen=True)
class SoakServer(ServerClient):
    pid: int

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@contextlib.contextmanager
def soak_server(folder: Path, *flags: str, check: bool = False) -> Iterator[SoakServer]:
    """The real server as a process; ``check`` asserts the engine's invariants after every step."""
    model, log = folder / "tiny-llama.json", folder / "server.log"
    model.write_text(json.dumps(MODEL))
    command = [sys.executable, "-m", "kvbench_engine.server", "--model", str(model), "--port", "0"]
    command += [*SETTINGS.split(), *flags]
    env = {**os.environ, "KVBENCH_CHECK": "1" if check else "0"}
    with log.open("w") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        ready = process.stdout.readline()
        assert ready.startswith("ready "), log.read_text()
        yield SoakServer(int(ready.rsplit(":", 1)[1]), process.pid)
        process.terminate()
        assert process.wait(10) == 0, log.read_text()
        said = [line for line in log.read_text().splitlines() if not line.startswith("loading ")]  # the phases
        assert said == [], "the server complained"
    finally:
        process.kill()
        process.communicate()
