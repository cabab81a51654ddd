"""What the benchmarks are measured against: printed beside the figures. The full benchmark of the load client, whose
precision is a property of kvbench alone, fails over its own (``missed``); the others' depend on the machine.

A share of a read is of the fastest read of the same bytes by torch in the same run: both take from the caches what
lies there, and that is all of one layer's KV on a CPU with a large L3. Kernel bars of a GPU are of an H100-class one,
in bfloat16 with 8 KV heads of 128; those of a CPU are in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

DECODE_SHARES = {(64, 4096): 0.85, (64, 8192): 0.90, (1, 32768): 0.75}
"""(sequences, context) -> share of the read bandwidth of a bfloat16 decode on a GPU."""
FP8_DECODE_SHARE = 0.80  # of the read bandwidth, 64 x 8192
FP8_DECODE_TIME = 0.58  # of bfloat16's
PAGED_TIME, PAGE_OF_1_TIME = 1.05, 1.15  # of contiguous KV's: pages of 16 tokens and more, and of one
PREFILL_SPEED = 0.8  # of torch's own
COPY_SHARE = 0.8  # of a plain copy's speed: KV writes and page copies
_BENCH_SLOT_BYTES = 2 * 8 * 8 * 128 * 2  # test_move on a GPU: K and V, 8 layers, 8 heads of 128, bfloat16


def swap_gb_per_s(page_bytes: int) -> float | None:
    """What swaps over PCIe (about 50 GB/s) are to reach with pages of so many bytes, all layers together."""
    return 45.0 if page_bytes >= 2 << 20 else 30.0 if page_bytes >= 16 << 10 else None


def _swap_limit(page_size: int) -> float | None:
    """Of test_move's pages of so many tokens; 0 stands for contiguous KV."""
    return swap_gb_per_s(page_size * _BENCH_SLOT_BYTES) if page_size else None


@dataclass(frozen=True)
class Bar:
    """``figure`` of every benchmark of ``test`` with these ``params`` is to reach ``limit``: the worst one counts.

    A parameter may be given as a function that says whether a value is meant.
    """

    title: str
    device: str  # cpu | cuda
    test: str
    params: Mapping[str, Any | Callable[[Any], bool]]
    figure: str
    limit: float
    at_most: bool = False

    @property
    def wanted(self) -> str:
        """The limit with its direction."""
        return f"{'<=' if self.at_most else '>='} {self.limit:g}"

    def fits_device(self, device: str) -> bool:
        """``device``: cpu, or a GPU's name."""
        return device == "cpu" if self.device == "cpu" else device not in ("", "cpu")

    def is_about(self, test: str, params: Mapping[str, Any], device: str) -> bool:
        """Whether it is a bar of this benchmark."""
        return test == self.test and self.fits_device(device) and all(
            name in params and (wanted(params[name]) if callable(wanted) else wanted == params[name])
            for name, wanted in self.params.items()
        )  # fmt: skip

    def met(self, value: float) -> bool:
        """Whether ``value`` reaches the limit; the limit itself does."""
        return value <= self.limit if self.at_most else value >= self.limit


def _decode(batch: int, context: int, kv: str, **more: Any) -> dict[str, Any]:
    return {"batch": batch, "context": context, "kv": kv, **more}


def _at_least_16(page_size: int) -> bool:
    return page_size >= 16


