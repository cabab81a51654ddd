"""Over raw HTTP: malformed requests, clients that leave, many at once, what /metrics says of it all."""

from __future__ import annotations

import concurrent.futures
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvbench_engine.boot import BOOT_HEADER, boot_id
from kvbench_engine.scheduling.step_plan import Computed, StepPlan
from kvbench_engine.server.app import MAX_BODY_BYTES, body_limit
from kvbench_engine.server.tokenizer import ServerTokenizer
from tests.support.fake_engine import branching, fake_engine, saying
from tests.support.http_server import RunningServer, running_server, shipped_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(fake_engine()) as running:
        yield running


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_malformed_bodies_are_refused_in_openais_shape(server: RunningServer, path: str) -> None:
    for raw in (b"", b"[1]", b"\xff\xfe", b"{}", b'{"messages": 1, "tokens": 1}', b'{"a":' * 50_000):
        reply = server.post(path, raw)
        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")


ODD_VALUES: list[Any] = [None, True, -1, 1.5, 10**30, "", "\u0000", [[]], [None], {"a": 1}, ["x"]]
FIELDS = ["model", "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n", "stream",
          "stop_token_ids", "stream_options", "echo", "best_of", "logprobs", "max_completion_tokens", "ignore_eos",
          "return_token_ids", "chat_template_kwargs", "tools", "user", "use_beam_search", "length_penalty",
          "early_stopping", "priority", "cache_salt", "generation_config", "min_tokens"]  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_no_value_of_any_field_makes_the_server_fail(server: RunningServer, path: str) -> None:
    plain = {"prompt": [5]} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    for name, value in itertools.product(FIELDS, ODD_VALUES):
        reply = server.post(path, {"max_tokens": 2, **plain, name: value})
        assert reply.status in (200, 400, 404, 422), (name, value, reply.body)
        if reply.status != 200:
            assert reply.error["message"], (name, value)
    server.wait_for(kv_pages_owned=0, num_requests_running=0, num_requests_waiting=0)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("POST", "/v1/nothing", 404), ("GET", COMPLETIONS, 405), ("PUT", COMPLETIONS, 405),
     ("POST", "/health", 405), ("DELETE", "/v1/models", 405), ("GET", "/v1/models/other", 404),
     ("GET", "/health/", 404), ("POST", "/v1/completions/", 404), ("GET", "/", 404), ("OPTIONS", "/v1/models", 405)],
)  # fmt: skip
def test_unknown_paths_and_methods(server: RunningServer, method: str, path: str, status: int) -> None:
    reply = server.request(method, path)
    assert reply.status == status
    assert path in reply.error["message"] or "other" in reply.error["message"]
    assert reply.error["type"] == "invalid_request_error"
    assert ("allow" in reply.headers) == (status == 405)


def test_a_body_over_the_limit_is_refused_before_it_is_read_and_one_without_a_length_at_it(
    server: RunningServer,
) -> None:
    reply = server.request("POST", COMPLETIONS, None, {"Content-Length": str(MAX_BODY_BYTES + 1)})
    assert reply.status == 413
    assert str(body_limit(1024)) in reply.error["message"]
    part = b"100000\r\n" + b"x" * 2**20 + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(MAX_BODY_BYTES // 2**20 + 1):
                sock.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            return
        assert b" 413 " in sock.recv(65536).split(b"\r\n")[0]


def test_tokenize_and_detokenize_are_inverse(server: RunningServer) -> None:
    text = "A caf\u00e9, <|user|> and \U0001f980"
    tokens = server.post("/tokenize", {"prompt": text}).json
    assert tokens["tokens"] == shipped_tokenizer().encode(text)
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 1024)
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json == {"prompt": text}
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json
    assert chat["tokens"] == shipped_tokenizer().encode("<|user|>hi<|assistant|>")
    assert server.post("/detokenize", {"tokens": [9999, 10**12, -4]}).json == {"prompt": ""}


def test_server_info_and_models_and_health(server: RunningServer) -> None:
    info = server.get("/server_info").json
    assert info["engine"]["max_model_len"] == 1024
    assert info["policy"] == {"spare_tokens": 16}
    assert info["model"]["vocab_size"] == 8192
    assert info["capacity"]["capacity_tokens"] == server.engine.capacity.num_slots
    assert info["capacity"]["scale_bytes_per_slot"] == info["capacity"]["host_slots"] == 0
    assert (info["engine"]["preemption_mode"], info["engine"]["scheduling_policy"]) == ("recompute", "fcfs")
    assert server.get("/v1/models").json["data"][0]["max_model_len"] == 1024
    assert server.get("/health").status == 200


