"""Part ``check``: every kernel on the device against float64, and cache offsets beyond 2^31 for real.

Cases are spread over worker processes, since most of the time goes into compiling. A CUDA error ends the usefulness of
the process that met it: its further cases are left out, and say so.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

import torch

from ci.gpu import kernel_problems as problems
from ci.gpu.check_moves import check_far_offsets, check_moves
from ci.gpu.check_suite import run_kernel_tests
from ci.gpu.kernel_problems import CONTIGUOUS, TOLERANCE, Case
from ci.gpu.part import PartReport, part_parser, sentence
from kernels import get_backend
from kernels.kv_formats import KV_FORMATS

KINDS = ("auto", *KV_FORMATS)
MAX_WORKERS = 8
QUICK_CASES = 48
SUITE_SHARE = 0.35  # of the time, for the repository's own device tests
_poisoned: str | None = None  # in a worker: the case that met a CUDA error


def all_cases() -> list[Case]:
    """Most important first, each once: a run that is out of time has done what matters."""
    base = Case()
    wanted: Iterator[Case] = itertools.chain(
        (replace(base, kv=kv, page_size=page) for page in (16, CONTIGUOUS, 1) for kv in KINDS),
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


def tiny_cases() -> list[Case]:
    """For a CPU: its backend computes in float32."""
    small = Case(dtype=torch.float32, dim=32, v_dim=32, group=2, tiny=True)
    return [replace(small, kv=kv, page_size=page) for kv in KINDS for page in (16, CONTIGUOUS)]


def run_case(case: Case, device: str) -> dict[str, Any]:
    """``status`` passed, failed or skipped, ``reason``, and the distances."""
    global _poisoned
    if _poisoned is not None:
        return {"status": "skipped", "reason": f"the device was lost to this process in: {_poisoned}"}
    try:
        return _run_case(case, device)
    except Exception as error:
        if "CUDA error" in str(error) or "device-side assert" in str(error):
            _poisoned = case.name
        return {"status": "failed", "reason": sentence(error)}


def _run_case(case: Case, device: str) -> dict[str, Any]:
    backend = get_backend("triton" if device == "cuda" else "numba")
    try:
        backend.check_support(
            num_heads=case.group * case.kv_heads, num_kv_heads=case.kv_heads, head_dim=case.dim,
            v_head_dim=case.v_dim, dtype=case.dtype, device=device, kv_cache_dtype=case.kv,
        )  # fmt: skip
    except ValueError as error:
        return {"status": "skipped", "reason": str(error)}
    torch.manual_seed(0)
    drawn = problems.draw(case, device)
    found = {
        "decode": problems.check_decode(case, drawn, backend, device),
        "prefill": problems.check_prefill(case, drawn, backend, device),
    }
    write = problems.check_write(case, drawn, backend, device)
    limit = TOLERANCE[case.dtype]
    wrong = [f"{what} is {value:.2g} from float64, limit {limit:g}" for what, value in found.items() if value > limit]
    wrong += [f"write: {write}"] if write else []
    return {"status": "failed" if wrong else "passed", "reason": "; ".join(wrong), **found}


def keep(report: PartReport, case: Case, result: dict[str, Any]) -> None:
    """Put the result down as a row, and as a failure or as skipped where it is one."""
    report.row(case=case.name, **result)
    if result["status"] == "failed":
        report.fail(case.name, result["reason"])
    elif result["status"] == "skipped":
        report.skip(case.name, result["reason"])


def run_cases(report: PartReport, cases: list[Case], device: str, workers: int, reserve: float) -> None:
    """In this process with 1 worker, else in as many of their own. Until ``reserve`` seconds are left: the rest is
    skipped."""
    if workers == 1:
        for number, case in enumerate(cases):
            if report.time_left <= reserve:
                report.skip(f"{len(cases) - number} cases", "no time left")
                return
            keep(report, case, run_case(case, device))
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context)
    futures = {pool.submit(run_case, case, device): case for case in cases}
    try:
        for future in as_completed(futures, timeout=max(1.0, report.time_left - reserve)):
            keep(report, futures.pop(future), future.result())
    except TimeoutError:
        report.skip(f"{len(futures)} cases", "no time left")
    except BrokenProcessPool:
        report.fail(f"{len(futures)} cases", "a worker process died")
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


def main() -> int:
    """The part; 1 if a check failed."""
    args = part_parser(__doc__).parse_args()
    report = PartReport(args.out, args.seconds)
    cases = tiny_cases() if args.tiny else all_cases()
    workers = 1 if args.tiny else max(2, min(MAX_WORKERS, (os.cpu_count() or 2) // 2))
    on_gpu = args.device == "cuda"
    check_moves(report, args.device)
    check_far_offsets(report, args.device, args.tiny)
    if on_gpu:
        torch.cuda.empty_cache()
    reserve = report.time_left * SUITE_SHARE if on_gpu else 0.0
    run_cases(report, cases[:QUICK_CASES] if args.quick else cases, args.device, workers, reserve)
    if on_gpu:
        run_kernel_tests(report)
    return report.conclude_checks(len(report.data["rows"]), "checks passed")


if __name__ == "__main__":
    sys.exit(main())
