"""Builds an engine from its settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import asdict

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvbench_engine.config import DEFAULT_CPU_BUDGET, EngineConfig
from kvbench_engine.engine import Engine
from kvbench_engine.execution.executor import TorchExecutor, available_cpus
from kvbench_engine.execution.graphs import GraphSizes, cuda_capture
from kvbench_engine.execution.warm_steps import run_padding_steps
from kvbench_engine.kv.budget import capacity_of, gpu_budget, settle_length
from kvbench_engine.kv.layouts import make_kv_manager
from kvbench_engine.kv.manager import KVManager
from kvbench_engine.model.attention import FUSION
from kvbench_engine.model.compiler import cannot_compile
from kvbench_engine.model.cpu_layers import use_cpu_layers
from kvbench_engine.model.kv_outliers import balance_keys
from kvbench_engine.model.loader import LoadedModel, load_model, wants_fusion
from kvbench_engine.model.support_check import find_host_waits
from kvbench_engine.sequence import Request, SamplingParams
from kvbench_engine.sizes import format_bytes
from kvbench_kernels.cpu_memory import keep_freed_memory

Tell = Callable[[str], None]
_log = logging.getLogger(__name__)


def build_engine(config: EngineConfig, tell: Tell = lambda phase: None) -> Engine:
    """Load the model, size the KV cache, warm up the kernels. ``tell`` is called as each phase begins.

    A max_model_len that is not given is lowered to what the KV cache holds (``kv.budget.settle_length``).

    Raises:
        ValueError: a setting, the model or their combination is impossible; one sentence says which and what to do.
    """
    if config.device != "cuda":
        torch.set_num_threads(cpu_threads(config))
    tell("building the model")
    loaded = load_model(config)
    tell("warming up" if loaded.backend.name == "torch" and not config.torch_compile else "compiling kernels")
    return assemble_engine(config, loaded, may_lower=True, tell=tell)


def cpu_threads(config: EngineConfig) -> int:
    """Threads of the arithmetic on a CPU."""
    return config.num_threads or available_cpus()


def assemble_engine(
    config: EngineConfig, loaded: LoadedModel, *, may_lower: bool = False, tell: Tell = lambda phase: None
) -> Engine:
    """Build an engine around a model that is loaded already. Raises ValueError as ``build_engine`` does.

    ``may_lower``: whether a max_model_len that is not given may be lowered. Engines that are compared must not differ
    in it unnoticed.
    """
    if config.kv_budget is None:
        config = EngineConfig(**{**asdict(config), "kv_budget": default_budget(config, loaded)})
    limit = loaded.info.max_model_len
    config = settle_length(config, limit, loaded.kv_shape, config.kv_budget, may_lower=may_lower)
    if config.async_scheduling is None:  # on a CPU, the thread that would plan the next step computes this one
        config = EngineConfig(**{**asdict(config), "async_scheduling": loaded.device.type == "cuda"})
    tell(str(balance_keys(loaded)))
    if loaded.backend.name == "numba" and not config.torch_compile:
        keep_freed_memory()
        fuse = wants_fusion(config, loaded.backend)
        use_cpu_layers(loaded.model, loaded.backend, loaded.kv_shape, loaded.query_heads, fuse=fuse)
    config = _settle_fusion(config, loaded)
    if config.fused_layers:
        tell(str(getattr(loaded.model, FUSION)))
    capacity = capacity_of(config, loaded.kv_shape, config.kv_budget)
    _check_memory(config.kv_budget, capacity.swap_space_bytes, loaded.device)
    kv = make_kv_manager(config, capacity)
    executor = TorchExecutor(config, loaded, capacity, kv.page_table)
    _make_ready(config, executor, kv, tell)
    executor.phase_seconds = dict.fromkeys(executor.phase_seconds, 0.0)
    kv = make_kv_manager(config, capacity)
    executor.use_page_table(kv.page_table)
    return Engine(config, executor, kv)


def _settle_fusion(config: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    """Say whether this engine uses the forwards of fewer kernels that the model was given."""
    fused = wants_fusion(config, loaded.backend) and hasattr(loaded.model, FUSION)
    return EngineConfig(**{**asdict(config), "fused_layers": fused})


def _make_ready(config: EngineConfig, executor: TorchExecutor, kv: KVManager, tell: Tell) -> None:
    """Compile every kernel and capture steps. Changes the counters of ``kv``: use a new manager afterwards."""
    assert config.max_model_len is not None
    try:
        warm_up(Engine(config, executor, kv))
        if executor.device.type == "cuda":
            run_padding_steps(executor.forward, executor.page_starts, config.max_model_len)
    except Exception as error:
        if config.torch_compile:
            raise cannot_compile(executor.device, error) from error
        raise
    if executor.device.type == "cuda" and config.cuda_graphs is not False and may_capture(config, executor.model):
        tell("capturing CUDA graphs")
        torch.cuda.empty_cache()  # which a capture does too: what it frees would hide what graphs take
        free = torch.cuda.mem_get_info(executor.device)[0]
        sizes = GraphSizes.of(config.max_num_seqs, config.max_num_batched_tokens)
        page_starts, required = executor.page_starts, config.cuda_graphs is True
        executor.forward.capture_graphs(sizes, page_starts, config.max_model_len, cuda_capture(), required)
        if (captured := executor.forward.graph_sizes) is not None:
            torch.cuda.empty_cache()
            taken = max(0, free - torch.cuda.mem_get_info(executor.device)[0])
            tell(f"replays {captured}, which take {format_bytes(taken)} of the GPU's memory")
        executor.forward.num_replayed = 0


def may_capture(config: EngineConfig, model: PreTrainedModel) -> bool:
    """Tests whether steps may be captured: False, with a warning, if the model's own code waits for the device.

    Raises:
    ValueError: it waits, and graphs were asked for.
    """
    waits = find_host_waits(model)
    if not waits:
        return True
    reason = f"the forward of model type {model.config.model_type!r} waits for the device ({', '.join(waits)})"
    if config.cuda_graphs:
        raise ValueError(f"cuda_graphs cannot be true: {reason}; leave cuda_graphs out to run without them")
    _log.warning("CUDA graphs are off: %s", reason)
    return False


def _check_memory(budget: int, swap_space: int, device: torch.device) -> None:
    """Raise ValueError if the memory is too small; the kernel would kill the process without a message."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        _check_room(("kv_budget",), budget, free, "GPU has free")
        _check_room(("swap_space",), swap_space, host, "machine has")
    else:
        names = ("kv_budget", "swap_space") if swap_space else ("kv_budget",)
        _check_room(names, budget + swap_space, host, "machine has")


