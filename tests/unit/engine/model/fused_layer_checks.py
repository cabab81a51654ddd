"""Layers of fewer kernels, in Triton's interpreter: the same logits, fewer launches, and what is left alone.

Not collected by itself (no test_ prefix): TRITON_INTERPRET must be set before Triton is imported, so
test_fused_layers.py runs it in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvbench_engine.execution.forward import ModelForward
from kvbench_engine.execution.graphs import GraphSizes
from kvbench_engine.model import fused_layers, support_check, try_out
from kvbench_engine.model.attention import AttentionHost, StepTensors
from kvbench_engine.model.cuda_layers import CudaKernels
from kvbench_engine.model.fused_layers import Fusion, fuse_layers
from kvbench_engine.model.support_check import measure_kv, paged_logits
from kvbench_kernels import get_backend
from kvbench_kernels.kv_formats import KV_FORMATS
from tests.support.fake_capture import FakeCapture
from tests.support.families import ACCEPTED, COMMON
from tests.support.launches import Launches
from tests.support.triton_interpreter import right_bfloat16

BACKEND = get_backend("triton")
PAGE = 4


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    right_bfloat16(monkeypatch)
    for module in (try_out, fused_layers):  # probes of few tokens: the interpreter is slow
        monkeypatch.setattr(module, "PROBE_TOKENS", 2)
    monkeypatch.setattr(support_check, "_PROBE_TOKENS", 7)
    monkeypatch.setattr(support_check, "_PROBE_STEPS", [[(0, 0, 3)], [(1, 0, 1), (0, 3, 6)], [(1, 1, 2)], [(1, 2, 6)]])
    monkeypatch.setattr(support_check, "_PROBE_PARTS", [(0, 0, 3), (0, 3, 6), (1, 0, 2), (1, 2, 6)])
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> PreTrainedModel:
    """One layer, its norms and biases drawn too: ones and zeros would hide what they do."""
    values = {**COMMON, **ACCEPTED[family], "num_hidden_layers": 1, "model_type": family.split()[0]} | settings
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][: values["num_hidden_layers"]]
    torch.manual_seed(3)
    config = AutoConfig.for_model(**{name: value for name, value in values.items() if value is not None})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.3, mean=1.0 if name.endswith("weight") else 0.0)
    return model.requires_grad_(False)


def fuse(model: PreTrainedModel) -> Fusion:
    kv_shape, query_heads = measure_kv(model, next(model.parameters()).dtype.itemsize)
    return fuse_layers(model, CudaKernels(), BACKEND, kv_shape, query_heads)


def host_of(model: PreTrainedModel, fused_layers: bool, kv_cache_dtype: str = "auto", slots: int = 32) -> AttentionHost:
    kv_shape, _ = measure_kv(model, next(model.parameters()).dtype.itemsize)
    scales = [(0.05, 0.05)] * len(kv_shape.layers) if kv_cache_dtype.startswith("fp8") else None
    like = next(model.parameters())
    return AttentionHost(BACKEND, kv_shape, slots, (PAGE,), like, kv_cache_dtype, scales, fused_layers)


def decodes(count: int, longest: int) -> tuple[torch.Tensor, torch.Tensor, StepTensors, torch.Tensor]:
    """A step of single tokens, each the second of its sequence, planned for sequences of ``longest`` tokens."""
    at = torch.arange(count)
    none = at[:0]
    pages = (at * PAGE)[None, :, None]
    lens = torch.full((count,), 2)
    starts = torch.zeros(1).long()
    step = StepTensors(count, at[None] * PAGE + 1, pages, lens, pages[:, :0], none, starts, longest, 0, 0)
    return at + 5, torch.ones_like(at), step, at


def eager_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("eager")
    return model(input_ids=ids[None], use_cache=False).logits[0].float()


# Launches of a layer, attention included, and of a step beside its layers: each as transformers has it, and fused.
LOCKED = {
    "llama": ((39, 9), (21, 14)),
    "qwen2": ((39, 9), (21, 14)),
    "qwen3": ((55, 9), (21, 14)),
    "gemma": ((43, 9), (24, 15)),
    "gemma2": ((63, 10), (27, 18)),
    "gemma3_text": ((83, 10), (24, 15)),
    "mistral": ((39, 9), (21, 14)),
    "phi3": ((38, 9), (21, 14)),
}


@torch.no_grad()
@pytest.mark.parametrize("family", LOCKED)
def test_launches_are_those_that_are_locked(family, monkeypatch):
    """Before and after, in one layer: a step of two decodes that is planned for long sequences."""
    without_window = {"layer_types": ["full_attention"] if "layer_types" in ACCEPTED[family] else None}
    model = make_model(family, torch.bfloat16, sliding_window=None, **without_window)
    before = launches(model, host_of(model, False), monkeypatch)
    fusion = fuse(model)
    assert not fusion.left and len(fusion.fused) == 4, fusion
    after = launches(model, host_of(model, True), monkeypatch)
    assert tuple(zip(before, after, strict=True)) == LOCKED[family]
    assert after[0] <= 12


def launches(model: PreTrainedModel, host: AttentionHost, patch: pytest.MonkeyPatch) -> list[int]:
    """[in the layer, in the rest of the step]; nothing in either waits for the device."""
    forward = ModelForward(model, host)
    counter = Launches()
    marks: list[int] = []
    layer = model.model.layers[0]
    hooks = [
        layer.register_forward_pre_hook(lambda *_: marks.append(counter.counts.total())),
        layer.register_forward_hook(lambda *_: marks.append(counter.counts.total())),
    ]
    inputs = decodes(2, 4096)
    with counter.triton(patch):
        forward(*inputs)
    for hook in hooks:
        hook.remove()
    assert not {"_local_scalar_dense", "nonzero", "equal", "masked_select"} & set(counter.counts), counter.counts
    inside = marks[1] - marks[0] - counter.counts["plan_kernel"]  # once a step, by the first layer of a window
    return [inside, counter.counts.total() - inside]


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_half_precision_is_as_near_to_float32_as_the_model_s_own(family):
    exact = make_model(family)
    model = make_model(family, torch.bfloat16)
    model.load_state_dict(exact.state_dict())
    exact.load_state_dict(model.state_dict())  # the rounded weights
    kv_shape, _ = measure_kv(exact, 4)
    truth = torch.cat(paged_logits(exact, BACKEND, kv_shape))
    assert not fuse(model).left
    own, fused = (torch.cat(paged_logits(model, BACKEND, kv_shape, on)) for on in (False, True))
    errors = [float((logits - truth).square().mean().sqrt() / truth.std()) for logits in (own, fused)]
    assert 0 < errors[1] <= 1.2 * errors[0] < 0.1


@torch.no_grad()
def test_quantised_kv_is_what_it_was():
    model = make_model("qwen3")
    fuse(model)
    for kind in KV_FORMATS:
        compare_caches(model, kind)


def compare_caches(model: PreTrainedModel, kind: str) -> None:
    """Those of both ways after a prompt and a decode: codes may differ by one where a sum was on the edge."""
    caches, logits = [], []
    for fused in (False, True):
        host = host_of(model, fused, kind)
        forward = ModelForward(model, host)
        at = torch.arange(3)
        forward(at + 7, at, StepTensors.of_prompt(at + 4, torch.tensor([[4]])), at)
        logits.append(forward(*decodes(2, 8)))
        caches.append([t.float() if t.is_floating_point() else t.int() for t in host.raw_tensors()])
    assert sum(int(cache.bool().any()) for cache in caches[0]) == len(caches[0]), "all were written"
    for one, other in zip(*caches, strict=True):
        if one.is_floating_point():
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
        else:
            assert (one != other).float().mean() < 0.02
    torch.testing.assert_close(*logits, atol=0.02, rtol=0.02)


@torch.inference_mode()
def test_a_graph_of_a_padded_batch_writes_nobody_s_kv():
    with torch.inference_mode(False):
        model = make_model("llama")
        fuse(model)
    plain, graphed = (ModelForward(model, host_of(model, True)) for _ in range(2))
    sizes, tables = GraphSizes((4,), (8,)), torch.zeros(1, 4, 1, dtype=torch.int64)
    assert graphed.capture_graphs(sizes, tables, 3, FakeCapture(graphed.host, None, False))
    clean = [t.clone() for t in graphed.host.raw_tensors()]
    step = decodes(3, 2)
    expected, got = plain(*step), graphed(*step)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for cache, was, other in zip(graphed.host.raw_tensors(), clean, plain.host.raw_tensors(), strict=True):
        torch.testing.assert_close(cache, other)
        assert not was.any(), "capturing wrote to a slot"


@torch.no_grad()
def test_weights_are_held_once_and_the_switch_gives_the_model_back():
    model = make_model("qwen2")  # Q, K and V with bias
    kv_shape, _ = measure_kv(model, 4)
    names = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    held = sum(parameter.nbytes for parameter in model.parameters())
    before = paged_logits(model, BACKEND, kv_shape)
    fusion = fuse(model)
    assert fuse(model) is fusion, "once a model"
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == names
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == held
    attention = fusion.modules[model.model.layers[0].self_attn]
    assert attention._joint.weight.data_ptr() == model.model.layers[0].self_attn.q_proj.weight.data_ptr()
    off = paged_logits(model, BACKEND, kv_shape)
    assert all(torch.equal(a, b) for a, b in zip(before, off, strict=True)), "switched off, it is the model's own"
    on = paged_logits(model, BACKEND, kv_shape, fused_layers=True)
    assert not all(torch.equal(a, b) for a, b in zip(on, off, strict=True)), "switched on, sums come in another order"


ALL = {"norms", "attention", "MLPs", "layers"}
# Of families that are built in other ways: what is fused, and what is left.
OTHERS: dict[str, tuple[set[str], set[str]]] = {
    "gemma3_text": (ALL, set()),  # sliding windows in every other layer
    "glm": (ALL, set()),  # rotates pairs of neighbours, in a part of each head
    "olmo2": ({"norms", "MLPs", "layers"}, {"attention"}),  # a norm over all heads of Q; norms after, none before
    "deepseek_v3": ({"norms", "MLPs", "layers"}, {"attention", "MLPs"}),  # latent attention; a dense layer, experts
    "ministral3 scaled-queries": ({"norms", "MLPs", "layers"}, {"attention"}),  # Q scaled by the position
}


@torch.no_grad()
@pytest.mark.parametrize("family", OTHERS)
def test_logits_are_those_of_transformers(family):
    """A prompt longer than the window and a decode after it, in float32."""
    model = make_model(family, num_hidden_layers=2)
    ids = torch.arange(9) * 11 % COMMON["vocab_size"]
    own = eager_logits(model, ids)
    fusion = fuse(model)
    assert (set(fusion.fused), {kind for kind, _ in fusion.left}) == OTHERS[family], fusion
    forward = ModelForward(model, host_of(model, True))
    at, starts = torch.arange(9), torch.tensor([[8, 0, 12]])
    slots = starts[0, at // PAGE] + at % PAGE
    got = [forward(ids[:8], at[:8], StepTensors.of_prompt(slots[:8], starts), at[:8])]
    none = at[:0]
    tables, zero = starts[None], torch.zeros(1).long()
    step = StepTensors(1, slots[None, 8:], tables, torch.tensor([9]), tables[:, :0], none, zero, 9, 0, 0)
    got.append(forward(ids[8:], at[8:], step, at[:1]))
    torch.testing.assert_close(torch.cat(got), own, atol=2e-4, rtol=2e-4)
    assert torch.equal(eager_logits(model, ids), own), "with transformers' attention the model is as it was"
