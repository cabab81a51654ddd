"""Beam search of one request: which beams continue, which have ended, and when to stop. No tensors, no cache.

Returns the same tokens as transformers' ``generate(num_beams=width, do_sample=False)``, as long as the vocabulary has
at least ``width`` tokens beside the EOS ids. With fewer, transformers fills up with copies of the prompt that score
-1e9; here the search runs with fewer beams. Scores of -1e9 and less are ordinary here (transformers takes them for
missing beams), and ties have a fixed order (transformers leaves it to ``torch.topk``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvbench_engine.sequence import Drawn

# Largest max_new_tokens ** |length_penalty|: leaves float32 (3.4e38) room for any sum of log probabilities.
_MAX_LENGTH_FACTOR = 1e30


@dataclass(frozen=True)
class Hypothesis:
    """A sequence that has ended. ``score``: sum of log probabilities / generated length ** length penalty."""

    token_ids: tuple[int, ...]  # generated tokens, with the EOS that ended it
    score: float
    finish_reason: str  # stop | length


class _Beam(NamedTuple):
    token_ids: tuple[int, ...]
    logprob: np.float32  # summed over token_ids


class _Continuation(NamedTuple):
    parent: int  # position of the live beam that it continues
    token_id: int
    logprob: np.float32  # of the whole beam, this token included


class BeamSearch:
    """Starts with one live beam, the prompt; then up to ``width``.

    ``eos_token_ids``: every id that ends a beam. ``early_stopping``: True ends the search once ``width`` beams have
    ended; False also waits until the best live beam, scored at its present length, no longer beats the worst of them;
    "never" scores it at the length in its favour instead, ``max_new_tokens`` if ``length_penalty`` is positive.
    Sums and scores are float32, as in transformers: in float64 two beams that tie or swap by rounding there would
    come in another order here, and from then on the tokens differ.
    """

    def __init__(
        self,
        width: int,
        max_new_tokens: int,
        eos_token_ids: frozenset[int],
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
    ) -> None:
        check_beam_search(width, max_new_tokens, length_penalty)
        self.width = width
        self.max_new_tokens = max_new_tokens
        self.eos_token_ids = eos_token_ids
        self.length_penalty = float(length_penalty)
        self.early_stopping = early_stopping
        # Of one beam's best width + E continuations at most E are EOS. So whatever ranks below them has `width` better
        # ones that go on: it can neither go on itself nor rank among the first `width`.
        self.num_candidates = width + len(eos_token_ids)
        # Likewise over all beams, which have at most E * width continuations that end.
        self._num_ranked = width * (1 + len(eos_token_ids))
        self._live = [_Beam((), np.float32(0.0))]
        self._finished: list[Hypothesis] = []  # best first, at most `width`
        self._length = 0  # tokens of each live beam

    def advance(self, candidates: Sequence[Drawn]) -> list[tuple[int, int]]:
        """Search one step further.

        ``candidates[i]``: the best ``num_candidates`` continuations of live beam i, best first, with their natural
        logarithms of probability; the whole vocabulary where that is less.

        Returns the next live beams, best first, each as (position of its parent, its new token); empty when the search
        has ended.
        """
        assert len(candidates) == len(self._live) > 0, f"{len(candidates)} candidates, {len(self._live)} live beams"
        ranked = _rank([beam.logprob for beam in self._live], candidates, self._num_ranked)
        self._length += 1
        self._finish(ranked[: self.width])
        kept = [] if self._length == self.max_new_tokens else self._going_on(ranked)
        if kept and not self._can_improve(kept[0].logprob):
            kept = []
        self._live = [_Beam((*self._live[c.parent].token_ids, c.token_id), c.logprob) for c in kept]
        return [(c.parent, c.token_id) for c in kept]

    def results(self, n: int) -> list[Hypothesis]:
        """The ``n`` best, best first, once ``advance`` has returned an empty list; n is at most ``width``.

        Fewer only where the vocabulary has fewer than ``width`` tokens beside the EOS ids.
        """
        assert not self._live, "the search has not ended"
        assert 1 <= n <= self.width, f"{n} of {self.width} beams"
        return self._finished[:n]

    def _finish(self, leading: list[_Continuation]) -> None:
        """Add the leading continuations that end to the finished ones, and keep the best ``width``.

        An end that ranks lower is dropped for good, though a length penalty might have lifted it.
        """
        at_limit = self._length == self.max_new_tokens
        for parent, token_id, logprob in leading:
            is_eos = token_id in self.eos_token_ids
            if is_eos or at_limit:
                tokens = (*self._live[parent].token_ids, token_id)
                score = float(_score(logprob, self._length, self.length_penalty))
                self._finished.append(Hypothesis(tokens, score, "stop" if is_eos else "length"))
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: of a tie, the older first
        del self._finished[self.width :]

    def _going_on(self, ranked: list[_Continuation]) -> list[_Continuation]:
        return [c for c in ranked if c.token_id not in self.eos_token_ids][: self.width]

    def _can_improve(self, best_live: np.float32) -> bool:
        if len(self._finished) < self.width:
            return True
        if self.early_stopping is True:
            return False
        hopeful = self.early_stopping == "never" and self.length_penalty > 0.0
        length = self.max_new_tokens if hopeful else self._length
        return bool(_score(best_live, length, self.length_penalty) > self._finished[-1].score)


def check_beam_search(width: int, max_new_tokens: int, length_penalty: float) -> None:
    """Raises ValueError if no search can run with these."""
    if width < 1:
        raise ValueError(f"beam_width cannot be {width}: it is at least 1")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens of a beam search cannot be {max_new_tokens}: it is at least 1")
    if not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty cannot be {length_penalty}: give a finite number, such as 1.0")
    largest = math.log(_MAX_LENGTH_FACTOR) / math.log(max(max_new_tokens, 2))
    if abs(length_penalty) > largest:
        raise ValueError(
            f"length_penalty cannot be {length_penalty} with {max_new_tokens} new tokens: scores would leave float32; "
            f"keep it between {-largest:.1f} and {largest:.1f}"
        )


def _rank(sums: Sequence[np.float32], candidates: Sequence[Drawn], count: int) -> list[_Continuation]:
    """The ``count`` best continuations of all live beams, best first; of a tie, the better parent's first."""
    logprobs = np.concatenate(
        [np.asarray(drawn.logprobs, np.float32) + total for total, drawn in zip(sums, candidates, strict=True)]
    )
    token_ids = [token_id for drawn in candidates for token_id in drawn.token_ids]
    parents = [parent for parent, drawn in enumerate(candidates) for _ in drawn.token_ids]
    order = np.argsort(-logprobs, kind="stable")[:count].tolist()
    return [_Continuation(parents[i], token_ids[i], logprobs[i]) for i in order]


def _score(logprob: np.float32, length: int, length_penalty: float) -> np.float32:
    return logprob / np.float32(length**length_penalty)
