"""Graphs of the Triton kernels, in Triton's interpreter: launches are recorded and replayed with the captured bounds.

Not collected by itself (no test_ prefix): TRITON_INTERPRET must be set before Triton is imported, so
test_triton_graphs.py runs this file in a process of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from kvbench_engine.config import EngineConfig
from kvbench_engine.execution.forward import ModelForward
from kvbench_engine.execution.graphs import GraphSizes
from kvbench_engine.model.attention import AttentionHost, StepTensors
from kvbench_engine.model.loader import load_model
from kvbench_kernels.triton_backend import TritonBackend
from kvbench_kernels.triton_launch import Chip
from tests.support.fake_capture import FakeCapture
from tests.support.hf_parts import COMMON, VOCAB

PAGE, PAGES, LONGEST = 16, 38, 600  # the longest sequence alone would be cut into three parts
LENGTHS = torch.tensor([1, 30, 17, 36, 25, 7])
SIZES = GraphSizes((4,), (24,))
STEPS = [
    ([0, 1, 2, 3], {}),
    ([1, 3], {4: 12, 5: 7}),
    ([], {3: 20}),
    ([2], {}),
    ([0, 2], {1: 2, 4: 3}),
]


def inputs(tables: torch.Tensor, rows: list[int], chunks: dict[int, int]) -> tuple:
    """A step of single tokens of ``rows`` and of the last ``chunks[row]`` tokens of others."""
    new = [(row, 1) for row in rows] + list(chunks.items())
    lengths, tables, split = LENGTHS[[row for row, _ in new]], tables[[row for row, _ in new]], len(rows)
    at = [torch.arange(int(length) - count, int(length)) for length, (_, count) in zip(lengths, new, strict=True)]
    slots = [table[place // PAGE] + place % PAGE for table, place in zip(tables, at, strict=True)]
    counts = torch.tensor([count for _, count in new])
    positions, last = torch.cat(at), counts.cumsum(0) - 1
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts[split:].cumsum(0)])
    step = StepTensors(
        split, torch.cat(slots)[None], tables[None, :split], lengths[:split], tables[None, split:], lengths[split:],
        starts,        int(max(LENGTHS)), int(max(LENGTHS)), int(counts.max()),
    )  # fmt: skip
    return (positions * 7 + last[-1]) % VOCAB, positions, step, last


def test_replayed_launches_give_what_eager_ones_give(tmp_path: Path):
    path = tmp_path / "config.json"
    kind = {"model_type": "mistral", "sliding_window": 6, "num_hidden_layers": 1}
    path.write_text(json.dumps({**COMMON, **kind}))
    model = load_model(EngineConfig(model=str(path), device="cpu", kernel_backend="torch"))
    backend = TritonBackend(lambda device: Chip(80, 40))
    num_slots = PAGE * len(LENGTHS) * 3
    host = AttentionHost(backend, model.kv_shape, num_slots, (PAGE,), next(model.model.parameters()))
    tables = torch.zeros(len(LENGTHS), PAGES, dtype=torch.int64)
    generator = torch.Generator().manual_seed(1)
    tables[:, :3] = torch.randperm(len(LENGTHS) * 3, generator=generator).view(-1, 3) * PAGE
    for tensor in host.raw_tensors():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    before = [tensor.clone() for tensor in host.raw_tensors()]
    plain, replayed = ModelForward(model.model, host), ModelForward(model.model, host)
    capture = FakeCapture(host, calls_backend=False)
    assert replayed.capture_graphs(SIZES, torch.zeros(1, SIZES.rows, PAGES, dtype=torch.int64), LONGEST, capture)
    assert all(map(torch.equal, host.raw_tensors(), before))
    for rows, chunks in STEPS:
        step, results = inputs(tables, rows, chunks), []
        for forward in (plain, replayed):
            for tensor, own in zip(host.raw_tensors(), before, strict=True):
                tensor.copy_(own)
            with torch.inference_mode():
                results.append([forward(*step).clone(), *map(torch.clone, host.raw_tensors())])
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert capture.replayed == len(STEPS)
