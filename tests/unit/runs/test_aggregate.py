"""Repeats into summary.json: what is pooled, what is carried over, and the fields of `vllm bench serve`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvbench.common.files import write_json
from kvbench.metrics.latency import distribution, summarise
from kvbench.runs.aggregate import aggregate_cell
from kvbench.runs.folder import RunFolder
from kvbench.runs.results import Manifest
from kvbench.workload.design import Cell, Configuration, LoadPoint
from tests.support.request_rows import queued_at_the_end

CONFIGURATION = Configuration("paged", "paged", {"layout": "paged"}, {}, True)
BURST, LATER = 0.9, 0.1  # s to the first token: of users that start together, of those that follow


def rows(starts: list[tuple[float, float]]) -> pd.DataFrame:
    """Requests of two tokens: (t0, time to first token), each 0.1 s longer than its first token."""
    every = []
    for i, (t0, ttft) in enumerate(starts):
        first = t0 + ttft
        every.append(
            {
                "index": i, "class": "a", "prompt_tokens": 10, "output_tokens": 2, "t0": t0, "ts": t0,
                "first": first, "last": first + 0.1, "end": first + 0.1, "chunk_times": [first, first + 0.1],
                "ok": True, "error_kind": None,
            }
        )  # fmt: skip
    return pd.DataFrame(every)


def aggregated(
    folder: Path,
    load: LoadPoint,
    repeats: list[pd.DataFrame],
    *,
    notes: list[dict[str, Any]] | None = None,
    done: dict[str, Any] | None = None,
    each: list[dict[str, Any]] | None = None,
    **section: Any,
) -> dict[str, Any]:
    """summary.json of one cell whose repeats are ``repeats``, as read back; ``section``: ``load:`` of the workload."""
    run = RunFolder(folder)
    cell = Cell(f"paged-{load.load_id}", CONFIGURATION, load)
    if section:
        write_json(run.manifest_path, {"format": 1, "workload": {"load": section}, "plan": []})
    for repeat, frame in enumerate(repeats, start=1):
        where = run.load(cell.cell_id, repeat)
        where.mkdir(parents=True, exist_ok=True)
        frame.to_parquet(where / "requests.parquet")
        metrics = summarise(frame, {"mode": load.mode, "concurrency": load.concurrency})
        write_json(where / "counters.json", {})
        write_json(where / "load.json", {"notes": notes[repeat - 1]} if notes else {})
        facts = {"started_at": "2026-01-01T10:00:00+00:00", "invalid_reasons": [], "metrics": metrics}
        write_json(where / "done.json", facts | (done or {}) | (each[repeat - 1] if each else {}))
    aggregate_cell(run, cell, run.manifest() if run.manifest_path.is_file() else Manifest())
    return json.loads((run.cell(cell.cell_id) / "summary.json").read_text())


CLOSED = LoadPoint("c2", "closed", 2, None, 4)
FRAME = rows([(0.0, LATER), (0.001, LATER)])


def test_steady_latency_is_pooled_over_each_repeats_own_window(tmp_path: Path) -> None:
    # Two users start within a millisecond; the window starts with the second, and both are outside it.
    first = rows([(0.0, BURST), (0.001, BURST), (1.2, LATER), (1.3, LATER)])
    late = rows([(5.0, BURST), (5.001, BURST), (6.2, LATER), (6.3, 3 * LATER)])
    pooled = aggregated(tmp_path, CLOSED, [first, late])["pooled"]
    expected = distribution([100.0, 100.0, 100.0, 300.0])
    steady = pooled["steady_latency"]
    assert pooled["ttft_ms"]["n"] == 8 and steady["ttft_ms"]["n"] == steady["per_class"]["a"]["n"] == 4
    assert steady["ttft_ms"]["mean"] == pytest.approx(expected.mean)


def test_pooled_steady_latency_holds_whoever_waited_past_the_windows_end(tmp_path: Path) -> None:
    load = LoadPoint("r1", "open", None, 1.0, 100, "poisson")
    summary = aggregated(tmp_path, load, [queued_at_the_end(), queued_at_the_end()])
    one = summary["repeats"][0]["metrics"]["steady_latency"]["ttft_ms"]
    pooled = summary["pooled"]["steady_latency"]["ttft_ms"]
    assert pooled["n"] == 2 * one["n"] > 100 and pooled["max"] == pytest.approx(30_100)


def test_a_load_that_never_reached_its_target_has_no_steady_latency(tmp_path: Path) -> None:
    pooled = aggregated(tmp_path, LoadPoint("c9", "closed", 9, None, 2), [rows([(0.0, LATER), (1.0, LATER)])])["pooled"]
    assert (pooled["steady_latency"]["ttft_ms"]["n"], pooled["ttft_ms"]["n"]) == (0, 2)


def test_facts_of_each_load_are_carried_over_and_notes_listed_where_they_differ(tmp_path: Path) -> None:
    notes = [{"length_scale": 0.112, "prefix": n} for n in (5, 7)]
    facts = {
        "machine": {"foreign_cpu_cores": 0.4}, "prefix_cache": {"hits": 12.0, "queries": 80.0},
        "prefix_cache_bounds": {"low": 0, "high": 20}, "invalid_reasons": ["it lagged"],
    }  # fmt: skip
    summary = aggregated(tmp_path / "a", CLOSED, [FRAME, FRAME], notes=notes, done=facts)
    assert summary["notes"] == {"length_scale": 0.112, "prefix": [5, 7]}
    assert not summary["valid"] and summary["invalid_reasons"] == ["repeat 1: it lagged", "repeat 2: it lagged"]
    carried = {key: facts[key] for key in ("machine", "prefix_cache", "prefix_cache_bounds")}
    assert all(repeat.items() >= carried.items() for repeat in summary["repeats"])
    assert not carried.keys() & aggregated(tmp_path / "b", CLOSED, [FRAME])["repeats"][0].keys()


BUSY, LEAK, GOOD = {"disturbances": ["busy"], "invalid_reasons": ["busy"]}, {"invalid_reasons": ["leak"]}, {}


@pytest.mark.parametrize(
    ("each", "repeats", "valid", "left_out", "reasons"),
    [
        ([GOOD, BUSY, GOOD], [1, 3], True, {"2": ["busy"]}, []),
        ([BUSY, BUSY, GOOD], [3], True, {"1": ["busy"], "2": ["busy"]}, []),
        ([BUSY, BUSY, BUSY], [1, 2, 3], False, {}, ["repeat 1: busy", "repeat 2: busy", "repeat 3: busy"]),
        ([GOOD, LEAK, GOOD], [1, 2, 3], False, {}, ["repeat 2: leak"]),  # the server's fault is not left out
        ([GOOD, LEAK, BUSY], [1, 2, 3], False, {}, ["repeat 2: leak", "repeat 3: busy"]),
    ],
)
def test_disturbed_repeats_are_in_no_figure_where_others_are_valid(
    tmp_path: Path, each: list, repeats: list, valid: bool, left_out: dict, reasons: list
) -> None:
    summary = aggregated(tmp_path, CLOSED, [FRAME] * 3, each=each)
    assert [entry["repeat"] for entry in summary["repeats"]] == repeats
    assert summary["aggregate"]["completed"]["n"] == len(repeats) and summary["completed"] == 2 * len(repeats)
    assert summary["pooled"]["ttft_ms"]["n"] == 2 * len(repeats)
    assert set(pd.read_parquet(tmp_path / "cells" / "paged-c2" / "requests.parquet")["repeat"]) == set(repeats)
    assert (summary["valid"], summary["invalid_repeats"], summary["invalid_reasons"]) == (valid, left_out, reasons)


def test_a_refused_load_makes_its_cell_refused_and_not_invalid(tmp_path: Path) -> None:
    refused = {"refused": "served 20 of 52 requests; 'full' x 32"}
    summary = aggregated(tmp_path, CLOSED, [FRAME] * 3, each=[GOOD, refused, BUSY])
    assert not summary["valid"] and summary["invalid_reasons"] == []
    assert summary["refused"] == ["repeat 2: served 20 of 52 requests; 'full' x 32"]
    assert summary["invalid_repeats"] == {"3": ["busy"]}


def test_wrong_answers_fail_their_cell_also_where_that_load_was_disturbed(tmp_path: Path) -> None:
    known = FRAME.assign(text="", canary=["a", None], canary_wrong=["from token 0 on: 1, not 2", None])
    wrong, kept = {"wrong_answers": "1 of 1 canaries was answered wrongly"}, {"notes": {"canaries": {"repeat": 1}}}
    for repeat in (1, 2):
        where = tmp_path / "cells" / "paged-c2" / "loads" / str(repeat)
        where.mkdir(parents=True)
        (where / "wrong_answers.jsonl").write_text(f'{{"repeat": {repeat}}}\n')
    right = known.assign(canary_wrong=None)
    each = [GOOD, BUSY | wrong, GOOD]
    summary = aggregated(tmp_path, CLOSED, [right, known, right], each=each, notes=[kept["notes"]] * 3)
    assert not summary["valid"] and summary["wrong_answers"] == [f"repeat 2: {wrong['wrong_answers']}"]
    assert summary["invalid_repeats"] == {} and summary["notes"] == {}
    counts = {name: summary["canaries"][name] for name in ("sent", "answered", "wrong", "distinct")}
    assert counts == {"sent": 3, "answered": 3, "wrong": 1, "distinct": 1}
    lines = (tmp_path / "cells" / "paged-c2" / "wrong_answers.jsonl").read_text().splitlines()
    assert [json.loads(line)["repeat"] for line in lines] == [1, 2]
    samples = (tmp_path / "cells" / "paged-c2" / "samples.jsonl").read_text().splitlines()
    assert "canary" in json.loads(samples[0]) and "canary_wrong" not in json.loads(samples[0])


GAMMA = {"burstiness": 0.25, "max_concurrency": 7}


@pytest.mark.parametrize(
    ("load", "section", "fields"),
    [
        (LoadPoint("r4", "open", None, 4.0, 4), {}, (4.0, 1.0, None)),
        (LoadPoint("r4", "open", None, 4.0, 4, "constant"), {}, (4.0, "inf", None)),
        (LoadPoint("trace", "open", None, None, 4, "trace"), {}, (0.5, None, None)),  # 3 gaps in 6 s
        (LoadPoint("ramp", "open", None, None, 4, "ramp"), {}, (0.5, 1.0, None)),
        (LoadPoint("rinf", "open", None, math.inf, 4, "gamma"), GAMMA, ("inf", 0.25, 7)),
        (LoadPoint("c2", "closed", 2, None, 4), {}, ("inf", None, 2)),
    ],
)
def test_the_load_in_vllms_fields(tmp_path: Path, load: LoadPoint, section: dict, fields: tuple) -> None:
    frame = rows([(0.0, LATER), (1.0, LATER), (4.5, LATER), (6.0, LATER)])
    summary = aggregated(tmp_path, load, [frame], **section)
    assert (summary["request_rate"], summary["burstiness"], summary["max_concurrency"]) == pytest.approx(fields)
