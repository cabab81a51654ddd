"""What each preset launches, and what it refuses instead of running something else."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from engine.config import EngineConfig
from kvbench.targets.choose import arithmetic
from kvbench.targets.launch_plan import Launcher
from kvbench.targets.presets import PRESETS
from kvbench.targets.presets.preset import OF_THE_MODEL, Context
from kvbench.workload.design import make_design
from kvbench.workload.file import load_workload
from kvbench.workload.plan import without_refused

SETTINGS = {"model": "llama-32m", "layout": "paged", "device": "cpu", "page_size": 32, "max_num_seqs": 8}
CAPACITY = {"kv_budget_bytes": 97 << 20, "capacity_tokens": 6208, "num_pages": 194}


def context(capacity=CAPACITY, in_flight=8, **settings):
    return Context({**SETTINGS, **settings}, capacity, in_flight, "/opt/venv/bin/python")


def words(preset, **settings):
    where = context(**settings)
    assert PRESETS[preset].refusals(where) == []
    return " ".join(PRESETS[preset].launch_command(where, model="/m", port=81, scratch="/s"))


def reasons(preset, **settings):
    capacity = settings.pop("capacity", CAPACITY)
    in_flight = settings.pop("in_flight", 8)
    return PRESETS[preset].refusals(context(capacity, in_flight, **settings))


def test_vllm_gets_the_workloads_settings_in_its_own_words():
    line = words(
        "vllm", kv_budget="97MiB", kv_cache_dtype="fp8_e4m3", enable_prefix_caching=False, enable_chunked_prefill=True,
        max_model_len=2048, max_num_batched_tokens=512, dtype="float32", seed=3, scheduling_policy="priority",
    )  # fmt: skip
    assert line.startswith("/opt/venv/bin/python -m vllm.entrypoints.openai.api_server --model /m ")
    for expected in (
        "--port 81", "--block-size 32", "--kv-cache-memory-bytes 101711872", "--kv-cache-dtype fp8_e4m3",
        "--no-enable-prefix-caching", "--enable-chunked-prefill", "--max-model-len 2048", "--max-num-seqs 8",
        "--max-num-batched-tokens 512", "--dtype float32", "--seed 3", "--scheduling-policy priority",
    ):  # fmt: skip
        assert f" {expected}" in line


def test_vllms_cpu_build_is_given_all_cores_and_its_kv_budget_is_not_rounded_by_the_environment():
    variables = PRESETS["vllm"].launch_environment(context())
    assert variables["VLLM_CPU_KVCACHE_SPACE"] is None and variables["VLLM_SERVER_DEV_MODE"] == "1"
    assert int(variables["OMP_NUM_THREADS"]) >= 1
    assert PRESETS["vllm"].launch_environment(context(num_threads=1))["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in PRESETS["vllm"].launch_environment(context(device="cuda"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"page_size": 16}, "its CPU attention takes multiples of 32"),
        ({"page_size": 8, "device": "cuda"}, "its GPU attention takes multiples of 16"),
        ({"layout": "contiguous"}, "its KV cache is always paged"),
        ({"preemption_mode": "swap"}, "it preempts by recomputation only"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "its CPU backend has no such KV cache"),
        ({"async_scheduling": True}, "its CPU backend schedules synchronously"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 512, "max_model_len": 2048}, r"\(512 < 2048\)"),
    ],
)
def test_what_vllm_cannot_do_has_a_reason_that_names_setting_and_value(settings, why):
    (reason,) = reasons("vllm", **settings)
    name = next(iter(settings))
    assert reason.startswith(f"vLLM cannot have {name} {str(settings[name]).replace('True', 'true').lower()}: ")
    assert re.search(why, reason)


def test_a_device_that_is_left_open_is_the_cpu_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr("kvbench.targets.presets.preset.default_profile", lambda: "cpu")
    assert "CPU attention" in reasons("vllm", page_size=16, device="auto")[0]
    monkeypatch.setattr("kvbench.targets.presets.preset.default_profile", lambda: "gpu")
    assert reasons("vllm", page_size=16, device="auto") == []
    assert "CPU attention" in reasons("vllm", page_size=16, device="cpu")[0]


def test_on_a_gpu_vllm_can_do_more():
    assert not reasons("vllm", page_size=16, device="cuda", kv_cache_dtype="int8_per_token_head", async_scheduling=True)


def test_sglang_gets_the_budget_in_tokens_and_chunking_in_one_flag():
    line = words(
        "sglang", kv_budget="97MiB", enable_chunked_prefill=False, max_num_batched_tokens=512,
        enable_prefix_caching=False, scheduling_policy="priority", max_model_len=2048,
    )  # fmt: skip
    for expected in (
        "--max-total-tokens 6208", "--chunked-prefill-size -1", "--disable-radix-cache", "--page-size 32",
        "--enable-priority-scheduling --schedule-low-priority-values-first", "--context-length 2048",
        "--max-running-requests 8", "--enable-metrics", "--device cpu",
    ):  # fmt: skip
        assert f" {expected}" in line
    assert "--chunked-prefill-size 512" in words("sglang", max_num_batched_tokens=512)
    assert "cannot be worked out" in reasons("sglang", kv_budget="1GiB", capacity={})[0]
    assert len(reasons("sglang", layout="contiguous", kv_cache_dtype="int4_per_token_head")) == 2


def test_tgi_and_llamacpp_say_what_they_have_no_word_for():
    assert "the page size follows" in reasons("tgi", device="auto")[0]
    assert "needs an accelerator" in " ".join(reasons("tgi"))
    where = {"layout": "paged", "device": "auto", "max_num_seqs": 8, "max_model_len": 2048, "kv_budget": "97MiB"}
    line = PRESETS["tgi"].launch_command(Context(where, CAPACITY, 8, "launch"), model="/m", port=81)
    assert " ".join(line).startswith("launch --model-id /m --hostname 127.0.0.1 --port 81")
    assert " --max-batch-total-tokens 6208" in " ".join(line)
    assert " --max-total-tokens 2048 --max-input-tokens 2047" in " ".join(line)
    line = PRESETS["llamacpp"].launch_command(
        Context(where, CAPACITY, 8, "srv"), model="/m.gguf", port=81, scratch="/s"
    )
    assert " --ctx-size 6208" in " ".join(line) and " --slot-save-path /s" in " ".join(line)
    assert "quantised KV caches" in reasons("llamacpp", kv_cache_dtype="fp8_e4m3")[-1]


def test_tgi_refuses_no_request_that_it_could_queue():
    variables = PRESETS["tgi"].launch_environment(context())
    assert int(variables["MAX_CONCURRENT_REQUESTS"]) >= 10_000  # its own limit is 128


def test_transformers_is_not_told_of_a_limit_that_the_load_never_reaches():
    line = words("transformers", enable_prefix_caching=True, kv_budget="97MiB", max_num_batched_tokens=512)
    assert line.startswith("/opt/venv/bin/python -m transformers.cli.transformers serve /m --continuous-batching")
    assert " --cb-block-size 32" in line and " --cb-num-blocks 194" in line and " --cb-max-batch-tokens 512" in line
    assert "may have more requests in flight" in reasons("transformers", in_flight=9)[0]
    assert "may have more requests in flight" in reasons("transformers", in_flight=None)[0]
    assert "cannot say no" in reasons("transformers", enable_prefix_caching=False)[0]


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_is_passed_over_in_silence(name):
    """Every setting of the engine either reaches the command or environment, or is known to need no words, or is
    refused. A setting that nobody has thought of is refused."""
    preset = PRESETS[name]
    for field in dataclasses.fields(EngineConfig):
        if field.name not in preset.settings and field.name not in OF_THE_MODEL:
            (reason,) = preset.refusals(Context({field.name: "x"}))
            assert reason == f"{preset.title} cannot have {field.name} x: it has no such setting"
    assert set(preset.settings) <= {f.name for f in dataclasses.fields(EngineConfig)}


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_swept_changes_the_launch_or_is_refused(name):
    preset = PRESETS[name]
    base = {"device": "auto", "max_num_batched_tokens": 4096, "max_model_len": 2048}
    for setting, one, other in (
        ("page_size", 32, 64), ("kv_cache_dtype", "auto", "fp8_e5m2"), ("enable_prefix_caching", True, False),
        ("enable_chunked_prefill", True, False), ("max_num_seqs", 4, 8), ("preemption_mode", "recompute", "swap"),
        ("layout", "paged", "contiguous"), ("scheduling_policy", "fcfs", "priority"),
        ("max_num_batched_tokens", 4096, 8192),
        ("kv_budget", "1MiB", "2MiB"),
    ):  # fmt: skip
        launches = []
        for value in (one, other):
            tokens = {"1MiB": 1000, "2MiB": 2000}.get(value, 1000)
            known = {"kv_budget_bytes": tokens * 1024, "capacity_tokens": tokens, "num_pages": tokens // 16}
            where = Context({**base, setting: value}, known, 64, "p")
            if preset.refusals(where):
                launches.append(value)  # skipped, which nobody takes for a measurement
                continue
            command = preset.launch_command(where, model="/m", port=1)
            launches.append((command, tuple(sorted(preset.launch_environment(where).items(), key=str))))
        assert launches[0] != launches[1], setting


def test_the_nearest_baseline_says_what_was_changed():
    where = context(page_size=8, kv_cache_dtype="int4_per_token_head", preemption_mode="swap", swap_space="1GiB")
    settings, changes = PRESETS["vllm"].nearest(where)
    assert settings["page_size"] == 32 and settings["kv_cache_dtype"] == "auto"
    assert settings["preemption_mode"] == "recompute" and "swap_space" not in settings
    assert PRESETS["vllm"].refusals(dataclasses.replace(where, settings=settings)) == []
    assert "page_size is 32 instead of 8" in changes and "swap_space 1GiB is left to vLLM" in changes
    assert PRESETS["vllm"].nearest(context(page_size=40))[0]["page_size"] == 32
    assert PRESETS["vllm"].nearest(context(page_size=56))[0]["page_size"] == 64
    assert PRESETS["vllm"].nearest(context())[1] == []


def test_a_value_that_is_a_list_is_refused_as_any_other():
    (refused,) = PRESETS["vllm"].refusals(context(layout=["paged"]))
    assert refused.startswith("vLLM cannot have layout ['paged']: its KV cache is always paged")


# Every shipped workload on every preset: what `kvbench sweep W --target NAME` would do, as a table. A cell is what
# becomes of the baseline: "" as it is, else the settings that change, or "refused".
WORKLOADS = Path(__file__).parents[3] / "workloads"
NAMES = sorted(path.stem for path in WORKLOADS.glob("*.yaml") if path.stem != "ci_counters")  # which sweeps nothing
COLUMNS = ("vllm", "sglang", "tgi", "llamacpp", "transformers")
# transformers serve: no limit of sequences but the load's own, and prefix caching cannot be switched off
USUAL = {
    "cpu": ("page_size", "", "refused", "page_size", "enable_prefix_caching max_num_seqs"),
    "gpu": ("", "", "page_size", "page_size", "enable_prefix_caching max_num_seqs"),
}
CONTIGUOUS = "layout reservation"  # its baseline is the contiguous layout, and it says nothing of prefix caching
TABLE = {(name, profile): row for name in NAMES for profile, row in USUAL.items()} | {
    ("reservations", "cpu"): (
        f"{CONTIGUOUS} page_size", CONTIGUOUS, "refused", f"{CONTIGUOUS} page_size", f"{CONTIGUOUS} max_num_seqs"
    ),
    ("reservations", "gpu"): (
        CONTIGUOUS, CONTIGUOUS, f"{CONTIGUOUS} page_size", f"{CONTIGUOUS} page_size", f"{CONTIGUOUS} max_num_seqs"
    ),
}  # fmt: skip


def launched(name, profile, preset):
    """The workload's engine section with its device said, and the launcher for it."""
    workload = load_workload(WORKLOADS / f"{name}.yaml", profile=profile)
    settings = {**workload.engine, "device": "cpu" if profile == "cpu" else "cuda"}
    return workload, settings, Launcher(PRESETS[preset], "program", arithmetic)


