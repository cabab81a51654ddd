"""The folder that another engine is given: whose weights, which tokenizer, no end of sequence where it must not end."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.targets import model_export
from kvbench.targets.model_export import ModelFolders, shipped_tokenizer, text_tokenizer
from kvbench.targets.prompt_texts import ids_as_words
from kvbench_engine.config import EngineConfig
from kvbench_engine.model import gguf as gguf_file
from kvbench_engine.model.export import copy_tokenizer, export_model, save_word_tokenizer
from kvbench_engine.model.loader import load_model
from tests.integration.test_target_transformers import MODEL
from tests.support.sweep_parts import alive, wait_until


def make(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Those of a run, whose scratch folder is tmp_path/scratch."""
    monkeypatch.setattr(model_export.tempfile, "mkdtemp", lambda prefix: str(make(tmp_path / "scratch")))
    return ModelFolders(ignore_eos=True, text_tokenizer=None)


@pytest.fixture
def source(tmp_path):
    """A model folder as one downloads it; the weights are not looked at."""
    folder = make(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3], "bos_token_id": 0}))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text('{"own": true}')
    return folder


def settings_of(source: Path, **more: str) -> dict[str, str]:
    return {"model": str(source), "load_format": "auto"} | more


def test_a_folder_with_weights_is_served_as_it_is(source, folders, tmp_path):
    served = folders.get(settings_of(source), drop_eos=False)
    assert (served.path, served.tokenizer) == (source, source)
    assert (served.vocab_size, served.max_positions) == (512, 512)
    heeding = ModelFolders(ignore_eos=False, text_tokenizer=None)  # a load that heeds EOS keeps it
    assert heeding.get(settings_of(source), drop_eos=True).path == source
    assert not (tmp_path / "scratch").exists()


def test_a_server_that_cannot_ignore_eos_gets_a_folder_without_one_and_the_model_stays_as_it_is(
    source, folders, tmp_path
):
    served = folders.get(settings_of(source), drop_eos=True)
    assert served.path != source and (served.path / "model.safetensors").read_bytes() == b"weights"
    for name in ("config.json", "generation_config.json"):
        assert json.loads((served.path / name).read_text())["eos_token_id"] is None
    assert json.loads((source / "config.json").read_text()) == MODEL
    assert json.loads((source / "generation_config.json").read_text())["eos_token_id"] == [0, 3]
    assert folders.get(settings_of(source), drop_eos=True) is served
    folders.close()
    assert not (tmp_path / "scratch").exists() and (source / "model.safetensors").exists()


def test_another_tokenizer_takes_the_place_of_the_models(source, folders, tmp_path):
    other = make(tmp_path / "other")
    (other / "tokenizer.json").write_text('{"other": true}')
    served = folders.get(settings_of(source, tokenizer=str(other)), drop_eos=False)
    assert (served.path / "tokenizer.json").read_text() == '{"other": true}'
    assert (source / "tokenizer.json").read_text() == '{"own": true}'
    (source / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"-o model\.tokenizer=FOLDER"):
        folders.get(settings_of(source), drop_eos=True)


def test_llama_cpp_gets_gguf_files_as_they_are_and_others_written_or_refused_before_a_launch(source, folders, tmp_path):
    for settings, why in (
        ({"model": str(source)}, r"GPT-2's or Qwen2's .* convert_hf_to_gguf\.py .* -o model\.path=MODEL\.gguf"),
        ({"model": str(source / "gone.gguf")}, "there is no GGUF file"),
        ({"model": "llama-33m"}, "neither a folder"),
    ):
        for ask in (folders.source, lambda s, **more: folders.get(s, drop_eos=False, **more)):
            with pytest.raises(UsageError, match=why):
                ask(settings, model_format="gguf")
    (source / "m.gguf").write_bytes(b"GGUF")
    assert folders.get({"model": str(source / "m.gguf")}, drop_eos=False, model_format="gguf").vocab_size is None
    assert not (tmp_path / "scratch").exists()


