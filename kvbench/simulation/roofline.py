"""Step times from a device's data sheet: an operator takes as long as its arithmetic or its bytes, the longer one."""

from __future__ import annotations

from engine.execution.simulated_executor import StepTime, StepWork
from kvbench.capacity.gpus import GPU
from kvbench.capacity.model import PlannedModel
from kvbench.capacity.weights import weights_of


class Roofline:
    """Of a model on ``gpus`` of one kind."""

    def __init__(self, model: PlannedModel, gpu: GPU, gpus: int, kv_cache_dtype: str) -> None:
        weights = weights_of(model)
        self._weight_s = weights.read_bytes / gpus / gpu.bytes_per_s / 0.85
        self._token_s = 2 * weights.parameters.total / gpus / (0.6 * 300e12)
        self._kv_s = model.token_bytes(kv_cache_dtype, gpus=gpus) / gpu.bytes_per_s / 0.8

    def __call__(self, work: StepWork) -> StepTime:
        linear = max(self._weight_s, self._token_s * work.tokens)
        read = work.decode_context + sum(before + count for count, before in work.prefills)
        execute = linear + self._kv_s * read
        return StepTime(execute + 1e-3, execute=execute, schedule=1e-3)
