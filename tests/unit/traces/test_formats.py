"""Every format on a few rows: found by its content, read as its makers mean it; bad files refused with the place."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvbench.traces.model import UNKNOWN, find_tick, select
from kvbench.traces.read import FORMATS, read_page_ids, read_trace
from tests.support.trace_samples import (
    AZURE,
    BURSTGPT,
    BURSTGPT_3,
    MULTI_TURN,
    QWEN,
    SAMPLES,
    SERVEGEN,
    SERVEGEN_LENGTHS,
    SHAREGPT,
    WEKA,
    arrivals,
    lines,
    page_row,
    write,
)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_format_is_known_by_its_content(tmp_path, name):
    path = write(tmp_path, SAMPLES[name])
    assert read_trace(path).format == read_trace(path, name).format == name
    assert set(SAMPLES) | {"timed_trace", "servegen"} == set(FORMATS)


def test_azure_has_seven_decimals_zones_and_a_last_line_without_newline(tmp_path):
    trace = read_trace(write(tmp_path, AZURE))
    assert trace.arrival_s == pytest.approx([0, 9e-7, 1.5, 9.155983], abs=1e-9)
    assert trace.prompt_tokens.tolist() == [1000, 20, 300, 7]
    assert trace.output_tokens.tolist() == [500, 4, 8, 1]


def test_burstgpt_is_read_by_name_and_failed_requests_are_counted(tmp_path):
    trace = read_trace(write(tmp_path, BURSTGPT))
    assert (arrivals(trace), trace.prompt_tokens.tolist()) == ([0, 113], [472, 417])
    assert list(trace.left_out.values()) == [1] and trace.session is None
    trace = read_trace(write(tmp_path, BURSTGPT_3))
    assert arrivals(trace) == [0, 1, 10] and trace.output_tokens.tolist() == [10, 5, 20]
    assert trace.session.tolist() == [0, 1, 0] and trace.turn.tolist() == [0, 0, 1]
    assert trace.think_s.tolist() == [0, 0, 7.5]  # from 10 + 2.5 to 20
    untold = read_trace(write(tmp_path, BURSTGPT_3.replace("a,2.5", "a,").replace("1.0,GPT-4", ",GPT-4")))
    assert untold.session.tolist() == [0, 1, 0] and untold.think_s.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match=r"line 2: Elapsed time 'x' is not a number"):
        read_trace(write(tmp_path, BURSTGPT_3.replace("a,2.5", "a,x")))


def test_mooncake_is_in_milliseconds_and_timed_trace_in_seconds(tmp_path):
    rows = [{"timestamp": 3000, "input_length": 513, "output_length": 1, "hash_ids": [0, 7]},
            {"timestamp": 1000, "input_length": 512, "hash_ids": [0]}]  # fmt: skip
    path = write(tmp_path, lines(*rows))
    trace = read_trace(path)
    assert arrivals(trace) == [0, 2] and trace.prompt_tokens.tolist() == [512, 513]
    assert trace.output_tokens.tolist() == [UNKNOWN, 1]
    assert [list(ids) for ids in trace.page_ids] == [[0], [0, 1]] and trace.page_size == 512
    assert arrivals(read_trace(path, "timed_trace")) == [0, 2000]


def test_aiperf_puts_texts_and_sessions_into_mooncakes_format(tmp_path):
    two = {"role": "user", "content": [{"type": "text", "text": "tw"}, {"type": "text", "text": "o"}]}
    calls = [{"role": "assistant", "tool_calls": [{}]}, {"role": "user", "content": "so"}]
    rows = [
        {"session_id": "s", "timestamp": 1000, "text_input": "one", "output_length": 4},
        {"session_id": "s", "delay": 250, "messages": [two], "message_mode": "delta"},
        {"timestamp": 500, "payload": {"prompt": [7, 8]}, "output_length": 2},
        {"timestamp": 600, "payload": {"messages": calls}},
        {"timestamp": 700, "input_length": 30},
    ]
    trace = read_trace(write(tmp_path, lines(*rows)))
    assert trace.format == "mooncake" and trace.page_ids is None
    prompts = [p if isinstance(p, tuple) else list(p) for p in trace.prompts]
    assert prompts == [[7, 8], ("", "so"), (), ("one",), ("one", "two")]
    assert trace.prompt_tokens.tolist() == [UNKNOWN, UNKNOWN, 30, UNKNOWN, UNKNOWN]
    assert trace.session.tolist() == [0, 1, 2, 3, 3] and trace.turn.tolist() == [0, 0, 0, 0, 1]
    assert trace.think_s.tolist() == [0, 0, 0, 0, 0.25]
    assert np.isnan(trace.arrival_s).tolist() == [False, False, False, False, True]
    whole = select(trace, start_s=0.4)  # the turn without a time goes with the one before it
    assert len(whole) == 2 and whole.arrival_s[0] == 0 and np.isnan(whole.arrival_s[1])


def test_qwen_follows_a_conversation_by_its_parents_and_has_pages_of_16(tmp_path):
    trace = read_trace(write(tmp_path, QWEN))
    assert arrivals(trace) == [0, 0.3, 9.0] and trace.page_size == 16
    assert trace.session.tolist() == [0, 1, 0] and trace.turn.tolist() == [0, 0, 1] and trace.think_s is None
    assert [list(ids) for ids in trace.page_ids] == [[0, 1, 2], [3, 1], [0, 1, 4, 5]]


def test_weka_counts_sub_agents_as_sessions_and_files_as_worlds_of_their_own(tmp_path):
    one = write(tmp_path, WEKA)
    trace = read_trace(one)
    assert arrivals(trace) == [0, 6, 9] and trace.session.tolist() == [0, 1, 0] and trace.turn.tolist() == [0, 0, 1]
    assert trace.think_s.tolist() == [0, 0, 2.5] and trace.output_tokens.tolist() == [4, 2, 3]
    two = read_trace([one, write(tmp_path, WEKA, "again")])
    assert two.arrival_s is None and two.session.tolist() == [0, 1, 0, 2, 3, 2]
    assert [list(ids) for ids in two.page_ids] == [[0], [0, 1], [0, 2], [3], [3, 4], [3, 5]]
    deep = {"type": "subagent", "t": 1.0, "requests": [json.loads(WEKA)["requests"][1]]}
    nested = read_trace(write(tmp_path, json.dumps({"block_size": 8, "requests": [deep]}), "nested"))
    assert arrivals(nested) == [0] and nested.prompt_tokens.tolist() == [16]
    with pytest.raises(ValueError, match="16, 8"):
        read_trace([one, write(tmp_path, WEKA.replace('"block_size": 8', '"block_size": 16'), "other")])


def test_page_ids_are_of_any_kind_and_rows_in_order_of_arrival(tmp_path):
    text = lines(
        page_row([2**70, "a", -1], 45, timestamp=3000),
        page_row(["a", 2**70], timestamp=1.5, extra=1),
        page_row([-1, 5], timestamp=3000),
        page_row([], 0, timestamp=0),
    )
    trace = read_page_ids(write(tmp_path, "\ufeff" + text.replace("\n", "\n\n", 1)))
    assert trace.page_size == 16 and trace.prompt_tokens.tolist() == [0, 32, 45, 32]
    assert [list(ids) for ids in trace.page_ids] == [[], [1, 0], [0, 1, 2], [2, 3]]
    rows = (page_row([1, 2, 3, 4], timestamp=9), page_row([1, 2, 3, 5]), page_row([7], timestamp=0))
    with pytest.raises(ValueError, match=r"line 2: no time"):
        read_page_ids(write(tmp_path, lines(*rows)))
    untimed = read_page_ids(write(tmp_path, lines(page_row([1, 2, 3, 4]), page_row([7]))))  # the file's order
    assert [len(ids) for ids in untimed.page_ids] == [4, 1]


def turns(*rows):
    """A session's turns: (input_length, output_length), beside a turn of another session."""
    names = ("input_length", "output_length")
    own = [{"session_id": "a", "delay": 10 * n, **dict(zip(names, row, strict=True))} for n, row in enumerate(rows)]
    return [own[0], {"session_id": "b", "input_length": 9, "output_length": 9}, *own[1:]]


