"""What the report says of the load: rates, caps, goodput, cache state, priorities, turns, targets, skipped cells."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvbench.report import build_report, headline
from kvbench.report.breakdown import class_name, class_rows, turn_rows
from kvbench.report.figures import drawings
from kvbench.report.markdown import markdown
from kvbench.report.page import page
from kvbench.report.plateaus import PLATEAU_HEADS, plateau_rows
from kvbench.report.provenance import brief, environment, skipped_notes, warnings
from kvbench.report.tables import columns, rows
from kvbench.runs.folder import open_run
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Repeat, Run
from kvbench.runs.read import read_run
from tests.support.report_cells import cell, run
from tests.support.synthetic_run import PAIR, make_run
from tests.support.toy_engine import Scenario

CAPPED = {"client_queue_ms": {"p50": 40.0, "p95": 120.0, "uncertain": []}}


def changed(one: MeasuredCell, metrics: dict[str, Any] | None = None, cache: Any = (), **fields: Any) -> MeasuredCell:
    """`one` with more metrics in every repeat, and the prefix cache of each."""
    repeats = tuple(
        Repeat(r.repeat, {**r.metrics, **(metrics or {})}, r.server, r.observed, r.machine, cache[i] if cache else {})
        for i, r in enumerate(one.repeats)
    )
    return dataclasses.replace(one, repeats=repeats, **fields)


def entries(shown: Run, at: int = 0) -> dict[str, Any]:
    return dict(zip((c.key for c in columns(shown)), rows(shown)[at].values, strict=True))


def test_the_whole_run_stands_beside_the_steady_window() -> None:
    shown = run(changed(cell(throughput=(100.0, 110.0, 120.0)), {"output_throughput": 90.0}), cell("contiguous"))
    at = [row.cell.is_paged for row in rows(shown)].index(True)
    assert entries(shown, at)["output_tokens_per_s"].note == "100–120\nwhole 90.0"


def test_time_queued_in_the_client_is_shown_beside_ttft_where_there_was_any() -> None:
    plain = cell()
    capped = changed(plain, pooled={**plain.pooled, **CAPPED})
    keys = [c.key for c in columns(run(capped))]
    assert keys.index("client_queue_ms_p95") == keys.index("ttft_ms_p95") + 1
    assert entries(run(capped))["client_queue_ms_p95"].text == "120"
    assert not any("queue" in c.key for c in columns(run(plain)))


def test_goodput_has_its_share_its_steady_window_and_its_slo_written_out() -> None:
    good = changed(cell(), {"goodput": 2.0, "steady_goodput": 2.5, "duration_s": 18.0})  # 48 requests a repeat
    slo = {"slo": {"ttft_ms": 200.0, "tpot_ms": 50.0, "e2el_ms": None}}
    shown = run(good, workload={"name": "w", "load": slo})
    value = entries(shown)["goodput"]
    assert (value.text, value.note) == ("2.00", "75 %\nsteady 2.50")
    hint = next(c.hint for c in columns(shown) if c.key == "goodput")
    assert "ttft <= 200 ms and tpot <= 50 ms" in hint
    assert "requests/s that met ttft &lt;= 200 ms and tpot &lt;= 50 ms" in page(shown)
    assert "2.00 (75 %, steady 2.50)" in markdown(shown)


def test_hits_stand_beside_what_the_declared_state_allows() -> None:
    cache = [{"hits": 20.0, "queries": 100.0, "low": 0, "high": 25}] * 3
    server = {"prefix_cache_hits_total": 20.0, "prefix_cache_queries_total": 100.0}
    shown = run(changed(cell(server=server), cache=cache), workload={"name": "w", "load": {"cache_state": "primed"}})
    value = entries(shown)["prefix_hit_rate"]
    assert (value.text, value.note) == ("20 %", "of 0–25 %")
    assert "primed" in next(c.title for c in columns(shown) if c.key == "prefix_hit_rate")
    doubted = run(changed(cell(server=server), cache=[*cache[:2], cache[0] | {"unverified": "too small"}]))
    assert entries(doubted)["prefix_hit_rate"].note == "of 0–25 %\nnot verified"
    (warning,) = [w for w in warnings(doubted) if "not verified" in w]
    assert "was cold, as declared, is not verified in 1 of 3 loads: too small." in warning
    assert warning in markdown(doubted) and warning in page(doubted)
    assert not [w for w in warnings(shown) if "not verified" in w]
    unknown = run(changed(cell(server=server), cache=[*cache[:2], {}]))
    assert entries(unknown)["prefix_hit_rate"].note == ""  # of one repeat it is not known


def test_loads_without_one_rate_have_names_of_their_own() -> None:
    named = (
        (MeasuredLoad("open", 4.0, "gamma"), "4 requests/s", "4/s"),
        (MeasuredLoad("open", 0.0, "ramp"), "a ramp of the rate", "ramp"),
        (MeasuredLoad("open", 0.0, "step"), "a rate in steps", "step"),
        (MeasuredLoad("open", 0.0, "trace"), "the trace's own arrivals", "trace"),
        (MeasuredLoad("open", 0.0), "the trace's own arrivals", "trace"),
        (MeasuredLoad("open", math.inf), "all requests at once", "all"),
        (MeasuredLoad("closed", 1.0), "1 concurrent request", "1 at once"),
    )
    for load, label, short in named:
        assert (load.label, load.short) == (label, short)


def group(n: int, **more: Any) -> dict[str, Any]:
    return {"n": n, "ttft_ms": {"p50": 9.0, "p95": 20.0, "uncertain": ["p95"]}, **more}


def test_the_most_urgent_class_comes_first_with_its_priority() -> None:
    one = cell()
    per_class = {"batch": group(30, priority=5), "chat": group(10, priority=0)}
    shown = run(dataclasses.replace(one, pooled={**one.pooled, "per_class": per_class}))
    assert [(class_name(row), row.n) for row in class_rows(shown)] == [
        ("chat (priority 0)", 10), ("batch (priority 5)", 30),
    ]  # fmt: skip
    alike = {"batch": group(30, priority=0), "chat": group(10, priority=0)}
    shown = run(dataclasses.replace(one, pooled={**one.pooled, "per_class": alike}))
    assert [class_name(row) for row in class_rows(shown)] == ["batch", "chat"]


def test_first_and_later_turns_have_a_table() -> None:
    one = cell()
    shown = run(
        dataclasses.replace(one, pooled={**one.pooled, "per_turn": {"first": group(8, priority=0), "later": group(20)}})
    )
    assert [(class_name(row), row.n, row.values[1].text) for row in turn_rows(shown)] == [
        ("first turn", 8, "20.0 ms*"), ("later turns", 20, "20.0 ms*"),
    ]  # fmt: skip
    assert "By turn of the conversation" in page(shown) and "## By turn of the conversation" in markdown(shown)
    assert turn_rows(run(one)) == [] and "By turn" not in page(run(one))


def test_what_was_not_run_is_said_with_its_reason() -> None:
    shown = run(cell(), notes=["skipped contiguous: vLLM cannot have layout contiguous: its KV cache is always paged"])
    assert skipped_notes(shown)[0] in page(shown) and "## Not run" in markdown(shown)
    assert "Not run" not in page(run(cell()))


def test_a_note_stands_once_and_what_was_run_another_way_is_not_called_not_run() -> None:
    skipped, other = "skipped paged-p16: it has other pages", "the workload has no kv_budget: it is left to vLLM"
    shown = run(cell(), notes=[skipped, other])
    assert skipped_notes(shown) == [skipped]
    said = warnings(shown)
    assert "The workload has no kv_budget: it is left to vLLM." in said and not any("paged-p16" in w for w in said)
    html, text = (made.split("Manifest</summary>")[0] for made in (page(shown), markdown(shown)))
    for made in (html, text):
        assert made.count("it has other pages") == made.count("no kv") == 1
    unskipped = run(cell(), notes=[other])
    assert "<h2>Not run" not in page(unskipped) and "## Not run" not in markdown(unskipped)


def test_what_holds_for_the_built_in_engine_only_is_not_said_of_others() -> None:
    pair = (cell(), cell("contiguous"))
    own, vllm = run(*pair, backend="kvbench"), run(*pair, backend="vllm", target="vllm")
    url = run(cell(), backend="openai", target="http://127.0.0.1:8000")
    for shown in (page(own), markdown(own)):
        assert "The layouts differ in two code paths" in shown
    for shown in (page(vllm), markdown(vllm), page(url)):
        assert "code paths" not in shown and "paged KV is gathered first" not in shown
    for launched in (own, vllm, run(cell())):
        assert "One repeat is a freshly launched server" in page(launched)
    assert "fresh server" not in page(url) and "One repeat is a freshly launched" not in page(url)
    assert "The server was running before and was the same throughout" in page(url)


def test_the_target_and_its_version_are_in_the_header() -> None:
    server = {"server": {"kind": "vllm", "title": "vLLM", "quirks": ["a quirk"]}, "versions": {"vllm": "0.32.0"}}
    server["server"]["command"] = ["python", "-m", "vllm", "a b"]
    shown = run(cell(), servers={"a": server, "b": server}, model={"name": "m"}, backend="vllm")
    assert brief(shown) == ["vLLM 0.32.0", "m"]
    facts = dict(environment(shown))
    assert facts["target"] == "vLLM 0.32.0" and facts["of this target"] == "a quirk"
    assert facts["launched as"] == "python -m vllm 'a b'"
    told = str(environment(shown))
    assert told.count("vLLM") == told.count("a quirk") == 1  # each fact once
    url = run(cell(), backend="openai", target="http://127.0.0.1:8000")
    assert brief(url) == ["http://127.0.0.1:8000"]
    assert brief(run(cell(), backend="kvbench", servers={"a": {"versions": {"torch": "2"}}})) == []


def test_each_configuration_is_shown_with_its_own_command() -> None:
    cells = [cell(page_size=64), cell(page_size=32, baseline=True), cell(page_size=32, kv_cache_dtype="int8")]
    told = {
        each.config_id: {"server": {"title": "vLLM", "command": ["vllm", "--page", each.settings["page_size"]]}}
        for each in cells
    }
    launched = [(name, text) for name, text in environment(run(*cells, servers=told)) if "launched" in name]
    assert launched == [
        ("launched as (paged (page 32) and paged (page 32) + kv_cache_dtype int8)", "vllm --page 32"),
        ("launched as (paged (page 64))", "vllm --page 64"),
    ]


def test_the_cells_of_a_valid_run_are_folded_and_those_of_an_invalid_one_are_not() -> None:
    assert "<details><summary>MeasuredCell by cell" in page(run(cell()))
    assert "<details open><summary>MeasuredCell by cell" in page(run(cell(reasons=("repeat 1: it lagged",))))


def test_the_folder_of_a_single_load_is_no_results_folder(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"kind": "load", "status": "complete"}')
    with pytest.raises(ValueError, match=r"read its metrics.json"):
        build_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"format": 1, "kind', r"manifest\.json cannot be read as JSON"),
        ("[1]", r"is not the manifest of a sweep"),
        ('{"format": 1, "status": "complete"}', r"is not the manifest of a sweep"),
        (
            '{"format": 0, "workload": {}, "plan": [], "git": {"short_sha": "abc1234"}}',
            r"has the format 0, and this kvbench reads 1: use the kvbench that measured it \(commit abc1234\)",
        ),
    ],
)
def test_of_a_manifest_that_says_nothing_no_report_is_made(make: Callable[..., Run], text: str, sentence: str) -> None:
    folder = make(repeats=1).folder
    (folder / "manifest.json").write_text(text)
    before = sorted(folder.iterdir())
    for read in (build_report, headline, open_run):
        with pytest.raises(ValueError, match=sentence):
            read(folder)
    assert sorted(folder.iterdir()) == before


def test_the_steps_of_a_rate_have_a_table_of_medians() -> None:
    def step(rate: float, served: float) -> dict[str, Any]:
        return {
            "request_rate": rate, "start_s": 0.0, "end_s": 30.0, "steady_request_throughput": served,
            "steady_output_throughput": served * 50, "ttft_ms": {"p95": 120.0}, "tpot_ms": {"p50": 9.0},
            "steady_goodput": None, "n": 60,
        }  # fmt: skip

    one = cell(load=0, mode="open")
    repeats = tuple(
        dataclasses.replace(r, metrics={**r.metrics, "plateaus": [step(2, 2.0), step(8, served)]})
        for r, served in zip(one.repeats, (5.0, 5.5, 7.0), strict=True)
    )
    shown = run(dataclasses.replace(one, repeats=repeats))
    heads = ("asked for", "seconds", "requests", "requests/s", "output tok/s", "TTFT p95", "TPOT p50", "goodput")
    assert [dict(zip(PLATEAU_HEADS[1:], row.values[1:], strict=True)) for row in plateau_rows(shown)] == [
        dict(zip(heads, ("2/s", "0–30", "60", "2.00", "100", "120 ms", "9.0 ms", "–"), strict=True)),
        dict(zip(heads, ("8/s", "0–30", "60", "5.50", "275", "120 ms", "9.0 ms", "–"), strict=True)),
    ]
    assert "Step by step of the rate" in page(shown) and "## Step by step of the rate" in markdown(shown)
    assert plateau_rows(run(one)) == [] and "Step by step" not in page(run(one))


@pytest.mark.parametrize(
    ("mode", "value", "requests", "conversations", "column"),
    [
        ("closed", 8.0, "8 concurrent requests", "8 users", "8 users"),
        ("closed", 1.0, "1 concurrent request", "1 user", "1 user"),
        ("open", 0.5, "0.5 requests/s", "0.5 conversations/s", "0.5/s"),
    ],
)
def test_users_of_conversations_are_not_called_concurrent_requests(
    tmp_path: Path, mode: str, value: float, requests: str, conversations: str, column: str
) -> None:
    """They pause between their turns, and a rate is of conversations."""
    loads = {"concurrencies": (value,)} if mode == "closed" else {"rates": (value,)}
    folder = make_run(tmp_path / "run", Scenario(configs=PAIR, num_requests=30, repeats=1, **loads))
    assert read_run(folder).loads[0].label == requests
    path = folder / "manifest.json"
    facts = json.loads(path.read_text())
    facts["workload"]["load"] = {"sessions": {"num_sessions": [24]}}
    path.write_text(json.dumps(facts))
    (found,) = read_run(folder).loads
    assert (found.label, found.short) == (conversations, column)


DUMMY = {"model": {"config": "llama-32m", "load_format": "dummy"}}


@pytest.mark.parametrize(
    ("served", "random"),
    [
        ({}, True),
        ({"target": "vllm"}, True),  # is given the exported model
        ({"serve_cmd": "serve --fast"}, True),  # takes the built-in server's flags
        ({"serve_cmd": "serve {model} --port {port}"}, True),
        ({"serve_cmd": "serve --port {port}"}, False),
        ({"target": "http://127.0.0.1:9"}, False),
    ],
)
def test_of_a_model_that_is_not_the_workloads_nothing_is_claimed(served: dict[str, str], random: bool) -> None:
    shown = run(cell(), workload=DUMMY, **served)
    assert any("random weights" in text for text in warnings(shown)) is random
    assert any("llama-32m" in text for text in brief(shown)) is random
    assert ("llama-32m" in str(environment(shown))) is random


def test_a_server_known_by_its_command_only_is_named_by_it() -> None:
    told = {"kind": "openai", "title": "the server", "command": ["serve", "--port", "PORT", "a b"]}
    assert brief(run(cell(), servers={"launched": {"server": told}})) == ["serve --port PORT 'a b'"]


def test_a_server_that_tells_nothing_of_its_kv_has_no_figure_of_it(make: Callable[..., Run]) -> None:
    made = make(repeats=1)
    assert any(drawing.key.startswith("occupancy") for drawing in drawings(made))
    for one in made.cells:
        gauges = pd.read_parquet(one.folder / "server.parquet")
        gauges[["t", "repeat", "num_requests_running", "num_requests_waiting"]].to_parquet(
            one.folder / "server.parquet"
        )
    shown = drawings(read_run(made.folder))
    assert shown and not any(drawing.key.startswith("occupancy") for drawing in shown)
