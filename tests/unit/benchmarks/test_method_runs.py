"""The table that says how sharp two ways of measuring pairs are."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from tests.benchmarks import method_runs
from tests.benchmarks.method_runs import precision, read_pairs, speeds


def test_equal_minutes_are_compared_whatever_a_pair_takes(tmp_path):
    rng = np.random.default_rng(5)
    for method, sd, seconds in (("lockstep", 0.01, 60.0), ("launched", 0.03, 30.0)):
        for number in (1, 2):
            folder = tmp_path / f"{method}-{number}" / "compare" / "x"
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text(json.dumps({"seconds": [seconds] * 500}))
            rows = [f"{n},w/{cell},base,tps,tok/s,1,1,{r}" for n in range(1, 501)
                    for cell, r in zip("ab", rng.normal(0.0, sd * 2**0.5, 2), strict=True)]  # fmt: skip
            (folder / "pairs.csv").write_text(
                "pair,cell,first,metric,unit,base,candidate,log_ratio\n" + "\n".join(rows)
            )
    table = precision(read_pairs(tmp_path), 20.0).set_index("method")
    assert table["pairs"].tolist() == [1000, 1000]
    assert table["sd"].to_dict() == pytest.approx({"launched": 0.03, "lockstep": 0.01}, rel=0.1)
    assert (table["sd_low"] < table["sd"]).all() and (table["sd"] < table["sd_high"]).all()
    expected = {"launched": 0.03 / 40**0.5, "lockstep": 0.01 / 20**0.5}  # so many pairs fit into 20 minutes
    assert table["standard_error"].to_dict() == pytest.approx(expected, rel=0.1)


def test_launches_have_two_speeds_or_none_that_are_found():
    assert speeds(np.array([33.0, 26.1, 33.2, 25.9, 33.1, 26.0])) == "two speeds, 27% apart: 3 of 6 launches are slower"
    for values in ([33.0, 32.4, 32.7, 33.2, 32.1, 32.8], [33.0, 26.0, 33.1]):  # three launches cannot tell
        assert speeds(np.array(values)) == "no two speeds found"


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        ([], {"lockstep": 4.0, "launched": 4.0}),
        (["--methods", "launched=3,lockstep"], {"launched": 6.0, "lockstep": 2.0}),
    ],
)
def test_each_method_gets_its_share_of_the_minutes(methods, expected, tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(method_runs, "measure", lambda out, method, number, m, words: asked.update({method: m}))
    monkeypatch.setattr(method_runs, "read_pairs", lambda out: pd.DataFrame())
    monkeypatch.setattr(method_runs, "report", lambda pairs, minutes, words: "")
    argv = ["method_runs", str(tmp_path), "--minutes", "8", "--rounds", "1", *methods, "--", "page_size=16"]
    monkeypatch.setattr("sys.argv", argv)
    method_runs.main()
    assert asked == expected
