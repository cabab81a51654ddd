import dataclasses
import json
import re
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from kvbench_engine.build import activation_bytes, build_engine
from kvbench_engine.config import EngineConfig
from kvbench_engine.kv.budget import KVShape, LayerKV, capacity_of, gpu_budget, settle_length
from kvbench_engine.model.spec import find_model
from kvbench_engine.sequence import Request, SamplingParams
from kvbench_engine.sizes import format_bytes, parse_bytes
from tests.support.families import ACCEPTED
from tests.support.hf_parts import model_folder

SHAPE = KVShape((LayerKV(1, 8, 8),), 4)  # 64 bytes a slot, as fp8 16


def test_bytes_are_read_and_written():
    texts = (5, "128MiB", "1.5 GiB", "500MB", "7", "2kb", "2TiB")
    assert [parse_bytes(text) for text in texts] == [5, 2**27, 3 * 2**29, 500_000_000, 7, 2000, 2**41]
    assert (format_bytes(2**27), format_bytes(900)) == ("128 MiB", "900 B")


@pytest.mark.parametrize("text", ["", "12 parsecs", "1e3", True, "12MiB3", 134217728.0, "1.5", "0.5 b"])
def test_what_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(ValueError, match="size"):
        EngineConfig.from_mapping({"kv_budget": text})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"page_size": 0}, "page_size cannot be 0"),
        ({"page_size": 2.5}, "page_size cannot be 2.5"),
        ({"max_num_seqs": True}, "max_num_seqs cannot be True"),
        ({"layout": "pagde"}, "'pagde': choose one of paged, contiguous"),
        ({"reservation": "exact"}, "'exact': choose one of max, pow2, oracle"),
        ({"seed": "x"}, "seed cannot be 'x'"),
        ({"enable_prefix_caching": "yes"}, "true or false"),
        ({"cuda_graphs": "yes"}, "true, false or left out"),
        ({"cuda_graphs": True, "device": "cpu"}, "cuda_graphs"),
        ({"layout": "contiguous", "enable_prefix_caching": True}, "enable_prefix_caching"),
        ({"reservation": "oracle"}, "reservation 'oracle' .* layout 'paged'"),
        ({"swap_space": 4096}, "swap_space 4096 .* preemption_mode 'recompute'"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "32 .* max_num_seqs 64"),
        ({"enable_chunked_prefill": False, "max_model_len": 4096}, "4096, and without chunked prefill"),
        ({"max_num_partial_prefills": 2, "enable_chunked_prefill": False}, "needs chunked prefill"),
        ({"max_num_partial_prefills": 9, "max_num_batched_tokens": 8, "max_num_seqs": 8}, "max_num_partial_prefills 9"),
        ({"page_sise": 16}, "'page_sise' is not an engine setting"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_their_value(settings, says):
    with pytest.raises(ValueError, match=says):
        EngineConfig.from_mapping(settings)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"n": 0}, "n cannot be 0"),
        ({"n": 3, "best_of": 2}, "best_of 2 is less than n 3"),
        ({"n": 3, "beam_width": 2}, "beam_width 2 is less than n 3"),
        ({"beam_width": 2, "best_of": 2}, "best_of"),
        ({"early_stopping": "sometimes"}, "early_stopping cannot be 'sometimes'"),
        ({"max_tokens": 0}, "max_tokens cannot be 0"),
        ({"temperature": -1.0}, "temperature cannot be -1.0"),
        ({"temperature": float("nan")}, "temperature cannot be nan"),
        ({"top_p": 0.0}, "top_p cannot be 0.0"),
        ({"top_k": -2}, "top_k cannot be -2"),
    ],
)
def test_parameters_that_cannot_be_are_refused_with_their_value(params, says):
    with pytest.raises(ValueError, match=says):
        SamplingParams(**params)
    with pytest.raises(ValueError, match="priority cannot be -1"):
        Request("a", (1,), priority=-1)


