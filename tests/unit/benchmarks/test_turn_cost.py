"""The table that says what a turn's cold caches cost."""

from __future__ import annotations

import numpy as np
import pytest

from tests.benchmarks.turn_cost import LONG, bounds, first_steps_cost


def turns(first: float, slow_until: int = 0) -> np.ndarray:
    """300 turns on a machine that changes its speed: the first step is longer by ``first``, each next one by 0.2 %."""
    rng, places = np.random.default_rng(3), np.arange(LONG)
    steps = (1 + 0.002 * places) * (1 + first * (places == 0)) * (1 + 0.05 * (places < slow_until))
    return 0.007 * steps * rng.uniform(0.8, 1.2, (300, 1)) * rng.lognormal(0.0, 0.02, (300, LONG))


def test_a_step_that_is_longer_is_found_beside_steps_that_grow():
    cost, (low, high) = first_steps_cost(turns(0.10)), bounds(turns(0.10))
    assert cost[:4] == pytest.approx([0.10, 0.05, 0.025, 0.0125], abs=0.006)
    assert low[0] < 0.10 < high[0] and low[4] < 0 < high[4]


def test_an_engine_that_is_not_yet_as_alone_where_the_late_steps_begin_shows():
    assert first_steps_cost(turns(0.0, slow_until=16))[4] > 0.02