def _check_room(names: tuple[str, ...], size: int, limit: int, whose: str) -> None:
    """Raise ValueError if ``size``, the bytes of the settings ``names``, is over ``limit``."""
    if size > limit:
        what = " and ".join(names) + (" together" if len(names) > 1 else "")
        raise ValueError(
            f"{what} {size} ({format_bytes(size)}) is more than the {format_bytes(limit)} that this {whose}: lower "
            + " or ".join(names)
        )


def default_budget(config: EngineConfig, loaded: LoadedModel) -> int:
    """Bytes of KV when ``kv_budget`` is not set."""
    if loaded.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(loaded.device)
        return gpu_budget(free, activation_bytes(config, loaded.model.config, loaded.dtype))
    return DEFAULT_CPU_BUDGET


def activation_bytes(config: EngineConfig, model: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Estimate the bytes that the largest step needs at once: the MLP's rows and residuals, and the logits twice."""
    sizes = model.get_text_config()
    inner = getattr(sizes, "intermediate_size", None) or 4 * sizes.hidden_size
    row = 4 * (sizes.hidden_size + (max(inner) if isinstance(inner, list) else inner))
    return (config.max_num_batched_tokens * row + 2 * config.max_num_seqs * sizes.vocab_size) * dtype.itemsize


def warm_up(engine: Engine) -> None:
    """Run a chunked prompt, decodes and each kind of sampling, so that every kernel is compiled."""
    limit = engine.config.max_model_len
    vocab = engine.model_info.vocab_size
    length = max(1, min(limit - 4, engine.capacity.num_tokens // 2 - 4, engine.config.max_num_batched_tokens + 8))
    count = min(4, limit - length)
    short = min(3, length)
    for index, (size, how) in enumerate(((length, {"temperature": 0.0}), (short, {}), (short, {"top_p": 0.9}))):
        if engine.kv.fits(size, count) and size < limit:
            prompt = tuple((index + 1 + i * 31) % vocab for i in range(size))
            params = SamplingParams(max_tokens=count, ignore_eos=True, **how)
            engine.add_request(Request(f"warm-up-{index}", prompt, params))
    while engine.has_work():
        engine.step()
