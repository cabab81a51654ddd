"""ci/gpu.sh as a user starts it: the parts that a CPU can do, tiny; what it says where it cannot run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ci.gpu import kernel_cases, summary, sweep
from kvbench.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "ci" / "gpu.sh"
LIMIT_S = 880


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(SCRIPT), *arguments], cwd=folder, env={**os.environ, "PYTHON": sys.executable}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.full
@pytest.mark.timeout(LIMIT_S + 20)
def test_checks_kernels_and_engine_end_to_end(tmp_path):
    parts = ("check", "kernels", "engine-qwen3-0.6b")
    code, out, err = finish(start(tmp_path, "out", "--device", "cpu", "--tiny", "--part", *parts, "--commit", "abc123"))
    assert code == 0, out + err
    folder = tmp_path / "out"
    names = {path.name for path in folder.iterdir()}
    assert names == {"manifest.json", "summary.md", "kernels.json", "engine.json", "log.txt"} <= set(summary.FILES)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [part["status"] for part in manifest["parts"]] == ["passed"] * 4
    assert torch.__version__.startswith(manifest["versions"]["torch"])  # which may lack the build, such as +cu130
    assert manifest["arguments"]["commit"] == "abc123"
    assert manifest["ceilings"].keys() >= {"read_gb_per_s", "copy_gb_per_s", "matmul_fp32_tflop_per_s"}

    kernels = json.loads((folder / "kernels.json").read_text())
    assert {row["status"] for row in kernels["check"]["rows"]} == {"passed"} and len(kernels["check"]["rows"]) >= 14
    timed = {row["case"].split(" ")[0].rstrip(","): row for row in kernels["kernels"]["rows"]}
    assert timed.keys() >= {"decode", "prefill", "write", "page", "swap_out", "swap_in"}
    decode = next(row for row in kernels["kernels"]["rows"] if row["case"] == "decode auto, 2 x 64, page 16")
    assert decode["bytes"] == 2 * 64 * 2 * 2 * 32 * 4  # sequences x tokens x (K, V) x KV heads x head dim x float32
    assert decode["ratio"] == pytest.approx(decode["gb_per_s"] / manifest["ceilings"]["read_gb_per_s"])

    engines = json.loads((folder / "engine.json").read_text())
    run = engines["engine-qwen3-0.6b"]["rows"][0]
    assert sum(run["output_lengths"]) == run["output_tokens"] and run["sequences"] == len(run["output_lengths"]) == 4
    assert run["output_tokens_per_s"] == pytest.approx(run["output_tokens"] / run["seconds"])
    assert run["share_of_floor"] == pytest.approx(run["floor_seconds"]["total"] / run["seconds"])
    assert run["ttft_ms"]["max"] <= run["e2el_ms"]["max"] <= run["seconds"] * 1e3 * 1.0001
    text = (folder / "summary.md").read_text()
    assert "No figure here is of a GPU" in text and "(tiny shape)" in text
    assert text.strip() in out


@pytest.mark.full
@pytest.mark.timeout(LIMIT_S + 20)
def test_settings_and_long_decodes_end_to_end(tmp_path):
    """Real engines in turns, and the simulator's predictions of the same design."""
    parts = ("settings", "long-decode", "paging-cost")
    code, out, err = finish(start(tmp_path, "out", "--device", "cpu", "--tiny", "--part", *parts))
    assert code == 0, out + err
    told = json.loads((tmp_path / "out" / "engine.json").read_text())
    rows = {(row["sitting"], row["cell"]): row for row in told["settings"]["rows"]}
    assert rows.keys() == {
        ("memory", "paged-p16-c4"), ("memory", "contiguous-c4"), ("format", "paged-p16-c4"), ("format", "paged-p64-c4"),
        ("format", "paged-p16-int8_per_token_head-c4"),
    }  # fmt: skip
    contiguous = rows["memory", "contiguous-c4"]
    assert contiguous["launches"] == 2 and contiguous["decoding"] < rows["memory", "paged-p16-c4"]["decoding"]
    effect = contiguous["effects"]["output_throughput"]
    assert effect["low"] < effect["ratio"] < effect["high"] and 0.3 < contiguous["predicted"]["output_throughput"] < 1
    assert told["paging-cost"]["rows"][0]["verdict"]
    long = json.loads((tmp_path / "out" / "kernels.json").read_text())["long-decode"]["rows"]
    assert {row["case"] for row in long} == {case.name for case in kernel_cases.tiny_decode_cases()}
    assert "Engine time of settings" in (tmp_path / "out" / "summary.md").read_text()


@pytest.mark.full
def test_a_termination_still_leaves_a_summary(tmp_path):
    process = start(tmp_path, "out", "--device", "cpu", "--tiny", "--part", "check", "kernels")
    for line in process.stdout:  # of the part that follows facts
        if line.startswith("check:"):
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 1, out + err
    told = json.loads((tmp_path / "out" / "manifest.json").read_text())["parts"]
    assert [part["status"] for part in told] == ["passed", "FAILED", "SKIPPED"]
    assert "stopped from outside" in (tmp_path / "out" / "summary.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence_and_writes_nothing(tmp_path):
    code, out, err = finish(start(tmp_path, "out", "--quick"))
    assert code == 2 and not out
    assert err.count("\n") == 1 and "no NVIDIA GPU here" in err and torch.__version__ in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("quick", [True, False])
def test_the_sweep_it_asks_for_is_one_that_kvbench_accepts(tmp_path, monkeypatch, capsys, quick):
    monkeypatch.chdir(ROOT)
    command = sweep.sweep_command("cuda", quick, False, tmp_path)
    assert cli.main([*command, "--dry-run"], standalone_mode=False) == 0
    told = capsys.readouterr().out
    assert "gpu profile" in told and "paged-p16-c" in told and "contiguous-c" in told
    assert ("2 configurations" in told) == quick
