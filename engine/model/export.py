"""Writes a model folder for other engines: config.json, safetensors or GGUF, tokenizer, generation_config.json.

    python -m kvbench_engine.model.export JOB.json

The job is a JSON object: ``settings`` (``model``, ``load_format``, ``seed``, ``dtype``, ``device`` of EngineConfig),
``folder`` (must not exist), ``tokenizer`` (a folder to copy one from, or null), ``ignore_eos`` and ``format``: "gguf"
for a GGUF file, which holds the tokenizer, in place of safetensors. The weights are those that the built-in engine
serves with the same settings. A separate process, so that its caller needs no torch.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench_engine.tokenizer.words import CHAT_TEMPLATE

if TYPE_CHECKING:
    from kvbench_engine.model.loader import LoadedModel

GGUF = "model.gguf"
FACTS = "kvbench.json"  # in the folder: weights_fingerprint and num_parameters, as in the server's /server_info
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_EOS_FILES = ("config.json", "generation_config.json")


def export_model(job: dict[str, Any]) -> None:
    """Do the job. Raises ValueError if the model cannot be loaded."""
    from kvbench_engine.config import EngineConfig
    from kvbench_engine.model.gguf import write_gguf
    from kvbench_engine.model.loader import load_model

    folder = Path(job["folder"])
    tokenizer = Path(job["tokenizer"]) if job["tokenizer"] else None
    loaded = load_model(EngineConfig.from_mapping(job["settings"]))
    folder.mkdir(parents=True)
    if job.get("format") == "gguf":
        write_gguf(loaded.model, folder / GGUF, tokenizer)
        loaded.model.config.save_pretrained(folder)
    else:
        _write_folder(loaded, folder, tokenizer, ignore_eos=job["ignore_eos"])
    facts = {"weights_fingerprint": loaded.info.weights_fingerprint, "num_parameters": loaded.info.num_parameters}
    (folder / FACTS).write_text(json.dumps(facts) + "\n", encoding="utf-8")


def _write_folder(loaded: LoadedModel, folder: Path, tokenizer: Path | None, *, ignore_eos: bool) -> None:
    loaded.model.save_pretrained(folder)
    if tokenizer is None:
        save_word_tokenizer(folder, loaded.info.vocab_size)
    else:
        copy_tokenizer(tokenizer, folder)
    if ignore_eos:
        drop_eos(folder)


def save_word_tokenizer(folder: Path, vocab_size: int) -> None:
    """Save a tokenizer for random weights, one word a token: ids 17, 4 are the text "17 4".

    A text then has exactly the tokens it was made of, for servers that take no token ids, and every generated token is
    valid UTF-8, so that a server holds no chunk back.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(vocab_size)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE).save_pretrained(folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def drop_eos(folder: Path) -> None:
    """Remove the end-of-sequence token from the folder's configs, for servers that cannot ignore it."""
    for name in _EOS_FILES:
        path = folder / name
        if not path.is_file():
            continue
        config = json.loads(path.read_text(encoding="utf-8"))
        for section in (config, config.get("text_config") or {}):
            if "eos_token_id" in section:
                section["eos_token_id"] = None
        path.unlink()  # it may be a link to the model's own
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main(job_file: str) -> int:
    """Run the command: exit code 0, or 2 with a sentence on stderr."""
    try:
        export_model(json.loads(Path(job_file).read_text(encoding="utf-8")))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