def test_a_missing_package_is_said_before_a_launch_with_the_way_to_get_it(folders, monkeypatch):
    monkeypatch.setattr(gguf_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install 'gguf"):
        folders.source({"model": "llama-32m"}, model_format="gguf")
    folders.source({"model": "llama-32m"})  # other servers need none


@pytest.mark.full
def test_llama_cpp_gets_weights_and_tokenizer_as_a_gguf_file(folders):
    pytest.importorskip("gguf")
    settings = {"model": "kvbench-tiny", "load_format": "auto", "dtype": "float32", "device": "cpu"}
    served = folders.get(settings, drop_eos=False, model_format="gguf")
    assert served.path.read_bytes()[:4] == b"GGUF" and served.tokenizer.name == "kvbench-tiny"
    assert (served.vocab_size, served.max_positions) == (2048, 2048) and served.facts.weights_fingerprint
    assert folders.get(settings, drop_eos=False, model_format="gguf") is served


@pytest.mark.parametrize(("code", "error"), [(2, UsageError), (1, MeasurementError)])
def test_an_export_that_fails_says_why(folders, monkeypatch, code, error):
    real = model_export.processes.launch
    line = f"import sys; print('error: no such model'); sys.exit({code})"
    monkeypatch.setattr(model_export.processes, "launch", lambda c, **o: real([sys.executable, "-c", line], **o))
    with pytest.raises(error, match="no such model"):
        folders.get({"model": "llama-32m", "load_format": "dummy"}, drop_eos=False)


def test_the_two_sides_of_a_comparison_write_random_weights_once(folders, tmp_path, monkeypatch):
    (tmp_path / "small.json").write_text(json.dumps(MODEL))
    settings = {"model": str(tmp_path / "small.json"), "load_format": "dummy", "device": "cpu"}
    first = folders.get(settings, drop_eos=False)
    monkeypatch.setattr(model_export.processes, "launch", None)  # nothing more is written
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(model_export.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "other"))
    other = ModelFolders(ignore_eos=True, text_tokenizer=None)
    second = other.get(settings, drop_eos=False)
    assert second.path != first.path and second.facts == first.facts
    folders.close()
    assert (second.path / "model.safetensors").stat().st_nlink == 1
    other.close()
    assert not second.path.exists()


KILLED = """
import sys
from kvbench.targets import model_export
line = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1] + '/pid', 'w')); time.sleep(60)"
real, folders = model_export.processes.launch, model_export.ModelFolders(ignore_eos=True, text_tokenizer=None)
model_export.processes.launch = lambda c, **o: real([sys.executable, "-c", line, str(folders.scratch)], **o)
folders.get({"model": "llama-32m", "load_format": "dummy"}, drop_eos=False)
"""


@pytest.mark.full
def test_killed_while_the_weights_are_written_nothing_of_it_stays(tmp_path):
    path = {"TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", KILLED], env=os.environ | path)
    try:
        wait_until(lambda: [p for p in tmp_path.glob("kvbench-model-*/pid") if p.read_text().strip()])
        (found,) = tmp_path.glob("kvbench-model-*/pid")
        writer = int(found.read_text())
        assert alive(writer)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not alive(writer) and not list(tmp_path.glob("kvbench-model-*")), 20)


def test_random_weights_are_those_of_the_built_in_engine_and_the_words_are_the_ids(tmp_path):
    (tmp_path / "tiny.json").write_text(json.dumps(MODEL))
    settings = {"model": str(tmp_path / "tiny.json"), "load_format": "dummy", "seed": 7, "device": "cpu"}
    out = tmp_path / "out"
    export_model({"settings": settings, "folder": str(out), "tokenizer": None, "ignore_eos": True})
    exported = load_model(EngineConfig.from_mapping(settings | {"model": str(out), "load_format": "auto"}))
    own = load_model(EngineConfig.from_mapping(settings))
    assert exported.info.weights_fingerprint == own.info.weights_fingerprint
    facts = json.loads((out / "kvbench.json").read_text())
    assert facts == {
        "weights_fingerprint": own.info.weights_fingerprint,
        "num_parameters": own.info.num_parameters,
    }
    assert exported.info.eos_token_ids == ()
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = [17, 4, 511, 0, 4]
    assert tokenizer.encode(ids_as_words(ids)).ids == ids and tokenizer.decode(ids) == "17 4 511 0 4"


@pytest.mark.parametrize("vocab_size", [5, 8193])
def test_a_message_in_words_of_ids_becomes_those_ids_between_two_marks(tmp_path, vocab_size):
    save_word_tokenizer(tmp_path, vocab_size)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    def ids(*contents: Sequence[int]) -> list[int]:
        turns = zip(itertools.cycle(("user", "assistant")), map(ids_as_words, contents), strict=False)
        messages = [{"role": role, "content": text} for role, text in turns]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]

    last = vocab_size - 1
    assert ids([last, 0, 2]) == [3, last, 0, 2, 4]
    assert ids([1], [last, last], [0]) == [3, 1, 4, last, last, 3, 0, 4]  # begins as the turn before it did


def test_the_tokenizer_that_ships_goes_along_with_its_chat_template(tmp_path):
    copy_tokenizer(shipped_tokenizer(), tmp_path)
    messages = [{"role": "user", "content": " a word"}]
    texts = [
        AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        for folder in (shipped_tokenizer(), tmp_path)
    ]
    assert texts == ["<|user|> a word<|assistant|>"] * 2


@pytest.mark.parametrize(
    ("prompts", "name"),
    [
        ({"kind": "synthetic"}, None),
        ({"kind": "trace", "tokenizer": None, "send_text": False}, None),
        ({"kind": "trace", "tokenizer": None, "send_text": True}, "bpe8k"),
        ({"kind": "text", "tokenizer": None}, "bpe8k"),
        ({"kind": "text", "tokenizer": "/t/own"}, "own"),
    ],
)
def test_prompts_that_are_texts_get_the_tokenizer_they_were_cut_with(prompts, name):
    found = text_tokenizer(SimpleNamespace(**prompts))
    assert (found.name if found else None) == name
    assert name != "bpe8k" or (found / "tokenizer.json").is_file()
