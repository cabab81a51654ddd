"""A model whose memory is planned: its name, its config.json, and what its layers cache of a token."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kvbench.common.errors import UsageError, as_usage_error
from kvbench.common.schema import explain
from kvbench.common.text import nearest
from kvbench_engine.kv.budget import KVShape, LayerKV
from kvbench_engine.kv.groups import largest, most_pages, ring_slots
from kvbench_engine.model.spec import DTYPE_BYTES, ModelSpec, find_model, shipped_models

_SHIPPED = Path(__file__).parent / "models.json"
_SAME_DIMENSIONS = re.compile(r"^meta-|-(instruct|base|it|chat|hf)(?=-|$)")
_QUANTISED = re.compile(r"(.+)-(fp8|awq|gptq)(-int4|-dynamic)?")
_CACHED = {"full_attention", "sliding_attention"}
_OTHER_STATES = ("mamba_", "ssm_", "linear_")  # beginnings of keys of layers that cache something else
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
_Count = Annotated[int, Field(gt=0)]
_CountOrZero = Annotated[int, BeforeValidator(lambda value: 0 if value is None else value), Field(ge=0)]


class _Part(BaseModel):
    """A part of a config.json; what is not read may be anything."""

    model_config = ConfigDict(strict=True, frozen=True)


class _GroupWeights(_Part):
    num_bits: int | None = None


class _QuantizedGroup(_Part):
    weights: _GroupWeights | None = None


class Quantization(_Part):
    """A checkpoint's statement of how it is quantised."""

    quant_method: Any = None
    bits: int | float | None = None
    w_bit: int | float | None = None
    config_groups: dict[str, _QuantizedGroup] | None = None


class _Config(_Part):
    """Fields of the outer config, each of which the decoder's own may have too."""

    dtype: str | None = None
    torch_dtype: str | None = None
    tie_word_embeddings: bool | None = None
    quantization_config: Quantization | None = None


class DecoderConfig(_Config):
    """The fields of a decoder's config that a plan reads; None and 0: those that it does not have."""

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
    attention_bias: Any = None

    layer_types: list[str] | None = None
    sliding_window: _CountOrZero = 0
    max_window_layers: _CountOrZero = 0

    kv_lora_rank: _CountOrZero = 0
    q_lora_rank: _CountOrZero = 0
    qk_rope_head_dim: _CountOrZero = 0
    qk_nope_head_dim: _CountOrZero = 0
    v_head_dim: _CountOrZero = 0

    num_local_experts: _CountOrZero = 0
    num_experts: _CountOrZero = 0
    n_routed_experts: _CountOrZero = 0
    n_shared_experts: _CountOrZero = 0
    num_experts_per_tok: _CountOrZero = 0
    moe_intermediate_size: _CountOrZero = 0
    first_k_dense_replace: _CountOrZero = 0
    mlp_only_layers: list[int] | None = None

    @property
    def family(self) -> str:
        return self.model_type or ""

    @property
    def inner(self) -> int:
        """The inner dimension of a dense MLP."""
        return self.intermediate_size or self.ffn_dim or 0

    @property
    def expert_inner(self) -> int:
        """The inner dimension of one expert."""
        return self.moe_intermediate_size or self.inner

    @property
    def routed_experts(self) -> int:
        """The routed experts of a layer."""
        return self.num_local_experts or self.num_experts or self.n_routed_experts

    @model_validator(mode="before")
    @classmethod
    def _readable_pattern(cls, text: dict[str, Any]) -> dict[str, Any]:
        """Checks the pattern where it is read: without layer_types, beside which some models have letters for it."""
        if text.get("layer_types"):
            return text
        for name in _PATTERNS:
            if not isinstance(text.get(name), int | None):
                raise ValueError(f"{name} {text[name]!r} is not a whole number; give layer_types instead")
        return text

    @model_validator(mode="after")
    def _goes_together(self) -> DecoderConfig:
        needed = ["intermediate_size"]
        if self.model_type == "opt":
            needed = ["ffn_dim", "max_position_embeddings"]
        if self.kv_lora_rank:
            needed += ["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"]
        if self.routed_experts:
            needed.append("num_experts_per_tok")
        for name in needed:
            if not getattr(self, name):
                raise ValueError(f"{name} is missing; add it")
        if "sliding_attention" in (self.layer_types or ()) and not self.sliding_window:
            raise ValueError("layer_types has sliding_attention, and sliding_window is missing; add it")
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} num_hidden_layers; give "
                "one for each layer"
            )
        return self