@pytest.mark.parametrize("session", [[(600, 100), (50, 100), (50, 100)], [(50, 9), (58, 9), (40, 9)]])
def test_sessions_with_lengths_of_the_new_turn_only_are_refused_or_joined(tmp_path, session):
    rows = turns(*session)
    with pytest.raises(ValueError, match=r"new turn only .*message_mode delta.* remove session_id"):
        read_trace(write(tmp_path, lines(*rows)))
    joined = read_trace(write(tmp_path, lines(*({**row, "message_mode": "delta"} for row in rows))))
    own = joined.prompt_tokens[joined.session == 0].tolist()
    assert own == [sum(map(sum, session[:n])) + session[n][0] for n in range(len(session))]
    with pytest.raises(ValueError, match="line 3: page ids of the new turn only"):
        read_trace(write(tmp_path, lines(*({**row, "message_mode": "delta", "hash_ids": [1]} for row in rows))))


@pytest.mark.parametrize(
    "session",
    [
        [(600, 100), (700, 100), (50, 100)],  # just as long as all before, then compacted
        [(600, 1000), (750, 10)],  # the reasoning is left out
        [(50, 100), (60, 100)],
        [(900, 10), (500, 10), (500, 10), (505, 10)],  # one that is shorter is not enough
        [(900, 10), (500, 10), (700, 10)],  # user ids
    ],
)
def test_sessions_with_all_turns_before_are_read_as_they_are(tmp_path, session):
    trace = read_trace(write(tmp_path, lines(*turns(*session))))
    assert trace.prompt_tokens[trace.session == 0].tolist() == [prompt for prompt, _ in session]


