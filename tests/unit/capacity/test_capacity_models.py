import json
from pathlib import Path

import pytest

from kvbench.capacity import weights
from kvbench.capacity.model import known_models, plan_model
from kvbench.capacity.weights import count_parameters, weights_of
from kvbench.common.errors import UsageError

PUBLISHED = {  # numbers of the checkpoints on Hugging Face (a tied head is not stored)
    "Llama-3.2-1B": 1_235_814_400, "Llama-3.2-3B": 3_212_749_824, "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.3-70B": 70_553_706_496, "Llama-3.1-405B": 405_853_388_800,
    "Qwen3-0.6B": 596_049_920, "Qwen3-1.7B": 1_720_574_976, "Qwen3-4B": 4_022_468_096, "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200, "Qwen3-32B": 32_762_123_264, "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen2.5-7B": 7_615_616_512, "Qwen2.5-14B": 14_770_033_664, "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Mistral-7B-v0.1": 7_241_732_096, "Mistral-7B-v0.3": 7_248_023_552, "Mistral-Small-24B": 23_572_403_200,
    "Mixtral-8x7B": 46_702_792_704, "Gemma-2-9B": 9_241_705_984, "Gemma-2-27B": 27_227_128_320,
    "Gemma-3-4B": 4_300_079_472, "Gemma-3-12B": 12_187_325_040, "Gemma-3-27B": 27_432_406_640,
    "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
    "DeepSeek-V2-Lite": 15_706_484_224, "DeepSeek-V3": 671_026_419_200, "Phi-4": 14_659_507_200,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_checkpoint(name):
    assert count_parameters(plan_model(name)).total == PUBLISHED[name]


@pytest.mark.parametrize(
    ("asked", "found"),
    [("Qwen/Qwen3-32B", "Qwen3-32B"), ("qwen3-32b", "Qwen3-32B"), ("Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
     ("google/gemma-3-27b-it", "Gemma-3-27B"), ("deepseek-ai/DeepSeek-R1", "DeepSeek-R1"),
     ("Mistral-Small-24B-Instruct-2501", "Mistral-Small-24B"), ("Qwen/Qwen3-8B-Base", "Qwen3-8B-Base"),
     # with another word it is another model: the limit, the window, the dimensions or the weights differ
     ("Qwen3-4B-Instruct-2507", None), ("Mistral-7B-Instruct-v0.2", None), ("Qwen3-Coder-30B-A3B-Instruct", None),
     ("gemma-3-27b-it-qat", None), ("Qwen2.5-72B-Instruct-GPTQ-Int8", None), ("qwen3-33b", None)],
)  # fmt: skip
def test_names_forgive_case_organisation_and_instruct(asked, found):
    if found:
        assert plan_model(asked).name == found
    else:
        with pytest.raises(UsageError, match="did you mean"):
            plan_model(asked)


@pytest.mark.parametrize("model", known_models(), ids=lambda m: m.name)
def test_parameters_are_those_that_transformers_builds(model):
    """The oracle is the model itself, built on the meta device, where it takes no memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(model.spec.config)
    config.pop("quantization_config", None)
    built = AutoConfig.for_model(**config)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(built)
    extra = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    routers = config.get("n_routed_experts", 0) if config["model_type"] == "deepseek_v3" else 0
    correction = extra * routers  # a buffer there
    expected = sum(each.numel() for each in made.parameters()) + correction + model.other_parameters
    assert count_parameters(model).total == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-3.1-70b", 327_680),  # 80 layers x 8 heads x (128 + 128) x 2
        ("gpt-oss-120b", 73_728),  # 36 x 8 x (64 + 64) x 2
        ("DeepSeek-V3", 70_272),  # (512 + 64) x 2 x 61
        ("OPT-13B", 819_200),  # PagedAttention, section 2.2: 800 KB
        ("Qwen3-32B", 262_144),
    ],
)
def test_bytes_of_a_token(name, expected):
    assert plan_model(name).token_bytes() == expected


def test_quantised_kv_counts_scales_as_the_built_in_engine_does_and_what_everyone_quotes_of_llama_70b():
    """80 x 8 rows of K and V each, with 128 values and one float32 scale a row."""
    model = plan_model("meta-llama/Llama-3.1-70B-Instruct")
    assert model.token_bytes("fp8_e4m3") == 327_680 // 2
    assert model.token_bytes("int8_per_token_head") == 80 * 8 * 2 * (128 + 4)
    assert model.token_bytes("int4_per_token_head") == 80 * 8 * 2 * (64 + 4)
    assert plan_model("DeepSeek-V3").token_bytes("int8_per_token_head") == 61 * (576 + 4)
    assert 256 * model.sequence_bytes(4096) / 1e9 == pytest.approx(343.6, abs=0.05)
    assert 1 - model.sequence_bytes(300) / model.sequence_bytes(4096) == pytest.approx(0.927, abs=0.0005)


@pytest.mark.parametrize(
    ("name", "gibibytes", "thousands"), [("OPT-13B", 12, 15.7), ("OPT-66B", 21, 9.7), ("OPT-175B", 264, 60.1)]
)
def test_slots_of_the_paged_attention_paper(name, gibibytes, thousands):
    """Table 1 (Kwon et al. 2023), one A100-40GB, four, and eight A100-80GB; its GB are 2^30, rounded to whole ones."""
    one = plan_model(name).token_bytes()
    low, high = ((gibibytes + half) * 2**30 / one / 1000 for half in (-0.5, 0.5))
    assert low <= thousands < high
    if name != "OPT-66B":
        assert gibibytes * 2**30 / one / 1000 == pytest.approx(thousands, abs=0.05)


def test_layers_with_a_window_stop_at_it_in_whole_pages():
    oss = plan_model("gpt-oss-20b")  # 12 of 24 layers keep 128 tokens, 2 x 8 x 64 x 2 = 2,048 bytes a layer
    assert oss.sequence_bytes(1000, page_size=16) == 2048 * 12 * (1008 + 128 + 16)  # the window begins within a page
    assert oss.sequence_bytes(100, page_size=16) == 2048 * 24 * 112
    assert oss.read_bytes(1000) == 2048 * 12 * (1000 + 128)
    assert oss.reservation_bytes(1000, 1) == 2048 * 12 * (1000 + 128)
    assert oss.reservation_bytes(1000, 2) == 2048 * 12 * (1000 + 192)  # one more than the window, in units of 64
    mistral = plan_model("Mistral-7B-v0.1")
    assert mistral.sequence_bytes(32_768) == mistral.sequence_bytes(4096) == 4096 * 131_072
    gemma = plan_model("Gemma-3-27B")
    assert {group.window: group.count for group in gemma.layers} == {1024: 52, None: 10}
    layer = gemma.token_bytes() // 62  # a pool of 10 layers: one group sees everything, six the window, with 60 layers
    assert gemma.sequence_bytes(8192, page_size=16) == layer * 10 * (8192 + 6 * (1024 + 16))
    limits = {"Qwen/Qwen2.5-7B-Instruct": 32_768, "Qwen/Qwen3-8B": 40_960, "Qwen/Qwen3-8B-Base": 32_768}
    assert {name: plan_model(name).spec.max_positions for name in limits} == limits  # of the chat model
    for file in ("models.json", "gpus.json"):
        entries = json.loads((Path(weights.__file__).parent / file).read_text())
        assert all(len(entry["source"]) > 20 for entry in entries.values())


def test_tensor_parallelism_splits_kv_heads_repeats_few_and_keeps_latent_rows():
    llama, latent = plan_model("llama-3.1-8b"), plan_model("DeepSeek-V3")
    assert [llama.token_bytes(gpus=n) * n // llama.token_bytes() for n in (1, 2, 8, 16)] == [1, 1, 1, 2]
    assert latent.token_bytes(gpus=8) == latent.token_bytes()
    for model, gpus in ((plan_model("Qwen2.5-7B"), 8), (plan_model("Phi-4"), 4), (plan_model("Phi-4"), 3)):
        with pytest.raises(UsageError, match=str(gpus)):
            model.check_split(gpus)


def test_weights_of_quantised_checkpoints():
    v3 = weights_of(plan_model("DeepSeek-V3"))
    assert v3.total_bytes / 671_026_419_200 == pytest.approx(1.0, abs=0.01)
    oss = weights_of(plan_model("gpt-oss-120b"))
    assert oss.total_bytes / 2**30 == pytest.approx(64.38, rel=0.005)  # as vLLM loads it on H100 (llm-d-benchmark)
    awq = weights_of(plan_model("Qwen2.5-72B"), "awq")
    assert awq.total_bytes / 1e9 == pytest.approx(41.6, rel=0.01)  # Qwen/Qwen2.5-72B-Instruct-AWQ on Hugging Face
    with pytest.raises(UsageError, match="mxfp4"):
        weights_of(plan_model("qwen3-8b"), "mxfp4")


def test_a_folder_gives_dimensions_and_the_size_of_its_safetensors(tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}  # fmt: skip
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": config, "model_type": "x", "torch_dtype": "float16"})
    )
    bare = plan_model(str(tmp_path / "config.json"))
    assert bare.token_bytes() == 2 * 2 * 32 * 2
    assert weights_of(bare).total_bytes == 2 * count_parameters(bare).total
    (tmp_path / "model.safetensors").write_bytes(b"x" * 4321)
    assert weights_of(plan_model(str(tmp_path))).total_bytes == 4321
    assert weights_of(plan_model(str(tmp_path)), "fp8").total_bytes > 4321


MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
GROUPS = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": "int4"}}}


def planned(tmp_path, **change):
    """A small Llama with fields changed, or left out by None."""
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 100, **change}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return plan_model(str(path))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"sliding_window": "4096"}, "sliding_window"),
        ({"sliding_window": 32, "sliding_window_pattern": "LG"}, "sliding_window_pattern"),
        ({"num_key_value_heads": [2, 4]}, "num_key_value_heads"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"intermediate_size": [128, 128]}, "intermediate_size"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"model_type": "opt", "max_position_embeddings": 64}, "ffn_dim"),
        *((MLA | {name: None}, name) for name in MLA if name != "kv_lora_rank"),
        ({"num_experts": 4}, "num_experts_per_tok"),
        ({"quantization_config": "fp8"}, "quantization_config"),
        ({"quantization_config": GROUPS}, "weights"),
        ({"text_config": "llama"}, "text_config"),
        ({"torch_dtype": ["bfloat16"]}, "torch_dtype"),
    ],
)
def test_a_config_that_cannot_be_planned_is_refused_with_the_field(tmp_path, change, named):
    with pytest.raises(UsageError, match=named):
        weights_of(planned(tmp_path, **change))


def test_fields_that_do_not_matter_beside_others_and_a_latent_row_are_planned(tmp_path):
    kinds = ["sliding_attention", "full_attention"]
    model = planned(tmp_path, sliding_window=32, sliding_window_pattern="LG", layer_types=kinds)
    assert [group.window for group in model.layers] == [32, None]
    assert planned(tmp_path, **MLA).token_bytes() == 2 * (16 + 8) * 4
