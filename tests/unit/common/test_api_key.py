"""The API key: what an environment variable may hold, and that no message ever repeats it."""

from __future__ import annotations

import html
import json
import os

import pytest

from kvbench.cli.main import main
from kvbench.common.errors import MeasurementError, log_traceback
from kvbench.common.files import as_stored, read_json, write_json
from kvbench.common.secrets import api_key, without_key
from kvbench.load.completion import judge
from kvbench.load.endpoints import OPENAI
from kvbench.requests.request import RequestSpec
from kvbench.targets.base import Access, ModelFacts, Target
from tests.support.loads import ROOT, LoadRunner, own_mock
from tests.support.scripted_http import scripted_server

KEY = "sk-a-key-of-the-test"
WORKLOAD = str(ROOT / "workloads" / "mixed.yaml")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (f"{KEY}\nsecond-line", "the key in KEY_OF_TEST has a line break within it"),
        (f"{KEY}ü", "the key in KEY_OF_TEST has a character that no HTTP header can hold"),
        ("\n", "KEY_OF_TEST: this variable holds no key"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ("load", WORKLOAD, "--url", "http://127.0.0.1:9"),
        ("sweep", WORKLOAD, "--target", "http://127.0.0.1:9"),
        ("dev", "mock-server", "--port", "0"),
    ],
    ids=lambda command: command[0],
)
def test_a_key_that_cannot_be_sent_is_a_sentence_without_it(monkeypatch, capsys, command, key, words) -> None:
    monkeypatch.setenv("KEY_OF_TEST", key)
    with pytest.raises(SystemExit) as ended:
        main([*command, "--api-key-env", "KEY_OF_TEST"])
    said = "".join(capsys.readouterr())
    assert ended.value.code == 2 and words in said and said.count("\n") == 1
    assert KEY not in said and "second-line" not in said


def test_both_ends_read_the_key_alike_without_white_space_around_it(monkeypatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", f" {KEY}\r\n")
    assert api_key("KEY_OF_TEST") == KEY
    with own_mock("--api-key-env", "KEY_OF_TEST") as (_, url):
        target = Target(url, access=Access("KEY_OF_TEST"))
        assert target.models()[0].id == "mock"
        target.stop()


def test_what_a_server_repeats_of_the_key_is_taken_out(monkeypatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", f"{KEY}\n")
    assert without_key(f"no model for Bearer {KEY}!", "KEY_OF_TEST") == "no model for Bearer (the key in KEY_OF_TEST)!"
    assert without_key("no model", "KEY_OF_TEST") == without_key("no model", None) == "no model"
    assert without_key(None, "KEY_OF_TEST") is None
    monkeypatch.setenv("QUOTED", 'ab"cd\\efghij"kl')
    assert without_key(json.dumps(os.environ["QUOTED"]), "QUOTED") == '"(the key in QUOTED)"'
    monkeypatch.setenv("KEY_OF_TEST", "a")
    assert without_key("a model", "KEY_OF_TEST") == "a model"


def test_a_server_that_repeats_the_key_does_not_bring_it_into_messages_and_samples(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", KEY)
    echo = {"error": {"message": f"you sent Bearer {KEY}{'!' * 225} Bearer {KEY} {KEY}"}}  # and cut within
    with scripted_server({"/v1/completions": (500, echo), "/health": (200, {})}) as server:
        target = Target(server.url, access=Access("KEY_OF_TEST"))
        target.model = ModelFacts("m", 9, 99)
        with pytest.raises(MeasurementError, match=r"you sent Bearer \(the key in KEY_OF_TEST\)") as refused:
            target.complete([1], 1, 5.0)
        target.stop()
        loads = LoadRunner(tmp_path, server.url)
        got = loads.run([RequestSpec(0, "a", (1,), None, 2)], concurrency=1, api_key_env="KEY_OF_TEST")
    assert KEY[:8] not in str(refused.value)
    said = got.samples["error"][0]
    assert "you sent Bearer (the key in KEY_OF_TEST)!" in said and KEY[:8] not in said


def test_a_text_that_spells_the_key_token_by_token_is_stored_without_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", KEY)
    events = [{"choices": [{"text": text, "finish_reason": None}]} for text in ("it is ", KEY[:7], KEY[7:], ".")]
    events[-1]["choices"][0]["finish_reason"] = "length"
    events.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 4}})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    with scripted_server({"/v1/completions": (200, body), "/health": (200, {})}) as server:
        got = LoadRunner(tmp_path, server.url).run(
            [RequestSpec(0, "a", (1,), None, 4)], concurrency=1, api_key_env="KEY_OF_TEST"
        )
    assert got.samples["ok"].all() and got.samples["text"][0] == "it is (the key in KEY_OF_TEST)."


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
DONE = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n\ndata: [DONE]\n\n'


def event(text: str = "a", reason: str | None = "length") -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": reason}]}).encode() + b"\n\n"


def filled(length: int) -> bytes:
    """So many bytes, of which the key is the end but for 4 bytes more: a cut there leaves most of it."""
    return b"x" * (length - len(KEY) + 4) + KEY.encode() + b"x" * 40