LENGTHS, TEXT, IDS = {"input_length": 7, "output_length": 2}, {"text_input": "x"}, {"payload": {"prompt": [1, 2]}}


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (LENGTHS, TEXT, "line 2: text_input cannot go on"),
        (TEXT, LENGTHS, "line 2: input_length cannot go on"),
        (IDS, TEXT, "line 2: text_input cannot go on"),
        (LENGTHS, LENGTHS | {"session_id": ["a"]}, r"line 2: session_id \['a'\]"),
        (LENGTHS | {"session_id": {}}, LENGTHS, r"line 1: session_id \{\}"),
        (LENGTHS, LENGTHS | {"message_mode": "detla"}, "line 2: message_mode 'detla'"),
    ],
)
def test_turns_that_cannot_go_on_from_one_another_are_named(tmp_path, first, second, words):
    mode = {"session_id": "a", "message_mode": "delta"}
    with pytest.raises(ValueError, match=words):
        read_trace(write(tmp_path, lines(mode | first, mode | second)))


def test_a_delta_goes_on_from_whatever_the_turn_before_holds(tmp_path):
    mode = {"session_id": "a", "message_mode": "delta"}
    ids = read_trace(write(tmp_path, lines(mode | IDS, mode | IDS)))
    assert [list(prompt) for prompt in ids.prompts] == [[1, 2], [1, 2, 1, 2]]
    lengths = read_trace(write(tmp_path, lines({"session_id": "a"} | LENGTHS, mode | LENGTHS), "two"))
    assert lengths.prompt_tokens.tolist() == [7, 16]


