"""A server under test: its HTTP calls end in time and bytes, failures say why without the key, and each kind of server
is called in its own way; what it says of itself is compared with its configuration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import re
import shutil
import ssl
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbench.calibration.mock.process import self_signed
from kvbench.cli.main import main
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.load.spec import LoadSpec
from kvbench.measure import server_state
from kvbench.requests.request import RequestSpec
from kvbench.runs.results import Capacity
from kvbench.runs.server_info import ServerInfo
from kvbench.targets import base
from kvbench.targets.base import Access, ModelFacts, Target, contradiction
from kvbench.targets.builtin import BuiltinTarget, check_configuration
from kvbench.targets.launch_plan import Launcher
from kvbench.targets.launched import LaunchedTarget
from kvbench.targets.presets import GENERIC, PRESETS
from kvbench.targets.prompt_texts import ids_as_words
from kvbench.targets.running import OpenAITarget
from kvbench.workload.request_form import RequestForm
from tests.support.fire_wire import strike
from tests.support.loads import ROOT, free_port
from tests.support.scripted_http import scripted_server
from tests.unit.targets.test_running import started as started_on

WORKLOAD = str(ROOT / "workloads" / "mixed.yaml")
NEVER_WHOLE = ["hang", "half_head", "drip_head", "drip_body", "drip_length", "flood", "flood_length"]
REFUSED = ["status", "not_http", "reset"]
CALLS = {
    "/metrics": lambda target: target.metrics(),
    "/server_info": lambda target: target.server_info(),
    "/v1/completions": lambda target: target.complete([1, 2], 1, target.http.timeout_s),
}


@pytest.mark.parametrize("path", CALLS)
def test_a_call_ends_within_its_time_and_bytes_and_the_next_is_served(path, monkeypatch):
    answers = [*map(strike, [*NEVER_WHOLE, *REFUSED]), (200, "" if path == "/metrics" else {"choices": []})]
    monkeypatch.setattr(base, "MOST_BYTES", 1 << 20)
    with scripted_server({path: lambda body: answers.pop(0)}) as server:
        target = Target(server.url)
        target.model = ModelFacts("fake", 8192, 1024)

        def call(timeout_s: float):
            target.http.timeout_s = timeout_s
            monkeypatch.setattr(base, "FACTS_TIMEOUT_S", timeout_s)
            return CALLS[path](target)

        for do in NEVER_WHOLE:
            with pytest.raises(MeasurementError, match=r"1 MiB" if "flood" in do else "tim|within"):
                call(60.0 if "flood" in do else 0.1)
        for refused in REFUSED:
            if (path, refused) == ("/server_info", "status"):
                assert call(60.0) == ServerInfo()  # a server that has none of it
                continue
            with pytest.raises(MeasurementError):
                call(60.0)
        call(60.0)


@pytest.mark.parametrize("layers", [1, 2])
def test_calls_ask_for_no_compression_and_unpack_nothing(layers: int) -> None:
    """64 MiB of zeros, packed once and twice: its size is never that of what is unpacked."""
    packed = bytes(64 << 20)
    for _ in range(layers):
        packed = gzip.compress(packed)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    with scripted_server({"/metrics": head + packed}) as server:
        target = Target(server.url)
        tracemalloc.start()
        with pytest.raises(MeasurementError, match=r"/metrics.*compressed \(gzip\)"):
            target.metrics()
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()
    assert server.asked[0][2]["Accept-Encoding"] == "identity"


def refusal(url: str, **more: object) -> str:
    """What ``start`` raises as the user's mistake; its URL is in it once."""
    target = OpenAITarget(url, **more)
    with pytest.raises(UsageError) as refused:
        target.start({}, Path())
    assert str(refused.value).startswith(url) and str(refused.value).count(url) == 1
    return str(refused.value)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("kind", ["models", "health"])
def test_a_server_that_wants_a_key_or_another_one(monkeypatch, status: int, kind: str) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "sk-secret")
    more = {} if kind == "models" else {"preset": PRESETS["transformers"], "model": "m"}
    with scripted_server({"/v1/models": (status, {}), "/health": (status, {})}) as server:
        said = refusal(server.url, **more)
        assert str(status) in said and "--api-key-env NAME" in said
        said = refusal(server.url, access=Access("KEY_OF_TEST"), **more)
        assert str(status) in said and "KEY_OF_TEST" in said and "sk-secret" not in said
    with scripted_server({"/v1/completions": (status, {})}) as server:  # only completions want it
        target = Target(server.url)
        target.model = ModelFacts("m", 9, 99)
        with pytest.raises(MeasurementError, match=rf"{status}.*--api-key-env NAME"):
            target.complete([1], 1, 5.0)