@pytest.mark.parametrize(
    "wire",
    [
        filled(60),  # sent back by what is no HTTP server
        HEAD + b"data: " + filled(60) + b"\n\n",
        HEAD + b"data: " + json.dumps(filled(59).decode()).encode() + b"\n\n",
        HEAD + filled(60) + b": 1\n\n",
        HEAD + b"data: [DONE]\n\ndata: " + filled(60) + b"\n\n",
        HEAD + event() + DONE + filled(60),
        HEAD + b'data: {"usage": {"prompt_tokens": "' + filled(42) + b'"}}\n\n',
        HEAD + b'data: {"error": "' + filled(300) + b'"}\n\n',
        HEAD + event(reason=filled(40).decode()) + DONE,
        HEAD.replace(b"200", b"401") + b"you sent " + filled(291),
        HEAD.replace(b"200", b"401") + filled(4096),
        HEAD + event().replace(b'"text"', b'"token_ids": ["' + filled(40) + b'"], "text"') + DONE,
        b"HTTP/1.1 200 OK\r\nX-Echoed: " + KEY.encode() + b"\0\r\n\r\n",  # one piece begins within the key
        HEAD + event(KEY) + DONE,
        HEAD + event(KEY[:7], None) + event(KEY[7:]) + DONE,
    ],
)
@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_no_part_of_the_key_stays_of_whatever_a_server_says(monkeypatch, wire: bytes, piece: int) -> None:
    """8 characters in a row would be one: where a message is cut, where bytes came in pieces, in a stored text."""
    monkeypatch.setenv("KEY_OF_TEST", KEY)
    pieces = [wire[at : at + piece] for at in range(0, len(wire), piece)]
    times = [float(k) for k in range(len(pieces))]
    out = judge(times, pieces, 9)
    out.hide_key("KEY_OF_TEST", OPENAI)
    kept = repr(out)
    assert not [KEY[at : at + 8] for at in range(len(KEY) - 7) if KEY[at : at + 8] in kept]


@pytest.mark.parametrize("key", ["length", "text", "usage", "data", "1234"])
def test_a_key_that_is_a_word_of_the_api_changes_no_verdict(monkeypatch, key: str) -> None:
    """What is judged is what came; only what is kept of it is without the key."""
    monkeypatch.setenv("KEY_OF_TEST", key)
    wire = HEAD + event("the text of length 1234") + DONE
    out = judge([0.0], [wire], 9)
    out.hide_key("KEY_OF_TEST", OPENAI)
    assert out.ok, out.error
    assert out.finish_reason == "length" and key not in out.text.replace("KEY_OF_TEST", "")


def test_a_key_in_the_models_name_is_asked_for_and_stored_nowhere(tmp_path, monkeypatch, capsys) -> None:
    key = "sk-a<key>&of-the-test"
    monkeypatch.setenv("KEY_OF_TEST", key)
    name, folder = f"m-{key}", tmp_path / "out"
    stream = (HEAD.partition(b"\r\n\r\n")[2] + event() + DONE).decode()
    told = {"/v1/models": {"data": [{"id": name}]}, "/server_info": {"server": {"notes": [key]}, "kept": {key: [key]}},
            "/v1/completions": stream, "/health": {}}  # fmt: skip
    with scripted_server({path: (200, answer) for path, answer in told.items()}) as server:
        command = ["load", "--url", server.url, "--api-key-env", "KEY_OF_TEST", "--input-len", "1", "--output-len", "1",
                   "--concurrency", "1", "--num-prompts", "2", "--num-warmups", "0", "--output-dir", str(folder),
                   "--vocab-size", "99", "--max-model-len", "99", "--no-calibration",
                   "-o", "load.cache_state=steady"]  # fmt: skip
        for more in ([], ["--resume"]):
            with pytest.raises(SystemExit) as ended:
                main([*command, *more])
        assert "another load" not in capsys.readouterr().err and ended.value.code != 2
    asked = {body["model"] for _, path, _, body in server.asked if path == "/v1/completions"}
    assert asked == {name}
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5 and not [path.name for path in files if any(f in path.read_bytes() for f in forms(key))]
    assert "(the key in KEY_OF_TEST)" in json.loads((folder / "manifest.json").read_text())["target"]["model"]


def forms(key: str) -> set[bytes]:
    return {key.encode(), json.dumps(key)[1:-1].encode(), html.escape(key).encode()}


def test_a_traceback_is_logged_without_the_key(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", KEY)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    api_key("KEY_OF_TEST")
    log_traceback(MeasurementError(f"the server said {KEY}"))
    (log,) = tmp_path.iterdir()
    assert "the server said (the key in KEY_OF_TEST)" in log.read_text() and KEY not in log.read_text()


def test_short_keys_stay_in_files_where_they_are_words(tmp_path, monkeypatch) -> None:
    for key, stored in (("sevenly", "sevenly"), ("eightful", "(the key in KEY_OF_TEST)")):
        monkeypatch.setenv("KEY_OF_TEST", key)
        api_key("KEY_OF_TEST")
        write_json(tmp_path / "a.json", {"a": key})
        assert read_json(tmp_path / "a.json") == {"a": stored} == as_stored({"a": key})
