"""The fields of a model's config.json that a plan reads, checked at one place before anything is counted."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engine.model.spec import ModelSpec
from kvbench.common.errors import UsageError
from kvbench.common.schema import explain

_Count = Annotated[int, Field(gt=0)]
_CountOrNone = Annotated[int, Field(ge=0)] | None
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")


def check_config(spec: ModelSpec) -> None:
    """Raises UsageError for the first field that is missing or is not what a plan takes it for."""
    try:
        _Config.model_validate(spec.config)
        _Decoder.model_validate(spec.text_config)
    except ValidationError as error:
        raise UsageError(
            f"the config of model {spec.name!r} cannot be planned with: {explain(error, '')[0].removesuffix('.')}"
        ) from None


class _Part(BaseModel):
    """What is not read may be anything."""

    model_config = ConfigDict(strict=True)


class _GroupWeights(_Part):
    num_bits: int | None = None


class _Group(_Part):
    weights: _GroupWeights | None = None


class _Quantization(_Part):
    bits: float | None = None
    w_bit: float | None = None
    config_groups: dict[str, _Group] | None = None


class _Config(_Part):
    """Fields of the outer config, each of which the decoder's own may have too."""

    text_config: dict[str, Any] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    tie_word_embeddings: bool | None = None
    quantization_config: _Quantization | None = None


class _Decoder(_Config):
    """Fields of the decoder's config; ``None``: those that only some models have."""

    model_type: str | None = None
    hidden_size: _Count
    num_hidden_layers: _Count
    num_attention_heads: _Count
    vocab_size: _Count
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    intermediate_size: _Count | None = None
    ffn_dim: _Count | None = None
    max_position_embeddings: _Count | None = None

    layer_types: list[str] | None = None
    sliding_window: _CountOrNone = None
    max_window_layers: _CountOrNone = None

    kv_lora_rank: _CountOrNone = None
    q_lora_rank: _CountOrNone = None
    qk_rope_head_dim: _CountOrNone = None
    qk_nope_head_dim: _CountOrNone = None
    v_head_dim: _CountOrNone = None

    num_local_experts: _CountOrNone = None
    num_experts: _CountOrNone = None
    n_routed_experts: _CountOrNone = None
    n_shared_experts: _CountOrNone = None
    num_experts_per_tok: _CountOrNone = None
    moe_intermediate_size: _CountOrNone = None
    first_k_dense_replace: _CountOrNone = None
    mlp_only_layers: list[int] | None = None

    @model_validator(mode="before")
    @classmethod
    def _readable_pattern(cls, text: dict[str, Any]) -> dict[str, Any]:
        """The pattern is read where no layer_types are given, beside which some models have letters for it."""
        for name in _PATTERNS if not text.get("layer_types") else ():
            if not isinstance(text.get(name), int | None):
                raise ValueError(f"{name} {text[name]!r} is not a whole number; give layer_types instead")
        return text

    @model_validator(mode="after")
    def _goes_together(self) -> _Decoder:
        opt = self.model_type == "opt"
        needed = ["ffn_dim", "max_position_embeddings"] if opt else ["intermediate_size"]
        if self.kv_lora_rank:
            needed += ["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"]
        if self.num_local_experts or self.num_experts or self.n_routed_experts:
            needed.append("num_experts_per_tok")
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"{name} is missing; add it")
        if "sliding_attention" in (self.layer_types or ()) and not self.sliding_window:
            raise ValueError("layer_types has sliding_attention, and sliding_window is missing; add it")
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} num_hidden_layers; give "
                "one for each layer"
            )
        return self
