"""Adapters of engines that need a GPU, against stand-ins of these engines: every point of check-engine, and more."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbench.lockstep.conformance import FAILED, NOT_OFFERED, check_engine
from kvbench.lockstep.process import EngineProcess, EngineRefusedError
from kvbench.runs.results import Capacity
from kvbench.targets.preset import ADAPTERS, LOOP, Context
from kvbench.targets.presets import PRESETS
from tests.support.standin_engines import BLOCK_BYTES, EOS, VOCAB, StandinCuda, install, next_token

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = {
    "nano_vllm": {"page_size": 256, "max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 1100,
                  "layout": "paged", "enable_prefix_caching": True, "cuda_graphs": False, "kv_budget": "8MiB",
                  "dtype": "bfloat16", "model": "tiny", "num_threads": None},
}  # fmt: skip
ARGUMENTS = {
    "nano_vllm": (),
    "mini_sglang": ("--page-size", "4", "--max-running-requests", "2", "--max-prefill-length", "8", "--port", "0",
                    "--max-seq-len-override", "256", "--num-pages", "100"),
    "sglang": ("--page-size", "4", "--max-running-requests", "2", "--chunked-prefill-size", "8", "--port", "0",
               "--context-length", "256", "--max-total-tokens", "400", "--enable-metrics"),
    "vllm": ("--block-size", "4", "--max-num-seqs", "2", "--max-num-batched-tokens", "8", "--max-model-len", "256",
             "--kv-cache-memory-bytes", str(100 * 4 * BLOCK_BYTES // 256), "--port", "0", "--enforce-eager"),
}  # fmt: skip
ARGUMENTS["vllm_031"] = ARGUMENTS["vllm"]
ENGINES = list(ARGUMENTS)


def launch(engine, folder, *more):
    """Returns the command and the environment of an adapter's process whose engine is the stand-in."""
    install(engine, folder / "modules")
    model = "--model-path" if engine == "sglang" else "--model"
    adapter = ADAPTERS / f"{engine.removesuffix('_031')}_engine.py"
    command = [sys.executable, str(LOOP), str(adapter), model, str(folder)]
    path = os.pathsep.join(map(str, (folder / "modules", ROOT)))
    return [*command, *ARGUMENTS[engine], *more], {"PYTHONPATH": path}


@pytest.fixture
def opened(tmp_path):
    """Opens an engine with more arguments: what it says of itself, and a function that computes a load."""

    @contextmanager
    def start(engine, *more, **settings):
        command, env = launch(engine, tmp_path, *more)
        with EngineProcess(command, tmp_path / "log", env=env) as process:
            process.greet()
            given = {**SETTINGS.get(engine, {}), **settings}
            described = process.ask(do="open", name="e", settings=given)

            def compute(*requests, users=1, ignore_eos=True, keep_cache=False, temperature=0.0):
                rows = [[list(prompt), tokens, None, *(rest or [0])] for prompt, tokens, *rest in requests]
                process.ask(do="load", name="e", requests=rows, concurrency=users, temperature=temperature,
                            ignore_eos=ignore_eos, keep_cache=keep_cache)  # fmt: skip
                answer = process.ask(do="turn", name="e", steps=400)
                assert answer["ended"]
                return answer["steps"], process.ask(do="result", name="e")["requests"]

            yield described, compute

    return start


def expected(prompt, tokens):
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_point_that_the_adapter_offers_passes(engine, tmp_path):
    command, env = launch(engine, tmp_path)
    results = list(check_engine(command, SETTINGS.get(engine, {}), tmp_path / "log", env))
    assert not [result for result in results if result.outcome == FAILED]
    not_offered = [result.title for result in results if result.outcome == NOT_OFFERED]
    lacks = [] if engine.startswith("vllm") else ["A request of two answers has two sequences"]
    assert not_offered == lacks and len(results) == 11


@pytest.mark.parametrize("engine", ENGINES)
def test_it_says_which_settings_are_in_effect_and_generates_the_models_tokens(engine, opened, tmp_path):
    page, chunk, length = (256, 64, 1100) if engine == "nano_vllm" else (4, 8, 256)
    pages = 8 * 2**20 // BLOCK_BYTES if engine == "nano_vllm" else 100
    with opened(engine) as (described, compute):
        steps, rows = compute((range(20, 60), 3), (range(5, 10), 4))
    expected_settings = {"page_size": page, "max_num_seqs": 2, "max_num_batched_tokens": chunk,
                         "max_model_len": length, "enable_prefix_caching": True}  # fmt: skip
    assert described["engine"].items() >= expected_settings.items()
    assert described["model"] == {"name": str(tmp_path), "vocab_size": VOCAB, "max_model_len": length}
    assert described["capacity"] == {"page_size": page, "num_pages": pages, "capacity_tokens": page * pages}
    assert described["resolved"] == {"device": "cuda", "dtype": "bfloat16"}
    assert all(described["versions"].values())
    assert [row[6] for row in rows] == [expected(range(20, 60), 3), expected(range(5, 10), 4)]
    assert [row[5] for row in rows] == ["length"] * 2
    chunks = 1 if engine == "nano_vllm" else 5
    assert [step[3] for step in steps[:chunks]] == [0] * (chunks - 1) + [1]  # the prompt's chunks make no token


