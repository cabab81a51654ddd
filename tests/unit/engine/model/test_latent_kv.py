"""The latent rows of MLA: their size, what is in them, and the logits that attention over them gives.

The oracle is transformers' own module, whose cache has the same latents, in eager attention.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from kvbench.capacity.model import plan_model
from kvbench_engine.config import EngineConfig
from kvbench_engine.execution import executor
from kvbench_engine.model.attention import FOLDED, AttentionHost, StepTensors, install
from kvbench_engine.model.compiler import compile_model
from kvbench_engine.model.kv_scales import MARGIN
from kvbench_engine.model.loader import load_model, serve_another
from kvbench_engine.sequence import Request, SamplingParams
from kvbench_kernels.layers_cpu import PackedLinear
from tests.support.families import ACCEPTED, write_config
from tests.support.hf_parts import (
    LATENT,
    VOCAB,
    Run,
    greedy_outputs,
    loaded,
    make_engine,
    model_folder,
    one_thread,
    oracle,
)

LAYERS, HEADS = 2, 4
RANK, ROPE = LATENT["kv_lora_rank"], LATENT["qk_rope_head_dim"]
NOPE, VALUES = LATENT["qk_nope_head_dim"], LATENT["v_head_dim"]
SIZES = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "page_size": 7, "slots": 210}
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [tuple((7919 * i + 3 * n) % VOCAB for i in range(n)) for n in (23, 5, 31)]
ROW_BYTES = {  # of a stored row of so many values, with its scale
    "auto": lambda n: 4 * n, "fp8_e4m3": lambda n: n, "fp8_e5m2": lambda n: n,
    "int8_per_token_head": lambda n: n + 4, "int4_per_token_head": lambda n: (n + 1) // 2 + 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    with one_thread():
        yield str(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def folder(root) -> str:
    return model_folder(root, "deepseek_v3")


def engine_for(folder: str, latent_kv: bool = True, backend: str = "auto", **settings):
    return make_engine(loaded(folder, backend, latent_kv), folder, latent_kv=latent_kv, **SIZES, **settings)


def assert_logits_of_eager(engine, model, tolerance: float = 2e-4) -> None:
    """Tests that three prompts in chunks, side by side, draw from the logits that ``model`` gives each alone."""
    rows, head = [], engine.executor.model.lm_head
    hook = head.register_forward_hook(lambda module, inputs, logits: rows.append(logits[0].clone()))
    outputs = Run(engine, [Request(str(i), prompt, PARAMS) for i, prompt in enumerate(PROMPTS)]).tokens()
    hook.remove()
    got, expected = torch.cat(rows), []
    for i, prompt in enumerate(PROMPTS):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *outputs[str(i)]]]), use_cache=False).logits[0]
        expected.append(logits[len(prompt) - 1 : -1])
        assert outputs[str(i)] == expected[-1].argmax(-1).tolist()
    expected = torch.cat(expected)
    assert got.shape == expected.shape
    distances = torch.cdist(expected, got, p=torch.inf).min(1)
    assert sorted(distances.indices.tolist()) == list(range(len(got)))
    assert float(distances.values.max()) < tolerance * float(expected.std())


@pytest.mark.parametrize("kind", ROW_BYTES)
@pytest.mark.parametrize("latent_kv", [True, False])
def test_a_token_takes_the_bytes_of_its_rows_in_budget_memory_and_plan(folder, latent_kv, kind):
    engine, row = engine_for(folder, latent_kv, kv_cache_dtype=kind), ROW_BYTES[kind]
    expected = LAYERS * (row(RANK + ROPE) if latent_kv else HEADS * (row(NOPE + ROPE) + row(VALUES)))
    tensors = engine.executor.host.raw_tensors()
    assert engine.capacity.bytes_per_slot == sum(tensor[0].nbytes for tensor in tensors) == expected
    assert len(tensors) == LAYERS * (1 if latent_kv else 2) * (2 if kind.startswith("int") else 1)
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    scales = LAYERS * 4 * (1 if latent_kv else 2 * HEADS) if kind.startswith("int") else 0
    assert engine.capacity.scale_bytes_per_slot == scales
    if latent_kv:
        assert plan_model(f"{folder}/config.json").token_bytes(kind) == expected


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2"])
@pytest.mark.parametrize(("latent_kv", "backend"), [(True, "auto"), (True, "torch"), (False, "auto")])
def test_logits_are_those_of_eager_attention(root, family, latent_kv, backend):
    folder = model_folder(root, family)
    assert_logits_of_eager(engine_for(folder, latent_kv, backend), oracle(folder))


@torch.inference_mode()
def test_the_cache_has_the_latents_that_transformers_caches(folder):
    model, ids = loaded(folder), torch.tensor([PROMPTS[0]])
    positions, starts = torch.arange(23), torch.tensor([[14, 0, 21, 7]])
    slots = starts[0, positions // 7] + positions % 7
    host = AttentionHost(model.backend, model.kv_shape, 28, (7,), next(model.model.parameters()))
    install(model.model, host)
    host.begin(StepTensors.of_prompt(slots, starts))
    model.model(input_ids=ids, position_ids=positions[None], use_cache=False)
    theirs = DynamicCache(config=oracle(folder).config)
    oracle(folder)(ids, past_key_values=theirs, use_cache=True)
    for row, value, layer in zip(host.k_caches, host.v_caches, theirs.layers, strict=True):
        expected = torch.cat((layer.keys, layer.values), -1)[0, 0]
        torch.testing.assert_close(row[slots, 0], expected, atol=2e-5, rtol=1e-4)
        assert torch.equal(value[slots, 0], row[slots, 0, :RANK])


@pytest.mark.parametrize("loudness", [0.1, 1.0])
def test_an_fp8_scale_is_of_the_whole_row(folder, tmp_path, loudness):
    """With loud rotated values, a scale of V alone would cut them off; V is read with the row's scale."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    for layer in model.model.layers:
        layer.self_attn.kv_a_proj_with_mqa.weight.data[RANK:] *= loudness
    model.save_pretrained(tmp_path)
    seen = []
    engine_model = load_model(EngineConfig(model=str(tmp_path), device="cpu"))
    engine_model.model.register_forward_pre_hook(lambda m, args, kw: seen.append(kw["input_ids"]), with_kwargs=True)
    engine = make_engine(engine_model, str(tmp_path), kv_cache_dtype="fp8_e4m3", **SIZES)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(next(ids for ids in seen if ids.shape[1] == 256), past_key_values=cache, use_cache=True)
    host = engine.executor.host
    for k, v, layer in zip(host.k_caches, host.v_caches, cache.layers, strict=True):
        latent, rotated = float(layer.keys.abs().max()), float(layer.values.abs().max())
        assert (rotated > latent) == (loudness == 1.0)
        assert k.scale == v.scale == pytest.approx(MARGIN * max(latent, rotated) / 448, rel=1e-4)
    _, values = host.count_saturated(torch.arange(5)[None])
    assert values == 5 * LAYERS * (RANK + ROPE)


