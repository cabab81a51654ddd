"""The requests of one load: drawn before the run, stored as JSONL, read by the load process."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MOST_SHARED = 1 << 20  # no vocabulary is larger
ANSWERS = ("n", "best_of", "beam_width")
"""The fields of a request that say how many answers are drawn, and how many of them returned."""
Notes = dict[str, Any]
"""What a report should say of how a load's requests were made, by the names in load.json."""


@dataclass(frozen=True)
class RequestSpec:
    """One request. ``prompt``: the text to send; None: ``prompt_token_ids`` are sent.

    ``prompt_token_ids``: beside a text, the ids that it was made of; not sent, but they tell its length and prefix.
    ``arrival_s``: intended start [s after the load's start] in open loop, None in closed loop.
    ``prefix_tokens``: how many leading tokens are shared with other requests of the load.
    ``priority``: 0 is the most urgent; sent only where the load's spec says so.
    ``session``: the conversation it is part of, whose requests follow one another in order of ``turn`` (from 0).
    ``think_s``: seconds from the end of the session's previous request to this one's intended start (turn > 0), or to
    when the previous answer has been parsed, if that is later (by milliseconds).
    ``new_tokens``: of a turn whose history is to hold the server's own answers: how many of its last ids are new (the
    ids before them hold answers drawn beforehand, for a server that does not tell its token ids); else 0.
    ``history``: texts of the conversation before ``prompt``, user and assistant in turn, for APIs that take messages.
    ``n``: answers that are returned; ``best_of``: of so many that are drawn (None: n); ``beam_width``: of a beam search
    with so many beams (None: no search). ``max_tokens`` is of each answer.
    ``canary``: its name where the right answer is known; ``expected_token_ids`` and ``expected``: that answer.
    """

    index: int
    cls: str
    prompt_token_ids: tuple[int, ...] | None
    prompt: str | None
    max_tokens: int
    arrival_s: float | None = None
    prefix_tokens: int = 0
    priority: int = 0
    session: int | None = None
    turn: int = 0
    think_s: float = 0.0
    new_tokens: int = 0
    history: tuple[str, ...] = ()
    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    canary: str | None = None
    expected_token_ids: tuple[int, ...] | None = None
    expected: str | None = None

    @property
    def width(self) -> int:
        """Sequences that run side by side."""
        return self.beam_width or self.best_of or self.n

    @property
    def chooses(self) -> bool:
        """Tests whether only the best of its sequences are returned, at the end."""
        return self.beam_width is not None or self.width > self.n

    @property
    def answers(self) -> dict[str, int]:
        """The fields n, best_of and beam_width that are set: {} for one answer, drawn once."""
        return {key: value for key in ANSWERS if (value := getattr(self, key)) != _OPTIONAL[key][0]}

    def to_row(self) -> dict[str, Any]:
        """The JSONL row."""
        return {
            "index": self.index,
            "class": self.cls,
            **({} if self.prompt is None else {"prompt": self.prompt}),
            **({} if self.prompt_token_ids is None else {"prompt_token_ids": list(self.prompt_token_ids)}),
            "max_tokens": self.max_tokens,
            "arrival_s": self.arrival_s,
            "prefix_tokens": self.prefix_tokens,
            **{key: value for key, (usual, _) in _OPTIONAL.items() if (value := getattr(self, key)) != usual},
        }

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> RequestSpec:
        """The reverse of ``to_row``; KeyError, TypeError or ValueError for a malformed row."""
        given = {name: value for name, value in row.items() if value is not None}
        if "prompt" not in given and "prompt_token_ids" not in given:
            raise KeyError("prompt_token_ids or prompt")
        return cls(
            index=int(row["index"]),
            cls=str(given.get("class", "default")),
            prompt_token_ids=compact(given["prompt_token_ids"]) if "prompt_token_ids" in given else None,
            prompt=given.get("prompt"),
            max_tokens=int(row["max_tokens"]),
            **{name: read(given[name]) for name, read in _READ.items() if name in given},
        )


def compact(ids: Sequence[int]) -> tuple[int, ...]:
    """Makes equal token ids one int object: 8 bytes of memory each and not 36, and a trace has 10^8.

    ValueError for a negative one.
    """
    if not ids:
        return ()
    if min(ids) < 0:
        raise ValueError(f"token id {min(ids)} is negative")
    most = max(ids)
    return tuple(map(_numbers(most.bit_length()).__getitem__, ids)) if most < _MOST_SHARED else tuple(ids)


