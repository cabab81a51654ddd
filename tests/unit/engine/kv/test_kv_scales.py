"""fp8 scales are measured on the model, and what they are good for."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvbench_engine.model.attention import AttentionHost, StepTensors, install
from kvbench_engine.model.kv_scales import MARGIN, calibrate_kv_scales
from kvbench_engine.model.support_check import measure_kv
from kvbench_kernels import get_backend
from kvbench_kernels.kv_formats import FP8_E4M3, FP8_E5M2, INT4, KV_FORMATS
from kvbench_kernels.quantized import FP8_MAX, QuantizedKV

VOCAB, TOKENS = 97, 40


def tiny_model(k_gain: float = 1.0, v_gain: float = 1.0, seed: int = 0) -> LlamaForCausalLM:
    """Two layers whose K and V come out ``gain`` times larger, and the same logits all the same."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.k_proj.weight *= k_gain
            attention.q_proj.weight /= k_gain
            attention.v_proj.weight *= v_gain
            attention.o_proj.weight /= v_gain
    return model


@torch.inference_mode()
def prefill_logits(model, shape, kv_cache_dtype: str, kv_scales=None) -> tuple[torch.Tensor, AttentionHost]:
    """``[TOKENS, VOCAB]`` through our attention, one page."""
    host = AttentionHost(
        get_backend("numba"), shape, TOKENS, (TOKENS,), next(model.parameters()), kv_cache_dtype, kv_scales
    )
    install(model, host)
    positions = torch.arange(TOKENS)
    host.begin(StepTensors.of_prompt(positions, torch.zeros(1, 1, dtype=torch.int64)))
    ids = torch.randint(VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(5))
    return model(input_ids=ids, position_ids=positions[None], use_cache=False).logits[0], host


@pytest.mark.parametrize("format", [FP8_E4M3, FP8_E5M2], ids=lambda f: f.name)
def test_scales_cover_what_hugging_face_caches_for_the_same_tokens(format):
    """The oracle is transformers' own cache, filled by eager attention with the calibration's token ids."""
    model = tiny_model()
    shape, _ = measure_kv(model, 4)
    seen = []
    hook = model.register_forward_pre_hook(lambda m, args, kw: seen.append(kw["input_ids"]), with_kwargs=True)
    scales = calibrate_kv_scales(model, shape, VOCAB, format)
    hook.remove()
    model.set_attn_implementation("eager")
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=seen[0], past_key_values=cache, use_cache=True)
    assert seen[0].shape == (1, 64)  # no longer than the model's positions
    for (k, v), layer in zip(scales, cache.layers, strict=True):
        assert k == pytest.approx(MARGIN * float(layer.keys.abs().max()) / FP8_MAX[format], rel=1e-4)
        assert v == pytest.approx(MARGIN * float(layer.values.abs().max()) / FP8_MAX[format], rel=1e-4)
    assert calibrate_kv_scales(model, shape, VOCAB, format) == scales


def test_fp8_scales_are_never_silently_one():
    """FP8 scales silently 1.0 (sglang#18882): a model whose K overflows fp8, and whose V vanishes in it, at scale 1."""
    model = tiny_model(k_gain=1e4, v_gain=1e-5)
    shape, _ = measure_kv(model, 4)
    truth, _ = prefill_logits(model, shape, "auto")
    scales = calibrate_kv_scales(model, shape, VOCAB, FP8_E4M3)
    calibrated, host = prefill_logits(model, shape, "fp8_e4m3", scales)
    unscaled, _ = prefill_logits(model, shape, "fp8_e4m3", [(1.0, 1.0)] * 2)

    def error(logits: torch.Tensor) -> float:
        return float((logits - truth).square().mean().sqrt() / truth.std())

    assert error(calibrated) < 0.2 < error(unscaled)
    top = 0x7E  # the largest finite code: other tokens than the calibration's are not cut off either
    assert all(((c.codes & 0x7F) < top).all() for c in (*host.k_caches, *host.v_caches))
    with pytest.raises(ValueError, match="fp8_e4m3 needs a positive, finite scale per layer and side, not None"):
        prefill_logits(model, shape, "fp8_e4m3")


@pytest.mark.parametrize(("value", "shown"), [(0.0, "0.0"), (float("inf"), "nan")])
def test_a_layer_that_cannot_be_measured_is_refused(value, shown):
    model = tiny_model()
    shape, _ = measure_kv(model, 4)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.fill_(value)
    with pytest.raises(ValueError, match=rf"no fp8_e5m2 scale.* of V of layer 1 over 64 random tokens is {shown}"):
        calibrate_kv_scales(model, shape, VOCAB, FP8_E5M2)


@pytest.mark.parametrize("name", ["auto", *KV_FORMATS])
def test_the_host_holds_what_the_format_says(name):
    """Every byte of the cache is in raw_tensors, slots first; and logits move as little as the format promises."""
    model = tiny_model()
    shape, _ = measure_kv(model, 4)
    format = KV_FORMATS.get(name)
    scales = calibrate_kv_scales(model, shape, VOCAB, format) if format in FP8_MAX else None
    truth, _ = prefill_logits(model, shape, "auto")
    logits, host = prefill_logits(model, shape, name, scales)
    tensors = host.raw_tensors()
    assert all(t.shape[0] == TOKENS for t in tensors)
    a_row = 8 * 4 if format is None else format.row_bytes(8)
    assert sum(t.nbytes for t in tensors) == TOKENS * 2 * 2 * 2 * a_row  # layers, sides, heads
    assert isinstance(host.k_caches[0], QuantizedKV) == (format is not None)
    error = float((logits - truth).square().mean().sqrt() / truth.std())
    assert error <= {"auto": 0.0, "int8_per_token_head": 0.02}.get(name, 0.3 if format != INT4 else 0.5)
