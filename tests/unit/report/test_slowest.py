"""The slowest requests: whose they are, and what their time went into."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from kvbench.report.comparisons import Comparisons
from kvbench.report.figures.slowest import CLIENT, DECODE, FIRST, GAP, drawing, section, slowest, slowest_of
from tests.support.report_cells import cell, run, stored
from tests.support.request_rows import frame, row

STEADY = [1.5 + 0.1 * i for i in range(21)]  # a token every 100 ms for 2 s
STALLED = [2.0, 2.1, 2.2, 3.0, 3.1, 3.2, 3.9, 4.0]  # gaps of 800 and 700 ms
ROWS = frame(
    row(index=0, chunk_times=STEADY),
    row(index=1, chunk_times=STALLED, queued_s=0.25, ts=1.25),
    *(row(index=i, chunk_times=[1.2, 1.3, 1.4]) for i in range(2, 12)),
).assign(repeat=1)


def test_the_parts_of_a_request_add_up_to_its_e2el_with_its_gaps_marked() -> None:
    found = slowest(ROWS)
    assert found.groupby("request")["index"].first().tolist()[:2] == [1, 0]
    one = found[found["index"] == 1]
    assert one["part"].tolist() == [CLIENT, FIRST, DECODE, GAP, DECODE, GAP, DECODE]
    assert one["start_ms"].to_numpy() == pytest.approx([0, 250, 1000, 1200, 2000, 2200, 2900])
    assert one["ms"].to_numpy() == pytest.approx([250, 750, 200, 800, 200, 700, 100])
    e2el = ((ROWS["last"] - ROWS["t0"]) * 1000).set_axis(ROWS["index"])
    sums = found.groupby("index")["ms"].sum()
    assert sums.to_numpy() == pytest.approx(e2el.loc[sums.index].to_numpy())
    assert len(sums) == 10 and {0, 1} <= set(sums.index)


def test_a_gap_counts_from_five_times_the_median() -> None:
    """The median ITL is 100 ms."""
    for gap, parts in ((0.49, [FIRST, DECODE]), (0.51, [FIRST, DECODE, GAP])):
        rows = frame(row(chunk_times=[2.0, 2.1, 2.2, 2.3, 2.3 + gap]), row(index=1, chunk_times=STEADY))
        found = slowest(rows.assign(repeat=1))
        assert found.loc[found["index"] == 0, "part"].tolist() == parts


def test_of_several_sequences_the_one_that_ended_last_is_shown() -> None:
    """Sequence 1 stalls for a second, in which sequence 0 goes on."""
    times = [1.5, 1.5, 1.6, 1.6, *(1.7 + 0.1 * i for i in range(9)), 2.6, 2.7]
    several = row(chunk_times=times, chunk_choices=[0, 1, 0, 1, *[0] * 9, 1, 1], output_tokens=len(times))
    found = slowest(frame(several, row(index=1, chunk_times=STEADY)).assign(repeat=1))
    assert found.loc[found["index"] == 0, "part"].tolist() == [FIRST, DECODE, GAP, DECODE]
    assert found.loc[found["index"] == 0, "ms"].to_numpy() == pytest.approx([500, 100, 1000, 100])


def test_the_baseline_at_the_highest_load_is_shown_else_the_best(tmp_path: Path) -> None:
    base, low = stored(cell(), tmp_path, ROWS), stored(cell(load=3), tmp_path, ROWS)
    other = stored(cell("contiguous", throughput=(200.0,) * 3), tmp_path, ROWS)
    assert slowest_of(Comparisons.of(run(base, low, other))) is base
    bad = stored(cell(reasons=("lag",)), tmp_path / "bad", ROWS)
    assert slowest_of(Comparisons.of(run(bad, low, other))) is other
    assert slowest_of(Comparisons.of(run(bad, low))) is low
    assert drawing(Comparisons.of(run(bad))) is None and section(Comparisons.of(run(bad))) is None


def test_figure_and_table_say_the_same(tmp_path: Path) -> None:
    shown = run(stored(cell(), tmp_path, ROWS))
    made, table = drawing(Comparisons.of(shown)), section(Comparisons.of(shown)).table
    assert made.title.startswith("The slowest 10 of 12 requests: ") and "paged (page 16)" in made.caption
    first = dict(zip((column.key for column in table.columns), table.rows[0].values, strict=True))
    assert len(table.rows) == 10 and first["request"].text == "1, repeat 1"
    keys = ("E2EL ms", "in the client ms", "first token ms", "decode ms", "long gaps ms")
    assert [first[key].sort for key in keys] == pytest.approx([3000, 250, 750, 500, 1500])
    assert first["long gaps ms"].note == "2, longest 800"
    drawn = {trace.name: sum(trace.x) for trace in made.figure.data}
    sums = slowest(ROWS).groupby("part")["ms"].sum()
    assert sorted(drawn.values()) == pytest.approx(sorted(sums), rel=1e-3)
    assert any("10 → 3 · #1 r1" in each.text for each in made.figure.layout.annotations)


def test_names_of_classes_are_escaped(tmp_path: Path) -> None:
    evil = pd.DataFrame(ROWS.assign(**{"class": "<script>alert(1)</script>"}))
    assert "<script" not in drawing(Comparisons.of(run(stored(cell(), tmp_path, evil)))).figure.to_json()
