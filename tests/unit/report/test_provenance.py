"""What stands beside the numbers: validity, warnings, how the requests were made, target and environment."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvbench.report.provenance import (
    brief,
    code_paths,
    environment,
    made_from,
    repeats_are,
    reproduce,
    validity,
    warnings,
)
from kvbench.runs.model import MeasuredCell
from tests.support.report_cells import cell, refused, run, with_cache, wrong

LAG = tuple(f"repeat {i}: the client lagged: p99 {i}.5 ms, the limit is 1 ms." for i in (1, 2, 3))


@pytest.mark.parametrize(
    ("shown", "status", "reason"),
    [
        (run(), "empty", ""),
        (run(cell()), "valid", ""),
        (run(cell(), status="incomplete"), "incomplete", "'incomplete'"),
        (run(cell(), missing=("x",)), "incomplete", "x"),
        (run(cell(reasons=("lag p99 3 ms",)), missing=("x",)), "invalid", "lag p99 3 ms"),
        (run(cell(failed=2)), "valid", "6 of 144 requests failed"),
        (run(refused()), "valid", '28 of 48 requests failed: "Context size has been exceeded."'),
        (run(refused(), missing=("x",)), "incomplete", "x"),
        (run(dataclasses.replace(refused(), invalid_reasons=("lag",))), "invalid", "lag"),
        (run(wrong(), missing=("x",)), "wrong", "passkey-7"),
        (run(dataclasses.replace(wrong(), invalid_reasons=("lag",)), cell(reasons=("lag",))), "wrong", "passkey-7"),
    ],
)
def test_validity(shown: Any, status: str, reason: str) -> None:
    found = validity(shown)
    assert found.status == status and (reason in found.reasons[0] if reason else not found.reasons)


def test_reasons_of_one_kind_are_one_line() -> None:
    lines = validity(run(cell(reasons=LAG), cell("contiguous", reasons=(*LAG, "2 pages were still owned")))).reasons
    assert len(lines) == 2
    assert "p99 1.5 ms" in lines[0] and "5 more" in lines[0] and lines[0].count("contiguous at 24 at once") == 1
    assert "2 pages were still owned" in lines[1]


SCATTERED = cell(throughput=(98.0, 423.0, 462.0))


@pytest.mark.parametrize(
    ("cells", "manifest", "said"),
    [
        ([SCATTERED, cell("contiguous")], {}, ["scatter", "paged (page 16) at 24 at once (98.0–462)"]),
        ([cell(throughput=(1.0, 1.0))], {}, ["2 repeats"]),
        ([cell()], {"shared_machine": True}, ["shared this machine"]),
        ([cell()], {"git": {"dirty": True}}, ["uncommitted"]),
        ([cell()], {"resumed": [{"differences": ["torch (2.12 then, 2.13 now)"]}]}, ["resumed", "torch (2.12 then"]),
        ([cell()], {"resumed": [{"differences": []}]}, []),
        ([cell()], {"notes": ["skipped paged-p16: it has other pages"]}, []),
    ],
)  # fmt: skip
def test_warnings(cells: list, manifest: dict[str, Any], said: list[str]) -> None:
    found = [text for text in warnings(run(*cells, **manifest)) if "no server metrics" not in text]
    assert len(found) == bool(said) and all(part in found[0] for part in said), found


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"unverified": "too small"}, ["not verified", "primed", "too small"]),
        ({"disagree": True, "counted": 96.0, "told": 1920}, ["count 96 tokens, the usage of the answers 1,920"]),
        ({"from_before": 8}, ["8 tokens are hits only because"]),
    ],
)
def test_a_cache_that_a_reader_must_know_of_is_warned_of(counts: dict[str, Any], words: list[str]) -> None:
    def warned(one: MeasuredCell) -> list[str]:
        texts = warnings(run(one, workload={"load": {"cache_state": "primed"}}))
        return [text for text in texts if all(part in text for part in words)]

    one = cell()
    repeats = (with_cache(one.repeats[0], counts), *one.repeats[1:])
    (said,) = warned(dataclasses.replace(one, repeats=repeats))
    assert "1 of 3 loads" in said and not warned(one)




TRACE = {
    "trace": "conv.csv", "trace_requests": 52, "trace_start_s": 0, "rate_scale": 0.4, "length_scale": 0.11234,
}  # fmt: skip
AZURE = {"name": "azure", "load": {"prompts": {"kind": "trace", "duration_s": 10.0}}}


@pytest.mark.parametrize(
    ("notes", "workload", "said"),
    [
        (TRACE, AZURE, "lengths x 0.112, 10 s of the trace at 0.4 of its speed, 52 requests"),
        (TRACE | {"rate_scale": 1.0}, {}, "lengths x 0.112, the trace at its own speed, 52 requests"),
        (
            {"trace": "x", "trace_page_size": 512, "page_size_of_prompts": 8}, {},
            "the trace, prompts share its pages, 512 tokens made 8",
        ),
        ({"text": "sonnets"}, {}, "text of sonnets"),
        ({}, AZURE, ""),
    ],
)  # fmt: skip
def test_scales_of_a_trace_are_told(notes: dict[str, Any], workload: dict[str, Any], said: str) -> None:
    assert made_from(run(cell(mode="open", load=0, notes=notes), workload=workload)) == said


def test_loads_that_were_made_in_different_ways_are_told_apart() -> None:
    each = run(cell(load=3, notes={"length_scale": 0.5}), cell(notes={"length_scale": [0.25, 0.5]}))
    assert made_from(each) == "at 3 at once: lengths x 0.5; at 24 at once: lengths x 0.25 and 0.5"
    assert dict(environment(each))["requests"] == "length_scale 0.5; length_scale 0.25, 0.5"


def test_what_holds_for_the_built_in_engine_only_is_not_said_of_others() -> None:
    pair = (cell(), cell("contiguous"))
    assert code_paths(run(*pair)) == code_paths(run(*pair, backend="kvbench"))
    assert ["in two code paths" in text for text in code_paths(run(*pair))] == [True]
    assert not code_paths(run(cell(), cell(page_size=8))) and not code_paths(run(*pair, backend="vllm"))
    assert "freshly launched server" in repeats_are(run(cell(), target="vllm"))
    assert "running before" in repeats_are(run(cell(), target="http://127.0.0.1:8000"))


def test_the_target_its_version_and_its_commands_are_told_once() -> None:
    vllm = {"kind": "vllm", "title": "vLLM", "quirks": ["a quirk"], "command": ["python", "-m", "vllm", "a b"]}
    vllm["notes"] = ["asked for two"]
    server = {"server": vllm, "versions": {"vllm": "0.32.0"}, "resolved": {"num_threads": 1, "bound_cores": [0]}}
    shown = run(
        cell(), servers={"a": server, "b": server}, model={"name": "m"}, device="cpu", command=["kvbench", "a b"],
        started="2026-01-01T10:00:00+00:00",
    )  # fmt: skip
    assert brief(shown) == ["2026-01-01 10:00 UTC", "vLLM 0.32.0", "m", "cpu"]
    facts = dict(environment(shown))
    assert (facts["target"], facts["of this target"]) == ("vLLM 0.32.0", "a quirk")
    assert facts["CPU threads"] == "1, bound to core 0; asked for two"
    assert facts["launched as"] == "python -m vllm 'a b'" and reproduce(shown) == "kvbench 'a b'"
    assert brief(run(cell(), target="http://127.0.0.1:8000")) == ["http://127.0.0.1:8000"]
    assert brief(run(cell(), servers={"a": {"versions": {"torch": "2"}}})) == []  # the built-in one
    cells = [cell(page_size=64), cell(page_size=32, baseline=True)]
    each = {one.config_id: {"server": {"title": "vLLM", "command": ["vllm", one.name]}} for one in cells}
    launched = [fact[0] for fact in environment(run(*cells, servers=each)) if "launched" in fact[0]]
    assert launched == ["launched as (paged (page 32))", "launched as (paged (page 64))"]
    command = {"kind": "openai", "title": "the server", "command": ["serve", "--port", "PORT", "a b"]}
    assert brief(run(cell(), servers={"launched": {"server": command}})) == ["serve --port PORT 'a b'"]


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
