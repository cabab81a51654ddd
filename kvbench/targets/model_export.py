"""The model's folder for servers that are not ours, with the built-in engine's weights; made once a run.

``engine/model/export.py`` writes random weights for a bare config, and GGUF files, in its own process. A folder with
weights is served as it is, or through links if its configs must differ. The folder is removed when the run ends; if
kvbench is killed, the watchdog of the server removes it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvbench.common import processes
from kvbench.common.errors import MeasurementError, UsageError, as_usage_error
from kvbench.common.files import write_json
from kvbench.common.packages import ENGINE_MODULE, require_engine
from kvbench.common.parsing import json_at
from kvbench.runs.server_info import ModelAnswer
from kvbench.workload.settings import Settings

_EXPORT_S = 1800.0  # tens of gigabytes on a slow disk
_WEIGHT_SETTINGS = ("model", "load_format", "seed", "dtype", "device")
_WRITTEN: dict[str, Path] = {}  # by what was asked: the folders that this process has made
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class ServedModel:
    """A folder (or a GGUF file) to serve. ``tokenizer``: a folder; None: the text of ids 17 and 4 is "17 4".

    ``facts``: what the built-in server would tell of the same weights, where they were written here.
    """

    path: Path
    tokenizer: Path | None
    vocab_size: int | None
    max_positions: int | None
    facts: ModelAnswer = field(default_factory=ModelAnswer)


@dataclass(frozen=True)
class _WeightSource:
    """The place where a configuration's model comes from.

    ``path``: a folder, a config or a GGUF file. ``written``: by ``engine/model/export.py``, else it is served from
    where it is. ``tokenizer``: a folder, None where each id is a word; ``own_tokenizer``: it is the folder's.
    """

    path: Path
    written: bool
    tokenizer: Path | None
    own_tokenizer: bool


class ModelFolders:
    """The folders of one run. ``text_tokenizer``: of the load's texts, None for token ids."""

    def __init__(self, *, ignore_eos: bool, text_tokenizer: Path | None) -> None:
        self._ignore_eos, self._text_tokenizer = ignore_eos, text_tokenizer
        self._made: dict[tuple[str, _WeightSource, bool], ServedModel] = {}
        self._scratch: Path | None = None

    @property
    def scratch(self) -> Path:
        """A folder of this run's own, removed by ``close``."""
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="kvbench-model-"))
        return self._scratch

    def close(self) -> None:
        """Removes everything."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None
        self._made.clear()

    def get(self, settings: Settings, *, drop_eos: bool, model_format: str = "safetensors") -> ServedModel:
        """Returns the model of a configuration. ``drop_eos``: the server cannot ignore the end of a sequence.

        Raises:
            UsageError: there is no such model, or not in the server's format.
            MeasurementError: it could not be written.
        """
        source = self.source(settings, model_format)
        if source.path.suffix == ".gguf":
            return ServedModel(source.path.resolve(), source.path, None, None)
        drop = drop_eos and self._ignore_eos
        job = {name: settings[name] for name in _WEIGHT_SETTINGS if name in settings}
        key = (json.dumps(job, sort_keys=True), source, drop)
        if key not in self._made:
            export = partial(self._export, job, source.tokenizer, model_format)
            self._made[key] = export(drop) if source.written else self._link(source, drop)
        return self._made[key]

    def source(self, settings: Settings, model_format: str = "safetensors") -> _WeightSource:
        """Finds the model of a configuration, as far as it can be told without loading it. Raises UsageError."""
        from kvbench_engine.model.gguf import refusal
        from kvbench_engine.model.spec import find_model, model_folder

        named, load_format = str(settings["model"]), str(settings.get("load_format", "auto"))
        given = Path(str(settings["tokenizer"])) if settings.get("tokenizer") else None
        path = Path(named).expanduser()
        if model_format == "gguf" and path.suffix == ".gguf":
            if not path.is_file():
                raise UsageError(f"there is no GGUF file {str(path)!r}: check -o model.path")
            return _WeightSource(path, written=False, tokenizer=None, own_tokenizer=True)
        folder = model_folder(named)
        random = load_format == "dummy" or folder is None
        own = folder is not None and any((folder / name).is_file() for name in _TOKENIZERS)
        tokenizer = given or (folder if own and not random else self._text_tokenizer)
        if not random and model_format != "gguf":
            if tokenizer is None:
                raise UsageError(f"the model folder {folder} has no tokenizer: name one with -o model.tokenizer=FOLDER")
            return _WeightSource(folder or path, False, tokenizer, own and given is None)
        with as_usage_error():
            spec = find_model(named, load_format)
        if model_format == "gguf" and (why := refusal(spec.config, tokenizer)):
            raise UsageError(f"model {spec.name}: {why}")
        require_engine("a model with random weights, or a GGUF file, for another engine")
        return _WeightSource(folder or path, True, tokenizer, own)

    def _export(self, job: Settings, tokenizer: Path | None, model_format: str, drop_eos: bool) -> ServedModel:
        """Random weights or a GGUF file, written by a process of its own."""
        folder, log = self._new_folder(), self.scratch / "export.log"
        task, asked = folder.with_suffix(".json"), {"tokenizer": str(tokenizer) if tokenizer else None}
        asked |= {"settings": dict(job), "ignore_eos": drop_eos, "format": model_format}
        key = json.dumps(asked, sort_keys=True)
        if (earlier := _WRITTEN.get(key)) and earlier.is_dir():  # the other side of a comparison has it
            shutil.copytree(earlier, folder, copy_function=_link_or_copy)
        else:
            self._write(task, asked | {"folder": str(folder)}, log)
            _WRITTEN[key] = folder
        described = _described(folder, tokenizer)
        if model_format != "gguf":
            return described
        from kvbench_engine.model.export import GGUF

        return replace(described, path=folder / GGUF)

    def _write(self, task: Path, asked: Mapping[str, Any], log: Path) -> None:
        write_json(task, asked)
        command = [sys.executable, "-m", f"{ENGINE_MODULE}.model.export", str(task)]
        with log.open("wb") as file:
            process = processes.launch(command, stdout=file, stderr=subprocess.STDOUT)
            process.watch(self.scratch)
            try:
                code = process.wait(timeout=_EXPORT_S)
            except subprocess.TimeoutExpired:
                code = -1
            finally:
                processes.stop(process)
        if code == 2:
            raise UsageError(processes.last_lines(log, 1).removeprefix("error: "))
        if code:
            why = processes.last_lines(log) or "it took too long"
            raise MeasurementError(f"the model could not be written for the server: {why}")

    def _link(self, source: _WeightSource, drop_eos: bool) -> ServedModel:
        """Returns the folder itself, or links to its files if the tokenizer or the end of sequence must differ."""
        path, tokenizer = source.path.resolve(), source.tokenizer
        if source.own_tokenizer and not drop_eos:
            return _described(path, path)
        from kvbench_engine.model import export as export_model

        assert tokenizer is not None
        folder = self._new_folder()
        folder.mkdir()
        for file in path.iterdir():
            if source.own_tokenizer or file.name not in export_model.TOKENIZER_FILES:
                (folder / file.name).symlink_to(file)
        if not source.own_tokenizer:
            export_model.copy_tokenizer(tokenizer, folder)
        if drop_eos:
            export_model.drop_eos(folder)
        return _described(folder, tokenizer)

    def _new_folder(self) -> Path:
        return self.scratch / f"model-{len(self._made)}"


def _link_or_copy(source: str, to: str) -> None:
    try:
        os.link(source, to)
    except OSError:  # a file system without hard links
        shutil.copy2(source, to)


def text_tokenizer(prompts: Any) -> Path | None:
    """The folder of the tokenizer for the texts of ``load.prompts``; None for prompts of token ids."""
    if given := getattr(prompts, "tokenizer", None):
        return Path(given)
    if prompts.kind != "text" and not getattr(prompts, "send_text", False):
        return None
    return shipped_tokenizer()


def shipped_tokenizer() -> Path:
    """The folder of the tokenizer that ships."""
    from kvbench_engine import tokenizer

    return Path(str(tokenizer.__file__)).parent / "bpe8k"


def _described(folder: Path, tokenizer: Path | None) -> ServedModel:
    from kvbench_engine.model.export import FACTS

    facts = json.loads((folder / FACTS).read_text(encoding="utf-8")) if (folder / FACTS).is_file() else {}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = json_at(config, "text_config") or config
    lengths = [json_at(text, name) for name in ("max_position_embeddings", "n_positions")]
    positions = next((length for length in lengths if isinstance(length, int)), None)
    return ServedModel(folder, tokenizer, json_at(text, "vocab_size"), positions, ModelAnswer.read(facts))