def test_max_model_len_is_settled_by_the_model():
    assert EngineConfig().check_against_model(4096).max_model_len == 4096
    assert EngineConfig(max_model_len=100).check_against_model(None).max_model_len == 100
    with pytest.raises(ValueError, match="8192 is beyond the 4096 positions"):
        EngineConfig(max_model_len=8192).check_against_model(4096)
    with pytest.raises(ValueError, match="set max_model_len"):
        EngineConfig().check_against_model(None)


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_a_length_that_is_not_given_is_lowered_to_the_longest_that_the_budget_holds(layout):
    config, budget = EngineConfig(layout=layout, max_num_seqs=5), 16_900  # 15 pages, each with its page table
    lowered = settle_length(config, 4096, SHAPE, budget, may_lower=True)
    longest = lowered.max_model_len
    assert capacity_of(lowered, SHAPE, budget).max_concurrency(longest) == 1
    for beyond in (longest + 1, 4096):
        with pytest.raises(ValueError, match=rf"smaller than one sequence.*lower max_model_len to {longest} or less"):
            capacity_of(dataclasses.replace(config, max_model_len=beyond), SHAPE, budget)
    for given, model_len, may_lower, settled in (
        (None, 64, True, 64), (64, 4096, True, 64), (4096, 4096, True, 4096), (None, 4096, False, 4096),
    ):  # fmt: skip
        own = dataclasses.replace(config, max_model_len=given)
        same = settle_length(own, model_len, SHAPE, budget, may_lower=may_lower)
        assert same.max_model_len == settled, "it fits, was asked for, or nothing may be lowered"
    with pytest.raises(ValueError, match="smaller than one sequence"):
        capacity_of(settle_length(config, 4096, SHAPE, 100, may_lower=True), SHAPE, 100)


@pytest.mark.parametrize("settings", [{"page_size": 1}, {"page_size": 16}, {"layout": "contiguous"}], ids=str)
def test_the_least_budget_that_is_named_works_and_a_byte_less_does_not(tmp_path, settings):
    folder = model_folder(str(tmp_path))

    def start(budget):
        config = EngineConfig(model=folder, device="cpu", max_num_seqs=2, kv_budget=budget, **settings)
        return build_engine(config)

    with pytest.raises(ValueError, match="kv_budget 1 ") as caught:
        start(1)
    assert "max_model_len to" not in str(caught.value)  # at no length would it do
    least = int(re.search(r"below (\d+)", str(caught.value))[1])
    with pytest.raises(ValueError, match=f"below {least}"):
        start(least - 1)
    engine = start(least)
    engine.add_request(Request("a", (1,), SamplingParams(max_tokens=1)))
    assert [len(output.token_ids) for output in engine.step()] == [1]


def test_what_a_device_has_free_lowers_the_length_once_it_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr("kvbench_engine.build.default_budget", lambda config, loaded: 40_000)
    folder = model_folder(str(tmp_path))  # of 256 positions
    built = build_engine(EngineConfig(model=folder, device="cpu", max_num_seqs=2))
    assert 16 <= built.config.max_model_len < 256
    assert built.capacity.max_concurrency(built.config.max_model_len) == 1
    with pytest.raises(ValueError, match="smaller than one sequence"):
        build_engine(EngineConfig(model=folder, device="cpu", max_num_seqs=2, max_model_len=256))