@functools.cache
def _numbers(bits: int) -> tuple[int, ...]:
    return tuple(range(1 << bits))


_OPTIONAL: dict[str, tuple[Any, Callable[[Any], Any]]] = {  # what a row leaves out where it is this, and its type
    "priority": (0, int), "session": (None, int), "turn": (0, int), "think_s": (0.0, float), "new_tokens": (0, int),
    "history": ((), tuple), "n": (1, int), "best_of": (None, int), "beam_width": (None, int), "canary": (None, str),
    "expected_token_ids": (None, compact), "expected": (None, str),
}  # fmt: skip
_READ = {"arrival_s": float, "prefix_tokens": int} | {name: read for name, (_, read) in _OPTIONAL.items()}


class RequestList(list[RequestSpec]):
    """The requests of one load, with ``notes`` for the report (e.g. the scale applied to a trace's lengths)."""

    def __init__(self, requests: Iterable[RequestSpec], notes: Notes | None = None) -> None:
        super().__init__(requests)
        self.notes = dict(notes or {})


def conversations(requests: Iterable[RequestSpec]) -> list[list[RequestSpec]]:
    """Lists of requests to be sent one after another: the turns of a session, or a request without one by itself.

    In the order of their first requests; one process must send the whole of a list. ValueError for a turn that is
    missing or there twice.
    """
    lists: dict[tuple[int | None, int], list[RequestSpec]] = {}
    for request in requests:
        key = (request.session, request.index if request.session is None else 0)
        lists.setdefault(key, []).append(request)
    for (session, _), turns in lists.items():
        if session is not None:
            turns.sort(key=lambda r: r.turn)
            if [r.turn for r in turns] != list(range(len(turns))):
                raise ValueError(f"session {session} has the turns {[r.turn for r in turns]}; number them 0, 1, 2 ...")
    return list(lists.values())


def continued(
    turn: RequestSpec, before: RequestSpec, sent: tuple[int, ...], answer: tuple[int, ...] | None
) -> tuple[int, ...]:
    """The prompt of a later turn as it is sent: the conversation as it really went, then its new tokens.

    ``before``: the turn before it as it was drawn; ``sent``: as it was sent; ``answer``: what the server answered to it
    (None: its ids are not known, and the answer that was drawn beforehand stays).
    """
    drawn, ids = before.prompt_token_ids or (), turn.prompt_token_ids or ()
    new = len(ids) - turn.new_tokens
    return sent + (ids[len(drawn) : new] if answer is None else answer) + ids[new:]


def notes_path(path: Path) -> Path:
    """The path at which ``write_requests`` puts the notes of a requests file."""
    return path.with_suffix(".notes.json")


def write_requests(path: str | Path, requests: Iterable[RequestSpec]) -> None:
    """Writes JSONL, and the list's notes beside it, from where the load process copies them to load.json."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            file.write(json.dumps(request.to_row(), ensure_ascii=False, separators=(",", ":")) + "\n")
    notes_path(path).write_text(json.dumps(getattr(requests, "notes", {}), indent=2) + "\n", encoding="utf-8")


def store_requests(requests: Iterable[RequestSpec], folder: Path, name: str) -> tuple[Path, str]:
    """Writes the requests to a file whose name holds their hash; its path and sha256."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".{name}.jsonl"
    write_requests(scratch, requests)
    digest = hashlib.sha256(scratch.read_bytes()).hexdigest()
    path = folder / f"{name}-{digest[:8]}.jsonl"
    notes_path(scratch).replace(notes_path(path))
    scratch.replace(path)
    return path, digest


def read_requests(path: str | Path) -> RequestList:
    """Reads what ``write_requests`` wrote. ValueError with the line for a malformed file."""
    path = Path(path)
    requests = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                requests.append(RequestSpec.from_row(json.loads(line)))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"{path}, line {number} is not a request ({error}); write it anew.") from error
    if not requests:
        raise ValueError(f"{path} holds no request; at least 1 is needed.")
    notes = notes_path(path)
    return RequestList(requests, json.loads(notes.read_text("utf-8")) if notes.is_file() else None)


def distinct_prefixes(requests: Iterable[RequestSpec]) -> list[tuple[int, ...]]:
    """The shared prefixes of a load, each once, in order of first use: what a primed cache is sent."""
    prefixes = {
        r.prompt_token_ids[: r.prefix_tokens]: None
        for r in requests
        if r.prompt_token_ids is not None and r.prefix_tokens
    }
    return list(prefixes)
