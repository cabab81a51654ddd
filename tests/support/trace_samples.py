"""A few rows of every format of traces."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvbench.traces.model import Trace

TRACES = Path(os.environ.get("KVBENCH_TRACES", Path(__file__).resolve().parents[3] / "shared" / "traces"))
_EXPECTED = TRACES / "expected_stats.json"
SLICES = json.loads(_EXPECTED.read_text()) if _EXPECTED.is_file() else {}  # the expected statistics of each
needs_slices = pytest.mark.skipif(not SLICES, reason=f"no trace slices in {TRACES}; set KVBENCH_TRACES to their folder")


def lines(*rows: dict) -> str:
    """JSON lines."""
    return "\n".join(map(json.dumps, rows))


def write(folder: Path, text: str, name: str = "trace.txt") -> Path:
    """A file of that text."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def arrivals(trace: Trace) -> list[float]:
    """Seconds after the first request, to the microsecond."""
    return [round(float(t), 6) for t in trace.arrival_s]


def page_row(ids: list, tokens: int | None = None, **more: object) -> dict:
    """A row with page ids, of 16 tokens each unless ``tokens`` says how many in all."""
    return {"input_length": len(ids) * 16 if tokens is None else tokens, "hash_ids": ids, **more}


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
            {"t": 5.0, "type": "subagent", "requests": [{"t": 1.0, "in": 16, "out": 2, "hash_ids": [1, 7]}]},
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
SERVEGEN = "0,0,0,,0,0\n600,2.0,1.4142,Gamma,0.5,1.0\n1200,4.0,2.0,Weibull,0.7,0.2\n"
SERVEGEN_LENGTHS = {
    "0": {"input_tokens": "{7: 1.0}", "output_tokens": "{1: 1.0}"},
    "1200": {"input_tokens": "{10: 0.25, 20: 0.75}", "output_tokens": "{3: 1.0, 5: 1.0}"},
}
