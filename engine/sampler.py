"""From logits to the next token."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import torch

from engine.sequence import Drawn, SamplingParams, Sequence


def sample(logits: torch.Tensor, sequences: list[Sequence], engine_seed: int) -> list[Drawn]:
    """What each sequence needs from its row of ``logits [N, vocab]``: a token, one for each of its forks, or, for a
    beam, its best continuations.

    The randomness of a row comes from its request's seed, the sequence's index in the request and the position alone
    (Philox, counter-based), so a request draws the same tokens whatever else is in the batch, preempted or not, and a
    fork the same as if it had been a request of its own.
    """
    best = torch.argmax(logits, dim=-1).tolist()
    return [_sample_row(logits[row], best[row], seq, engine_seed) for row, seq in enumerate(sequences)]


def _sample_row(logits: torch.Tensor, best: int, seq: Sequence, engine_seed: int) -> Drawn:
    params = seq.request.params
    if not seq.pending_forks and not seq.silent:
        return Drawn((best if params.greedy else _draw(_allowed(logits, params), seq, seq.index, engine_seed),))
    if seq.num_candidates:
        return _candidates(logits, seq.num_candidates)
    count = seq.pending_forks + 1
    if params.greedy:
        tokens = (best,) * count
    else:
        allowed = _allowed(logits, params)
        tokens = tuple(_draw(allowed, seq, seq.index + i, engine_seed) for i in range(count))
    if not seq.silent:
        return Drawn(tokens)
    logprobs = torch.log_softmax(logits.float(), dim=-1)  # of the model, before temperature, top-k and top-p
    return Drawn(tokens, tuple(logprobs[list(tokens)].tolist()))


def _candidates(logits: torch.Tensor, count: int) -> Drawn:
    logprobs = torch.log_softmax(logits.float(), dim=-1)  # float32, as transformers ranks beams
    top = torch.topk(logprobs, min(count, logprobs.shape[0]))
    return Drawn(tuple(top.indices.tolist()), tuple(top.values.tolist()))


def _allowed(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    return restrict(logits.float() / params.temperature, params)


def _draw(allowed: torch.Tensor, seq: Sequence, index: int, engine_seed: int) -> int:
    """Gumbel-max over the allowed tokens of one row ``[vocab]``, for sibling ``index`` of ``seq``'s request."""
    key = (_seed_of(seq, index, engine_seed), seq.num_tokens)
    uniform = np.random.Generator(np.random.Philox(key=np.array(key, dtype=np.uint64))).random(
        allowed.shape[0], dtype=np.float32
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


def _seed_of(seq: Sequence, index: int, engine_seed: int) -> int:
    """The request's own seed plus the sibling's index, else one of the engine's seed and both names; 64 bits."""
    if seq.request.params.seed is not None:
        return (seq.request.params.seed + index) & (2**64 - 1)
    digest = blake2b(f"{engine_seed}:{seq.request_id}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