@pytest.mark.parametrize("engine", ENGINES)
def test_two_requests_run_at_once_and_a_third_waits(engine, opened):
    with opened(engine) as (_, compute):
        steps, rows = compute(*[([30 + i] * 3, 6) for i in range(3)], users=3)
    assert max(step[3] for step in steps) == 2 and [len(row[6]) for row in rows] == [6] * 3
    assert rows[2][2][0] > min(rows[0][2][-1], rows[1][2][-1])


@pytest.mark.parametrize("engine", ENGINES)
def test_an_end_of_sequence_stops_where_it_is_not_ignored(engine, opened):
    prompt = next([8, last] for last in range(8, VOCAB) if expected([8, last], 2)[1] == EOS)
    with opened(engine) as (_, compute):
        (row,) = compute((prompt, 3), ignore_eos=False, temperature=0.7)[1]
        (whole,) = compute((prompt, 3))[1]
        (ignored,) = compute((prompt, 2))[1]
        (last,) = compute((prompt, 1), ignore_eos=False)[1]
    assert (row[5], row[6]) == ("stop", expected(prompt, 2))
    assert (whole[5], whole[6]) == ("length", expected(prompt, 3))
    assert (ignored[5], ignored[6]) == ("length", expected(prompt, 2))
    assert (last[5], last[6]) == ("length", expected(prompt, 1))


@pytest.mark.parametrize("engine", ENGINES)
def test_cached_tokens_are_those_of_this_load_and_of_whole_pages(engine, opened):
    page = 256 if engine == "nano_vllm" else 4
    first, other = [9 + i % 90 for i in range(2 * page + 1)], [8] * (2 * page)
    with opened(engine) as (_, compute):
        cold = compute((first, 2), (first, 2))[1]
        warm = compute((first, 2), (other, 2), keep_cache=True)[1]
        emptied = compute((first, 2))[1]
    assert [row[4] for row in cold + warm + emptied] == [0, 2 * page, 2 * page, 0, 0]


@pytest.mark.parametrize("engine", ["nano_vllm", "mini_sglang", "sglang"])
def test_a_request_beyond_the_length_is_one_sentence_and_the_next_load_runs(engine, opened):
    length = 1100 if engine == "nano_vllm" else 256
    with opened(engine) as (_, compute):
        for prompt, tokens in ((length - 4, 5), (length + 1, 1)):
            with pytest.raises(EngineRefusedError, match=rf"{prompt} \+ {tokens} tokens: \d+ are possible"):
                compute(([8] * prompt, tokens))
        (row,) = compute(([8] * (length - 20), 10))[1]
    assert len(row[6]) == 10


@pytest.mark.parametrize("engine", ENGINES)
def test_arguments_that_it_does_not_take_are_one_sentence(engine, opened):
    with pytest.raises(EngineRefusedError, match=r"does not take these arguments: .* --no-such-flag"):
        opened(engine, "--no-such-flag").__enter__()


@pytest.mark.parametrize(
    ("engine", "words"),
    [("mini_sglang", ("--tensor-parallel-size", "2")), ("sglang", ("--tp-size", "2")), ("sglang", ("--pp-size", "2"))],
)
def test_several_gpus_are_refused(engine, words, opened):
    with pytest.raises(EngineRefusedError, match=rf"steps one GPU: leave .*{words[0]}"):
        opened(engine, *words).__enter__()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scheduling_policy": "priority"}, "cannot have scheduling_policy priority: leave it out"),
        ({"enable_prefix_caching": False}, "cannot have enable_prefix_caching False"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "cannot have kv_cache_dtype fp8_e4m3"),
        ({"swap_space": "1GiB"}, "cannot have swap_space 1GiB"),
        ({"device": "cpu"}, "cannot have device cpu"),
        ({"dtype": "float32"}, "has the model folder's dtype, bfloat16: leave float32 out"),
        ({"page_size": 16}, "does not take these settings"),
        ({"kv_budget": "1KiB"}, "does not take these settings"),
    ],
)
def test_settings_that_nano_vllm_cannot_have_are_named(settings, words, opened):
    with pytest.raises(EngineRefusedError, match=words):
        opened("nano_vllm", **settings).__enter__()


