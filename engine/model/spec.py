"""The facts of a model's config.json, read without torch: names, lengths, KV shape."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench_engine.kv.budget import KVShape, LayerKV

CONFIG_DIR = Path(__file__).parent.parent / "model_configs"
MODEL_DIR = Path(__file__).parent.parent / "models"  # whole models: config, weights and tokenizer
NEEDS_CODE = "it needs Python code of its own, which is never run; use one whose type transformers has"
_MOST_DEPTH = 100  # nesting of objects and lists in a config.json
_MOST_DIGITS = 40  # digits of a number, so that products of several still fit a float
_SIZES = dict.fromkeys(("num_hidden_layers", "n_layer"), 10_000) | dict.fromkeys(
    ("num_attention_heads", "n_head", "num_key_value_heads", "head_dim", "hidden_size", "n_embd", "vocab_size"), 2**31
)  # the largest value of each field
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelInfo:
    """The facts of a loaded model that the server and the harness need."""

    name: str
    vocab_size: int
    max_model_len: int | None  # positions the model was made for; None: no limit stated
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    num_parameters: int = 0
    weights_fingerprint: str = ""  # hashes of the weights' names, shapes and samples, see loader.py


@dataclass(frozen=True)
class ModelSpec:
    """A config.json and where it came from. ``weights`` is the folder with safetensors, if there is one."""

    name: str
    config: dict[str, Any]
    config_path: Path
    weights: Path | None

    @property
    def text_config(self) -> dict[str, Any]:
        """The decoder's settings, which multi-modal configs keep one level down."""
        return self.config.get("text_config") or self.config

    @property
    def max_positions(self) -> int | None:
        for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
            if isinstance(length := self.text_config.get(key), int) and length > 0:
                return length
        return None

    @property
    def default_dtype(self) -> str:
        stated = (part.get(key) for part in (self.text_config, self.config) for key in ("dtype", "torch_dtype"))
        name = next((dtype for dtype in stated if dtype), "float32")
        return name if isinstance(name, str) and name in DTYPE_BYTES else "float32"

    def kv_shape(self, dtype: str, latent_kv: bool = True) -> KVShape:
        """KV of one token as the config's common keys give it, ``dtype`` one of float32, bfloat16, float16.

        ``latent_kv``: whether latent attention (MLA) keeps its rows, or K and V of every head. For planning before
        anything is loaded; a loaded model's KV is measured.
        """
        text = self.text_config
        try:
            layers = text.get("num_hidden_layers") or text["n_layer"]
            heads = text.get("num_attention_heads") or text["n_head"]
            hidden = text.get("hidden_size") or text["n_embd"]
        except KeyError as missing:
            raise ValueError(
                f"the config of model {self.name!r} has no {missing}, so its KV size cannot be planned: it is not a "
                "decoder-only language model, or not one that kvbench knows"
            ) from None
        kv_heads = text.get("num_key_value_heads") or heads
        try:
            head_dim = value_dim = text.get("head_dim") or hidden // heads
            rope, rank = text.get("qk_rope_head_dim", 0), text.get("kv_lora_rank") if latent_kv else None
            if rank:
                kv_heads, head_dim, value_dim = 1, rank + rope, rank
            elif text.get("qk_nope_head_dim"):
                if latent_kv and "kv_lora_rank" not in text:
                    raise TypeError
                head_dim = text["qk_nope_head_dim"] + rope
                value_dim = text.get("v_head_dim") or head_dim
            if any(type(size) is not int or size < 1 for size in (layers, kv_heads, head_dim, value_dim)):
                raise TypeError
            latent = bool(rank)
            windowed = [LayerKV(kv_heads, head_dim, value_dim, window, latent) for window in self._windows(layers)]
            if wide := text.get("global_head_dim"):  # Gemma 4: of layers that see everything
                others = LayerKV(text.get("num_global_key_value_heads") or kv_heads, wide, wide)
                windowed = [kv if kv.window else others for kv in windowed]
            return KVShape(tuple(windowed), DTYPE_BYTES[dtype])
        except TypeError:
            raise ValueError(
                f"the config of model {self.name!r} has no plain number for the layers, heads or their dimensions, so "
                "its KV size cannot be planned"
            ) from None

    def _windows(self, layers: int) -> list[int | None]:
        """The sliding window of each layer, as the config's common keys give it; None: the layer sees all tokens."""
        text = self.text_config
        kinds, window = text.get("layer_types"), text.get("sliding_window")
        window = window if type(window) is int and window > 0 else None
        if kinds:
            return [window if kind == "sliding_attention" else None for kind in kinds]
        if not window or text.get("use_sliding_window") is False:
            return [None] * layers
        pattern = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern")
        if pattern is None and str(text.get("model_type")).startswith("gemma"):
            pattern = 2 if text["model_type"] == "gemma2" else 6
        if pattern:  # the last layer of each group sees everything
            return [None if (layer + 1) % pattern == 0 else window for layer in range(layers)]
        first = (text.get("max_window_layers") or 0) if text.get("use_sliding_window") else 0
        return [window if layer >= first else None for layer in range(layers)]

    def attention_shape(self, latent_kv: bool = True) -> tuple[int, LayerKV] | None:
        """Query heads and KV of a layer as the config's common keys give them; None where they do not."""
        text = self.text_config
        heads = text.get("num_attention_heads") or text.get("n_head")
        try:
            layer = self.kv_shape("float32", latent_kv).layers[0]
        except ValueError:  # some families have a list, one entry a layer
            return None
        return (heads, layer) if isinstance(heads, int) else None


