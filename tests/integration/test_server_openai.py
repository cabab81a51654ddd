"""The official client of OpenAI against our server, streaming and not, and what it makes of our refusals."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.fake_engine import fake_engine, saying
from tests.support.http_server import RunningServer, openai_client, running_server, shipped_tokenizer

LINE = "Shall I compare thee to a summer's day?"


def reciting() -> tuple[int, ...]:
    return tuple(shipped_tokenizer().encode(LINE))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Says LINE and then the end-of-text token."""
    with running_server(fake_engine(saying(*reciting(), 0))) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai_client(server) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError, match="other"):
        client.models.retrieve("other")


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="A line:", max_tokens=100)
    assert answer.choices[0].text == LINE
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(reciting()) + 1  # the end-of-text token is counted, not shown
    assert answer.usage.prompt_tokens == len(shipped_tokenizer().encode("A line:"))
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_streamed_completion_has_one_chunk_a_token(client: openai.OpenAI) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": {"return_token_ids": True}}
    chunks = list(client.completions.create(model="fake", prompt=[5, 6, 7], max_tokens=100, **options))
    assert [chunk.choices[0].token_ids for chunk in chunks[:-1]] == [[i] for i in (*reciting(), 0)]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == LINE
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * len(reciting()) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == 3
    assert chunks[-1].usage.completion_tokens == len(chunks) - 1
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_chat(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Recite."}, {"role": "user", "content": [{"type": "text", "text": "Go"}]}]
    answer = client.chat.completions.create(model="fake", messages=messages, n=2)
    assert [choice.message.content for choice in answer.choices] == [LINE, LINE]
    expected = shipped_tokenizer().encode("<|system|>Recite.<|user|>Go<|assistant|>")
    assert answer.usage.prompt_tokens == len(expected)  # a prompt counts once, however many choices
    assert answer.usage.completion_tokens == 2 * (len(reciting()) + 1)


@pytest.mark.parametrize("prompt", [["one", "two", "three"], [[5], [6, 7], [8]]])
def test_several_prompts_give_choices_in_order(client: openai.OpenAI, prompt: list) -> None:
    answer = client.completions.create(model="fake", prompt=prompt, max_tokens=3, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert {choice.text for choice in answer.choices} == {shipped_tokenizer().decode(reciting()[:3])}
    assert answer.usage.completion_tokens == 18


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_ends_the_text(server: RunningServer, client: openai.OpenAI, stream: bool) -> None:
    before = server.metrics()
    options = {"max_tokens": 100, "stop": ["never", "pare th"], "stream": stream}
    answer = client.completions.create(model="fake", prompt="x", **options)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == LINE[: LINE.index("pare th")]
    assert choices[-1].finish_reason == "stop"
    assert choices[-1].stop_reason == "pare th"
    after = server.wait_for(kv_pages_owned=0, num_requests_running=0)
    stopped = "request_success_total{finished_reason=stop}"
    assert after[stopped] - before[stopped] == 1
    assert server.engine.stats().finished.get("abort", 0) == 0


def test_stop_token_ids_and_ignore_eos(client: openai.OpenAI) -> None:
    third = reciting()[2]
    answer = client.completions.create(model="fake", prompt="x", max_tokens=100, extra_body={"stop_token_ids": [third]})
    assert answer.choices[0].text == shipped_tokenizer().decode(reciting()[:2])
    assert answer.choices[0].stop_reason == third
    length = len(reciting()) + 9
    answer = client.completions.create(model="fake", prompt="x", max_tokens=length, extra_body={"ignore_eos": True})
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", length)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_first(client: openai.OpenAI, stream: bool) -> None:
    options = {"prompt": ["One: ", "Two: "], "max_tokens": 100, "echo": True, "stream": stream}
    answer = client.completions.create(model="fake", **options)
    texts = {0: "", 1: ""}
    for choice in [chunk.choices[0] for chunk in answer] if stream else answer.choices:
        texts[choice.index] += choice.text
    assert texts == {0: "One: " + LINE, 1: "Two: " + LINE}


@pytest.mark.parametrize(
    ("options", "kind", "code", "numbers"),
    [
        ({"model": "gpt"}, openai.NotFoundError, "model_not_found", "gpt"),
        ({"prompt": []}, openai.BadRequestError, "empty_prompt", "empty"),
        ({"prompt": [[1], []]}, openai.BadRequestError, "empty_prompt", "empty"),
        ({"prompt": [1, 9000]}, openai.BadRequestError, "invalid_token_id", "9000"),
        ({"prompt": [-1]}, openai.BadRequestError, "invalid_token_id", "-1"),
        ({"prompt": [5] * 1024}, openai.BadRequestError, "context_length_exceeded", "1024"),
        ({"prompt": [5] * 1000, "max_tokens": 50}, openai.BadRequestError, "context_length_exceeded", "1050.*1024.*24"),
        ({"logprobs": 5}, openai.BadRequestError, "unsupported", "logprobs"),
        ({"extra_body": {"temprature": 0}}, openai.UnprocessableEntityError, "unknown_field", "'temperature'"),
        ({"prompt": [[5]] * 100, "n": 16}, openai.UnprocessableEntityError, "too_many_choices", "100.*16.*1024"),
    ],
)
def test_refusals_become_the_clients_exceptions(
    client: openai.OpenAI, options: dict, kind: type[openai.APIStatusError], code: str, numbers: str
) -> None:
    with pytest.raises(kind, match=numbers) as caught:
        client.completions.create(**{"model": "fake", "prompt": "x", "max_tokens": 4, **options})
    assert caught.value.code == code


def test_default_max_tokens_never_overruns_the_limit(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=[5] * 1020)
    assert answer.usage.total_tokens == 1024
    answer = client.completions.create(model="fake", prompt=[5] * 10, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_an_engine_error_reaches_the_client_in_both_ways() -> None:
    engine = fake_engine(step_s=0.01)
    with running_server(engine) as server:
        with openai_client(server) as client:
            stream = client.completions.create(model="fake", prompt=[5], max_tokens=900, stream=True)
            next(stream)
            engine.executor.fail = RuntimeError("out of memory")
            with pytest.raises(openai.APIError, match="out of memory"):
                list(stream)
            with pytest.raises(openai.InternalServerError, match="out of memory"):
                client.completions.create(model="fake", prompt=[5], max_tokens=9)
            engine.executor.fail = None
            assert client.completions.create(model="fake", prompt=[5], max_tokens=9).usage.completion_tokens == 9
        metrics = server.wait_for(kv_pages_owned=0)
        assert metrics["request_failure_total{kind=engine_error}"] == 2
