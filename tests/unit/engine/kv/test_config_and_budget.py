import json

import pytest

from engine.config import EngineConfig, format_bytes, parse_bytes
from engine.kv.budget import KVShape, LayerKV, capacity_of
from engine.model.spec import find_model
from engine.sequence import Request, SamplingParams


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (5, 5),
        ("128MiB", 134217728),
        ("1.5 GiB", 1610612736),
        ("500MB", 500_000_000),
        ("7", 7),
        ("2kb", 2000),
        ("2TiB", 2**41),
    ],
)
def test_parse_bytes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "12 parsecs", "1e3", True, "12MiB3", 1.5, 134217728.0, "1.5", "0.5 b"])
def test_parse_bytes_refuses(text):
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)


def test_a_budget_with_a_fraction_is_refused_not_cut_to_a_byte():
    with pytest.raises(ValueError, match=r"size in bytes cannot be 1\.5: give an integer or a text such as '128MiB'"):
        EngineConfig.from_mapping({"kv_budget": 1.5})


def test_format_bytes():
    assert format_bytes(134217728) == "128 MiB"
    assert format_bytes(900) == "900 B"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"page_size": 0}, "page_size cannot be 0"),
        ({"page_size": 2.5}, "page_size cannot be 2.5"),
        ({"page_size": True}, "page_size cannot be True"),
        ({"layout": "pagde"}, "layout cannot be 'pagde': choose one of paged, contiguous"),
        ({"max_num_seqs": -1}, "max_num_seqs cannot be -1"),
        ({"kv_cache_dtype": "fp3"}, "kv_cache_dtype cannot be 'fp3'"),
        ({"layout": "contiguous", "enable_prefix_caching": True}, "cannot be shared"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "raise the first or lower the second"),
        ({"enable_chunked_prefill": False, "max_model_len": 4096}, "without chunked prefill"),
        ({"enable_prefix_caching": "yes"}, "true or false"),
        ({"seed": "x"}, "seed cannot be 'x'"),
    ],
)
def test_config_refuses_in_a_sentence(settings, says):
    with pytest.raises(ValueError, match=says):
        EngineConfig(**settings)


def test_unknown_setting_is_named():
    with pytest.raises(ValueError, match="'page_sise' is not an engine setting"):
        EngineConfig.from_mapping({"page_sise": 16})


def test_max_model_len_is_settled_by_the_model():
    assert EngineConfig().check_against_model(4096).max_model_len == 4096
    assert EngineConfig(max_model_len=100).check_against_model(None).max_model_len == 100
    with pytest.raises(ValueError, match="8192 is beyond the 4096 positions"):
        EngineConfig(max_model_len=8192).check_against_model(4096)
    with pytest.raises(ValueError, match="set max_model_len"):
        EngineConfig().check_against_model(None)


def test_everyones_arithmetic_llama_70b():
    """Llama-3.1-70B, fp16: 327,680 bytes a token, 1.34 GB for 4096 tokens, 343.6 GB for 256 of those."""
    shape = KVShape((LayerKV(8, 128, 128),) * 80, 2)
    assert shape.bytes_per_slot == 327_680
    assert shape.bytes_per_slot * 4096 == 1_342_177_280
    assert round(shape.bytes_per_slot * 4096 * 256 / 1e9, 1) == 343.6


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
    assert contiguous.max_concurrency(300) == contiguous.num_pages == 6
    assert paged.max_concurrency(300) == paged.num_pages // 19 > 20


def test_waste_that_everyone_quotes():
    """A 300-token sequence in a 4096 reservation wastes 92.7 %."""
    assert round(100 * (1 - 300 / 4096), 1) == 92.7


def test_budget_below_one_sequence_gives_the_numbers():
    shape = KVShape((LayerKV(1, 8, 8),), 4)
    with pytest.raises(ValueError, match=r"kv_budget 1000 .* smaller than one sequence of max_model_len 64 tokens"):
        capacity_of(EngineConfig(max_model_len=64), shape, 1000)


def test_page_table_is_paid_from_the_budget():
    shape = KVShape((LayerKV(1, 8, 8),), 4)
    config = EngineConfig(max_model_len=64, page_size=1, max_num_seqs=4)
    with_room = capacity_of(config, shape, 64 * 64 + 4 * 64 * 8)
    assert with_room.num_pages == 64
    with pytest.raises(ValueError, match="raise kv_budget"):
        capacity_of(config, shape, 64 * 64 + 4 * 64 * 8 - 1)


