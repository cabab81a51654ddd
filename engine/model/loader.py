"""A Hugging Face decoder, ready for our attention: loaded or seeded, measured, and gated."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as hf_logging

from kvbench_engine.config import EngineConfig
from kvbench_engine.kv.budget import KVShape, LayerKV
from kvbench_engine.model.attention import FUSION, PACKED
from kvbench_engine.model.compiler import check_compiler, first_sentence
from kvbench_engine.model.latent import can_fold, fold_latent, unfold_latent
from kvbench_engine.model.spec import DTYPE_BYTES, NEEDS_CODE, ModelInfo, ModelSpec, find_model, uses_random_weights
from kvbench_engine.model.support_check import GateError, check_family, check_logits, measure_kv
from kvbench_engine.sizes import format_bytes
from kvbench_kernels import default_backend, get_backend
from kvbench_kernels.api import AttentionBackend

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    model: PreTrainedModel
    info: ModelInfo
    kv_shape: KVShape
    backend: AttentionBackend
    device: torch.device
    dtype: torch.dtype
    query_heads: tuple[int, ...]
    has_latent: bool = False  # rows that can be kept instead of K and V of every head

    @property
    def is_latent(self) -> bool:
        """Tests whether latent rows are kept instead of K and V of every head."""
        return any(layer.latent for layer in self.kv_shape.layers)

    def fingerprints(self) -> tuple[str, ...]:
        """The weights' fingerprints, in each dtype in which a server may load them.

        Call before an engine packs them for its kernels.
        """
        return tuple(fingerprint(self.model, dtype=getattr(torch, name)) for name in DTYPE_BYTES)


def load_model(config: EngineConfig) -> LoadedModel:
    """Load ``config.model``, measure its KV, and check that our attention gives the model's own logits.

    Raises:
        ValueError: no such model, no such device, or a check of the load gate failed; the text names it.
    """
    spec = find_model(config.model, config.load_format)
    config.check_against_model(spec.max_positions)
    device = _pick_device(config)
    dtype = _pick_dtype(config.dtype, spec, device)
    chosen = config.kernel_backend
    backend = get_backend(default_backend(device, dtype, config.kv_cache_dtype) if chosen == "auto" else chosen)
    support = Support(spec.name, backend, dtype, device, config.kv_cache_dtype)
    planned = spec.attention_shape(config.latent_kv)
    if planned is not None:  # before minutes of loading; what is measured afterwards has the last word
        support.check(*planned)
    if config.torch_compile:
        check_compiler(device)
    _check_memory(spec, device, dtype)
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    model = _make_model(config, spec, device, dtype)
    check_family(model)
    has_latent = can_fold(model)
    if config.latent_kv and not has_latent and spec.text_config.get("kv_lora_rank"):
        _log.warning("K and V of every head are kept: transformers' code of this model makes them otherwise")
    if config.latent_kv:
        fold_latent(model)
    try:
        kv_shape, query_heads = _check_attention(model, support)
    except GateError as error:
        if not (has_latent and config.latent_kv):
            raise
        has_latent = False
        unfold_latent(model)
        kv_shape, query_heads = _check_attention(model, support)
        _log.warning("K and V of every head are kept: with latent rows %s", error.why)
    loaded = LoadedModel(model, _describe(model, spec), kv_shape, backend, device, dtype, query_heads, has_latent)
    # Now, since it moves weights, whose addresses an engine's CUDA graphs would keep; on a CPU build.py does it.
    if backend.name == "triton" and wants_fusion(config, backend):
        from kvbench_engine.model.cuda_layers import CudaKernels  # imports Triton, which not every machine has
        from kvbench_engine.model.fused_layers import fuse_layers

        fuse_layers(model, CudaKernels(), backend, kv_shape, query_heads)
    return loaded


def _check_attention(model: PreTrainedModel, support: Support) -> tuple[KVShape, tuple[int, ...]]:
    """Measure the KV shape and the query heads of ``model``. Raises ValueError if our attention cannot serve it."""
    kv_shape, query_heads = measure_kv(model, DTYPE_BYTES[str(support.dtype).removeprefix("torch.")])
    for layer, heads in zip(kv_shape.layers, query_heads, strict=True):
        support.check(heads, layer)
    check_logits(model, support.backend, kv_shape)
    return kv_shape, query_heads


def wants_fusion(config: EngineConfig, backend: AttentionBackend) -> bool:
    """Tests whether layers of fewer kernels (engine/model/fused_layers.py) are to be used."""
    return backend.name != "torch" and config.fused_layers is not False and not config.torch_compile


def serve_another(loaded: LoadedModel, config: EngineConfig) -> LoadedModel | None:
    """Reuse ``loaded`` for another engine of the same weights; None where its settings need other kernels.

    Raises ValueError if the kernels do not support its KV dtype.
    """
    name = config.kernel_backend
    name = default_backend(loaded.device, loaded.dtype, config.kv_cache_dtype) if name == "auto" else name
    if name != loaded.backend.name or (loaded.has_latent and loaded.is_latent != config.latent_kv):
        return None
    too_late = name == "triton" or hasattr(loaded.model, PACKED)  # to fuse its layers
    if too_late and wants_fusion(config, loaded.backend) and not hasattr(loaded.model, FUSION):
        return None
    support = Support(loaded.info.name, loaded.backend, loaded.dtype, loaded.device, config.kv_cache_dtype)
    for heads, layer in zip(loaded.query_heads, loaded.kv_shape.layers, strict=True):
        support.check(heads, layer)
    return loaded


@dataclass(frozen=True)
class Support:
    """The check whether a backend serves a model's attention on a device. Every refusal names the model."""

    model: str
    backend: AttentionBackend
    dtype: torch.dtype
    device: torch.device
    kv_cache_dtype: str

    def check(self, query_heads: int, layer: LayerKV) -> None:
        """Raises ValueError for a layer's shape, or for the dtypes on this device's architecture."""
        try:
            self.backend.check_support(
                num_heads=query_heads,
                num_kv_heads=layer.kv_heads,
                head_dim=layer.head_dim,
                v_head_dim=layer.value_dim,
                dtype=self.dtype,
                device=self.device,
                kv_cache_dtype=self.kv_cache_dtype,
                latent=layer.latent,
            )
        except ValueError as error:
            raise ValueError(f"model {self.model!r} cannot be served: {error}") from error


