"""Loads of several sequences a request, over HTTP from the built-in server's own code to requests.parquet."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import yaml

from kvbench.cli.main import cli
from tests.support.fake_engine import branching, fake_engine
from tests.support.http_server import running_server
from tests.support.sweep_parts import BUSY_MACHINE, TINY

STEP_S = 0.005
OUT = 12
CLASSES = [
    {"name": "samples", "share": 0.5, "prompt_tokens": 40, "output_tokens": OUT, "n": 3},
    {"name": "best", "share": 0.25, "prompt_tokens": 20, "output_tokens": OUT, "n": 2, "best_of": 4},
    {"name": "beams", "share": 0.25, "prompt_tokens": 20, "output_tokens": OUT, "n": 2, "beam_width": 3},
]
LOAD = {
    "concurrency": [2], "num_requests": 12, "temperature": 1.0, "timeout_s": 30.0, "ignore_eos": True,
    "prompts": {"kind": "synthetic", "classes": CLASSES, "shared_prefix": {"tokens": 32}},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("load")
    (path / "w.yaml").write_text(yaml.safe_dump({**TINY, "sweep": {}, "load": LOAD}))
    engine = fake_engine(branching, step_s=STEP_S, max_num_seqs=16)
    engine.executor.logprob = lambda seq: -0.1 * (seq.index + 1)
    with running_server(engine) as server:
        words = ["load", str(path / "w.yaml"), "--url", server.base_url, "--output-dir", str(path / "out")]
        cli.main([*words, "--no-calibration"], standalone_mode=False)
        server.wait_for(kv_pages_owned=0, num_requests_running=0)
    return path / "out"


@pytest.fixture(scope="module")
def rows(folder):
    return pd.read_parquet(folder / "requests.parquet")


def test_all_sequences_are_counted_and_nothing_that_is_thrown_away(folder, rows):
    kept = json.loads((folder / "metrics.json").read_text())
    assert not [r for r in kept["invalid_reasons"] if not any(words in r for words in BUSY_MACHINE)]
    assert rows["ok"].all(), rows["error"].tolist()
    assert rows.groupby("class")["output_tokens"].unique().to_dict() == {"samples": 36, "best": 24, "beams": 24}
    assert kept["total_output_tokens"] == rows["output_tokens"].sum() == 6 * 36 + 6 * 24
    assert kept["metrics"]["client"]["short_outputs"] == 0


def test_each_chunk_has_its_sequence_and_ids_are_in_order_of_the_sequences(rows):
    for row in rows.itertuples():
        of = list(row.output_token_ids)
        if row.max_tokens * 3 == row.output_tokens:  # what each sibling says: its own hundred
            assert sorted(row.chunk_choices) == [0] * OUT + [1] * OUT + [2] * OUT
            assert [token // 100 for token in of] == [1] * OUT + [1] + [2] * (OUT - 1) + [1] + [3] * (OUT - 1)
        else:
            assert list(row.chunk_choices) == [0, 1] and list(row.chunk_tokens) == [OUT, OUT]
            assert len(of) == 2 * OUT


def test_latencies_are_of_sequences(folder):
    kept = json.loads((folder / "metrics.json").read_text())["metrics"]
    samples, best, beams = (kept["per_class"][name] for name in ("samples", "best", "beams"))
    assert samples["ttft_ms"]["n"] == 6 and samples["sequence_ttft_ms"]["n"] == samples["tpot_ms"]["n"] == 18
    assert samples["itl_ms"]["n"] == 18 * (OUT - 1)
    assert samples["itl_ms"]["p50"] > 0.5 * STEP_S * 1e3  # not between two sequences of one step
    for chosen in (best, beams):
        assert chosen["tpot_ms"]["n"] == chosen["itl_ms"]["n"] == 0
        assert chosen["ttft_ms"]["min"] > OUT * STEP_S * 1e3 * 0.9


def test_sharing_can_be_read_from_the_counters(folder):
    counters = json.loads((folder / "counters.json").read_text())
    assert counters["forks_total"] >= 6 * 2 + 3 * 3 + 3 * 2 and counters["copied_pages_total"] > 0
    owned, logical = (counters[f"kv_page_steps_total_{pages}"] for pages in ("physical", "logical"))
    assert 0.3 < 1 - owned / logical < 0.7  # of 72 or 52 tokens of a prompt, three or four share most pages
