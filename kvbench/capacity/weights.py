"""Computes the bytes of a model's weights: parameters counted from its config, times the checkpoint's bytes a piece."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.capacity.model import DecoderConfig, PlannedModel, Quantization
from kvbench.capacity.sentences import say
from kvbench.common.errors import UsageError

QUANTIZATIONS = ("fp8", "awq", "gptq", "mxfp4")
_GROUP = 128  # values with a scale (2 bytes) and a zero point (half a byte) of their own: awq's and gptq's usual
_FOUR_BITS = 0.5 + 2.5 / _GROUP
_LINEAR_BYTES = {"fp8": 1.0, "awq": _FOUR_BITS, "gptq": _FOUR_BITS}
_MXFP4 = 0.5 + 1 / 32  # 32 values share one byte of scale
_MXFP4_MULTIPLE = 256  # vLLM pads the experts' inner dimension to one: gpt-oss-120b takes 64.4 GiB, its files 60.8
_COUNTED = {
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gemma3_text", "gpt_oss",
    "deepseek_v2", "deepseek_v3", "phi3", "opt",
}  # fmt: skip


@dataclass(frozen=True)
class Parameters:
    """Numbers of a model.

    embedding, head: of the vocabulary; a tied head is 0
    linear: matrices of attention and MLP; experts: matrices of all routed experts
    other: norms, biases, routers, positions, a vision tower: never quantised
    used_experts: of ``experts``, those that one token goes through
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

    @property
    def unread(self) -> int:
        """Numbers that a decode step does not read: rows of the embedding, experts of other tokens."""
        return (self.embedding if self.head else 0) + self.experts - self.used_experts


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights. ``source``: how they are known. ``read_bytes``: what a decode step reads at least."""

    total_bytes: int
    read_bytes: int
    parameters: Parameters
    source: str


def weights_of(model: PlannedModel, quantization: str | None = None) -> Weights:
    """The weights by the safetensors of a folder, else counted; ``quantization``: another than the checkpoint's own.

    Raises UsageError for a quantisation of the checkpoint whose bytes are not known.
    """
    parameters = count_parameters(model)
    folder = model.spec.weights
    if folder and not quantization and (files := list(folder.glob("*.safetensors"))):
        size = sum(file.stat().st_size for file in files)
        read = int(size * (1 - parameters.unread / parameters.total))
        return Weights(size, read, parameters, say("weights.files"))
    stored = quantization or _quantization_of(model)
    if stored == "mxfp4" and not parameters.experts:
        raise UsageError(say("weights.no_experts", model=model.name))
    linear = _LINEAR_BYTES.get(stored or "", float(model.dtype_bytes))
    experts, inner = linear, model.config.expert_inner
    if stored == "mxfp4":
        experts = _MXFP4 * (-(-inner // _MXFP4_MULTIPLE) * _MXFP4_MULTIPLE / inner)

    def size_of(embedding: int, expert: int) -> int:
        kept = embedding + parameters.head + parameters.other
        return int(kept * model.dtype_bytes + parameters.linear * linear + expert * experts)

    rows = parameters.embedding if not parameters.head else 0  # a tied embedding is read as the head
    total, read = size_of(parameters.embedding, parameters.experts), size_of(rows, parameters.used_experts)
    return Weights(total, read, parameters, _source(model, stored))


def _source(model: PlannedModel, stored: str | None) -> str:
    kind = model.config.model_type
    counted = say("weights.counted", stored or "no", stored=stored, dtype=model.spec.default_dtype)
    return counted + say("weights.like_llama", kind not in _COUNTED, kind=kind)


def count_parameters(model: PlannedModel) -> Parameters:
    """Counts them from the config's dimensions, by the rules of its model_type."""
    config, layers = model.config, model.config.num_hidden_layers
    hidden = config.hidden_size
    matrices, vectors = _attention(config)
    norms = (4 if config.family.startswith(("gemma2", "gemma3")) else 2) * hidden
    linear, experts, used, other = matrices * layers, 0, 0, (vectors + norms) * layers + hidden
    if config.model_type == "opt":
        linear += 2 * hidden * config.inner * layers
        other += (2 * hidden + config.inner + hidden) * layers + hidden  # biases of norms and MLP
        other += ((config.max_position_embeddings or 0) + 2) * hidden
    else:
        dense = config.first_k_dense_replace + len(config.mlp_only_layers or ())
        sparse = layers - dense if config.routed_experts else 0
        linear += 3 * hidden * config.inner * (layers - sparse)
        if sparse:
            every, used_by_token, shared, small = _experts(config)
            linear, other = linear + shared * sparse, other + small * sparse
            experts, used = every * sparse, used_by_token * sparse
    embedding = config.vocab_size * hidden
    tied = config.family.startswith(("gemma", "opt")) if model.tied is None else model.tied  # as transformers has it
    head = 0 if tied else embedding
    return Parameters(embedding, head, linear, experts, other + model.other_parameters, used)


