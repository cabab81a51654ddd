"""From logits to the next tokens: all rows at once on the device, read once.

    logits [N, vocab] -> argmax                                        every row
                      -> temperature, top-k, top-p, Gumbel-max         the draws of rows that sample
                      -> log_softmax, top-k                            beams and best_of

Nothing here waits for the device before ``Sampled.read``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice, pairwise

import numpy as np
import torch

from engine.execution.gumbel import draw, draw_scored, row_keys
from engine.sequence import Drawn, Sequence

# Logits filtered and drawn from at once: on a CPU torch does not hand out so little work to threads, and it stays in a
# core's cache; on a GPU it is small beside the memory.
_BLOCK_ELEMENTS = {"cpu": 2**15, "cuda": 2**26}
_COLDEST = 1e-30  # lower temperatures would leave float32


class Sampled:
    """The drawn tokens, on the device.

    ``tokens [N]`` int64: the first token of each row, the next step's input. ``read()`` waits for the device; on CUDA
    the copy to the host starts at once.
    """

    def __init__(self, tokens: torch.Tensor, wanted: _Wanted, extras: _Extras | None = None):
        self.tokens = tokens
        self._wanted = wanted
        parts = [tokens]
        if extras is not None:
            parts = [extras.drawn, extras.logprobs, *(t for pair in extras.candidates for t in pair)]
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            parts = [torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True) for t in parts]
            self._event = torch.cuda.Event()
            self._event.record()
        self._host = parts

    def read(self) -> list[Drawn]:
        """One ``Drawn`` a row, in the order of the sequences."""
        if self._event is not None:
            self._event.synchronize()
        wanted = self._wanted
        if wanted.simple:
            return [Drawn((token,)) for token in self._host[0].tolist()]
        drawn, logprobs, *candidates = (t.tolist() for t in self._host)
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
    """``drawn [M]`` int64 all draws, ``logprobs [L]`` of those of silent rows, and each beam width's candidates."""

    drawn: torch.Tensor
    logprobs: torch.Tensor
    candidates: tuple[tuple[torch.Tensor, torch.Tensor], ...]


