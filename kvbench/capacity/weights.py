"""What a model's weights take: parameters counted from its config, at the bytes that its checkpoint has for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.model.spec import DTYPE_BYTES
from kvbench.capacity.model import PlannedModel
from kvbench.common.errors import UsageError

QUANTIZATIONS = ("fp8", "awq", "gptq", "mxfp4")
_GROUP = 128  # values with a scale (2 bytes) and a zero point (half a byte) of their own: awq's and gptq's usual
_FOUR_BITS = 0.5 + 2.5 / _GROUP
_MXFP4 = 0.5 + 1 / 32  # 32 values share one byte of scale
_MXFP4_MULTIPLE = 256  # vLLM pads the experts' inner dimension to one: gpt-oss-120b takes 64.4 GiB, its files 60.8
_COUNTED = {
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gemma3_text", "gpt_oss",
    "deepseek_v2", "deepseek_v3", "phi3", "opt",
}  # fmt: skip


@dataclass(frozen=True)
class Parameters:
    """Numbers of a model.

    ``embedding``, ``head``: of the vocabulary; a tied head is 0.
    ``linear``: matrices of attention and MLP; ``experts``: matrices of all routed experts.
    ``other``: norms, biases, routers, positions, a vision tower: never quantised.
    ``used_experts``: of ``experts``, those that one token goes through.
    """

    embedding: int
    head: int
    linear: int
    experts: int
    other: int
    used_experts: int

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.linear + self.experts + self.other


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights. ``source``: how they are known. ``read_bytes``: what a decode step reads at least."""

    total_bytes: int
    read_bytes: int
    parameters: Parameters
    source: str


def weights_of(model: PlannedModel, quantization: str | None = None) -> Weights:
    """From the safetensors of a folder, else counted; ``quantization``: another than the checkpoint's own.

    Raises UsageError for a quantisation of the checkpoint whose bytes are not known.
    """
    parameters, text = count_parameters(model), model.spec.text_config
    files = list(model.spec.weights.glob("*.safetensors")) if model.spec.weights and not quantization else []
    if files:
        size = sum(file.stat().st_size for file in files)
        read = int(size * (1 - _unread(parameters) / parameters.total))
        return Weights(size, read, parameters, "the size of its safetensors")
    stored = quantization or _quantization_of(model)
    if stored == "mxfp4" and not parameters.experts:
        raise UsageError(f"{model.name} has no experts, which are what mxfp4 quantises: give another --quantization")
    of_dtype = DTYPE_BYTES[model.spec.default_dtype]
    linear = {"fp8": 1.0, "awq": _FOUR_BITS, "gptq": _FOUR_BITS}.get(stored or "", float(of_dtype))
    experts = _MXFP4 * _padding(text) if stored == "mxfp4" else linear

    def size_of(embedding: int, expert: int) -> int:
        kept = embedding + parameters.head + parameters.other
        return int(kept * of_dtype + parameters.linear * linear + expert * experts)

    rows = parameters.embedding if not parameters.head else 0  # a tied embedding is read as the head
    rest = model.spec.default_dtype
    quantised = "experts" if stored == "mxfp4" else "attention and MLP"
    source = f"{quantised} in {stored}, the rest in {rest}" if stored else f"in {rest}"
    if text.get("model_type") not in _COUNTED:
        source += f", counted as a Llama's, since model_type {text.get('model_type')} is not known"
    total, read = size_of(parameters.embedding, parameters.experts), size_of(rows, parameters.used_experts)
    return Weights(total, read, parameters, source)


def count_parameters(model: PlannedModel) -> Parameters:
    """Counted from the config's dimensions, by the rules of its model_type."""
    text = model.spec.text_config
    hidden, vocab, layers = text["hidden_size"], text["vocab_size"], text["num_hidden_layers"]
    usual = str(text.get("model_type")).startswith(("gemma", "opt"))  # what transformers takes where none is stated
    tied = text.get("tie_word_embeddings", model.spec.config.get("tie_word_embeddings", usual))
    matrices, vectors = _attention(text)
    norms = (4 if str(text.get("model_type")).startswith(("gemma2", "gemma3")) else 2) * hidden
    linear, experts, used, other = matrices * layers, 0, 0, (vectors + norms) * layers + hidden
    if text.get("model_type") == "opt":
        linear += 2 * hidden * text["ffn_dim"] * layers
        other += (2 * hidden + text["ffn_dim"] + hidden) * layers + hidden  # biases of norms and MLP
        other += (text["max_position_embeddings"] + 2) * hidden
    else:
        sparse = _sparse_layers(text)
        linear += 3 * hidden * text["intermediate_size"] * (layers - sparse)
        if sparse:
            every, used_by_token, shared, small = _experts(text)
            linear, other = linear + shared * sparse, other + small * sparse
            experts, used = every * sparse, used_by_token * sparse
    embedding = vocab * hidden
    return Parameters(embedding, 0 if tied else embedding, linear, experts, other + model.other_parameters, used)


