"""Outputs side by side: which differ, where, and how many are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.report.samples import MOST_CHARACTERS
from kvbench.runs.model import Run
from tests.support.report_cells import cell, run, stored
from tests.support.report_parts import output_samples
from tests.support.request_rows import frame, row


def outputs(*texts: str, ids: bool = True, repeat: int = 0) -> pd.DataFrame:
    """A request a text, whose letters are its tokens."""
    rows = [
        row(index=i, text=text, output_tokens=len(text), output_token_ids=[ord(c) for c in text] if ids else None)
        for i, text in enumerate(texts)
    ]
    return frame(*rows).assign(repeat=repeat)


def shown(tmp_path: Path, base: pd.DataFrame, *others: pd.DataFrame, **manifest: Any) -> Run:
    cells = [stored(cell(page_size=2**i), tmp_path, rows) for i, rows in enumerate(others)]
    return run(stored(cell(), tmp_path, base), *cells, **manifest)


def test_equal_outputs_are_counted_over_requests_that_both_served(tmp_path: Path) -> None:
    mine = outputs("abc", "abd", "xyz", "only here")
    found = output_samples(shown(tmp_path, mine, outputs("abc", "abX", "xyz"), outputs("abc", "abd", "xyz", ids=False)))
    assert [str(each) for each in found.agreements] == ["2 of 3 equal in all tokens", "3 of 3 equal in text"]
    assert found.baseline == "paged (page 16)" and not found.random_weights
    both = [pd.concat([outputs("first"), outputs("second", repeat=1)][::step]) for step in (1, -1)]
    (agreement,) = output_samples(shown(tmp_path / "both", *both)).agreements
    assert (agreement.equal, agreement.both) == (2, 2)  # a request is known by its repeat and index


def test_those_that_differ_most_often_come_first_with_the_place_of_the_first_difference(tmp_path: Path) -> None:
    mine = outputs("aaaa", "bbbb", "cccc", "dddd")
    without_ids = outputs("aaaa", "bbbb", "cccc", "Xddd", ids=False)
    found = output_samples(shown(tmp_path, mine, outputs("aaaa", "bbbb", "cXcc", "dddX"), without_ids))
    assert [one.index for one in found.requests] == [3, 2, 0]
    one, two = found.requests[0].variants
    assert (one.text, one.differs_at) == ("dddX", "token 4") and two.differs_at == "character 1"
    assert [(each.text, each.differs_at) for each in found.requests[2].variants] == [("", ""), ("", "")]


def test_long_texts_are_cut_around_the_first_difference(tmp_path: Path) -> None:
    mine = "".join(chr(97 + i % 26) for i in range(2000))
    theirs = f"{mine[:1500]}!{mine[1501:]}"
    (one,) = output_samples(shown(tmp_path, outputs(mine), outputs(theirs))).requests
    (variant,) = one.variants
    assert variant.differs_at == "token 1501" and "!" in variant.text
    assert len(variant.text) <= MOST_CHARACTERS + 2 and len(one.text) == len(variant.text)
    assert one.text.replace(one.text[81], "") == variant.text.replace("!", "").replace(one.text[81], "")
    assert one.text.startswith("…") and one.text.endswith("…")


def test_texts_decide_the_same_ids_and_ids_decide_the_same_text(tmp_path: Path) -> None:
    """Two tokens may have the same text: outputs are equal when their tokens are."""
    theirs = outputs("same").assign(output_token_ids=[[1, 2, 3, 4]])
    (agreement,) = output_samples(shown(tmp_path, outputs("same"), theirs)).agreements
    assert (agreement.equal, agreement.by_tokens) == (0, True)


def test_nothing_is_shown_where_nothing_is_stored(tmp_path: Path) -> None:
    assert output_samples(run(cell(), cell(page_size=8))) is None
    alone = output_samples(shown(tmp_path, outputs("a"), workload={"model": {"load_format": "dummy"}}))
    assert alone.agreements == () and len(alone.requests) == 1 and alone.random_weights
