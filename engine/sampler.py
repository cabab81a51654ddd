"""From logits to the next token."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import torch

from engine.sequence import SamplingParams, Sequence


def sample(logits: torch.Tensor, sequences: list[Sequence], engine_seed: int) -> list[int]:
    """One token for each row of ``logits [N, vocab]``, row i for ``sequences[i]``.

    A row's randomness comes from its request's seed and the position alone (Philox, counter-based), so a request
    draws the same tokens whatever else is in the batch, preempted or not.
    """
    tokens = torch.argmax(logits, dim=-1).tolist()
    for row, seq in enumerate(sequences):
        if not seq.request.params.greedy:
            tokens[row] = _draw(logits[row].float(), seq, engine_seed)
    return tokens


def _draw(logits: torch.Tensor, seq: Sequence, engine_seed: int) -> int:
    """Gumbel-max over the allowed tokens of one row ``[vocab]``."""
    params = seq.request.params
    allowed = restrict(logits / params.temperature, params)
    key = (_seed_of(seq, engine_seed), seq.num_tokens)
    uniform = np.random.Generator(np.random.Philox(key=np.array(key, dtype=np.uint64))).random(
        logits.shape[0], dtype=np.float32
    )
    noise = -torch.log(-torch.log(torch.from_numpy(uniform).clamp_(1e-20, 1 - 1e-7)))
    return int(torch.argmax(allowed + noise.to(allowed.device)))


def restrict(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """``logits [vocab]``, already divided by the temperature, with -inf outside top-k and then top-p.

    top-p keeps the fewest most probable tokens whose probabilities reach ``top_p`` (Holtzman et al. 2020), after
    top-k, as vLLM and transformers do.
    """
    vocab = logits.shape[0]
    if params.top_k and params.top_k < vocab:
        kth = torch.topk(logits, params.top_k).values[-1]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1.0:
        ordered, index = torch.sort(logits, descending=True)
        probabilities = torch.softmax(ordered, dim=-1)
        reached_before = torch.cumsum(probabilities, dim=-1) - probabilities
        dropped = torch.empty(vocab, dtype=torch.bool, device=logits.device)
        dropped[index] = reached_before >= params.top_p
        logits = logits.masked_fill(dropped, -torch.inf)
    return logits


def _seed_of(seq: Sequence, engine_seed: int) -> int:
    """The request's own seed, else one drawn from the engine's seed and the request's id; 64 bits."""
    if seq.request.params.seed is not None:
        return seq.request.params.seed & (2**64 - 1)
    digest = blake2b(f"{engine_seed}:{seq.request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
