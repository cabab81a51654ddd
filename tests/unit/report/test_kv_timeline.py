"""KV over time: readings of a server whose means and rates are worked out on paper."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvbench.report.figures.kv import timeline, timeline_figure
from kvbench.runs.kv_ledger import SLOT_USES
from tests.support.report_cells import cell, run, stored
from tests.support.report_parts import shown_cells
from tests.support.report_parts import timeline_drawing as drawing

MIB = 2**20


def readings(*rows: dict[str, float], slots: float = 100) -> pd.DataFrame:
    """Of a server with 100 slots; ``rows``: ``t``, gauges, and slot steps by use so far."""
    base = {"repeat": 0, "num_requests_running": 1, "num_requests_waiting": 0, "kv_slots_total": slots}
    base |= {"kv_cache_usage_perc": 0.5, **steps()}
    return pd.DataFrame([base | row for row in rows])


def steps(**slots: float) -> dict[str, float]:
    return {f"kv_slot_steps_total_{use}": slots.get(use, 0.0) for use in SLOT_USES}


ONE_REPEAT = {"throughput": (100.0,)}


TWO = readings(
    {"t": 0.0, "num_preemptions_total": 0, "prefix_cache_hits_total": 10, "swapped_out_slots_total": 0},
    {"t": 2.0, **steps(tokens=3 * 40, waste=3 * 10, free=3 * 50), "num_preemptions_total": 4,
     "prefix_cache_hits_total": 110, "swapped_out_slots_total": 8, "num_requests_waiting": 7},
    {"t": 3.0, **steps(tokens=120 + 80, waste=30 + 20, free=150), "num_preemptions_total": 4,
     "prefix_cache_hits_total": 110, "swapped_out_slots_total": 8},
)  # fmt: skip
MEASURED = {"usage_mean": 0.5, "kv_bytes_per_slot": MIB}


def test_uses_and_rates_are_of_the_time_since_the_reading_before(tmp_path: Path) -> None:
    found = timeline([stored(cell(observed=MEASURED, **ONE_REPEAT), tmp_path, gauges=TWO)])
    assert found["t"].tolist() == [0, 2, 3]
    assert found["tokens"].tolist()[1:] == [40, 80] and found["waste"].tolist()[1:] == [10, 20]
    assert found["free"].tolist()[1:] == [50, 0]
    assert found[list(SLOT_USES)].iloc[1:].sum(axis=1).tolist() == [100, 100] and found["usage"].isna().all()
    assert found["preemptions"].tolist()[1:] == [2, 0] and found["prefix_hits"].tolist()[1:] == [50, 0]
    assert found["swapped_out"].tolist()[1:] == [4, 0], "8 slots of 1 MiB in 2 s"
    assert found["waiting"].tolist() == [0, 7, 0]


def test_thinned_readings_stay_exact(tmp_path: Path) -> None:
    """A step a second, whose tokens alternate between 20 and 60 slots; any even number of steps has a mean of 40."""
    used = np.cumsum(np.tile([20.0, 60.0], 500))
    rows = [{"t": 0.0}] + [
        {"t": i + 1.0, **steps(tokens=total, free=100.0 * (i + 1) - total)} for i, total in enumerate(used)
    ]
    found = timeline([stored(cell(observed=MEASURED, **ONE_REPEAT), tmp_path, gauges=readings(*rows))])
    length = found["t"].diff().to_numpy()[1:]
    assert len(found) <= 400 and length.max() > 1
    assert np.average(found["tokens"].to_numpy()[1:], weights=length) == pytest.approx(40)
    even = found["tokens"].to_numpy()[1:][length % 2 == 0]
    assert len(even) and even == pytest.approx(40)


def test_only_the_repeat_of_median_throughput_is_drawn(tmp_path: Path) -> None:
    both = pd.concat([TWO.assign(repeat=i, num_requests_running=10 * i) for i in range(3)], ignore_index=True)
    one = stored(cell(throughput=(90.0, 130.0, 110.0), observed=MEASURED), tmp_path, gauges=both)
    assert set(timeline([one])["running"]) == {20}
    bad = stored(cell(observed=MEASURED, reasons=("repeat 0: lag",), **ONE_REPEAT), tmp_path / "bad", gauges=TWO)
    assert set(timeline([bad])["configuration"]) == {"paged (page 16) (invalid)"}


def test_a_server_without_slots_shows_its_usage_and_no_event_that_never_happened(tmp_path: Path) -> None:
    plain = readings({"t": 0.0, "kv_cache_usage_perc": 0.25}, {"t": 1.0, "kv_cache_usage_perc": 0.75}, slots=np.nan)
    one = stored(cell(observed={"usage_mean": 0.5}, **ONE_REPEAT), tmp_path, gauges=plain)
    found = timeline([one])
    assert found["usage"].tolist() == [25, 75] and found[list(SLOT_USES)].isna().all(axis=None)
    names = {trace.name for trace in timeline_figure(found).data}
    assert names == {"in use", "running", "waiting"}
    full = timeline([stored(cell(observed=MEASURED, **ONE_REPEAT), tmp_path / "full", gauges=TWO)])
    events = {trace.name for trace in timeline_figure(full).data}
    assert {"tokens", "reserved, empty", "free", "preemptions", "prefix_hits", "swapped_out"} <= events
    assert not {"cached", "pinned", "in use"} & events
    silent = run(stored(cell(**ONE_REPEAT), tmp_path / "silent", gauges=readings({"t": 0.0}, {"t": 1.0})))
    assert drawing(silent, silent.loads[0]) is None


def test_of_many_configurations_those_with_other_uses_are_shown() -> None:
    """Page sizes use the KV as the baseline does, quantised KV otherwise; the layouts are always there."""

    def uses(tokens: float) -> dict[str, float]:
        slots = {f"use_{use}": 0.0 for use in SLOT_USES} | {"use_tokens": tokens, "use_free": 100 - tokens}
        return slots | {"usage_mean": 0.5, "kv_bytes_per_slot": 1.0, "kv_budget_bytes": 100.0}

    others = [cell(page_size=size, observed=uses(80)) for size in (8, 32, 64)]
    varied = [cell(kv_cache_dtype=name, observed=uses(30 + i)) for i, name in enumerate(("fp8", "int8", "int4"))]
    shown = run(cell("contiguous", observed=uses(79)), cell(observed=uses(80)), *others, *varied, cell(load=3))
    names = [one.name for one in shown_cells(shown, shown.loads[-1])]
    assert names == ["contiguous", "paged (page 16)", *(one.name for one in varied)]
    fastest = cell(page_size=128, observed=uses(80), throughput=(300.0, 300.0, 300.0))
    assert fastest.name in {one.name for one in shown_cells(run(*shown.cells, fastest), shown.loads[-1])}
    few = run(*shown.cells[:3])
    assert shown_cells(few, few.loads[0]) == list(few.cells)
    assert shown_cells(shown, shown.loads[0]) == [], "its server says nothing of its KV"
