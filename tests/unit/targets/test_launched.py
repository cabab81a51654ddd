"""What a launched server made of its KV budget, where it says so in its log only."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from kvbench.targets.base import contradiction
from kvbench.targets.launch_plan import Launcher
from kvbench.targets.launched import LaunchedTarget
from kvbench.targets.model_export import ServedModel
from kvbench.targets.presets import PRESETS

SERVER = """#!{python} -SE
import http.server, json, sys
print({log!r}, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        found = {{"data": [{{"id": "m", "meta": {{"n_vocab": 8192, "n_ctx": 2048}}}}]}}
        self.send_response(404 if self.path == "/metrics" else 200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())
    def log_message(self, *words):
        print("size = 1.00 MiB (  1 cells, 8 layers), K (f16): 0.5 MiB, V (f16): 0.5 MiB", flush=True)  # of a request
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
CACHE = (
    "0.03 I llama_kv_cache: size = {:7.2f} MiB ({:6d} cells, 8 layers, 32/1 seqs), K ({}): 1.00 MiB, V ({}): 1.00 MiB"
)
SETTINGS = {"layout": "paged", "kv_budget": "97MiB", "dtype": "float32"}
KNOWN = {"kv_budget_bytes": 97 << 20, "bytes_per_token": 16384, "capacity_tokens": 6144}


def told(tmp_path, log):
    """server_info of a llama-server with this log at its start."""
    program = tmp_path / "llama-server"
    program.write_text(SERVER.format(python=sys.executable, log=log))
    program.chmod(0o755)
    served = ServedModel(tmp_path / "m.gguf", None, 8192, 4096)
    folders = SimpleNamespace(scratch=tmp_path, get=lambda settings, **more: served)
    launcher = Launcher(PRESETS["llamacpp"], str(program), lambda settings: {"capacity_tokens": 6192})
    target = LaunchedTarget(launcher, folders, start_timeout_s=20.0)
    target.start(SETTINGS, tmp_path / "server.log")
    try:
        assert target.model.max_model_len == 2048
        return target.server_info()
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
    info = told(tmp_path, log)
    names = ("capacity_tokens", "kv_bytes", "kv_type")
    assert info["capacity"] == (dict(zip(names, capacity, strict=True)) if capacity else {})
    found = contradiction(SETTINGS, KNOWN, info)
    assert found is None if wrong is None else wrong in found