@pytest.mark.parametrize(("hidden", "inner", "vocab"), [(64, 256, 512), (128, 256, 1024), (64, 192, 8192)])
def test_the_estimate_of_a_step_covers_what_the_model_allocates_at_once(hidden, inner, vocab):
    sizes = AutoConfig.for_model(
        "llama", hidden_size=hidden, intermediate_size=inner, vocab_size=vocab, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(sizes, dtype=torch.bfloat16).eval()
    config = EngineConfig(model="any", max_num_batched_tokens=2048, max_num_seqs=64)
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model(input_ids=torch.ones(1, 2048, dtype=torch.long), use_cache=False, logits_to_keep=64)
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    most = max(live)
    assert most <= activation_bytes(config, sizes, torch.bfloat16) <= 2 * most


def test_a_gpu_keeps_room_for_two_of_its_largest_steps():
    """A small GPU has less than a fifth of its memory for both."""
    assert gpu_budget(100_000, 10_000) == gpu_budget(100_000, 9_000) == 80_000
    assert gpu_budget(100_000, 10_001) == 79_998
    assert gpu_budget(100_001, 50_000) == 1
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        gpu_budget(100_000, 50_000)


@pytest.mark.parametrize("family", sorted(ACCEPTED))
def test_the_step_of_every_family_can_be_estimated(family):
    """Families name the width of their MLP in many ways, or have one a layer."""
    config, sizes = EngineConfig(model="any", max_num_batched_tokens=64), AutoConfig.for_model(family.split()[0])
    assert activation_bytes(config, sizes, torch.bfloat16) > 64 * 2 * sizes.get_text_config().hidden_size


def test_find_model_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="neither a folder"):
        find_model("/does/not/exist")
    with pytest.raises(ValueError, match=r"config\.json' does not exist"):
        find_model(str(tmp_path))
    for text, says in (("{not json", "JSON"), ("{}", "model_type"), ('{"model_type": "llama"}', "safetensors")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=says):
            find_model(str(tmp_path))
    assert find_model(str(tmp_path), "dummy").name == tmp_path.name


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 64}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ('"x": ' + "[" * 100 + "]" * 100, "nested more than 100 deep"),
        ('"x": ' + "9" * 5000, "5000 digits"),
        ('"text_config": 5', "text_config .* is 5"),
        ('"num_hidden_layers": 10001', "num_hidden_layers .* 10001"),
        ('"num_attention_heads": 0', "num_attention_heads .* 0"),
        ('"hidden_size": "big"', "hidden_size .* 'big'"),
        ('"model_type": ["llama"]', "model_type"),
    ],
)
def test_a_config_that_no_model_has_is_refused_in_one_sentence(tmp_path, more, says):
    (tmp_path / "config.json").write_text(f"{json.dumps({'model_type': 'llama', **SIZES})[:-1]}, {more}}}")
    with pytest.raises(ValueError, match=says) as error:
        find_model(str(tmp_path), "dummy")
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize("more", [{"head_dim": [8]}, {"num_key_value_heads": {"a": 1}}, {"qk_nope_head_dim": "x"}])
def test_sizes_by_layer_are_read_and_planned_by_nobody(tmp_path, more):
    deepest = json.loads("[" * 98 + "]" * 98)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, "x": deepest, **more}))
    spec = find_model(str(tmp_path), "dummy")
    with pytest.raises(ValueError, match="no plain number"):
        spec.kv_shape("float32")
    assert spec.attention_shape() is None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kv_budget": 10**15}, "kv_budget .* is more than the .* lower kv_budget$"),
        ({"kv_budget": 10**8, "preemption_mode": "swap", "swap_space": 10**15}, "lower kv_budget or swap_space$"),
    ],
)
def test_a_budget_beyond_the_memory_is_refused_before_anything_is_allocated(tmp_path, settings, says):
    with pytest.raises(ValueError, match=says):
        build_engine(EngineConfig(model=model_folder(str(tmp_path)), device="cpu", max_model_len=64, **settings))


# Capacity.


def test_same_bytes_buy_the_same_slots_in_both_layouts_but_not_the_same_sequences():
    shape = find_model("llama-32m").kv_shape("float32")
    assert shape.bytes_per_slot == 8 * 4 * (64 + 64) * 4
    common = {"max_model_len": 1024, "max_num_seqs": 32}
    budget = 100 * 2**20
    paged = capacity_of(EngineConfig(page_size=16, **common), shape, budget)
    contiguous = capacity_of(EngineConfig(layout="contiguous", **common), shape, budget)
    for capacity in (paged, contiguous):
        spent = capacity.num_slots * shape.bytes_per_slot + capacity.page_table_bytes
        assert spent <= budget < spent + capacity.page_size * shape.bytes_per_slot
    assert contiguous.max_concurrency(300) == contiguous.num_pages == contiguous.num_slots // 1024 == 6
    assert paged.max_concurrency(300) == paged.num_pages // 19 > 20