def test_nobody_listens_or_the_host_is_unknown_or_it_is_not_healthy_or_redirects_or_hangs_up() -> None:
    assert "refused" in refusal(f"http://127.0.0.1:{free_port()}")
    assert "not known" in refusal("http://no-such-host.invalid:8000")
    redirect = b"HTTP/1.1 301 Moved\r\nLocation: https://elsewhere/v1/models\r\nContent-Length: 0\r\n\r\n"
    with scripted_server({"/v1/models": redirect}) as server:
        assert "https://elsewhere/v1/models: give the URL" in refusal(server.url)
    with scripted_server({"/v1/models": b""}) as server:
        for url in (server.url, server.url.replace("http:", "https:")):
            assert "did not answer" in refusal(url)
    with scripted_server({"/health": (503, {})}) as server:
        assert "/health answered 503" in refusal(server.url, preset=PRESETS["transformers"], model="m")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl program to make a certificate with")
def test_certificates_that_are_not_trusted_and_the_wrong_one_of_http_and_https(tmp_path) -> None:
    cert, key = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with scripted_server(MODELS, tls=context) as server:
        secure = server.url
        for url, access in (
            (secure, Access()),
            (secure.replace("127.0.0.1", "localhost"), Access(tls_ca_file=str(cert))),  # another name's
        ):
            said = refusal(url, access=access)
            assert "certificate" in said and "--tls-ca-file FILE" in said and "--no-tls-verify" in said
        for access in (Access(tls_ca_file=str(cert)), Access(tls_verify=False)):
            target = OpenAITarget(secure, access=access, preset=PRESETS["vllm"])
            target.start({}, Path())
            assert target.model.name == "m"
        assert "http or https" in refusal(secure.replace("https:", "http:"))
    with scripted_server({}) as server:
        assert "http or https" in refusal(server.url.replace("http:", "https:"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("http://127.0.0.1:99999",), "99999"),
        (("http://127.0.0.1:0",), "from 1 to 65535"),
        (("http://user:hush@127.0.0.1:9",), "--api-key-env NAME"),
        (("https://127.0.0.1:9", "--tls-ca-file", str(ROOT / "README.md")), "certificate"),
        (("https://127.0.0.1:9", "--tls-ca-file", str(ROOT)), "Is a directory"),
    ],
)
@pytest.mark.parametrize("command", [("load", WORKLOAD, "--url"), ("sweep", WORKLOAD, "--dry-run", "--target")])
def test_what_cannot_be_asked_at_all_is_refused_at_once(capsys, command, words, said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, *words])
    output = "".join(capsys.readouterr())
    assert ended.value.code == 2 and said in output and output.startswith("error: ") and output.count("\n") == 1
    assert "hush" not in output


MODELS = {"/v1/models": (200, {"data": [{"id": "m", "max_model_len": 256}]}), "/v1/completions": (200, {})}


def started(answers, preset=None, **options):
    """A target that has started, and its server."""
    sizes = {"vocab_size": 512, "max_model_len": 256}
    return started_on(MODELS | answers, PRESETS[preset] if preset else GENERIC, **sizes | options)


def posted(server):
    return [path for method, path, *_ in server.asked if method == "POST" and path != "/v1/completions"]


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


@pytest.mark.parametrize(
    ("preset", "answers", "posts"),
    [
        ("llamacpp", {"/slots": (200, [{"id": 0}]), "/slots/0?action=erase": (200, {})}, ["/slots/0?action=erase"]),
        ("llamacpp", {}, []),  # a command of the user's own, without --slots
        ("vllm", {"/reset_prefix_cache": (200, {})}, []),
    ],
)
def test_a_cache_that_is_off_is_empty_and_slots_are_emptied_of_the_kv_they_hold(preset, answers, posts):
    with scripted_server(answers) as server:
        target = LaunchedTarget(Launcher(PRESETS[preset], "", lambda settings: Capacity()), SimpleNamespace())
        Target.__init__(target, server.url, preset=PRESETS[preset])
        target._settings = {"enable_prefix_caching": False}
        assert target.reset_prefix_cache() is True and posted(server) == posts


