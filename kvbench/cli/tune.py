"""``kvbench dev tune``: find the fastest tiles of the attention kernels on this machine's GPU, and write a table."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvbench.common.errors import MeasurementError, UsageError, as_usage_error
from kvbench.common.options import Options, Positive, option, takes

if TYPE_CHECKING:
    from rich.console import Console

    from kvbench_kernels.launch import Tiles
    from kvbench_kernels.tune.search import Outcome, TuningCase

MAX_HEAD_DIM = 256


@dataclass(frozen=True, kw_only=True)
class TuneRequest(Options):
    """The request of ``kvbench dev tune``."""

    kernel: tuple[Literal["decode", "prefill"], ...] = option(
        "Tune only this kernel (default: both).", default=("decode", "prefill")
    )
    kv_cache_dtype: tuple[str, ...] = option(
        "How K and V are stored: auto, fp8_e4m3, fp8_e5m2, int8_per_token_head or int4_per_token_head. Repeatable.",
        default=("auto", "fp8_e4m3", "int8_per_token_head"), metavar="DTYPE",
    )  # fmt: skip
    head_dim: tuple[str, ...] = option(
        "The head dimension; 192/128: that of K and that of V. Repeatable.", default=("128", "64"), metavar="D[/DV]"
    )
    group: tuple[int, ...] = option(
        "Query heads that share a KV head; the kernels treat up to 16 alike. Repeatable.",
        default=(4,),
        least=1,
        most=64,
    )
    page_size: tuple[int, ...] = option(
        "Tokens a page; other sizes use the nearest of these. Repeatable.", default=(16, 1, 256), least=1, most=1 << 20
    )
    dtype: Literal["bfloat16", "float32"] = option("The type that the kernels compute in.", default="bfloat16")
    max_minutes: Positive = option("Stop after about N minutes; what was measured by then is written.", default=30.0)
    output_dir: Path | None = option("The folder that the table goes to (default: where kernels look for it).")


@takes(TuneRequest)
def tune(request: TuneRequest) -> int:
    """Find the fastest tiles of the GPU attention kernels.

    It tunes for this machine's GPU and writes the tiles into a table.

    Every candidate is first checked against float64, then timed with CUDA events; the fastest is timed again in turns
    with the computed default and replaces it if it is clearly faster. The engine uses the table from its next start on;
    commit it, and everybody with such a GPU does.

    \b
    Examples:
      kvbench dev tune
      kvbench dev tune --kernel decode --kv-cache-dtype auto --head-dim 128 --max-minutes 5
    \b
    Files written: kernels/tuned/sm_XX.json (of the GPU's architecture; in a wheel kvbench_kernels), added to if it is
    of the same GPU and versions.
    Exit codes: 0 written, 2 bad input or no CUDA device, 4 a kernel's own default gives wrong numbers.
    """
    from kvbench.common.packages import require_engine

    require_engine("`kvbench dev tune`")
    import torch
    from rich.console import Console

    from kvbench_kernels import tuning

    shapes = (request.kernel, request.kv_cache_dtype, request.head_dim, request.group, request.page_size)
    cases = make_cases(*shapes, itemsize=getattr(torch, request.dtype).itemsize)
    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}, and it finds no device" if torch.version.cuda else "for the CPU"
        raise UsageError(
            f"kvbench dev tune times kernels on a CUDA device, and there is none here (torch {torch.__version__} is "
            f"built {built}): run it on a machine with an NVIDIA GPU"
        )
    _tune(Console(), cases, time.monotonic() + 60 * request.max_minutes, request.output_dir or tuning.FOLDER)
    return 0


def make_cases(
    kernel: Sequence[str],
    kv_cache_dtype: Sequence[str],
    head_dim: Sequence[str],
    group: Sequence[int],
    page_size: Sequence[int],
    itemsize: int,
) -> list[TuningCase]:
    """Makes every combination once, though several may fall into one bucket. UsageError for what no kernel takes."""
    from kvbench_kernels.kv_formats import KV_FORMATS
    from kvbench_kernels.tune.search import TuningCase
    from kvbench_kernels.tuning import bucket_of

    if unknown := set(kv_cache_dtype) - {"auto", *KV_FORMATS}:
        raise UsageError(f"--kv-cache-dtype {min(unknown)!r} is none: use auto, {', '.join(KV_FORMATS)}")
    cases, dims = {}, [_dims(text) for text in head_dim]
    for page, kind, dim, heads, name in itertools.product(page_size, kv_cache_dtype, dims, group, kernel):
        bucket = bucket_of(name, kind, heads, *dim, itemsize)
        cases.setdefault((bucket, page), TuningCase(bucket, heads, *dim, page))
    return list(cases.values())


def _dims(text: str) -> tuple[int, int]:
    """Reads the head dims of K and V: 128 is (128, 128), 192/128 is (192, 128)."""
    parts = text.split("/")
    if len(parts) > 2 or not all(part.isdecimal() and 1 <= int(part) <= MAX_HEAD_DIM for part in parts):
        raise UsageError(f"--head-dim {text!r}: give 1 to {MAX_HEAD_DIM}, such as 128, or 192/128 for K and V apart")
    return int(parts[0]), int(parts[-1])


def _tune(console: Console, cases: list[TuningCase], deadline: float, folder: Path) -> None:
    import torch
    import triton

    from kvbench.common.machine import gpus
    from kvbench_kernels import tuning
    from kvbench_kernels.tune.device import chip_of
    from kvbench_kernels.tune.search import entry_of, merge

    device = torch.device("cuda", torch.cuda.current_device())
    chip = chip_of(device)
    driver = next((gpu["driver_version"] for gpu in gpus()), "unknown")
    with as_usage_error():
        old = tuning.read_table(chip.arch, folder)
    entries: list[tuning.Entry] = []
    for i, case in enumerate(cases):
        left = deadline - time.monotonic()
        if left <= 0:
            console.print(f"out of time: {len(cases) - i} of {len(cases)} cases were not begun (--max-minutes)")
            break
        console.print(f"{i + 1}/{len(cases)}  {case}", highlight=False)
        outcome = _tune_case(case, chip, device, time.monotonic() + left / (len(cases) - i))
        console.print(f"     {describe(outcome)}", highlight=False)
        entries.append(entry_of(case, outcome))
        now, name = datetime.now(UTC).date().isoformat(), torch.cuda.get_device_name(device)
        new = tuning.TuningTable(chip.arch, name, chip.num_sms, driver, triton.__version__, now, tuple(entries))
        path = tuning.write_table(merge(old, new), folder)  # after each: an interrupt keeps what was measured
    if entries:
        faster = sum(entry.microseconds < entry.default_microseconds for entry in entries)
        console.print(f"{faster} of {len(entries)} cases are faster than the computed tiles; written: {path}")


def _tune_case(case: TuningCase, chip: Any, device: Any, deadline: float) -> Outcome:
    from kvbench_kernels.tune.device import (
        CHECKED,
        CHECKED_KV_HEADS,
        TIMED,
        TIMED_KV_HEADS,
        Checker,
        TuningProblem,
        event_timer,
    )
    from kvbench_kernels.tune.search import candidates, search

    small = TuningProblem(case, *CHECKED[case.kernel], CHECKED_KV_HEADS, chip, device)
    large = [TuningProblem(case, *lengths, TIMED_KV_HEADS, chip, device, gap=0) for lengths in TIMED[case.kernel]]
    default = default_tiles(case, chip.arch)
    tries = candidates(case, default, chip.arch)
    try:
        return search(default, tries, Checker(small), event_timer(large), lambda: time.monotonic() > deadline)
    except ValueError as error:
        raise MeasurementError(str(error)) from None


def default_tiles(case: TuningCase, arch: int) -> Tiles:
    """The tiles that launch.py computes without a table."""
    from kvbench_kernels import tuning

    _, kind, _, _, _, itemsize = case.bucket
    return tuning.computed(case.kernel, arch, kind, case.group, case.head_dim, case.v_head_dim, itemsize)


_TILES = "{block_m} x {block_n}, {num_stages} stages, {num_warps} warps"
_FASTER = "{before:.1f} -> {after:.1f} us ({change:+.1%})"
_NOT_FASTER = "{before:.1f} us: nothing is clearly faster than the computed tiles"


def describe(outcome: Outcome) -> str:
    """Says in one line what was found, and how thorough the search was."""
    gained = _FASTER if outcome.gain else _NOT_FASTER
    times = {"before": outcome.default_microseconds, "after": outcome.microseconds, "change": -outcome.gain}
    chosen, gained = _TILES.format(**outcome.best._asdict()), gained.format(**times)
    rest = "" if outcome.finished else ", out of time before the last"
    return f"{chosen}: {gained}; {outcome.tried} candidates, {len(outcome.rejected)} refused{rest}"