@dataclass(frozen=True)
class CachedLayers:
    """Layers that cache alike.

    count: layers
    kv: K and V of one token in one of them; latent attention (MLA) has one KV head, which every GPU needs as a whole
    """

    count: int
    kv: LayerKV

    @property
    def window(self) -> int | None:
        """Tokens that a layer with a sliding window sees; None: all."""
        return self.kv.window


@dataclass(frozen=True)
class PlannedModel:
    """A model's config and what its layers cache.

    other_parameters: those beside the decoder (a vision tower)
    quantization, tied: as the config states them; None where it does not
    """

    spec: ModelSpec
    config: DecoderConfig
    layers: tuple[CachedLayers, ...]
    quantization: Quantization | None = None
    tied: bool | None = None
    other_parameters: int = 0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a number in the model's own dtype."""
        return DTYPE_BYTES[self.spec.default_dtype]

    def sequence_bytes(self, tokens: int, kv_cache_dtype: str = "auto", *, gpus: int = 1, page_size: int = 1) -> int:
        """Returns bytes of one decoding sequence's KV on each of ``gpus``, in whole pages."""
        kinds = self._groups(kv_cache_dtype, gpus)
        return sum(most_pages(window, tokens, 1, page_size) * page_size * size for window, size in kinds)

    def read_bytes(self, tokens: int, kv_cache_dtype: str = "auto", *, gpus: int = 1) -> int:
        """Returns bytes of KV on each of ``gpus`` that the next token of a sequence of ``tokens`` reads."""
        sizes = [(group.window or tokens, self.group_bytes(group, kv_cache_dtype, gpus)) for group in self.layers]
        return sum(min(tokens, window) * size for window, size in sizes)

    def reservation_bytes(self, tokens: int, step_tokens: int, kv_cache_dtype: str = "auto", *, gpus: int = 1) -> int:
        """Returns bytes of a contiguous reservation of ``tokens`` on each of ``gpus``; windows have rings in it."""
        kinds = self._groups(kv_cache_dtype, gpus)
        return sum(ring_slots(window, tokens, step_tokens) * size for window, size in kinds)

    @property
    def page_groups(self) -> tuple[int, int]:
        """The number of groups of layers that share a pool of pages, and the layers of a group, at most."""
        groups = self.kv_shape().groups(None)
        return len(groups), len(largest(groups).layers)

    def _groups(self, kv_cache_dtype: str, gpus: int) -> list[tuple[int | None, int]]:
        """Returns window and bytes a token of each group of layers that has pages of its own.

        Layers with a window and others share a pool as groups of equal numbers (``kvbench_engine.kv.groups``), of which
        the last may have fewer layers. Where KV of layers has several sizes, each kind is a group.
        """
        shape = self.kv_shape(gpus)
        groups = shape.groups(None)
        if all(group.window is None for group in groups):
            return [(group.window, self.group_bytes(group, kv_cache_dtype, gpus)) for group in self.layers]
        size = shape.of_group(largest(groups)).slot_bytes(kv_cache_dtype)
        return [(group.window, size) for group in groups]

    def token_bytes(self, kv_cache_dtype: str = "auto", *, gpus: int = 1) -> int:
        """Bytes of one token's KV in all layers on each of ``gpus``, the layers with a window among them."""
        return self.kv_shape(gpus).slot_bytes(kv_cache_dtype)

    def kv_shape(self, gpus: int = 1) -> KVShape:
        """The KV of all layers on each of ``gpus``; a KV head that several GPUs hold counts on each."""
        layers = [replace(group.kv, kv_heads=max(1, group.kv.kv_heads // gpus)) for group in self.layers]
        return KVShape(
            tuple(kv for kv, group in zip(layers, self.layers, strict=True) for _ in range(group.count)),
            self.dtype_bytes,
        )

    def group_bytes(self, group: CachedLayers, kv_cache_dtype: str = "auto", gpus: int = 1) -> int:
        """Bytes of one token's KV in the layers of ``group`` on each of ``gpus``."""
        heads = max(1, group.kv.kv_heads // gpus)  # a latent row is one head: every GPU has it
        return KVShape((replace(group.kv, kv_heads=heads),) * group.count, self.dtype_bytes).slot_bytes(kv_cache_dtype)

    def check_split(self, gpus: int) -> None:
        """Raises UsageError where tensor parallelism cannot split the heads over ``gpus``."""
        if self.config.num_attention_heads % gpus:
            raise UsageError(
                f"{gpus} GPUs do not divide the {self.config.num_attention_heads} query heads of {self.name}: give a "
                "number that does"
            )
        kv_heads = self.layers[0].kv.kv_heads
        if max(kv_heads, gpus) % min(kv_heads, gpus):
            raise UsageError(
                f"{gpus} GPUs can neither split nor repeat the {kv_heads} KV heads of {self.name}: give a number that "
                "divides them or is a multiple of them"
            )


def plan_model(model: str) -> PlannedModel:
    """Returns the model of a local folder, of a config.json, or of the dimensions that ship.

    Of a name, case, organisation and "-Instruct" do not matter.

    Raises:
        UsageError: there is none (the nearest names are told), or what it caches is not known.
    """
    path = Path(model).expanduser()
    if path.is_dir() or path.suffix == ".json":
        with as_usage_error():
            return _planned(find_model(model, "dummy"))
    shipped = _by_name(model)
    if shipped is None:
        raise UsageError(
            f"{model!r} is neither a model that kvbench knows nor a file or folder: {_known_instead(model)}"
        )
    return shipped


def known_models() -> list[PlannedModel]:
    """Returns all models whose dimensions ship."""
    return list({model.name: model for model in _shipped().values()}.values())


def _by_name(model: str) -> PlannedModel | None:
    """Finds the shipped model of this name, else of the name without words that leave the dimensions as they are."""
    name = model.rsplit("/", 1)[-1].lower()
    return _shipped().get(name) or _shipped().get(_SAME_DIMENSIONS.sub("", name))


def _known_instead(model: str) -> str:
    """Says what to give instead of an unknown name: an unquantised model, or the nearest names."""
    name = model.rsplit("/", 1)[-1].lower()
    quantised = _QUANTISED.fullmatch(name)
    if quantised and (plain := _by_name(quantised[1])):
        return f"give its folder, or {plain.name} with --quantization {quantised[2]}"
    if near := nearest(_SAME_DIMENSIONS.sub("", name), _shipped(), most=3):
        hint = f"did you mean {', '.join(_shipped()[other].name for other in near)}?"
    else:
        hint = f"known: {', '.join(other.name for other in known_models())}."
    return f"{hint} Another model is given by its folder or config.json, a workload by a file that ends in .yaml"


@cache
def _shipped() -> dict[str, PlannedModel]:
    """The models and configs of the built-in engine, and those in models.json, by lower-case name and alias."""
    models = {name.lower(): _planned(find_model(name, "dummy")) for name in shipped_models()}
    for name, entry in json.loads(_SHIPPED.read_text(encoding="utf-8")).items():
        same = models[entry["same_as"].lower()].spec.config if "same_as" in entry else {}
        spec = ModelSpec(name, {**same, **entry.get("config", {})}, _SHIPPED, None)
        planned = _planned(spec, entry.get("other_parameters", 0))
        models.update({other.lower(): planned for other in (name, *entry.get("aliases", ()))})
    return models


def _planned(spec: ModelSpec, other_parameters: int = 0) -> PlannedModel:
    """Raises UsageError for a config that does not say what its layers cache, or layers that cache something else."""
    try:
        outer, config = _Config.model_validate(spec.config), DecoderConfig.model_validate(spec.text_config)
    except ValidationError as error:
        reason = explain(error, "")[0].removesuffix(".")
        raise UsageError(f"the config of model {spec.name!r} cannot be planned with: {reason}") from None
    others = set(config.layer_types or ()) - _CACHED
    if not config.kv_lora_rank and (others or any(key.startswith(_OTHER_STATES) for key in spec.text_config)):
        raise UsageError(
            f"model {spec.name!r} has layers ({', '.join(sorted(others)) or config.model_type}) that cache "
            "something else than K and V of its tokens: kvbench cannot plan their memory"
        )
    layers = tuple(CachedLayers(count, kv) for kv, count in Counter(spec.kv_shape("float32").layers).items())
    tied = outer.tie_word_embeddings if config.tie_word_embeddings is None else config.tie_word_embeddings
    quantization = outer.quantization_config or config.quantization_config
    return PlannedModel(spec, config, layers, quantization, tied, other_parameters)
