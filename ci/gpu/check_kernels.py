"""Part ``check``: every kernel on the device against float64, then moves of pages, then offsets beyond 2^31 for real.

Cases are spread over several processes, since most of the time goes into compiling.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ci.gpu import check_moves
from ci.gpu import kernel_problems as problems
from ci.gpu.kernel_problems import CONTIGUOUS, TOLERANCE, KernelProblem
from ci.gpu.part import Planned, Report
from kernels import get_backend
from kernels.kv_formats import INT4, KV_FORMATS

KINDS = ("auto", *KV_FORMATS)
MAX_WORKERS = 8
QUICK_CASES = 48


def all_cases() -> list[KernelProblem]:
    """Lists the cases once each, the most important first: a run that is out of time has done what matters."""
    base, latent = KernelProblem(), KernelProblem(dim=576, v_dim=512, kv_heads=1, latent=True, group=128)
    wanted: Iterator[KernelProblem] = itertools.chain(
        (replace(base, kv=kv, page_size=page) for page in (16, CONTIGUOUS, 1) for kv in KINDS),
        (replace(latent, kv=kv) for kv in KINDS if kv != INT4.name),
        (replace(latent, group=group) for group in (16, 20, 40)),
        (replace(base, dtype=dtype) for dtype in (torch.float16, torch.float32)),
        (replace(base, dim=d, v_dim=v) for d, v in ((64, 64), (256, 256), (192, 128), (80, 96), (112, 112))),
        (replace(base, group=group) for group in (1, 2, 3, 7, 8, 16)),
        (replace(base, window=100), replace(base, softcap=9.0), replace(base, sinks=True)),
        (replace(base, page_size=page) for page in (2, 7, 8, 32, 64, 128, 256)),
        (replace(base, kv=kv, window=70, softcap=20.0, sinks=True, page_size=7) for kv in KINDS),
        (replace(base, kv=kv, dim=d, v_dim=v) for kv in KINDS[1:] for d, v in ((64, 64), (256, 256), (80, 96))),
        (replace(base, kv=kv, group=group) for kv in KINDS[1:] for group in (1, 7, 16)),
        (replace(base, kv=kv, dtype=dtype) for kv in KINDS[1:] for dtype in (torch.float16, torch.float32)),
        (replace(base, kv=kv, page_size=page) for kv in KINDS[1:] for page in (8, 64, 256)),
    )
    return list(dict.fromkeys(wanted))


def tiny_cases() -> list[KernelProblem]:
    """The cases for a CPU, whose backend computes in float32."""
    small = KernelProblem(dtype=torch.float32, dim=32, v_dim=32, group=2, tiny=True)
    latent = replace(small, dim=24, v_dim=16, kv_heads=1, group=20, latent=True)
    pages = [replace(small, kv=kv, page_size=page) for kv in KINDS for page in (16, CONTIGUOUS)]
    return [*pages, *(replace(latent, kv=kv) for kv in KINDS if kv != INT4.name)]


def run_case(case: KernelProblem, device: str) -> dict[str, Any]:
    """Runs a case: ``status`` passed, failed or skipped, ``reason``, and the distances."""
    backend = get_backend("triton" if device == "cuda" else "numba")
    try:
        problems.check_support(backend, case, device)
    except ValueError as error:
        return {"status": "skipped", "reason": str(error)}
    torch.manual_seed(0)
    drawn = problems.draw(case, device)
    distances = {
        "decode": problems.check_decode(case, drawn, backend, device),
        "prefill": problems.check_prefill(case, drawn, backend, device),
    }
    write = problems.check_write(case, drawn, backend, device)
    limit = TOLERANCE[case.dtype]
    wrong = [
        f"{what} is {value:.2g} from float64, limit {limit:g}" for what, value in distances.items() if value > limit
    ]
    wrong += [f"write: {write}"] if write else []
    return {"status": "failed" if wrong else "passed", "reason": "; ".join(wrong), **distances}


def keep(report: Report, name: str, result: dict[str, Any]) -> None:
    """Adds the result as a row, and to the failures or the skipped cases."""
    report.row(case=name, **result)
    if result["status"] == "failed":
        report.fail(name, result["reason"])
    elif result["status"] == "skipped":
        report.skip(name, result["reason"])


class KernelChecks:
    """The cases of the part: kernels share processes, far offsets do not."""

    def __init__(self, args: Any):
        self.device, tiny = args.device, args.tiny
        self.workers = 1 if tiny else max(2, min(MAX_WORKERS, (os.cpu_count() or 2) // 2))
        kernels = tiny_cases() if tiny else all_cases()[: QUICK_CASES if args.quick else None]
        self._kernels = {case.name: case for case in kernels}
        self._others: dict[str, Callable[[], str | None]] = {
            f"moves, {layout}": partial(check_moves.moves_differ, layout, self.device)
            for layout in ("paged", "contiguous")
        }
        self._far = {name: partial(check, self.device) for name, check in check_moves.far_cases(tiny).items()}

    def plan(self) -> list[Planned]:
        """Lists kernels, then moves, then the furthest offsets."""
        return [
            *(Planned(name, "kernels") for name in self._kernels),
            *(Planned(name, "moves") for name in self._others),
            *(Planned(name, None) for name in self._far),
        ]

    def run(self, name: str, report: Report) -> None:
        """Runs one check."""
        if name in self._kernels:
            keep(report, name, run_case(self._kernels[name], self.device))
            return
        check = self._others.get(name) or self._far[name]
        try:
            wrong = check()
        except check_moves.NotHere as reason:
            report.skip(name, str(reason))
            return
        keep(report, name, {"status": "failed" if wrong else "passed", "reason": wrong or ""})


CASES = KernelChecks