def _pick_device(config: EngineConfig) -> torch.device:
    name = config.device
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for and torch sees no CUDA device: use device auto or cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    config.check_against_device(name)
    return torch.device(name)


def _pick_dtype(name: str, spec: ModelSpec, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "float32" if device.type == "cpu" else spec.default_dtype
    if device.type == "cuda" and name == "bfloat16":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):  # emulated there: many times slower, and Triton has no instructions for it
            raise ValueError(
                f"dtype bfloat16 of model {spec.name!r} needs compute capability 8.0, and this GPU "
                f"({torch.cuda.get_device_name(device)}) has {capability[0]}.{capability[1]}: use dtype float16"
            )
    return getattr(torch, name)


class _ArangeOnCPU(TorchFunctionMode):
    """Computes torch.arange on the CPU within torch.device("meta"), whose arithmetic on it imports sympy (0.25 s)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.arange:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _check_memory(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError for weights beyond the memory, which would end the process without a message."""
    try:
        with torch.device("meta"), no_init_weights(), _ArangeOnCPU():
            hf_config = AutoConfig.for_model(**spec.config)
            model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager", trust_remote_code=False)
    except Exception:  # what is wrong with the config is said when the model is made
        return
    needed = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    if device.type == "cuda":
        limit, whose = torch.cuda.mem_get_info(device)[0], "this GPU has free"
    else:
        limit, whose = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine has"
    if needed > limit:
        raise ValueError(
            f"the weights of model {spec.name!r} take {format_bytes(needed)} in {str(dtype).removeprefix('torch.')} "
            f"and {whose} {format_bytes(limit)}: choose a smaller model or dtype"
        )


def _make_model(config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    # With trust_remote_code left out, transformers asks on a terminal.
    options = {"dtype": dtype, "attn_implementation": "eager", "trust_remote_code": False}
    # transformers and its config checks raise all kinds; the user needs the sentence, not the traceback
    try:
        if uses_random_weights(spec, config.load_format):
            hf_config = AutoConfig.for_model(**spec.config)
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
                torch.manual_seed(config.seed)
                model = AutoModelForCausalLM.from_config(hf_config, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                str(spec.weights), use_safetensors=True, local_files_only=True, **options
            )
    except Exception as error:
        unknown = "auto_map" in spec.config and spec.config["model_type"] not in CONFIG_MAPPING
        reason = NEEDS_CODE if unknown or "trust_remote_code" in str(error) else first_sentence(error)
        raise ValueError(f"transformers cannot load model {config.model!r}: {reason}") from error
    skip_padding_check(model)
    return model.to(device).eval().requires_grad_(False)


def skip_padding_check(model: PreTrainedModel) -> None:
    """Skip the warning of padding, for which some families read every step's ids. A packed batch has no padding."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _warn_of_nothing


def _warn_of_nothing(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    return


def _describe(model: PreTrainedModel, spec: ModelSpec) -> ModelInfo:
    eos = model.generation_config.eos_token_id if model.generation_config else None
    text_config = model.config.get_text_config()
    eos = text_config.eos_token_id if eos is None else eos
    return ModelInfo(
        name=spec.name,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        max_model_len=spec.max_positions,
        eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
        bos_token_id=text_config.bos_token_id,
        num_parameters=sum(p.numel() for p in model.parameters()),
        weights_fingerprint=fingerprint(model),
    )


def fingerprint(model: PreTrainedModel, sample: int = 4096, dtype: torch.dtype | None = None) -> str:
    """blake2b-128 over name, shape, dtype and ``sample`` evenly spaced elements of every weight, in name order.

    Hashing all bytes of a 70B model takes minutes; a sample tells two checkpoints or two seeds apart at once.
    ``dtype``: as if the weights were loaded in it; None: as they are.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        stored = dtype or tensor.dtype
        digest.update(f"{name} {tuple(tensor.shape)} {stored}".encode())
        flat = tensor.reshape(-1)
        picked = flat[:: max(1, flat.numel() // sample)].to(stored).to(torch.float32).cpu().contiguous()
        digest.update(picked.numpy().tobytes())
    return digest.hexdigest()
