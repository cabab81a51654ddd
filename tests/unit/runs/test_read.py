"""Reading a results folder: names, order, loads, what is missing, broken or not a run at all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from kvbench.measure.words import repeat_notes
from kvbench.report.provenance import validity, warnings
from kvbench.runs.folder import open_run
from kvbench.runs.model import MeasuredLoad, Run
from kvbench.runs.read import configuration_name, display_rank, read_run
from kvbench.runs.results import CellSummary
from tests.support.report_cells import cell

PAGED = {"layout": "paged", "page_size": 16}


@pytest.mark.parametrize(
    ("settings", "varied", "name"),
    [
        (PAGED, {"kv_cache_dtype": "fp8_e4m3"}, "paged (page 16) + FP8 KV (e4m3)"),
        (
            PAGED | {"page_size": 8}, {"page_size": 8, "preemption_mode": "swap", "swap_space": "64MiB"},
            "paged (page 8) + swap + swap space 64MiB",
        ),
        ({"layout": "contiguous"}, {"layout": "contiguous"}, "contiguous"),
        ({"layout": "contiguous", "reservation": "oracle"}, {"reservation": "oracle"}, "contiguous (oracle)"),
        ({"layout": "paged"}, {"enable_chunked_prefill": False}, "paged + no chunked prefill"),
        ({"layout": "paged"}, {"scheduling_policy": "priority"}, "paged + priority scheduling"),
        ({}, {}, "its label"),
    ],
)  # fmt: skip
def test_names_of_configurations(settings: dict, varied: dict, name: str) -> None:
    summary = CellSummary.model_validate({"settings": settings, "varied": varied, "label": "its label"})
    assert configuration_name(summary) == name


def test_contiguous_comes_first_by_what_its_reservation_knows() -> None:
    cells = [cell("contiguous", reservation=kind) for kind in ("oracle", "pow2", "max")] + [cell(page_size=8), cell()]
    found = [c.settings.get("reservation") or c.settings["page_size"] for c in sorted(cells, key=display_rank)]
    assert found == ["max", "pow2", "oracle", 8, 16]


@pytest.mark.parametrize(
    ("load", "label", "short", "tick"),
    [
        (MeasuredLoad("open", 4.0, "gamma"), "4 requests/s", "4/s", "4/s"),
        (MeasuredLoad("open", 0.5, sessions=True), "0.5 conversations/s", "0.5/s", "0.5/s"),
        (MeasuredLoad("open", 0.0, "ramp"), "a ramp of the rate", "ramp", "ramp"),
        (MeasuredLoad("open", 0.0, "trace"), "the trace's arrivals", "trace", "trace"),
        (MeasuredLoad("open", math.inf), "all requests at once", "all", "all"),
        (MeasuredLoad("closed", 1.0), "1 concurrent request", "1 at once", "1"),
        (MeasuredLoad("closed", 8.0, sessions=True), "8 users", "8 users", "8"),
    ],
)
def test_loads_have_names(load: MeasuredLoad, label: str, short: str, tick: str) -> None:
    assert (load.label, load.short, load.tick) == (label, short, tick)


def test_loads_and_names_are_read_from_the_folder(make: Callable[..., Run]) -> None:
    run = make(rates=(2.0,), repeats=1, num_requests=10)
    path = run.folder / "manifest.json"
    facts = json.loads(path.read_text())
    facts["workload"]["load"] = {"sessions": {"num_sessions": [24]}}
    path.write_text(json.dumps(facts))
    for one, rate in zip(run.cells, ("inf", None), strict=True):
        summary = json.loads((one.folder / "summary.json").read_text())
        summary["load"] |= {"request_rate": rate, "arrivals": "poisson" if rate else "trace"}
        summary["settings"] = {"layout": "paged", "page_size": 16}  # two configurations of one name
        (one.folder / "summary.json").write_text(json.dumps(summary))
    found = read_run(run.folder)
    assert {load.label for load in found.loads} == {"all conversations at once", "the trace's arrivals"}
    assert found.configs[0] == "paged (page 16)" and found.configs[1].startswith("paged (page 16) [")


def test_cells_that_miss_repeats_or_cannot_be_read_are_told(make: Callable[..., Run]) -> None:
    run = make(concurrencies=(3, 6), num_requests=10, missing=("layout-contiguous",))
    assert run.missing == ("layout-contiguous-c3", "layout-contiguous-c6")
    first, second = (one.folder / "summary.json" for one in run.cells)
    summary = json.loads(first.read_text())
    first.write_text(json.dumps(summary | {"repeats": summary["repeats"][:2]}))
    second.write_text('{"cell_id": "x", ')
    path = run.folder / "manifest.json"
    failures = [{"cell_id": "baseline-c6", "repeat": 2, "reason": "it died"}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"failures": failures}))
    found = read_run(run.folder)
    assert found.short == ("baseline-c3: 2 of 3 repeats",) and len(found.cells) == 1
    assert found.failures == ("baseline-c6 repeat 2 failed: it died",) and found.missing == run.missing
    (damaged,) = found.damaged
    assert str(second) in damaged and damaged in validity(found).reasons
    for text in ('{"metrics": 3}', None):  # measured, and its summary is another file, or gone
        second.unlink() if text is None else second.write_text(text)
        (damaged,) = read_run(run.folder).damaged
        assert str(second) in damaged


def test_repeats_that_were_disturbed_or_left_out_make_no_run_incomplete(make: Callable[..., Run]) -> None:
    run = make(concurrencies=(3, 6), num_requests=10, missing=("layout-contiguous",))
    for one, repeats in zip(run.cells, (2, 1), strict=True):
        path = one.folder / "summary.json"
        summary = json.loads(path.read_text())
        left = {"invalid_repeats": {"3": ["others ran; stop them"]}} if repeats == 2 else {}
        path.write_text(json.dumps(summary | {"repeats": summary["repeats"][:repeats]} | left))
    path = run.folder / "manifest.json"
    more = {"left_out": [["baseline-c6", 2], ["baseline-c6", 3]], "max_minutes": 5.0}
    more |= {"set_aside": [{"cell_id": "baseline-c3", "repeat": 3}] * 2 + [{"cell_id": "baseline-c3", "repeat": 1}]}
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    found = read_run(run.folder)
    assert found.short == () and all(one.valid for one in found.cells)
    again, invalid, left_out = repeat_notes(found.manifest, found.cells)
    assert "baseline-c3 repeat 3 (twice)" in again and "baseline-c3 repeat 1" in again
    assert "baseline-c3: 2 of 3 repeats" in invalid and "repeat 3: others ran" in invalid
    assert "baseline-c6: 1 of 3 repeats" in left_out and "--max-minutes 5" in left_out
    said = " ".join(warnings(found))
    assert all(note[1:] in said for note in repeat_notes(found.manifest, found.cells))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 1, "kind', r"manifest\.json cannot be read as JSON"),
        ("[1]", r"is not the manifest of a sweep"),
        ('{"format": 1, "status": "complete"}', r"is not the manifest of a sweep"),
        ('{"format": 0, "workload": {}, "plan": [], "git": {"short_sha": "abc1234"}}', r"format 0.* reads 1.*abc1234"),
    ],
)
def test_of_a_manifest_that_says_nothing_no_report_is_made(tmp_path, text: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    for read in (read_run, open_run):
        with pytest.raises(ValueError, match=message):
            read(tmp_path)


@pytest.mark.parametrize("link", [False, True], ids=["a folder", "a link to nothing"])
@pytest.mark.parametrize("name", ["lockstep/effects.json", "quality.json", "predictions.json", "manifest.json"])
def test_what_is_no_file_in_the_place_of_one_is_damaged_and_not_absent(make, name: str, link: bool) -> None:
    """Else a report would replace one that says more, without a word."""
    run = make(repeats=1, concurrencies=(3,), num_requests=10)
    assert not read_run(run.folder).damaged
    path = run.folder / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("nowhere") if link else path.mkdir()
    if name == "manifest.json":
        with pytest.raises(ValueError, match=r"manifest\.json"):
            read_run(run.folder)
    else:
        (sentence,) = read_run(run.folder).damaged
        assert name in sentence


def test_server_means_are_of_the_steady_window(make: Callable[..., Run]) -> None:
    one = next(c for c in make(repeats=1, concurrencies=(24,)).cells if c.is_contiguous)
    repeat, gauges = one.repeats[0], one.gauges()
    gauges = gauges[gauges["repeat"] == repeat.repeat]
    inside = gauges["t"].between(repeat.metrics.steady_start_s, repeat.metrics.steady_end_s)
    assert 0 < inside.sum() < len(gauges)
    assert repeat.observed["running_mean"] == pytest.approx(gauges[inside]["num_requests_running"].mean())


def test_server_means_are_over_time_where_readings_are_rarer_under_load(make: Callable[..., Run]) -> None:
    run = make(repeats=1, concurrencies=(3,), num_requests=10)
    folder = run.cells[0].folder
    gauges = pd.DataFrame({"t": 0.25 * np.arange(60), "repeat": 1, "kv_slots_total": 100.0})
    busy = gauges["t"] >= 7.5
    for name in ("num_requests_running", "kv_slots_used"):
        gauges[name] = np.where(busy, 10.0, 0.0)
    gauges = gauges[~busy | (np.arange(60) % 5 == 4)]  # the last reading is kept
    gauges.to_parquet(folder / "server.parquet")
    summary = json.loads((folder / "summary.json").read_text())
    summary["repeats"][0]["metrics"] |= {"steady_start_s": None, "steady_end_s": None}
    (folder / "summary.json").write_text(json.dumps(summary))
    observed = read_run(run.folder).cells[0].repeats[0].observed
    assert gauges["num_requests_running"].mean() < 2.0
    assert observed["running_mean"] == pytest.approx(5.0, rel=0.1)  # half of the time 10 ran
    assert observed["used_share"] == pytest.approx(0.05, rel=0.1)
