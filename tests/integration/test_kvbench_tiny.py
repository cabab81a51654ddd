"""The model that ships with its weights: found by its name, and read alike by transformers and our engine.

Nothing here depends on how good its answers are.
"""

from __future__ import annotations

import fnmatch
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvbench.common.errors import UsageError
from kvbench.targets.builtin import check_configuration
from kvbench.targets.model_export import ModelFolders
from kvbench.workload.file import Workload, load_workload
from kvbench_engine.config import EngineConfig
from kvbench_engine.model.loader import fingerprint
from kvbench_engine.model.spec import find_model
from kvbench_engine.sequence import Request, SamplingParams
from kvbench_engine.server.tokenizer import load_tokenizer
from tests.support.hf_parts import Run, greedy_outputs, loaded, make_engine, one_thread, oracle

ROOT = Path(__file__).resolve().parents[2]
NAME = "kvbench-tiny"
FOLDER = ROOT / "engine" / "models" / NAME
OUTPUT_TOKENS = 16
PROMPTS = (
    "The pass key is 48213. Remember it: 48213 is the pass key.\n\nShall I compare thee to a summer's day? What is the "
    "pass key? The pass key is",
    "def ",
    "\nlimit = 907\n"
    + "Return a string containing a printable representation of an object. " * 8
    + "\n>>> print(limit)\n",
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


# Found by its name.


def test_the_name_loads_the_weights_that_ship_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_model(NAME).weights == FOLDER
    found = loaded(NAME)
    assert found.info.weights_fingerprint == fingerprint(oracle(str(FOLDER)))
    assert load_tokenizer(EngineConfig(model=NAME), found.info).name == NAME


def workload(path: str) -> Workload:
    return load_workload(ROOT / "workloads" / "mixed.yaml", profile="cpu", overrides=[f"model.path={path}"])


def test_a_workload_names_it_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = workload(NAME)
    assert (named.engine["model"], named.engine["load_format"]) == (str(FOLDER), "auto")
    assert named.resolved["model"]["path"] == f"engine/models/{NAME}"  # no path of this machine
    assert check_configuration({**named.engine, "max_model_len": 256}).vocab_size == 2048
    with pytest.raises(UsageError, match=rf"'kvbench-tyny' does not exist: .*{NAME}"):
        workload("kvbench-tyny")


def test_other_servers_get_the_folder_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = ModelFolders(ignore_eos=True, text_tokenizer=None)
    try:
        served = folders.get({"model": NAME}, drop_eos=False)
        assert (served.path, served.tokenizer, served.vocab_size) == (FOLDER, FOLDER, 2048)
    finally:
        folders.close()


def test_it_is_small_and_every_file_is_packaged():
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = packaged["kvbench_engine"]
    names = [path.relative_to(ROOT / "engine").as_posix() for path in FOLDER.iterdir()]
    assert all(any(fnmatch.fnmatch(name, pattern) for pattern in patterns) for name in names)
    weights = FOLDER / "model.safetensors"
    assert weights.stat().st_size < 12e6
    assert json.loads((FOLDER / "config.json").read_text())["dtype"] == "bfloat16"


# Read by transformers.


def test_our_greedy_tokens_are_those_of_transformers(tokenizer):
    prompts = {text[:12]: tuple(tokenizer(text).input_ids) for text in PROMPTS}
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    sizes = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    engine = make_engine(loaded(NAME), NAME, slots=1024, **sizes)
    run = Run(engine, [Request(name, ids, params) for name, ids in prompts.items()])
    assert run.tokens() == greedy_outputs(str(FOLDER), prompts, OUTPUT_TOKENS)


@pytest.mark.parametrize("text", [*PROMPTS, "naïve 中文 🙂\n\t\x00  end ", "def f(x):\n    return x[10]"])
def test_any_text_comes_back_from_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_digit_is_a_token(tokenizer):
    assert len(tokenizer) == 2048
    assert tokenizer.convert_ids_to_tokens(tokenizer("x7092581").input_ids)[-7:] == list("7092581")
    assert (
        tokenizer.eos_token_id == 0
        and tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
        )
        == "<|user|>Hi<|assistant|>"
    )
