"""What nano-vllm's batch job should take on a GPU, by the launches of a step: ``python -m ci.gpu.job_arithmetic``.

An estimate, not a measurement. Every step of the job is added up from
  launches x the seconds of one, small as it is: in a CUDA graph, or sent by the host in a step with prompt tokens;
  bytes of KV / the share of the memory's bandwidth that attention reaches;
  matrix products: their weights' bytes or their arithmetic, whichever takes longer at the share of the peak that they
  reach.
The launches are counted: tests/unit/engine/model/fused_layer_checks.py compares with the figures below. All else is
assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ci.gpu.nano_shape import Job, ModelCost, draw_job, model_cost

QWEN3_0_6B = model_cost(596_049_920, 155_582_464, True, 2, 28 * 2 * 8 * 128 * 2)
QWEN3_LAYERS = 28


@dataclass(frozen=True)
class Launches:
    """Kernels of Qwen3: of a layer, with the two that decode attention takes, and of a step beside its layers."""

    layer: int
    step: int

    def total(self, layers: int) -> int:
        """Of a whole step, its inputs' copies and the sampling too."""
        return self.layer * layers + self.step + OUTSIDE_MODEL


OUTSIDE_MODEL = 20  # copies into a graph's buffers and out of them, the draw of the tokens
AS_TRANSFORMERS = Launches(56, 21)
FUSED = Launches(10, 14)


@dataclass(frozen=True)
class AssumedGPU:
    """``node_s``: of one small kernel in a graph; ``launch_s``: for the host to send one. Shares of the peaks are those
    of kvbench/capacity/gpus.json."""

    name: str
    bytes_per_s: float
    flop_per_s: float = 989e12
    node_s: float = 2.3e-6
    launch_s: float = 6e-6
    kv_share: float = 0.83
    weights_share: float = 0.8
    flop_share: float = 0.5

    def products_s(self, cost: ModelCost, tokens: int) -> float:
        """The matrix products of ``tokens`` tokens: reading the weights or the arithmetic, whichever is longer."""
        compute = 2 * cost.matrix_parameters * tokens / (self.flop_share * self.flop_per_s)
        return max(compute, cost.weight_bytes / (self.weights_share * self.bytes_per_s))

    def decode_s(self, cost: ModelCost, launches: int, lengths: Sequence[int]) -> float:
        """A step of decodes that attend to ``lengths`` tokens, replayed from a graph."""
        read = sum(lengths) * cost.kv_bytes / (self.kv_share * self.bytes_per_s)
        return launches * self.node_s + read + self.products_s(cost, len(lengths))

    def prefill_s(self, cost: ModelCost, launches: int, tokens: int) -> float:
        """A step of ``tokens`` prompt tokens, sent kernel by kernel: the slower of the host and the GPU."""
        return max(launches * self.launch_s, self.products_s(cost, tokens) + launches * self.node_s)


# How much a small kernel in a graph takes is not known better than this: about 1.3 us to start, the rest to read and
# write a few MB.
NODE_S = (2.3e-6, 3.0e-6)
GPUS = ("H100 SXM", 3.35e12), ("H200", 4.8e12)


def job_seconds(job: Job, cost: ModelCost, gpu: AssumedGPU, launches: int, batched_tokens: int = 8192) -> float:
    """All prompts first, ``batched_tokens`` a step, then all sequences decode together until each has its tokens."""
    prefills = -(-job.input_tokens // batched_tokens)
    seconds = prefills * gpu.prefill_s(cost, launches, job.input_tokens // prefills)
    for drawn in range(1, max(job.output_lengths)):  # the prefill draws the first token of each
        lengths = [len(p) + drawn for p, out in zip(job.prompts, job.output_lengths, strict=True) if out > drawn]
        seconds += gpu.decode_s(cost, launches, lengths)
    return seconds


def table(job: Job, cost: ModelCost, layers: int, ways: Sequence[tuple[str, Launches]]) -> list[list[str]]:
    """Rows of: GPU, way, launches a step, ms that they take, ms of a decode step of the whole batch at half its output,
    output tokens/s of the job; ranges over ``NODE_S``."""
    half = [len(p) + out // 2 for p, out in zip(job.prompts, job.output_lengths, strict=True)]
    rows = []
    for name, bandwidth in GPUS:
        for way, launches in ways:
            count = launches.total(layers)
            gpus = [AssumedGPU(name, bandwidth, node_s=node_s) for node_s in NODE_S]
            steps = [gpu.decode_s(cost, count, half) * 1e3 for gpu in gpus]
            rates = [job.output_tokens / job_seconds(job, cost, gpu, count) for gpu in gpus]
            overhead = [count * node_s * 1e3 for node_s in NODE_S]
            rows.append([
                name, way, str(count), f"{overhead[0]:.1f} to {overhead[1]:.1f}", f"{steps[0]:.1f} to {steps[1]:.1f}",
                f"{rates[1]:,.0f} to {rates[0]:,.0f}",
            ])  # fmt: skip
    return rows


def main() -> None:
    """Print the table as Markdown."""
    head = ["GPU", "layers", "launches a step", "their ms", "decode step of 256, ms", "output tokens/s"]
    rows = table(
        draw_job(), QWEN3_0_6B, QWEN3_LAYERS, [("as transformers has them", AS_TRANSFORMERS), ("fused", FUSED)]
    )
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
