"""Draws from logits as the executor does, for sequences that have the rows of the page table in their order."""

from __future__ import annotations

import numpy as np
import torch

from kvbench_engine.execution.sampler import Sampled, Sampler
from kvbench_engine.execution.step_inputs import InputBuffers
from kvbench_engine.sequence import Sequence


def prepared(
    sequences: list[Sequence], engine_seed: int, device: torch.device
) -> tuple[Sampler, tuple[torch.Tensor, ...]]:
    """A sampler that is ready to draw for the sequences, and the columns that it needs."""
    for row, seq in enumerate(sequences):
        seq.row = row
    sampler = Sampler(len(sequences), engine_seed)
    rows, lengths = np.arange(len(sequences)), np.array([len(seq.token_ids) for seq in sequences])
    columns = sampler.prepare(sequences, rows, lengths)
    buffers = InputBuffers(device, (1,), np.zeros((1, len(sequences), 1), np.int64))
    return sampler, tuple(buffers._send(*columns))


def sample(logits: torch.Tensor, sequences: list[Sequence], engine_seed: int) -> Sampled:
    """What each sequence draws from its row of ``logits [N, vocab]``."""
    sampler, columns = prepared(sequences, engine_seed, logits.device)
    return sampler.draw(logits, columns)
