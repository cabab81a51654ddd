"""Computes a step plan as one packed forward pass of the model; the plan is the scheduler's."""

from __future__ import annotations

import os
import time

import numpy as np
import torch

from kvbench_engine.config import EngineConfig
from kvbench_engine.execution.forward import ModelForward
from kvbench_engine.execution.sampler import Sampled, Sampler
from kvbench_engine.execution.step_inputs import InputBuffers, StepInputs
from kvbench_engine.kv.budget import KVCapacity
from kvbench_engine.kv.mover import KVMover
from kvbench_engine.model.attention import AttentionHost
from kvbench_engine.model.compiler import compile_model
from kvbench_engine.model.kv_scales import calibrate_kv_scales
from kvbench_engine.model.loader import LoadedModel
from kvbench_engine.scheduling.step_plan import Computed, Draw, Scheduled, StepHandle, StepPlan
from kvbench_engine.sequence import Sequence
from kvbench_kernels.kv_formats import find_format
from kvbench_kernels.quantized import FP8_MAX

SATURATION_EVERY = 64  # launches between two checks, which cost 0.2 % of a small model's decode steps
_SATURATION_TOKENS = 256  # most tokens of a launch that are checked


def available_cpus() -> int:
    """Cores this process may use (a container or taskset may grant fewer than the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class TorchExecutor:
    """Runs the model on CPU or CUDA.

    ``page_table`` is the KV manager's own array, int64 ``[groups, max_num_seqs, max_pages_per_seq]``, only read here.

    On CUDA a launch queues everything on the current stream, the copy of the tokens to the host too, and waits for
    nothing; reading the handle waits for that copy. The drawn tokens stay on the device for the next launch, which may
    be planned before they are read. On a CPU the step is computed when ``launch`` returns.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel, capacity: KVCapacity, page_table: np.ndarray):
        self.config = config
        self.model = loaded.model
        self.model_info = loaded.info
        self.device = loaded.device
        self.phase_seconds = {"move": 0.0, "prepare": 0.0, "execute": 0.0, "sample": 0.0}
        self._inputs = InputBuffers(self.device, capacity.page_sizes, page_table, whole=bool(capacity.columns))
        self._sampler = Sampler(config.max_num_seqs, config.seed)
        self._drawn = torch.empty(0, dtype=torch.int64, device=self.device)  # tokens of the last launch that sampled
        self._drawing: list[Sequence] = []  # the sequences of _drawn
        self._sampling: list[int] = []  # of the last launch: indices in the plan of the items that draw
        self.kv_saturated_values = self.kv_sampled_values = 0
        self._counts_saturated = find_format(config.kv_cache_dtype) in FP8_MAX
        self._launches = 0
        self._saturation = torch.tensor(0), 0  # counts of the last launch that was checked
        self.host = self._make_host(config, loaded, capacity)
        self.mover = KVMover(self.host.raw_tensors(), capacity, config.layout == "paged")
        self.forward = ModelForward(loaded.model, self.host, compile_model if config.torch_compile else None)

    @property
    def replayed_steps(self) -> int:
        """Launches that were a replay of a CUDA graph."""
        return self.forward.num_replayed

    @staticmethod
    def _make_host(config: EngineConfig, loaded: LoadedModel, capacity: KVCapacity) -> AttentionHost:
        kv_format, scales = find_format(config.kv_cache_dtype), None
        if kv_format is not None and not kv_format.scale_bytes:
            scales = calibrate_kv_scales(loaded.model, loaded.kv_shape, loaded.info.vocab_size, kv_format)
        like = next(loaded.model.parameters())
        return AttentionHost(
            loaded.backend,
            loaded.kv_shape,
            capacity.num_slots,
            capacity.page_sizes,
            like,
            config.kv_cache_dtype,
            scales,
            bool(config.fused_layers),
            loaded.kv_shape.groups(config.max_model_len, config.free_outside_window),
            capacity.columns,
        )

    @property
    def page_starts(self) -> torch.Tensor:
        """The tensor in which every step has its page tables, ``[groups, max_num_seqs, max_pages_per_seq]``."""
        return self._inputs.tables.in_order

    def use_page_table(self, page_table: np.ndarray) -> None:
        """Switch to another KV manager of the same capacity (after the warm-up)."""
        self._inputs.tables.use(page_table)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Move, compute and sample, in this order on the device."""
        times = [time.perf_counter()]
        if plan.moves:
            self.mover.move(plan.moves)
        self.phase_seconds["move"] += self.mover.take_seconds()  # on CUDA those of earlier steps
        if not plan.scheduled:
            self.phase_seconds["prepare"] += time.perf_counter() - times[0]
            return Computed([])
        inputs = self._repeat_inputs(plan.scheduled) if plan.repeats else self._make_inputs(plan.scheduled)
        times.append(time.perf_counter())
        logits = self.forward(inputs.ids, inputs.positions, inputs.step, inputs.last_tokens)
        times.append(time.perf_counter())
        if self._counts_saturated:
            self._look_for_saturation(inputs.step.slots)
        sampled = self._sampler.draw(logits, inputs.columns) if self._sampling else None
        if sampled is not None:
            self._drawn = sampled.tokens
        times.append(time.perf_counter())
        for phase, start, end in zip(("prepare", "execute", "sample"), times, times[1:], strict=False):
            self.phase_seconds[phase] += end - start
        return _Launched(self, sampled, self._sampling, len(plan.scheduled))

    def _make_inputs(self, scheduled: list[Scheduled]) -> StepInputs:
        """Make the inputs, with what the sampler needs on the device."""
        chunks = [i for i, (_, num_tokens) in enumerate(scheduled) if num_tokens != 1]
        order, items = range(len(scheduled)), scheduled
        if chunks:  # single tokens first: decode takes them as one block
            order = [*(i for i, (_, num_tokens) in enumerate(scheduled) if num_tokens == 1), *chunks]
            items = [scheduled[i] for i in order]
        drawn_at = dict(zip(self._drawing, range(len(self._drawing)), strict=True))
        inputs = self._inputs.make(items, drawn_at, self._sampler.prepare)
        if len(inputs.pending_at):
            inputs.fill_in(self._drawn)
        self._sampling = [order[i] for i in inputs.sampling]
        if self._sampling and self.config.async_scheduling:
            self._drawing = [scheduled[i][0] for i in self._sampling]
        return inputs

    def _repeat_inputs(self, scheduled: list[Scheduled]) -> StepInputs:
        """Make the inputs of the last launch's sequences, each with one token more."""
        columns = self._sampler.repeat()
        if self.config.async_scheduling:
            return self._inputs.repeat(self._drawn, columns)
        ids = np.array([seq.token_ids[-1] for seq, _ in scheduled])
        return self._inputs.repeat(ids, columns)

    def _look_for_saturation(self, slots: torch.Tensor) -> None:
        """Count the values that fp8 cuts off now and then; a device's count is read at the next look."""
        if self._launches % SATURATION_EVERY == 0:
            self.kv_saturated_values += int(self._saturation[0])
            self.kv_sampled_values += self._saturation[1]
            self._saturation = self.host.count_saturated(slots[:, :_SATURATION_TOKENS])
        self._launches += 1


class _Launched:
    """A launched step of ``num_items``. ``sampling``: indices in the plan of the items that draw."""

    def __init__(self, executor: TorchExecutor, sampled: Sampled | None, sampling: list[int], num_items: int):
        self._executor = executor
        self._sampled = sampled
        self._sampling = sampling
        self._num_items = num_items
        self._done: torch.cuda.Event | None = None
        if sampled is None and executor.device.type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record()

    def tokens(self) -> list[Draw]:
        """Wait until the step is computed (on CUDA that time counts as "execute"), even if it draws nothing.

        Without the wait all chunks of a long prompt would be queued at once, ahead of the next request.
        """
        started = time.perf_counter()
        if self._done is not None:
            self._done.synchronize()
        result: list[Draw] = [None] * self._num_items
        if self._sampled is not None:
            draws = self._sampled.read()
            for index, draw in zip(self._sampling, draws, strict=True):
                result[index] = draw
        phase = "execute" if self._executor.device.type == "cuda" else "sample"
        self._executor.phase_seconds[phase] += time.perf_counter() - started
        return result
