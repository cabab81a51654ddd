"""Trains the byte-level BPE tokenizer that the project ships (engine/tokenizer/bpe8k).

    python -m kvbench_engine.tokenizer.train [OUT_DIR]

The training text is what every machine with Python has, under the PSF licence: the language reference in
``pydoc_data.topics`` and the docstrings of the standard library's pure-Python modules, plus Shakespeare's
sonnets (public domain) in workloads/text/. Nothing is downloaded. A result from another Python version may
differ in its merges, so the trained files are committed and this script says how they came to be.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

SONNETS = Path(__file__).resolve().parents[2] / "workloads" / "text" / "sonnets.txt"
VOCAB_SIZE = 8192
SPECIAL_TOKENS = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|endoftext|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_SKIPPED_PARTS = {"test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3", "turtledemo"}


def stdlib_docstrings() -> Iterator[str]:
    """Every docstring of the standard library, module by module in sorted order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED_PARTS & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # a few files are written to be unreadable, for the library's own tests
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield text + "\n"


def reference_topics() -> Iterator[str]:
    """The language reference of the Python installation, topic by topic in sorted order."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]


def training_text() -> Iterator[str]:
    """The whole corpus, in a fixed order."""
    yield from reference_topics()
    for _ in range(8):  # the sonnets are short beside the rest; repeated, their words earn merges
        yield SONNETS.read_text(encoding="utf-8")
    yield from stdlib_docstrings()


def train_bpe(texts: Iterable[str], pre_tokenizer: PreTokenizer, vocab_size: int, min_frequency: int = 0) -> Tokenizer:
    """A byte-level BPE with SPECIAL_TOKENS; ``min_frequency``: of a pair that is merged."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, model_max_length: int, **more: str) -> None:
    """Writes tokenizer.json and tokenizer_config.json; ``more``: further keys of the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **more,
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[0],
        "additional_special_tokens": SPECIAL_TOKENS[1:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def train(out_dir: Path) -> int:
    """Trains, writes tokenizer.json and tokenizer_config.json, and returns the vocabulary's size."""
    from tokenizers import pre_tokenizers

    tokenizer = train_bpe(training_text(), pre_tokenizers.ByteLevel(add_prefix_space=False), VOCAB_SIZE, 2)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"the text gave {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}; add text to training_text()."
        )
    save_tokenizer(tokenizer, out_dir, 1_000_000)
    return tokenizer.get_vocab_size()


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "bpe8k"
    print(f"{train(target)} tokens in {target}")
