"""`kvbench quality` and `kvbench dev canaries`: what they measure and write, what they share, and what they refuse."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvbench.cli.run_guarded import guarded
from kvbench.common.errors import UsageError
from kvbench.common.git import git_state
from kvbench.quality import measure, parts, prompts
from kvbench.quality.cli import canaries, quality
from kvbench.quality.prompts import SETS, PromptText
from kvbench.requests.canaries import CanarySet, read_canaries, write_canaries
from kvbench.runs.folder import RunFolder
from kvbench.runs.quality import FORMAT, QUALITY, code_differences, read_quality
from kvbench.runs.results import GitState, Manifest
from kvbench.workload.file import load_workload
from tests.support.hf_parts import COMMON, model_folder, one_thread
from tests.support.kv_mutants import swap_in_out_of_order

VOCAB = 8192  # of the tokenizer that ships, which reads the prompts of a model without one
TINY = prompts.FILLER.parent


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A model with weights, though nobody trained them."""
    torch.manual_seed(3)
    config = AutoConfig.for_model("llama", **{**COMMON, "vocab_size": VOCAB, "hidden_size": 32, "head_dim": 16})
    path = tmp_path_factory.mktemp("models") / "small"
    AutoModelForCausalLM.from_config(config, attn_implementation="eager").save_pretrained(path)
    return str(path)


PROMPTS = {
    "easy": [PromptText("a", ("The key is 12. What is it?",), 4, "12", 0.2)],
    "average": [PromptText("b", ("Some text that goes on",), 6), PromptText("c", ("And some other text",), 6)],
    "long-context": [PromptText("d", ("much too long " * 200,), 4, "1", 0.5)],
    "malformed": [PromptText("e", ("\n\n\x00",), 4)],
    "production-like": [PromptText("f", ("The key is 31.", "And now?", "The key is"), 4, "31", 0.5)],
}


@pytest.fixture(autouse=True)
def few_prompts(tmp_path, monkeypatch) -> None:
    """What is measured in seconds: seven prompts and passkeys of eight lengths."""
    for name in SETS:
        (tmp_path / f"{name}.jsonl").write_text("".join(each.row for each in PROMPTS[name]))
    monkeypatch.setattr(measure, "FOLDER", tmp_path)
    monkeypatch.setattr(measure, "_LONGEST_CANARY", 300)
    monkeypatch.setattr(parts, "usable_cores", lambda: 1)
    monkeypatch.setattr(prompts, "RESIDUES", 8)


