"""Bodies that clients send by default are not refused. Each is what the named source builds, values shortened.

The openai client, which Locust's OpenAIUser calls too, is run against the server in test_server_openai.py.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import GenerationConfig

from engine.server.protocol import ChatBody, CompletionBody, parse
from kvbench.load.http import Address
from kvbench.load.spec import LoadSpec, http_request
from kvbench.requests.request import RequestSpec

TEXT_PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
MESSAGES = [{"role": "user", "content": "Hello"}]
USAGE = {"include_usage": True}
ALL_USAGE = {"include_usage": True, "continuous_usage_stats": True}

COMPLETIONS: dict[str, dict[str, Any]] = {
    # vllm 0.32, vllm/benchmarks/lib/endpoint_request_func.py; the sampling options of its command line
    "vllm bench serve": {
        "model": "m", "prompt": [5, 6], "repetition_penalty": 1.0, "max_tokens": 9, "logprobs": None, "stream": True,
        "stream_options": USAGE, "ignore_eos": True, "temperature": 0.0, "top_p": 0.9, "top_k": 5, "min_p": 0.0,
        "frequency_penalty": 0.0, "presence_penalty": 0.0,
    },
    # guidellm 0.8.1, guidellm/backends/openai/request_handlers.py
    "guidellm": {
        "model": "m", "stream": True, "stream_options": ALL_USAGE, "max_tokens": 9, "stop": None, "ignore_eos": True,
        "prompt": "Hello",
    },
    # aiperf 0.13.0, aiperf/endpoints/openai_completions.py, with --extra-inputs ignore_eos:true min_tokens:9
    "aiperf": {
        "prompt": "Hello", "model": "m", "stream": True, "max_tokens": 9, "stream_options": USAGE, "ignore_eos": True,
        "min_tokens": 9,
    },
    # sglang 0.5.23, sglang/benchmark/serving.py
    "sglang.bench_serving": {
        "model": "m", "prompt": "Hello", "best_of": 1, "max_tokens": 9, "stream": True, "temperature": 0.0,
        "stream_options": USAGE, "ignore_eos": True,
    },
}  # fmt: skip
CHATS: dict[str, dict[str, Any]] = {
    "vllm bench serve": {
        "model": "m", "messages": TEXT_PARTS, "max_completion_tokens": 9, "stream": True, "stream_options": USAGE,
        "ignore_eos": True,
    },
    "guidellm": {
        "model": "m", "stream": True, "stream_options": ALL_USAGE, "max_completion_tokens": 9, "stop": None,
        "ignore_eos": True, "messages": TEXT_PARTS,
    },
    "aiperf": {
        "messages": MESSAGES, "model": "m", "stream": True, "max_completion_tokens": 9, "stream_options": ALL_USAGE,
    },
    "sglang.bench_serving": {
        "model": "m", "messages": MESSAGES, "max_completion_tokens": 9, "stream": True, "temperature": 0.0,
        "stream_options": USAGE, "ignore_eos": True,
    },
    # transformers 5.23, transformers/cli/chat.py through huggingface_hub's InferenceClient, which leaves null out
    "transformers chat": {
        "messages": MESSAGES, "model": "m", "stream": True,
        "generation_config": GenerationConfig(do_sample=True, max_new_tokens=256).to_json_string(),
    },
}  # fmt: skip


@pytest.mark.parametrize("client", sorted(COMPLETIONS))
def test_completions_of_other_clients(client: str) -> None:
    body = parse(CompletionBody, json.dumps(COMPLETIONS[client]).encode())
    assert (body.token_limit, body.include_usage) == (9, True)


@pytest.mark.parametrize("client", sorted(CHATS))
def test_chats_of_other_clients(client: str) -> None:
    body = parse(ChatBody, json.dumps(CHATS[client]).encode())
    for message in body.messages:
        message.check_fields("")
        assert message.plain() == MESSAGES[0]
    assert body.token_limit == (256 if client == "transformers chat" else 9)


@pytest.mark.parametrize("answers", [{}, {"n": 2}, {"best_of": 3}, {"n": 2, "beam_width": 2}])
def test_the_load_client_of_kvbench(answers: dict[str, int]) -> None:
    base = {"base_url": "http://h:1", "model": "m", "mode": "closed", "concurrency": 1, "requests_file": "r"}
    spec = LoadSpec.model_validate({**base, "out_dir": "o", "timeout_s": 9, "send_priority": True})
    sent = http_request(spec, Address("h", 1, ""), RequestSpec(0, "a", (5, 6), None, 3, priority=2, **answers))
    body = parse(CompletionBody, sent.partition(b"\r\n\r\n")[2])
    assert (body.prompt, body.token_limit, body.priority, body.include_usage) == ([5, 6], 3, 2, True)
    assert body.width == max(answers.values(), default=1)
