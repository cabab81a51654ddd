"""The search behind `kvbench dev tune`, with timings that are made up here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench_kernels.launch import Tiles
from kvbench_kernels.tune import search as tune
from kvbench_kernels.tune.search import TuningCase, candidates, entry_of, merge, search
from kvbench_kernels.tuning import (
    TuningTable,
    bucket_of,
    choose_decode,
    decode_tiles,
    prefill_tiles,
    read_table,
    unusable,
    write_table,
)

DECODE = TuningCase(bucket_of("decode", "auto", 4, 128, 128, 2), 4, 128, 128, 16)
PREFILL = TuningCase(bucket_of("prefill", "auto", 4, 128, 128, 2), 4, 128, 128, 16)
DEFAULT = decode_tiles(4, 128, 128, 2)
A, B, C = (DEFAULT._replace(block_n=n) for n in (16, 32, 128))


class FakeGPU:
    """Tiles take what ``times`` says; the clock goes on by it. ``wrong`` ones give other numbers than the reference."""

    def __init__(self, times: dict[Tiles, float], wrong: tuple[Tiles, ...] = (), limit: float = 1e9):
        self.times, self.wrong, self.limit, self.clock = times, wrong, limit, 0.0
        self.timed: list[Tiles] = []

    def refusal(self, tiles: Tiles) -> str | None:
        return "differs from the reference" if tiles in self.wrong else None

    def microseconds(self, tiles: Tiles) -> float:
        assert tiles not in self.wrong, "what is wrong must not be timed"
        self.timed.append(tiles)
        self.clock += self.times[tiles]
        return self.times[tiles]

    def search(self, tries, default=DEFAULT):
        return search(default, tries, self.refusal, self.microseconds, lambda: self.clock >= self.limit)


def test_picks_the_fastest_that_is_right_and_tells_the_gain():
    machine = FakeGPU({DEFAULT: 100, A: 1, B: 70, C: 80}, wrong=(A,))
    found = machine.search([A, B, C])
    assert (found.best, found.microseconds, found.default_microseconds, found.tried) == (B, 70, 100, 3)
    assert found.finished and found.gain == pytest.approx(0.3)
    assert found.rejected == ((A, "differs from the reference"),) and A not in machine.timed


def test_a_default_that_is_wrong_is_no_baseline():
    with pytest.raises(ValueError, match="differs from the reference"):
        FakeGPU({A: 1}, wrong=(DEFAULT,)).search([A])


@pytest.mark.parametrize(("limit", "tried"), [(50, 0), (150, 1), (250, 2), (10_000, 3)])
def test_stops_at_the_time_limit_with_what_it_has(limit, tried):
    found = FakeGPU({DEFAULT: 100, A: 90, B: 80, C: 70}, limit=limit).search([A, B, C])
    assert found.tried == tried and found.finished == (tried == 3)
    assert found.best == [DEFAULT, A, B, C][tried]


def test_a_gain_within_the_noise_changes_nothing():
    found = FakeGPU({DEFAULT: 100, A: 99}).search([A])
    assert found.best == DEFAULT and found.gain == 0


def test_a_lucky_first_timing_does_not_win():
    """Timed again in turns with the default, A is as slow as it."""
    machine = FakeGPU({DEFAULT: 100, A: 100})
    first = iter([100, 60])
    found = search(
        DEFAULT, [A], machine.refusal, lambda tiles: next(first, None) or machine.microseconds(tiles), lambda: False
    )
    assert found.best == DEFAULT
    assert machine.timed.count(A) == machine.timed.count(DEFAULT) == tune.ROUNDS


@pytest.mark.parametrize("arch", [80, 89, 90, 100])
@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=str)
def test_candidates_can_run_and_begin_near_the_default(case, arch):
    default = DEFAULT if case is DECODE else prefill_tiles(4, 128, 128, 2)
    found = candidates(case, default, arch)
    assert 10 < len(found) < 200 and len(set(found)) == len(found) and default not in found
    for tiles in found:
        assert unusable(tiles, default.block_m if case is DECODE else 16, "auto", 2, arch) is None
        assert (tiles.d_pad, tiles.v_pad) == (128, 128)
        assert case is PREFILL or tiles.block_m == default.block_m

    def changed(tiles):
        return sum(a != b for a, b in zip(tiles, default, strict=True))

    assert changed(found[0]) == 1 and changed(found[-1]) > 1


def test_candidates_over_the_shared_memory_of_a_chip_are_left_out():
    roomy, small = (candidates(DECODE, DEFAULT, arch) for arch in (90, 89))
    deep = DEFAULT._replace(block_n=128, num_stages=3)  # 2 x 128 x 256 x 2 bytes in flight
    assert deep in roomy and deep not in small and set(small) < set(roomy)


def test_what_was_found_is_what_is_looked_up(tmp_path):
    found = FakeGPU({DEFAULT: 100, A: 90}).search([A])
    table = TuningTable(90, "Some GPU", 132, "1.2", "3.9.0", "2026-01-01", (entry_of(DECODE, found),))
    write_table(table, tmp_path)
    assert read_table(90, tmp_path) == table
    assert choose_decode(90, "auto", 4, 128, 128, 2, 16, folder=tmp_path) == A
    assert choose_decode(90, "fp8_e5m2", 4, 128, 128, 2, 16, folder=tmp_path) != A


def test_a_later_run_adds_to_the_table_of_the_same_machine_only():
    found = FakeGPU({DEFAULT: 100, A: 90}).search([A])
    entry = entry_of(DECODE, found)
    old = TuningTable(90, "Some GPU", 132, "1.2", "3.9.0", "2026-01-01", (entry, replace(entry, page_size=256)))
    again = replace(entry, microseconds=80.0)
    new = replace(old, date="2026-02-02", entries=(again,))
    both = merge(old, new)
    assert both.entries == (again, old.entries[1]) and both.date == "2026-02-02"
    assert merge(None, new) == new
    for change in ({"device": "Other GPU"}, {"triton": "4.0"}, {"driver": "2"}):
        other = replace(new, **change)
        assert merge(old, other) == other
