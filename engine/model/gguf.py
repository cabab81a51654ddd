"""Writes a Hugging Face model as a GGUF file for llama.cpp, with the package ``gguf`` (an optional extra).

Weights keep their dtype; vectors are float32, as llama.cpp wants them. A model without a tokenizer gets a vocabulary in
which each token is the word of its id. What is not written here, llama.cpp's convert_hf_to_gguf.py may convert; its
``conversion/llama.py`` and ``conversion/qwen.py`` (build 11434) say how a model becomes tensors and metadata.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench_engine.tokenizer.words import CHAT_TEMPLATE

if TYPE_CHECKING:
    import torch
    from gguf import GGUFWriter
    from transformers import PreTrainedModel

PACKAGE = "gguf>=0.17"
_ARCHITECTURES = {"llama": "LLAMA", "qwen3": "QWEN3"}  # model_type -> gguf.MODEL_ARCH
_ROPE_OF_PAIRS = ("llama",)  # llama.cpp turns neighbouring rows of a head together, Hugging Face those of two halves
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    None: "gpt-2",
    QWEN2_SPLIT: "qwen2",
}  # pattern that splits a text (None: ByteLevel's own) -> llama.cpp's name


def refusal(config: Mapping[str, Any], tokenizer: Path | None) -> str | None:
    """The reason for which no GGUF file can be written, with the way out; None when it can. Needs no torch.

    ``config``: of config.json, or as transformers has it. ``tokenizer``: a folder, None for a word of each id.
    """
    if reason := _model_refusal(config) or _tokenizer_refusal(tokenizer):
        return (
            f"{reason}, and kvbench cannot write it as GGUF: convert the model with llama.cpp's convert_hf_to_gguf.py "
            "and name the file with -o model.path=MODEL.gguf"
        )
    if importlib.util.find_spec("gguf") is None:
        return f"llama.cpp reads GGUF files, and the package that writes them is missing: pip install '{PACKAGE}'"
    return None


def write_gguf(model: PreTrainedModel, path: Path, tokenizer: Path | None = None) -> None:
    """Writes ``model`` with the tokenizer of that folder. Raises ValueError where ``refusal`` has a reason."""
    config = model.config
    if reason := refusal(config.to_dict(), tokenizer):
        raise ValueError(reason)
    import gguf

    architecture = gguf.MODEL_ARCH[_ARCHITECTURES[config.model_type]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_sizes(writer, config)
    if tokenizer is None:
        _add_words(writer, config.vocab_size)
    else:
        _add_tokenizer(writer, tokenizer, config.vocab_size)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in _tensors(model):
        short = names.get_name(name, try_suffixes=(".weight",))
        if short is None:
            raise ValueError(
                f"the model's weight {name} has no name in llama.cpp's {config.model_type}: convert the model with "
                "llama.cpp's convert_hf_to_gguf.py"
            )
        _add_tensor(writer, short, tensor)
    if (factors := _rope_factors(config)) is not None:
        _add_tensor(writer, f"{gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS]}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _model_refusal(config: Mapping[str, Any]) -> str | None:
    """The part of a model that llama.cpp computes otherwise, or that is not written here; None for none."""
    if (kind := config.get("model_type")) not in _ARCHITECTURES:
        return f"the model's type is {kind}, not {' or '.join(_ARCHITECTURES)}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (scaled := rope.get("rope_type", rope.get("type", "default"))) not in ("default", "llama3"):
        return f"the model's RoPE is of type {scaled}"
    if (activation := config.get("hidden_act", "silu")) != "silu":
        return f"the model's activation is {activation}, not silu"
    odd = [name for name in ("attention_bias", "mlp_bias", "use_sliding_window") if config.get(name)]
    return f"the model has {odd[0]}" if odd else None


def _tokenizer_refusal(tokenizer: Path | None) -> str | None:
    if tokenizer is None or _split_of(tokenizer):
        return None
    return f"the tokenizer in {tokenizer} has no tokenizer.json that splits texts as GPT-2's or Qwen2's does"


def _split_of(tokenizer: Path) -> str | None:
    """llama.cpp's name of how a byte-level BPE splits texts; None for other tokenizers and patterns."""
    try:
        tokenizer_json = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    first = tokenizer_json.get("pre_tokenizer") or {}
    steps = first.get("pretokenizers", [first])
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    patterns += [None for step in levels if step.get("use_regex", True)]
    if (tokenizer_json.get("model") or {}).get("type") != "BPE" or len(levels) != 1 or len(patterns) != 1:
        return None
    return _SPLITS.get(patterns[0])


def _add_sizes(writer: GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _add_words(writer: GGUFWriter, vocab_size: int) -> None:
    """Add a vocabulary of words: the text of ids 17 and 4 is "17 4"."""
    from gguf import TokenType

    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"\u2581{i}" for i in range(vocab_size)])  # SentencePiece's mark of a word's beginning
    writer.add_token_scores([0.0] * vocab_size)
    writer.add_token_types([TokenType.NORMAL] * vocab_size)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_tokenizer(writer: GGUFWriter, folder: Path, vocab_size: int) -> None:
    """Add a byte-level BPE. Raises ValueError where it has tokens that the model does not know."""
    from gguf import SpecialVocab, TokenType

    tokenizer_json = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["id"]: token for token in tokenizer_json.get("added_tokens") or ()}
    texts = {i: text for text, i in tokenizer_json["model"]["vocab"].items()} | {
        i: token["content"] for i, token in added.items()
    }
    if (highest := max(texts)) >= vocab_size:
        raise ValueError(f"the tokenizer in {folder} has the token id {highest}, and the model {vocab_size} tokens")

    def kind(i: int) -> TokenType:
        if i in added:
            return TokenType.CONTROL if added[i].get("special") else TokenType.USER_DEFINED
        return TokenType.NORMAL if i in texts else TokenType.UNUSED

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split_of(folder))
    writer.add_token_list([texts.get(i, f"[PAD{i}]") for i in range(vocab_size)])
    writer.add_token_types([kind(i) for i in range(vocab_size)])
    special = SpecialVocab(folder, load_merges=True, n_vocab=vocab_size)
    special.add_special_token.setdefault("bos", False)
    special.add_to_gguf(writer)


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights as llama.cpp orders their rows, under Hugging Face's names."""
    config = model.config
    pairs = config.model_type in _ROPE_OF_PAIRS
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        kind = name.removesuffix(".weight").rpartition(".")[2]
        tensor = tensor.detach().cpu()
        yield name, _interleaved(tensor, heads[kind]) if pairs and kind in heads else tensor


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a projection for a RoPE of neighbouring pairs, from those for Hugging Face's RoPE of two halves."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _rope_factors(config: Any) -> torch.Tensor | None:
    """The divisor of each frequency of llama3's RoPE, [head_dim / 2]; None where RoPE is plain."""
    import torch

    rope = config.rope_parameters
    if rope["rope_type"] != "llama3":
        return None
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** -steps / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)  # 0: a long wave, divided by all of it; 1: a short one, kept
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


def _add_tensor(writer: GGUFWriter, name: str, tensor: torch.Tensor) -> None:
    import torch
    from gguf import GGMLQuantizationType

    if tensor.ndim == 1:
        tensor = tensor.float()
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:  # NumPy has none: its bytes
        writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.numpy())