_CPU_DECODE = (  # (what is measured, figure, limit)
    ("share of a read of the same bytes, cache included", "ratio", 0.5),
    ("times gather + SDPA", "vs_gather_sdpa", 5),
    ("times SDPA on contiguous KV", "vs_contiguous_sdpa", 1),
)
_CLIENT = (  # (what is measured, figure, the most)
    ("timestamp lag p99, ms", "lag_p99_ms", 0.7),
    ("ITL error p99, ms", "itl_error_p99_ms", 0.5),
    ("CPU an event, us", "cpu_us_per_event", 30),
    ("chunks coalesced, %", "coalesced_pct", 0.1),
)
_CPU = (
    *(
        Bar(f"load client, {streams} streams in {processes} process{'es' if processes > 1 else ''}: {what}", "cpu",
            "test_load_client", {"streams": streams, "processes": processes}, figure, limit, at_most=True)
        for streams, processes in ((64, 1), (256, 4))
        for what, figure, limit in _CLIENT
    ),
    *(
        Bar(f"decode 8 x 4096, {pages}: {what}", "cpu", "test_decode",
            _decode(8, 4096, "float32", **where), figure, limit)
        for pages, where in (("pages of 16", {"page_size": 16}), ("all page sizes", {}))
        for what, figure, limit in _CPU_DECODE
    ),
    Bar("decode 8 x 4096, many layers' caches in turn, beyond the L3: share of a read of the same bytes", "cpu",
        "test_decode_of_many_layers", {}, "ratio", 0.5),
    Bar("engine: times HF continuous batching", "cpu", "test_peers", {}, "vs hf-continuous", 5),
    Bar("engine: times vLLM's CPU backend", "cpu", "test_peers", {}, "vs vllm", 1.5),
    Bar("engine: times vLLM's CPU backend, eager", "cpu", "test_peers", {}, "vs vllm-eager", 1.5),
    Bar("phase clock: % of a step", "cpu", "test_phases", {}, "clock_pct", 1, at_most=True),
    Bar("/health at full load: ms", "cpu", "test_health_at_full_load", {}, "health_max_ms", 100, at_most=True),
    Bar("second start of the server: s", "cpu", "test_server_start", {}, "second_start_s", 4, at_most=True),
    Bar(
        "bookkeeping of a step, 256 sequences: us", "cpu", "test_decode_step_by_running_sequences",
        {"sequences": 256}, "us_per_step", 1000, at_most=True,
    ),
)  # fmt: skip
_GPU = (
    *(
        Bar(f"decode {batch} x {context} bfloat16: share of the read bandwidth", "cuda", "test_decode",
            _decode(batch, context, "bfloat16"), "ratio", limit)
        for (batch, context), limit in DECODE_SHARES.items()
    ),
    Bar("decode 64 x 8192 fp8: share of the read bandwidth", "cuda", "test_decode",
        _decode(64, 8192, "fp8_e4m3"), "ratio", FP8_DECODE_SHARE),
    Bar("decode 64 x 8192 fp8: time over bfloat16", "cuda", "test_decode",
        _decode(64, 8192, "fp8_e4m3"), "over_float", FP8_DECODE_TIME, at_most=True),
    Bar("decode 64 x 4096: time over contiguous, pages of 16 and more", "cuda", "test_decode",
        _decode(64, 4096, "bfloat16", page_size=_at_least_16), "over_contiguous", PAGED_TIME, at_most=True),
    Bar("decode 64 x 4096: time over contiguous, pages of 1", "cuda", "test_decode",
        _decode(64, 4096, "bfloat16", page_size=1), "over_contiguous", PAGE_OF_1_TIME, at_most=True),
    Bar("prefill: times torch's varlen_attn", "cuda", "test_prefill",
        {"kv": "bfloat16"}, "vs_varlen_attn", PREFILL_SPEED),
    Bar("KV write of 32768 tokens: times a plain copy", "cuda", "test_write",
        {"kv": "bfloat16", "tokens": 32768, "page_size": _at_least_16}, "vs_copy", COPY_SHARE),
    Bar("page copy: times a plain copy", "cuda", "test_move",
        {"kind": "copy", "kv": "bfloat16", "page_size": _at_least_16}, "vs_copy", COPY_SHARE),
    *(
        Bar(f"swap, pages of {pages}: GB/s", "cuda", "test_move",
            {"kind": lambda kind: kind != "copy", "kv": "bfloat16",
             "page_size": lambda page_size, limit=limit: _swap_limit(page_size) == limit},
            "moved_gb_per_s", limit)
        for pages, limit in (("2 MiB and more", 45.0), ("16 KiB to 2 MiB", 30.0))
    ),
)  # fmt: skip
BARS: tuple[Bar, ...] = (*_CPU, *_GPU)


def missed(test: str, params: Mapping[str, Any], figures: Mapping[str, Any], device: str = "cpu") -> list[str]:
    """One sentence for each bar that is about this benchmark and is not reached; a figure it lacks is not, either."""
    return [
        f"{bar.title}: {value:.3g}, wanted {bar.wanted}"
        for bar in BARS
        if bar.is_about(test, params, device)
        for value in [float(figures.get(bar.figure, math.nan))]  # NaN reaches no limit
        if not bar.met(value)
    ]