def test_a_module_that_makes_other_k_of_its_latents_keeps_k_and_v_of_every_head(folder, monkeypatch, caplog):
    own = DeepseekV3Attention.expand_kv
    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", lambda self, latent, rope: own(self, 1.5 * latent, rope))
    model = load_model(EngineConfig(model=folder, device="cpu"))
    (warning,) = [record.getMessage() for record in caplog.records if "every head" in record.getMessage()]
    assert "logits" in warning and "another engine" not in warning and not model.is_latent
    assert serve_another(model, EngineConfig(model=folder, device="cpu")) is model
    engine = make_engine(model, folder, **SIZES)
    assert engine.capacity.bytes_per_slot == 4 * LAYERS * HEADS * (NOPE + ROPE + VALUES)
    assert_logits_of_eager(engine, oracle(folder))


def test_a_model_serves_another_engine_where_it_keeps_the_same_rows(root, folder):
    """The same holds once a CPU's kernels have packed its layers. A model without latent attention serves both."""
    wanted = {latent: EngineConfig(model=folder, device="cpu", latent_kv=latent) for latent in (True, False)}
    for latent in (True, False):
        model = load_model(wanted[latent])
        for _ in range(2):
            assert serve_another(model, wanted[latent]) is model and model.is_latent == latent
            assert serve_another(model, wanted[not latent]) is None
            make_engine(model, folder, latent_kv=latent, **SIZES)
        packed = type(model.model.model.layers[0].self_attn.kv_b_proj) is PackedLinear
        assert packed == (not latent), "folded attention reads the weights, which would be in memory twice"
    llama = model_folder(root, "llama")
    shapes = [loaded(llama, "auto", latent).kv_shape for latent in (True, False)]
    assert shapes[0] == shapes[1]
    assert serve_another(loaded(llama), EngineConfig(model=llama, device="cpu", latent_kv=False)) is loaded(llama)


def test_a_folded_model_is_its_own_in_eager_attention(folder):
    """The load gate compares with it, and so do the expected answers of canaries."""
    model = load_model(EngineConfig(model=folder, device="cpu")).model
    model.set_attn_implementation("eager")
    ids = torch.tensor([PROMPTS[2]])
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, oracle(folder)(ids).logits)


@pytest.mark.full
def test_a_compiled_model_gives_the_same_tokens(folder, monkeypatch):
    monkeypatch.setattr(executor, "compile_model", partial(compile_model, backend="aot_eager"))
    prompts = {str(i): prompt for i, prompt in enumerate(PROMPTS)}
    model = load_model(EngineConfig(model=folder, device="cpu"))
    engine = make_engine(model, folder, torch_compile=True, **SIZES)
    run = Run(engine, [Request(name, prompt, PARAMS) for name, prompt in prompts.items()])
    assert run.tokens() == greedy_outputs(folder, prompts, PARAMS.max_tokens)


@pytest.mark.parametrize("family", ["axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"])
def test_every_family_with_latents_keeps_them(family, tmp_path):
    path = write_config(tmp_path, family, ACCEPTED[family])
    assert load_model(EngineConfig(model=path, device="cpu", load_format="dummy")).is_latent


@pytest.mark.parametrize(
    ("queries", "keys", "unfold"),
    [
        ([1], [1], True),  # a prompt without context: K and V of its own tokens, which the rows cost as well
        ([16], [23], True),
        ([16], [24], False),  # 32 * (24 - 16) = 16 * (24 - 16 / 2)
        ([32], [1000], True),  # so many queries are worth any context
        ([16, 1], [23, 40], False),  # the context of another prompt counts too
        ([16_000], [16_384], True),
        ([16_001], [16_385], False),  # more than may be in memory
    ],
)
def test_prompts_get_k_and_v_of_every_head_where_that_is_less_arithmetic(folder, queries, keys, unfold):
    """With W_K and W_V of 32 x 32 values, of which each pair of tokens saves 32."""
    (folded, *_) = [module for module in loaded(folder).model.modules() if hasattr(module, FOLDED)]
    assert getattr(folded, FOLDED).should_unfold(queries, keys) == unfold
