"""`kvbench quality`: what it measures, what it says of it, and the file that it leaves in a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import special

from engine.teacher_forcing import Divergence, divergence
from kvbench.cli.quality import quality
from kvbench.cli.run_guarded import guarded
from kvbench.common.errors import UsageError
from kvbench.common.git import git_state
from kvbench.quality.measure import figures
from kvbench.runs.quality import FORMAT, QUALITY, code_differences, read_quality
from kvbench.workload.file import load_workload
from tests.support.hf_parts import model_folder, one_thread


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[str]:
    with one_thread():
        yield model_folder(str(tmp_path_factory.mktemp("models")))


def test_the_figures_are_those_of_float64_kl_by_scipy():
    generator = torch.Generator().manual_seed(3)
    expected, got = (torch.randn(300, 61, generator=generator) for _ in range(2))
    parts = [
        divergence(expected[rows], got[rows], decoded=decoded)
        for rows, decoded in ((slice(200), False), (slice(200, 300), True))
    ]
    found = figures(Divergence.of(parts))
    theirs, ours = (special.softmax(logits.double().numpy(), axis=-1) for logits in (expected, got))
    kld = special.rel_entr(theirs, ours).sum(axis=-1)
    assert found == pytest.approx({
        "positions": 300, "mean": kld.mean(), "p95": np.percentile(kld, 95), "p99": np.percentile(kld, 99),
        "max": kld.max(), "same_argmax": np.mean(theirs.argmax(-1) == ours.argmax(-1)),
        "prompt_mean": kld[:200].mean(), "decode_mean": kld[200:].mean(),
    }, rel=1e-6)  # fmt: skip


WORKLOAD = """
name: tiny
seed: 3
model: {{path: {folder}}}
engine: {{device: cpu, kv_budget: 1MiB, max_model_len: 64, max_num_seqs: 4, max_num_batched_tokens: 16}}
sweep: {{kv_cache_dtype: [auto, int8_per_token_head, int4_per_token_head]}}
load:
  concurrency: [2]
  num_requests: [5]
  prompts: {{kind: synthetic, classes: [{{name: it, share: 1, prompt_tokens: 12, output_tokens: 8}}]}}
"""


@pytest.fixture
def workload(folder, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(WORKLOAD.format(folder=folder))
    return path


def run_folder(workload: Path, **manifest: object) -> Path:
    folder = workload.parent / "run"
    folder.mkdir(exist_ok=True)
    made = {"workload": dict(load_workload(workload, profile="cpu").resolved), "plan": [], "profile": "cpu"}
    (folder / "manifest.json").write_text(json.dumps({**made, "git": git_state(), **manifest}))
    return folder


def command(*words: object) -> int:
    return guarded(lambda: quality.main([str(word) for word in words], standalone_mode=False))


def test_the_command_on_a_run(workload, capsys):
    run = run_folder(workload, model={"weights_fingerprint": "of other weights"})
    assert command(run, "--prompts", 3, "--output-tokens", 5) == 0
    result = read_quality(run)
    int8, int4 = result.configurations.values()
    assert [int8["kv_cache_dtype"], int4["kv_cache_dtype"]] == ["int8_per_token_head", "int4_per_token_head"]
    assert int8["positions"] == int4["positions"] == 3 * (12 + 5)
    assert 0 < int8["mean"] < int4["mean"] <= int4["p99"] <= int4["max"]
    assert (
        min(int4["prompt_mean"], int4["decode_mean"]) <= int4["mean"] <= max(int4["prompt_mean"], int4["decode_mean"])
    )
    assert result.note == "" and "those of" in result.weights  # a folder's weights are somebody's
    (different,) = result.differs_from(json.loads((run / "manifest.json").read_text()))
    assert different.startswith("set of weights ")
    out, err = capsys.readouterr()
    assert "warning" not in err
    assert "same token" in out and all(config_id in out for config_id in result.configurations)


def test_other_code_than_the_run_is_said_before_it_is_measured(workload, capsys, monkeypatch):
    run = run_folder(workload, git={"sha": "0123456789abcdef"})

    def measure(*_, **__):
        raise UsageError("measured")

    monkeypatch.setattr("kvbench.quality.measure.measure", measure)
    assert command(run) == 2
    warning, said = capsys.readouterr().err.splitlines()
    assert "of the run 0123456789ab" in warning and "only with --force" in warning and said == "error: measured"


def test_several_sets_of_weights_are_all_named_and_random_ones_noted(workload, capsys):
    file = workload.parent / "out.json"
    sweep = "sweep={load_format: [auto, dummy], kv_cache_dtype: [auto, int4_per_token_head]}"
    words = ("-o", sweep, "-o", "design=full", "--prompts", 1, "--output-tokens", 1, "--output", file)
    assert command(workload, "--profile", "cpu", *words) == 0
    result = json.loads(file.read_text())
    assert len(result["configurations"]) == 2 and result["weights_fingerprint"] == ""
    assert [part.split(" ")[0] for part in result["weights"].split("; ")] == ["those", "random"]
    assert "random (seed 0)" in result["weights"] and "random" in result["note"]
    assert result["note"] in capsys.readouterr().out


def test_what_cannot_be_measured_is_refused(workload, capsys):
    def refused(words: str, *arguments: object) -> bool:
        return command(*arguments) == 2 and words in capsys.readouterr().err

    run = run_folder(workload, backend="vllm")
    assert refused("only the built-in engine shows its logits", run)
    assert refused("-o", run, "-o", "seed=4")
    assert refused("has a quantised KV", workload, "--profile", "cpu", "-o", "sweep={}")
    assert refused("there is no workload file", workload.parent / "none.yaml")


def test_a_result_names_what_differs_from_the_run():
    run = {"git": {"sha": "a" * 40}, "versions": {"torch": "2.1", "kvbench": "1"}}
    same = {"torch": "2.1", "transformers": "5"}  # what the run does not tell is no difference
    assert code_differences({"sha": "a" * 40}, same, run) == []
    commit, torch_version = code_differences({"sha": "b" * 40}, {"torch": "2.2"}, run)
    assert "b" * 12 in commit and "a" * 12 in commit and "torch 2.2" in torch_version


@pytest.mark.parametrize("text", ['{"format": "other"}', "[]", f'{{"format": "{FORMAT}", "no": 1}}'])
def test_a_file_that_is_not_its_own_is_refused_and_none_is_nothing_measured(tmp_path, text):
    assert read_quality(tmp_path) is None
    (tmp_path / QUALITY).write_text(text)
    with pytest.raises(UsageError, match=f"kvbench quality {tmp_path}"):
        read_quality(tmp_path)