@pytest.mark.parametrize("pages", [[[1, 2], [7], [8]], [[1, 2], [], []]])
def test_sessions_with_pages_of_the_new_turn_only_are_refused(tmp_path, pages):
    own = {"session_id": "a", "output_length": 100}
    rows = [page_row(ids, length, **own) for ids, length in zip(pages, (600, 50, 50), strict=True)]
    with pytest.raises(ValueError, match="new turn only"):
        read_trace(write(tmp_path, lines(*rows)))
    rows[1]["hash_ids"] = rows[2]["hash_ids"] = [7]  # the last two share their beginning
    assert read_trace(write(tmp_path, lines(*rows), "shared")).prompt_tokens.tolist() == [600, 50, 50]


@pytest.mark.parametrize("pages", [lambda n: -(-n // 48), lambda n: n // 48])
def test_a_page_size_that_is_no_power_of_two_is_given(tmp_path, pages):
    path = write(tmp_path, lines(*(page_row(list(range(pages(n))), n) for n in (47, 48, 49, 96, 480, 500))))
    assert read_page_ids(path, page_size=48).page_size == 48
    for size, words in ((None, "--page-size"), (64, "--page-size 64")):
        with pytest.raises(ValueError, match=words):
            read_page_ids(path, page_size=size)


def test_a_conversation_gives_a_request_for_each_answered_turn(tmp_path):
    trace = read_trace(write(tmp_path, SHAREGPT))
    assert trace.prompts == (("one",), ("one", "ONE", "two"), ("be brief", "hi"))
    assert trace.replies == ("ONE", "TWO", "HI")
    assert trace.session.tolist() == [0, 0, 1] and trace.arrival_s is None
    assert trace.left_out == {"replies without a question": 1, "questions without a reply": 1}


def test_agents_are_in_microseconds_and_files_share_their_clock(tmp_path):
    rows = [{"timestamp": 1760587752017385 + 250_000 * i, "input": f"q{i}", "output": "A", "session_id": "s"}
            for i in (2, 0)]  # fmt: skip
    other = {"timestamp": 1760587752017385 + 250_000, "input": "r", "output": "", "session_id": "t"}
    trace = read_trace([write(tmp_path, lines(*rows)), write(tmp_path, lines(other), "second")])
    assert trace.arrival_s == pytest.approx([0, 0.25, 0.5], abs=1e-6)
    assert trace.prompts == (("q0",), ("r",), ("q2",)) and trace.replies == ("A", "", "A")
    assert trace.session.tolist() == [0, 1, 0] and trace.turn.tolist() == [0, 0, 1]


@pytest.mark.parametrize("name", ["sharegpt", "azure", "custom", "weka"])
def test_a_byte_order_mark_is_no_part_of_a_trace(tmp_path, name):
    plain, marked = write(tmp_path, SAMPLES[name]), write(tmp_path, "\ufeff" + SAMPLES[name], "marked")
    assert read_trace(marked).format == name and len(read_trace(marked)) == len(read_trace(plain))


def test_a_long_array_is_read_item_by_item(tmp_path):
    talk = json.loads(SHAREGPT)[1]
    many = [talk | {"id": "x" * 5000} for _ in range(700)]  # 3.5 MB: more than is read at once
    many[350] = talk | {"id": "y" * 3_000_000}
    assert len(read_trace(write(tmp_path, json.dumps(many, indent=2)))) == 700


def test_texts_without_replies_and_token_ids(tmp_path):
    trace = read_trace(write(tmp_path, SAMPLES["questions"]))
    assert trace.prompts == (("a",), ("a", "b"), ("c",)) and trace.session.tolist() == [0, 0, 1]
    trace = read_trace(write(tmp_path, SAMPLES["custom"]))
    assert trace.prompts[0] == ("hello",) and list(trace.prompts[1]) == [4, 5, 6]
    assert trace.prompt_tokens.tolist() == [UNKNOWN, 3] and trace.output_tokens.tolist() == [7, UNKNOWN]
    trace = read_trace(write(tmp_path, SAMPLES["single_turn"]))
    assert trace.prompts == (("b", "c"), ("a",)) and arrivals(trace) == [0, 0.005]
    trace = read_trace(write(tmp_path, MULTI_TURN))
    assert trace.prompts == (("other",), ("first",), ("first", "then")) and trace.think_s.tolist() == [0, 0, 1.5]


def test_servegen_draws_a_trace_from_a_clients_distributions(tmp_path):
    paths = [write(tmp_path, SERVEGEN), write(tmp_path, json.dumps(SERVEGEN_LENGTHS, indent=1), "lengths")]
    trace = read_trace(paths)
    again = read_trace(paths[::-1], "servegen")
    assert trace.format == "servegen" and (trace.arrival_s == again.arrival_s).all()
    second = trace.arrival_s >= 600 - 5  # times count from the first request, soon after 600
    first = trace.arrival_s < 595
    assert first.sum() == pytest.approx(1200, abs=4 * 1200**0.5 * 1.42)  # a renewal process: cv x sqrt(n)
    assert second.sum() == pytest.approx(2400, abs=4 * 2400**0.5 * 1.46)
    gaps = np.diff(trace.arrival_s[first])
    assert gaps.std() / gaps.mean() == pytest.approx(2**0.5, rel=0.15)  # of a Gamma of shape 1/2
    assert set(trace.prompt_tokens[first]) == {7} and set(trace.prompt_tokens[trace.arrival_s > 605]) == {10, 20}
    assert np.mean(trace.prompt_tokens[trace.arrival_s > 605] == 20) == pytest.approx(0.75, abs=0.05)
    with pytest.raises(ValueError, match="given are 1 and 0"):
        read_trace(paths[0])


def test_a_coarse_clock_is_noticed():
    rng = np.random.default_rng(1)
    exact = np.sort(rng.uniform(0, 300, 900))
    assert find_tick(exact) is None
    assert find_tick(np.floor(exact / 3) * 3) == 3.0
    ticks = np.arange(100) * 3 - rng.integers(0, 2, 100) * 0.001  # Mooncake's are a millisecond early at times
    assert find_tick(np.repeat(ticks, 9)) == pytest.approx(3, abs=0.002)
    assert find_tick(np.array([0.0, 0.0, 1.0, 1.0])) is None
    assert find_tick(np.repeat(exact[::5], 5)) is None  # five at a time, but at no clock's times
    assert find_tick(np.array([0.0] * 9 + [0.001, 3, 6, 6.001, 9, 9, 9])) is None


def test_a_part_is_rebased_rescaled_and_its_turns_counted_anew(tmp_path):
    trace = read_trace(write(tmp_path, AZURE))
    part = select(trace, start_s=1.0, duration_s=9.0, rate_scale=2.0)
    assert part.arrival_s == pytest.approx([0, 3.8279915]) and part.prompt_tokens.tolist() == [300, 7]
    assert len(select(trace, max_requests=2)) == 2
    with pytest.raises(ValueError, match=r"spans 0 to 9\.2 s"):
        select(trace, start_s=100)
    part = select(read_trace(write(tmp_path, QWEN)), start_s=0.2)
    assert part.session.tolist() == [1, 0] and part.turn.tolist() == [0, 0]
    with pytest.raises(ValueError, match="no arrival times, so start_s"):
        select(read_trace(write(tmp_path, SHAREGPT)), start_s=1)


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
    "unknown": ("a,b\n1,2\n", ["'a,b'", "azure (CSV: TIMESTAMP", "mooncake"]),
    "unknown keys": ('{"timestamp": 1, "input": "x"}', ["'timestamp', 'input'"]),
    "binary": ("\x00\x01", ["known format"]),
    "cut": ('{"hash_ids": [1, 2', ["line 1"]),
    "no row": (after_good("\n{broken"), ["line 3"]),
    "deep": (after_good("[" * 100_000), ["line 2"]),
    "no ids": (after_good({"input_length": 5}), ["line 2", "hash_ids"]),
    "no length": (after_good({"hash_ids": [1]}), ["line 2", "input_length None"]),
    "negative": (after_good(page_row([1], -4)), ["line 2", "input_length -4"]),
    "fraction id": (after_good(page_row([1, 1.5])), ["line 2", "page id 1.5"]),
    "time": (after_good(page_row([1], timestamp="soon")), ["line 2", "timestamp 'soon'"]),
    "nan time": (after_good('{"hash_ids": [1], "input_length": 16, "timestamp": NaN}'), ["line 2", "timestamp nan"]),
    "page size": (after_good(page_row([1, 2], 500)), ["line 2", "2 page ids for 500 tokens", "13 to 21"]),
    "no page": (lines(page_row([], 5)), ["full page"]),
    "any page size": (session(call([1], 5), block_size=None), ["3 or more", "--page-size", "load.prompts.page_size"]),
    "weka row": (session(call([1], 8), 5), ["requests[1]", "5"]),
    "weka agent": (session({"type": "subagent", "t": 1}), ["requests[0]", "sub-agent"]),
    "weka nested": (session({"type": "subagent", "t": 1, "requests": [call([1], 99)]}), ["requests[0].requests[0]"]),
    "weka zero": (session(call([1], 8), block_size=0), ["block_size 0"]),
    "weka size": (session(call([1, 2], 11), block_size=2), ["block_size 2", "6"]),
    "weka and more": (json.dumps(json.loads(session(call([1], 8)))) + "\n" + PAGES, ["line 2"]),
    "servegen window": (SERVEGEN.replace("1200,", "100,"), ["line 3", "start '100' and rate '4.0'"]),
    "servegen shape": (SERVEGEN.replace("Weibull", "Cauchy"), ["line 3", "'Cauchy' of shape '0.7'"]),
    "servegen lengths": (json.dumps({"0": {"input_tokens": "{5: -1}", "output_tokens": "{1: 1}"}}), ["window 0"]),
    "azure blank": ("\n" + AZURE.replace("\n", "\n \n\n").replace("300,8", "x,8"), ["line 11", "'x'"]),
    "azure time": (AZURE.replace("\n2023-11-16 18:20:48", "\n\nsoon"), ["line 5", "TIMESTAMP 'soon"]),
    "azure empty": (AZURE.splitlines()[0], ["no rows"]),
    "azure ragged": (AZURE.replace("1000,500", "1000,500,3,4"), ["CSV"]),
    "burstgpt failed": (BURSTGPT.split("5,Chat")[0] + "1,a,2,0,2,x\n2,a,2,0,2,x\n", ["2 failed requests"]),
    "vidur": ("num_prefill_tokens,num_decode_tokens\n5,1.5\n", ["line 2", "num_decode_tokens '1.5'"]),
    "sharegpt": ('[{"conversations": [{"from": "cat", "value": "x"}]}]', ["item 1", "'cat'"]),
    "sharegpt text": ('[{"conversations": [{"from": "human", "value": 5}]}]', ["item 1", "value 5"]),
    "sharegpt cut": (SHAREGPT[:-9], ["item 2"]),
    "sharegpt none": ('[{"conversations": []}]', ["no request"]),
    "sharegpt message": ('[{"conversations": [5]}]', ["item 1", "5"]),
    "custom": (SAMPLES["custom"] + '\n{"prompt": 5}', ["line 3", "prompt 5"]),
    "lmcache": (SAMPLES["lmcache"] + '\n{"input": "x", "session_id": "s"}', ["line 2", "output None"]),
    "single_turn": (lines({"text": "a", "image": "x.png"}), ["line 1", "image 'x.png'"]),
    "single_turn text": (lines({"text": 5}), ["line 1", "[5]"]),
    "multi_turn": (MULTI_TURN + '\n{"turns": []}', ["line 3", "turns []"]),
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
