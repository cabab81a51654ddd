"""A model whose memory is planned: its name, its config.json, and what its layers cache of a token."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engine.kv.budget import KVShape, LayerKV
from engine.model.spec import DTYPE_BYTES, ModelSpec, find_model, shipped_models
from kvbench.capacity.config import check_config
from kvbench.common.errors import UsageError
from kvbench.common.text import nearest

_SHIPPED = Path(__file__).parent / "models.json"
_SAME_DIMENSIONS = re.compile(r"^meta-|-(instruct|base|it|chat|hf)(?=-|$)")
_QUANTISED = re.compile(r"(.+)-(fp8|awq|gptq)(-int4|-dynamic)?")
_CACHED = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class CachedLayers:
    """Layers that cache alike.

    ``count``: layers.
    ``kv``: K and V of one token in one of them. Latent attention (MLA) has one row, which is K and V at once.
    ``window``: tokens that a layer with a sliding window holds; None: all.
    ``latent``: MLA; its row is one KV head, which every GPU needs as a whole.
    """

    count: int
    kv: LayerKV
    window: int | None = None
    latent: bool = False


@dataclass(frozen=True)
class PlannedModel:
    """A model's config and what its layers cache; ``other_parameters``: those beside the decoder (a vision tower)."""

    spec: ModelSpec
    layers: tuple[CachedLayers, ...]
    other_parameters: int = 0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def query_heads(self) -> int:
        return int(self.spec.text_config["num_attention_heads"])

    def sequence_bytes(self, tokens: int, kv_cache_dtype: str = "auto", *, gpus: int = 1, page_size: int = 1) -> int:
        """Bytes of the KV of one sequence on each of ``gpus``, in whole pages; a window holds no more than itself."""
        total = 0
        for group in self.layers:
            held = tokens if group.window is None else min(tokens, group.window)
            slots = -(-held // page_size) * page_size
            total += slots * self.group_bytes(group, kv_cache_dtype, gpus)
        return total

    def token_bytes(self, kv_cache_dtype: str = "auto", *, gpus: int = 1) -> int:
        """Bytes of one token's KV in all layers on each of ``gpus``, the layers with a window among them."""
        return self.sequence_bytes(1, kv_cache_dtype, gpus=gpus)

    def window_token_bytes(self, kv_cache_dtype: str = "auto") -> int:
        """Those of ``token_bytes`` that are in layers with a sliding window."""
        return sum(self.group_bytes(group, kv_cache_dtype, 1) for group in self.layers if group.window is not None)

    def group_bytes(self, group: CachedLayers, kv_cache_dtype: str = "auto", gpus: int = 1) -> int:
        """Bytes of one token's KV in the layers of ``group`` on each of ``gpus``."""
        heads = max(1, group.kv.kv_heads // gpus)  # a latent row is one head: every GPU has it
        layer = LayerKV(heads, group.kv.head_dim, group.kv.value_dim)
        return KVShape((layer,) * group.count, DTYPE_BYTES[self.spec.default_dtype]).slot_bytes(kv_cache_dtype)

    def check_split(self, gpus: int) -> None:
        """Raises UsageError where tensor parallelism cannot split the heads over ``gpus``."""
        if self.query_heads % gpus:
            raise UsageError(
                f"{gpus} GPUs do not divide the {self.query_heads} query heads of {self.name}: give a number that does"
            )
        kv_heads = self.layers[0].kv.kv_heads
        if max(kv_heads, gpus) % min(kv_heads, gpus):
            raise UsageError(
                f"{gpus} GPUs can neither split nor repeat the {kv_heads} KV heads of {self.name}: give a number that "
                "divides them or is a multiple of them"
            )


def plan_model(model: str) -> PlannedModel:
    """The model of a local folder, of a config.json, or of the dimensions that ship.

    Of a name, case, organisation and "-Instruct" do not matter.

    Raises:
        UsageError: there is none (the nearest names are told), or what it caches is not known.
    """
    path = Path(model).expanduser()
    if path.is_dir() or path.suffix == ".json":
        try:
            return _planned(find_model(model, "dummy"))
        except ValueError as error:
            raise UsageError(str(error)) from None
    found = _by_name(model)
    if found is None:
        raise UsageError(
            f"{model!r} is neither a model that kvbench knows nor a file or folder: {_known_instead(model)}"
        )
    return found


def known_models() -> list[PlannedModel]:
    """All models whose dimensions ship."""
    return list({each.name: each for each in _shipped().values()}.values())


def _by_name(model: str) -> PlannedModel | None:
    """The shipped model of this very name, else of the name without the words that leave the dimensions as they are."""
    name = model.rsplit("/", 1)[-1].lower()
    return _shipped().get(name) or _shipped().get(_SAME_DIMENSIONS.sub("", name))


def _known_instead(model: str) -> str:
    """What to give instead of an unknown name: an unquantised model's dimensions, or the nearest names."""
    name = model.rsplit("/", 1)[-1].lower()
    quantised = _QUANTISED.fullmatch(name)
    if quantised and (plain := _by_name(quantised[1])):
        return f"give its folder, or {plain.name} with --quantization {quantised[2]}"
    near = nearest(_SAME_DIMENSIONS.sub("", name), _shipped(), most=3)
    known = [each.name for each in known_models()]
    said = (
        f"did you mean {', '.join(_shipped()[each].name for each in near)}?" if near else f"known: {', '.join(known)}."
    )
    return f"{said} Another model is given by its folder or config.json, a workload by a file that ends in .yaml"


@cache
def _shipped() -> dict[str, PlannedModel]:
    """By lower-case name and alias: the models and configs of the built-in engine, and those in models.json."""
    found = {name.lower(): _planned(find_model(name, "dummy")) for name in shipped_models()}
    for name, entry in json.loads(_SHIPPED.read_text(encoding="utf-8")).items():
        same = found[entry["same_as"].lower()].spec.config if "same_as" in entry else {}
        spec = ModelSpec(name, {**same, **entry.get("config", {})}, _SHIPPED, None)
        planned = _planned(spec, entry.get("other_parameters", 0))
        found.update({each.lower(): planned for each in (name, *entry.get("aliases", ()))})
    return found


def _planned(spec: ModelSpec, other_parameters: int = 0) -> PlannedModel:
    """Raises UsageError for a config that does not say what its layers cache, or layers that cache something else."""
    check_config(spec)
    text = spec.text_config
    cached = spec.kv_shape("float32").layers
    if rank := text.get("kv_lora_rank"):
        row = LayerKV(1, rank + text["qk_rope_head_dim"], 0)
        return PlannedModel(spec, (CachedLayers(len(cached), row, latent=True),), other_parameters)
    _check_layers(spec)
    groups = Counter(zip(cached, spec.windows(len(cached)), strict=True))
    layers = tuple(CachedLayers(count, kv, window) for (kv, window), count in groups.items())
    return PlannedModel(spec, layers, other_parameters)


def _check_layers(spec: ModelSpec) -> None:
    """Raises UsageError for layers that cache something else than K and V."""
    text = spec.text_config
    others = set(text.get("layer_types") or ()) - set(_CACHED)
    if others or any(key.startswith(("mamba_", "ssm_", "linear_")) for key in text):
        what = ", ".join(sorted(others)) or text.get("model_type")
        raise UsageError(
            f"model {spec.name!r} has layers ({what}) that cache something else than K and V of its tokens: kvbench "
            "cannot plan their memory"
        )