def shipped_models() -> list[str]:
    """Names of the configs and of the whole models that ship."""
    whole = (path.parent.name for path in MODEL_DIR.glob("*/config.json"))
    return sorted({*whole, *(path.stem for path in CONFIG_DIR.glob("*.json"))})


def model_folder(model: str) -> Path | None:
    """The folder of ``model``, a path or the name of a whole model that ships; None for neither."""
    path = Path(model).expanduser()
    shipped = MODEL_DIR / model
    return path if path.is_dir() else shipped if (shipped / "config.json").is_file() else None


def find_model(model: str, load_format: str = "auto") -> ModelSpec:
    """The spec of a folder, a config JSON, or a model or config that ships.

    Raises:
        ValueError: nothing is there, it cannot be read, or ``load_format`` asks for weights that are not there.
    """
    path = Path(model).expanduser()
    if folder := model_folder(model):
        spec = ModelSpec(folder.resolve().name, _read(folder / "config.json"), folder / "config.json", folder)
    elif path.suffix == ".json":
        spec = ModelSpec(path.stem, _read(path), path, None)
    elif (CONFIG_DIR / f"{model}.json").is_file():
        path = CONFIG_DIR / f"{model}.json"
        spec = ModelSpec(model, _read(path), path, None)
    else:
        raise ValueError(
            f"model {model!r} is neither a folder, nor a config JSON, nor one of those that ship "
            f"({', '.join(shipped_models())}): check the path"
        )
    if load_format == "auto" and spec.weights is not None and not any(spec.weights.glob("*.safetensors")):
        raise ValueError(
            f"model folder {model!r} holds no *.safetensors: add the weights, or use load_format dummy for seeded "
            "random ones"
        )
    return spec


def uses_random_weights(spec: ModelSpec, load_format: str) -> bool:
    """Tests whether weights are random: with ``auto``, those of a bare config, which has none to load."""
    return load_format == "dummy" or spec.weights is None


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"), parse_int=_parse_int)
        if _is_deeper(config, _MOST_DEPTH):
            raise RecursionError
    except FileNotFoundError:
        raise ValueError(f"{str(path)!r} does not exist: a model folder holds a config.json") from None
    except RecursionError:
        raise ValueError(f"{str(path)!r} is nested more than {_MOST_DEPTH} deep: it is not a model config") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as JSON ({error}): check the file") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"{str(path)!r} has no model_type: it is not a Hugging Face model config")
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise ValueError(f"text_config of {str(path)!r} is {text!r:.80}, and must be an object: mend the file")
    for name, most in _SIZES.items():  # some families have a list, one entry a layer
        size = (text or config).get(name)
        by_layer = isinstance(size, list | dict) and name != "vocab_size"
        if size is not None and not by_layer and not (type(size) is int and 0 < size <= most):
            raise ValueError(f"{name} of {str(path)!r} is {size!r:.80}, and must be from 1 to {most}: mend the file")
    return config


def _parse_int(digits: str) -> int:
    """Parse an integer. Raises ValueError for one too large to be a size or to become a float."""
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _is_deeper(value: Any, left: int) -> bool:
    """Tests whether lists and objects in ``value`` are nested more than ``left`` deep."""
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return left == 0 or any(_is_deeper(part, left - 1) for part in parts)
