"""A model on GPUs that is simulated: its KV memory, and the cost model of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvbench.capacity.fit import GIB, Settings, memory_of
from kvbench.capacity.gpus import GPU, known_gpus
from kvbench.capacity.model import PlannedModel
from kvbench.capacity.weights import experts_of, weights_of
from kvbench.common.errors import UsageError, as_usage_error
from kvbench.common.text import format_bytes, listing
from kvbench.simulation.cost.cost_model import TYPICAL, CostCalibration, GpuShare, Roofline, StepTimer
from kvbench.simulation.cost.tables import MeasuredOperators, Tables
from kvbench.simulation.wording import sentence
from kvbench_engine.config import EngineConfig
from kvbench_engine.kv.budget import KVCapacity, KVShape, capacity_of, settle_length
from kvbench_engine.kv.groups import largest

SettingsByName = Mapping[str, Any]
"""Settings of the engine by name, as a workload's ``engine`` section has them."""


@dataclass(frozen=True)
class Machine:
    """A number of ``gpus`` of one kind that share a model by tensor parallelism.

    tables: measured operator times in the place of the data sheet
    calibration: None: nothing is known beside tables and data sheet

    Raises UsageError for a GPU of unknown performance, and where the model cannot be split or is not the tables'.
    """

    device: ClassVar[str] = "cuda"
    overlaps: ClassVar[bool] = True
    """whether the next step is planned while one is computed, as the engine does on a GPU"""
    model: PlannedModel
    gpu: GPU
    gpus: int = 1
    tables: Tables | None = None
    calibration: CostCalibration | None = None

    def __post_init__(self) -> None:
        self.model.check_split(self.gpus)
        if self.gpu.performance is None:
            fast = listing([gpu.name for gpu in known_gpus() if gpu.performance])
            raise UsageError(sentence("machine.unknown_speed", gpu=self.gpu.name, fast=fast))
        fitted_on = self.calibration.provenance.device if self.calibration else None
        if self.calibration and self.calibration.kernels != 1.0 and fitted_on not in (None, self.gpu.name):
            raise UsageError(sentence("machine.other_kernels", fitted_on=fitted_on, gpu=self.gpu.name))
        if self.tables is None or (self.tables.experts is None) == (experts_of(self.model) is None):
            return
        key = "machine.no_experts" if self.tables.experts is not None else "machine.no_moe_table"
        raise UsageError(sentence(key, folder=self.tables.folder, model=self.model.name))

    @property
    def title(self) -> str:
        """The GPUs in words, such as ``4xA100-80GB, simulated``."""
        return sentence("machine.title", n=self.gpus, gpu=self.gpu.name)

    @property
    def cost_model(self) -> str:
        """The source of step times, for people."""
        source = sentence("machine.data_sheet", gpu=self.gpu.name)
        if self.tables:
            source = sentence("machine.tables", folder=self.tables.folder)
        if self.calibration is None:
            return source
        fitted = self.calibration.provenance
        run, device = fitted.run or fitted.step_log, fitted.device
        on = sentence("machine.on_run", "run" if run else "none", run=run)
        on += sentence("machine.on_device", "device" if device else "none", device=device)
        return sentence("machine.calibrated", source=source, on=on)

    @property
    def corrections(self) -> CostCalibration:
        """The calibration that counts: with a data sheet alone, what is typical takes the place of one."""
        return self.calibration or (CostCalibration() if self.tables else TYPICAL)

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def num_layers(self) -> int:
        return sum(group.count for group in self.model.layers)

    def settle(self, settings: SettingsByName) -> tuple[EngineConfig, KVCapacity]:
        """Settles the engine settings and their KV capacity; ``kv_budget`` is of all GPUs together.

        Raises UsageError for settings that cannot be, and for a model that does not fit, with the numbers.
        """
        with as_usage_error():
            config = EngineConfig.from_mapping({**settings, "model": self.model.name, "device": self.device})
            if config.async_scheduling is None or not self.overlaps:
                config = replace(config, async_scheduling=self.overlaps)
            budget, shape = self._kv_budget(config), self.kv_shape()
            if not config.latent_kv and any(kv.latent for kv in shape.layers):
                raise UsageError(sentence("machine.unfolded", model=self.model.name))
            config = settle_length(
                replace(config, kv_budget=budget), self.model.spec.max_positions, shape, budget, may_lower=True
            )
            return config, capacity_of(config, shape, budget)

    def _kv_budget(self, config: EngineConfig) -> int:
        """Computes the bytes for KV on all GPUs: as many as asked for, or all that they have beside the weights."""
        most = self.gpu.memory_bytes * self.gpus - weights_of(self.model).total_bytes
        if config.kv_budget is not None and config.kv_budget > most:
            what = {"budget": config.kv_budget, "gpus": self.gpus, "gpu": self.gpu.name}
            sizes = {"size": format_bytes(config.kv_budget), "most": format_bytes(max(0, most))}
            raise UsageError(sentence("machine.too_much_kv", **what, **sizes))
        if config.kv_budget is not None:
            return config.kv_budget
        planned = Settings(
            kv_cache_dtype=config.kv_cache_dtype,
            page_size=config.page_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
        )
        memory = memory_of(self.model, weights_of(self.model), self.gpu, self.gpus, planned)
        if memory.kv <= 0:
            sizes = {"weights": memory.weights / GIB, "memory": memory.taken / GIB}
            what = {"model": self.model.name, "gpus": self.gpus, "gpu": self.gpu.name}
            raise UsageError(sentence("machine.does_not_fit", **what, **sizes))
        return memory.kv * self.gpus

    def kv_shape(self) -> KVShape:
        """Returns the shape on all GPUs together: a KV head that several GPUs hold counts for each."""
        share = self.model.kv_shape(self.gpus)
        return replace(share, layers=tuple(replace(kv, kv_heads=kv.kv_heads * self.gpus) for kv in share.layers))

    def step_timer(self, config: EngineConfig) -> StepTimer:
        """Makes the cost model of an engine with these settings. Raises UsageError for tables of another KV."""
        share = self._share(config)
        if self.tables is None:
            return Roofline(self.model, self.gpu, self.gpus, config.kv_cache_dtype, self.corrections, share)
        if config.kv_cache_dtype not in ("auto", self.model.spec.default_dtype):
            raise UsageError(sentence("machine.other_kv", folder=self.tables.folder, dtype=config.kv_cache_dtype))
        return MeasuredOperators(self.tables, self.corrections, share)

    def _share(self, config: EngineConfig) -> GpuShare:
        model, performance, gpus = self.model, self.gpu.performance, self.gpus
        assert performance is not None
        # A ring sends each byte 2 (n - 1) / n times over each link, which is how bus bandwidth is defined.
        reduced_bytes = 2 * (gpus - 1) / gpus * (model.config.hidden_size * model.dtype_bytes)
        shape = self.model.kv_shape(gpus)
        group = largest(shape.groups(config.max_model_len, config.free_outside_window))
        return GpuShare(
            layers=self.num_layers,
            heads=model.config.num_attention_heads // gpus,
            kv_heads=max(1, model.layers[0].kv.kv_heads // gpus),
            processors=performance.processors,
            experts=experts_of(model),
            slot_bytes=shape.of_group(group).slot_bytes(config.kv_cache_dtype),
            host_link_bytes_per_s=performance.host_link_bytes_per_s,
            memory_bytes_per_s=self.gpu.bytes_per_s,
            reduces=2 * self.num_layers if gpus > 1 else 0,
            reduce_token_s=reduced_bytes / performance.all_reduce_bytes_per_s,
        )