def test_a_start_ends_when_what_waits_for_it_has_no_more_time(tmp_path):
    command = (sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(600)")
    target, log = BuiltinTarget(command=command), tmp_path / "log"

    def check():
        if log.read_bytes():
            raise TimeoutError

    target.check = check
    with pytest.raises(TimeoutError):
        target.start({}, log)
    with pytest.raises(MeasurementError, match="not started"):  # it was stopped
        target.check_alive()


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


@pytest.mark.parametrize(
    ("preset", "way"),
    [("llamacpp", "--slot-save-path"), ("vllm", "VLLM_SERVER_DEV_MODE=1"), (None, "--preset"), ("tgi", "")],
)
def test_what_lets_a_server_empty_its_cache_is_named(preset, way):
    slots = {"/slots": (200, [{"id": 0}]), "/slots/0?action=erase": (501, {"error": "disabled"})}
    with started(slots, preset) as (target, _):
        (reason,) = server_state.prepare_cache(target, load(), [], first=True)
    assert way in reason and ("start it with" in reason) == (preset in ("llamacpp", "vllm"))


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
        assert info.versions == ({preset: version} if version else {})
        assert info.server.title == PRESETS[preset].title


def test_the_load_client_gets_dialect_key_and_tls_and_nothing_else(monkeypatch):
    monkeypatch.setenv("KEY_OF_THE_TEST", "secret")
    with started({}) as (plain, _):
        assert plain.client_fields() == {"dialect": {"answers": ["n"]}}  # all else is the default
    access = Access("KEY_OF_THE_TEST", tls_verify=False, tls_ca_file="ca.pem")
    with started({}, "transformers", model="m", access=Access("KEY_OF_THE_TEST")) as (target, server):
        fields = target.client_fields() | access.fields()
        assert fields["api_key_env"] == "KEY_OF_THE_TEST" and "secret" not in str(fields)
        assert fields["tls_verify"] is False and fields["tls_ca_file"] == "ca.pem"
        spec = LoadSpec(base_url=server.url, model="m", mode="closed", concurrency=1, requests_file="", out_dir="",
                        timeout_s=1.0, **fields)  # fmt: skip
        assert spec.dialect == PRESETS["transformers"].dialect
        target.get_json("/v1/models")
        assert server.asked[-1][2]["Authorization"] == "Bearer secret"
    monkeypatch.delenv("KEY_OF_THE_TEST")
    with pytest.raises(UsageError, match="KEY_OF_THE_TEST: this variable holds no key"):
        OpenAITarget("http://127.0.0.1:1", access=Access("KEY_OF_THE_TEST"))


REQUESTS = [RequestSpec(0, "a", (17, 4, 300), None, 5, prefix_tokens=2), RequestSpec(1, "a", (1,), "as it is", 5)]


def test_ids_become_texts_for_a_server_that_takes_no_ids():
    answers = {"/v1/completions": (200, {"choices": [{}]})}
    with started(answers, "tgi") as (target, server):
        assert len(target.as_sent(REQUESTS)[0].prompt.split()) == 3  # of the tokenizer that ships
        target._text_of_ids = ids_as_words
        sent = target.as_sent(REQUESTS)
        assert sent.notes["sent_as"] == "text" and not sent.notes["exact_texts"] and sent[1].prompt == "as it is"
        assert (sent[0].prompt, sent[0].prompt_token_ids, sent[0].prefix_tokens) == ("17 4 300", (17, 4, 300), 2)
        target.complete([5, 6], 1, 5.0)
        assert server.asked[-1][3]["prompt"] == "5 6"
    with started({}) as (target, _):
        assert target.as_sent(REQUESTS) is REQUESTS


EACH = 16384
SETTINGS = {"layout": "paged", "page_size": 32, "kv_budget": "97MiB"}
KNOWN = Capacity(kv_budget_bytes=97 << 20, bytes_per_token=EACH, capacity_tokens=6192)


KNOWN_BYTES = KNOWN.model_copy(update={"capacity_tokens": None})  # without our own count of tokens the bytes decide
ROUND = Capacity(kv_budget_bytes=1000 * EACH, bytes_per_token=EACH, capacity_tokens=1000)
FEWER_SCALES = {"bytes_per_token": 4352, "scale_bytes_per_token": 256, "capacity_tokens": 23000}
CONTRADICTIONS = [  # what was asked for, what is known of it, what the server says; words of what is wrong
    ({}, KNOWN, {}, None),
    ({}, KNOWN, {"tokens": 6192 - 100}, None),  # 1.6 %
    ({"page_size": None}, KNOWN, {"page_size": 128}, None),
    ({"layout": "contiguous"}, KNOWN, {"page_size": 2048}, None),  # there it is a reservation's size
    *(({}, ROUND, {"tokens": n}, None) for n in (1052, 948)),  # two per cent and a page
    *(({}, ROUND, {"tokens": n}, f"{n:,}") for n in (1053, 947)),
    ({}, KNOWN, {"page_size": 128}, r"128 .*32.* -o engine.page_size=128"),
    ({}, KNOWN, {"tokens": 12384}, r"12,384 .*101,711,872 bytes would hold 6,192"),
    ({}, KNOWN, {"tokens": 4000}, r"4,000"),
    ({}, KNOWN_BYTES, {"tokens": 6208}, None),
    ({}, KNOWN_BYTES, {"tokens": 262144}, "262,144"),
    ({}, Capacity(), {"tokens": 262144}, None),  # it was not given a budget
    *(({}, KNOWN.model_copy(update=FEWER_SCALES), {"tokens": n}, None) for n in (23000, 24437)),
    ({}, KNOWN.model_copy(update=FEWER_SCALES), {"tokens": 25500}, "25,500"),
    ({}, KNOWN.model_copy(update={"max_model_len": 4096}), {"max_model_len": 3056}, "3056"),
    ({}, KNOWN.model_copy(update={"max_model_len": 3056}), {"max_model_len": 3056}, None),
    ({}, Capacity(), {"max_model_len": 3056}, None),  # nobody knows what it should be
]


@pytest.mark.parametrize(("asked", "known", "told", "words"), CONTRADICTIONS)
def test_what_a_server_says_of_itself_is_held_against_its_configuration(asked, known, told, words):
    told = {"page_size": 32, "tokens": 6192} | told
    capacity = {"capacity_tokens": told.pop("tokens")}
    found = contradiction(SETTINGS | asked, known, ServerInfo.read({"engine": told, "capacity": capacity}))
    assert found is None if words is None else re.search(words, found or "")


def test_a_server_that_says_little_contradicts_little():
    assert contradiction(SETTINGS, KNOWN, ServerInfo()) is None
    other = ServerInfo.read({"engine": {"page_size": 128}, "capacity": {"capacity_tokens": 5}})
    assert contradiction({"target": "http://x"}, Capacity(), other) is None  # nothing was asked
    assert "64" in contradiction(SETTINGS, KNOWN, ServerInfo.read({"capacity": {"page_size": 64}}))


@pytest.mark.parametrize("page_size", [8, 16, 64])
@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_the_built_in_engine_is_what_its_arithmetic_says(layout, page_size):
    settings = {
        "model": "llama-32m", "load_format": "dummy", "dtype": "float32", "device": "cpu", "layout": layout,
        "kv_budget": "65MiB", "max_model_len": 1024,
    } | ({"page_size": page_size} if layout == "paged" else {})  # fmt: skip
    known = check_configuration(settings)
    capacity = {"page_size": known.page_size, "capacity_tokens": known.capacity_tokens}
    info = ServerInfo.read({"engine": settings, "capacity": capacity})
    assert contradiction(settings, known, info) is None


def test_a_server_that_nobody_has_named_is_not_asked_for_beams():
    beams = [RequestSpec(0, "a", (5, 6), None, 3, n=2, beam_width=2)]
    with started({}) as (unnamed, _), pytest.raises(MeasurementError, match="--preset"):
        unnamed.as_sent(beams)
    several = [dataclasses.replace(beams[0], beam_width=None)]
    for endpoint, takes in (("completions", True), ("chat", True), ("responses", False)):
        path = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}.get(endpoint, "/v1/responses")
        refuses = contextlib.nullcontext() if takes else pytest.raises(MeasurementError, match="no n")
        with started({path: (200, {})}, form=RequestForm(endpoint)) as (target, _), refuses:
            assert target.as_sent(several)
    own = {"/v1/models": (200, {"data": [{"id": "m", "owned_by": "kvbench"}]})}
    with started(own) as (target, _):
        assert target.as_sent(beams) is beams