def experts_of(model: PlannedModel) -> tuple[int, int] | None:
    """Routed experts of a layer, and those that one token goes through; None: the model has none."""
    count = model.config.routed_experts
    return (count, model.config.num_experts_per_tok) if count else None


def _attention(config: DecoderConfig) -> tuple[int, int]:
    """The numbers of one layer in matrices, and those in biases and norms."""
    hidden, heads, kind = config.hidden_size, config.num_attention_heads, config.model_type
    if rank := config.kv_lora_rank:
        rope, nope, value = config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
        compressed, queries = config.q_lora_rank, heads * (nope + rope)
        q = hidden * compressed + compressed * queries if compressed else hidden * queries
        kv = hidden * (rank + rope) + rank * heads * (nope + value)
        return q + kv + heads * value * hidden, rank + compressed
    dim = config.head_dim or hidden // heads
    queries, keys = heads * dim, (config.num_key_value_heads or heads) * dim
    vectors = 0
    if kind in ("qwen2", "opt", "gpt_oss") or config.attention_bias:
        vectors += queries + 2 * keys + (0 if kind == "qwen2" else hidden)
    if kind in ("qwen3", "qwen3_moe", "gemma3", "gemma3_text"):
        vectors += 2 * dim  # norms of queries and keys
    if kind == "gpt_oss":
        vectors += heads  # attention sinks
    return hidden * (2 * queries + 2 * keys), vectors


def _experts(config: DecoderConfig) -> tuple[int, int, int, int]:
    """The numbers of one layer in all routed experts, those of one token, the shared ones, and router and biases."""
    hidden, count, inner = config.hidden_size, config.routed_experts, config.expert_inner
    one, router = 3 * hidden * inner, hidden * count
    if config.model_type == "deepseek_v3":
        router += count  # the correction of the load balancing
    if config.model_type == "gpt_oss":
        router += count + count * (2 * inner + hidden)  # biases of router and experts
    return one * count, one * config.num_experts_per_tok, one * config.n_shared_experts, router


def _quantization_of(model: PlannedModel) -> str | None:
    """The checkpoint's own quantisation, as its config names it."""
    given = model.quantization
    if given is None or given == Quantization():
        return None
    method, bits = str(given.quant_method), given.w_bit if given.bits is None else given.bits
    if method == "compressed-tensors":
        groups = (given.config_groups or {}).values()
        bits = next((group.weights.num_bits if group.weights else None for group in groups), None)
        method = {8: "fp8", 4: "gptq"}.get(bits or 0, method)
    elif method == "fbgemm_fp8":
        method = "fp8"
    if method not in QUANTIZATIONS or (method in ("awq", "gptq") and bits not in (4, None)):
        stated = say("weights.bits", bool(bits), bits=bits)
        names = "|".join(QUANTIZATIONS)
        raise UsageError(say("weights.unknown", model=model.name, method=method, bits=stated, names=names))
    return method
