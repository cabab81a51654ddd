"""Decode over a paged cache in plain arithmetic, as the stand-ins of other projects' kernels need it."""

from __future__ import annotations

import torch

from kvbench_kernels import get_backend
from kvbench_kernels.api import AttentionOptions


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, scale: float,
    out: torch.Tensor, scales: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> torch.Tensor:  # fmt: skip
    """Write ``out``. ``k``, ``v``: ``[pages, page, heads, dim]``; ``table``: of sequences; ``scales``: q, k, v."""
    page, sides = k.shape[1], [side.float().flatten(0, 1) for side in (k, v)]
    query = q.float() * scales[0] * scales[1]
    starts = table.long() * page
    result = get_backend("torch").decode_attention(query, *sides, starts, lens, page, AttentionOptions(scale))
    return out.copy_(result * scales[2])
