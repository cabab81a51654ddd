"""Bodies that other clients send by default are not refused.

The fields are those that the named sources send, each by its default or by an option of their command lines. The
openai client, which Locust's OpenAIUser calls too, is run against the server in test_server_openai.py.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import GenerationConfig

from kvbench.load.http import Address
from kvbench.load.spec import LoadSpec, http_request
from kvbench.requests.request import RequestSpec
from kvbench_engine.server.protocol import ChatBody, CompletionBody, parse

MESSAGES = [{"role": "user", "content": "Hello"}]
STREAMED: dict[str, Any] = {
    "model": "m", "stream": True, "ignore_eos": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}  # fmt: skip
# vllm 0.32, vllm/benchmarks/lib/endpoint_request_func.py; guidellm 0.8.1, guidellm/backends/openai/request_handlers.py;
# aiperf 0.13.0, aiperf/endpoints/openai_completions.py; sglang 0.5.23, sglang/benchmark/serving.py
COMPLETION = STREAMED | {
    "prompt": [5, 6], "max_tokens": 9, "min_tokens": 9, "logprobs": None, "stop": None, "best_of": 1,
    "temperature": 0.0, "top_p": 0.9, "top_k": 5, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}  # fmt: skip
CHATS = {
    "benchmarks": STREAMED | {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], "max_completion_tokens": 9,
        "stop": None, "temperature": 0.0,
    },
    # transformers 5.23, transformers/cli/chat.py through huggingface_hub's InferenceClient, which leaves null out
    "transformers chat": {
        "messages": MESSAGES, "model": "m", "stream": True,
        "generation_config": GenerationConfig(do_sample=True, max_new_tokens=9).to_json_string(),
    },
}  # fmt: skip


def test_completions_of_other_clients() -> None:
    body = parse(CompletionBody, json.dumps(COMPLETION).encode())
    assert (body.token_limit, body.include_usage) == (9, True)


@pytest.mark.parametrize("client", CHATS)
def test_chats_of_other_clients(client: str) -> None:
    body = parse(ChatBody, json.dumps(CHATS[client]).encode())
    for message in body.messages:
        message.check_fields("")
        assert message.plain() == MESSAGES[0]
    assert body.token_limit == 9


@pytest.mark.parametrize("answers", [{}, {"n": 2}, {"best_of": 3}, {"n": 2, "beam_width": 2}])
def test_the_load_client_of_kvbench(answers: dict[str, int]) -> None:
    base = {"base_url": "http://h:1", "model": "m", "mode": "closed", "concurrency": 1, "requests_file": "r"}
    spec = LoadSpec.model_validate({**base, "out_dir": "o", "timeout_s": 9, "send_priority": True})
    sent = http_request(spec, Address("h", 1, ""), RequestSpec(0, "a", (5, 6), None, 3, priority=2, **answers))
    body = parse(CompletionBody, sent.partition(b"\r\n\r\n")[2])
    assert (body.prompt, body.token_limit, body.priority, body.include_usage) == ([5, 6], 3, 2, True)
    assert body.width == max(answers.values(), default=1)
