"""`kvbench dev canaries`: prompts whose greedy answers one model surely knows, for loads that check answers.

A canary is kept if contiguous full-precision KV answers it rightly and no token of the answer is near a tie, so that
rounding cannot change it: what changes it is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvbench.quality import answering
from kvbench.quality.prompts import DIGITS, FILLER, PasskeyParts, Prompt, spread_lengths
from kvbench.requests.canaries import Canary, CanarySet
from kvbench_engine.config import EngineConfig
from kvbench_engine.model.loader import LoadedModel, load_model
from kvbench_engine.server.tokenizer import ServerTokenizer, load_tokenizer
from kvbench_engine.teacher_forcing import TeacherForced
from kvbench_engine.tiny_model.data import random_digits

MIN_MARGIN = 0.5  # nats between an answer's token and the second likeliest: far beyond rounding, also in bfloat16
_SHORTEST, _LONGEST = 60, 1600  # tokens of a prompt
_ROUNDS = 12  # draws of a group, until all of it is kept
_GROUPS = (2, 3)  # passkeys that share the text before their keys, by turns
_PASSAGE = (24, 32)  # tokens of a copy
_BEGUN = 8  # of its tokens, which the prompt repeats
_LEAST = 8  # tokens of a copy's answer, which ends before the first token that is near a tie


@dataclass(frozen=True)
class _Candidate:
    """A prompt with the tokens of its right answer; ``least``: so many of its first have to be sure."""

    prompt: Prompt
    right: tuple[int, ...]
    least: int


def make_canaries(
    config: EngineConfig, *, passkeys: int = 64, copies: int = 32, seed: int = 0, say: Callable[[str], None] = print
) -> tuple[CanarySet, dict[str, int]]:
    """The canaries of ``config.model``, and how many candidates of each kind were dropped: wrong, or near a tie.

    Raises ValueError for a model that cannot answer, or a short context.
    """
    loaded = load_model(config)
    tokenizer = load_tokenizer(config, loaded.info)
    if tokenizer.text_refusal is not None:
        raise ValueError(tokenizer.text_refusal)
    fingerprints = loaded.fingerprints()
    rng = np.random.default_rng(seed)
    drawer = _Drawer(tokenizer, rng)
    longest = min(_LONGEST, loaded.info.max_model_len or _LONGEST) - _PASSAGE[1]
    kept: list[Canary] = []
    dropped = {}
    for kind, count in (("passkey", passkeys), ("copy", copies)):
        lengths = spread_lengths(_SHORTEST, longest, count, rng)
        if len(lengths) < count:
            raise ValueError(f"{loaded.info.max_model_len} tokens of context are too few for canaries")
        draw, sizes = (drawer.passkeys, _GROUPS) if kind == "passkey" else (drawer.copy, (1,))
        left, dropped[kind] = list(_grouped(lengths, sizes)), 0
        for tries in range(_ROUNDS):
            if not left:
                break
            say(f"{kind}: {sum(map(len, left))} to find")
            made = [draw(group) for group in left]
            candidates = list(itertools.chain(*made))
            sure = iter(_sure_ones(config, loaded, tokenizer, kind, candidates))
            again = []
            for group in left:
                canaries = [next(sure) for _ in group]
                good = [canary for canary in canaries if canary is not None]
                dropped[kind] += len(group) - len(good)
                if len(good) < len(group) and tries < _ROUNDS - 1:
                    again.append(group)
                else:
                    kept += [replace(canary, canary_id=f"{kind}-{len(kept) + i}") for i, canary in enumerate(good)]
            left = again
    return CanarySet(loaded.info.name, fingerprints, tuple(kept)), dropped


def _grouped(lengths: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    """The lengths in groups of ``sizes``, by turns."""
    rest = iter(lengths)
    for size in itertools.cycle(sizes):
        if not (group := list(itertools.islice(rest, size))):
            return
        yield group


class _Drawer:
    """Draws candidates in one model's tokens."""

    def __init__(self, tokenizer: ServerTokenizer, rng: np.random.Generator):
        self._tokenizer, self._rng = tokenizer, rng
        self._begin = tuple(tokenizer.encode(""))
        self._filler = self._encode(FILLER.read_text(encoding="utf-8"))
        self._count = self._places = 0

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _text(self, length: int) -> list[int]:
        start = int(self._rng.integers(0, len(self._filler)))
        return np.take(self._filler, np.arange(start, start + length), mode="wrap").tolist()

    def _candidate(self, ids: Sequence[int], right: Sequence[int], answer: str, before: int, least: int) -> _Candidate:
        self._count += 1
        ids = (*self._begin, *ids)
        depth = round((len(self._begin) + before) / len(ids), 4)
        return _Candidate(Prompt(str(self._count), "", (ids,), len(right), answer, depth), tuple(right), least)

    def _place(self, most: int) -> int:
        """The number of tokens before a fact: none in one of four, ``most`` in one, else any number up to it.

        Engines fill, share, copy and swap the first and the last page of a sequence unlike those between.
        """
        anywhere = int(self._rng.integers(0, most + 1))
        self._places += 1
        return (0, anywhere, most, anywhere)[self._places % 4]

    def passkeys(self, lengths: Sequence[int]) -> list[_Candidate]:
        """Draws one of each length, with the same text before their keys, which stand at one place."""
        parts = [PasskeyParts.of(random_digits(self._rng, DIGITS), self._encode) for _ in lengths]
        own = [length - len(self._begin) for length in lengths]
        text = self._text(max(own))
        most = min(size - len(part.fact) - len(part.question) for size, part in zip(own, parts, strict=True))
        before = self._place(most)
        return [
            self._candidate(part.prompt(text, size, before), part.answer, part.value, before, len(part.answer))
            for size, part in zip(own, parts, strict=True)
        ]

    def copy(self, lengths: Sequence[int]) -> list[_Candidate]:
        """A random passage in the first half of the prompt, its beginning at the end; text would tell what follows."""
        (length,) = lengths
        size = int(self._rng.integers(_PASSAGE[0], _PASSAGE[1] + 1))
        room = length - len(self._begin) - size - _BEGUN
        before = self._place(room // 2)
        passage = self._rng.choice(np.unique(self._filler), size).tolist()
        ids = [*self._text(before), *passage, *self._text(room - before), *passage[:_BEGUN]]
        return [self._candidate(ids, passage[_BEGUN:], "", before, _LEAST)]


def _sure_ones(
    config: EngineConfig, loaded: LoadedModel, tokenizer: ServerTokenizer, kind: str, candidates: Sequence[_Candidate]
) -> Iterator[Canary | None]:
    """The canary of each candidate, with the answer's first tokens that are sure; None for too few of them.

    Sure: likelier than any other by the margin. Each token is judged after the right ones before it, so the greedy
    answer is the right one as far as all tokens are sure.
    """
    talks = [answering.Conversation.of(candidate.prompt, [candidate.right]) for candidate in candidates]
    engine = TeacherForced(config, loaded, answering.ROWS, max(candidate.prompt.longest for candidate in candidates))
    predictions = answering.predictions(engine, talks, loaded.info.vocab_size, config.max_num_batched_tokens)
    for candidate, talk, logits in zip(candidates, talks, predictions, strict=True):
        judged = logits[torch.from_numpy(talk.answered[1:]).to(logits.device)].double()
        right = torch.tensor(candidate.right, device=logits.device)[:, None]
        others = judged.scatter(1, right, -torch.inf).max(-1).values
        margins = (judged.gather(1, right)[:, 0] - others).tolist()
        sure = next((at for at, margin in enumerate(margins) if margin < MIN_MARGIN), len(margins))
        prompt, answer = candidate.prompt, candidate.right[:sure]
        ids, text = prompt.turns[0], prompt.answer or tokenizer.decode(answer)
        if sure < candidate.least or prompt.depth is None:
            yield None
        else:
            least = round(min(margins[:sure]), 3)
            yield Canary("", kind, ids, tokenizer.decode(ids), answer, text, prompt.depth, least)
