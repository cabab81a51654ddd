"""Part ``facts``: the device, and its measured ceilings, with which all other figures are compared.

Read: the fastest of torch's sum and dot and of a Triton kernel that only reads. Copy counts bytes read and written.
Matrix product: random data (zeros run faster). Nothing is set or changed: the card is measured as it is found.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import torch

from ci.gpu.part import Planned, Report
from ci.gpu.timing import WRITING, measure
from kvbench.common.cpu import cpu_model

SMI_FIELDS = (
    "name", "driver_version", "compute_cap", "memory.total", "memory.used", "clocks.sm", "clocks.mem", "clocks.max.sm",
    "clocks.max.mem", "power.draw", "power.limit", "temperature.gpu", "persistence_mode", "mig.mode.current",
    "ecc.mode.current", "pcie.link.gen.current", "pcie.link.width.current", "clocks_throttle_reasons.active",
)  # fmt: skip
SMI_TIMEOUT_S = 15.0


def smi_query(fields: tuple[str, ...] = SMI_FIELDS) -> dict[str, str]:
    """Asks ``nvidia-smi`` for GPU 0. Fields that this driver does not know are left out; empty without the tool."""
    if shutil.which("nvidia-smi") is None:
        return {}
    values = _smi(fields)
    if values is not None:
        return dict(zip(fields, values, strict=True))
    return {field: one[0] for field in fields if (one := _smi((field,))) is not None}


def _smi(fields: tuple[str, ...]) -> list[str] | None:
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return values if len(values) == len(fields) else None


def host_facts(device: str) -> dict[str, str]:
    """Names the processor and this host, by a hash of processor and GPU."""
    cpu = cpu_model()
    gpu = getattr(torch.cuda.get_device_properties(0), "uuid", "no id") if device == "cuda" else "no GPU"
    return {"cpu": cpu, "host": hashlib.blake2b(f"{cpu}/{gpu}".encode(), digest_size=4).hexdigest()}


def torch_facts(device: str) -> dict[str, Any]:
    """Asks torch for its version and, on a GPU, for the device."""
    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, **host_facts(device)}
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
        facts |= {
            "name": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "multiprocessors": gpu.multi_processor_count,
            "l2_bytes": gpu.L2_cache_size,
            "memory_bytes": total,
            "memory_free_bytes": free,
            "cudnn": torch.backends.cudnn.version(),
        }
    return facts


class Facts:
    """A case a ceiling; each adds rows of what was reached (GB/s: 1e9 bytes; TFLOP/s: 1e12) and how."""

    workers = 1

    def __init__(self, args: Any):
        self.device = args.device
        self.size = 8 * 2**20 if args.tiny else 4 * 2**30  # bytes, many times every cache
        if args.device == "cuda":
            self.size = min(self.size, torch.cuda.mem_get_info()[0] // 8 // 2**20 * 2**20)
        self.seconds = 0.02 if args.tiny else 0.5
        self.matrix = 256 if args.tiny else 8192
        self._cases: dict[str, Callable[[Report], None]] = {
            "device": self.before, "read bandwidth": self.read, "copy bandwidth": self.copy,
            "matrix product": self.matmul,
        }  # fmt: skip
        if args.device == "cuda":
            self._cases |= {"host link": self.host_link, "device afterwards": self.after,
                            "read bandwidth by Triton": self.triton_read}  # fmt: skip

    def plan(self) -> list[Planned]:
        """Lists the ceilings, our own kernel in a process of its own."""
        return [Planned(name, None if name == "read bandwidth by Triton" else "main") for name in self._cases]

    def run(self, name: str, report: Report) -> None:
        """Measures one ceiling."""
        self._cases[name](report)

    def before(self, report: Report) -> None:
        """Describes the device."""
        report.put(device=torch_facts(self.device), nvidia_smi=smi_query() if self.device == "cuda" else {})

    def after(self, report: Report) -> None:
        """Reads its clocks and temperature once it has worked."""
        report.put(nvidia_smi_after=smi_query())

    def keep(self, report: Report, name: str, value: float, how: str) -> None:
        """Stores what one way reached."""
        report.row(ceiling=name, value=float(f"{value:.4g}"), how=how)

    def read(self, report: Report) -> None:
        """Measures the read bandwidth of torch's reductions."""
        x = torch.randn(self.size // 4, device=self.device)
        self._reads(report, x, {"torch.sum": lambda: torch.sum(x), "torch.dot": lambda: torch.dot(x, x)})

    def triton_read(self, report: Report) -> None:
        """Measures the read bandwidth of a kernel that does nothing else."""
        from ci.gpu.read_kernel import BLOCKS, launch_read

        x = torch.randn(self.size // 4, device=self.device)

        def step(block: int, loads: int, warps: int) -> Callable[[], object]:
            assert x.numel() % (block * loads) == 0, "bytes that are counted are bytes that are read"
            out = torch.empty(x.numel() // (block * loads), device=x.device)
            return lambda: launch_read(x, out, block, loads, warps)

        self._reads(report, x, {f"Triton, {b} x {loads}": step(b, loads, warps) for b, loads, warps in BLOCKS})

    def _reads(self, report: Report, x: torch.Tensor, steps: dict[str, Callable[[], object]]) -> None:
        for how, step in steps.items():
            speed = x.nbytes / measure(step, self.device, self.seconds).median / 1e9
            self.keep(report, "read_gb_per_s", speed, how)

    def copy(self, report: Report) -> None:
        """Measures the copy bandwidth."""
        x = torch.randn(self.size // 4, device=self.device)
        y = torch.empty_like(x)
        for capture, how in ((False, "launched"), (True, "in a graph")):  # of an H200, 4,295 and 2,768
            timing = measure(lambda: y.copy_(x), self.device, self.seconds, capture, WRITING)
            self.keep(report, "copy_gb_per_s", 2 * x.nbytes / timing.median / 1e9, f"read and written, {how}")

    def matmul(self, report: Report) -> None:
        """Times matrix products: a few, then so many that the chip may slow down for its power limit."""
        n = self.matrix
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        a, b = (torch.randn(n, n, device=self.device, dtype=dtype) for _ in "ab")
        name = "matmul_bf16_tflop_per_s" if dtype == torch.bfloat16 else "matmul_fp32_tflop_per_s"
        for seconds, how in ((0.0, "a few"), (self.seconds, f"for {self.seconds:g} s")):
            timing = measure(lambda: a @ b, self.device, seconds)
            self.keep(report, name, 2 * n**3 / timing.median / 1e12, f"{n} x {n} x {n}, random data, {how}")

    def host_link(self, report: Report) -> None:
        """Measures page-locked host memory both ways: the ceiling of swapping."""
        size = min(self.size, 2**30)
        on_device = torch.empty(size, dtype=torch.uint8, device=self.device)
        on_host = torch.ones(size, dtype=torch.uint8, pin_memory=True)
        for name, target, source in (
            ("host_to_device_gb_per_s", on_device, on_host),
            ("device_to_host_gb_per_s", on_host, on_device),
        ):
            timing = measure(lambda t=target, s=source: t.copy_(s, non_blocking=True), self.device, self.seconds)
            self.keep(report, name, size / timing.median / 1e9, "page-locked memory, 1 GiB")


CASES = Facts
