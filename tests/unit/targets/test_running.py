"""A server that runs already: the calls around a load, to servers that answer each in its own way."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.load.spec import LoadSpec
from kvbench.measure import server_state
from kvbench.requests.request import RequestSpec
from kvbench.targets.base import Access
from kvbench.targets.presets import GENERIC, PRESETS
from kvbench.targets.prompt_texts import ids_as_words
from kvbench.targets.running import OpenAITarget
from tests.support.scripted_http import scripted_server

MODELS = {"/v1/models": (200, {"data": [{"id": "m", "max_model_len": 256}]})}
HEALTH = {"/health": (200, {})}


@contextlib.contextmanager
def started(answers, preset=None, **options):
    """A target that has started, and its server."""
    with scripted_server(MODELS | answers) as server:
        kind = PRESETS[preset] if preset else GENERIC
        target = OpenAITarget(server.url, **{"vocab_size": 512, "max_model_len": 256} | options, preset=kind)
        target.start({}, None)
        yield target, server
        target.stop()


def posted(server):
    return [path for method, path, *_ in server.asked if method == "POST"]


@pytest.mark.parametrize(
    ("preset", "answers", "expected"),
    [
        ("vllm", {"/reset_prefix_cache": (200, {"success": True})}, True),
        ("vllm", {"/reset_prefix_cache": (200, {"success": False})}, False),  # blocks are still held
        ("vllm", {"/reset_prefix_cache": (200, "")}, True),  # before 0.11
        ("vllm", {}, None),  # not in dev mode
        ("sglang", {"/flush_cache": (200, "Cache flushed.")}, True),
        ("sglang", {"/flush_cache": (400, "pending requests")}, False),
        ("llamacpp", {"/slots": (200, [{"id": 0}, {"id": 1}]), "/slots/0?action=erase": (200, {"n_erased": 5}),
                      "/slots/1?action=erase": (200, {"n_erased": 0})}, True),
        ("llamacpp", {"/slots": (200, [{"id": 0}]), "/slots/0?action=erase": (501, {"error": "disabled"})}, None),
        ("llamacpp", {}, None),
        ("tgi", {"/reset_prefix_cache": (200, "")}, None),
        (None, {"/reset_prefix_cache": (409, "busy")}, False),
        ("sglang", {"/flush_cache": (500, "oops")}, MeasurementError),  # an error is no unknown state
    ],
)  # fmt: skip
def test_the_prefix_cache_is_emptied_as_each_server_has_it(preset, answers, expected):
    with started(answers, preset) as (target, server):
        if expected is MeasurementError:
            with pytest.raises(MeasurementError, match="/flush_cache answered 500"):
                target.reset_prefix_cache()
        else:
            assert target.reset_prefix_cache() is expected
            assert set(posted(server)) >= {path for path in answers if "erase" in path}  # every slot


def load(state="cold"):
    return SimpleNamespace(cache_state=state, timeout_s=5.0)


def test_an_own_server_is_cold_before_its_first_load_only():
    with started({}) as (target, _):
        for own, state, first, reasons in (
            (True, "cold", True, 0), (True, "cold", False, 1),
            (False, "cold", True, 1), (False, "steady", True, 0),  # it ran before we came
        ):  # fmt: skip
            target.starts_cold = own
            found = server_state.prepare_cache(target, load(state), [], first=first)
            assert len(found) == reasons and all("has no way to empty it" in reason for reason in found)


@pytest.mark.parametrize("first", [True, False])
def test_steady_leaves_a_cache_as_it_is_found(first):
    with started({"/reset_prefix_cache": (200, {})}, "vllm") as (target, server):
        for state, posts in (("steady", []), ("cold", ["/reset_prefix_cache"])):
            assert server_state.prepare_cache(target, load(state), [], first=first) == []
            assert posted(server) == posts


@pytest.mark.parametrize(
    ("preset", "answers", "version"),
    [
        ("vllm", {"/version": (200, {"version": "0.32.0"})}, "0.32.0"),
        ("sglang", {"/server_info": (200, {"version": "0.5.9", "tp_size": 1})}, "0.5.9"),
        ("tgi", {"/info": (200, {"version": "3.3.4", "model_dtype": "float16"})}, "3.3.4"),
        ("llamacpp", {"/props": (200, {"build_info": "b6800-abc"})}, "b6800-abc"),
        ("vllm", {}, None),
    ],
)
def test_each_servers_version_is_read_where_it_has_it(preset, answers, version):
    with started(answers, preset) as (target, _):
        assert target.version() == version
        info = target.server_info()
        assert info["versions"] == ({preset: version} if version else {})
        assert info["server"]["title"] == PRESETS[preset].title


def test_the_load_client_gets_dialect_key_and_tls_and_nothing_else(monkeypatch):
    monkeypatch.setenv("KEY_OF_THE_TEST", "secret")
    with started({}) as (plain, _):
        assert plain.client_fields() == {}
    access = Access("KEY_OF_THE_TEST", tls_verify=False, tls_ca_file="ca.pem")
    with started(HEALTH, "transformers", model="m", access=Access("KEY_OF_THE_TEST")) as (target, server):
        fields = target.client_fields() | access.fields()
        assert fields["api_key_env"] == "KEY_OF_THE_TEST" and "secret" not in str(fields)
        assert fields["tls_verify"] is False and fields["tls_ca_file"] == "ca.pem"
        spec = LoadSpec(base_url=server.url, model="m", mode="closed", concurrency=1, requests_file="", out_dir="",
                        timeout_s=1.0, **fields)  # fmt: skip
        assert spec.dialect == PRESETS["transformers"].dialect
        target.json_at("/v1/models")
        assert server.asked[-1][2]["Authorization"] == "Bearer secret"
    monkeypatch.delenv("KEY_OF_THE_TEST")
    with pytest.raises(UsageError, match="KEY_OF_THE_TEST: this variable holds no key"):
        OpenAITarget("http://127.0.0.1:1", access=Access("KEY_OF_THE_TEST"))


def test_a_server_that_lists_no_models_needs_the_name():
    with pytest.raises(UsageError, match="give --model NAME"), started(HEALTH, "transformers"):
        pass
    with started(HEALTH, "transformers", model="/m") as (target, _):
        assert target.model.name == "/m"


REQUESTS = [RequestSpec(0, "a", (17, 4, 300), None, 5, prefix_tokens=2), RequestSpec(1, "a", (1,), "as it is", 5)]


def test_ids_become_texts_for_a_server_that_takes_no_ids():
    answers = {"/v1/completions": (200, {"choices": [{}]})}
    with started(answers, "tgi") as (target, server):
        with pytest.raises(MeasurementError, match="no tokenizer to make texts of them"):
            target.as_sent(REQUESTS)
        target._text_of_ids = ids_as_words
        sent = target.as_sent(REQUESTS)
        assert sent.notes["sent_as"] == "text" and sent[1].prompt == "as it is"
        assert (sent[0].prompt, sent[0].prompt_token_ids, sent[0].prefix_tokens) == ("17 4 300", (17, 4, 300), 2)
        target.complete([5, 6], 1, 5.0)
        assert server.asked[-1][3]["prompt"] == "5 6"
    with started({}) as (target, _):
        assert target.as_sent(REQUESTS) is REQUESTS
