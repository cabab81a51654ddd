"""The batch job that nano-vllm made the common yardstick, and the least time that it can take.

256 prompts, prompt and output lengths uniform over 100..1024, all there at the start, drawn by Python's ``random``
with seed 0 in the order in which nano-vllm's bench.py draws: a prompt's length, its tokens, and so on; the output
lengths after all prompts. 142,827 prompt tokens and 133,966 output tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

NUM_SEQUENCES = 256
SHORTEST, LONGEST = 100, 1024
LAST_TOKEN_ID = 10_000


@dataclass(frozen=True)
class NanoJob:
    """Prompts (token ids), and how many tokens each is to bring."""

    prompts: tuple[tuple[int, ...], ...]
    output_lengths: tuple[int, ...]

    @property
    def input_tokens(self) -> int:
        """Counts the tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        """Counts the tokens of all answers."""
        return sum(self.output_lengths)

    @property
    def kv_tokens_read(self) -> int:
        """Counts the tokens whose KV decode must read: step j of a prompt of n tokens reads n + j."""
        return sum(
            len(prompt) * out + out * (out - 1) // 2
            for prompt, out in zip(self.prompts, self.output_lengths, strict=True)
        )


def draw_job(
    num_sequences: int = NUM_SEQUENCES, shortest: int = SHORTEST, longest: int = LONGEST, seed: int = 0
) -> NanoJob:
    """Draws the job. A smaller ``num_sequences`` is another draw, not a part of the full one."""
    rng = random.Random(seed)
    prompts = tuple(
        tuple(rng.randint(0, LAST_TOKEN_ID) for _ in range(rng.randint(shortest, longest)))
        for _ in range(num_sequences)
    )
    return NanoJob(prompts, tuple(rng.randint(shortest, longest) for _ in range(num_sequences)))


@dataclass(frozen=True)
class ModelCost:
    """The cost of a model.

    ``weight_bytes``: read by every step (an untied input embedding is looked up, not read). ``matrix_parameters``: each
    prompt token is multiplied with them. ``kv_bytes``: of one token's KV.
    """

    weight_bytes: int
    matrix_parameters: int
    kv_bytes: int


def model_cost(parameters: int, embedding: int, tied: bool, dtype_bytes: int, kv_bytes: int) -> ModelCost:
    """Computes the cost of a model. ``parameters`` in all, tied ones once; ``embedding``: those of the input embedding.

    The output matrix is needed for the last token of a prompt only, so prompt tokens do not pay for it.
    """
    read = parameters if tied else parameters - embedding
    return ModelCost(read * dtype_bytes, read - embedding, kv_bytes)


def floor_seconds(job: NanoJob, cost: ModelCost, read_bytes_per_s: float, flop_per_s: float) -> dict[str, float]:
    """Computes the least time of ``job``.

    sum(KV bytes) / BW + steps x weight bytes / BW + 2 N T_in / peak flops.

    Steps: those of the longest output, as if all sequences fit at once. Overlap of the terms is not credited.
    """
    parts = {
        "kv": job.kv_tokens_read * cost.kv_bytes / read_bytes_per_s,
        "weights": max(job.output_lengths) * cost.weight_bytes / read_bytes_per_s,
        "prefill": 2 * cost.matrix_parameters * job.input_tokens / flop_per_s,
    }
    return parts | {"total": sum(parts.values())}
