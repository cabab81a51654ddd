"""Computes the GPU memory left for KV, and which GPUs hold a load. The engine in mind is vLLM with its defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.capacity.gpus import GPU
from kvbench.capacity.model import PlannedModel
from kvbench.capacity.weights import Weights
from kvbench.common.errors import UsageError

GIB = 2**30
GPU_COUNTS = (1, 2, 4, 8)

# What vLLM takes before it shares out the rest as KV. It runs one step of max_num_batched_tokens tokens and
# max_num_seqs sequences and keeps the peak, which in most models is in sampling: logits, their sorted copy, indices,
# work space.
# From vLLM's logs: 38 bytes a logit for five models on H100 (llm-d/llm-d-benchmark,
# config_explorer/empirical-vllm-memory-results.md), about 32 for one on an RTX 4090 (vLLM 0.19,
# casys-kaist/LLMServingSim, bench/results/llama-3.1-8b-rtx4090/meta.json).
SAMPLING_BYTES_PER_LOGIT = 35
CONTEXT_BYTES = round(0.13 * GIB)  # CUDA context and kernels, as those logs have it for one H100
COMMUNICATION_BYTES = round(0.42 * GIB)  # more, where several GPUs talk to each other: 0.55 in those logs on two
_ACTIVATION_BYTES = 2  # bfloat16 or float16
_LARGE_GPU = 70 * GIB  # from here on, but for the A100, vLLM has larger steps


@dataclass(frozen=True)
class LargestStep:
    """The largest step that the engine is built for: vLLM's ``max_num_batched_tokens`` and ``max_num_seqs``."""

    tokens: int
    sequences: int


@dataclass(frozen=True)
class PlannedLoad:
    """A number of sequences at once, each of ``context`` tokens; a contiguous cache reserves ``max_model_len`` each."""

    context: int
    concurrency: int
    max_model_len: int


@dataclass(frozen=True)
class Settings:
    """Settings of the engine; None of ``max_num_batched_tokens`` and ``max_num_seqs``: vLLM's default for the GPU."""

    kv_cache_dtype: str = "auto"
    page_size: int = 16
    gpu_memory_utilization: float = 0.9
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None

    def step_on(self, gpu: GPU, concurrency: int = 1) -> LargestStep:
        """The engine's largest step on ``gpu``; it takes all sequences of the load."""
        large = gpu.memory_bytes >= _LARGE_GPU and not gpu.name.startswith("A100")
        tokens, sequences = (8192, 1024) if large else (2048, 256)
        return LargestStep(self.max_num_batched_tokens or tokens, self.max_num_seqs or max(sequences, concurrency))


@dataclass(frozen=True)
class GpuMemory:
    """A model on ``count`` GPUs, and the bytes on each that the engine takes, with what they go to.

    read_bytes: of all GPUs' weights, what a decode step reads at least
    """

    model: PlannedModel
    settings: Settings
    gpu: GPU
    count: int
    step: LargestStep
    taken: int
    weights: int
    read_bytes: int
    activations: int
    context: int

    @property
    def kv(self) -> int:
        """The bytes left for KV; below 0 the weights do not even fit."""
        return self.taken - self.weights - self.activations - self.context

    def at_once(self, tokens: int, *, contiguous: bool = False) -> int:
        """Sequences of ``tokens`` tokens that fit; ``contiguous``: each in one piece, without pages."""
        dtype, page_size = self.settings.kv_cache_dtype, self.settings.page_size
        if contiguous:
            size = self.model.reservation_bytes(tokens, self.step.tokens, dtype, gpus=self.count)
        else:
            size = self.model.sequence_bytes(tokens, dtype, gpus=self.count, page_size=page_size)
        return max(0, self.kv) // size

    def fits(self, load: PlannedLoad) -> bool:
        """Tests whether all sequences of the load are in memory at once."""
        return self.at_once(load.context) >= load.concurrency

    def tokens_per_s(self, load: PlannedLoad) -> float:
        """The best possible speed: a decode step reads the weights and all KV once, at the memory's full bandwidth."""
        one = self.model.read_bytes(load.context, self.settings.kv_cache_dtype, gpus=self.count)
        return load.concurrency * self.gpu.bytes_per_s / (self.read_bytes / self.count + load.concurrency * one)


def memory_of(
    model: PlannedModel, weights: Weights, gpu: GPU, count: int, settings: Settings, concurrency: int = 1
) -> GpuMemory:
    """Raises UsageError where the model cannot be split over ``count`` GPUs."""
    model.check_split(count)
    step = settings.step_on(gpu, concurrency)
    return GpuMemory(
        model,
        settings,
        gpu,
        count,
        step,
        taken=int(gpu.memory_bytes * settings.gpu_memory_utilization),
        weights=-(-weights.total_bytes // count),
        read_bytes=weights.read_bytes,
        activations=activation_bytes(model, step, count),
        context=CONTEXT_BYTES + (COMMUNICATION_BYTES if count > 1 else 0),
    )


def activation_bytes(model: PlannedModel, step: LargestStep, gpus: int) -> int:
    """The peak of one step on each GPU: that of sampling, or of an MLP whose inner dimension is large.

    Sampling holds hidden states and residual of all tokens, and the logits of all sequences, on every GPU. An MLP holds
    in place of the logits the two projections and their product, split over the GPUs, of a sparse one for each expert
    of a token.
    """
    config = model.config
    inner = max(config.inner, config.num_experts_per_tok * config.expert_inner)
    states = 2 * step.tokens * config.hidden_size * _ACTIVATION_BYTES
    sampling = step.sequences * config.vocab_size * SAMPLING_BYTES_PER_LOGIT
    return states + max(sampling, 3 * step.tokens * inner * _ACTIVATION_BYTES // gpus)


def usable(gpu: GPU, model: PlannedModel, settings: Settings) -> bool:
    """Tests whether an engine takes this model's dtype and KV dtype on ``gpu``."""
    return gpu.bfloat16 or (model.spec.default_dtype != "bfloat16" and not settings.kv_cache_dtype.startswith("fp8"))


def smallest_fits(
    model: PlannedModel, weights: Weights, gpus: Sequence[GPU], settings: Settings, load: PlannedLoad
) -> list[GpuMemory]:
    """Returns for each kind of GPU the fewest of 1, 2, 4 and 8 that hold the load."""
    smallest = []
    for gpu in gpus:
        if not usable(gpu, model, settings):
            continue
        for count in GPU_COUNTS:
            try:
                memory = memory_of(model, weights, gpu, count, settings, load.concurrency)
            except UsageError:  # cannot be split so
                continue
            if memory.fits(load):
                smallest.append(memory)
                break
    return smallest


def pick(fitting: Sequence[GpuMemory], prices: Mapping[str, float]) -> GpuMemory | None:
    """The cheapest of those with a price; without any prices the fewest GPUs, of them the smallest."""
    if prices:
        priced = [memory for memory in fitting if memory.gpu.name in prices]
        return min(priced, key=lambda m: (m.count * prices[m.gpu.name], m.count), default=None)
    return min(fitting, key=lambda memory: (memory.count, memory.gpu.memory_bytes), default=None)