@pytest.mark.parametrize("budget", [33 * BLOCK_BYTES, f"{33 * BLOCK_BYTES // 1024}KiB"])  # 33: 32 if rounded down
def test_the_kv_budget_of_nano_vllm_is_held_beside_another_process(budget, opened):
    with opened("nano_vllm", "--gpu-memory-utilization", "0.95", kv_budget=budget) as (described, _):
        assert described["capacity"]["num_pages"] == 33
    assert described["engine"]["max_num_seqs"] == 2


def test_without_a_budget_nano_vllm_takes_its_share_of_the_memory(opened, tmp_path):
    with opened("nano_vllm", kv_budget=None) as (described, _):
        assert described["capacity"]["num_pages"] == int(StandinCuda.total * 0.9 - (62 << 30)) // BLOCK_BYTES


def test_two_engines_of_vllm_with_bytes_of_kv_fit_one_gpu_and_a_share_that_is_given_is_kept(opened):
    with opened("vllm") as (described, _):  # 42 GiB of 140 are free there
        assert described["engine"]["async_scheduling"] is True
    refused = pytest.raises(EngineRefusedError, match="less than desired GPU memory utilization")
    with refused:
        opened("vllm", "--gpu-memory-utilization=0.9").__enter__()


def test_the_prefix_cache_of_mini_sglang_and_of_sglang_can_be_off(opened, tmp_path):
    prompt = ([9 + i for i in range(20)], 2)
    for engine, words in (("mini_sglang", ("--cache-type", "naive")), ("sglang", ("--disable-radix-cache",))):
        folder = tmp_path / engine
        folder.mkdir()
        command, env = launch(engine, folder, *words)
        with EngineProcess(command, folder / "log", env=env) as process:
            process.greet()
            assert process.ask(do="open", name="e", settings={})["engine"]["enable_prefix_caching"] is False
            process.ask(do="load", name="e", requests=[[*prompt, None, 0]] * 2, concurrency=1, temperature=0.0,
                        ignore_eos=True, keep_cache=False)  # fmt: skip
            assert process.ask(do="turn", name="e", steps=50)["ended"]
            assert [row[4] for row in process.ask(do="result", name="e")["requests"]] == [0, 0]


def test_priorities_of_sglang_need_its_flag_and_the_lower_is_served_first(opened):
    requests = [([30 + i] * 3, 4, 5 - i) for i in range(4)]
    with opened("sglang") as (_, compute), pytest.raises(EngineRefusedError, match="--enable-priority-scheduling only"):
        compute(*requests, users=4)


def test_the_lower_priority_is_served_first(opened):
    requests = [([30 + i] * 3, 4, 5 - i) for i in range(4)]
    with opened("sglang", "--enable-priority-scheduling", "--schedule-low-priority-values-first") as (_, compute):
        rows = compute(*requests, users=4)[1]
    assert max(row[2][-1] for row in rows[2:]) < min(row[2][0] for row in rows[:2])


def test_what_sglang_would_cut_short_or_abort_is_refused_before_it_is_sent(opened):
    limits = {(249, 6): r"249 \+ 6 tokens: 254 are possible", (250, 1): "a prompt of 250 tokens: 249 are possible"}
    with opened("sglang") as (_, compute):
        for (prompt, tokens), words in limits.items():
            with pytest.raises(EngineRefusedError, match=words):
                compute(([8] * prompt, tokens))
        (row,) = compute(([8] * 249, 5))[1]
    assert len(row[6]) == 5


def test_a_full_queue_of_sglang_is_one_sentence(opened):
    refused = pytest.raises(EngineRefusedError, match="SGLang refused a request: The request queue is full")
    with opened("sglang", "--max-queued-requests", "1") as (_, compute), refused:
        compute(([30] * 3, 1), ([31] * 3, 1), users=2)


def test_the_launch_command_of_the_sglang_preset_is_taken(opened, tmp_path):
    settings = {"page_size": 16, "kv_budget": "1MiB", "enable_prefix_caching": False, "max_model_len": 128,
                "max_num_seqs": 3, "max_num_batched_tokens": 32, "enable_chunked_prefill": False, "dtype": "float16",
                "kv_cache_dtype": "fp8_e5m2", "device": "cpu", "seed": 3, "scheduling_policy": "priority",
                "max_num_waiting": 9, "cuda_graphs": False}  # fmt: skip
    where = Context(settings, Capacity(capacity_tokens=160), None, "PROGRAM")
    _, _, _, *words = PRESETS["sglang"].launch_command(where, model=str(tmp_path), port=0, scratch="/s")
    with opened("sglang", *words) as (described, compute):
        assert [len(row[6]) for row in compute(([30] * 20, 3))[1]] == [3]
    assert described["engine"] == {
        "page_size": 16, "max_num_seqs": 3, "max_model_len": 128, "enable_prefix_caching": False,
        "kv_cache_dtype": "fp8_e5m2", "async_scheduling": True,
    }  # fmt: skip
    assert described["capacity"]["num_pages"] == 10 and described["resolved"]["device"] == "cpu"
