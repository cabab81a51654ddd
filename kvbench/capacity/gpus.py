"""GPUs and what they hold: gpus.json, ``4xA100-80GB`` on the command line, prices that the user gives."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvbench.common.errors import UsageError
from kvbench.common.text import nearest

_SHIPPED = Path(__file__).parent / "gpus.json"
_SEVERAL = re.compile(r"(?:(\d+)\s*[x*×]\s*)?(\S.*)", re.IGNORECASE)


@dataclass(frozen=True)
class Performance:
    """The figures of a GPU that a simulation needs beside its memory; gpus.json has the source of each.

    bf16_flops, fp8_flops: dense, with FP32 accumulation [1/s]; ``fp8_flops`` is ``bf16_flops`` without FP8 units
    processors: streaming multiprocessors or compute units
    all_reduce_bytes_per_s: bus bandwidth of large all-reduces: NVLink, Infinity Fabric or PCIe
    host_link_bytes_per_s: between pinned host memory and the GPU
    gemm, prefill: share of the flops that matrix products and attention over a prompt reach
    memory, decode: share of the memory's bandwidth that small matrix products and decode attention reach
    mixed_decode: how much longer decode attention takes in a step that has prompts too
    """

    bf16_flops: float
    fp8_flops: float
    processors: int
    all_reduce_bytes_per_s: float
    host_link_bytes_per_s: float
    gemm: float
    memory: float
    decode: float
    prefill: float
    mixed_decode: float


@dataclass(frozen=True)
class GPU:
    """One kind of GPU.

    memory_bytes: the device's total as CUDA or ROCm tells it, less than on the label
    bytes_per_s: full memory bandwidth, mostly as the data sheet has it
    bfloat16: False before Ampere, where engines refuse bfloat16 and an fp8 KV
    fp8: False before Ada and Hopper: the hardware does not compute in FP8
    performance: None where it is not known; such a GPU is planned for and not simulated
    """

    name: str
    memory_bytes: int
    bytes_per_s: float
    bfloat16: bool = True
    fp8: bool = True
    vendor: str = "nvidia"
    performance: Performance | None = None


VENDORS = ("nvidia", "amd")


def known_gpus(vendor: str | None = None) -> list[GPU]:
    """The GPUs of gpus.json, of one vendor or of all."""
    return [gpu for gpu in _shipped()[0].values() if vendor in (None, gpu.vendor)]


def parse_gpus(text: str) -> tuple[int, GPU]:
    """Reads ``4xA100-80GB`` or ``L4``. Raises UsageError, for an unknown GPU with the nearest names."""
    match = _SEVERAL.fullmatch(text.strip())
    if not match or (count := int(match[1] or 1)) < 1:
        raise UsageError(f"{text!r} is not a number of GPUs: write for example 4xA100-80GB")
    return count, find_gpu(match[2])


def find_gpu(name: str) -> GPU:
    """Raises UsageError with the nearest names."""
    gpus, names = _shipped()
    plain = _plain(name)
    if plain not in names:
        hint, near = "did you mean", [names[other] for other in nearest(plain, names, most=4)]
        if not near:
            hint, near = "known are", list(gpus)
        listed = ", ".join(dict.fromkeys(near))
        raise UsageError(f"{name!r} is not a GPU that kvbench knows: {hint} {listed} (several: 4xA100-80GB)")
    return gpus[names[plain]]


def parse_prices(text: str) -> Mapping[str, float]:
    """Reads ``L4=0.8,H100-80GB=2.9`` as the price of one GPU by name. Raises UsageError."""
    prices: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if not (price > 0 and math.isfinite(price)):
            raise UsageError(f"--price {part.strip()!r} is no price of a GPU: write for example L4=0.8,H100-80GB=2.9")
        gpu = find_gpu(name).name
        if gpu in prices:
            raise UsageError(f"--price has two prices of {gpu}: give one")
        prices[gpu] = price
    return prices


@cache
def _shipped() -> tuple[dict[str, GPU], dict[str, str]]:
    """GPUs by name, and their names by each plain name or alias."""
    gpus, names = {}, {}
    for name, entry in json.loads(_SHIPPED.read_text(encoding="utf-8")).items():
        stated = {field: entry[field] for field in ("bfloat16", "fp8", "vendor") if field in entry}
        performance = _performance(entry.get("performance"))
        memory, speed = round(entry["memory_gib"] * 2**30), entry["bandwidth_gb_s"] * 1e9
        gpus[name] = GPU(name, memory, speed, performance=performance, **stated)
        names.update({_plain(alias): name for alias in (name, *entry.get("aliases", ()))})
    return gpus, names


def _performance(entry: Mapping[str, float] | None) -> Performance | None:
    if entry is None:
        return None
    return Performance(
        bf16_flops=entry["bf16_tflops"] * 1e12,
        fp8_flops=(entry["fp8_tflops"] or entry["bf16_tflops"]) * 1e12,
        processors=int(entry["processors"]),
        all_reduce_bytes_per_s=entry["all_reduce_gb_s"] * 1e9,
        host_link_bytes_per_s=entry["host_link_gb_s"] * 1e9,
        **{name: entry[name] for name in ("gemm", "memory", "decode", "prefill", "mixed_decode")},
    )


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+|^nvidia|^amd", "", name.strip().lower())
