"""The identity of an engine and its process: settings, model, capacity, versions."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
from typing import Any

from kvbench_engine.engine import Engine
from kvbench_engine.kv.paged import SPARE_TOKENS

_PACKAGES = ("torch", "transformers", "triton", "numba", "fastapi", "uvicorn")


def describe_engine(engine: Engine) -> dict[str, Any]:
    """Describe ``engine`` for /server_info and the lockstep protocol.

    ``engine``: the settings as given; ``resolved``: the values of ``auto`` and null; ``policy``: constants that decide
    who is admitted.
    """
    capacity, config = engine.capacity, engine.config
    longest = config.max_model_len or engine.model_info.max_model_len or 0
    return {
        "engine": dataclasses.asdict(config),
        "resolved": _resolved(engine.executor),
        "policy": {"spare_tokens": SPARE_TOKENS} if config.layout == "paged" and config.watermark is None else {},
        "kv_outliers": _kv_outliers(engine.executor),
        "model": dataclasses.asdict(engine.model_info),
        "capacity": {
            **dataclasses.asdict(capacity),
            "capacity_tokens": capacity.num_tokens,
            "max_concurrency_at_max_len": capacity.max_concurrency(longest),
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "platform": platform.platform(),
        "pid": os.getpid(),
    }


def _kv_outliers(executor: Any) -> dict[str, Any]:
    """The outliers of the model's K and V (kvbench_engine.model.kv_outliers.KVOutliers); empty without tensors."""
    if not hasattr(executor, "model"):
        return {}
    from kvbench_engine.model.kv_outliers import MEASURED

    return dataclasses.asdict(getattr(executor.model, MEASURED))


def _resolved(executor: Any) -> dict[str, Any]:
    """Device, dtype, kernels and threads in use; empty for an executor without tensors."""
    if not hasattr(executor, "model"):
        return {}
    import torch  # not above: the server's start sets what torch reads when it is imported

    from kvbench_engine.build import cpu_threads

    device = executor.device
    return {
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "dtype": str(next(executor.model.parameters()).dtype).removeprefix("torch."),
        "kernel_backend": executor.host.backend.name,
        "cuda_graphs": executor.forward.replays_graphs,
        "graph_sizes": None if (sizes := executor.forward.graph_sizes) is None else sizes.describe(),
        **_fusion(executor),
        # not torch's number, which in a forked process is each thread's own
        "num_threads": cpu_threads(executor.config) if device.type == "cpu" else torch.get_num_threads(),
    }


def _fusion(executor: Any) -> dict[str, Any]:
    """Describe the fused layers.

    ``fused_layers``: whether any module has fewer kernels. ``fused_layers_reason``: which, or why none has.
    """
    from kvbench_engine.model.attention import FUSION

    config = executor.config
    if config.fused_layers:
        fusion = getattr(executor.model, FUSION)
        return {"fused_layers": bool(fusion.fused), "fused_layers_reason": str(fusion)}
    reason = "turned off"
    if config.torch_compile:
        reason = "torch_compile fuses kernels itself"
    elif executor.host.backend.name == "torch":
        reason = "kernel_backend torch has no kernels for it"
    return {"fused_layers": False, "fused_layers_reason": reason}


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
