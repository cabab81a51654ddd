"""A server that runs already: what it tells of its model is read, and what it does not tell is asked for at once."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.requests.request import RequestSpec
from kvbench.targets.model_export import shipped_tokenizer
from kvbench.targets.presets import GENERIC, PRESETS
from kvbench.targets.running import OpenAITarget
from kvbench.workload.request_form import RequestForm
from tests.support.scripted_http import scripted_server


def row(**more):
    models = {"data": [{"id": "m", "owned_by": "someone", **more}]}
    return {"/v1/models": (200, models), "/v1/completions": (200, {})}


@contextlib.contextmanager
def started(answers, preset=GENERIC, **given):
    """A target that has started on a server with these answers, and the server."""
    with scripted_server({"/health": (200, {})} | answers) as server:
        target = OpenAITarget(server.url, preset=preset, **given)
        target.start({}, Path())
        yield target, server


def sizes(answers, preset=GENERIC, **given):
    """Vocabulary and longest sequence of a target."""
    with started(answers, preset, **given) as (target, _):
        return target.model.vocab_size, target.model.max_model_len


LLAMA = {"n_vocab": 8192, "n_ctx_train": 4096}
OLD_PROPS = {"/props": (200, {"default_generation_settings": {"n_ctx": 512}})}


@pytest.mark.parametrize(
    ("answers", "given", "found"),
    [
        (row(meta=LLAMA | {"n_ctx": 2048}), {}, (8192, 2048)),  # a slot may hold less than the model was trained for
        (row(meta=LLAMA) | OLD_PROPS, {}, (8192, 512)),
        (row(meta=LLAMA), {}, (8192, 4096)),
        (row(meta=LLAMA | {"n_ctx": 2048}), {"vocab_size": 100, "max_model_len": 300}, (100, 300)),
        (row(max_model_len=900), {"vocab_size": 5}, (5, 900)),
        (row(max_model_len=900, vocab_size=70), {}, (70, 900)),
        (row(meta="text", max_model_len=None), {"vocab_size": 5, "max_model_len": 7}, (5, 7)),
    ],
)
def test_sizes_are_read_where_the_server_tells_them(answers, given, found):
    assert sizes(answers, **given) == found


@pytest.mark.parametrize(
    ("answers", "preset", "given", "found", "options"),
    [
        (row(), "vllm", {}, (8192, None), {"--vocab-size", "--max-model-len", "--tokenizer"}),
        (row(max_model_len=900), "vllm", {}, (8192, 900), {"--vocab-size", "--tokenizer"}),
        (row(), "vllm", {"vocab_size": 5}, (5, None), {"--max-model-len"}),
        ({}, "transformers", {"model": "m"}, (8192, None), {"--max-model-len", "--tokenizer"}),  # it takes texts
    ],
)
def test_what_is_not_told_is_done_without_and_the_options_that_tell_it_are_named(
    answers, preset, given, found, options
):
    with started(answers, PRESETS[preset], **given) as (target, _):
        assert (target.model.vocab_size, target.model.max_model_len) == found
    assert target.model.most_tokens == (found[1] or target.model.most_tokens) > 800
    assert {word for note in target.notes for word in note.split() if word.startswith("--")} == options
    assert target.dialect.token_id_prompts == ("vocab_size" in given)


def test_a_server_that_lists_no_models_needs_the_name_of_one():
    with pytest.raises(UsageError, match="give --model NAME"):
        sizes({}, PRESETS["transformers"])
    with pytest.raises(UsageError, match="give --model NAME"):
        sizes({"/v1/completions": (200, {})})
    assert sizes({"/v1/completions": (200, {})}, model="m", vocab_size=7) == (7, None)


@pytest.mark.parametrize("given", [{"vocab_size": 8193}, {"max_model_len": 2049}])
def test_more_than_the_server_has_is_refused(given):
    (value,) = given.values()
    with pytest.raises(UsageError, match=rf"{value} is more than the {value - 1} "):
        sizes(row(meta=LLAMA | {"n_ctx": 2048}), **given)


FINE = row(max_model_len=900, meta=LLAMA)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (FINE | {"/server_info": (200, {"engine": 5})}, "engine: 5 is not a mapping"),
        (FINE | {"/server_info": (200, {"model": {"vocab_size": 10**400}})}, "model.vocab_size"),
        (FINE | {"/server_info": (200, {"capacity": {"kv_bytes": []}})}, "capacity.kv_bytes: []"),
        (FINE | {"/server_info": (200, {"capacity": {"kv_bytes": -0.5}})}, "capacity.kv_bytes: -0.5"),
        (FINE | {"/server_info": (200, {"engine": {"max_num_seqs": "many"}})}, "engine.max_num_seqs: 'many'"),
        (FINE | {"/server_info": (200, {"engine": {"max_num_seqs": 3.5}})}, "engine.max_num_seqs: 3.5"),
        (FINE | {"/server_info": (200, {"engine": {"enable_prefix_caching": "no"}})}, "enable_prefix_caching: 'no'"),
        (FINE | {"/server_info": (200, {"server": {"notes": "none"}})}, "server.notes: 'none'"),
        ({"/v1/models": (200, {"data": [{"id": "m\ud800"}]})}, "lists no models"),
        ({"/v1/models": (200, {"data": [{"id": "\x1b[2J"}]})}, "can be printed"),
        ({"/v1/models": (200, {"data": [{"id": 5}]})}, "data.0.id: 5 is not a string"),
        ({"/v1/models": (200, {"data": [{"id": ""}]})}, "data.0.id"),
        ({"/v1/models": (200, {"data": {}})}, "data: {} is not a list"),
        ({"/v1/models": (200, "[" * 100_000)}, "lists no models"),
    ],
)
def test_what_cannot_be_true_is_refused_by_name(answers, words):
    with pytest.raises(UsageError) as error:
        sizes(answers)
    assert words in str(error.value) and len(str(error.value)) < 1100


@pytest.mark.parametrize("size", [-1, 0, None])
def test_sizes_below_one_are_as_if_they_were_not_told(size):
    info = {"engine": {"max_num_seqs": size, "page_size": size}, "model": {"vocab_size": size}, "more": size}
    with started(FINE | {"/server_info": (200, info)}) as (target, _):
        checked = target.server_info()
        assert target.model.vocab_size == 8192 and checked.more == size
        assert [checked.engine.max_num_seqs, checked.engine.page_size] == [None, None]
    for told in ({"max_model_len": size}, {"max_model_len": True, "meta": {"n_vocab": 2**40}}):
        assert sizes(row(**told)) == (8192, None)


def test_metrics_that_cannot_be_printed_are_refused_in_words_that_can():
    with scripted_server({"/metrics": (200, "\0\x1b[2J 1\n")}) as server:
        target = OpenAITarget(server.url)
        with pytest.raises(MeasurementError, match="/metrics cannot be read") as error:
            target.metrics()
    assert str(error.value).isprintable()


USAGE = 'data: {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}\n\n'
TOKEN = 'data: {"choices": [{"index": 0, "text": " x", "finish_reason": "length"}]}\n\n'
STREAM, UNCOUNTED = (200, TOKEN + USAGE + "data: [DONE]\n\n"), (200, TOKEN + "data: [DONE]\n\n")
SAID = (200, 'data: {"error": {"message": "no such model here"}}\n\ndata: [DONE]\n\n')
TYPED = {
    "responses": [
        {"type": "response.output_text.delta", "delta": "x"},
        {"type": "response.completed", "response": {"usage": {"input_tokens": 2, "output_tokens": 1}}},
    ],
    "messages": [
        {"type": "message_start", "message": {"usage": {"input_tokens": 2, "output_tokens": 1}}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ],
}
REFUSED, GONE = (400, {"error": "no"}), (404, {"detail": "Not Found"})
API = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "responses": "/v1/responses"}
API |= {"messages": "/v1/messages"}


def taking(*wanted, api=None):
    """An answer that refuses bodies in which one of ``wanted`` is missing, or there where it begins with a dash.

    OpenAI's Responses take no fewer than 16 tokens.
    """
    typed = (200, "".join(f"data: {json.dumps(event)}\n\n" for event in TYPED.get(api, ())))
    stream = STREAM if api is None else typed

    def answer(body):
        fields = body.keys() | ({"ids"} if isinstance(body.get("prompt"), list) else set())
        fits = all((name[1:] not in fields) if name[0] == "-" else name in fields for name in wanted)
        return stream if fits and body.get("max_output_tokens", 16) >= 16 else (400, {"error": "no"})

    return answer


@pytest.mark.parametrize(
    ("answers", "given", "endpoint", "lacks"),
    [
        ({"completions": taking()}, {}, "completions", set()),
        ({"completions": taking("-ids")}, {}, "completions", {"token_id_prompts"}),
        ({"completions": taking("-ids", "-ignore_eos")}, {}, "completions", {"token_id_prompts", "ignore_eos"}),
        ({"completions": taking("ids", "-ignore_eos")}, {}, "completions", {"ignore_eos"}),
        ({"completions": GONE, "chat": taking("messages", "ignore_eos")}, {}, "chat", {"token_id_prompts"}),
        ({"completions": REFUSED, "chat": taking("max_tokens", "-return_token_ids")}, {}, "chat",
         {"token_id_prompts", "ignore_eos"}),
        ({"chat": taking("max_completion_tokens", "-max_tokens")}, {}, "chat", {"token_id_prompts", "ignore_eos"}),
        ({"responses": taking("input", "max_output_tokens", "-ignore_eos", api="responses")}, {}, "responses",
         {"token_id_prompts", "ignore_eos"}),
        ({"responses": GONE, "messages": taking("max_tokens", "-ignore_eos", api="messages")}, {}, "messages",
         {"token_id_prompts", "ignore_eos"}),
        ({"completions": taking(), "chat": taking()}, {"endpoint": "chat"}, "chat", {"token_id_prompts"}),
        ({"completions": (500, "down"), "chat": taking()}, {}, "completions", set()),  # for the warm-up to tell
        ({"completions": (401, "who?"), "chat": taking()}, {}, "completions", set()),
        ({"completions": GONE, "chat": (429, "slowly")}, {}, "chat", {"token_id_prompts"}),  # it is there, and busy
        ({"completions": SAID, "chat": taking()}, {}, "chat", {"token_id_prompts"}),  # an error told with 200
        ({"completions": UNCOUNTED, "chat": taking()}, {}, "chat", {"token_id_prompts"}),  # nothing tells its tokens
        ({"responses": taking("input", "-store", api="responses")}, {}, "responses",
         {"token_id_prompts", "ignore_eos"}),
        ({"chat": taking("max_completion_tokens", "-temperature")}, {}, "chat",
         {"token_id_prompts", "ignore_eos", "temperature"}),
        ({"completions": (200, TOKEN + USAGE)}, {}, "completions", {"done_marker"}),
    ],
)  # fmt: skip
def test_a_server_of_no_known_kind_is_asked_what_it_takes(answers, given, endpoint, lacks):
    found = row(max_model_len=900)
    del found["/v1/completions"]
    found |= {API[name]: answer for name, answer in answers.items()}
    with started(found, vocab_size=50, form=RequestForm(**given)) as (target, _):
        (request,) = target.as_sent([RequestSpec(0, "a", (7, 8, 9), None, 4)])
    assert target.dialect.endpoint == endpoint
    switches = ("token_id_prompts", "ignore_eos", "temperature", "done_marker")
    assert {name for name in switches if not getattr(target.dialect, name)} == lacks
    assert (request.prompt is None) == ("token_id_prompts" not in lacks)
    assert any("--tokenizer DIR" in note for note in target.notes) == (request.prompt is not None)
    assert len((request.prompt or "a b c").split()) == 3
    assert any(f"requests go to {API[endpoint]}" in note for note in target.notes) == (
        endpoint != given.get("endpoint", "completions")
    )
    assert target.ends_answers == ("ignore_eos" in lacks)


@pytest.mark.parametrize("given", [{}, {"endpoint": "chat"}])
def test_a_server_that_takes_no_request_at_all_is_refused_with_what_it_answered(given):
    answers = row(max_model_len=900) | {"/v1/completions": REFUSED, "/v1/chat/completions": (422, {"error": "never"})}
    with pytest.raises(UsageError, match='422 "never"') as error:
        sizes(answers, form=RequestForm(**given))
    assert str(error.value).count("answered") == (1 if given else 4)
    with pytest.raises(UsageError, match=r"/v1/completions answered 200 .*no usage"):
        sizes(row(max_model_len=900) | {"/v1/completions": UNCOUNTED})


def test_a_server_of_a_known_kind_is_taken_at_its_word():
    answers = row(max_model_len=900) | {"/v1/completions": REFUSED}
    with started(answers, PRESETS["vllm"], vocab_size=50) as (target, server):
        assert target.dialect.token_id_prompts and not target.notes
        assert "/v1/completions" not in [path for _, path, *_ in server.asked]


@pytest.mark.parametrize(
    ("tokenizer", "info", "exact"),
    [(None, {}, False), (shipped_tokenizer(), {}, True), (None, {"tokenizer": {"name": "bpe8k"}}, True)],
)
def test_texts_are_exact_where_the_servers_tokenizer_is_known(tokenizer, info, exact):
    def tokenize(body):
        return 200, {"count": 6 if "messages" in body else 1}

    answers = row(max_model_len=900) | {"/v1/completions": GONE, "/v1/chat/completions": STREAM, "/tokenize": tokenize}
    with started(answers | {"/server_info": (200, info)}, tokenizer=tokenizer) as (target, _):
        notes = target.as_sent([RequestSpec(0, "a", (7, 8, 9), None, 4)]).notes
    own = {"exact_texts": exact, "template_tokens": 5, "endpoint": "/v1/chat/completions"}
    assert notes == {"sent_as": "messages", **own}
    assert any("--tokenizer DIR" in note for note in target.notes) == (not exact)


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [({"prompt_tokens": 7}, 6), ({"input_tokens": 3, "cache_read_input_tokens": 4}, 6), ({}, None), (None, None)],
)
def test_the_template_is_known_by_the_usage_of_a_single_token_where_nothing_counts_messages(usage, tokens):
    def chat(body):
        assert body["stream"] or body["max_tokens"] == 1
        return STREAM if body["stream"] else (200, {"choices": [{}], "usage": usage})

    answers = row(max_model_len=900) | {"/v1/completions": GONE, "/v1/chat/completions": chat}
    for tokenizer, known in ((shipped_tokenizer(), tokens), (None, None)):  # None: texts are only about right
        with started(answers, tokenizer=tokenizer) as (target, _):
            assert target.template_tokens == known


def test_texts_take_any_vocabulary_that_is_given():
    answers = row(max_model_len=900) | {"/v1/completions": taking("-ids")}
    assert sizes(answers) == (8192, 900) and sizes(answers, vocab_size=50000) == (50000, 900)
