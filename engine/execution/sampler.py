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
from weakref import ref

import numpy as np
import torch

from kvbench_engine.execution.gumbel import draw_into, row_keys
from kvbench_engine.scheduling.step_plan import Draw
from kvbench_engine.sequence import Drawn, Sequence

_SMALLEST = 1e-30  # smallest temperature and top-p: less would leave float32
_ALL = 2**31 - 1  # top_k: more than any vocabulary, and an int32


class Sampled:
    """The drawn tokens, on the device.

    ``tokens [N]`` int64: the first token of each row, the next step's input. Each row's largest logit goes to the host
    with them: it is not finite where nothing can be drawn. ``read()`` waits for the device; on CUDA the copy to the
    host starts at once.
    """

    def __init__(self, tokens: torch.Tensor, largest: torch.Tensor, extras: _Extras | None = None):
        self.tokens = tokens
        self._extras = extras
        parts = [largest, tokens]
        if extras is not None:
            parts = [largest, extras.drawn, extras.logprobs, *(t for pair in extras.candidates for t in pair)]
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            parts = [torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True) for t in parts]
            self._event = torch.cuda.Event()
            self._event.record()
        self._host = parts

    def read(self) -> list[Draw]:
        """Wait for the tokens: what each row drew, in the order of the sequences.

        ``Drawn`` without tokens for a row that nothing can be drawn from: its logits hold NaN or infinity, or all of
        them are -inf.
        """
        if self._event is not None:
            self._event.synchronize()
        largest, *parts = self._host
        result: list[Draw] = parts[0].tolist() if self._extras is None else self._extras.split(parts)
        finite = largest.isfinite().numpy()
        if not finite.all():
            for row in np.flatnonzero(~finite).tolist():
                result[row] = Drawn(())
        return result


@dataclass(frozen=True)
class _Wanted:
    """The draws of a step in which a row needs more than one token.

    ``counts [N]``; ``silent [N]``: log probabilities are needed too; ``beams``: number of candidates -> rows.
    """

    counts: list[int]
    silent: list[bool]
    beams: dict[int, list[int]]

    @classmethod
    def of(cls, sequences: list[Sequence]) -> _Wanted | None:
        """Find what the rows need; None if that is one token each and nothing else."""
        if not any(seq.num_candidates or seq.pending_forks or seq.silent for seq in sequences):
            return None
        beams: dict[int, list[int]] = {}
        for row, seq in enumerate(sequences):
            if seq.num_candidates:
                beams.setdefault(seq.num_candidates, []).append(row)
        counts = [0 if seq.num_candidates else seq.pending_forks + 1 for seq in sequences]
        return cls(counts, [seq.silent for seq in sequences], beams)


@dataclass(frozen=True)
class _Extras:
    """All draws ``drawn [M]`` int64, ``logprobs [L]`` of silent rows' draws, and each beam width's candidates."""

    wanted: _Wanted
    drawn: torch.Tensor
    logprobs: torch.Tensor
    candidates: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def split(self, parts: list[torch.Tensor]) -> list[Draw]:
        """Share copies of the tensors, in the order of the fields, among the rows."""
        wanted = self.wanted
        drawn, logprobs, *candidates = (t.tolist() for t in parts)
        tokens, chances = iter(drawn), iter(logprobs)
        result: list[Draw] = []
        for count, silent in zip(wanted.counts, wanted.silent, strict=True):
            own = tuple(islice(tokens, count))
            plain = count == 1 and not silent
            result.append(own[0] if plain else Drawn(own, tuple(islice(chances, count)) if silent else ()))
        for rows, ids, values in zip(wanted.beams.values(), candidates[::2], candidates[1::2], strict=True):
            for row, own, of_own in zip(rows, ids, values, strict=True):
                result[row] = Drawn(tuple(own), tuple(of_own))
        return result


