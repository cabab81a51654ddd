"""No Triton kernel is compiled anew in the middle of traffic: over batches up to 300, only for what differs in kind.

Triton compiles a variant for every alignment of a pointer and every special value of an integer (1, a multiple of 16)
that it meets. Here its own code makes the key of every launch, for a chip that is not there, and nothing is compiled.
A kernel of the package that ``serve`` does not launch fails the test: give it a launch there.
"""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import kvbench_kernels
from kvbench_engine.execution import sampler
from kvbench_engine.sequence import Request, SamplingParams, Sequence
from kvbench_kernels import triton_sample
from kvbench_kernels.api import AttentionOptions, PrefillBatch
from kvbench_kernels.triton_backend import TritonBackend
from kvbench_kernels.triton_launch import Chip
from kvbench_kernels.triton_layers import Heads, Norm, Rotation, act_mul, add_norm, rotate_and_write
from kvbench_kernels.triton_move import TritonMover
from tests.support.sampling import sample

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler"
)
DEVICE = 63  # a number that no device has
BATCHES = (*range(1, 35), 48, 63, 64, 65, 127, 128, 129, 256, 257, 300)  # odd, even, multiples of 16, and 1
MOST = 4  # variants of one kernel for one model: split or not, short chunks or long ones
HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 16, 16, 40


class Variants:
    """What each kernel would be compiled for: ``keys``; without alignments and special values: ``kinds``."""

    def __init__(self) -> None:
        self.keys: dict[str, set[str]] = defaultdict(set)
        self.kinds: dict[str, set[str]] = defaultdict(set)

    def compile(self, kernel: JITFunction, key, signature, device, constexprs, options, attrs, warmup) -> Any:
        name = kernel.fn.__qualname__
        self.keys[name].add(key)
        self.kinds[name].add(f"{signature} {constexprs} {options}")
        compiled = SimpleNamespace(
            launch_metadata=lambda *args: None, run=lambda *args: None, function=None, packed_metadata=None
        )
        kernel.device_caches[device][0][key] = compiled
        return compiled


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[Variants]:
    """Launches on CPU tensors go as far as the compiler of an H100."""
    seen = Variants()
    chip = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: DEVICE,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(JITFunction, "_do_compile", lambda kernel, *args: seen.compile(kernel, *args))
    monkeypatch.setattr(driver, "_active", chip)
    yield seen
    for kernel in functions():
        kernel.device_caches.pop(DEVICE, None)


def functions() -> list[JITFunction]:
    """Everything with @triton.jit in the package."""
    found = []
    for info in pkgutil.walk_packages(kvbench_kernels.__path__, "kvbench_kernels."):
        if "triton" in info.name.rpartition(".")[2]:
            module = importlib.import_module(info.name)
            found += [f for f in vars(module).values() if isinstance(f, JITFunction) and f.module == info.name]
    return found


def launched_kernels() -> set[str]:
    """Those that no other one calls."""
    names = {f.fn.__qualname__ for f in functions()}
    called = {
        node.id
        for f in functions()
        for node in ast.walk(ast.parse(textwrap.dedent(f.src)))
        if isinstance(node, ast.Name)
    }
    return names - called


SETTINGS = [{}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.5}, {"n": 2}, {"temperature": 0.0}]