WORKLOAD = """
name: tiny
seed: 3
model: {{path: {folder}}}
engine: {{device: cpu, kv_budget: 1MiB, max_model_len: 128, max_num_seqs: 4, max_num_batched_tokens: 32}}
sweep:
  layout: [contiguous]
  kv_cache_dtype: [auto, int8_per_token_head, int4_per_token_head]
  preemption_mode: [swap]
  max_num_seqs: [8]
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
    resolved = dict(load_workload(workload, profile="cpu").resolved)
    made = {"format": 1, "workload": resolved, "plan": [], "profile": "cpu", "git": git_state(), **manifest}
    (folder / "manifest.json").write_text(json.dumps(made))
    return folder


def command(*words: object) -> int:
    return guarded(lambda: quality.main([str(word) for word in words], standalone_mode=False))


def test_the_command_on_a_run(workload, capsys):
    run = run_folder(workload, model={"weights_fingerprint": "of other weights"})
    assert command(run) == 0
    result = read_quality(run)
    assert len(result.configurations) == 6 and not result.beside and result.note == ""
    by_dtype = {each.kv_cache_dtype: each for each in result.configurations.values()}
    int8, int4 = by_dtype["int8_per_token_head"], by_dtype["int4_per_token_head"]
    for figures in (result.control, *result.configurations.values()):
        assert set(figures.sets) == {"easy", "average", "malformed", "production-like", "workload"}
        assert figures.sets["workload"].prompts == 5 and figures.greedy.answers == 10
        assert figures.passkey.asked == 2 + 8 and figures.perplexity > 1000
    for figures in result.configurations.values():
        plain, pool = figures.kv_cache_dtype == "auto", figures.full_pool
        assert (figures.mean < 1e-9) == plain and figures.mean_low <= figures.mean <= figures.mean_high
        assert not plain or (figures.outside == () and not pool.wrong and pool.agree == pool.answers)
        assert pool.answers >= 16 and pool.passkey_asked >= 8 and pool.forks > 0
    assert 0 < int8.mean < int4.mean <= int4.p99 <= int4.max
    assert max(each.full_pool.preemptions for each in result.configurations.values()) > 0
    # Without canaries everything is asked of each but one: max_num_seqs changes no answer.
    assert result.facts.left_out == 1 and result.facts.measurements == 5
    shared = {name: figures.like for name, figures in result.configurations.items() if figures.like}
    assert shared == {"paged-seqs8": "paged"}
    (different,) = result.differs_from(RunFolder(run).manifest())
    assert different.startswith("set of weights ")
    out, err = capsys.readouterr()
    assert "warning" not in err and all(name in out for name in ("control", *result.configurations))


def test_random_weights_are_measured_with_a_trained_model_beside_them(workload, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "BESIDE", folder)
    file = tmp_path / "out.json"
    dummy = ("-o", "model={config: llama-32m, load_format: dummy}", "-o", "sweep={}", "--profile", "cpu")
    assert command(workload, *dummy, "--output", file) == 0
    result = json.loads(file.read_text())
    assert result["beside"] and result["model"] == "small" and result["weights"] == f"those of {folder}"
    assert result["note"] == "" and "workload" not in result["control"]["sets"]
    assert result["facts"]["not_measured"] == []
    assert command(workload, *dummy, "--model", f"{folder}/config.json", "--output", file) == 0
    result = json.loads(file.read_text())
    assert "random (seed 0)" in result["weights"] and "random" in result["note"]


def test_kinds_of_kv_that_the_model_beside_does_not_keep_are_named(folder):
    def missing(config, model=folder):
        return measure.Subject.of({"model": config, "load_format": "dummy"}, model).missing

    (rows,) = missing("deepseek-17m")
    (windows,) = missing("gemma3-22m")
    assert "latent" in rows and "window" in windows and "small" in rows
    assert not missing("llama-32m") and not missing("deepseek-17m", "deepseek-17m")
    assert "kvbench-tiny" in missing("deepseek-17m", None)[0]


@pytest.mark.full
def test_several_sets_of_weights_are_all_named(workload, tmp_path):
    file = tmp_path / "out.json"
    dtypes = ("-o", "model.dtype=float32", "-o", "sweep={dtype: [bfloat16]}")
    assert command(workload, "--profile", "cpu", *dtypes, "--output", file) == 0
    result = json.loads(file.read_text())
    assert len(result["configurations"]) == 2 and result["facts"]["dtype"] == "float32, bfloat16"
    assert all(each["mean"] < 1e-3 for each in result["configurations"].values())  # each beside its own dtype
    assert result["weights_fingerprint"] == ""


def test_what_cannot_be_measured_is_refused_and_other_code_than_the_run_said_before(
    workload, folder, capsys, tmp_path, monkeypatch
):
    def refused(words: str, *arguments: object) -> bool:
        return command(*arguments) == 2 and words in capsys.readouterr().err

    run = run_folder(workload, backend="vllm")
    assert refused("built-in engine only", run)
    assert refused("-o", run, "-o", "seed=4")
    assert refused("--all", "--url", "http://127.0.0.1:9", "--all")
    cpu = (workload, "--profile", "cpu", "-o", "sweep={}")
    assert refused("neither a folder", *cpu, "--model", tmp_path / "nothing")
    assert refused("measure with another model", *cpu, "--model", model_folder(str(tmp_path)))  # reads no text
    for name in SETS:
        (tmp_path / f"{name}.jsonl").write_text(PROMPTS["long-context"][0].row)
    assert refused("no prompt fits 256 tokens", *cpu, "--model", f"{folder}/")

    def refuse(*_, **__):
        raise UsageError("measured")

    monkeypatch.setattr("kvbench.quality.measure.measure", refuse)
    assert command(run_folder(workload, git={"sha": "0123456789abcdef"})) == 2
    warning, said = capsys.readouterr().err.splitlines()
    assert "of the run 0123456789ab" in warning and "only with --force" in warning and said == "error: measured"


def test_a_result_names_what_differs_from_the_run():
    run = Manifest(git=GitState(sha="a" * 40), versions={"torch": "2.1", "kvbench": "1"})
    same = {"torch": "2.1", "transformers": "5"}  # what the run does not tell is no difference
    assert code_differences(GitState(sha="a" * 40), same, run) == []
    commit, torch_version = code_differences(GitState(sha="b" * 40), {"torch": "2.2"}, run)
    assert "b" * 12 in commit and "a" * 12 in commit and "torch 2.2" in torch_version


@pytest.mark.parametrize("text", ["[]", f'{{"format": "{FORMAT}", "no": 1}}'])
def test_a_file_that_is_not_its_own_is_refused_and_none_is_nothing_measured(tmp_path, text):
    assert read_quality(tmp_path) is None
    (tmp_path / QUALITY).write_text(text)
    with pytest.raises(UsageError, match=f"kvbench quality {tmp_path}"):
        read_quality(tmp_path)


@pytest.mark.parametrize(("every", "asked"), [(False, ["a", "contiguous", "int8", "int8 prefix"]), (True, None)])
def test_all_prompts_are_asked_once_of_each_kv_dtype_and_layout(workload, every, asked):
    settings = {
        "a": {}, "pages": {"page_size": 8}, "prefix": {"enable_prefix_caching": True},
        "swap": {"preemption_mode": "swap"}, "contiguous": {"layout": "contiguous"},
        "grown": {"layout": "contiguous", "reservation": "pow2"}, "int8": {"kv_cache_dtype": "int8_per_token_head"},
        "int8 swap": {"kv_cache_dtype": "int8_per_token_head", "preemption_mode": "swap", "page_size": 64},
        "int8 prefix": {"kv_cache_dtype": "int8_per_token_head", "enable_prefix_caching": True},
    }  # fmt: skip
    base = {"model": "kvbench-tiny", "device": "cpu", "max_num_seqs": 8}
    members = {name: measure.Subject.of(base | changed, None) for name, changed in settings.items()}
    group = measure.WeightsGroup(load_workload(workload, profile="cpu"), members, every, lambda text: None)
    assert list(group.leaders) == (asked or list(settings))


# --- Canaries ---


def make(*words: object) -> int:
    return guarded(lambda: canaries.main([str(word) for word in words], standalone_mode=False))


@pytest.mark.full
def test_canaries_of_a_trained_model_are_right_and_asked_of_every_configuration(workload, tmp_path, monkeypatch):
    file, out = tmp_path / "kvbench-tiny.jsonl", tmp_path / "out.json"
    assert make(TINY, "--output", file, "--passkeys", 8, "--copies", 1) == 0
    made = read_canaries(file)
    keys = [each for each in made.canaries if each.kind == "passkey"]
    assert len(keys) == 8 == len({len(each.prompt_token_ids) % 8 for each in keys})
    assert all(each.answer in each.prompt and each.margin >= 0.5 for each in keys)
    starts = [each.prompt_token_ids[: int(each.depth * len(each.prompt_token_ids)) - 1] for each in keys]
    shared = [a == b[: len(a)] for a, b in itertools.pairwise(starts)]
    assert sum(shared) >= 4  # groups of two and three
    damaged = dataclasses.replace(made.canaries[0], canary_id="other", answer_token_ids=(5,) * 6)
    short = made.that_fit(300)
    assert len(short) >= 4
    write_canaries(file, CanarySet(made.model, made.weights_fingerprints, (*made.canaries, damaged)))
    monkeypatch.setattr(measure, "SHIPPED", tmp_path)
    assert command(workload, "--profile", "cpu", "-o", "sweep={}", "--model", TINY, "--output", out) == 0
    result = json.loads(out.read_text())
    (figures,) = result["configurations"].values()
    assert figures["canaries"] == {"asked": len(short) + 1, "right": len(short)}
    assert 0 < result["control"]["mean"] < 1e-9  # it computes the same in another way, and so rounds differently


def test_an_error_that_shows_only_at_a_full_pool_puts_a_configuration_outside(workload, tmp_path):
    """The configuration is like the one before it, and so is asked at a full pool only."""
    out = tmp_path / "out.json"
    settings = ("-o", "sweep={preemption_mode: [swap]}")
    with swap_in_out_of_order() as fired:
        assert command(workload, "--profile", "cpu", *settings, "--model", TINY, "--output", out) == 0
    assert fired.times
    (name, recompute), (_, swap) = json.loads(out.read_text())["configurations"].items()
    assert recompute["outside"] == [] and not recompute["full_pool"]["canaries"]["wrong"]
    assert (recompute["measured"], swap["measured"], swap["like"]) == ("all", "full_pool", name)
    assert swap["full_pool"]["canaries"]["wrong"] > 0 and any("canaries" in each for each in swap["outside"])
    assert swap["canaries"]["asked"] == swap["canaries"]["right"] > 0


def test_a_model_that_knows_no_answer_makes_no_canaries(folder, tmp_path, capsys):
    file = tmp_path / "none.jsonl"
    assert make(folder, "--output", file, "--passkeys", 4, "--copies", 1) == 2
    assert "too weak" in capsys.readouterr().err and not file.exists()
    assert make("llama-32m", "--output", file) == 2
    assert "no weights" in capsys.readouterr().err
