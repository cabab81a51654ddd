"""Canaries: requests whose answers are known, mixed into a load to see whether a full KV pool answers rightly.

A canary file belongs to one model. ``passkey``: a key hidden in text, asked for at the end; several share the text
before their keys, so that a prefix hit that is too long serves another one's key. ``copy``: a passage that the model
repeats, so that every token of the answer depends on another place of the KV.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvbench.common.packages import WORKLOADS
from kvbench.requests.request import RequestSpec, compact

if TYPE_CHECKING:  # the load process reads answers only, and starts without the workload file's models
    from kvbench.workload.load_section import LoadConfig

SHIPPED = WORKLOADS / "canaries"  # <name of the model>.jsonl
FORMAT = "kvbench-canaries/1"
PASSKEY = "passkey"  # the kind whose fact is hidden in text; the other is "copy"
CLASS = "canary-"  # and the kind: the class of such a request
_FORKED_EVERY = 4  # one of so many is asked for two answers, which must be equal


@dataclass(frozen=True)
class Canary:
    """A prompt and the tokens that a greedy answer in full precision begins with.

    ``depth``: where the fact stands, 0 the first token and 1 the last. ``margin``: by how much the answer's tokens were
    at least likelier than the second likeliest, when the file was made [nats].
    """

    canary_id: str
    kind: str
    prompt_token_ids: tuple[int, ...]
    prompt: str
    answer_token_ids: tuple[int, ...]
    answer: str
    depth: float
    margin: float


@dataclass(frozen=True)
class CanarySet:
    """The canaries of one model, identified by ``weights_fingerprints`` in each dtype (as in /server_info)."""

    model: str
    weights_fingerprints: tuple[str, ...]
    canaries: tuple[Canary, ...]

    def that_fit(self, max_model_len: int) -> tuple[Canary, ...]:
        """The canaries whose prompt and answer fit into ``max_model_len`` tokens."""
        return tuple(c for c in self.canaries if len(c.prompt_token_ids) + len(c.answer_token_ids) <= max_model_len)


def read_canaries(path: Path) -> CanarySet:
    """The set in a file that ``write_canaries`` wrote. Raises ValueError with the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"the canary file {path} cannot be read ({error}); give one that `kvbench dev canaries` wrote."
        ) from None
    try:
        head = json.loads(lines[0])
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']!r}, not {FORMAT!r}")
        canaries = []
        for line in lines[1:]:
            row = json.loads(line)
            ids = {key: compact(row.pop(key)) for key in ("prompt_token_ids", "answer_token_ids")}
            canaries.append(Canary(**row, **ids))
        if not canaries:
            raise ValueError("no canary")
        return CanarySet(head["model"], tuple(head["weights_fingerprints"]), tuple(canaries))
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a canary file ({error}); make it anew with `kvbench dev canaries`.") from None


def canaries_of(load: LoadConfig, model: str) -> CanarySet | None:
    """The set that ``load`` mixes in; None where it mixes in none.

    ``model``: the name or folder of the model that is served, whose own set is taken if the load names none. Raises
    ValueError for a set that is not there or cannot be read.
    """
    if load.canaries is None:
        return None
    file, name = load.canaries.file, Path(model).name.removesuffix(".json")
    given = [Path(file).expanduser()] if file else []
    path = next(filter(Path.is_file, (*given, SHIPPED / f"{file or name}.jsonl")), None)
    if path is None:
        what = f"the canary file {file} is not there" if file else f"no canaries ship for the model {name!r}"
        raise ValueError(f"{what}; give a file that `kvbench dev canaries` wrote in load.canaries.file.")
    return read_canaries(path)


def fitting(made: CanarySet, vocab_size: int, max_model_len: int) -> tuple[Canary, ...]:
    """The canaries that can be sent to the model that is served. Raises ValueError where none fits, or it is another.

    ``vocab_size``: the model's; ``max_model_len``: tokens of prompt and output that it is served with.
    """
    largest = max(max(canary.prompt_token_ids + canary.answer_token_ids) for canary in made.canaries)
    if largest >= vocab_size:
        raise ValueError(
            f"the canaries were made for {made.model} and hold the token id {largest}, but the served model has "
            f"{vocab_size} tokens; name the canaries of the served model in load.canaries.file."
        )
    if not (canaries := made.that_fit(max_model_len)):
        shortest = min(len(canary.prompt_token_ids) + len(canary.answer_token_ids) for canary in made.canaries)
        raise ValueError(
            f"no canary of {made.model} fits max_model_len {max_model_len}: the shortest has {shortest} tokens with "
            "its answer; raise max_model_len, or leave load.canaries out."
        )
    return canaries