def test_stamped_chunks_tell_when_they_were_sent(server: RunningServer) -> None:
    body = {"prompt": [5], "max_tokens": 5, "stream": True}
    began = time.monotonic()
    answer = server.post(COMPLETIONS, body, {"x-kvbench-stamp": "1"})
    assert answer.headers.get(BOOT_HEADER) == boot_id()  # so that nobody takes them for stamps of his own clock
    events = answer.events
    sent = [event["kvbench"]["sent"] for event in events]
    assert began <= sent[0] <= sent[-1] <= time.monotonic()
    assert sent == sorted(sent)
    assert all("kvbench" not in event for event in server.post(COMPLETIONS, body).events)


def test_held_back_text_still_gives_a_chunk_a_token_and_the_end_within_a_character_its_replacement() -> None:
    crab = shipped_tokenizer().encode("\U0001f980")
    body = {"prompt": [5], "max_tokens": 20}
    with running_server(fake_engine(saying(*crab, 0))) as server:
        events = server.post(COMPLETIONS, {**body, "stream": True}).events
        texts = [event["choices"][0]["text"] for event in events]
        assert texts == [""] * (len(crab) - 1) + ["\U0001f980", ""]
        body["max_tokens"] = len(crab) - 1
        assert server.post(COMPLETIONS, body).json["choices"][0]["text"] == "\ufffd"
        events = server.post(COMPLETIONS, {**body, "stream": True}).events
        assert [event["choices"][0]["text"] for event in events] == [""] * (len(crab) - 2) + ["\ufffd"]


@pytest.mark.parametrize("fields", [{"n": 2, "stream": True}, {"n": 2, "best_of": 4}], ids=str)
def test_a_client_that_disconnects_ends_all_sequences_of_its_request(fields: dict[str, Any]) -> None:
    with running_server(fake_engine(branching, step_s=0.01)) as server:
        sock = server.open_request({"prompt": [5], "max_tokens": 1000, **fields})
        server.wait_for(num_requests_running=fields.get("best_of", fields["n"]))
        sock.close()
        metrics = server.wait_for(num_requests_running=0, num_requests_waiting=0, kv_pages_owned=0)
        assert metrics["generation_tokens_total"] < 2000
        server.wait_for(**{"request_failure_total{kind=disconnect}": fields["n"], "http_requests_total{code=499}": 1})
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:  # amid its request
            sock.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt"')
        disconnects = fields["n"] + 1
        server.wait_for(**{"request_failure_total{kind=disconnect}": disconnects, "http_requests_total{code=499}": 2})


