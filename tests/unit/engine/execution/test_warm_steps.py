"""What is launched before the first request is all that requests then need: no kernel is compiled for one of them.

Launches of the Triton kernels are not run here, only distinguished as Triton distinguishes them for a real chip: by
constants, options and what its binder specialises on (types, alignment, divisibility).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from kvbench_engine.execution.forward import ModelForward
from kvbench_engine.execution.warm_steps import padding_steps, run_padding_steps
from kvbench_engine.model.attention import AttentionHost, StepTensors
from kvbench_kernels import get_backend
from kvbench_kernels.api import AttentionOptions
from kvbench_kernels.launch import SHORT_QUERIES
from kvbench_kernels.triton_backend import TritonBackend
from kvbench_kernels.triton_launch import Chip
from tests.support.hf_parts import VOCAB, loaded, model_folder, one_thread

PAGE_SIZE, PAGES, ROWS = 16, 288, 24  # the longest sequence alone is cut into 16, a number that Triton looks out for
MAX_LEN = PAGE_SIZE * PAGES


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Every (kernel, what it is compiled for) that was launched."""
    found: set[tuple[str, str]] = set()
    backend = make_backend(GPUTarget("cuda", 80, 32))

    def run(self, *args, grid, warmup, **kwargs):
        assert len(grid) and all(grid) and not warmup
        binder = create_function_from_signature(self.signature, self.params, backend)
        _, specialised, options = binder(*args, **kwargs)
        found.add((self.fn.__name__, f"{specialised} {options}"))

    monkeypatch.setattr(JITFunction, "run", run)
    return found


def parts(kv_cache_dtype: str, tmp_path_factory: pytest.TempPathFactory, on_triton: bool):
    model = loaded(model_folder(str(tmp_path_factory.mktemp("models")), "gemma2"))
    backend = TritonBackend(lambda device: Chip(80, 40)) if on_triton else get_backend("torch")
    like = next(model.model.parameters())
    scales = [(1.0, 1.0)] * len(model.kv_shape.layers) if kv_cache_dtype.startswith("fp8") else None
    host = AttentionHost(backend, model.kv_shape, ROWS * MAX_LEN, (PAGE_SIZE,), like, kv_cache_dtype, scales)
    return ModelForward(model.model, host), host


def drawn_step(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, StepTensors, torch.Tensor]:
    """Some decodes and some chunks, as the executor packs them: all tables and lengths are slices of one tensor."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    decodes, chunks = draw(0, ROWS // 2), draw(0, 3)
    decodes = decodes or int(chunks == 0)
    new = [draw(1, (2, SHORT_QUERIES, 70)[draw(0, 2)]) for _ in range(chunks)]
    longest = (20, 600, MAX_LEN)[draw(0, 2)]
    lens = torch.tensor([draw(1, longest) for _ in range(decodes)] + [max(n, draw(1, longest)) for n in new])
    tokens = decodes + sum(new)
    tables = torch.zeros(ROWS, PAGES, dtype=torch.int32)[: decodes + chunks, : -(-int(lens.max()) // PAGE_SIZE)]
    step = StepTensors(
        num_decodes=decodes,
        slots=torch.full((tokens + 1,), -1)[draw(0, 1) :][None, :tokens],
        decode_page_starts=tables[None, :decodes],
        decode_seq_lens=lens[:decodes],
        prefill_page_starts=tables[None, decodes:],
        prefill_seq_lens=lens[decodes:],
        query_starts=torch.tensor([0, *torch.tensor(new, dtype=torch.int64).cumsum(0).tolist()]),
        max_decode_tokens=max(lens[:decodes].tolist(), default=0),
        max_prefill_tokens=max(lens[decodes:].tolist(), default=0),
        max_queries=max(new, default=0),
    )
    ids = torch.randint(0, VOCAB, (tokens,), generator=generator)
    return ids, torch.zeros_like(ids), step, torch.arange(decodes + chunks)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8_per_token_head", "fp8_e4m3"])
def test_no_step_needs_a_kernel_that_was_not_launched_before(kv_cache_dtype, launched, tmp_path_factory):
    """gemma2 has layers with and without a window, and a softcap."""
    forward, _ = parts(kv_cache_dtype, tmp_path_factory, on_triton=True)
    run_padding_steps(forward, torch.zeros(1, ROWS, PAGES, dtype=torch.int32), MAX_LEN)
    before = set(launched)
    names = [name for name, _ in before]
    # Split or not, with and without the window; long and short chunks.
    assert 2 <= names.count("decode_kernel") <= 4 and 4 <= names.count("prefill_kernel") <= 8
    assert all(names.count(f"{once}_kernel") == 1 for once in ("plan", "piece", "write_kv", "reduce"))
    generator = torch.Generator().manual_seed(3)
    with torch.inference_mode():
        for _ in range(30):
            forward(*drawn_step(generator))
    assert launched == before, sorted(launched - before)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler")
def test_no_batch_of_decodes_needs_kernels_of_its_own(launched):
    """Batches 1 to 300, lengths that begin anywhere in memory, tables of any width."""
    backend, heads = TritonBackend(lambda device: Chip(90, 132)), (8, 2)
    cache, q = torch.empty(1, heads[1], 16), torch.empty(300, heads[0], 16)
    lens, tables = torch.zeros(301, dtype=torch.int64), torch.zeros(300, 40, dtype=torch.int32)
    for batch in range(1, 301):
        where = tables[:batch, : 1 + batch % 40], lens[batch % 2 :][:batch], PAGE_SIZE
        plan = backend.plan_decode(*where, max_tokens=8192)
        for window in (None, 1000):
            backend.decode_attention(q[:batch], cache, cache, *where, AttentionOptions(1.0, window), plan=plan)
    names = sorted(name for name, _ in launched)
    assert names == ["decode_kernel", "decode_kernel", "plan_kernel"], "decode: with a window, without"


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8_per_token_head"])
def test_padding_steps_touch_nobodys_kv(kv_cache_dtype, tmp_path_factory):
    forward, host = parts(kv_cache_dtype, tmp_path_factory, on_triton=False)
    for tensor in host.raw_tensors():
        tensor.view(torch.uint8).fill_(0xFF)  # NaN where it is a float
    before = [tensor.clone() for tensor in host.raw_tensors()]
    seen = []

    def checked(ids, positions, step, last) -> torch.Tensor:
        logits = forward(ids, positions, step, last)
        assert torch.isfinite(logits).all()
        seen.append(replace(step))
        return logits

    tables = torch.zeros(1, ROWS, PAGES, dtype=torch.int32)
    run_padding_steps(checked, tables, MAX_LEN)
    assert len(seen) == len(list(padding_steps(tables, MAX_LEN))) == 6
    assert {step.max_queries for step in seen} == {0, 1, SHORT_QUERIES + 1}
    for after, then in zip(host.raw_tensors(), before, strict=True):
        assert torch.equal(after.view(torch.uint8), then.view(torch.uint8))
