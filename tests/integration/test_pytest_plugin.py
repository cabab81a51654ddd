"""The pytest plug-in, as an engine's own repository uses it: the tests of docs/adopting.md, against known times."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvbench.common.packages import REPOSITORY

SERVE = "-m kvbench dev mock-server --port {port} --jitter 0 --vocab-size 1000"
TTFT_MS, ITL_MS = 100, 20
# A machine that runs other tests at the same time is never quiet: loads are valid all the same.
QUIET = """
import sys
if "kvbench" in sys.orig_argv:
    import kvbench.measure.http as http
    http.judges_this_machine = lambda *sides: False
elif "kvbench.load" in sys.orig_argv:
    import kvbench.load.validity as validity
    validity.invalid_reasons = lambda client, lost: []
"""


@pytest.fixture
def run_pytest(tmp_path):
    """Runs pytest in a repository with the tests of the page, and others; returns its exit code and output."""
    page = (REPOSITORY / "docs" / "adopting.md").read_text()
    (tests,) = re.findall(r"```python\n(# test_serving\.py\n.+?)```", page, re.DOTALL)
    (tmp_path / "test_serving.py").write_text(tests)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(QUIET)

    def run(
        *words: str, times: str = f"--ttft-ms {TTFT_MS} --itl-ms {ITL_MS}", more: str = "", serve: str = SERVE
    ) -> tuple[int, str]:
        (tmp_path / "pytest.ini").write_text(
            f"[pytest]\nkvbench_serve = {sys.executable} {serve} {times}\nkvbench_start_timeout = 30\n"
        )
        (tmp_path / "test_more.py").write_text(more)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-ra", *words]
        env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{REPOSITORY}"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


def serving(folder: Path) -> list[int]:
    """Lists the processes of servers that the tests in a folder launched."""
    return [p.pid for p in psutil.process_iter(["cmdline", "cwd"])
            if "mock-server" in (p.info["cmdline"] or ()) and p.info["cwd"] == str(folder)]  # fmt: skip


def test_the_tests_of_the_page_pass_and_their_figures_are_the_servers(run_pytest, tmp_path):
    more = f"""
USUAL = ("--input-len", "64", "--output-len", "16", "--concurrency", "4", "--num-prompts", "32")
def test_times(kvbench_load, kvbench_server):
    load = kvbench_load(*USUAL)
    assert {TTFT_MS} <= load["p50_ttft_ms"] < {TTFT_MS + 60} and {ITL_MS - 2} <= load["p50_tpot_ms"] < {ITL_MS + 20}
    assert (load.exit_code, (load.folder / "requests.parquet").is_file()) == (0, True)
    assert kvbench_server.startswith("http://127.0.0.1:")
def test_name(kvbench_load):
    kvbench_load(*USUAL)["p95_tftt_ms"]
def test_counters(kvbench_gate):
    assert kvbench_gate("counters", "--only", "async-forks/*").outcome == "pass"
def test_compare(kvbench_compare):
    kvbench_compare("no such side", ".")
def test_word(kvbench_load):
    kvbench_load("--concurency", "4")
"""
    code, output = run_pytest("--kvbench", more=more)
    assert code == 1 and "4 passed" in output and "3 failed" in output
    assert "did you mean p95_ttft_ms?" in output and "--concurrency" in output and "no such side" in output
    assert serving(tmp_path) == []


def test_a_server_that_is_too_slow_fails_both_tests(run_pytest):
    code, output = run_pytest("--kvbench", times="--ttft-ms 550 --itl-ms 65")
    assert code == 1 and "2 failed" in output and "p95_itl_ms" in output


ALWAYS_STREAMS = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(json.dumps({"data": [{"id": "toy", "max_model_len": 4096}]}).encode())
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))  # fails where there is none
        self.answer(b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}\\n\\n')
    def answer(self, data):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_that_answers_no_warm_up_fails_with_what_kvbench_said(run_pytest, tmp_path):
    (tmp_path / "toy.py").write_text(ALWAYS_STREAMS)
    code, output = run_pytest("--kvbench", "-k", "limits", serve="toy.py {port}", times="")
    assert code == 1 and "1 failed" in output and "(exit code 4)" in output and "stream: false" in output
    assert "ValueError" not in output


def test_without_the_option_they_are_skipped_and_nothing_is_launched(run_pytest):
    code, output = run_pytest(times="--no-such-option")
    assert code == 0 and "2 skipped" in output and "--kvbench" in output


def test_a_server_that_does_not_start_is_one_sentence(run_pytest):
    code, output = run_pytest("--kvbench", times="--no-such-option")
    assert code == 1 and "kvbench_serve ended with exit code 2" in output and "--no-such-option" in output