def test_find_model_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="neither a folder"):
        find_model("/does/not/exist")
    with pytest.raises(ValueError, match=r"config\.json' does not exist"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 4}))
    with pytest.raises(ValueError, match="no model_type"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        find_model(str(tmp_path))
    assert find_model(str(tmp_path), "dummy").name == tmp_path.name


def test_config_imports_no_torch():
    """`kvbench plan` and `--dry-run` must answer at once."""
    import subprocess
    import sys

    code = "import engine.config, engine.kv.budget, engine.model.spec, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_budget_beyond_the_memory_is_refused_before_anything_is_allocated():
    from engine.build import build_engine

    with pytest.raises(ValueError, match=r"kv_budget .* is more than the .* that this machine has: lower kv_budget"):
        build_engine(EngineConfig(device="cpu", kv_budget=10**15, max_model_len=64))
    swapping = EngineConfig(device="cpu", kv_budget=10**8, max_model_len=64, preemption_mode="swap", swap_space=10**15)
    together = r"kv_budget and swap_space together .* that this machine has: lower kv_budget or swap_space$"
    with pytest.raises(ValueError, match=together):
        build_engine(swapping)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"reservation": "exact"}, "reservation cannot be 'exact': choose one of max, pow2, oracle"),
        ({"preemption_mode": "drop"}, "preemption_mode cannot be 'drop': choose one of recompute, swap"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy cannot be 'lifo': choose one of fcfs, priority"),
        ({"swap_space": 0}, "swap_space cannot be 0"),
        ({"max_num_waiting": -1}, "max_num_waiting cannot be -1"),
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills cannot be 0"),
        ({"max_num_partial_prefills": 2, "enable_chunked_prefill": False}, "needs chunked prefill"),
        (
            {"max_num_partial_prefills": 9, "max_num_batched_tokens": 8, "max_num_seqs": 8},
            "a share would be less than a token",
        ),
    ],
)
def test_settings_of_the_scheduler_are_refused_in_a_sentence(settings, says):
    with pytest.raises(ValueError, match=says):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "times"),
    # a token's K and V of one head: 4 bytes an element; 1; 1 and 4 of a scale; half and 4 of a scale
    [
        ("fp8_e4m3", 64, 4.0),
        ("fp8_e5m2", 64, 4.0),
        ("int8_per_token_head", 64, 256 / 68),
        ("int4_per_token_head", 64, 256 / 36),
    ],
)
def test_capacity_at_the_same_bytes_grows_as_the_arithmetic_says(dtype, head_dim, times):
    shape = KVShape((LayerKV(4, head_dim, head_dim),) * 8, 4)
    budget = 2**30
    plain, quantised = (
        capacity_of(EngineConfig(max_model_len=512, kv_cache_dtype=name), shape, budget) for name in ("auto", dtype)
    )
    assert plain.bytes_per_slot / quantised.bytes_per_slot == times
    assert quantised.num_slots / plain.num_slots == pytest.approx(times, rel=2e-3)
    scales = 8 * 4 * 2 * 4 if "per_token_head" in dtype else 0
    assert (plain.scale_bytes_per_slot, quantised.scale_bytes_per_slot) == (0, scales)


def test_swap_space_holds_whole_pages_of_the_stored_dtype():
    shape = KVShape((LayerKV(1, 8, 8),), 4)  # 64 bytes a slot, as fp8 16
    common = {"max_model_len": 64, "preemption_mode": "swap", "page_size": 16}
    budget = 1_000_000
    page = 16 * 64
    paged = capacity_of(EngineConfig(swap_space=3 * page + page - 1, **common), shape, budget)
    assert (paged.host_slots, paged.swap_space_bytes) == (48, 4 * page - 1)
    fp8 = capacity_of(EngineConfig(swap_space=3 * page, kv_cache_dtype="fp8_e4m3", **common), shape, budget)
    assert fp8.host_slots == 4 * 48
    by_slot = capacity_of(EngineConfig(layout="contiguous", swap_space=3 * 64 + 63, **common), shape, budget)
    assert by_slot.host_slots == 3, "a slab is swapped slot by slot"
    as_much = capacity_of(EngineConfig(**common), shape, budget)
    assert as_much.swap_space_bytes == budget
    none = capacity_of(EngineConfig(max_model_len=64), shape, budget)
    assert (none.host_slots, none.swap_space_bytes) == (0, 0), "recompute needs none"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"swap_space": 4096}, r"swap_space 4096 means nothing with preemption_mode 'recompute'"),
        ({"reservation": "oracle"}, r"reservation 'oracle' means nothing with layout 'paged'"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        EngineConfig(**settings)


def test_swap_space_below_a_page_is_refused_with_the_numbers():
    shape = KVShape((LayerKV(1, 8, 8),), 4)
    config = EngineConfig(max_model_len=64, preemption_mode="swap", swap_space=1023)
    with pytest.raises(
        ValueError, match=r"swap_space 1023 \(1023 B\) does not hold one page of 1024 bytes \(16 tokens\)"
    ):
        capacity_of(config, shape, 1_000_000)


@pytest.mark.parametrize("reservation", ["max", "pow2", "oracle"])
def test_a_slab_has_the_slots_that_the_same_bytes_buy_in_pages(reservation):
    shape = KVShape((LayerKV(1, 8, 8),), 4)
    budget = 100_000
    slab = capacity_of(EngineConfig(layout="contiguous", reservation=reservation, max_model_len=96), shape, budget)
    assert slab.num_slots == (budget - slab.page_table_bytes) // 64
    assert slab.num_pages == slab.num_slots // 96


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"n": 0}, "n cannot be 0"),
        ({"n": 3, "best_of": 2}, "best_of 2 is less than n 3"),
        ({"n": 3, "beam_width": 2}, "beam_width 2 is less than n 3"),
        ({"beam_width": 2, "best_of": 2}, "best_of cannot go with beam search"),
        ({"early_stopping": "sometimes"}, "early_stopping cannot be 'sometimes'"),
    ],
)
def test_widths_that_make_no_sense_are_refused(params, says):
    with pytest.raises(ValueError, match=says):
        SamplingParams(**params)


def test_a_negative_priority_is_refused():
    with pytest.raises(ValueError, match=r"priority cannot be -1: it is 0 \(first\) or more"):
        Request("a", (1,), priority=-1)
