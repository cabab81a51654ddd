"""What a launched server made of its KV budget, where it says so in its log only, and what it is over each endpoint."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kvbench.common.errors import UsageError
from kvbench.load.endpoints import PATHS
from kvbench.runs.results import Capacity
from kvbench.targets.base import contradiction
from kvbench.targets.launch_plan import Launcher
from kvbench.targets.launched import LaunchedTarget
from kvbench.targets.model_export import ServedModel
from kvbench.targets.presets import PRESETS
from kvbench.workload.request_form import RequestForm
from tests.support.scripted_http import scripted_server

CACHE = (
    "0.03 I llama_kv_cache: size = {:7.2f} MiB ({:6d} cells, 8 layers, 32/1 seqs), K ({}): 1.00 MiB, V ({}): 1.00 MiB"
)
SETTINGS = {"layout": "paged", "kv_budget": "97MiB", "dtype": "float32"}
KNOWN = Capacity(kv_budget_bytes=97 << 20, bytes_per_token=16384, capacity_tokens=6144)


@contextmanager
def launched(tmp_path, log="", usages=None, endpoint=None, asked=None):
    """A llama-server with this log at its start. ``usages``: of its answers, by path; ``asked``: of its folder."""
    program, path = tmp_path / "llama-server", tmp_path / "server.log"
    program.write_text(f"#!/bin/sh\necho '{log}'\nexec sleep 60\n")
    program.chmod(0o755)

    logged = []  # sizes of the log, at each look

    def script(called, body):
        if called == "/health":  # a server is ready long after its cache is there
            logged.append(path.stat().st_size)
            return (200 if sum(map(bool, logged)) > 1 else 503), ""
        with path.open("a") as file:  # of a request
            file.write("size = 1.00 MiB (  1 cells, 8 layers), K (f16): 0.5 MiB, V (f16): 0.5 MiB\n")
        if body is None:
            models = {"data": [{"id": "m", "meta": {"n_vocab": 8192, "n_ctx": 2048}}]}
            return (404, "") if called == "/metrics" else (200, models)
        known = called in (usages or {}) and body["stream"] is False
        answer = {"choices": [1], "output": [1], "content": [1], "usage": (usages or {}).get(called)}
        return (200 if known else 404), answer

    def get(settings, **more):
        if asked is not None:
            asked.update(more)
        return ServedModel(tmp_path / "m.gguf", None, 8192, 4096)

    launcher = Launcher(PRESETS["llamacpp"], str(program), lambda settings: Capacity(capacity_tokens=6192))
    folders = SimpleNamespace(scratch=tmp_path, get=get)
    target = LaunchedTarget(launcher, folders, start_timeout_s=20.0, form=RequestForm(endpoint))
    target.poll_s = 0.01
    with scripted_server(script) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.targets.launched.free_port", lambda port: int(server.url.rpartition(":")[2]))
        try:
            target.start(SETTINGS, path)
            assert target.model.max_model_len == 2048
            yield target
        finally:
            target.stop()


@pytest.mark.parametrize(
    ("log", "capacity", "wrong"),
    [
        (CACHE.format(96, 6144, "f32", "f32"), (6144, 96 << 20, "f32"), None),
        (CACHE.format(48, 6144, "f16", "f16"), (6144, 48 << 20, "f16"), "8,192 a token (f16)"),
        (CACHE.format(72, 6144, "f32", "f16"), (6144, 72 << 20, "f32 and f16"), "12,288 a token (f32 and f16)"),
        (CACHE.format(100, 6400, "f32", "f32"), (6400, 100 << 20, "f32"), "holds 6,400 tokens"),
        (  # layers with a window have a cache of their own
            CACHE.format(64, 6144, "f32", "f32") + "\n" + CACHE.format(32, 1024, "f32", "f32"),
            (6144, 96 << 20, "f32"),
            None,
        ),
        ("nothing of a cache", None, None),
    ],
)
def test_tokens_bytes_and_type_of_the_cache_are_read_and_held_against_the_budget(tmp_path, log, capacity, wrong):
    with launched(tmp_path, log) as target:
        info = target.server_info()
    names = ("capacity_tokens", "kv_bytes", "kv_type")
    assert info.to_json()["capacity"] == (dict(zip(names, capacity, strict=True)) if capacity else {})
    found = contradiction(SETTINGS, KNOWN, info)
    assert found is None if wrong is None else wrong in found


def test_a_setting_that_no_server_can_have_is_bad_input(tmp_path):
    with launched(tmp_path, "nothing of a cache") as target:
        target._settings = {**SETTINGS, "max_num_seqs": "many"}
        with pytest.raises(UsageError, match=r"engine\.max_num_seqs: 'many' is not a whole number"):
            target.server_info()


@pytest.mark.parametrize(
    ("endpoint", "usage", "template_tokens", "keeps_on"),
    [
        ("completions", {}, 0, True),
        ("chat", {"prompt_tokens": 3, "total_tokens": 4}, 2, True),
        ("responses", {"input_tokens": 10, "output_tokens": 1}, 9, True),
        ("messages", {"input_tokens": 1, "cache_read_input_tokens": 2, "output_tokens": 1}, 2, False),
        ("chat", {}, None, True),
    ],
)
def test_a_chat_template_counts_by_usage_and_an_end_that_cannot_be_ignored_is_said(
    tmp_path, endpoint, usage, template_tokens, keeps_on
):
    asked = {}
    with launched(tmp_path, usages={PATHS[endpoint]: usage}, endpoint=endpoint, asked=asked) as target:
        assert target.template_tokens == template_tokens
        quirks = target.server_info().server.quirks
    assert any("may end before its length" in quirk for quirk in quirks) is not keeps_on
    assert asked["drop_eos"] is not keeps_on
    assert any("reasoning" in quirk for quirk in quirks) is (endpoint != "completions")
