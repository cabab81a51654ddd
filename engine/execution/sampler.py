"""Draws the next tokens from logits: all rows at once on the device, read once.

    logits [N, vocab] -> argmax, and whether it is finite              every row
                      -> temperature, Gumbel-max, top-k, top-p         the draws of rows that sample
                      -> log_softmax, top-k                            beams and best_of

Nothing here waits for the device before ``Sampled.read``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice

import numpy as np
import torch

from kvbench_engine.execution.gumbel import draw_into, row_keys
from kvbench_engine.sequence import Drawn, Sequence

_SMALLEST = 1e-30  # smallest temperature and top-p: less would leave float32


class Sampled:
    """The drawn tokens, on the device.

    ``tokens [N]`` int64: the first token of each row, the next step's input. Each row's largest logit goes to the host
    with them: it is not finite where nothing can be drawn. ``read()`` waits for the device; on CUDA the copy to the
    host starts at once.
    """

    def __init__(self, tokens: torch.Tensor, largest: torch.Tensor, wanted: _Wanted, extras: _Extras | None = None):
        self.tokens = tokens
        self._wanted = wanted
        parts = [largest, tokens]
        if extras is not None:
            parts = [largest, extras.drawn, extras.logprobs, *(t for pair in extras.candidates for t in pair)]
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            parts = [torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True) for t in parts]
            self._event = torch.cuda.Event()
            self._event.record()
        self._host = parts

    def read(self) -> list[Drawn]:
        """One ``Drawn`` a row, in the order of the sequences.

        Without tokens for a row that nothing can be drawn from: its logits hold NaN or infinity, or all of them are
        -inf.
        """
        if self._event is not None:
            self._event.synchronize()
        largest, *parts = self._host
        result = self._simple(parts[0]) if self._wanted.simple else self._with_extras(parts)
        finite = largest.isfinite().numpy()
        if not finite.all():
            for row in np.flatnonzero(~finite).tolist():
                result[row] = Drawn(())
        return result

    def _simple(self, tokens: torch.Tensor) -> list[Drawn]:
        return [Drawn((token,)) for token in tokens.tolist()]

    def _with_extras(self, parts: list[torch.Tensor]) -> list[Drawn]:
        wanted = self._wanted
        drawn, logprobs, *candidates = (t.tolist() for t in parts)
        tokens, chances = iter(drawn), iter(logprobs)
        result = [Drawn(())] * len(wanted.counts)
        for row, (count, silent) in enumerate(zip(wanted.counts, wanted.silent, strict=True)):
            own = tuple(islice(tokens, count))
            result[row] = Drawn(own, tuple(islice(chances, count)) if silent else ())
        for rows, ids, values in zip(wanted.beams.values(), candidates[::2], candidates[1::2], strict=True):
            for row, own, of_own in zip(rows, ids, values, strict=True):
                result[row] = Drawn(tuple(own), tuple(of_own))
        return result


@dataclass(frozen=True)
class _Extras:
    """All draws ``drawn [M]`` int64, ``logprobs [L]`` of silent rows' draws, and each beam width's candidates."""

    drawn: torch.Tensor
    logprobs: torch.Tensor
    candidates: tuple[tuple[torch.Tensor, torch.Tensor], ...]


class _Wanted:
    """The draws that each row needs: ``counts [N]``, log probabilities where ``silent [N]``, or candidates.

    ``beams``: number of candidates -> rows. ``simple``: one token a row and nothing else.
    """

    def __init__(self, sequences: list[Sequence]):
        self.counts = [0 if seq.num_candidates else seq.pending_forks + 1 for seq in sequences]
        self.silent = [seq.silent for seq in sequences]
        self.beams: dict[int, list[int]] = {}
        for row, seq in enumerate(sequences):
            if seq.num_candidates:
                self.beams.setdefault(seq.num_candidates, []).append(row)
        self.simple = not any(self.silent) and not self.beams and sum(self.counts) == len(sequences)


def sample(logits: torch.Tensor, sequences: list[Sequence], engine_seed: int) -> Sampled:
    """Draw for each sequence from its row of ``logits [N, vocab]``.

    A row gives a token, one for each of its forks, or a beam's best continuations.

    The random numbers of a row depend only on its request's seed, the sequence's index in the request and the position
    (engine/execution/gumbel.py), so a request draws the same tokens in any batch, preempted or not, and a fork the same
    as a request of its own.
    """
    largest, best = torch.max(logits, dim=-1)  # of a row with NaN, the NaN's; of equals the first, as argmax
    wanted = _Wanted(sequences)
    if wanted.simple and all(seq.request.params.greedy for seq in sequences):
        return Sampled(best, largest, wanted)
    positions = np.array([seq.num_tokens for seq in sequences])
    draw_rows = np.repeat(np.arange(len(sequences)), wanted.counts)
    draws = _Draws.of(sequences, draw_rows, positions, engine_seed, logits.shape[1])
    if wanted.simple:
        draws.draw_into(best, logits, largest)
        return Sampled(best, largest, wanted)
    silent = np.flatnonzero(np.repeat(wanted.silent, wanted.counts))
    first = np.flatnonzero(np.diff(draw_rows, prepend=-1))  # of each row's draws
    rows, firsts, of_silent, row_of_silent, *of_beams = _upload(
        logits.device, draw_rows, first, silent, draw_rows[silent], *map(np.array, wanted.beams.values())
    )
    drawn = best[rows]
    draws.draw_into(drawn, logits, largest)
    # of the model, before temperature, top-k and top-p; in float32, as transformers ranks beams
    logprobs = torch.log_softmax(logits[row_of_silent].float(), dim=-1)
    logprobs = logprobs.gather(1, drawn[of_silent][:, None])[:, 0]
    candidates = tuple(_candidates(logits[at], count) for at, count in zip(of_beams, wanted.beams, strict=True))
    tokens = best.index_copy_(0, rows[firsts], drawn[firsts])
    return Sampled(tokens, largest, wanted, _Extras(drawn, logprobs, candidates))


def _candidates(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    top = torch.topk(torch.log_softmax(logits.float(), dim=-1), min(count, logits.shape[1]))
    return top.indices, top.values


@dataclass(frozen=True)
class _Draws:
    """Draws that are not greedy, ``[S]`` each.

    ``at``: among all draws; ``row``: of the logits; ``key`` int64; ``temperature`` float32; ``top_k`` int64, vocab when
    off; ``top_p`` float32, 1 when off.
    """

    at: np.ndarray
    row: np.ndarray
    key: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray

    @classmethod
    def of(
        cls, sequences: list[Sequence], draw_rows: np.ndarray, positions: np.ndarray, engine_seed: int, vocab: int
    ) -> _Draws:
        """Collect the draws. ``draw_rows [M]``: the row of each draw, those of one row (its siblings) side by side."""
        picked, seeds, settings = [], [], []
        before, sibling = -1, 0
        for at, row in enumerate(draw_rows.tolist()):
            seq = sequences[row]
            sibling = sibling + 1 if row == before else 0
            before = row
            params = seq.request.params
            if not params.greedy:
                picked.append(at)
                seeds.append(_seed_of(seq, seq.index + sibling, engine_seed))
                settings.append((params.temperature, params.top_k or vocab, params.top_p))
        at = np.array(picked, dtype=np.int64)
        temperature, top_k, top_p = np.array(settings, dtype=np.float64).reshape(-1, 3).T
        row = draw_rows[at]
        return cls(
            at,
            row,
            row_keys(np.array(seeds, dtype=np.uint64), positions[row]),
            np.maximum(temperature, _SMALLEST).astype(np.float32),
            np.minimum(top_k, vocab).astype(np.int64),
            np.maximum(top_p, _SMALLEST).astype(np.float32),
        )

    def draw_into(self, drawn: torch.Tensor, logits: torch.Tensor, largest: torch.Tensor) -> None:
        """Write the draws to ``drawn [M]`` int64, from ``logits [N, vocab]`` whose largest of each row are given."""
        if not len(self.at):
            return
        at, row, key, temperature, top_k, top_p = _upload(
            logits.device, self.at, self.row, self.key, self.temperature, self.top_k, self.top_p
        )
        draw_into(drawn, at, logits, row, largest, temperature, key, top_k, top_p)


def _upload(device: torch.device, *columns: np.ndarray) -> list[torch.Tensor]:
    """Upload int64 or float32 columns of any length to ``device``, in one copy from pinned memory."""
    words = [column if column.dtype == np.int64 else _as_words(column) for column in columns]
    packed = torch.from_numpy(np.concatenate(words))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    parts = packed.split([len(column) for column in words])
    return [
        part if column.dtype == np.int64 else part.view(torch.float32)[: len(column)]
        for part, column in zip(parts, columns, strict=True)
    ]


def _as_words(column: np.ndarray) -> np.ndarray:
    """float32 values two to an int64, the last one with a zero where they are odd in number."""
    return np.pad(column, (0, len(column) % 2)).view(np.int64)


def _seed_of(seq: Sequence, index: int, engine_seed: int) -> int:
    """The request's own seed plus the sibling's index, else a hash of the engine's seed and both names; 64 bits."""
    if seq.request.params.seed is not None:
        return (seq.request.params.seed + index) & (2**64 - 1)
    return _named_seed(engine_seed, seq.request_id, index)


@lru_cache(maxsize=2**16)
def _named_seed(engine_seed: int, request_id: str, index: int) -> int:
    digest = blake2b(f"{engine_seed}:{request_id}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
