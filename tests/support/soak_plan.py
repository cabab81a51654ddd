"""What the clients of a soak ask for: drawn from one seed, so that a failure can be had again."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

VOCAB, MAX_MODEL_LEN, MAX_NUM_SEQS = 256, 96, 24
LONGEST_PROMPT, LONGEST_OUTPUT = 56, 12
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

ANSWER, LEAVE_EARLY, LEAVE_MID, BAD = "answer", "leave_early", "leave_mid", "bad"
SHARES = {ANSWER: 0.76, LEAVE_EARLY: 0.08, LEAVE_MID: 0.09, BAD: 0.07}
STOPS = list("abcdefghijklmnop")  # one of them comes about every 16 tokens


@dataclass(frozen=True)
class Ask:
    """One request. ``choices``: how many come back if it is answered."""

    kind: str
    path: str
    body: bytes
    stream: bool = False
    choices: int = 1
    max_tokens: int = 0
    status: int = 200  # that it gets, unless the queue is full
    leave_after: float = 0.0  # LEAVE_EARLY: seconds; LEAVE_MID: events
    probe: int | None = None  # which of the probes this is: its answer is known

    def http(self) -> bytes:
        head = f"POST {self.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(self.body)}\r\n\r\n"
        return head.encode() + self.body


def probes(seed: int, count: int = 24) -> list[Ask]:
    """Greedy requests whose answers, taken from an idle server, must come again under pressure."""
    rng = random.Random(seed)
    found = []
    for index in range(count):
        body = {
            "prompt": [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, LONGEST_PROMPT))],
            "max_tokens": rng.randint(4, LONGEST_OUTPUT),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        body |= [{}, {"n": 2}, {"use_beam_search": True, "n": 2, "best_of": 3}][index % 3]
        found.append(Ask(ANSWER, COMPLETIONS, _json(body), False, body.get("n", 1), body["max_tokens"], probe=index))
    return found


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
    stream = kind == LEAVE_MID or (rng.random() < 0.5 and kind != ANSWER) or rng.random() < 0.4
    n = rng.choices((1, 2, 3, 4), (60, 20, 12, 8))[0]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "n": n, "return_token_ids": True}
    body |= {"ignore_eos": rng.random() < 0.5, "seed": rng.randrange(2**32), "priority": rng.randrange(3)}
    if rng.random() < 0.1:
        body["cache_salt"] = rng.choice("xy")
    if rng.random() < 0.12:
        body |= {"use_beam_search": True, "best_of": rng.randint(n, 4), "length_penalty": rng.choice((0.0, 1.0, 2.0))}
    elif rng.random() < 0.1:
        body["best_of"] = rng.randint(n, 6)
    elif rng.random() < 0.15:
        body["stop"] = STOPS
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    early = 0.0 if rng.random() < 0.3 else rng.uniform(0, 0.06)
    leave = early if kind == LEAVE_EARLY else float(rng.randint(1, 6))
    return Ask(kind, COMPLETIONS, _json(body), stream, n, max_tokens, leave_after=leave)


def _bad(rng: random.Random) -> Ask:
    prompt = [rng.randrange(1, VOCAB) for _ in range(8)]
    wrong: list[tuple[int, Any]] = [
        (400, b'{"prompt": [1, 2'),
        (400, {"prompt": []}),
        (400, {"prompt": [VOCAB + 5]}),
        (400, {"prompt": prompt * 20}),
        (400, {"prompt": prompt, "max_tokens": MAX_MODEL_LEN}),
        (400, {"prompt": prompt, "temperature": -1}),
        (400, {"prompt": prompt, "n": 3, "best_of": 2}),
        (404, {"prompt": prompt, "model": "another"}),
        (422, {"prompt": prompt, "n": MAX_NUM_SEQS + 1}),
        (422, {"prompt": prompt, "priority": -1}),
        (400, {"prompt": prompt, "use_beam_search": True, "stop": "x"}),
        (422, {"prompt": prompt, "temprature": 0}),
        (422, {"prompt": "no tokenizer has this few ids"}),
    ]
    status, body = rng.choice(wrong)
    return Ask(BAD, COMPLETIONS, body if isinstance(body, bytes) else _json(body), status=status)


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
