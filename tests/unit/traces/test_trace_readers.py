"""Every format on a few rows written here: found by its content, read as its makers mean it, refused with the place."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from kvbench.traces.model import UNKNOWN, Trace, find_tick, select
from kvbench.traces.read import FORMATS, read_trace

ROOT = Path(__file__).resolve().parents[3]
TRACES = Path(os.environ.get("KVBENCH_TRACES", ROOT.parent / "shared" / "traces"))
SERVEGEN_FILES = TRACES / "servegen"


def lines(*rows: dict) -> str:
    return "\n".join(map(json.dumps, rows))


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:20:46.8440170,1000,500\n"
    "2023-11-16 18:20:46.8440179+00:00,20,4\n"
    "2023-11-16 18:20:48.3440170,300,8\n"
    "2023-11-16 18:20:56,7,1"  # no decimals, and no newline at the end
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,0,1087,Conversation log\n"
    "118,GPT-4,417,276,693,API log\n"
)
BURSTGPT_3 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "10,a,2.5,ChatGPT,100,10,110,Conversation log\n"
    "11,,1.0,GPT-4,50,5,55,API log\n"
    "20,a,3.0,ChatGPT,120,20,140,Conversation log\n"
    "21,b,3.0,ChatGPT,30,0,30,Conversation log\n"
)
SHAREGPT = json.dumps(
    [
        {"id": "1", "conversations": [
            {"from": "gpt", "value": "left over"},
            {"from": "human", "value": "one"}, {"from": "gpt", "value": "ONE"},
            {"from": "human", "value": "two"}, {"from": "gpt", "value": "TWO"},
            {"from": "human", "value": "no answer"},
        ]},
        {"conversation": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"}, {"role": "assistant", "content": "HI"},
        ]},
    ]
)  # fmt: skip
WEKA = json.dumps(
    {
        "block_size": 8,
        "requests": [
            {"t": 0.0, "type": "n", "in": 9, "out": 4, "hash_ids": [1], "think_time": 0.0},
            {
                "t": 5.0,
                "type": "subagent",
                "requests": [{"t": 1.0, "type": "s", "in": 16, "out": 2, "hash_ids": [1, 7]}],
            },
            {"t": 9.0, "type": "n", "in": 20, "out": 3, "hash_ids": [1, 2], "think_time": 2.5},
        ],
    },
    indent=1,
)
QWEN = lines(
    {"chat_id": 5, "parent_chat_id": -1, "timestamp": 61.1, "input_length": 40, "output_length": 9, "type": "text",
     "turn": 1, "hash_ids": [8, 9, 4]},
    {"chat_id": 6, "parent_chat_id": -1, "timestamp": 61.4, "input_length": 20, "output_length": 9, "type": "text",
     "turn": 1, "hash_ids": [3, 9]},
    {"chat_id": 7, "parent_chat_id": 5, "timestamp": 70.1, "input_length": 50, "output_length": 2, "type": "text",
     "turn": 2, "hash_ids": [8, 9, 5, 6]},
)  # fmt: skip
MULTI_TURN = lines(
    {"session_id": "s", "turns": [{"text": "first", "timestamp": 2000}, {"texts": ["then"], "delay": 1500}]},
    {"turns": [{"text": "other", "timestamp": 1000, "output_length": 5}]},
)


def write(folder: Path, text: str, name: str = "trace.txt") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def arrivals(trace: Trace) -> list[float]:
    return [round(float(t), 6) for t in trace.arrival_s]


SAMPLES = {
    "mooncake": lines({"timestamp": 2500, "input_length": 600, "output_length": 3, "hash_ids": [0, 5]}),
    "qwen": QWEN,
    "weka": WEKA,
    "azure": AZURE,
    "burstgpt": BURSTGPT,
    "vidur": "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.8\n20,5,25,4.0\n",
    "guidellm": "timestamp,input_length,output_length\n0.5,100,7\n2.0,50,8\n",
    "sharegpt": SHAREGPT,
    "questions": lines({"question_id": 1, "category": "x", "turns": ["a", "b"]}, {"question_id": 2, "turns": ["c"]}),
    "custom": lines({"prompt": "hello", "output_tokens": 7}, {"prompt": [4, 5, 6], "output_tokens": -1}),
    "lmcache": lines({"timestamp": 1760587752017385, "input": "q", "output": "", "session_id": "s"}),
    "single_turn": lines({"text": "a", "timestamp": 10}, {"texts": ["b", "c"], "timestamp": 5, "output_length": 3}),
    "multi_turn": MULTI_TURN,
}


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
    with pytest.raises(ValueError, match="2 failed requests"):
        read_trace(write(tmp_path, BURSTGPT.split("5,Chat")[0] + "1,a,2,0,2,x\n2,a,2,0,2,x\n"))


def test_mooncake_is_in_milliseconds_and_timed_trace_in_seconds(tmp_path):
    rows = [{"timestamp": 3000, "input_length": 513, "output_length": 1, "hash_ids": [0, 7]},
            {"timestamp": 1000, "input_length": 512, "hash_ids": [0]}]  # fmt: skip
    path = write(tmp_path, lines(*rows))
    trace = read_trace(path)
    assert arrivals(trace) == [0, 2] and trace.prompt_tokens.tolist() == [512, 513]
    assert trace.output_tokens.tolist() == [UNKNOWN, 1]
    assert [list(ids) for ids in trace.page_ids] == [[0], [0, 1]] and trace.page_size == 512
    assert arrivals(read_trace(path, "timed_trace")) == [0, 2000]


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


def test_aiperf_puts_texts_and_sessions_into_mooncakes_format(tmp_path):
    rows = [
        {"session_id": "s", "timestamp": 1000, "text_input": "one", "output_length": 4},
        {"session_id": "s", "delay": 250, "messages": [{"role": "user", "content": "two"}], "message_mode": "delta"},
        {"timestamp": 500, "payload": {"prompt": [7, 8]}, "output_length": 2},
        {"timestamp": 700, "input_length": 30},
    ]
    trace = read_trace(write(tmp_path, lines(*rows)))
    assert trace.format == "mooncake" and trace.page_ids is None
    assert [p if isinstance(p, tuple) else list(p) for p in trace.prompts] == [[7, 8], (), ("one",), ("one", "two")]
    assert trace.prompt_tokens.tolist() == [UNKNOWN, 30, UNKNOWN, UNKNOWN]
    assert trace.session.tolist() == [0, 1, 2, 2] and trace.turn.tolist() == [0, 0, 0, 1]
    assert trace.think_s.tolist() == [0, 0, 0, 0.25]
    assert np.isnan(trace.arrival_s).tolist() == [False, False, False, True]
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
    with pytest.raises(ValueError, match="block sizes differ"):
        read_trace([one, write(tmp_path, WEKA.replace('"block_size": 8', '"block_size": 16'), "other")])


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


SERVEGEN = "0,0,0,,0,0\n600,2.0,1.4142,Gamma,0.5,1.0\n1200,4.0,2.0,Weibull,0.7,0.2\n"
SERVEGEN_LENGTHS = {
    "0": {"input_tokens": "{7: 1.0}", "output_tokens": "{1: 1.0}"},
    "1200": {"input_tokens": "{10: 0.25, 20: 0.75}", "output_tokens": "{3: 1.0, 5: 1.0}"},
}


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


def test_the_public_clients_have_the_rates_that_they_state():
    if not SERVEGEN_FILES.is_dir():
        pytest.skip(f"no trace slices in {TRACES}; set KVBENCH_TRACES to their folder")
    name = "reason_deepseek-r1_chunk-3"
    trace = read_trace([SERVEGEN_FILES / f"{name}-trace.csv", SERVEGEN_FILES / f"{name}-dataset.json"])
    rates = [float(line.split(",")[1]) for line in (SERVEGEN_FILES / f"{name}-trace.csv").read_text().splitlines()]
    assert len(trace) == pytest.approx(600 * sum(rates), rel=0.02) and len(trace) < 1_000_000


BAD = {
    "servegen window": (SERVEGEN.replace("1200,", "100,"), ["line 3", "start '100' and rate '4.0' are no window"]),
    "servegen shape": (SERVEGEN.replace("Weibull", "Cauchy"), ["line 3", "'Cauchy' of shape '0.7'"]),
    "servegen lengths": (json.dumps({"0": {"input_tokens": "{5: -1}", "output_tokens": "{1: 1}"}}), ["window 0"]),
    "azure": (AZURE.replace("300,8", "three hundred,8"), ["line 4", "'three hundred' is not a number of tokens"]),
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


def test_a_coarse_clock_is_noticed():
    rng = np.random.default_rng(1)
    exact = np.sort(rng.uniform(0, 300, 900))
    assert find_tick(exact) is None
    assert find_tick(np.floor(exact / 3) * 3) == 3.0
    ticks = (
        np.arange(100) * 3 - rng.integers(0, 2, 100) * 0.001
    )  # as Mooncake's, which are a millisecond early at times
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
