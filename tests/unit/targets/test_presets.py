"""What each preset launches, and what it refuses instead of running something else."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from kvbench.runs.results import Capacity
from kvbench.targets.choose import arithmetic
from kvbench.targets.launch_plan import Launcher
from kvbench.targets.preset import MODEL_SETTINGS, Context
from kvbench.targets.presets import PRESETS
from kvbench.workload.design import make_design, without_refused
from kvbench.workload.file import load_workload
from kvbench_engine.config import EngineConfig

SETTINGS = {"model": "llama-32m", "layout": "paged", "device": "cpu", "page_size": 32, "max_num_seqs": 8}
ON_GPU = {"layout": "paged", "device": "auto", "max_num_seqs": 8, "max_model_len": 2048, "kv_budget": "97MiB"}
CAPACITY = Capacity(kv_budget_bytes=97 << 20, capacity_tokens=6208, num_pages=194)


def context(capacity=CAPACITY, in_flight=8, **settings):
    return Context({**SETTINGS, **settings}, capacity, in_flight, "/opt/venv/bin/python")


def reasons(preset, **more):
    return PRESETS[preset].refusals(context(**more))


@pytest.mark.parametrize(
    ("preset", "settings", "begins", "expected"),
    [
        (
            "vllm",
            SETTINGS | {
                "kv_budget": "97MiB", "kv_cache_dtype": "fp8_e4m3", "enable_prefix_caching": False, "seed": 3,
                "enable_chunked_prefill": True, "max_model_len": 2048, "max_num_batched_tokens": 512,
                "dtype": "float32", "scheduling_policy": "priority",
            },
            "PROGRAM -m vllm.entrypoints.openai.api_server --model /m ",
            "--port 81, --block-size 32, --kv-cache-memory-bytes 101711872, --kv-cache-dtype fp8_e4m3, --seed 3, "
            "--no-enable-prefix-caching, --enable-chunked-prefill, --max-model-len 2048, --max-num-seqs 8, "
            "--max-num-batched-tokens 512, --dtype float32, --scheduling-policy priority",
        ),
        (
            "sglang",
            SETTINGS | {
                "kv_budget": "97MiB", "enable_chunked_prefill": False, "max_num_batched_tokens": 512,
                "enable_prefix_caching": False, "scheduling_policy": "priority", "max_model_len": 2048,
            },
            "PROGRAM -m sglang.launch_server --model-path /m ",
            "--max-total-tokens 6208, --chunked-prefill-size -1, --disable-radix-cache, --page-size 32, "
            "--enable-priority-scheduling --schedule-low-priority-values-first, --context-length 2048, "
            "--max-running-requests 8, --enable-metrics, --device cpu",
        ),
        ("sglang", SETTINGS | {"max_num_batched_tokens": 512}, "PROGRAM", "--chunked-prefill-size 512"),
        (
            "tgi", ON_GPU, "PROGRAM --model-id /m --hostname 127.0.0.1 --port 81",
            "--max-batch-total-tokens 6208, --max-total-tokens 2048 --max-input-tokens 2047",
        ),
        (  # it would round 6,208 tokens up to 6,400, and its KV cache is float16 where nothing is said
            "llamacpp", ON_GPU | {"dtype": "float32"}, "PROGRAM --model /m ",
            "--ctx-size 6144, --slot-save-path /s, --cache-type-k f32 --cache-type-v f32",
        ),
        (
            "transformers",
            SETTINGS | {"enable_prefix_caching": True, "kv_budget": "97MiB", "max_num_batched_tokens": 512},
            "PROGRAM -m transformers.cli.transformers serve /m --continuous-batching",
            "--cb-block-size 32, --cb-num-blocks 194, --cb-max-batch-tokens 512",
        ),
    ],
)  # fmt: skip
def test_a_server_gets_the_settings_in_its_own_words(preset, settings, begins, expected):
    where = Context(settings, CAPACITY, 8, "PROGRAM")
    assert PRESETS[preset].refusals(where) == []
    line = " ".join(PRESETS[preset].launch_command(where, model="/m", port=81, scratch="/s"))
    assert line.startswith(begins) and all(f" {words}" in line for words in expected.split(", "))


def test_a_budget_below_what_a_server_can_have_is_refused():
    small = Context({"kv_budget": "1MiB"}, Capacity(capacity_tokens=255), None, "PROGRAM")
    (reason,) = PRESETS["llamacpp"].refusals(small)  # --ctx-size 0 would be the model's own length
    assert "multiples of 256" in reason and "255" in reason


def test_environments_of_the_launch():
    vllm = PRESETS["vllm"].launch_environment(context())  # its CPU build: all cores, and no budget in whole GiB
    assert vllm["VLLM_CPU_KVCACHE_SPACE"] is None and vllm["VLLM_SERVER_DEV_MODE"] == "1"
    assert int(vllm["OMP_NUM_THREADS"]) >= 1
    assert PRESETS["vllm"].launch_environment(context(num_threads=1))["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in PRESETS["vllm"].launch_environment(context(device="cuda"))
    assert int(PRESETS["tgi"].launch_environment(context())["MAX_CONCURRENT_REQUESTS"]) >= 10_000  # 128 by default


@pytest.mark.parametrize(
    ("preset", "settings", "why"),
    [
        ("vllm", {"page_size": 16}, "its CPU attention takes multiples of 32"),
        ("vllm", {"page_size": 8, "device": "cuda"}, "its GPU attention takes multiples of 16"),
        ("vllm", {"layout": "contiguous"}, "its KV cache is always paged"),
        ("vllm", {"preemption_mode": "swap"}, "it preempts by recomputation only"),
        ("vllm", {"kv_cache_dtype": "int8_per_token_head"}, "its CPU backend has no such KV cache"),
        ("vllm", {"async_scheduling": True}, "its CPU backend schedules synchronously"),
        ("vllm", {"enable_chunked_prefill": False, "max_num_batched_tokens": 512, "max_model_len": 2048}, "512 < 2048"),
        ("sglang", {"kv_budget": "1GiB", "capacity": Capacity()}, "cannot be worked out"),
        ("sglang", {"kv_cache_dtype": "int4_per_token_head"}, "no such KV cache"),
        ("sglang", {"enable_chunked_prefill": False}, "max_num_batched_tokens must be given"),
        ("tgi", {"page_size": 32, "device": "cuda"}, "the page size follows"),
        ("llamacpp", {"kv_cache_dtype": "fp8_e4m3", "page_size": None}, "quantised KV caches"),
        ("llamacpp", {"dtype": "float64", "page_size": None}, "float32, float16 or bfloat16"),
        ("transformers", {"max_num_seqs": 8, "in_flight": 9}, "may have more requests in flight"),
        ("transformers", {"enable_prefix_caching": False}, "cannot say no"),
    ],
)
def test_what_a_server_cannot_do_has_a_reason_that_names_setting_and_value(preset, settings, why):
    (reason,) = reasons(preset, **settings)
    name, value = next(iter(settings.items()))
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    assert reason.startswith(f"{PRESETS[preset].title} cannot have {name} {shown}: ") and why in reason


@pytest.mark.parametrize("preset", PRESETS)
def test_how_another_server_keeps_latent_attention_is_its_own(preset):
    own = "how it keeps latent attention is its own"
    title = PRESETS[preset].title
    assert f"{title} cannot have latent_kv false: {own}" in "".join(reasons(preset, latent_kv=False))
    assert "latent_kv" not in "".join(reasons(preset, latent_kv=True))


def test_a_device_that_is_left_open_is_the_cpu_where_there_is_no_gpu(monkeypatch):
    for profile, refused in (("cpu", True), ("gpu", False)):
        monkeypatch.setattr("kvbench.workload.file.default_profile", lambda profile=profile: profile)
        assert bool(reasons("vllm", page_size=16, device="auto")) is refused
        assert "CPU attention" in reasons("vllm", page_size=16, device="cpu")[0]
    assert not reasons("vllm", page_size=16, device="cuda", kv_cache_dtype="int8_per_token_head", async_scheduling=True)


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_is_passed_over_in_silence(name):
    """Every setting of the engine either reaches the command or environment, or is known to need no words, or is
    refused. A setting that nobody has thought of is refused."""
    preset = PRESETS[name]
    for field in dataclasses.fields(EngineConfig):
        if field.name not in preset.settings and field.name not in MODEL_SETTINGS:
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
        ("max_num_batched_tokens", 4096, 8192), ("kv_budget", "1MiB", "2MiB"),
    ):  # fmt: skip
        launches = []
        for value in (one, other):
            tokens = 2000 if value == "2MiB" else 1000
            known = Capacity(kv_budget_bytes=tokens * 1024, capacity_tokens=tokens, num_pages=tokens // 16)
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
    if (left := launcher.refusal(near)) is not None:
        assert "TGI cannot have device cpu" in left
        assert "seed" not in left and "preemption_mode" not in left  # they change nothing there
        return "refused"
    changed = {key for key in settings if near.get(key) != settings[key]}
    assert changed == {re.match(r"\w+", change)[0] for change in changes}  # each is said
    return " ".join(sorted(changed))


@pytest.mark.parametrize("preset", COLUMNS)
def test_the_first_command_a_user_types(preset):
    column = COLUMNS.index(preset)
    found = {row: becomes(*row, preset) for row in TABLE}
    assert found == {row: " ".join(sorted(cells[column].split())) for row, cells in TABLE.items()}


@pytest.mark.parametrize(
    ("preset", "profile", "baseline", "others"),
    [
        ("vllm", "cpu", "paged-p32", "paged-p64 paged-p32-prefix paged-p32-fp8_e4m3"),
        ("sglang", "cpu", "paged-p16", "paged-p8 paged-p64 paged-p16-prefix paged-p16-fp8_e4m3"),
    ],
)
def test_what_is_left_of_the_mixed_sweep(preset, profile, baseline, others):
    workload, settings, launcher = launched("mixed", profile, preset)
    near, _ = launcher.nearest(settings)
    design = without_refused(make_design(near, workload.sweep, workload.load_points, workload.design), launcher.refusal)
    assert {c.config_id for c in design.configurations} == {baseline, *others.split()}
    assert all(note.startswith("skipped ") and "cannot have" in note for note in design.notes)
