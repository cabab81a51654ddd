"""Real tensors: a step plan becomes one packed forward pass of the model. No policy here."""

from __future__ import annotations

import os
import time

import numpy as np
import torch

from engine.attention import AttentionHost, StepTensors, install
from engine.config import EngineConfig
from engine.kv_budget import KVCapacity
from engine.kv_mover import KVMover
from engine.kv_scales import calibrate_kv_scales
from engine.model_loader import LoadedModel
from engine.sampler import sample
from engine.scheduler import Scheduled, StepPlan
from engine.sequence import Drawn
from kernels.kv_formats import find_format


def available_cpus() -> int:
    """Cores this process may use (a container or taskset may grant fewer than the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class TorchExecutor:
    """Runs the model on CPU or CUDA.

    ``page_table`` is the KV manager's own array, int64 ``[max_num_seqs, max_pages_per_seq]``: read here, written there.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel, capacity: KVCapacity, page_table: np.ndarray):
        self.config = config
        self.model = loaded.model
        self.model_info = loaded.info
        self.device = loaded.device
        self.phase_seconds = {"move": 0.0, "prepare": 0.0, "execute": 0.0, "sample": 0.0}
        self._page_size = capacity.page_size
        self._page_table = page_table
        self.host = self._make_host(config, loaded, capacity)
        self.mover = KVMover(self.host.raw_tensors(), capacity, config.layout == "paged")
        install(self.model, self.host)

    @staticmethod
    def _make_host(config: EngineConfig, loaded: LoadedModel, capacity: KVCapacity) -> AttentionHost:
        kv_format, scales = find_format(config.kv_cache_dtype), None
        if kv_format is not None and not kv_format.scale_bytes:
            scales = calibrate_kv_scales(loaded.model, loaded.kv_shape, loaded.info.vocab_size, kv_format)
        like = next(loaded.model.parameters())
        shape, slots, page_size = loaded.kv_shape, capacity.num_slots, capacity.page_size
        return AttentionHost(loaded.backend, shape, slots, page_size, like, config.kv_cache_dtype, scales)

    def use_page_table(self, page_table: np.ndarray) -> None:
        """Serve another KV manager of the same capacity (after the warm-up, whose counters nobody wants)."""
        assert page_table.shape == self._page_table.shape
        self._page_table = page_table

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[Drawn | None]:
        """What was drawn, in the plan's order; None for a sequence whose prompt is not finished yet."""
        times = [time.perf_counter()]
        if plan.moves:
            self.mover.move(plan.moves)
            moved = time.perf_counter() - times[0]
            self.phase_seconds["move"] += moved
            if not plan.scheduled:
                self.phase_seconds["prepare"] += moved
                return []
        # single tokens first: the decode kernel takes them as one block, whoever they belong to
        order = sorted(range(len(plan.scheduled)), key=lambda i: plan.scheduled[i].num_tokens > 1)
        items = [plan.scheduled[i] for i in order]
        ids, positions, step = self._prepare(items)
        ends = np.cumsum([item.num_tokens for item in items]) - 1
        sampling = [i for i, item in enumerate(items) if item.samples]
        last_tokens = torch.from_numpy(ends[sampling]).to(self.device)
        self.host.begin(step)
        times.append(time.perf_counter())
        logits = self.model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=last_tokens
        ).logits[0]
        times.append(time.perf_counter())
        drawn = sample(logits, [items[i].seq for i in sampling], self.config.seed).read() if sampling else []
        times.append(time.perf_counter())
        result: list[Drawn | None] = [None] * len(items)
        for i, brought in zip(sampling, drawn, strict=True):
            result[order[i]] = brought
        for phase, start, end in zip(("prepare", "execute", "sample"), times, times[1:], strict=False):
            self.phase_seconds[phase] += end - start
        return result

    def _prepare(self, items: list[Scheduled]) -> tuple[torch.Tensor, torch.Tensor, StepTensors]:
        """Token ids and positions ``[T]``, and where everything lies."""
        rows = np.array([item.seq.row for item in items])
        starts = np.array([item.seq.num_computed for item in items])
        counts = np.array([item.num_tokens for item in items])
        lengths = starts + counts
        num_decodes = int((counts == 1).sum())
        first_of = np.cumsum(counts) - counts
        row_of_token = np.repeat(rows, counts)
        positions = np.arange(counts.sum()) - np.repeat(first_of - starts, counts)
        slots = self._page_table[row_of_token, positions // self._page_size] + positions % self._page_size
        ids = np.fromiter(
            (t for item in items for t in item.seq.token_ids[item.seq.num_computed :][: item.num_tokens]),
            dtype=np.int64,
            count=len(positions),
        )
        pages = -(-int(lengths.max()) // self._page_size)
        page_starts = self._page_table[rows, :pages]
        query_starts = np.concatenate([[0], np.cumsum(counts[num_decodes:])])
        step = StepTensors(
            num_decodes=num_decodes,
            slots=self._tensor(slots),
            decode_page_starts=self._tensor(page_starts[:num_decodes]),
            decode_seq_lens=self._tensor(lengths[:num_decodes]),
            prefill_page_starts=self._tensor(page_starts[num_decodes:]),
            prefill_seq_lens=self._tensor(lengths[num_decodes:]),
            query_starts=self._tensor(query_starts),
            max_decode_tokens=int(lengths[:num_decodes].max(initial=0)),
            max_prefill_tokens=int(lengths[num_decodes:].max(initial=0)),
            max_queries=int(counts[num_decodes:].max(initial=0)),
        )
        return self._tensor(ids), self._tensor(positions), step

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
