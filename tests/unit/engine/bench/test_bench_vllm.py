"""vLLM as a side, with a stand-in for its environment: the job it gets, and which results count."""

import json
import os
import runpy
import stat
import sys
import types
from importlib.metadata import distributions

import pytest

from kvbench_engine.bench.case import PromptBatch
from kvbench_engine.bench.vllm_peer import SCRIPT, VllmPeer, preloaded, speed_settings, vllm_version

CASE = PromptBatch(((1, 2, 3), (4,)), 2)


@pytest.fixture
def peer(tmp_path):
    """A peer whose python is the given shell script; ``$4`` is the job, ``$5`` where the result belongs."""

    def make(script):
        python = tmp_path / "venv" / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        return VllmPeer(python, tmp_path / "model", tmp_path, "float32", 3 * 2**29, 576, 32, 2, 60.0)

    return make


def answer(seconds, outputs):
    return "echo '" + json.dumps({"seconds": seconds, "outputs": outputs, "version": "0"}) + "' > $4"


def test_the_job_that_vllm_gets_and_a_turn_is_measured_by_its_own_clock(peer, tmp_path):
    side = peer(f'[ "$1" = -I ] && [ "$2" = {SCRIPT} ] && ' + answer(0.25, [[5, 6], [7, 8]]))
    assert side.measure("vllm-eager", CASE) == (16.0, [[5, 6], [7, 8]])
    job = json.loads((tmp_path / "vllm-eager-job.json").read_text())
    assert job["prompts"] == [[1, 2, 3], [4]] and job["output_tokens"] == 2
    assert job["llm"] == {
        "model": str(tmp_path / "model"), "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 576,
        "max_num_seqs": 32, "enable_prefix_caching": False, "enforce_eager": True, "seed": 0,
    }  # fmt: skip
    assert peer("").job("vllm", CASE)["llm"]["enforce_eager"] is False


def test_cores_and_memory_are_the_comparisons_and_nothing_else_is_taken_from_the_user(peer, tmp_path):
    side = peer("")
    user = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    given = side.environment({"PATH": "/bin", "VLLM_CPU_OMP_THREADS_BIND": "0-1", **user})
    assert given["OMP_NUM_THREADS"] == given["MKL_NUM_THREADS"] == "2" and "OMP_THREAD_LIMIT" not in given
    assert given["VLLM_CPU_KVCACHE_SPACE"] == "2"  # 1.5 GiB in whole ones, never less
    assert given["PATH"] == "/bin" and given["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    cores = side.environment({})["VLLM_CPU_OMP_THREADS_BIND"].split(",")  # else it computes on one of two cores
    assert len(cores) == min(2, len(os.sched_getaffinity(0))) and set(map(int, cores)) <= os.sched_getaffinity(0)
    assert given["HF_HUB_OFFLINE"] == "1" and given["VLLM_CACHE_ROOT"].startswith(str(tmp_path))
    recorded = speed_settings({**given, "LD_PRELOAD": "/a/b/libiomp5.so:/c/libx.so", "HOME": "/home/me"})
    assert (recorded["OMP_NUM_THREADS"], recorded["LD_PRELOAD"]) == ("2", "libiomp5.so:libx.so")
    assert "/" not in "".join(recorded.values()) and not recorded.keys() & {"PATH", "HOME"}


def test_libraries_that_vllm_asks_for_are_loaded_where_they_are_found(peer, tmp_path):
    (tmp_path / "venv" / "lib").mkdir(parents=True)
    (tmp_path / "venv" / "lib" / "libiomp5.so").touch()
    (tmp_path / "sys" / "x86_64").mkdir(parents=True)
    (tmp_path / "sys" / "x86_64" / "libtcmalloc_minimal.so.4").touch()
    found = preloaded(tmp_path / "venv", tmp_path / "sys")
    assert [path.name for path in found] == ["libtcmalloc_minimal.so.4", "libiomp5.so"]
    assert preloaded(tmp_path / "none", tmp_path / "none") == []
    assert str(tmp_path / "venv" / "lib" / "libiomp5.so") in peer("").environment({})["LD_PRELOAD"]


def test_the_version_is_that_of_the_other_environment(peer):
    assert vllm_version(str(peer("printf 'torch 2\\nvllm-cpu 0.32.0\\n'").python)) == "vllm-cpu 0.32.0"
    assert vllm_version(str(peer("exit 1").python)) is None
    assert vllm_version(str(peer("echo torch 2").python)) is None
    assert vllm_version("/nowhere/python") is None
    here = any(each.name.startswith("vllm") for each in distributions())
    assert (vllm_version(sys.executable) is not None) == here  # the real question, put to this environment


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo no module named vllm >&2; exit 1", "exit code 1: no module named vllm"),
        (answer(1.0, [[5, 6], [7]]), "2 answers to 2 prompts, 1 of them not of 2 tokens"),
        ("exit 0", "it wrote no result"),
    ],
)
def test_a_turn_that_did_not_do_the_work(peer, script, words):
    """Whose result must not be taken from an earlier turn."""
    peer(answer(1.0, [[5, 6], [7, 8]])).measure("vllm", CASE)
    with pytest.raises(ValueError, match=words):
        peer(script).measure("vllm", CASE)


def test_the_script_runs_twice_and_measures_the_second(monkeypatch, tmp_path):
    """``vllm_turn.py`` as vLLM's Python runs it, with a vLLM that records its calls."""
    calls = []

    class LLM:
        def __init__(self, **settings):
            calls.append(("load", settings))

        def generate(self, prompts, params, use_tqdm):
            calls.append(("run", prompts, vars(params), use_tqdm))
            number = sum(call[0] == "run" for call in calls)
            tokens = [types.SimpleNamespace(token_ids=(number, p["prompt_token_ids"][0])) for p in prompts]
            return [types.SimpleNamespace(outputs=[each]) for each in tokens]

    fake = types.SimpleNamespace(LLM=LLM, SamplingParams=types.SimpleNamespace, __version__="9.9")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    job, result = tmp_path / "job.json", tmp_path / "result.json"
    job.write_text(json.dumps({"llm": {"model": "m"}, "prompts": [[5, 6], [7]], "output_tokens": 2}))
    monkeypatch.setattr(sys, "argv", ["vllm_turn.py", str(job), str(result)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    params = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
    run = ("run", [{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7]}], params, False)
    assert calls == [("load", {"model": "m"}), run, run]
    found = json.loads(result.read_text())
    assert found["outputs"] == [[2, 5], [2, 7]] and found["version"] == "9.9" and 0 < found["seconds"] < 10
