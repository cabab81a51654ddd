"""The load client's own benchmark can fail: what it measured is held against the bars."""

from __future__ import annotations

import pytest

from tests.benchmarks.bench_bars import Measured, missed

GOOD = {"lag_p99_ms": 0.7, "itl_error_p99_ms": 0.5, "cpu_us_per_event": 30.0, "coalesced_pct": 0.1}


def measured(streams: int = 64, processes: int = 1, device: str = "cpu", **changed: float | None) -> Measured:
    params = {"streams": streams, "processes": processes}
    return Measured("test_load_client", "", params, GOOD | changed, device)


def test_the_limits_themselves_are_reached() -> None:
    assert missed(measured()) == missed(measured(256, 4)) == []


@pytest.mark.parametrize("figure", GOOD)
@pytest.mark.parametrize("shape", [(64, 1), (256, 4)])
def test_a_figure_over_its_bar_or_missing_is_told(figure: str, shape: tuple[int, int]) -> None:
    for value in (GOOD[figure] * 1.01, None):
        (said,) = missed(measured(*shape, **{figure: value}))
        assert said.startswith(f"load client, {shape[0]} streams in {shape[1]} process") and said.endswith(
            f"wanted <= {GOOD[figure]:g}"
        )


def test_other_shapes_devices_and_benchmarks_have_other_bars() -> None:
    assert missed(measured(256, 1, lag_p99_ms=9.0)) == []
    assert missed(measured(device="NVIDIA H100", lag_p99_ms=9.0)) == []
