"""The model's folder for servers that are not ours, with the built-in engine's weights; made once a run.

``engine.model.export`` writes random weights for a bare config, in its own process. A folder with weights is served as
it is, or through links if its configs must differ. The folder is removed when the run ends; if kvbench is killed, the
watchdog of the server removes it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvbench.common import processes
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.files import write_json

_EXPORT_S = 1800.0  # tens of gigabytes on a slow disk
_WEIGHT_SETTINGS = ("model", "load_format", "seed", "dtype", "device")
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
    facts: Mapping[str, Any] = field(default_factory=dict)


class ModelFolders:
    """The folders of one run. ``text_tokenizer``: of the load's texts, None for token ids."""

    def __init__(self, *, ignore_eos: bool, text_tokenizer: Path | None) -> None:
        self._ignore_eos = ignore_eos
        self._text_tokenizer = text_tokenizer
        self._made: dict[str, ServedModel] = {}
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

    def get(self, settings: Mapping[str, Any], *, drop_eos: bool, model_format: str = "safetensors") -> ServedModel:
        """The model of a configuration. ``drop_eos``: the server has no way to ignore the end of a sequence.

        Raises:
            UsageError: there is no such model, or not in the server's format.
            MeasurementError: it could not be written.
        """
        from engine.model.spec import model_folder

        named = str(settings.get("model", ""))
        found = model_folder(named)
        source = found or Path(named).expanduser()
        random = settings.get("load_format") == "dummy" or found is None
        if model_format == "gguf" and (source.suffix == ".gguf" or not random):
            return _gguf(source)
        drop = drop_eos and self._ignore_eos
        job = {name: settings[name] for name in _WEIGHT_SETTINGS if settings.get(name) is not None}
        key = json.dumps([job, str(settings.get("tokenizer")), drop], sort_keys=True)
        if key not in self._made:
            given = Path(str(settings["tokenizer"])) if settings.get("tokenizer") else None
            if random:
                self._made[key] = self._export(job, given or self._text_tokenizer, drop, model_format)
            else:
                self._made[key] = self._link(source.resolve(), given, drop)
        return self._made[key]

    def _export(self, job: Mapping[str, Any], tokenizer: Path | None, drop_eos: bool, model_format: str) -> ServedModel:
        """Random weights, written by a process of its own."""
        folder, log = self._new_folder(), self.scratch / "export.log"
        task = folder.with_suffix(".json")
        write_json(
            task,
            {
                "settings": dict(job),
                "folder": str(folder),
                "tokenizer": str(tokenizer) if tokenizer else None,
                "ignore_eos": drop_eos,
                "format": model_format,
            },
        )
        with log.open("wb") as file:
            process = processes.launch(
                [sys.executable, "-m", "engine.model.export", str(task)], stdout=file, stderr=subprocess.STDOUT
            )
            process.watch(self.scratch)
            try:
                code: int | None = process.wait(timeout=_EXPORT_S)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                processes.stop(process)
        if code == 2:
            raise UsageError(processes.last_lines(log, 1).removeprefix("error: "))
        if code != 0:
            raise MeasurementError(
                f"the model could not be written for the server: {processes.last_lines(log) or 'it took too long'}"
            )
        described = _described(folder, tokenizer)
        if model_format != "gguf":
            return described
        from engine.model.export import GGUF

        return replace(described, path=folder / GGUF)

    def _link(self, source: Path, given: Path | None, drop_eos: bool) -> ServedModel:
        """The folder itself, or links to its files if the tokenizer or the end of sequence must differ."""
        has_one = any((source / name).is_file() for name in _TOKENIZERS)
        if has_one and given is None and not drop_eos:
            return _described(source, source)
        from engine.model import export as export_model

        tokenizer = given or (source if has_one else self._text_tokenizer)
        if tokenizer is None:
            raise UsageError(f"the model folder {source} has no tokenizer: name one with -o model.tokenizer=FOLDER")
        folder = self._new_folder()
        folder.mkdir()
        for path in source.iterdir():
            if given is None or path.name not in export_model.TOKENIZER_FILES:
                (folder / path.name).symlink_to(path)
        if given is not None or not has_one:
            export_model.copy_tokenizer(tokenizer, folder)
        if drop_eos:
            export_model.drop_eos(folder)
        return _described(folder, tokenizer)

    def _new_folder(self) -> Path:
        return self.scratch / f"model-{len(self._made)}"


def text_tokenizer(prompts: Any) -> Path | None:
    """The folder of the tokenizer for the texts of ``load.prompts``; None for prompts of token ids."""
    if given := getattr(prompts, "tokenizer", None):
        return Path(given)
    if prompts.kind != "text" and not getattr(prompts, "send_text", False):
        return None
    from engine import tokenizer

    return Path(str(tokenizer.__file__)).parent / "bpe8k"


def _gguf(source: Path) -> ServedModel:
    if source.suffix != ".gguf" or not source.is_file():
        raise UsageError(
            f"llama.cpp serves GGUF files, and the model is {str(source)!r}: convert it with llama.cpp's "
            "convert_hf_to_gguf.py and name it with -o model.path=MODEL.gguf"
        )
    return ServedModel(source.resolve(), source, None, None)


def _described(folder: Path, tokenizer: Path | None) -> ServedModel:
    from engine.model.export import FACTS

    facts = json.loads((folder / FACTS).read_text(encoding="utf-8")) if (folder / FACTS).is_file() else {}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    positions = [text[k] for k in ("max_position_embeddings", "n_positions") if isinstance(text.get(k), int)]
    return ServedModel(folder, tokenizer, text.get("vocab_size"), next(iter(positions), None), facts)
