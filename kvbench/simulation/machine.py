"""What is simulated: a model on GPUs, its KV memory, and the cost model of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.config import EngineConfig
from engine.kv.budget import KVCapacity, KVShape, LayerKV, capacity_of, settle_length
from engine.model.spec import DTYPE_BYTES
from kvbench.capacity.fit import Settings, memory_of
from kvbench.capacity.gpus import GPU
from kvbench.capacity.model import PlannedModel
from kvbench.capacity.weights import weights_of
from kvbench.common.errors import UsageError
from kvbench.simulation.replica import Replica, StepTimer
from kvbench.simulation.roofline import Roofline


@dataclass(frozen=True)
class Machine:
    """``gpus`` of one kind that share a model by tensor parallelism."""

    model: PlannedModel
    gpu: GPU
    gpus: int = 1

    @property
    def title(self) -> str:
        """4xA100-80GB, simulated."""
        return f"{self.gpus}x{self.gpu.name}, simulated" if self.gpus > 1 else f"{self.gpu.name}, simulated"

    @property
    def cost_model(self) -> str:
        """Where step times come from, for people."""
        return f"data sheet of {self.gpu.name}"

    @property
    def vocab_size(self) -> int:
        return int(self.model.spec.text_config["vocab_size"])

    def settle(self, settings: Mapping[str, Any]) -> tuple[EngineConfig, KVCapacity]:
        """The engine settings and their KV capacity; ``kv_budget`` is of all GPUs together.

        Raises UsageError for settings that cannot be, and for a model that does not fit, with the numbers.
        """
        try:
            config = EngineConfig.from_mapping({**settings, "model": self.model.name, "device": "auto"})
            if config.kv_budget is None:
                config = replace(config, kv_budget=self._room(config))
            limit, shape = self.model.spec.max_positions, self._kv_shape()
            assert config.kv_budget is not None
            config = settle_length(config, limit, shape, config.kv_budget, may_lower=True)
            return config, capacity_of(config, shape, config.kv_budget)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def _room(self, config: EngineConfig) -> int:
        """Bytes that all GPUs have for KV beside the weights."""
        planned = Settings(
            kv_cache_dtype=config.kv_cache_dtype,
            page_size=config.page_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
        )
        memory = memory_of(self.model, weights_of(self.model), self.gpu, self.gpus, planned)
        if memory.kv <= 0:
            raise UsageError(
                f"{self.model.name} does not fit on {self.gpus}x{self.gpu.name}: its weights take "
                f"{memory.weights / 2**30:.1f} GiB of each GPU's {memory.taken / 2**30:.1f} GiB; take more GPUs or "
                "larger ones"
            )
        return memory.kv * self.gpus

    def _kv_shape(self) -> KVShape:
        """Of all GPUs together: a KV head that several GPUs hold counts for each."""
        layers = []
        for group in self.model.layers:
            heads = max(1, group.kv.kv_heads // self.gpus) * self.gpus
            layers += [LayerKV(heads, group.kv.head_dim, group.kv.value_dim)] * group.count
        return KVShape(tuple(layers), DTYPE_BYTES[self.model.spec.default_dtype])

    def step_timer(self, config: EngineConfig) -> StepTimer:
        """The cost model for an engine of these settings."""
        return Roofline(self.model, self.gpu, self.gpus, config.kv_cache_dtype)

    def replica(self, settings: Mapping[str, Any], number: int = 0) -> Replica:
        """An idle engine. Raises UsageError as ``settle`` does."""
        config, capacity = self.settle(settings)
        return Replica(config, capacity, self.vocab_size, self.step_timer(config), number)
