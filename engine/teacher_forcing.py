"""Computes the logits of given tokens at every position by the engine's forward pass.

To see how a setting changes the model's predictions, two engines are fed the same tokens (teacher forcing). The tokens
go through the code that serves requests: the same model, kernels and step inputs, KV in pages that are not contiguous,
prompts in chunks, continuations token by token beside others (on CUDA by captured graphs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np
import torch

from kvbench_engine.build import assemble_engine
from kvbench_engine.config import EngineConfig
from kvbench_engine.execution.step_inputs import InputBuffers
from kvbench_engine.kv.budget import KVCapacity, KVShape, capacity_of
from kvbench_engine.model.loader import LoadedModel
from kvbench_engine.scheduling.step_plan import Scheduled
from kvbench_engine.sequence import Request
from kvbench_engine.sequence import Sequence as TokenSequence


class TeacherForced:
    """Feeds ``num_rows`` sequences of up to ``longest`` tokens to the engine of ``config``.

    Budget and limits of ``config`` are replaced by what is needed; nothing is scheduled.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel, num_rows: int, longest: int):
        changed = {
            "max_num_batched_tokens": max(config.max_num_batched_tokens, num_rows),
            "max_num_partial_prefills": 1,
            "preemption_mode": "recompute",
            "swap_space": None,
            "enable_prefix_caching": False,
            "async_scheduling": False,
        }
        roomy = with_room(EngineConfig(**{**asdict(config), **changed}), loaded, num_rows, longest)
        engine = assemble_engine(roomy, loaded)
        capacity = engine.capacity
        self._forward = engine.executor.forward
        self._inputs = InputBuffers(
            loaded.device, capacity.page_sizes, scattered_tables(capacity, num_rows), whole=bool(capacity.columns)
        )
        self.num_rows = num_rows
        self.reset()

    def reset(self) -> None:
        """Empties the rows."""
        self._rows = [TokenSequence.of(Request(str(row), ())) for row in range(self.num_rows)]
        for row, seq in enumerate(self._rows):
            seq.row = row

    @torch.inference_mode()
    def feed(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Append ``tokens`` to their rows in one step; the logits of the tokens, ``[T, vocab]`` of each row.

        The logits are valid until the next call.
        """
        items = []
        order = sorted(tokens, key=lambda row: len(tokens[row]) > 1)  # decodes first, as the kernels want them
        for row in order:
            self._rows[row].token_ids += tokens[row]
            items.append(Scheduled(self._rows[row], len(tokens[row])))
        inputs = self._inputs.make(items, {})
        every = torch.arange(len(inputs.ids), device=inputs.ids.device)
        logits = self._forward(inputs.ids, inputs.positions, inputs.step, every)
        for seq, count in items:
            seq.num_computed += count
        return dict(zip(order, logits.split([len(tokens[row]) for row in order]), strict=True))


def with_room(config: EngineConfig, loaded: LoadedModel, num_rows: int, longest: int) -> EngineConfig:
    """Give ``config`` a KV budget that just holds ``num_rows`` sequences of ``longest`` tokens."""
    changed = {"kv_budget": 1, "max_model_len": longest, "max_num_seqs": num_rows}
    config = EngineConfig(**{**asdict(config), **changed})
    return replace(config, kv_budget=roomy_budget(config, loaded.kv_shape, num_rows))


def roomy_budget(config: EngineConfig, shape: KVShape, num_rows: int) -> int:
    """Bytes that hold ``num_rows`` sequences of ``config.max_model_len`` tokens, with all pages of every group."""
    sizes = capacity_of(replace(config, preemption_mode="recompute", swap_space=None), shape, 1 << 62)
    slots = sum(sizes.page_sizes) * (1 if sizes.group_page_sizes else sizes.max_pages_per_seq)
    return num_rows * slots * sizes.bytes_per_slot + sizes.page_table_bytes


def scattered_tables(capacity: KVCapacity, num_rows: int) -> np.ndarray:
    """Make page tables ``[groups, rows, pages]`` of sequences that keep all their pages, which lie in random order."""
    groups, columns = len(capacity.windows), capacity.max_pages_per_seq
    if not capacity.group_page_sizes:
        pages = np.random.default_rng(0).permutation(num_rows * groups * columns)
        return (pages * capacity.page_size).reshape(groups, num_rows, columns).astype(np.int64)
    starts = np.cumsum([0, *capacity.page_sizes])
    bases = np.random.default_rng(0).permutation(num_rows) * starts[-1]
    tables = starts[:-1, None] + bases
    return np.repeat(tables[:, :, None], columns, axis=2).astype(np.int64)
