"""The whole line with real tensors: HTTP, tokenizer, scheduler, kernels, a tiny model of random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvbench_engine.build import build_engine
from kvbench_engine.config import EngineConfig
from kvbench_engine.model.attention import FUSION
from kvbench_engine.server.tokenizer import load_tokenizer
from tests.support.hf_parts import SMALL
from tests.support.http_server import RunningServer, openai_client, running_server

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **SMALL,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = Path(tmp_path_factory.mktemp("model")) / "tiny-llama.json"
    path.write_text(json.dumps(MODEL))
    threads = torch.get_num_threads()
    engine = build_engine(EngineConfig(model=str(path), kv_budget=2**20, max_model_len=256, max_num_seqs=16))
    with running_server(engine, load_tokenizer(engine.config, engine.model_info)) as running:
        yield running
    torch.set_num_threads(threads)


def test_server_info_tells_what_became_of_auto(server: RunningServer) -> None:
    info = server.get("/server_info").json
    assert info["engine"]["device"] == info["engine"]["kernel_backend"] == info["engine"]["dtype"] == "auto"
    executor = server.engine.executor
    assert info["resolved"] == {
        "device": str(executor.device),
        "device_name": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "dtype": str(executor.model.lm_head.weight.dtype).removeprefix("torch."),
        "kernel_backend": "triton" if torch.cuda.is_available() else "numba",
        "cuda_graphs": torch.cuda.is_available(),
        "graph_sizes": None if (sizes := executor.forward.graph_sizes) is None else sizes.describe(),
        "fused_layers": True,
        "fused_layers_reason": str(getattr(executor.model, FUSION)),
        "num_threads": torch.get_num_threads(),
    }


def test_streamed_text_equals_the_text_at_once_and_that_of_the_prompts_ids(server: RunningServer) -> None:
    text = "Shall I compare thee"
    ids = server.post("/tokenize", {"prompt": text}).json["tokens"]
    options = {"model": "tiny-llama", "max_tokens": 40, "temperature": 0}
    with openai_client(server) as client:
        at_once = client.completions.create(prompt=text, **options)
        chunks = list(client.completions.create(prompt=ids, **options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == at_once.choices[0].text != ""
    assert len(chunks) == at_once.usage.completion_tokens and at_once.usage.prompt_tokens == len(ids)
