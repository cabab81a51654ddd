"""Sweeps over servers that are launched by a command with sweep variables, here of the mock server."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.sweep_parts import Bench, alive, complaints, end, finished, manifest, wait_until

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
    assert "--serve-cmd does not pass on model, kv_budget, max_model_len, max_num_seqs" in done.stdout
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
    words = "is not what was asked for: its pages have 128 tokens, and the configuration is for pages of 32"
    assert words in done.stdout, done.stdout
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
    time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(map(alive, launched)), 15)
    wait_until(lambda: not list(bench.folder.glob("kvbench-model-*")), 15)  # TMPDIR is there


def test_a_server_that_never_gets_ready_is_stopped_with_its_last_words(bench):
    script = bench.folder / "silent.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], start_new_session=True)\n"
        f"open({str(bench.folder / 'pids')!r}, 'a').write(f'{{os.getpid()}} {{child.pid}}\\n')\n"
        "print('loading the weights for ever', flush=True)\ntime.sleep(100)\n"
    )
    path = bench.write(engine=ENGINE, sweep={}, load=LOAD)
    line = f"{sys.executable} {script} {{port}}"
    done = bench.run(command(bench, str(path), "--start-timeout", "2", serve_cmd=line))
    assert done.returncode == 4
    assert "was not ready after 2 s and was stopped" in done.stdout
    assert "loading the weights for ever" in done.stdout
    assert not any(map(alive, pids_of(bench.folder / "pids")))


def test_a_server_that_ends_at_its_start_is_told_with_exit_code_and_last_words(bench):
    path = bench.write(engine=ENGINE, sweep={}, load=LOAD)
    line = f"{sys.executable} -c 'import sys; sys.exit(\"no such flag\")' {{port}}"
    done = bench.run(command(bench, str(path), serve_cmd=line))
    assert done.returncode == 4
    assert "the server ended with exit code 1 before it was ready" in done.stdout and "no such flag" in done.stdout


def test_an_interrupted_sweep_goes_on_with_the_same_command(bench):
    line, pids = serve(bench, "--ttft-ms 5 --itl-ms {page_size}")
    path = bench.write(engine=ENGINE | {"page_size": 50}, sweep={"page_size": [49]}, load=LOAD)
    process = psutil.Popen(
        command(bench, str(path), serve_cmd=line), env=bench.environment(), cwd=Path(__file__).parents[2],
        stdout=-1, stderr=-2, text=True,
    )  # fmt: skip
    wait_until(lambda: bench.results.exists() and len(pids_of(pids)) >= 4, 60)  # the second server
    code, output = end(process, signal.SIGINT)
    assert code == 130, output
    before = finished(bench.only_run())
    assert len(before) == 1
    assert not any(map(alive, pids_of(pids)))
    again = bench.run([sys.executable, "-m", "kvbench", "sweep", "--no-report", "--resume", str(bench.only_run())])
    assert again.returncode in (0, 4), again.stdout + again.stderr
    after = finished(bench.only_run())
    assert len(after) == 2 and before.items() <= after.items()


def test_a_dry_run_of_a_preset_shows_what_is_skipped_and_why(bench):
    path = bench.write(
        engine=ENGINE | {"page_size": 16, "device": "cpu"}, sweep={"layout": ["contiguous"], "page_size": [32, 64]}
    )
    words = [str(path), "--target", "vllm", "--target-python", sys.executable, "--dry-run"]
    (bench.folder / "vllm.py").touch()
    bench.env["PYTHONPATH"] = str(bench.folder)  # this Python has one
    refused = bench.run(bench.command(*words, "--exact", fake=False))
    assert refused.returncode == 2
    assert "vLLM cannot have page_size 16: its CPU attention takes multiples of 32" in refused.stderr
    shown = bench.run(bench.command(*words, fake=False))
    assert shown.returncode == 0, shown.stderr
    assert "paged-p32-c2" in shown.stdout and "paged-p64-c2" in shown.stdout and "p16-c2" not in shown.stdout
    assert "THE BASELINE IS NOT THE WORKLOAD'S: page_size is 32 instead of 16" in shown.stdout
    assert "100 s for each launch" in shown.stdout  # of vLLM: the built-in server's 8 would be far too few
    assert "skipped contiguous: vLLM cannot have layout contiguous: its KV cache is always paged" in shown.stdout
    assert not bench.results.exists()


def test_of_a_command_without_placeholders_one_configuration_can_be_chosen(bench):
    path = bench.write(engine=ENGINE, sweep={"page_size": [8]}, load=LOAD)
    words = [str(path), "--dry-run", "--only"]
    line = f"{sys.executable} -m kvbench mock-server --port {{port}}"
    one = bench.run(command(bench, *words, "launched-c2", serve_cmd=line))
    assert one.returncode == 0 and "launched-c2: launched server; 2 users" in one.stdout, one.stderr
    other = bench.run(command(bench, *words, "launched-p8-c2", serve_cmd=line))
    assert other.returncode == 2 and "{page_size}" in other.stderr
