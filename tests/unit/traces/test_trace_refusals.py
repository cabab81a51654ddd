"""Traces that are refused: bad rows with their place, formats that do not fit, units that cannot be told."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvbench.traces.read import FORMATS, read_page_ids, read_trace
from tests.support.trace_samples import (
    AZURE,
    BURSTGPT,
    MULTI_TURN,
    QWEN,
    SAMPLES,
    SERVEGEN,
    SERVEGEN_LENGTHS,
    SHAREGPT,
    lines,
    page_row,
    write,
)

PAGES = lines(page_row([1, 2, 3, 4]))


def after_good(row: object) -> str:
    return f"{PAGES}\n{row if isinstance(row, str) else json.dumps(row)}"


def session(*requests: object, **top: object) -> str:
    return json.dumps({"block_size": 8, "requests": requests} | top, indent=1)


def call(ids: list[int], tokens: int, **more: object) -> dict:
    return {"t": 0, "type": "n", "in": tokens, "hash_ids": ids} | more


# What a file holds, and what the refusal must name: the place and the value.
BAD = {
    "nothing": ("", ["empty"]),
    "blank": (" \n\n", ["empty"]),
    "unknown": ("a,b\n1,2\n", ["'a,b'", "azure (CSV: TIMESTAMP", "mooncake"]),
    "unknown keys": ('{"timestamp": 1, "input": "x"}', ["'timestamp', 'input'"]),
    "binary": ("\x00\x01", ["known format"]),
    "cut": ('{"hash_ids": [1, 2', ["line 1"]),
    "no row": (after_good("\n{broken"), ["line 3"]),
    "list": (after_good("[1]"), ["line 2"]),
    "deep": (after_good("[" * 100_000), ["line 2"]),
    "no ids": (after_good({"input_length": 5}), ["line 2", "hash_ids"]),
    "no length": (after_good({"hash_ids": [1]}), ["line 2", "input_length None"]),
    "negative": (after_good(page_row([1], -4)), ["line 2", "input_length -4"]),
    "too many": (after_good(page_row([1], 10**30)), ["line 2", "input_length 1000"]),
    "fraction id": (after_good(page_row([1, 1.5])), ["line 2", "page id 1.5"]),
    "truth id": (after_good(page_row([True])), ["line 2", "page id True"]),
    "time": (after_good(page_row([1], timestamp="soon")), ["line 2", "timestamp 'soon'"]),
    "nan time": (after_good('{"hash_ids": [1], "input_length": 16, "timestamp": NaN}'), ["line 2", "timestamp nan"]),
    "huge time": (after_good(page_row([1], timestamp=10**400)), ["line 2", "timestamp"]),
    "page size": (after_good(page_row([1, 2], 500)), ["line 2", "2 page ids for 500 tokens", "13 to 21"]),
    "no page": (lines(page_row([], 5)), ["full page"]),
    "any page size": (session(call([1], 5), block_size=None), ["3 or more", "--page-size", "load.prompts.page_size"]),
    "weka row": (session(call([1], 8), 5), ["requests[1]", "5"]),
    "weka ids": (session({"t": 0, "in": 9}), ["requests[0]", "hash_ids"]),
    "weka time": (session(call([1], 8, t="x")), ["requests[0]", "t 'x'"]),
    "weka agent": (session({"type": "subagent", "t": 1}), ["requests[0]", "sub-agent"]),
    "weka nested": (session({"type": "subagent", "t": 1, "requests": [call([1], 99)]}), ["requests[0].requests[0]"]),
    "weka zero": (session(call([1], 8), block_size=0), ["block_size 0"]),
    "weka size": (session(call([1, 2], 11), block_size=2), ["block_size 2", "6"]),
    "weka and more": (json.dumps(json.loads(session(call([1], 8)))) + "\n" + PAGES, ["line 2"]),
    "servegen window": (SERVEGEN.replace("1200,", "100,"), ["line 3", "start '100' and rate '4.0'"]),
    "servegen shape": (SERVEGEN.replace("Weibull", "Cauchy"), ["line 3", "'Cauchy' of shape '0.7'"]),
    "servegen blank": (SERVEGEN.replace("Weibull", "Cauchy").replace("\n", "\n\n"), ["line 5", "'Cauchy'"]),
    "servegen lengths": (json.dumps({"0": {"input_tokens": "{5: -1}", "output_tokens": "{1: 1}"}}), ["window 0"]),
    "azure": (AZURE.replace("300,8", "three hundred,8"), ["line 4", "ContextTokens 'three hundred'"]),
    "azure blank": ("\n" + AZURE.replace("\n", "\n \n\n").replace("300,8", "x,8"), ["line 11", "'x'"]),
    "azure time": (AZURE.replace("\n2023-11-16 18:20:48", "\n\nsoon"), ["line 5", "TIMESTAMP 'soon"]),
    "azure empty": (AZURE.splitlines()[0], ["no rows"]),
    "azure ragged": (AZURE.replace("1000,500", "1000,500,3,4"), ["CSV"]),
    "burstgpt": (BURSTGPT.replace("417", "-1"), ["line 4", "Request tokens '-1'"]),
    "burstgpt failed": (BURSTGPT.split("5,Chat")[0] + "1,a,2,0,2,x\n2,a,2,0,2,x\n", ["2 failed requests"]),
    "vidur": ("num_prefill_tokens,num_decode_tokens\n5,1.5\n", ["line 2", "num_decode_tokens '1.5'"]),
    "guidellm": ("timestamp,input_length,output_length\ninf,5,5\n", ["line 2", "timestamp 'inf'"]),
    "sharegpt": ('[{"conversations": [{"from": "cat", "value": "x"}]}]', ["item 1", "'cat'"]),
    "sharegpt text": ('[{"conversations": [{"from": "human", "value": 5}]}]', ["item 1", "value 5"]),
    "sharegpt cut": (SHAREGPT[:-9], ["item 2"]),
    "sharegpt none": ('[{"conversations": []}]', ["no request"]),
    "sharegpt no list": ('[{"conversations": []}, {"conversations": 5}]', ["item 2"]),
    "sharegpt message": ('[{"conversations": [5]}]', ["item 1", "5"]),
    "custom": (SAMPLES["custom"] + '\n{"prompt": 5}', ["line 3", "prompt 5"]),
    "lmcache": (SAMPLES["lmcache"] + '\n{"input": "x", "session_id": "s"}', ["line 2", "output None"]),
    "single_turn": (lines({"text": "a", "image": "x.png"}), ["line 1", "image 'x.png'"]),
    "single_turn text": (lines({"text": 5}), ["line 1", "[5]"]),
    "multi_turn": (MULTI_TURN + '\n{"turns": []}', ["line 3", "turns []"]),
    "multi_turn turn": (MULTI_TURN + '\n{"turns": [5]}', ["line 3", "5"]),
    "questions": (SAMPLES["questions"] + '\n{"turns": ["a", 1]}', ["line 3", "['a', 1]"]),
    "qwen": (QWEN.replace('"chat_id": 7', '"chat_id": "7"'), ["line 3", "chat_id '7'"]),
    "two contents": (lines({"text_input": "a", "payload": {"prompt": "b"}}), ["line 1", "text_input and payload"]),
    "ids and text": (SAMPLES["mooncake"] + '\n{"text_input": "a", "hash_ids": [1]}', ["line 2", "text_input"]),
    "ids later": (
        lines({"input_length": 5, "session_id": "s"}, {"input_length": 5, "hash_ids": [1]}),
        ["line 2", "hash_ids"],
    ),
    "mode": (lines({"text_input": "a", "message_mode": "some"}), ["line 1", "message_mode 'some'"]),
    "delay": (lines({"text_input": "a", "delay": "long"}), ["line 1", "delay 'long'"]),
    "part": (lines({"messages": [{"content": [{"image_url": "x"}]}]}), ["line 1", "image_url"]),
    "no messages": (lines({"messages": [], "session_id": "s"}), ["line 1", "messages []"]),
    "payload": (lines({"payload": {"model": "m"}}), ["line 1", "payload"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_with_the_place(tmp_path, name):
    text, words = BAD[name]
    paths = [write(tmp_path, text)]
    if name.startswith("servegen"):
        other = SERVEGEN if text.startswith("{") else json.dumps(SERVEGEN_LENGTHS)
        paths.append(write(tmp_path, other, "other"))
    with pytest.raises(ValueError, match=r"trace\.txt") as refused:
        read_page_ids(paths)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_trace_without_page_ids_is_no_trace_of_prefixes(tmp_path):
    with pytest.raises(ValueError, match=r"trace\.txt \(format azure\) has no page ids.*Mooncake"):
        read_page_ids(write(tmp_path, AZURE))


def test_a_named_format_must_fit_and_files_must_be_alike(tmp_path):
    path = write(tmp_path, AZURE)
    for name in set(FORMATS) - {"azure"}:
        with pytest.raises(ValueError, match=f"not of the format {name} "):
            read_trace(path, name)
    for paths, name, words in (
        (path, "nope", "'nope' is not a format"),
        ([path, write(tmp_path, QWEN, "other")], "auto", r"\(azure\).*\(qwen\)"),
        ([path, path], "auto", "2 files"),
        (tmp_path / "none", "auto", "does not exist"),
        ([], "auto", "no trace"),
        (write(tmp_path, lines({"prompt": "a", "text": "b"}), "two"), "auto", "custom, single_turn: .*--format"),
    ):
        with pytest.raises(ValueError, match=words):
            read_trace(paths, name)
    assert read_trace(tmp_path / "two", "custom").prompts == (("a",),)


def test_times_and_lengths_alone_have_no_unit(tmp_path):
    path = write(tmp_path, lines({"timestamp": 4, "input_length": 5, "output_length": 6}))
    with pytest.raises(ValueError, match=r"--format mooncake .* ms, timed_trace or guidellm if in seconds"):
        read_trace(path)
    for name in ("mooncake", "timed_trace", "guidellm"):
        assert read_trace(path, name).format == name


def test_page_ids_alone_do_not_tell_the_unit(tmp_path):
    """vLLM's timed_trace has Mooncake's keys, times in seconds, and pages of 16 if nobody says otherwise."""

    def rows(step: float, page: int) -> str:
        pages = [{"timestamp": step * i, "input_length": 2 * page + 8 + i % 2, "hash_ids": [1, 2, i]} for i in range(4)]
        return lines(*pages, {"timestamp": 5 * step, "input_length": 3 * page, "hash_ids": [1, 2, 3]})

    for text, why in (
        (rows(1.5, 16), "16 tokens, Mooncake's 512"),
        (rows(3000, 16), "16 tokens, Mooncake's 512"),
        (rows(0.731, 512), "not whole numbers"),
    ):
        path = write(tmp_path, text)
        with pytest.raises(ValueError, match=f"{why}.*--format mooncake .* in ms, timed_trace .*load.prompts.format"):
            read_trace(path)
        seconds, ms = read_trace(path, "timed_trace"), read_trace(path, "mooncake")
        assert np.allclose(seconds.arrival_s, 1000 * ms.arrival_s) and seconds.arrival_s[-1] > 3
        assert len(read_page_ids(path)) == 5  # only the order counts there
    assert read_trace(write(tmp_path, rows(3000, 512), "own")).arrival_s[-1] == 15
    untimed = lines(*({"input_length": 24, "hash_ids": [1, i]} for i in range(3)))
    assert read_trace(write(tmp_path, untimed, "untimed"), page_size=16).arrival_s is None
