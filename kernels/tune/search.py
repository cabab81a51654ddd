"""The search behind ``kvbench dev tune``: pure, with the checks and the clock passed in.

Speed of a wrong kernel is worth nothing, and the best of fifty noisy timings looks better than it is. So every
candidate must first agree with the reference, and the fastest is timed again in turns with the computed default before
it may replace it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvbench_kernels.launch import MIN_DOT, Tiles
from kvbench_kernels.tuning import Entry, TuningTable, unusable

MIN_GAIN = 0.02  # share of the default's time; less is within the difference of two sittings
ROUNDS = 5  # rounds in which winner and default are timed again, in turns
_TOKENS, _STAGES, _WARPS = (16, 32, 64, 128), (1, 2, 3, 4), (2, 4, 8)
_PREFILL_ROWS = (16, 32, 64, 128)
_PREFILL_WARPS = (4, 8)


@dataclass(frozen=True)
class TuningCase:
    """A bucket of shapes that is tuned for itself. ``bucket``: ``kvbench_kernels.tuning.Entry.bucket``."""

    bucket: tuple
    group: int
    head_dim: int
    v_head_dim: int
    page_size: int

    @property
    def kernel(self) -> str:
        return self.bucket[0]

    @property
    def kind(self) -> str:
        return self.bucket[1]

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"
        return f"{self.kernel}, KV {self.kind}, head dim {dims}, group {self.group}, page size {self.page_size}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a search. ``best``: the default where nothing was clearly faster. ``finished``: every candidate
    had its turn.
    """

    best: Tiles
    microseconds: float
    default_microseconds: float
    tried: int
    rejected: tuple[tuple[Tiles, str], ...]
    finished: bool

    @property
    def gain(self) -> float:
        """The share of the default's time that the best tiles save: 0.1 is a tenth."""
        return 1 - self.microseconds / self.default_microseconds


def candidates(case: TuningCase, default: Tiles, arch: int) -> list[Tiles]:
    """Tiles worth a try on sm_``arch``, the most like ``default`` first, without it and without what could not run."""
    _, kind, rows, _, _, itemsize = case.bucket
    if case.kernel == "decode":
        choices = itertools.product((default.block_m,), _TOKENS, _STAGES, _WARPS)
    else:
        choices = itertools.product({default.block_m, *_PREFILL_ROWS}, _TOKENS, _STAGES, _PREFILL_WARPS)
    tried = [
        default._replace(block_m=m, block_n=n, num_stages=stages, num_warps=warps) for m, n, stages, warps in choices
    ]
    least = default.block_m if case.kernel == "decode" else max(rows, MIN_DOT)
    usable = [tiles for tiles in tried if tiles != default and not unusable(tiles, least, kind, itemsize, arch)]
    return sorted(usable, key=lambda tiles: _steps(tiles, default))


def _steps(tiles: Tiles, other: Tiles) -> tuple[float, Tiles]:
    """Count the doublings and stages between two tiles."""
    doublings = sum(
        abs(math.log2(getattr(tiles, name) / getattr(other, name))) for name in ("block_m", "block_n", "num_warps")
    )
    return doublings + abs(tiles.num_stages - other.num_stages), tiles


def search(
    default: Tiles,
    tries: Iterable[Tiles],
    refusal: Callable[[Tiles], str | None],
    microseconds: Callable[[Tiles], float],
    out_of_time: Callable[[], bool],
) -> Outcome:
    """Find the fastest of ``tries`` that ``refusal`` allows (None), if it beats ``default`` by MIN_GAIN.

    ``out_of_time`` is asked before each candidate; the default is always timed, and so is the winner in turns with it.

    Raises:
        ValueError: the default itself is refused.
    """
    if reason := refusal(default):
        raise ValueError(f"the kernel fails with its own default {default}: {reason}")
    best, fastest = default, microseconds(default)
    rejected: list[tuple[Tiles, str]] = []
    tried, finished = 0, True
    for tiles in tries:
        if out_of_time():
            finished = False
            break
        tried += 1
        if reason := refusal(tiles):
            rejected.append((tiles, reason))
            continue
        if (took := microseconds(tiles)) < fastest:
            best, fastest = tiles, took
    took, default_took = _in_turns(best, default, microseconds)
    if took > default_took * (1 - MIN_GAIN):
        best, took = default, default_took
    return Outcome(best, took, default_took, tried, tuple(rejected), finished)


def _in_turns(best: Tiles, default: Tiles, microseconds: Callable[[Tiles], float]) -> tuple[float, float]:
    """Time both in turns: medians of ROUNDS timings, so that a clock that slows down slows both."""
    times = [(microseconds(best), microseconds(default)) for _ in range(1 if best == default else ROUNDS)]
    return statistics.median(t for t, _ in times), statistics.median(t for _, t in times)


def entry_of(case: TuningCase, outcome: Outcome) -> Entry:
    """Make the table's entry of an outcome."""
    kernel, kind, rows, d_pad, v_pad, itemsize = case.bucket
    tiles = outcome.best
    return Entry(
        kernel, kind, rows, d_pad, v_pad, itemsize, case.page_size,
        tiles.block_m, tiles.block_n, tiles.num_stages, tiles.num_warps,
        round(outcome.microseconds, 2), round(outcome.default_microseconds, 2),
    )  # fmt: skip


def merge(old: TuningTable | None, new: TuningTable) -> TuningTable:
    """Add to ``new`` the entries of ``old`` that it does not measure again.

    Only if the same device, driver and Triton made them: measurements of other versions are no better than a guess.
    """
    if old is None or (old.device, old.driver, old.triton) != (new.device, new.driver, new.triton):
        return new
    places = {(*entry.bucket, entry.page_size) for entry in new.entries}
    kept = [entry for entry in old.entries if (*entry.bucket, entry.page_size) not in places]
    entries = sorted((*kept, *new.entries), key=lambda entry: (*entry.bucket, entry.page_size))
    return TuningTable(new.arch, new.device, new.num_sms, new.driver, new.triton, new.date, tuple(entries))
