"""Sweeps over servers that are launched by a command with sweep variables, here of the mock server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.sweep_parts import Bench, alive, complaints, finished, manifest, wait_until

# The mock server behind a launcher that forks it into a process group of its own, as launchers do.
LAUNCHER = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "kvbench", "mock-server", *sys.argv[2:]], preexec_fn=os.setpgrp)
open(sys.argv[1], "a").write(f"{os.getpid()} {child.pid}\\n")
sys.exit(child.wait())
"""
ENGINE = {"layout": "paged", "page_size": 4, "kv_budget": "1MiB", "max_model_len": 256, "max_num_seqs": 8}
LOAD = {"concurrency": [2], "num_requests": 6, "repeats": 1, "cache_state": "steady"}


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path, {"KVBENCH_NO_CALIBRATION": "1"})


def serve(bench, words):
    """The --serve-cmd, and the file that gets the pids of launcher and server."""
    script, pids = bench.folder / "launcher.py", bench.folder / "pids"
    script.write_text(LAUNCHER)
    return f"{sys.executable} {script} {pids} --port {{port}} --vocab-size 512 {words}", pids


def pids_of(path: Path) -> list[int]:
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def command(bench, *words, serve_cmd):
    return [*bench.command(*words, fake=False), "--no-report", "--serve-cmd", serve_cmd]


def test_each_value_of_a_sweep_is_a_launch_of_its_own_and_all_of_it_ends(bench):
    """page_size is passed to the mock server as the time between its chunks: what is measured must follow it."""
    line, pids = serve(bench, "--ttft-ms 5 --itl-ms {page_size}")
    path = bench.write(engine=ENGINE, sweep={"page_size": [4, 24]}, load=LOAD)
    done = bench.run(command(bench, str(path), serve_cmd=line))
    assert done.returncode in (0, 4), done.stdout + done.stderr
    assert "model, kv_budget, max_model_len, max_num_seqs" in done.stdout  # which the command does not pass on
    run = bench.only_run()
    assert complaints(run) == []
    tpot = {
        cell: json.loads((run / "cells" / cell / "loads" / "1" / "done.json").read_text())["metrics"]["tpot_ms"]["p50"]
        for cell in ("launched-p4-c2", "launched-p24-c2")
    }
    assert tpot["launched-p4-c2"] >= 3.0 and tpot["launched-p24-c2"] >= 20.0
    assert tpot["launched-p4-c2"] < tpot["launched-p24-c2"]  # by how much is the machine's, too
    facts = manifest(run)
    assert facts["model"]["name"] == "mock"  # its own: it was not told another
    assert facts["backend"] == "custom" and facts["serve_cmd"] == line
    for size in (4, 24):
        assert facts["servers"][f"launched-p{size}"]["server"]["command"][-2:] == ["--itl-ms", str(size)]
    assert facts["servers"]["launched-p24"]["engine"] == {"page_size": 24}
    assert len(pids_of(pids)) == 4 and not any(map(alive, pids_of(pids)))


# vLLM's cache_config_info says pages of 128, whatever it is told.
OTHER_PAGES = r"""
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

TEXTS = {
    "/metrics": '# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size="128"} 1\n',
    "/v1/models": '{"data": [{"id": "m"}]}',
}


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        body = TEXTS.get(self.path, "").encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def test_a_server_with_other_pages_than_it_was_asked_for_is_not_measured(bench):
    script = bench.folder / "pages.py"
    script.write_text(OTHER_PAGES)
    path = bench.write(engine=ENGINE | {"page_size": 32, "device": "cpu"}, sweep={}, load=LOAD)
    line = f"{sys.executable} {script} {{port}} {{page_size}}"
    done = bench.run(command(bench, str(path), "--preset", "vllm", serve_cmd=line))
    assert done.returncode == 4
    assert "128" in done.stdout and "engine.page_size" in done.stdout, done.stdout
    assert finished(bench.only_run()) == {}


def test_a_killed_kvbench_leaves_no_server_behind(bench):
    line, pids = serve(bench, "--itl-ms {page_size}")
    path = bench.write(engine=ENGINE | {"page_size": 200}, sweep={}, load=LOAD)
    process = psutil.Popen(
        command(bench, str(path), serve_cmd=line), env=bench.environment(), cwd=Path(__file__).parents[2]
    )
    wait_until(lambda: len(pids_of(pids)) == 2)
    launched = pids_of(pids)
    wait_until(lambda: list(bench.folder.glob("kvbench-model-*")))
    wait_until(lambda: any("kvbench.common.processes" in child.cmdline() for child in process.children()))
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(alive, launched)))
    wait_until(lambda: not list(bench.folder.glob("kvbench-model-*")))  # TMPDIR is there
