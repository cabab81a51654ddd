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
    write,
)

BAD = {
    "servegen window": (SERVEGEN.replace("1200,", "100,"), ["line 3", "start '100' and rate '4.0' are no window"]),
    "servegen shape": (SERVEGEN.replace("Weibull", "Cauchy"), ["line 3", "'Cauchy' of shape '0.7'"]),
    "servegen lengths": (json.dumps({"0": {"input_tokens": "{5: -1}", "output_tokens": "{1: 1}"}}), ["window 0"]),
    "azure": (AZURE.replace("300,8", "three hundred,8"), ["line 4", "'three hundred' is not a number of tokens"]),
    "azure blank": ("\n" + AZURE.replace("\n", "\n \n\n").replace("300,8", "x,8"), ["line 11", "'x' is not a number"]),
    "azure time blank": (AZURE.replace("\n2023-11-16 18:20:48", "\n\nsoon"), ["line 5", "TIMESTAMP 'soon"]),
    "servegen blank": (SERVEGEN.replace("Weibull", "Cauchy").replace("\n", "\n\n"), ["line 5", "'Cauchy'"]),
    "azure time": (AZURE.replace("2023-11-16 18:20:48", "soon"), ["line 4", "TIMESTAMP 'soon"]),
    "azure empty": (AZURE.splitlines()[0], ["no rows"]),
    "azure ragged": (AZURE.replace("1000,500", "1000,500,3,4"), ["not a CSV file"]),
    "burstgpt": (BURSTGPT.replace("417", "-1"), ["line 4", "Request tokens '-1'"]),
    "vidur": ("num_prefill_tokens,num_decode_tokens\n5,1.5\n", ["line 2", "num_decode_tokens '1.5'"]),
    "guidellm": ("timestamp,input_length,output_length\ninf,5,5\n", ["line 2", "timestamp 'inf' is not a number"]),
    "sharegpt": ('[{"conversations": [{"from": "cat", "value": "x"}]}]', ["item 1", "'cat', who is not known"]),
    "sharegpt text": ('[{"conversations": [{"from": "human", "value": 5}]}]', ["item 1", "value 5 is not a text"]),
    "sharegpt cut": (SHAREGPT[:-9], ["item 2", "not JSON"]),
    "custom": (SAMPLES["custom"] + '\n{"prompt": 5}', ["line 3", "prompt 5 is neither"]),
    "lmcache": (SAMPLES["lmcache"] + '\n{"input": "x", "session_id": "s"}', ["line 2", "output None is not a text"]),
    "single_turn": (lines({"text": "a", "image": "x.png"}), ["line 1", "kvbench sends text only"]),
    "multi_turn": (MULTI_TURN + '\n{"turns": []}', ["line 3", "no list of turns"]),
    "questions": (SAMPLES["questions"] + '\n{"turns": ["a", 1]}', ["line 3", "no list of texts"]),
    "qwen": (QWEN.replace('"chat_id": 7', '"chat_id": "7"'), ["line 3", "not whole numbers"]),
    "two contents": (lines({"text_input": "a", "payload": {"prompt": "b"}}), ["line 1", "both text_input and payload"]),
    "ids and text": (SAMPLES["mooncake"] + '\n{"text_input": "a", "hash_ids": [1]}', ["line 2", "not with text_input"]),
    "ids later": (
        lines({"input_length": 5, "session_id": "s"}, {"input_length": 5, "hash_ids": [1]}),
        ["line 2", "which the first request has not"],
    ),
    "mode": (lines({"text_input": "a", "message_mode": "some"}), ["line 1", "neither history nor delta"]),
    "delay": (lines({"text_input": "a", "delay": "long"}), ["line 1", "delay 'long' is not a time"]),
    "part": (lines({"messages": [{"content": [{"image_url": "x"}]}]}), ["line 1", "kvbench sends text only"]),
    "unknown": ("a,b\n1,2\n", ["no trace of a known format", "'a,b'", "azure (CSV: TIMESTAMP"]),
    "binary": ("\x00\x01", ["no trace of a known format"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_with_the_place(tmp_path, name):
    text, words = BAD[name]
    paths = [write(tmp_path, text)]
    if name.startswith("servegen"):
        other = SERVEGEN if text.startswith("{") else json.dumps(SERVEGEN_LENGTHS)
        paths.append(write(tmp_path, other, "other"))
    with pytest.raises(ValueError, match=r"trace\.txt") as refused:
        read_trace(paths)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_named_format_must_fit_and_files_must_be_alike(tmp_path):
    path = write(tmp_path, AZURE)
    for name in set(FORMATS) - {"azure"}:
        with pytest.raises(ValueError, match=f"not of the format {name} "):
            read_trace(path, name)
    with pytest.raises(ValueError, match="'nope' is not a format"):
        read_trace(path, "nope")
    with pytest.raises(ValueError, match=r"different formats.*\(azure\).*\(qwen\)"):
        read_trace([path, write(tmp_path, QWEN, "other")])
    with pytest.raises(ValueError, match="one is read at a time"):
        read_trace([path, path])
    with pytest.raises(ValueError, match="does not exist"):
        read_trace(tmp_path / "none")


def test_times_and_lengths_alone_have_no_unit(tmp_path):
    path = write(tmp_path, lines({"timestamp": 4, "input_length": 5, "output_length": 6}))
    with pytest.raises(ValueError, match=r"--format mooncake .* ms, timed_trace or guidellm if in seconds"):
        read_trace(path)
    assert [read_trace(path, name).format for name in ("mooncake", "timed_trace", "guidellm")] == [
        "mooncake", "timed_trace", "guidellm",
    ]  # fmt: skip


def test_a_file_that_two_formats_fit_is_not_guessed(tmp_path):
    path = write(tmp_path, lines({"prompt": "a", "text": "b"}))
    with pytest.raises(ValueError, match="fits the formats custom, single_turn: say which with --format"):
        read_trace(path)
    assert read_trace(path, "custom").prompts == (("a",),)


def test_page_ids_alone_do_not_tell_the_unit(tmp_path):
    """vLLM's timed_trace has Mooncake's keys, times in seconds, and pages of 16 if nobody says otherwise."""

    def rows(step: float, page: int) -> str:
        pages = [{"timestamp": step * i, "input_length": 2 * page + 8 + i % 2, "hash_ids": [1, 2, i]} for i in range(4)]
        return lines(*pages, {"timestamp": 5 * step, "input_length": 3 * page, "hash_ids": [1, 2, 3]})

    for name, text, why in (
        ("small", rows(1.5, 16), "its pages have 16 tokens, Mooncake's 512"),
        ("small whole", rows(3000, 16), "its pages have 16 tokens"),
        ("fractions", rows(0.731, 512), "its timestamps are not whole numbers"),
    ):
        path = write(tmp_path, text, name)
        with pytest.raises(ValueError, match=f"{why}.*--format mooncake .* in ms, timed_trace if in seconds") as said:
            read_trace(path)
        assert "load.prompts.format" in str(said.value)
        seconds, ms = read_trace(path, "timed_trace"), read_trace(path, "mooncake")
        assert np.allclose(seconds.arrival_s, 1000 * ms.arrival_s) and seconds.arrival_s[-1] > 3
        assert len(read_page_ids(path)) == 5  # only the order counts there
    assert read_trace(write(tmp_path, rows(3000, 512), "own")).arrival_s[-1] == 15
    untimed = lines(*({"input_length": 24, "hash_ids": [1, i]} for i in range(3)))
    assert read_trace(write(tmp_path, untimed, "untimed"), page_size=16).arrival_s is None