def write_canaries(path: Path, made: CanarySet) -> None:
    """JSONL: the format and the model, then a line a canary."""
    head = {"format": FORMAT, "model": made.model, "weights_fingerprints": list(made.weights_fingerprints)}
    rows = [head, *(dataclasses.asdict(canary) for canary in made.canaries)]
    text = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def as_request(canary: Canary, index: int, *, answers: int = 1) -> RequestSpec:
    """The request that sends ``canary`` and asks for ``answers`` answers."""
    return RequestSpec(
        index=index,
        cls=CLASS + canary.kind,
        prompt_token_ids=canary.prompt_token_ids,
        prompt=None,
        max_tokens=len(canary.answer_token_ids),
        n=answers,
        canary=canary.canary_id,
        expected_token_ids=canary.answer_token_ids,
        expected=canary.answer,
    )


def mix(
    requests: Sequence[RequestSpec], canaries: Sequence[Canary], share: float, rng: np.random.Generator
) -> list[RequestSpec]:
    """Puts so many canaries between ``requests`` that they are ``share`` of all, and numbers all anew.

    There is at least one, and every canary is sent before one is sent again. They lie at random places; in open loop
    one arrives together with the next request whose arrival is known.
    """
    count = max(1, round(len(requests) * share / (1 - share)))
    order = np.concatenate([rng.permutation(len(canaries)) for _ in range(-(-count // len(canaries)))])[:count]
    places = np.sort(rng.integers(0, len(requests) + 1, count))
    mixed: list[RequestSpec] = []
    left = list(zip(places.tolist(), order.tolist(), strict=True))[::-1]
    sent, arrivals = 0, _arrivals(requests)
    for place in range(len(requests) + 1):
        while left and left[-1][0] == place:
            canary = canaries[left.pop()[1]]
            made = as_request(canary, 0, answers=2 if sent % _FORKED_EVERY == _FORKED_EVERY - 1 else 1)
            mixed.append(dataclasses.replace(made, arrival_s=arrivals[place]))
            sent += 1
        if place < len(requests):
            mixed.append(requests[place])
    return [dataclasses.replace(request, index=index) for index, request in enumerate(mixed)]


def _arrivals(requests: Sequence[RequestSpec]) -> list[float | None]:
    """The arrival at each place: that of the next request with one, at the end the last one; None in closed loop."""
    arrivals = [max((r.arrival_s for r in requests if r.arrival_s is not None), default=None)]
    for request in reversed(requests):
        arrivals.append(arrivals[-1] if request.arrival_s is None else request.arrival_s)
    return arrivals[::-1]


@dataclass(frozen=True)
class WrongAnswer:
    """A difference of an answer: the first differing token or character (``position``), and both sides from there."""

    position: int  # 0 is the first
    expected: str
    got: str
    by: str  # tokens or characters

    @property
    def words(self) -> str:
        """Writes `from token 3 on: 17 4, not 12 9`."""
        sides = [side.strip() or "nothing" for side in (self.got, self.expected)]
        return f"from {self.by.removesuffix('s')} {self.position} on: {sides[0]}, not {sides[1]}"


def first_difference(
    expected_token_ids: Sequence[int], expected: str, token_ids: Sequence[int] | None, text: str
) -> WrongAnswer | None:
    """Compares the tokens of an answer, else its text without spaces around it; None for the right one."""
    if token_ids is not None:
        pair = zip(expected_token_ids, token_ids, strict=False)
        at = next((i for i, (a, b) in enumerate(pair) if a != b), min(len(expected_token_ids), len(token_ids)))
        if at == len(expected_token_ids):
            return None
        left, right = (" ".join(map(str, ids[at : at + 8])) for ids in (expected_token_ids, token_ids))
        return WrongAnswer(at, left, right, "tokens")
    wanted, got = expected.strip(), text.strip()
    if got.startswith(wanted):
        return None
    at = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), min(len(wanted), len(got)))
    return WrongAnswer(at, wanted[at : at + 40], got[at : at + 40], "characters")


def answers_of(
    token_ids: Sequence[int], text: str, answers: int, length: int
) -> Iterable[tuple[Sequence[int] | None, str]]:
    """Splits the ``answers`` of one request; ids are None where not all of them are known.

    ``token_ids``: of all answers in turn, ``length`` tokens long; ``text``: theirs, a line break between two.
    """
    if len(token_ids) == answers * length:
        return [(token_ids[i * length : (i + 1) * length], "") for i in range(answers)]
    return [(None, text)] if answers == 1 else [(None, part) for part in text.split("\n")[:answers]]