def test_page_table_is_paid_from_the_budget():
    config = EngineConfig(max_model_len=64, page_size=1, max_num_seqs=4)
    assert capacity_of(config, SHAPE, 64 * 64 + 4 * 64 * 8).num_pages == 64
    with pytest.raises(ValueError, match=r"kv_budget 6143 .* max_model_len 64 .* 6144 .* raise kv_budget"):
        capacity_of(config, SHAPE, 64 * 64 + 4 * 64 * 8 - 1)


@pytest.mark.parametrize(
    ("dtype", "times"),
    # a token's K and V of one head: 4 bytes an element; 1; 1 and 4 of a scale; half and 4 of a scale
    [("fp8_e4m3", 4.0), ("fp8_e5m2", 4.0), ("int8_per_token_head", 256 / 68), ("int4_per_token_head", 256 / 36)],
)
def test_capacity_at_the_same_bytes_grows_as_the_arithmetic_says(dtype, times):
    shape = KVShape((LayerKV(4, 64, 64),) * 8, 4)
    plain, quantised = (
        capacity_of(EngineConfig(max_model_len=512, kv_cache_dtype=name), shape, 2**30) for name in ("auto", dtype)
    )
    assert plain.bytes_per_slot / quantised.bytes_per_slot == times
    assert quantised.num_slots / plain.num_slots == pytest.approx(times, rel=2e-3)
    scales = 8 * 4 * 2 * 4 if "per_token_head" in dtype else 0
    assert (plain.scale_bytes_per_slot, quantised.scale_bytes_per_slot) == (0, scales)


def test_swap_space_holds_whole_pages_of_the_stored_dtype():
    budget, page = 1_000_000, 16 * 64

    def capacity(**settings):
        common = {"max_model_len": 64, "preemption_mode": "swap", "page_size": 16}
        return capacity_of(EngineConfig(**{**common, **settings}), SHAPE, budget)

    paged = capacity(swap_space=3 * page + page - 1)
    assert (paged.host_slots, paged.swap_space_bytes) == (48, 4 * page - 1)
    assert capacity(swap_space=3 * page, kv_cache_dtype="fp8_e4m3").host_slots == 4 * 48
    assert capacity(layout="contiguous", swap_space=3 * 64 + 63).host_slots == 3, "a slab is swapped slot by slot"
    assert capacity().swap_space_bytes == budget
    none = capacity(preemption_mode="recompute")
    assert (none.host_slots, none.swap_space_bytes) == (0, 0), "recompute needs none"
    with pytest.raises(ValueError, match=r"swap_space 1023 .* one page of 1024 bytes \(16 tokens\)"):
        capacity(swap_space=1023)


@pytest.mark.parametrize(
    ("given", "seqs", "tokens"),
    [
        ({"device": "cpu"}, 64, 512),
        ({"device": "cuda"}, 256, 8192),
        ({"device": "cuda", "max_num_batched_tokens": 100}, 100, 100),
        ({"device": "cpu", "max_num_seqs": 600}, 600, 600),
        ({"device": "cuda", "max_num_seqs": 4, "max_num_batched_tokens": 32}, 4, 32),
    ],
)
def test_the_batch_s_defaults_are_the_device_s(given: dict, seqs: int, tokens: int):
    config = EngineConfig.from_mapping(given)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (seqs, tokens)
    assert EngineConfig(**dataclasses.asdict(config)) == config


@pytest.mark.parametrize(
    ("drivers", "visible", "torch_build", "expected"),
    [
        ((), "0", "2.13.0", (64, 512)),
        ((__file__,), "1", "2.13.0+cu130", (256, 8192)),
        ((__file__,), "", "2.13.0", (64, 512)),
        ((__file__,), "-1", "2.13.0", (64, 512)),
        ((__file__,), None, "2.13.0+cpu", (64, 512)),
    ],
)
def test_device_auto_goes_by_what_torch_will_find(
    monkeypatch: pytest.MonkeyPatch, drivers: tuple, visible: str | None, torch_build: str, expected: tuple
):
    monkeypatch.setattr("kvbench_engine.config.GPU_DRIVERS", drivers)
    monkeypatch.setattr("importlib.metadata.version", lambda package: torch_build)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = EngineConfig()
    assert (config.max_num_seqs, config.max_num_batched_tokens) == expected
