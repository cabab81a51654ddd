"""Which cells a sweep has, for every setting of the engine; what they are called, and in which order they run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import pytest
import yaml

from kvbench.common.errors import UsageError
from kvbench.sweep.plan import preflight
from kvbench.targets.builtin import check_configuration
from kvbench.workload.design import make_design, plan_blocks, plan_sweep, select
from kvbench.workload.file import load_workload, resolve
from kvbench.workload.load_section import load_point
from kvbench.workload.settings import DEFAULTS, DEFAULTS_ON, ONLY_WITH, phrase, value_words
from kvbench_engine.config import KV_CACHE_DTYPES, EngineConfig
from kvbench_engine.server.arguments import build_parser, command_line, options_of

BASE = {"layout": "paged", "page_size": 16, "enable_prefix_caching": False, "max_num_seqs": 64}
SWEEP = {"layout": ["contiguous", "paged"], "page_size": [8, 16, 64], "enable_prefix_caching": [False, True]}
LOADS = [load_point("closed", concurrency=c, rate=None, num_requests=2 * c) for c in (3, 24)]


def ids(design):
    return [c.config_id for c in design.configurations]


def one_at_a_time(engine, sweep):
    return make_design(engine, sweep, LOADS, "one_at_a_time")


def test_one_variable_at_a_time_whether_the_baselines_value_is_listed_or_not():
    assert ids(one_at_a_time(BASE, {"page_size": [8]})) == ["paged-p16", "paged-p8"]
    design = one_at_a_time(BASE, SWEEP)
    assert ids(design) == ["paged-p16", "contiguous", "paged-p8", "paged-p64", "paged-p16-prefix"]
    assert design.configurations[1].settings == {"layout": "contiguous", "max_num_seqs": 64}
    assert [c.cell_id for c in design.cells][:4] == [
        "paged-p16-c3", "paged-p16-c24", "contiguous-c3", "contiguous-c24",
    ]  # fmt: skip
    assert len(design.cells) == 10
    for configuration in design.configurations:
        assert len(configuration.varied) == (0 if configuration.is_baseline else 1)


@pytest.mark.parametrize(
    "values",
    [
        ["48MiB", "1 GiB", "48 MiB"],
        ["a/b", "a b", "../../etc", "", None, "x" * 300, "x" * 301],
        ["Auto", "auto", "AUTO"],
        [0.1, 0.10000001, 1e-9],
        ["ü", "ö", "日本"],
    ],
)
def test_ids_are_unique_and_safe_as_file_names_for_any_setting(values):
    design = one_at_a_time(BASE, {"some_setting": values})
    found = [cell.cell_id for cell in design.cells]
    assert len(design.configurations) == len(values) + (None not in values)  # None is the default: the baseline
    assert len({name.lower() for name in found}) == len(found)
    for name in found:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}", name), name


def test_none_puts_a_setting_back_to_its_default():
    design = one_at_a_time({**BASE, "num_threads": 2}, {"num_threads": [None, 1]})
    assert ids(design) == ["paged-p16", "paged-p16-numthreads_None", "paged-p16-numthreads_1"]
    assert "num_threads" not in design.configurations[1].settings
    assert design.configurations[1].varied == {"num_threads": None}


def test_changed_flags_are_named_in_both_directions():
    base = {**BASE, "enable_prefix_caching": True, "enable_chunked_prefill": True}
    sweep = {"enable_prefix_caching": [False], "enable_chunked_prefill": [False], "max_num_seqs": [8]}
    assert ids(one_at_a_time(base, sweep)) == [
        "paged-p16", "paged-p16-noprefix", "paged-p16-unchunked", "paged-p16-seqs8",
    ]  # fmt: skip


@pytest.mark.parametrize(("rate", "expected"), [(4.0, "r4"), (0.5, "r0.5"), (1e-7, "r1e_07"), (None, "trace")])
def test_open_loop_load_ids(rate, expected):
    assert load_point("open", concurrency=None, rate=rate, num_requests=None).load_id == expected


def test_only_filters_cells_and_refuses_a_glob_that_matches_nothing():
    design = one_at_a_time(BASE, SWEEP)
    chosen = select(design, ["paged-*-c24", "contiguous-c3"])
    assert [c.cell_id for c in chosen.cells] == [
        "paged-p16-c24", "contiguous-c3", "paged-p8-c24", "paged-p64-c24", "paged-p16-prefix-c24",
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"'pagd-\*' matches no cell: the cells are paged-p16-c3, "):
        select(design, ["paged-*", "pagd-*"])


def test_blocks_run_each_cell_and_repeat_once_on_a_fresh_server_per_configuration():
    design = one_at_a_time(BASE, SWEEP)
    blocks = plan_blocks(design, 3, seed=0)
    assert len(blocks) == 15
    runs = [(cell.cell_id, block.repeat) for block in blocks for cell in block.cells]
    assert len(runs) == len(set(runs)) == 30
    assert [b.repeat for b in blocks] == sorted(b.repeat for b in blocks)  # whole repeats first
    assert all(c.configuration == b.configuration for b in blocks for c in b.cells)
    assert len({b.block_id for b in blocks}) == 15


def test_the_order_is_random_between_repeats_and_fixed_by_the_seed():
    design = one_at_a_time(BASE, SWEEP)
    order = [b.configuration.config_id for b in plan_blocks(design, 20, seed=1)]
    assert order == [b.configuration.config_id for b in plan_blocks(design, 20, seed=1)]
    assert order != [b.configuration.config_id for b in plan_blocks(design, 20, seed=2)]
    assert len({tuple(order[i : i + 5]) for i in range(0, 100, 5)}) > 5
    loads = {tuple(c.load.load_id for c in b.cells) for b in plan_blocks(design, 20, seed=1)}
    assert loads == {("c3", "c24"), ("c24", "c3")}


def test_in_one_repeat_every_configuration_sees_its_loads_in_the_same_order():
    loads = [load_point("closed", concurrency=c, rate=None, num_requests=c) for c in (1, 2, 3, 4, 5)]
    design = make_design(BASE, SWEEP, loads, "one_at_a_time")
    blocks = plan_blocks(design, 10, seed=1)
    orders = [{tuple(c.load.load_id for c in b.cells) for b in blocks if b.repeat == r} for r in range(1, 11)]
    assert [len(order) for order in orders] == [1] * 10
    assert len(set.union(*orders)) > 5  # and another in another repeat
    fewer = plan_blocks(select(design, ["*-c1", "*-c4", "contiguous-c2"]), 10, seed=1)
    for few in fewer:  # leaving cells out does not change the order of the others
        whole = next(b for b in blocks if b.block_id == few.block_id)
        assert [c for c in whole.cells if c in few.cells] == list(few.cells)


PAGED = {"layout": "paged", "page_size": 16}
EVERY = {
    "reservation": ["max", "pow2", "oracle"],
    "kv_cache_dtype": list(KV_CACHE_DTYPES),
    "preemption_mode": ["recompute", "swap"],
    "swap_space": ["16MiB", "64MiB"],
    "scheduling_policy": ["fcfs", "priority"],
    "enable_chunked_prefill": [True, False],
    "max_num_partial_prefills": [1, 2],
    "max_num_waiting": [None, 8],
}


def test_the_table_of_defaults_and_dependences_is_the_engine_s():
    config = EngineConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == dict(DEFAULTS)
    for device, known in DEFAULTS_ON.items():
        own = EngineConfig(device=device)
        assert {name: getattr(own, name) for name in known} == known
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert names >= {*ONLY_WITH, *(other for other, _ in ONLY_WITH.values()), *EVERY}


def test_each_setting_changed_alone_is_one_cell_and_defaults_that_are_listed_are_the_baseline():
    design = one_at_a_time(PAGED, EVERY)
    assert ids(design) == [
        "paged-p16", "paged-p16-fp8_e4m3", "paged-p16-fp8_e5m2", "paged-p16-int8_per_token_head",
        "paged-p16-int4_per_token_head", "paged-p16-swap", "paged-p16-priority", "paged-p16-unchunked",
        "paged-p16-partial2", "paged-p16-waiting8",
    ]  # fmt: skip
    assert [c.label for c in design.configurations][1:6] == [
        "paged, page 16, FP8 KV (e4m3)", "paged, page 16, FP8 KV (e5m2)", "paged, page 16, INT8 KV",
        "paged, page 16, INT4 KV", "paged, page 16, swap",
    ]  # fmt: skip
    assert all(len(c.varied) == 1 for c in design.configurations if not c.is_baseline)


def test_what_the_baseline_has_no_use_for_is_said_with_the_values_and_the_reason():
    reservation, swap_space = one_at_a_time(PAGED, EVERY).notes
    assert all(word in reservation for word in ("reservation", "max, pow2, oracle", "layout contiguous", "paged"))
    assert all(word in swap_space for word in ("swap_space", "16MiB, 64MiB", "preemption_mode swap", "recompute"))
    design = one_at_a_time({**PAGED, "swap_space": "64MiB"}, {"preemption_mode": ["swap"], "swap_space": ["32MiB"]})
    assert [dict(c.settings).get("swap_space") for c in design.configurations] == [None, "64MiB"]
    assert any("swap_space changes nothing (32MiB)" in note for note in design.notes)


def test_a_full_design_has_each_possible_engine_once():
    """Counted independently: over the resolved settings that an engine would really use."""
    sweep = {"layout": ["paged", "contiguous"], "enable_prefix_caching": [False, True], **EVERY}
    design = make_design(PAGED, sweep, LOADS, "full")
    engines = set()
    for values in itertools.product(*sweep.values()):
        e = dict(zip(sweep, values, strict=True))
        engines.add((
            e["layout"], e["enable_prefix_caching"] if e["layout"] == "paged" else None,
            e["reservation"] if e["layout"] == "contiguous" else None, e["kv_cache_dtype"],
            (e["preemption_mode"], e["swap_space"] if e["preemption_mode"] == "swap" else None),
            e["scheduling_policy"],
            (e["enable_chunked_prefill"], e["max_num_partial_prefills"] if e["enable_chunked_prefill"] else None),
            e["max_num_waiting"],
        ))  # fmt: skip
    # The baseline itself leaves swap_space out and preempts by recompute: it is one of them.
    assert len(design.configurations) == len(engines) == 5 * 5 * 3 * 2 * 3 * 2
    assert len(set(ids(design))) == len(engines)
    (note,) = design.notes
    for name in ("reservation", "swap_space", "max_num_partial_prefills", "enable_prefix_caching"):
        assert f"{name} (only with" in note
    assert "each is run once" in note


@pytest.mark.parametrize("settings", [c.settings for c in one_at_a_time(PAGED, EVERY).configurations])
def test_the_server_understands_the_command_line_of_every_configuration(settings):
    config, _ = options_of(build_parser().parse_args(command_line(dict(settings))))
    wanted = EngineConfig.from_mapping(settings)
    assert config == wanted


WORKLOAD = {
    "name": "tiny",
    "model": {"config": "llama-32m"},
    "engine": {"kv_budget": "65MiB", "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 128},
    "load": {
        "concurrency": 1,
        "num_requests": 2,
        "prompts": {
            "kind": "synthetic",
            "classes": [{"name": "a", "share": 1.0, "prompt_tokens": 8, "output_tokens": 8}],
        },
    },
}


def planned(tmp_path, **sections):
    """The design of a workload after everything that happens before a launch."""
    path = tmp_path / "w.yaml"
    path.write_text(yaml.safe_dump(WORKLOAD | sections))
    workload = load_workload(path, profile="cpu")
    design, _ = plan_sweep(workload, (), check_configuration)
    preflight(workload, design, check_configuration)
    return design


def test_a_combination_that_the_engine_refuses_is_skipped_with_its_sentence(tmp_path):
    sweep = {"enable_chunked_prefill": [True, False], "max_num_batched_tokens": [128, 256]}
    design = planned(tmp_path, sweep=sweep, design="full")
    assert ids(design) == ["paged", "paged-tokens256", "paged-unchunked-tokens256"]
    (note,) = [note for note in design.notes if note.startswith("skipped")]
    assert note.startswith("skipped paged-unchunked: max_num_batched_tokens 128 is less than max_model_len 256")
    assert {cell.configuration.config_id for cell in design.cells} == set(ids(design))


def test_a_run_with_skipped_combinations_is_resumed_and_ends_with_what_was_planned(tmp_path):
    sweep = {
        "enable_chunked_prefill": [True, False], "max_num_batched_tokens": [128, 256],
        "preemption_mode": ["recompute", "swap"], "swap_space": ["1MiB", 2**21],
        "kv_cache_dtype": ["auto", "int8_per_token_head"],
    }  # fmt: skip
    path = tmp_path / "w.yaml"
    path.write_text(yaml.safe_dump(WORKLOAD | {"sweep": sweep, "design": "full"}))
    workload = load_workload(path, profile="cpu")
    _, blocks = plan_sweep(workload, (), check_configuration)
    planned = [cell.cell_id for block in blocks for cell in block.cells]
    assert len(set(planned)) == 3 * 3 * 2  # without the unchunked ones of 128 tokens a step
    again = resolve(json.loads(json.dumps(workload.resolved)), profile="cpu", source=None)
    _, resumed = plan_sweep(again, (), check_configuration)
    assert [(b.block_id, [c.cell_id for c in b.cells]) for b in resumed] == [
        (b.block_id, [c.cell_id for c in b.cells]) for b in blocks
    ]


@pytest.mark.parametrize("design", ["full", "one_at_a_time"])
def test_a_value_that_is_refused_everywhere_is_an_error_and_not_skipped(tmp_path, design):
    with pytest.raises(UsageError, match=r"paged(-p16)?-fp9: kv_cache_dtype cannot be 'fp9': choose one of auto"):
        planned(tmp_path, sweep={"kv_cache_dtype": ["auto", "fp9"], "page_size": [16]}, design=design)


@pytest.mark.parametrize(
    ("name", "value", "alone", "beside_its_title"),
    [
        ("kv_cache_dtype", "fp8_e4m3", "FP8 KV (e4m3)", "FP8 KV (e4m3)"),
        ("kv_cache_dtype", None, "KV in the model's dtype", "KV in the model's dtype"),
        ("preemption_mode", "swap", "swap", "swap"),
        ("reservation", "oracle", "oracle reservation", "oracle"),
        ("enable_prefix_caching", True, "prefix caching", "on"),
        ("enable_chunked_prefill", False, "no chunked prefill", "off"),
        ("swap_space", "64MiB", "swap space 64MiB", "64MiB"),
        ("max_num_waiting", None, "default waiting limit", "the default"),
        ("num_threads", 2, "num_threads 2", "2"),
    ],
)
def test_words(name, value, alone, beside_its_title):
    assert value_words(name, value) == beside_its_title
    assert phrase(name, value) == alone


def test_a_combination_that_is_named_is_measured_though_each_value_is_measured_alone():
    text = (
        "{name: t, model: {config: llama-32m}, engine: {page_size: 16}, sweep: {page_size: [16, 32], kv_cache_dtype: "
        "[auto, fp8]}, load: {concurrency: 2, num_requests: 2, prompts: {kind: synthetic, classes: [{prompt_tokens: 8, "
        "output_tokens: 8}]}}}"
    )
    workload = load_workload("t", text=text, profile="cpu")
    design, _ = plan_sweep(workload)
    assert ids(design) == ["paged-p16", "paged-p32", "paged-p16-fp8_e4m3"]
    assert ["1 of 4 combinations" in note and "--design full" in note for note in design.notes] == [True]
    named, blocks = plan_sweep(workload, ["paged-p16-c2", "*p32-fp8*"])
    assert ids(named) == ["paged-p16", "paged-p32-fp8_e4m3"] and named.notes == ()
    refused, _ = plan_sweep(workload, refuses=lambda settings: "no FP8" if "kv_cache_dtype" in settings else None)
    assert len(refused.notes) == 1 and "no FP8" in refused.notes[0]  # what is left has no combinations
    assert {cell.cell_id for block in blocks for cell in block.cells} == {"paged-p16-c2", "paged-p32-fp8_e4m3-c2"}
    with pytest.raises(UsageError, match="p64"):
        plan_sweep(workload, ["*p64*"])
