"""The whole line with real tensors: HTTP, tokenizer, scheduler, kernels, a tiny model of random weights."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers

from engine.build import build_engine
from engine.config import EngineConfig
from engine.model.loader import load_model
from engine.server.tokenizer import load_tokenizer
from tests.support.hf_parts import SMALL
from tests.support.http_server import RunningServer, running_server

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **SMALL,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SLOT_BYTES = 2 * 2 * (16 + 16) * 4


@pytest.fixture(scope="module", params=["paged", "contiguous"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A pool of some 600 slots, so that ten requests of 100 tokens do not fit at once."""
    path = Path(tmp_path_factory.mktemp("model")) / "tiny-llama.json"
    path.write_text(json.dumps(MODEL))
    threads = torch.get_num_threads()
    config = EngineConfig(
        model=str(path),
        layout=request.param,
        enable_prefix_caching=request.param == "paged",
        kv_budget=600 * SLOT_BYTES + 64 * 1024,
        max_model_len=256,
        max_num_seqs=16,
        max_num_batched_tokens=64,
    )
    engine = build_engine(config)
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
        "num_threads": torch.get_num_threads(),
    }


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_streamed_text_equals_the_text_at_once(client: openai.OpenAI) -> None:
    options = {"model": "tiny-llama", "prompt": "Shall I compare thee", "max_tokens": 40, "temperature": 0}
    at_once = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == at_once.choices[0].text
    assert len(chunks) == at_once.usage.completion_tokens
    assert at_once.choices[0].text


def test_text_and_ids_are_the_same_prompt(server: RunningServer, client: openai.OpenAI) -> None:
    text = "Rough winds do shake the darling buds of May"
    ids = server.post("/tokenize", {"prompt": text}).json["tokens"]
    both = [client.completions.create(model="tiny-llama", prompt=p, max_tokens=20, temperature=0) for p in (text, ids)]
    assert both[0].choices[0].text == both[1].choices[0].text
    assert both[0].usage.prompt_tokens == both[1].usage.prompt_tokens == len(ids)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny-llama", messages=[{"role": "user", "content": "Go"}], max_tokens=8, temperature=0
    )
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 8


def test_a_seed_gives_the_same_choices_again_and_choices_differ(client: openai.OpenAI) -> None:
    options = {"model": "tiny-llama", "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 1.0}
    texts = [[choice.text for choice in client.completions.create(**options, n=3, seed=11).choices] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3
    second = client.completions.create(**options, seed=12)
    assert second.choices[0].text == texts[0][1]  # choice i has seed + i


@pytest.fixture
def reference(server: RunningServer) -> transformers.PreTrainedModel:
    """The server's weights in transformers' own hands, with its own attention."""
    ours = load_model(server.engine.config).model  # once more: the engine's own has its weights packed
    config = copy.deepcopy(ours.config)  # from_config writes the attention into what it is given
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.load_state_dict({name: tensor.cpu() for name, tensor in ours.state_dict().items()})
    return model.float()


PROMPT = [5, 60, 700, 8000, 9, 10, 11, 120, 130, 140, 15, 16, 17, 18, 19, 20, 21]


def ask_ids(server: RunningServer, **fields: Any) -> list[list[int]]:
    body = {"prompt": PROMPT, "max_tokens": 12, "return_token_ids": True, **fields}
    reply = server.post("/v1/completions", body)
    assert reply.status == 200, reply.body
    return [choice["token_ids"] for choice in reply.json["choices"]]


@pytest.mark.parametrize(
    ("width", "n", "length_penalty", "early_stopping"),
    [(2, 1, 1.0, False), (4, 4, 1.0, True), (5, 3, 0.0, "never"), (3, 2, 2.0, False)],
)
def test_beams_are_those_of_transformers(
    server: RunningServer,
    reference: transformers.PreTrainedModel,
    width: int,
    n: int,
    length_penalty: float,
    early_stopping: bool | str,
) -> None:
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    with torch.inference_mode():
        rows = reference.generate(
            torch.tensor([PROMPT]), max_new_tokens=12, num_beams=width, num_return_sequences=n, do_sample=False,
            pad_token_id=1, **options
        )  # fmt: skip
    expected = [[token for token in row[len(PROMPT) :] if token != 1] for row in rows.tolist()]
    assert ask_ids(server, use_beam_search=True, best_of=width, n=n, **options) == expected
    server.wait_for(kv_pages_owned=0, num_requests_running=0)


def test_best_of_returns_those_whose_tokens_are_the_most_likely(
    server: RunningServer, reference: transformers.PreTrainedModel
) -> None:
    candidates = ask_ids(server, n=5, seed=7, temperature=1.5, ignore_eos=True)
    assert len(set(map(tuple, candidates))) == 5
    with torch.inference_mode():
        rows = torch.tensor([PROMPT + tokens for tokens in candidates])
        logprobs = torch.log_softmax(reference(rows).logits[:, len(PROMPT) - 1 : -1], dim=-1)
    means = logprobs.gather(2, torch.tensor(candidates)[..., None])[..., 0].mean(dim=1)
    best = [candidates[i] for i in means.argsort(descending=True).tolist()]
    assert best != candidates
    for n in (1, 3):
        assert ask_ids(server, n=n, best_of=5, seed=7, temperature=1.5, ignore_eos=True) == best[:n]


def test_many_at_once_in_a_small_pool_get_what_each_gets_alone(server: RunningServer) -> None:
    prompts = [[(3 * i + k) % 8000 + 10 for k in range(20 + 9 * i)] for i in range(10)]

    async def tokens_of(client: openai.AsyncOpenAI, prompt: list[int]) -> list[int]:
        answer = await client.completions.create(
            model="tiny-llama",
            prompt=prompt,
            max_tokens=60,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        return answer.choices[0].token_ids

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=60) as client:
            alone = [await tokens_of(client, prompt) for prompt in prompts]
            together = await asyncio.gather(*[tokens_of(client, prompt) for prompt in prompts])
            assert together == alone
            # which cached pages the ten left each other depends on their order of arrival; of one twice it does not
            assert [await tokens_of(client, prompts[-1]) for _ in range(2)] == [alone[-1]] * 2
            assert all(len(tokens) == 60 for tokens in alone)

    asyncio.run(main())
    metrics = server.wait_for(kv_pages_owned=0, num_requests_running=0, num_requests_waiting=0)
    if server.engine.config.layout == "paged":
        assert metrics["prefix_cache_hits_total"] > 0


def test_a_client_that_leaves_gives_its_pages_back(server: RunningServer) -> None:
    sock = server.open_request({"prompt": [5] * 100, "max_tokens": 150, "stream": True, "ignore_eos": True})
    assert sock.recv(1) == b"H"
    sock.close()
    server.wait_for(kv_pages_owned=0, num_requests_running=0)


def test_the_numbers_of_a_refusal(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"300.*256") as caught:
        client.completions.create(model="tiny-llama", prompt=[5] * 300)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=r"8192.*8191"):
        client.completions.create(model="tiny-llama", prompt=[8192])
