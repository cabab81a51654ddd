"""Converts kvbench-tiny with llama.cpp's own converter.

    python -m engine.tiny_model.to_gguf LLAMA_CPP/convert_hf_to_gguf.py FOLDER --outtype f32 --outfile MODEL.gguf

The converter tells how a tokenizer splits text by a hash of the ids of one text, and so refuses every new vocabulary.
This answers "qwen2" for a tokenizer that has the pattern of Qwen2's, and leaves the rest to the converter. It needs
llama.cpp's sources (here: build 11434) and what its requirements name, sentencepiece among them.
"""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

from engine.tiny_model.train import PATTERN


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    script = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(script.parent))
    converted = importlib.import_module("conversion.base").TextModel
    by_hash = converted.get_vocab_base_pre

    def split_of(model: Any, tokenizer: Any) -> str:
        text = (model.dir_model / "tokenizer.json").read_text(encoding="utf-8")
        return "qwen2" if json.dumps(PATTERN) in text else by_hash(model, tokenizer)

    converted.get_vocab_base_pre = split_of
    sys.argv = sys.argv[1:]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
