"""ECDFs of latencies, as a frame and as a figure with a menu of classes; points of curves and ticks of axes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from kvbench.report.figures.distributions import EVERY, LATENCIES, distributions
from kvbench.report.style import ecdf, log_axis, thin
from tests.support.report_cells import cell, run, stored
from tests.support.report_parts import distributions_drawing as drawing
from tests.support.request_rows import frame, row


def requests(count: int, classes: tuple[str, ...] = ("chat",), scale: float = 1.0, seed: int = 0) -> pd.DataFrame:
    """Requests of a class in turn: sent at 0, first token after a random time, then three more."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(count):
        times = np.cumsum(scale * rng.exponential([0.5, 0.05, 0.05, 0.1]))
        of = {"index": i, "class": classes[i % len(classes)], "output_tokens": 4}
        rows.append(row(t0=0.0, ts=0.0, chunk_times=times.tolist(), **of))
    return frame(*rows).assign(repeat=0)


def test_each_curve_is_the_ecdf_of_the_definition(tmp_path: Path) -> None:
    rows = requests(300)
    found = distributions([stored(cell(), tmp_path, rows)])
    times = np.stack(rows["chunk_times"].to_list()) * 1000  # [requests, 4] ms
    expected = {
        "ttft_ms": times[:, 0],
        "tpot_ms": (times[:, 3] - times[:, 0]) / 3,
        "itl_ms": np.diff(times, axis=1).ravel(),
        "e2el_ms": times[:, 3],
    }
    assert set(found["metric"]) == set(LATENCIES) == set(expected) and set(found["group"]) == {EVERY}
    for metric, samples in expected.items():
        curve = found[found["metric"] == metric]
        exact = stats.ecdf(samples).cdf
        assert curve["share"].to_numpy() == pytest.approx(100 * exact.evaluate(curve["ms"] + 1e-9), abs=1e-9)
        assert (curve["ms"].min(), curve["ms"].max()) == pytest.approx((samples.min(), samples.max()))
        assert len(curve) <= 60 and set(curve["samples"]) == {len(samples)}


def test_a_menu_entry_shows_one_class_and_says_how_many_requests_it_has(tmp_path: Path) -> None:
    shown = run(
        stored(cell(), tmp_path, requests(30, ("chat", "chat", "long"))),
        stored(cell("contiguous"), tmp_path, requests(30, ("chat", "chat", "long"), 2.0)),
    )
    figure = drawing(shown).figure
    buttons = figure.layout.updatemenus[0].buttons
    assert [button.label for button in buttons] == ["all requests (30)", "chat (20)", "long (10)"]
    slowest = []
    for button in buttons:
        traces = [t for t, on in zip(figure.data, button.args[0]["visible"], strict=True) if on]
        assert len(traces) == 2 * len(LATENCIES) and sum(bool(t.showlegend) for t in traces) == 2
        slowest.append(max(max(t.x) for t in traces))
    assert [t.visible for t in figure.data] == list(buttons[0].args[0]["visible"])
    assert slowest[0] == max(slowest[1:])


def test_only_valid_cells_of_the_highest_load_that_has_any_are_drawn(tmp_path: Path) -> None:
    bad = stored(cell("contiguous", reasons=("lag",)), tmp_path, requests(5, scale=9.0))
    shown = run(stored(cell(), tmp_path, requests(5)), bad, stored(cell(load=3), tmp_path, requests(5)))
    made = drawing(shown)
    assert {trace.name for trace in made.figure.data} == {"paged (page 16)"} and "24 at once" in made.title
    assert "1 configuration invalid" in made.caption and not made.figure.layout.updatemenus
    low = drawing(run(*(one for one in shown.cells if one.load.value == 3 or not one.valid)))
    assert "3 at once" in low.title
    assert drawing(run(bad)) is None and drawing(run(cell())) is None


def test_a_large_run_stays_small(tmp_path: Path) -> None:
    rows = requests(600, ("a", "b", "c"))
    cells = [stored(cell(page_size=2**i), tmp_path, rows) for i in range(8)]
    assert len(drawing(run(*cells)).figure.to_json()) < 110_000


def test_every_point_of_a_thinned_ecdf_is_one_of_the_full_curve() -> None:
    samples = np.random.default_rng(0).exponential(10, 50_000)
    x, y = ecdf(samples, 120)
    whole = stats.ecdf(samples).cdf
    assert len(x) == 120 and (x[0], x[-1], y[-1]) == (samples.min(), samples.max(), 1.0)
    assert y == pytest.approx(whole.evaluate(x), abs=1e-12) and np.isin(x, whole.quantiles).all()
    x, y = ecdf(np.array([3.0, 1.0, 2.0, 2.0]))
    assert x.tolist() == [1, 2, 2, 3] and y.tolist() == [0.25, 0.5, 0.75, 1]
    short = thin(pd.DataFrame({"t": range(10_000)}))
    assert len(short) <= 400 and (short["t"].iloc[0], short["t"].iloc[-1]) == (0, 9_999)


def test_log_axis_ticks_lie_on_one_two_five() -> None:
    assert log_axis(np.array([12.0, 300.0]))["tickvals"] == [20, 50, 100, 200]
    assert log_axis(np.array([1.0, 1.0, 1.0, 2000.0]))["tickvals"] == [1, 10, 100, 1000]
    assert log_axis(np.array([100.0, 110.0]))["tickvals"]  # too narrow for two ticks
    assert log_axis(np.array([0.0])) == {}
