"""Writes a Llama model as a GGUF file for llama.cpp, with a vocabulary in which each token is the word of its id.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 3). Real checkpoints, with a tokenizer of
their own, are converted by llama.cpp's convert_hf_to_gguf.py; this is for random weights, which have none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ALIGNMENT = 32
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9  # types of metadata
_TENSOR_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
_NORMAL_TOKEN = 1
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: PreTrainedModel, path: Path) -> None:
    """Writes ``model``. Raises ValueError where it is not a plain Llama."""
    config = model.config
    if reason := _refusal(config):
        raise ValueError(
            f"{reason}, and only plain Llama models are written as GGUF: convert the model with llama.cpp's "
            "convert_hf_to_gguf.py and name the file with -o model.path=MODEL.gguf"
        )
    tensors = dict(_tensors(model))
    head, offset = [], 0
    for name, tensor in tensors.items():
        shape = tensor.shape[::-1]  # the fastest dimension first
        head.append(_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        head.append(struct.pack("<IQ", _TENSOR_TYPES[tensor.dtype], offset))
        offset += _padded(tensor.nbytes)
    metadata = [_string(key) + _value(kind, value) for key, kind, value in _metadata(config)]
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        file.write(b"".join(metadata + head))
        file.write(bytes(_padded(file.tell()) - file.tell()))
        for tensor in tensors.values():
            file.write(tensor.view(torch.uint8).numpy().data)
            file.write(bytes(_padded(tensor.nbytes) - tensor.nbytes))


def _refusal(config: Any) -> str | None:
    """What of a model this file cannot say; None for nothing."""
    if config.model_type != "llama":
        return f"the model's type is {config.model_type}"
    if (rope := config.rope_parameters["rope_type"]) != "default":
        return f"the model's RoPE is of type {rope}"
    biased = [name for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)]
    return f"the model has {biased[0]}" if biased else None


def _metadata(config: Any) -> Iterable[tuple[str, int, Any]]:
    words = [f"\u2581{i}" for i in range(config.vocab_size)]  # SentencePiece's mark of a word's beginning
    return (
        ("general.architecture", _STRING, "llama"),
        ("llama.vocab_size", _U32, config.vocab_size),
        ("llama.context_length", _U32, config.max_position_embeddings),
        ("llama.embedding_length", _U32, config.hidden_size),
        ("llama.block_count", _U32, config.num_hidden_layers),
        ("llama.feed_forward_length", _U32, config.intermediate_size),
        ("llama.attention.head_count", _U32, config.num_attention_heads),
        ("llama.attention.head_count_kv", _U32, config.num_key_value_heads),
        ("llama.attention.key_length", _U32, config.head_dim),
        ("llama.attention.value_length", _U32, config.head_dim),
        ("llama.attention.layer_norm_rms_epsilon", _F32, config.rms_norm_eps),
        ("llama.rope.dimension_count", _U32, config.head_dim),
        ("llama.rope.freq_base", _F32, config.rope_parameters["rope_theta"]),
        ("tokenizer.ggml.model", _STRING, "llama"),
        ("tokenizer.ggml.tokens", _ARRAY, (_STRING, words)),
        ("tokenizer.ggml.scores", _ARRAY, (_F32, [0.0] * len(words))),
        ("tokenizer.ggml.token_type", _ARRAY, (_I32, [_NORMAL_TOKEN] * len(words))),
        ("tokenizer.ggml.add_bos_token", _BOOL, False),
    )


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights under llama.cpp's names; vectors in float32, as it wants them."""
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor, short = tensor.detach().cpu(), _NAMES.get(name)
        if short is None:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            kind = _LAYER_NAMES[part]
            short = f"blk.{layer}.{kind}.weight"
            tensor = _interleaved(tensor, heads[kind]) if kind in heads else tensor
        yield short, (tensor.float() if tensor.ndim == 1 else tensor).contiguous()


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a projection for a RoPE of neighbouring pairs, from those for Hugging Face's RoPE of two halves."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(kind: int, value: Any) -> bytes:
    """A value with its type in front."""
    if kind != _ARRAY:
        return struct.pack("<I", kind) + _plain(kind, value)
    of, values = value
    return struct.pack("<IIQ", kind, of, len(values)) + b"".join(_plain(of, each) for each in values)


def _plain(kind: int, value: Any) -> bytes:
    forms = {_U32: "<I", _I32: "<i", _F32: "<f", _BOOL: "<?"}
    return _string(value) if kind == _STRING else struct.pack(forms[kind], value)
