"""Engine settings: one frozen dataclass, checked once, importable without torch.

Names are vLLM's where there are such. Every error is a ``ValueError`` of one sentence: what, which value, what to do.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvbench_engine.sizes import parse_bytes

LAYOUTS = ("paged", "contiguous")
RESERVATIONS = ("max", "pow2", "oracle")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "int4_per_token_head")
KV_CACHE_DTYPE_ALIASES = {"fp8": "fp8_e4m3"}  # as in vLLM
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("auto", "dummy")
PREEMPTION_MODES = ("recompute", "swap")
SCHEDULING_POLICIES = ("fcfs", "priority")
KERNEL_BACKENDS = ("auto", "torch", "numba", "triton")

GPU_DRIVERS = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/usr/lib/wsl/lib/libcuda.so.1")  # Linux, Jetson, WSL
# (max_num_seqs, max_num_batched_tokens). A GPU reads its weights once for hundreds of tokens in the time of one, a CPU
# computes each: there a step of thousands would hold up every stream for seconds.
CPU_BATCH, GPU_BATCH = (64, 512), (256, 8192)
DEFAULT_CPU_BUDGET = 256 * 2**20  # bytes of KV on a CPU when ``kv_budget`` is None


def runs_on_cpu(device: str) -> bool:
    """Tests whether the setting ``device`` means the CPU, without importing torch.

    "auto" means it where torch will find no GPU: there is no driver, all GPUs are hidden, or torch is a build for CPUs.
    """
    if device != "auto":
        return device == "cpu"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1") or not any(map(os.path.exists, GPU_DRIVERS)):
        return True
    return importlib.metadata.version("torch").endswith("+cpu")


@dataclass(frozen=True)
class EngineConfig:
    """All settings of one engine.

    ``kv_budget``: bytes of K and V of all layers and the page table, the same for both layouts; None: 256 MiB on a CPU,
    80 % of the free memory of a GPU or what two of its largest steps leave of it, whichever is less. ``swap_space``:
    bytes of host memory for ``preemption_mode='swap'``; None: as many as ``kv_budget``. ``max_num_seqs`` and
    ``max_num_batched_tokens`` are numbers once the object is made: None is replaced by the device's default, or by the
    other one where the two would not fit together.
    """

    model: str = "llama-32m"  # a local folder, a config JSON, or the name of a model or config that ships
    load_format: str = "auto"  # auto: safetensors of the folder; dummy: seeded random weights
    seed: int = 0  # seed of random weights, and of requests without a seed of their own
    dtype: str = "auto"  # auto: float32 on CPU, the config's dtype on CUDA
    device: str = "auto"
    tokenizer: str | None = None  # a folder; None: the model's own, else the byte-level BPE that ships

    layout: str = "paged"
    reservation: str = "max"  # contiguous: slots reserved per sequence, see engine/kv/contiguous.py
    page_size: int = 16  # tokens
    kv_budget: int | None = None  # bytes
    kv_cache_dtype: str = "auto"  # auto: the model's dtype; else one of kvbench_kernels.kv_formats
    enable_prefix_caching: bool = False
    free_outside_window: bool = True  # of layers with a sliding window, keep only what a later token sees
    latent_kv: bool = True  # of latent attention (MLA), keep one row for all heads (engine/model/latent.py)

    max_model_len: int | None = None  # tokens of prompt + output; None: the model's limit
    max_num_seqs: int | None = None  # None: 64 on a CPU, 256 on a GPU
    max_num_batched_tokens: int | None = None  # tokens computed in one step; None: 512 on a CPU, 8,192 on a GPU
    enable_chunked_prefill: bool = True
    max_num_partial_prefills: int = 1  # prompts computed side by side; from 2 on, one share is kept for short ones
    max_num_waiting: int | None = None  # requests in the queue; one more is refused. None: no limit
    watermark: float | None = None  # share of the pages left free beside a new sequence; None: 16 tokens a running one
    scheduling_policy: str = "fcfs"
    preemption_mode: str = "recompute"
    swap_space: int | None = None  # bytes of host memory
    async_scheduling: bool | None = None  # plan the next step while this one runs; None: on CUDA, where they overlap

    kernel_backend: str = "auto"
    cuda_graphs: bool | None = None  # replay captured steps; None: on CUDA
    torch_compile: bool = False  # of the model's forward
    fused_layers: bool | None = None  # fewer kernels a layer (engine/model/fused_layers.py); None: where there are any
    num_threads: int | None = None  # CPU threads; None: all cores this process may use

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} cannot be {getattr(self, name)!r}: choose one of {', '.join(allowed)}")
        for name in _POSITIVE:
            _require_positive_int(name, getattr(self, name), optional=name in _OPTIONAL)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} cannot be {getattr(self, name)!r}: it is true or false")
        for name in ("async_scheduling", "cuda_graphs", "fused_layers"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} cannot be {getattr(self, name)!r}: it is true, false or left out")
        self._check_watermark()
        self.check_against_device(self.device)
        self._settle_batch()
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed cannot be {self.seed!r}: it is an integer")
        if self.layout == "contiguous" and self.enable_prefix_caching:
            raise ValueError(
                "enable_prefix_caching cannot be true with layout 'contiguous': a reservation cannot be shared; "
                "use layout 'paged' or turn prefix caching off"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_num_seqs "
                f"{self.max_num_seqs}, so a full batch could not decode in one step: raise the first or lower "
                "the second"
            )
        if self.layout == "paged" and self.reservation != "max":
            raise ValueError(
                f"reservation {self.reservation!r} has no effect with layout 'paged', which reserves nothing: use "
                "layout 'contiguous' or leave reservation out"
            )
        if self.swap_space is not None and self.preemption_mode != "swap":
            raise ValueError(
                f"swap_space {self.swap_space} has no effect with preemption_mode {self.preemption_mode!r}: use "
                "preemption_mode 'swap' or leave swap_space out"
            )
        if self.fused_layers and self.torch_compile:
            raise ValueError(
                "fused_layers cannot be true with torch_compile, which fuses kernels itself: leave one of them out"
            )
        self._check_partial_prefills()
        self._check_unchunked(self.max_model_len)

    def _check_watermark(self) -> None:
        value = self.watermark
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ValueError(f"watermark cannot be {value!r}: it is a share of all pages, from 0 to less than 1")
        if self.layout == "contiguous":
            raise ValueError(
                f"watermark {value} has no effect with layout 'contiguous', whose sequences never outgrow their "
                "reservations: use layout 'paged' or leave watermark out"
            )

    def _settle_batch(self) -> None:
        """Replace None by the defaults of the device. A limit that is given lowers or raises the other one."""
        seqs, tokens = CPU_BATCH if runs_on_cpu(self.device) else GPU_BATCH
        if self.max_num_seqs is None:
            object.__setattr__(self, "max_num_seqs", min(seqs, self.max_num_batched_tokens or tokens))
        if self.max_num_batched_tokens is None:
            object.__setattr__(self, "max_num_batched_tokens", max(tokens, self.max_num_seqs))

    def check_against_device(self, device: str) -> None:
        """Raise ValueError for settings that ``device`` does not have: cpu, cuda, or auto while that is unknown."""
        if self.cuda_graphs and device == "cpu":
            raise ValueError(
                "cuda_graphs cannot be true with device 'cpu', which has no CUDA graphs: use device cuda or leave "
                "cuda_graphs out"
            )
        if self.fused_layers and self.kernel_backend == "torch":
            raise ValueError(
                "fused_layers cannot be true with kernel_backend 'torch', which has no kernels for it: leave one of "
                "them out"
            )
        if self.fused_layers and device == "cpu" and self.dtype == "float16":
            raise ValueError(
                "fused_layers cannot be true with dtype 'float16' on device 'cpu', which has kernels for it in float32 "
                "and bfloat16: use one of these or leave fused_layers out"
            )

    def _check_partial_prefills(self) -> None:
        if self.max_num_partial_prefills > 1 and not self.enable_chunked_prefill:
            raise ValueError(
                f"max_num_partial_prefills {self.max_num_partial_prefills} needs chunked prefill, without which no "
                "prompt is computed in part: turn enable_chunked_prefill on or set max_num_partial_prefills to 1"
            )
        if self.max_num_partial_prefills > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_partial_prefills {self.max_num_partial_prefills} is more than max_num_batched_tokens "
                f"{self.max_num_batched_tokens}, so a share would be less than a token: lower the first"
            )

    def _check_unchunked(self, max_model_len: int | None) -> None:
        if not self.enable_chunked_prefill and max_model_len and self.max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_model_len {max_model_len}, "
                "and without chunked prefill a prompt must fit in one step: raise max_num_batched_tokens or turn "
                "enable_chunked_prefill on"
            )

    def check_against_model(self, model_max_len: int | None) -> EngineConfig:
        """Settle ``max_model_len`` by the model's own limit (tokens; None: no limit known)."""
        settled = self.max_model_len or model_max_len
        if settled is None:
            raise ValueError(f"model {self.model!r} states no maximum length: set max_model_len")
        if model_max_len is not None and settled > model_max_len:
            raise ValueError(
                f"max_model_len {settled} is beyond the {model_max_len} positions of model {self.model!r}: lower "
                "max_model_len or choose another model"
            )
        self._check_unchunked(settled)
        return EngineConfig(**{**asdict(self), "max_model_len": settled})

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Make a config of YAML or command-line values. ``kv_budget`` and ``swap_space`` may be texts such as
        ``128MiB``.
        """
        names = sorted(f.name for f in fields(cls))
        for name in values:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"the settings are {', '.join(names)}"
                raise ValueError(f"{name!r} is not an engine setting: {hint}")
        settled = dict(values)
        if (given := settled.get("kv_cache_dtype")) in KV_CACHE_DTYPE_ALIASES:
            settled["kv_cache_dtype"] = KV_CACHE_DTYPE_ALIASES[given]
        for name in BYTE_SETTINGS:
            if settled.get(name) is not None:
                settled[name] = parse_bytes(settled[name])
        return cls(**settled)


CHOICES = {
    "layout": LAYOUTS,
    "reservation": RESERVATIONS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "dtype": DTYPES,
    "device": DEVICES,
    "load_format": LOAD_FORMATS,
    "scheduling_policy": SCHEDULING_POLICIES,
    "preemption_mode": PREEMPTION_MODES,
    "kernel_backend": KERNEL_BACKENDS,
}
BYTE_SETTINGS = ("kv_budget", "swap_space")
_OPTIONAL = (
    "kv_budget", "swap_space", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_num_waiting",
    "num_threads",
)  # fmt: skip
_SWITCHES = ("enable_prefix_caching", "free_outside_window", "latent_kv", "enable_chunked_prefill", "torch_compile")
_POSITIVE = (*_OPTIONAL, "page_size", "max_num_partial_prefills")


def _require_positive_int(name: str, value: Any, *, optional: bool) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} cannot be {value!r}: it is a whole number of at least 1")