def experts_of(model: PlannedModel) -> tuple[int, int] | None:
    """Routed experts of a layer, and those that one token goes through; None: the model has none."""
    count = _number_of_experts(model.spec.text_config)
    return (count, model.spec.text_config["num_experts_per_tok"]) if count else None


def _attention(text: dict[str, Any]) -> tuple[int, int]:
    """Of one layer: the numbers in matrices, and those in biases and norms."""
    hidden, heads, kind = text["hidden_size"], text["num_attention_heads"], text.get("model_type")
    if rank := text.get("kv_lora_rank"):
        rope, nope, value = text["qk_rope_head_dim"], text["qk_nope_head_dim"], text["v_head_dim"]
        compressed, queries = text.get("q_lora_rank"), heads * (nope + rope)
        q = hidden * compressed + compressed * queries if compressed else hidden * queries
        kv = hidden * (rank + rope) + rank * heads * (nope + value)
        return q + kv + heads * value * hidden, rank + (compressed or 0)
    dim = text.get("head_dim") or hidden // heads
    queries, keys = heads * dim, (text.get("num_key_value_heads") or heads) * dim
    vectors = 0
    if kind in ("qwen2", "opt", "gpt_oss") or text.get("attention_bias"):
        vectors += queries + 2 * keys + (0 if kind == "qwen2" else hidden)
    if kind in ("qwen3", "qwen3_moe", "gemma3", "gemma3_text"):
        vectors += 2 * dim  # norms of queries and keys
    if kind == "gpt_oss":
        vectors += heads  # attention sinks
    return hidden * (2 * queries + 2 * keys), vectors


def _sparse_layers(text: dict[str, Any]) -> int:
    """Layers with experts."""
    if not _number_of_experts(text):
        return 0
    return text["num_hidden_layers"] - (text.get("first_k_dense_replace") or 0) - len(text.get("mlp_only_layers") or ())


def _number_of_experts(text: dict[str, Any]) -> int:
    return text.get("num_local_experts") or text.get("num_experts") or text.get("n_routed_experts") or 0


def _experts(text: dict[str, Any]) -> tuple[int, int, int, int]:
    """Of one layer: all routed experts, those of one token, the shared ones, and router and biases."""
    hidden, count = text["hidden_size"], _number_of_experts(text)
    inner, kind = text.get("moe_intermediate_size") or text["intermediate_size"], text.get("model_type")
    one, router = 3 * hidden * inner, hidden * count
    if kind == "deepseek_v3":
        router += count  # the correction of the load balancing
    if kind == "gpt_oss":
        router += count + count * (2 * inner + hidden)  # biases of router and experts
    return one * count, one * text["num_experts_per_tok"], one * (text.get("n_shared_experts") or 0), router


def _padding(text: dict[str, Any]) -> float:
    """How much larger the experts are as vLLM keeps them in mxfp4."""
    inner = text.get("moe_intermediate_size") or text["intermediate_size"]
    return -(-inner // _MXFP4_MULTIPLE) * _MXFP4_MULTIPLE / inner


def _unread(parameters: Parameters) -> int:
    """Parameters that a decode step does not read: rows of the embedding, experts of other tokens."""
    return (parameters.embedding if parameters.head else 0) + parameters.experts - parameters.used_experts


def _quantization_of(model: PlannedModel) -> str | None:
    """The checkpoint's own quantisation, as its config names it."""
    given = model.spec.config.get("quantization_config") or model.spec.text_config.get("quantization_config")
    if not given:
        return None
    method, bits = str(given.get("quant_method")), given.get("bits", given.get("w_bit"))
    if method == "compressed-tensors":
        stored = [group.get("weights") or {} for group in (given.get("config_groups") or {}).values()]
        bits = next((each.get("num_bits") for each in stored), None)
        method = {8: "fp8", 4: "gptq"}.get(bits or 0, method)
    elif method == "fbgemm_fp8":
        method = "fp8"
    if method not in QUANTIZATIONS or (method in ("awq", "gptq") and bits not in (4, None)):
        size = f" with {bits} bits" if bits else ""
        raise UsageError(
            f"the checkpoint of {model.name} is quantised by {method!r}{size}, whose bytes kvbench does not know: give "
            f"its folder with the safetensors, or --quantization {'|'.join(QUANTIZATIONS)}"
        )
    return method
