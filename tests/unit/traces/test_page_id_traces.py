"""Readers of traces with page ids: order, page size, ids of any kind, and bad files with the place and the way out.

That the real slices are read as they should be is in test_trace_stats.py, with their hit rates.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbench.traces.read import read_page_ids


def jsonl(path: Path, *rows: dict | str) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def row(ids: list, tokens: int | None = None, **more) -> dict:
    return {"input_length": len(ids) * 16 if tokens is None else tokens, "hash_ids": ids, **more}


def test_jsonl_is_read_in_order_of_arrival_with_ids_of_any_size(tmp_path):
    path = jsonl(
        tmp_path / "t.jsonl",
        "\ufeff" + json.dumps(row([2**70, "a", -1], 45, timestamp=3000)),
        "",
        row(["a", 2**70], timestamp=1.5, extra=1),
        row([-1, 5], timestamp=3000),
        row([], 0, timestamp=0),
    )
    trace = read_page_ids(path)
    assert trace.page_size == 16
    assert [list(ids) for ids in trace.page_ids] == [[], [1, 0], [0, 1, 2], [2, 3]]
    assert trace.prompt_tokens.tolist() == [0, 32, 45, 32]


def test_without_all_timestamps_the_files_order_holds(tmp_path):
    rows = (row([1, 2, 3, 4], timestamp=9), row([1, 2, 3, 5]), row([7], timestamp=0))
    assert [len(ids) for ids in read_page_ids(jsonl(tmp_path / "t.jsonl", *rows)).page_ids] == [4, 4, 1]


@pytest.mark.parametrize(("way", "pages"), [("ceil", lambda n: -(-n // 48)), ("floor", lambda n: n // 48)])
def test_a_page_size_that_is_no_power_of_two_is_given(tmp_path, way, pages):
    lengths = (47, 48, 49, 96, 480, 500)
    rows = [row(list(range(pages(n))), n) for n in lengths]
    path = jsonl(tmp_path / "t.jsonl", *rows)
    assert read_page_ids(path, page_size=48).page_size == 48
    with pytest.raises(ValueError, match=r"give it with --page-size"):
        read_page_ids(path)
    with pytest.raises(ValueError, match=r"--page-size 64 there would be"):
        read_page_ids(path, page_size=64)


def session(requests: list, **top) -> str:
    return json.dumps({"block_size": 8, "requests": requests, **top}, indent=1)


def call(t: float, ids: list[int], tokens: int | None = None) -> dict:
    return {"t": t, "type": "n", "in": len(ids) * 8 + 3 if tokens is None else tokens, "hash_ids": ids}


def test_a_session_with_sub_agents_is_put_in_order_of_time(tmp_path):
    inner = {"type": "subagent", "t": 3.0, "requests": [call(0.5, [30]), call(8.5, [31])]}  # 13.5 and 21.5
    agent = {"type": "subagent", "t": 10.0, "requests": [call(0.0, [20]), inner, call(6.0, [21])]}
    path = tmp_path / "s.json"
    path.write_text(session([call(0.0, [1], 8), agent, call(12.0, [1, 2], 17), call(20, [], 3)]))
    trace = read_page_ids(path)
    assert trace.page_size == 8 and trace.prompt_tokens.tolist() == [8, 11, 17, 11, 11, 3, 11]
    ids = [[1], [20], [1, 2], [30], [21], [], [31]]
    in_file = [1, 20, 30, 31, 21, 2]
    assert [[in_file[n] for n in numbers] for numbers in trace.page_ids] == ids


GOOD = json.dumps(row([1, 2, 3, 4]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["is empty"]),
        (" \n\n", ["is empty"]),
        ("TIMESTAMP,ContextTokens\n2023,5", ["no trace of a known format", "azure", "mooncake"]),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-01-01,5,5", ["format azure", "no page ids", "Mooncake"]),
        ("a,b\n" * 3, ["no trace of a known format", "'a,b'"]),
        ('[{"conversations": []}]', ["no request to send"]),
        ("\x00\xff", ["no trace of a known format"]),
        ('{"timestamp": 1, "input": "x"}', ["no trace of a known format", "first row has 'timestamp', 'input'"]),
        ('{"hash_ids": [1, 2', ["line 1", "not JSON"]),
        (f"{GOOD}\n\n{{broken", ["line 3", "not a JSON object", "mend or remove"]),
        (f"{GOOD}\n[1]", ["line 2", "not a JSON object"]),
        (f"{GOOD}\n" + "[" * 100_000, ["line 2", "not a JSON object"]),
        (f"{GOOD}\n" + json.dumps({"input_length": 5}), ["line 2", "no list of page ids"]),
        (f"{GOOD}\n" + json.dumps({"hash_ids": [1]}), ["line 2", "input_length None"]),
        (f"{GOOD}\n" + json.dumps(row([1], -4)), ["line 2", "input_length -4"]),
        (f"{GOOD}\n" + json.dumps(row([1], 10**30)), ["line 2", "is not a number of tokens"]),
        (f"{GOOD}\n" + json.dumps(row([1, 1.5])), ["line 2", "page id 1.5"]),
        (f"{GOOD}\n" + json.dumps(row([True])), ["line 2", "page id True"]),
        (f"{GOOD}\n" + json.dumps(row([1], timestamp="soon")), ["line 2", "timestamp 'soon'"]),
        (f"{GOOD}\n" + '{"hash_ids": [1], "input_length": 16, "timestamp": NaN}', ["line 2", "timestamp nan"]),
        (f"{GOOD}\n" + json.dumps(row([1], timestamp=10**400)), ["line 2", "is not a time"]),
        (f"{GOOD}\n" + json.dumps(row([1, 2], 500)), ["line 2", "2 page ids for 500 tokens", "13 to 21"]),
        (json.dumps(row([], 5)), ["no request with a full page"]),
        (
            session([call(0, [1], 5)], block_size=None),
            ["page size", "3 or more", "--page-size", "load.prompts.page_size"],
        ),
        (session([call(0, [1]), 5]), ["requests[1]", "5 is not a request"]),
        (session([{"t": 0, "in": 9}]), ["requests[0]", "no list of page ids"]),
        (session([{**call(0, [1]), "t": "x"}]), ["requests[0]", "t 'x'"]),
        (session([{"type": "subagent", "t": 1}]), ["requests[0]", "sub-agent without a list"]),
        (session([{"type": "subagent", "t": 1, "requests": [call(0, [1], 99)]}]), ["requests[0].requests[0]", "99"]),
        (session([call(0, [1])], block_size=0), ["block_size 0"]),
        (session([call(0, [1, 2], 11)], block_size=2), ["block_size 2 there would be 6"]),
        (json.dumps(json.loads(session([call(0, [1])]))) + "\n" + GOOD, ["line 2", "file of its own"]),
    ],
)
def test_bad_traces_are_refused_with_the_place_and_the_way_out(tmp_path, text, words):
    path = tmp_path / "trace.jsonl"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"trace\.jsonl") as refused:
        read_page_ids(path)
    assert all(word in str(refused.value) for word in words), str(refused.value)