class _Wanted:
    """What each row needs: ``counts [N]`` draws, their log probabilities where ``silent [N]``, or candidates.

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
    """Draw for each sequence from its row of ``logits [N, vocab]``: a token, one for each of its forks, or a beam's
    best continuations.

    The random numbers of a row depend only on its request's seed, the sequence's index in the request and the position
    (engine/execution/gumbel.py), so a request draws the same tokens in any batch, preempted or not, and a fork the same
    as a request of its own.
    """
    best = torch.max(logits, dim=-1).indices  # the first of equals, as argmax, which takes 3 times as long in bfloat16
    wanted = _Wanted(sequences)
    if wanted.simple and all(seq.request.params.greedy for seq in sequences):
        return Sampled(best, wanted)
    positions = np.array([seq.num_tokens for seq in sequences])
    draw_rows = np.repeat(np.arange(len(sequences)), wanted.counts)
    draws = _Draws.of(sequences, draw_rows, positions, engine_seed, logits.shape[1])
    if wanted.simple:
        _draw_into(best, logits, best, draws)
        return Sampled(best, wanted)
    silent = np.flatnonzero(np.repeat(wanted.silent, wanted.counts))
    first = np.flatnonzero(np.diff(draw_rows, prepend=-1))  # of each row's draws
    rows, firsts, of_silent, row_of_silent, *of_beams = _upload(
        logits.device, draw_rows, first, silent, draw_rows[silent], *map(np.array, wanted.beams.values())
    )
    drawn = best[rows]
    _draw_into(drawn, logits, best, draws)
    # of the model, before temperature, top-k and top-p; in float32, as transformers ranks beams
    logprobs = torch.log_softmax(logits[row_of_silent].float(), dim=-1)
    logprobs = logprobs.gather(1, drawn[of_silent][:, None])[:, 0]
    candidates = tuple(_candidates(logits[at], count) for at, count in zip(of_beams, wanted.beams, strict=True))
    tokens = best.index_copy_(0, rows[firsts], drawn[firsts])
    return Sampled(tokens, wanted, _Extras(drawn, logprobs, candidates))


def _candidates(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    top = torch.topk(torch.log_softmax(logits.float(), dim=-1), min(count, logits.shape[1]))
    return top.indices, top.values


@dataclass(frozen=True)
class _Draws:
    """Draws that are not greedy, ``[S]`` each: first those without top-k and top-p, then top-k only, then top-p.

    ``at``: among all draws; ``row``: of the logits; ``key`` int64; ``top_k`` and ``top_p`` are vocab and 1.0 when off.
    """

    at: np.ndarray
    row: np.ndarray
    key: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    num_plain: int
    num_top_k: int

    @classmethod
    def of(
        cls, sequences: list[Sequence], draw_rows: np.ndarray, positions: np.ndarray, engine_seed: int, vocab: int
    ) -> _Draws:
        """``draw_rows [M]``: the row of each draw, those of one row (its siblings) side by side."""
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
        top_k = np.minimum(top_k, vocab).astype(np.int64)
        kind = np.where(top_p < 1.0, 2, np.where(top_k < vocab, 1, 0))
        order = np.argsort(kind, kind="stable")
        row = draw_rows[at]
        key = row_keys(np.array(seeds, dtype=np.uint64), positions[row])
        columns = (column[order] for column in (at, row, key, temperature, top_k, top_p))
        return cls(*columns, num_plain=int((kind == 0).sum()), num_top_k=int((kind == 1).sum()))


def _draw_into(drawn: torch.Tensor, logits: torch.Tensor, best: torch.Tensor, draws: _Draws) -> None:
    """Write the draws to ``drawn [M]``. ``best [N]``: argmax of each row of ``logits``."""
    count = len(draws.at)
    if not count:
        return
    at, row, key, temperature, top_k, top_p = _upload(
        logits.device, draws.at, draws.row, draws.key, draws.temperature, draws.top_k, draws.top_p
    )
    temperature = temperature.clamp(min=_COLDEST).float()
    largest = logits[row, best[row]].float()
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    block = max(1, _BLOCK_ELEMENTS[logits.device.type] // logits.shape[1])
    bounds = (0, draws.num_plain, draws.num_plain + draws.num_top_k, count)
    for kind, (first, last) in enumerate(pairwise(bounds)):
        for start in range(first, last, block):
            part = slice(start, min(start + block, last))
            if kind == 0:
                tokens[part] = draw(logits, row[part], largest[part], temperature[part], key[part])
                continue
            scores = logits.index_select(0, row[part]).float()
            scores = scores.sub_(largest[part, None]).div_(temperature[part, None])
            if kind == 1:
                scores = keep_top_k(scores, top_k[part], int(draws.top_k[part].max()))
            else:
                scores = keep_top_p(scores, top_k[part], top_p[part])
            tokens[part] = draw_scored(scores, key[part])
    drawn.index_copy_(0, at, tokens)


def keep_top_k(scores: torch.Tensor, top_k: torch.Tensor, largest_k: int) -> torch.Tensor:
    """``scores [S, vocab]`` with -inf below each row's ``top_k [S]``-th largest (at most ``largest_k``). Ties stay."""
    kth = torch.topk(scores, largest_k).values.gather(1, top_k[:, None] - 1)
    return scores.masked_fill(scores < kth, -torch.inf)


def keep_top_p(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """``scores [S, vocab]`` with -inf outside each row's ``top_k [S]`` and then its ``top_p [S]``.

    top-p keeps the fewest most probable tokens whose probabilities reach ``top_p`` (Holtzman et al. 2020), after
    top-k, as vLLM and transformers do; of equally probable ones at the edge, those with the lowest ids.
    """
    ordered, index = torch.sort(scores, dim=-1, descending=True, stable=True)
    kth = ordered.gather(1, top_k[:, None] - 1)
    ordered = ordered.masked_fill_(ordered < kth, -torch.inf)
    probabilities = torch.softmax(ordered, dim=-1)
    reached_before = torch.cumsum(probabilities, dim=-1) - probabilities
    ordered = ordered.masked_fill_(reached_before >= top_p[:, None].float(), -torch.inf)
    return torch.empty_like(scores).scatter_(1, index, ordered)


def _upload(device: torch.device, *columns: np.ndarray) -> list[torch.Tensor]:
    """int64 or float64 columns of any length as tensors on ``device``, in one copy from pinned memory."""
    packed = torch.from_numpy(np.concatenate([column.view(np.int64) for column in columns]))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    parts = packed.split([len(column) for column in columns])
    return [p if c.dtype == np.int64 else p.view(torch.float64) for p, c in zip(parts, columns, strict=True)]


def _seed_of(seq: Sequence, index: int, engine_seed: int) -> int:
    """The request's own seed plus the sibling's index, else one of the engine's seed and both names; 64 bits."""
    if seq.request.params.seed is not None:
        return (seq.request.params.seed + index) & (2**64 - 1)
    return _named_seed(engine_seed, seq.request_id, index)


@lru_cache(maxsize=2**16)
def _named_seed(engine_seed: int, request_id: str, index: int) -> int:
    digest = blake2b(f"{engine_seed}:{request_id}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