def becomes(name, profile, preset):
    _, settings, launcher = launched(name, profile, preset)
    if launcher.refusal(settings) is None:
        return ""
    near, changes = launcher.nearest(settings)
    if launcher.refusal(near) is not None:
        return "refused"
    changed = {key for key in settings if near.get(key) != settings[key]}
    assert changed == {re.match(r"\w+", change)[0] for change in changes}  # each is said
    return " ".join(sorted(changed))


@pytest.mark.parametrize("preset", COLUMNS)
def test_the_first_command_a_user_types(preset):
    column = COLUMNS.index(preset)
    found = {row: becomes(*row, preset) for row in TABLE}
    assert found == {row: " ".join(sorted(cells[column].split())) for row, cells in TABLE.items()}


def test_a_server_for_gpus_says_so_on_a_machine_without():
    _, settings, launcher = launched("mixed", "cpu", "tgi")
    left = launcher.refusal(launcher.nearest(settings)[0])
    assert "TGI cannot have device cpu: its launcher needs an accelerator" in left
    assert "seed" not in left and "preemption_mode" not in left  # they change nothing there


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("preset", "cells"),
    [
        ("vllm", {"cpu": ["paged-p32", "paged-p64", "paged-p32-prefix", "paged-p32-fp8_e4m3"],
                  "gpu": ["paged-p16", "paged-p64", "paged-p16-prefix", "paged-p16-fp8_e4m3",
                          "paged-p16-int8_per_token_head"]}),
        ("sglang", {"cpu": ["paged-p16", "paged-p8", "paged-p64", "paged-p16-prefix", "paged-p16-fp8_e4m3"],
                    "gpu": ["paged-p16", "paged-p8", "paged-p64", "paged-p16-prefix", "paged-p16-fp8_e4m3"]}),
    ],
)  # fmt: skip
def test_what_is_left_of_the_mixed_sweep(preset, cells, profile):
    workload, settings, launcher = launched("mixed", profile, preset)
    near, _ = launcher.nearest(settings)
    design = without_refused(make_design(near, workload.sweep, workload.load_points, workload.design), launcher.refusal)
    assert sorted(c.config_id for c in design.configurations) == sorted(cells[profile])
    assert all(note.startswith("skipped ") and "cannot have" in note for note in design.notes)