class Sampler:
    """Draws for each sequence from its row of the logits: a token, one for each of its forks, or a beam's best.

    What a request asks for is stored once, when its sequence enters its row of the page table. The random numbers of a
    draw depend only on its request's seed, the sequence's index in the request and the position
    (engine/execution/gumbel.py), so a request draws the same tokens in any batch, preempted or not, and a fork the same
    as a request of its own.

    A step takes two calls: ``prepare``, or ``repeat`` for the sequences of the step before, then ``draw``.
    """

    def __init__(self, max_num_seqs: int, engine_seed: int):
        self._engine_seed = engine_seed
        self._holders: list[ref[Sequence] | None] = [None] * max_num_seqs
        self._plain = np.zeros(max_num_seqs, bool)  # False: may need more than a token
        self._samples = np.zeros(max_num_seqs, bool)  # False: greedy
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.zeros(max_num_seqs, np.float32)
        self._sequences: list[Sequence] = []  # of the step
        self._table_rows = self._num_tokens = self._top_k[:0]  # theirs
        self._wanted: _Wanted | None = None
        self._drawn_seeds = self._seeds[:0]  # of the step's draws that are not greedy
        self._positions = self._top_k[:0]  # of the tokens that these draw
        self._columns: tuple[torch.Tensor, ...] = ()  # where they draw, and by which settings, on the device
        self._repeated = False

    def prepare(self, sequences: list[Sequence], table_rows: np.ndarray, num_tokens: np.ndarray) -> list[np.ndarray]:
        """Make the columns that ``draw`` needs on the device, for sequences in the order of their logits.

        ``table_rows``: their rows of the page table, int64.

        For S draws that are not greedy: key, index among all draws, row, temperature, top-k and top-p, ``[S]`` each.
        If rows need more than a token: each draw's row, the first draws of the rows, the draws whose log probabilities
        are needed, their rows, and the rows of each beam width.
        """
        holders = self._holders
        for seq, table_row in zip(sequences, table_rows.tolist(), strict=True):
            holder = holders[table_row]
            if holder is None or holder() is not seq:
                self._enter(seq, table_row)
        self._wanted = None if self._plain[table_rows].all() else _Wanted.of(sequences)
        self._sequences, self._table_rows, self._num_tokens = sequences, table_rows, num_tokens
        self._repeated, self._columns = False, ()
        row = np.arange(len(sequences))
        extras: list[np.ndarray] = []
        if (wanted := self._wanted) is not None:
            row = np.repeat(row, wanted.counts)
            silent = np.flatnonzero(np.repeat(wanted.silent, wanted.counts))
            first = np.flatnonzero(np.diff(row, prepend=-1))  # of each row's draws
            extras = [row, first, silent, row[silent], *map(np.array, wanted.beams.values())]
        at = np.flatnonzero(self._samples[table_rows[row]])
        row = row[at]
        table_rows, self._positions = table_rows[row], num_tokens[row]
        if not len(at):
            return extras
        self._drawn_seeds = self._seeds[table_rows]
        if wanted is not None:
            self._seed_siblings(row)
        keys = row_keys(self._drawn_seeds, self._positions)
        return [keys, at, row, *(facts[table_rows] for facts in (self._temperature, self._top_k, self._top_p)), *extras]

    def repeat(self) -> list[np.ndarray]:
        """Make the columns for the sequences of the last call, each with one token more."""
        if self._wanted is not None:
            return self.prepare(self._sequences, self._table_rows, self._num_tokens + 1)
        if not self._repeated:  # on a CPU they are views of a buffer that the next step but one writes
            self._columns, self._repeated = tuple(column.clone() for column in self._columns), True
        self._positions = self._positions + 1
        return [row_keys(self._drawn_seeds, self._positions)] if len(self._positions) else []

    def draw(self, logits: torch.Tensor, columns: tuple[torch.Tensor, ...]) -> Sampled:
        """Draw from ``logits [N, vocab]``, with the columns of this step on the device."""
        keys, extras = None, columns
        if len(self._positions):
            keys, *extras = columns
            if not self._repeated:
                self._columns, extras = tuple(extras[:5]), extras[5:]
        if keys is not None and self._wanted is None and len(keys) == len(logits):  # the draws read all rows
            drawn = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
            return Sampled(drawn, self._draw_into(drawn, logits, keys))
        largest, best = torch.max(logits, dim=-1)  # of a row with NaN, the NaN's; of equals the first, as argmax
        if self._wanted is None:
            if keys is not None:
                self._draw_into(best, logits, keys)
            return Sampled(best, largest)
        rows, firsts, silent, row_of_silent, *of_beams = extras
        drawn = best[rows]
        if keys is not None:
            self._draw_into(drawn, logits, keys)
        # of the model, before temperature, top-k and top-p; in float32, as transformers ranks beams
        logprobs = torch.log_softmax(logits[row_of_silent].float(), dim=-1)
        logprobs = logprobs.gather(1, drawn[silent][:, None])[:, 0]
        widths = self._wanted.beams
        candidates = tuple(_candidates(logits[at], count) for at, count in zip(of_beams, widths, strict=True))
        tokens = best.index_copy_(0, rows[firsts], drawn[firsts])
        return Sampled(tokens, largest, _Extras(self._wanted, drawn, logprobs, candidates))

    def _enter(self, seq: Sequence, row: int) -> None:
        """Store what ``seq`` asks for in its row."""
        self._holders[row], params = ref(seq), seq.request.params
        self._plain[row] = not (seq.num_candidates or seq.pending_forks or seq.silent)
        self._samples[row] = not params.greedy
        self._seeds[row] = _seed_of(seq, seq.index, self._engine_seed)
        self._temperature[row] = max(params.temperature, _SMALLEST)
        self._top_k[row] = min(params.top_k or _ALL, _ALL)
        self._top_p[row] = max(params.top_p, _SMALLEST)

    def _seed_siblings(self, row: np.ndarray) -> None:
        """Give the second and later draws of a row, which are its siblings' first ones, the seeds of these."""
        for at in np.flatnonzero(np.diff(row) == 0).tolist():
            seq = self._sequences[row[at]]
            sibling = at + 1 - int(np.searchsorted(row, row[at]))
            self._drawn_seeds[at + 1] = _seed_of(seq, seq.index + sibling, self._engine_seed)

    def _draw_into(self, drawn: torch.Tensor, logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Write the draws that are not greedy to ``drawn [M]`` int64. Returns their rows' largest logits."""
        at, row, temperature, top_k, top_p = self._columns
        return draw_into(drawn, at, logits, row, temperature, keys, top_k, top_p)


def _candidates(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    top = torch.topk(torch.log_softmax(logits.float(), dim=-1), min(count, logits.shape[1]))
    return top.indices, top.values


def _seed_of(seq: Sequence, index: int, engine_seed: int) -> int:
    """The request's own seed plus the sibling's index, else a hash of the engine's seed and both names; 64 bits."""
    if seq.request.params.seed is not None:
        return (seq.request.params.seed + index) & (2**64 - 1)
    return _named_seed(engine_seed, seq.request_id, index)


@lru_cache(maxsize=2**16)
def _named_seed(engine_seed: int, request_id: str, index: int) -> int:
    digest = blake2b(f"{engine_seed}:{request_id}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