class Server:
    """One model's caches and what a step of any batch does with them."""

    def __init__(self) -> None:
        self.backend = TritonBackend(lambda device: Chip(90, 132))
        self.caches = [torch.zeros(PAGES * PAGE, KV_HEADS, DIM, dtype=torch.bfloat16) for _ in "kv"]
        self.mover = TritonMover(self.caches, PAGE, 0)
        self.options = AttentionOptions(scale=0.125)
        self.sequences = [
            Sequence.of(Request(f"r{i}", (1, 2, 3), SamplingParams(**SETTINGS[i * i % len(SETTINGS)])))
            for i in range(1, max(BATCHES) + 1)
        ]

    def serve(self, batch: int) -> None:
        """A step of ``batch`` decodes, two with chunks of prompts beside one decode, moves of pages, and the draws."""
        lengths = torch.full((batch,), 300)
        q, k, v = self.heads(batch, HEADS), self.heads(batch, KV_HEADS), self.heads(batch, KV_HEADS)
        self.backend.write_kv(k, v, *self.caches, lengths)
        pages = torch.zeros(batch, PAGES, dtype=torch.int64)
        for columns in (PAGES, 1 + batch % PAGES):
            table = pages[:, :columns]
            plan = self.backend.plan_decode(table, lengths, PAGE, max_tokens=columns * PAGE)
            self.backend.decode_attention(q, *self.caches, table, lengths, PAGE, self.options, plan=plan)
        for queries in (2, 100):
            self.prefill(pages, queries)
        units = np.arange(batch % PAGES)
        self.mover.copy(units[: len(units) // 2], units[len(units) - len(units) // 2 :])
        sample(torch.zeros(batch, 100, dtype=torch.bfloat16), self.sequences[:batch], 0)
        self.layer(batch)

    def layer(self, batch: int) -> None:
        """A layer's kernels beside attention; slots lie anywhere in the buffer of the step's numbers."""
        x, weight = torch.zeros(batch, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
        norm = Norm(weight, 1e-6, 0.0)
        add_norm(x, norm)
        add_norm(x, norm, x)
        slots = torch.full((batch + 1,), -1)[batch % 2 :][:batch]
        angles = (torch.zeros(batch, DIM, dtype=torch.bfloat16), torch.zeros(batch, DIM, dtype=torch.bfloat16))
        heads = Heads(HEADS, KV_HEADS, DIM, DIM)
        qkv = torch.zeros(batch, (HEADS + 2 * KV_HEADS) * DIM, dtype=torch.bfloat16)
        rotate_and_write(qkv, angles, heads, Rotation(DIM), None, *self.caches, slots)
        act_mul(torch.zeros(batch, 96, dtype=torch.bfloat16), "silu")

    @staticmethod
    def heads(tokens: int, count: int) -> torch.Tensor:
        """``[tokens, count, DIM]`` as a projection of all heads side by side leaves them."""
        return torch.zeros(count, tokens, DIM, dtype=torch.bfloat16).transpose(0, 1)

    def prefill(self, pages: torch.Tensor, queries: int) -> None:
        """Chunks of ``queries`` tokens behind one decode in the same tensors, in a buffer of the step's numbers."""
        count = len(pages)
        lengths = torch.full((count + 1,), 300)[1:]
        starts = torch.arange(count + 2)[1:] * queries
        q = self.heads(1 + queries, HEADS)[1:]
        batch = PrefillBatch(pages, starts, lengths, PAGE)
        plan = self.backend.plan_prefill(batch, max_queries=queries, max_tokens=PAGES * PAGE)
        self.backend.prefill_attention(q, *self.caches, batch, self.options, plan=plan)


def test_every_kernel_is_compiled_for_few_variants_over_all_batches(variants, monkeypatch):
    monkeypatch.setattr(sampler, "draw_into", triton_sample.draw_into)
    server = Server()
    for batch in BATCHES:
        server.serve(batch)
    assert set(variants.keys) == launched_kernels(), "kernels of the package, and those that are launched here"
    for name, keys in variants.keys.items():
        assert len(keys) == len(variants.kinds[name]), f"{name} is compiled for values or alignments: " + "\n".join(
            keys
        )
        assert len(keys) <= MOST, f"{name}: {len(keys)} variants"


@triton.jit
def specialised_kernel(x_ptr, count, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), count)


def test_a_kernel_that_is_compiled_for_values_and_alignments_is_seen(variants):
    x = torch.zeros(64)
    for start in range(8):
        for count in (1, 2, 16, 17):
            specialised_kernel[(1,)](x[start:], count, BLOCK=8)
    assert len(variants.keys["specialised_kernel"]) == 2 * 3
    assert len(variants.kinds["specialised_kernel"]) == 2, "1 is a constant of its own"
    specialised_kernel.device_caches.pop(DEVICE)
