"""The hit-rate ledger of a run: each gap by a load that has no other, what is not simulated, and the figure."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pandas as pd
import pytest

from kvbench.report import hits
from kvbench.report.figures.hits import hit_drawing, hit_frame
from kvbench.report.hits import hit_table
from kvbench.report.style import looks
from kvbench.requests.request import RequestSpec, write_requests
from kvbench.runs.results import Capacity
from tests.support.records import put
from tests.support.report_cells import cell, with_cache
from tests.support.report_cells import run as run_of
from tests.support.report_parts import hit_ledgers

A, B, C = (tuple(range(start, start + 9)) for start in (100, 200, 300))  # two full pages of 4, and a token
ODD = [(*A[:6], 1), (*A[:6], 2)]


def stored_run(
    folder, prompts, *, counted, pages=100, told=None, repeats=1, prefix=0, text=None, state="", declared="", **settings
):
    """A run of one cell whose requests came one after the other.

    ``counted``: hits that the server counted; ``prefix``: tokens of each prompt that the cache was primed with.
    """
    one = cell(throughput=(1.0,) * repeats, enable_prefix_caching=True, page_size=4, **settings)
    where = folder / "cells" / one.cell_id
    where.mkdir(parents=True)
    requests = [RequestSpec(i, "a", tuple(p), text, 1, prefix_tokens=prefix) for i, p in enumerate(prompts)]
    table = [{"index": i, "ts": 2.0 * i, "first": 2.0 * i + 1, "chunk_times": [2.0 * i + 1], "cached_tokens": 0,
              "output_tokens": 1, "output_token_ids": [5], "ok": True} for i in range(len(prompts))]  # fmt: skip
    done, frames = [], []
    for repeat in one.repeats:
        scratch = folder / "requests" / "c24.jsonl"
        write_requests(scratch, requests)
        digest = hashlib.sha256(scratch.read_bytes()).hexdigest()
        scratch.rename(scratch.with_name(f"c24-{repeat.repeat}-{digest[:8]}.jsonl"))
        frames.append(pd.DataFrame(table).assign(repeat=repeat.repeat))
        put(repeat.metrics, total_cached_tokens=counted if told is None else told,
            total_input_tokens=sum(map(len, prompts)))  # fmt: skip
        cache = {"hits": counted, "queries": sum(map(len, prompts))} | ({"state": state} if state else {})
        done.append(with_cache(repeat, cache).model_copy(update={"requests_sha256": digest}))
    pd.concat(frames).to_parquet(where / "requests.parquet")
    capacity = Capacity.model_validate({"num_pages": pages, "page_size": 4})
    one = dataclasses.replace(one, folder=where, capacity=capacity, repeats=tuple(done))
    workload = {"name": "mixed", "load": {"cache_state": declared or ("primed" if prefix else "cold")}}
    return dataclasses.replace(run_of(one, workload=workload), folder=folder)


def gaps(run) -> dict[str, float]:
    (ledger,) = hit_ledgers(run)
    return {gap.name: gap.tokens for gap in ledger.gaps if gap.tokens}


@pytest.mark.parametrize(
    ("prompts", "how", "lost"),
    [
        (ODD, {"counted": 8, "prefix": 6}, {"page rounding": 4}),
        ([A, B, A, B], {"counted": 20, "prefix": 8, "pages": 4}, {"capacity": 12}),
        ([A, B, A, B], {"counted": 0, "pages": 3}, {"cold start": 16, "capacity": 16}),
        ([A, C, B, A], {"counted": 0, "pages": 5}, {"cold start": 8, "eviction order": 8}),
        ([A, A], {"counted": 3}, {"cold start": 8, "unexplained": 5}),
        ([A, A], {"counted": 9}, {"cold start": 8, "unexplained": -1}),
        ([A, A], {"counted": 8, "told": 6}, {"cold start": 8, "not told": 2}),
        ([A, A, A], {"counted": 16, "repeats": 2}, {"cold start": 16}),
    ],
)
def test_each_gap_has_its_name(tmp_path, prompts, how, lost):
    assert gaps(stored_run(tmp_path, prompts, **how)) == lost


def test_a_cache_that_was_measured_as_it_was_found_is_simulated_so(tmp_path):
    for state, shared, reason in (("", 8, ""), ("steady", 16, "not emptied")):  # the prefix was sent before
        run = stored_run(tmp_path / f"a{state}", [A, A], counted=8, state=state, prefix=8, declared="cold")
        (ledger,) = hit_ledgers(run)
        assert ledger.endless == shared and reason in ledger.reason and bool(reason) == bool(ledger.reason)


def test_the_steps_lead_from_what_is_shared_to_what_was_told(tmp_path):
    (ledger,) = hit_ledgers(stored_run(tmp_path, [A, C, B, A], counted=1, told=0, pages=5))
    assert ledger.shared - sum(gap.tokens for gap in ledger.gaps) == ledger.told == 0
    assert ledger.prompt_tokens == 36 and ledger.largest_gap.name in ("cold start", "eviction order")
    assert "2.8 % of prompt tokens hit, 44 % shared" in ledger.sentence
    (ledger,) = hit_ledgers(stored_run(tmp_path / "told", [A, A], counted=1, told=18))
    assert (ledger.hit, ledger.counted, ledger.told) == (18, 1, 18)  # the larger count
    assert "100 % of prompt tokens hit" in ledger.sentence


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda run, one: [path.unlink() for path in run.folder.glob("requests/*.jsonl")], "not stored"),
        (lambda run, one: (one.folder / "requests.parquet").unlink(), "samples are not stored"),
        (lambda run, one: [path.write_text("{") for path in run.folder.glob("requests/*.jsonl")], "cannot be read"),
    ],
)
def test_what_is_not_simulated_still_says_what_was_counted_and_why(tmp_path, spoil, reason):
    run = stored_run(tmp_path, [A, A], counted=8)
    spoil(run, run.cells[0])
    (ledger,) = hit_ledgers(run)
    assert (ledger.shared, ledger.lru, ledger.counted, ledger.told, ledger.prompt_tokens) == (None, None, 8, 8, 18)
    assert reason in ledger.reason and reason in hit_ledgers(run)[0].sentence
    assert hit_drawing(hit_ledgers(run), looks(run.cells)) is None and len(hit_table(hit_ledgers(run)).rows) == 1


def test_prompts_that_are_text_or_too_many_are_not_simulated(tmp_path, monkeypatch):
    (ledger,) = hit_ledgers(stored_run(tmp_path / "text", [A, A], counted=8, text="a b"))
    assert ledger.shared is None and "text" in ledger.reason
    monkeypatch.setattr(hits, "MOST_BYTES", 10)
    (ledger,) = hit_ledgers(stored_run(tmp_path / "large", [A, A], counted=8))
    assert ledger.shared is None and "larger" in ledger.reason


def test_a_server_that_does_not_tell_its_capacity_is_held_against_an_endless_cache(tmp_path):
    run = stored_run(tmp_path, [A, A], counted=8, pages=None)
    (ledger,) = hit_ledgers(run)
    assert (ledger.whole_pages, ledger.best, ledger.lru) == (8, None, None) and "capacity" in ledger.reason
    assert [gap.name for gap in ledger.gaps] == ["cold start", "page rounding", "unexplained", "not told"]
    assert "best" not in [column.key for column in hit_table(hit_ledgers(run)).columns]


def test_repeats_without_prompts_are_left_out_of_every_step(tmp_path):
    run = stored_run(tmp_path, [A, A], counted=8, repeats=2)
    next(run.folder.glob("requests/c24-1-*.jsonl")).unlink()
    (ledger,) = hit_ledgers(run)
    assert (ledger.lru, ledger.counted, ledger.told, ledger.prompt_tokens) == (8, 8, 8, 18)
    assert "1 of 2 repeats" in ledger.reason


def test_each_repeat_is_simulated_by_its_own_times(tmp_path):
    run = stored_run(tmp_path, [A, A], counted=8, repeats=2)
    rows = run.cells[0].folder / "requests.parquet"
    table = pd.read_parquet(rows)
    at_once = table["repeat"] == 0  # both computed in one step
    table.loc[at_once, ["ts", "first"]] = 0.0, 1.0
    table["chunk_times"] = [[first] for first in table["first"]]
    table.to_parquet(rows)
    assert hit_ledgers(run)[0].lru == 0 + 8
    table.assign(ts=0.0, first=1.0, chunk_times=[[1.0]] * len(table)).to_parquet(rows)  # measured again
    assert hit_ledgers(run)[0].lru == 0


def test_cells_without_prefix_caching_are_not_shown(tmp_path):
    run = run_of(cell(), cell("contiguous"), workload={"load": {}})
    assert hit_ledgers(run) == [] and hit_table(hit_ledgers(run)).rows == ()
    assert hit_drawing(hit_ledgers(run), looks(run.cells)) is None and hit_frame(hit_ledgers(run)).empty


def test_where_only_the_answers_tell_their_hits_these_are_the_hits(tmp_path):
    run = stored_run(tmp_path, [A, A, B], counted=None, told=8)
    (ledger,) = hit_ledgers(run)
    assert (ledger.counted, ledger.told, ledger.hit) == (None, 8, 8)
    assert {gap.name: gap.tokens for gap in ledger.gaps}["unexplained"] == 0
    assert "30 % of prompt tokens hit" in ledger.sentence and "nothing is lost" not in ledger.sentence


def test_bars_lead_from_shared_to_counted_without_a_break(tmp_path):
    run = stored_run(tmp_path, [A, C, B, A], counted=3, told=3, pages=5)
    bars = hit_frame(hit_ledgers(run)).set_index("step")
    at = bars.loc["shared at all", "high"]
    for step in ("cold start", "page rounding", "capacity", "eviction order", "unexplained"):
        ends = {bars.loc[step, "low"], bars.loc[step, "high"]}
        assert min(abs(end - at) for end in ends) < 1e-9
        at += bars.loc[step, "change"]
    assert at == pytest.approx(bars.loc["server counted", "high"]) == pytest.approx(100 * 3 / 36)
    assert bars.loc["unexplained", "change"] > 0


def test_names_from_outside_are_escaped_in_the_figure(tmp_path):
    run = stored_run(tmp_path, [A, A], counted=8)
    run = dataclasses.replace(run, cells=(dataclasses.replace(run.cells[0], name="<script>alert(1)</script>"),))
    drawn = hit_drawing(hit_ledgers(run), looks(run.cells))
    text = json.dumps(drawn.figure.to_plotly_json(), default=str)
    assert "<script>" not in text and "&lt;script&gt;" in text
    assert len(drawn.title.split()) <= 15 and set(looks(run.cells)) == {"<script>alert(1)</script>"}