def test_many_at_once_all_end_and_metrics_agree_with_what_was_sent() -> None:
    with running_server(fake_engine(step_s=0.001, enable_prefix_caching=True, kv_slots=8192)) as server:

        def ask(i: int) -> int:
            body = {"prompt": [7] * (1 + i % 50), "max_tokens": 1 + i % 20, "stream": i % 2 == 0, "model": "fake"}
            body |= {"stream_options": {"include_usage": True}} if body["stream"] else {}
            reply = server.post(COMPLETIONS, body)
            usage = reply.events[-1]["usage"] if body["stream"] else reply.json["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (1 + i % 50, 1 + i % 20)
            return usage["prompt_tokens_details"]["cached_tokens"]

        with concurrent.futures.ThreadPoolExecutor(50) as pool:
            cached = sum(pool.map(ask, range(100)))
        metrics = server.wait_for(num_requests_running=0, kv_pages_owned=0)
        assert metrics["prompt_tokens_total"] == sum(1 + i % 50 for i in range(100))
        assert metrics["generation_tokens_total"] == sum(1 + i % 20 for i in range(100))
        assert metrics["prefix_cache_hits_total"] == cached
        assert metrics["request_success_total{finished_reason=length}"] == 100
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
            assert metrics[f"{name}_seconds_count"] == 100
        assert metrics["inter_token_latency_seconds_count"] == sum(i % 20 for i in range(100))
        first, decode, queue, prefill, whole = (
            metrics[f"{name}_seconds_sum"]
            for name in ("time_to_first_token", "request_decode_time", "request_queue_time", "request_prefill_time",
                         "e2e_request_latency")
        )  # fmt: skip
        assert (first + decode, queue + prefill) == (pytest.approx(whole), pytest.approx(first))
        assert metrics["num_preemptions_total"] == server.engine.scheduler.num_preemptions
        assert server.post("/reset_prefix_cache").status == 200
        assert server.metrics()["kv_pages_cached"] == 0


METRICS = """
num_requests_running num_requests_waiting kv_cache_usage_perc kv_pages_total kv_pages_free kv_pages_owned
kv_pages_cached kv_slots_total kv_slots_reserved kv_slots_used kv_waste_slots kv_waste_bytes page_table_bytes
kv_budget_bytes process_resident_bytes num_preemptions_total recomputed_tokens_total prefix_cache_hits_total
prefix_cache_queries_total prompt_tokens_total generation_tokens_total steps_total copied_pages_total
hash_seconds_total time_to_first_token_seconds_count inter_token_latency_seconds_count
e2e_request_latency_seconds_count request_queue_time_seconds_count request_prefill_time_seconds_count
request_decode_time_seconds_count request_success_total{finished_reason=stop}
request_success_total{finished_reason=length} request_failure_total{kind=disconnect}
step_time_seconds_total{phase=schedule} step_time_seconds_total{phase=prepare}
step_time_seconds_total{phase=execute} step_time_seconds_total{phase=sample} step_time_seconds_total{phase=output}
scheduled_tokens_total{kind=prefill} scheduled_tokens_total{kind=decode} num_requests_swapped kv_pages_pinned
kv_slots_cached kv_slots_shared kv_slots_pinned kv_slots_free kv_slots_fragmented swap_slots_total swap_slots_used
swap_space_bytes kv_bytes_per_slot kv_scale_bytes_per_slot forks_total copied_slots_total swapped_out_slots_total
swapped_in_slots_total swap_lost_slots_total swap_seconds_total prefix_cache_evictions_total allocated_pages_total
freed_pages_total refused_fragmented_total kv_slot_steps_total{place=tokens} kv_slot_steps_total{place=waste}
kv_slot_steps_total{place=cached} kv_slot_steps_total{place=pinned} kv_slot_steps_total{place=free}
kv_slot_steps_total{place=fragmented} request_failure_total{kind=queue_full} kv_pages_logical
kv_page_steps_total{pages=physical} kv_page_steps_total{pages=logical} replayed_steps_total
"""
PLACES = ("tokens", "waste", "cached", "pinned", "free", "fragmented")


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_metrics_names_and_the_slots_of_a_running_request(layout: str) -> None:
    with running_server(fake_engine(step_s=0.02, layout=layout)) as server:
        idle = server.metrics()
        assert set(METRICS.split()) <= set(idle)
        assert not [name for name in idle if "_created" in name]
        (info,) = [name for name in idle if name.startswith("cache_config_info{")]
        assert f"layout={layout}" in info
        assert idle["kv_pages_free"] == idle["kv_pages_total"]
        sock = server.open_request({"prompt": [5] * 40, "max_tokens": 900, "n": 2})
        server.wait_for(num_requests_running=2)
        busy = server.metrics()
        assert server.post("/reset_prefix_cache").status == 409
        assert busy["kv_pages_owned"] + busy["kv_pages_free"] + busy["kv_pages_cached"] == busy["kv_pages_total"]
        assert busy["kv_waste_slots"] == busy["kv_slots_reserved"] - busy["kv_slots_used"]
        assert busy["kv_waste_bytes"] == busy["kv_waste_slots"] * 64
        slots = busy["kv_slots_reserved"] + busy["kv_slots_cached"] + busy["kv_slots_pinned"] + busy["kv_slots_free"]
        assert slots == busy["kv_slots_total"]
        assert busy["kv_bytes_per_slot"] == 64
        assert busy["kv_pages_logical"] - busy["kv_pages_owned"] == (0 if layout == "contiguous" else 2)
        if layout == "contiguous":
            assert (busy["kv_pages_owned"], busy["kv_slots_reserved"], busy["kv_slots_shared"]) == (2, 2048, 0)
        else:
            assert busy["kv_slots_shared"] == 32  # the two full pages of the prompt; the third was copied
        sock.close()
        after = server.wait_for(kv_pages_owned=0, num_requests_running=0)
        steps = sum(after[f"kv_slot_steps_total{{place={place}}}"] for place in PLACES)
        assert steps == after["steps_total"] * after["kv_slots_total"]
        assert after["allocated_pages_total"] == after["freed_pages_total"] > 0
        assert after["copied_slots_total"] == (40 if layout == "contiguous" else 8)
        assert after["forks_total"] == 1


def test_swapped_requests_show_in_the_metrics() -> None:
    engine = fake_engine(step_s=0.002, kv_slots=1024, preemption_mode="swap", swap_space=40_000)
    with running_server(engine) as server:
        socks = [server.open_request({"prompt": [i] * 300, "max_tokens": 700}) for i in range(1, 4)]
        metrics = server.wait_for(num_requests_swapped=1)
        assert metrics["swap_space_bytes"] == 40_000
        assert metrics["swap_slots_total"] == 40_000 // (16 * 64) * 16
        assert 0 < metrics["swap_slots_used"] <= metrics["swap_slots_total"]
        assert metrics["swapped_out_slots_total"] >= 300
        for sock in socks:
            sock.close()
        server.wait_for(kv_pages_owned=0, swap_slots_used=0, num_requests_swapped=0, num_requests_waiting=0)


def test_an_unhealthy_engine_shows_in_health_and_a_failed_request_counts_once() -> None:
    engine = fake_engine()
    engine.executor.fail = RuntimeError("the device is lost")
    with running_server(engine) as server:
        for stream in (False, True, False):
            reply = server.post(COMPLETIONS, {"prompt": [5], "n": 3, "stream": stream})
            assert "the device is lost" in reply.body.decode()
        metrics = server.wait_for(**{"http_requests_total{code=500}": 3})
        failures = {name: value for name, value in metrics.items() if name.startswith("request_failure") and value}
        assert failures == {"request_failure_total{kind=engine_error}": 9}
        reply = server.get("/health")
        assert reply.status == 503
        assert "the device is lost" in reply.error["message"]
        engine.executor.fail = None
        assert server.post(COMPLETIONS, {"prompt": [5]}).status == 200
        assert server.get("/health").status == 200


def test_a_request_for_which_no_token_can_be_drawn_gets_a_clear_error_and_the_server_goes_on() -> None:
    engine = fake_engine(lambda seq: None if seq.token_ids[0] == 7 and seq.num_output == 2 else 100 + seq.num_output)
    with running_server(engine) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        other = pool.submit(server.post, COMPLETIONS, {"prompt": [5], "max_tokens": 200})
        for stream in (False, True):
            reply = server.post(COMPLETIONS, {"prompt": [7, 8], "n": 2, "max_tokens": 5, "stream": stream})
            assert reply.status == (200 if stream else 500)
            assert "no token can be drawn after 4 tokens" in reply.body.decode()
            assert '"engine_error"' in reply.body.decode() and "[DONE]" not in reply.body.decode()
        assert other.result().json["usage"]["completion_tokens"] == 200
        metrics = server.wait_for(**{"request_failure_total{kind=engine_error}": 4})
        assert metrics["kv_pages_owned"] == 0
        assert server.get("/health").status == 200


def test_without_a_tokenizer_ids_work_and_texts_are_refused() -> None:
    with running_server(fake_engine(), ServerTokenizer("none", text_refusal="there is no tokenizer")) as server:
        reply = server.post(COMPLETIONS, {"prompt": [5], "max_tokens": 3, "return_token_ids": True})
        assert reply.json["choices"][0]["token_ids"] == [100, 101, 102]
        for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
                           (COMPLETIONS, {"prompt": [5], "stop": "x"})):  # fmt: skip
            reply = server.post(path, body)
            assert (reply.status, reply.error["code"]) == (422, "no_tokenizer")


def test_the_server_answers_others_amid_a_step() -> None:
    """The step ends only when the answers are here; a server that waits for it would never answer."""
    engine = fake_engine()
    began, may_end = threading.Event(), threading.Event()
    launch = engine.executor.launch

    def held(plan: StepPlan) -> Computed:
        began.set()
        assert may_end.wait(60)
        return launch(plan)

    engine.executor.launch = held
    with running_server(engine) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, COMPLETIONS, {"prompt": [5]})
        try:
            assert began.wait(30)
            for path in ("/health", "/v1/models", "/server_info", "/metrics"):  # of before: the step is not over
                assert server.get(path).status == 200
            assert server.post("/tokenize", {"prompt": "to be or not to be"}).json["tokens"]
            assert not answer.done()
        finally:
            may_end.set()
        assert answer.result().status == 200
