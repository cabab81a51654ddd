"""Steps that make a GPU compile every attention kernel before the first request.

A kernel that compiles during a request adds about a second to its time to first token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kvbench_engine.model.attention import StepTensors
from kvbench_kernels.launch import SHORT_QUERIES

Forward = Callable[[torch.Tensor, torch.Tensor, StepTensors, torch.Tensor], torch.Tensor]


def padding_steps(page_starts: torch.Tensor, max_model_len: int) -> Iterator[StepTensors]:
    """Make steps of decode, short and long chunks, once with few keys (no split) and once with the most.

    One sequence of length 0 on slots -1: no KV is read or written. Kernels are chosen by the bounds alone.
    ``page_starts [G, rows, pages]``: the tensor in which steps have their page tables.
    """
    groups, _, pages = page_starts.shape
    tables, device = page_starts.new_zeros(groups, 1, pages), page_starts.device
    none = torch.zeros(0, dtype=torch.int64, device=device)
    empty = torch.zeros(1, dtype=torch.int64, device=device)
    nowhere = (empty - 1).expand(groups, 1)
    for max_tokens in (1, max_model_len):
        yield StepTensors(1, nowhere, tables, empty, tables[:, :0], none, empty, max_tokens, 0, 0)
        for queries in (1, SHORT_QUERIES + 1):
            slots = torch.full((groups, queries), -1, dtype=torch.int64, device=device)
            starts = torch.tensor([0, queries], device=device)
            yield StepTensors(0, slots, tables[:, :0], none, tables, empty, starts, 0, max_tokens, queries)


@torch.inference_mode()
def run_padding_steps(forward: Forward, page_starts: torch.Tensor, max_model_len: int) -> None:
    """Run all ``padding_steps``."""
    for step in padding_steps(page_starts, max_model_len):
        ids = torch.zeros_like(step.slots[0])
        forward(ids, ids, step, ids[:1])
