"""How many canaries were answered wrongly, and what it says of a quantised KV; scipy's test of tables as the oracle."""

from __future__ import annotations

import pandas as pd
import pytest
from scipy.stats import fisher_exact

from kvbench.metrics.canaries import ALPHA, chance_of_so_many, counted, wrong_words
from kvbench.metrics.latency import summarise
from tests.support.request_rows import frame, row


def rows(*of: tuple[str | None, str | None, bool]) -> pd.DataFrame:
    return frame(*(row(index=i, t0=9.0 - i, canary=c, canary_wrong=w, ok=ok) for i, (c, w, ok) in enumerate(of)))


def test_failed_ones_are_neither_right_nor_wrong_and_the_first_is_the_one_that_was_due_first():
    found = counted(rows(("a", None, True), ("b", "late", True), ("a", "early", True), (None, None, True),
                         ("c", None, False)))  # fmt: skip
    expected = {"sent": 4, "answered": 3, "wrong": 2, "distinct": 2, "first_wrong": "a (request 2), early"}
    assert found.fields() == expected
    assert wrong_words(found).startswith("2 of 3 canaries were")


def test_a_load_without_canaries_says_nothing_of_them():
    assert counted(rows((None, None, True))) is None and counted(frame(row())) is None
    assert summarise(frame(row()), {"mode": "closed", "concurrency": 1}).canaries is None
    one = summarise(rows(("a", None, True)), {"mode": "closed", "concurrency": 1})
    assert one.canaries.fields() == {"sent": 1, "answered": 1, "wrong": 0, "distinct": 1}


@pytest.mark.parametrize("wrong", [1, 2, 3, 4, 7, 20])
@pytest.mark.parametrize("offline", [(0, 100), (3, 100), (30, 100), (1, 5)])
def test_the_chance_is_that_of_fishers_exact_test(wrong, offline):
    off, asked = offline
    table = [[wrong, 20 - wrong], [off, asked - off]]
    assert chance_of_so_many(wrong, 20, 20, off, asked) == pytest.approx(fisher_exact(table, "greater").pvalue)


def test_so_many_asked_again_count_once_and_none_wrong_is_no_evidence():
    """The same 10 canaries three times: 12 wrong of 30 are 4 of 10."""
    assert chance_of_so_many(12, 30, 10, 1, 100) == chance_of_so_many(4, 10, 10, 1, 100)
    assert chance_of_so_many(1, 30, 10, 0, 100) == chance_of_so_many(1, 10, 10, 0, 100) > ALPHA
    assert chance_of_so_many(0, 20, 20, 0, 100) == 1.0
    assert chance_of_so_many(4, 20, 20, 0, 100) < ALPHA < chance_of_so_many(3, 20, 20, 0, 100)
    assert chance_of_so_many(6, 20, 20, 30, 100) > 0.1
