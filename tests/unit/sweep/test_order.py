"""What a sweep measures next: disturbed loads again after the others, and under --max-minutes what decides most."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.calibration.calibrate import FILE as CALIBRATION
from kvbench.calibration.calibrate import ClientLoad, settings_for
from kvbench.common.files import write_json
from kvbench.common.records import read_record, write_record
from kvbench.runs.folder import DONE, RunFolder
from kvbench.runs.results import LoadResult
from kvbench.sweep.order import Measured, blocks_in_time, blocks_left
from kvbench.workload.design import Block, make_design, plan_blocks
from kvbench.workload.load_section import load_point
from tests.unit.calibration.test_calibration import taken as taken_calibration

LOADS = [load_point("closed", concurrency=c, rate=None, num_requests=8) for c in (1, 4)]
DESIGN = make_design({"layout": "paged", "page_size": 16}, {"page_size": [8, 64]}, LOADS, "one_at_a_time")
BLOCKS = plan_blocks(DESIGN, 6, 0)
BASE = DESIGN.configurations[0].config_id


def load(
    rate: float = 100.0, ttft: float = 50.0, disturbed: bool = False, fault: bool = False, steady: bool = True
) -> LoadResult:
    """A done.json."""
    reasons = ["others used a core"] * disturbed + ["it leaked"] * fault
    metrics = {"steady_output_throughput": rate, "ttft_ms": {"p95": 50.0 if steady else ttft}}
    metrics |= {"steady_latency": {"ttft_ms": {"p95": ttft if steady else 50.0, "n": 8 if steady else 7}}}
    return LoadResult.parse({"metrics": metrics, "invalid_reasons": reasons, "disturbances": reasons[:disturbed]})


def keys(blocks: list[Block]) -> list[tuple[str, int]]:
    return [(cell.cell_id, block.repeat) for block in blocks for cell in block.cells]


def names(blocks: list[Block]) -> list[tuple[str, int]]:
    return [(block.configuration.config_id, block.repeat) for block in blocks]


def taken(repeats: int, **rates: list[float]) -> Measured:
    """All loads up to ``repeats``; ``rates``: output tokens/s by configuration, with - as _, and repeat."""
    found = {}
    for cell_id, repeat in keys([b for b in BLOCKS if b.repeat <= repeats]):
        given = rates.get(cell_id.rpartition("-")[0].replace("-", "_"))
        found[cell_id, repeat] = load(given[repeat - 1] if given else 100.0)
    return Measured(found, Counter(dict.fromkeys(found, 1)))


def test_everything_is_measured_once_as_planned_and_what_was_disturbed_twice_more_at_the_end() -> None:
    assert blocks_left(BLOCKS, Measured({})) == list(BLOCKS)
    measured = taken(6)
    (first, second), cell = keys(BLOCKS[:1]), BLOCKS[0].cells[0]
    measured.done[first] = load(disturbed=True)
    for attempts, left in ((1, [first]), (2, [first]), (3, [])):
        measured.attempts[first] = attempts
        again = blocks_left(BLOCKS, measured)
        assert keys(again) == left and all(block.configuration is cell.configuration for block in again)
    measured.attempts[first] = 1
    del measured.done[second], measured.attempts[second]  # not measured yet: before what is measured again
    assert keys(blocks_left(BLOCKS, measured)) == [second, first]


@pytest.mark.parametrize("done", [load(fault=True), load(disturbed=True, fault=True), None])
def test_what_the_server_did_is_measured_again_only_by_a_resume(done: dict[str, Any] | None) -> None:
    measured, (first, *_) = taken(6), keys(BLOCKS)
    measured.done.pop(first)
    measured.done |= {first: done} if done else {}
    assert blocks_left(BLOCKS, measured) == []
    assert keys(blocks_left(BLOCKS, Measured(measured.done))) == [first]


def test_a_load_that_the_server_refused_is_measured_and_in_no_comparison() -> None:
    measured, (first, *_) = taken(6), keys(BLOCKS)
    refused = {"refused": "served 20 of 52 requests; 'full' x 32"}
    measured.done[first] = load().model_copy(update=refused)
    assert blocks_left(BLOCKS, measured) == [] == blocks_left(BLOCKS, Measured(measured.done))  # of a resume, too
    cell = BLOCKS[0].cells[0]
    assert sorted(measured.valid(cell)) == [repeat for repeat in range(1, 7) if repeat != BLOCKS[0].repeat]
    measured.done[first] = load(disturbed=True).model_copy(update=refused)
    assert keys(blocks_left(BLOCKS, measured)) == [first]  # what was disturbed as well is


@pytest.mark.parametrize("disturbed", [False, True])
def test_wrong_answers_are_never_measured_away(disturbed: bool) -> None:
    measured, (first, *_) = taken(6), keys(BLOCKS)
    wrong = {"wrong_answers": "1 of 9 canaries was answered wrongly"}
    measured.done[first] = load(disturbed=disturbed).model_copy(update=wrong)
    assert blocks_left(BLOCKS, measured) == [] == blocks_left(BLOCKS, Measured(measured.done))  # of a resume, too
    assert BLOCKS[0].repeat not in measured.valid(BLOCKS[0].cells[0])
    assert measured.disturbed_in_a_row(BLOCKS[0], 0) == 0


@pytest.mark.parametrize("passed", [False, True])
def test_a_load_whose_client_passes_later_what_it_had_failed_is_measured_again(tmp_path: Path, passed: bool) -> None:
    run, (first, *_), settings = RunFolder(tmp_path), keys(BLOCKS), settings_for(ClientLoad(4))
    failed = taken_calibration(settings, ("it lagged",)).to_json()
    later = taken_calibration(settings, () if passed else ("it lagged",)).to_json() | {"taken": "later"}
    done = load().model_copy(update={"invalid_reasons": ("it lagged",), "calibration": failed})
    for block in BLOCKS:
        for key in keys([block]):
            write_record(run.load(*key) / DONE, done if key == first else load())
    measured = Measured({})
    for block in BLOCKS:
        measured.take(run, block)
        write_json(run.path / CALIBRATION, [failed, later])
    assert keys(blocks_left(BLOCKS, measured)) == ([first] if passed else [])
    assert read_record(LoadResult, run.load(*first) / DONE, "").is_disturbed is passed


def each(block: Block) -> float:
    return 10.0


def test_the_first_repeat_is_measured_however_little_time_there_is() -> None:
    first = [b for b in BLOCKS if b.repeat == 1]
    assert blocks_in_time(DESIGN, BLOCKS, Measured({}), 0.0, each) == first
    assert names(blocks_in_time(DESIGN, BLOCKS, Measured({}), 10 * len(BLOCKS), each)[: len(first)]) == names(first)
    assert len(blocks_in_time(DESIGN, BLOCKS, Measured({}), 10 * len(BLOCKS), each)) == len(BLOCKS)
    measured, cell = taken(1), keys(BLOCKS)[0]
    measured.done[cell] = load(disturbed=True)
    assert keys(blocks_in_time(DESIGN, BLOCKS, measured, 0.0, each)) == [cell]  # else it would have no valid load
    measured.done[cell[0], 2] = load()
    assert blocks_in_time(DESIGN, BLOCKS, measured, 0.0, each) == []


def test_the_widest_undecided_comparison_goes_first_with_the_baseline_s_repeat() -> None:
    scattered, level = [90.0, 100.0, 112.0], [100.0, 101.0, 99.0]
    for wide, decided in (("paged-p8", "paged-p64"), ("paged-p64", "paged-p8")):
        measured = taken(3, **{wide.replace("-", "_"): scattered, decided.replace("-", "_"): level})
        found = blocks_in_time(DESIGN, BLOCKS, measured, 25.0, each)
        assert sorted(names(found)) == sorted([(wide, 4), (BASE, 4)])
        found = blocks_in_time(DESIGN, BLOCKS, measured, 35.0, each)  # the decided one is better than nothing
        assert sorted(names(found)[:2]) == sorted([(wide, 4), (BASE, 4)]) and names(found)[2:] == [(decided, 4)]
    wider = taken(3, paged_p8=scattered, paged_p64=[80.0, 100.0, 125.0])
    assert "paged-p64" in {name for name, _ in names(blocks_in_time(DESIGN, BLOCKS, wider, 20.0, each))}


@pytest.mark.parametrize("steady", [True, False])  # where a repeat has too few requests in its window: the whole run
@pytest.mark.parametrize("name", ["paged-p8", "paged-p64"])
def test_a_latency_that_is_not_told_apart_counts_too(name: str, steady: bool) -> None:
    measured = taken(3)
    for repeat, ttft in enumerate((40.0, 50.0, 62.0), 1):
        measured.done[f"{name}-c4", repeat] = load(ttft=ttft, steady=steady)
    assert name in {chosen for chosen, _ in names(blocks_in_time(DESIGN, BLOCKS, measured, 20.0, each))}


def test_a_disturbed_repeat_of_the_baseline_is_none_of_the_pairs() -> None:
    """Two valid pairs of three are no verdict: what decides comes before the decided."""
    measured = taken(3)
    for cell in BLOCKS[0].cells:
        measured.done[f"{BASE}-{cell.load.load_id}", 2] = load(disturbed=True)
    first = blocks_in_time(DESIGN, BLOCKS, measured, 20.0, each)
    assert {(BASE, 4)} < set(names(first))  # repeats without an attempt before those that are measured again
    used = Measured(measured.done, Counter(dict.fromkeys(keys(list(BLOCKS)), 1)))
    assert names(blocks_in_time(DESIGN, BLOCKS, used, 20.0, each)) == [(BASE, 2)]


def test_one_comparison_gets_its_verdict_before_the_next_gets_a_second_repeat() -> None:
    """And in the order of the file: two repeats of all would be a verdict on none."""
    measured = taken(1)
    assert sorted(names(blocks_in_time(DESIGN, BLOCKS, measured, 40.0, each))) == [
        (BASE, 2), (BASE, 3), ("paged-p8", 2), ("paged-p8", 3)
    ]  # fmt: skip
    assert set(names(blocks_in_time(DESIGN, BLOCKS, measured, 60.0, each)[4:])) == {("paged-p64", 2), ("paged-p64", 3)}


def test_time_goes_to_the_setting_that_needs_it() -> None:
    """A clear effect is told after three repeats and a small one in much scatter is not: it gets the repeats."""
    rng, measured, clock = np.random.default_rng(1), Measured({}), 0.0
    rate = {BASE: 100.0, "paged-p8": 60.0, "paged-p64": 102.0}
    scatter = {BASE: 0.002, "paged-p8": 0.002, "paged-p64": 0.1}
    while left := blocks_in_time(DESIGN, BLOCKS, measured, 140.0 - clock, each):
        name = left[0].configuration.config_id
        for key in keys(left[:1]):
            measured.done[key] = load(rate[name] * np.exp(scatter[name] * rng.standard_normal()))
            measured.attempts[key] += 1
        clock += 10.0
    repeats = Counter(name for name in rate for cell, _ in measured.done if cell == f"{name}-c1")
    assert clock == 140.0 and repeats == {BASE: 5, "paged-p64": 5, "paged-p8": 4}
