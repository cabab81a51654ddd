"""The Locust file under Locust's own command line."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.support.loads import ROOT, free_port, own_mock, stamps_of
from tests.support.raw_worker import RawWorker

TTFT_MS, ITL_MS = 120, 15
WORKLOAD = """
name: small
seed: 5
model: {config: llama-32m, load_format: dummy}
engine: {device: cpu}
sweep: {page_size: [16]}
load:
  mode: closed
  concurrency: [2, 4]
  num_requests: [6, 14]
  repeats: 1
  prompts:
    kind: synthetic
    classes:
      - {name: short chat, share: 0.5, prompt_tokens: 8, output_tokens: 6}
      - {name: long document, share: 0.5, prompt_tokens: 60, output_tokens: 12}
"""


@pytest.fixture
def steady_url() -> Iterator[str]:
    """A mock server whose TTFT and ITL are known."""
    with own_mock("--ttft-ms", str(TTFT_MS), "--itl-ms", str(ITL_MS)) as (_, url):
        yield url


def start(
    folder: Path, *arguments: str, number: int = 14, file: Path = ROOT / "kvbench/load/locustfile.py"
) -> subprocess.Popen:
    """Locust without a web UI, on the small workload."""
    (folder / "small.yaml").write_text(WORKLOAD.replace("[6, 14]", f"[6, {number}]"))
    here = ["-f", str(file), "--headless", "--only-summary", *arguments]
    return subprocess.Popen(
        [sys.executable, "-m", "locust", *here, "--kvbench-workload", str(folder / "small.yaml")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def sharing(processes: int) -> tuple[str, ...]:
    """The options of so many processes of Locust's own."""
    port = str(free_port())
    return ("--processes", "2", "--master-bind-port", port, "--master-port", port) if processes > 1 else ()


def ended(running: subprocess.Popen) -> tuple[int, str, str]:
    out, err = running.communicate(timeout=120)
    return running.returncode, out, err


def test_ttft_itl_and_tpot_are_rows_and_locusts_workers_share_the_load(steady_url: str, tmp_path: Path) -> None:
    """14 requests over 2 worker processes of Locust's: each sent once, each timed, all in the CSV."""
    more = ("--csv", str(tmp_path / "out"), "--run-time", "50s", *sharing(2))
    code, _, said = ended(start(tmp_path, "--host", steady_url, "--kvbench-at", "c4", *more))
    assert code == 0, said
    assert "used up" in said and "--run-time" in said  # why it ends before its time
    stamps = stamps_of(steady_url)
    assert len(stamps) == 14
    tokens = {60: [], 8: []}
    for prompt, stamp in stamps.items():
        tokens[len(prompt)].append(len(stamp["sends"]))
    rows = pd.read_csv(tmp_path / "out_stats.csv").set_index(["Type", "Name"])
    for name, length in (("short chat", 8), ("long document", 60)):
        requests = len(tokens[length])
        assert requests > 0
        for kind, count in (("POST", requests), ("TTFT", requests), ("TPOT", requests)):
            assert rows.loc[(kind, name), "Request Count"] == count
        assert rows.loc[("ITL", name), "Request Count"] == sum(tokens[length]) - requests
        medians = rows["Median Response Time"]
        assert TTFT_MS - 2 <= medians[("TTFT", name)] < medians[("POST", name)]
        for kind in ("ITL", "TPOT"):
            assert ITL_MS - 2 <= medians[(kind, name)] < medians[("TTFT", name)]
        e2e = TTFT_MS + ITL_MS * (sum(tokens[length]) / requests - 1)
        assert e2e * 0.9 <= medians[("POST", name)]
    assert rows["Failure Count"].max() == 0
    (total,) = rows.loc[rows.index.get_level_values("Name") == "Aggregated"].to_dict("records")
    posts = rows.loc["POST"]
    assert total["Request Count"] == 14  # requests, not their times
    mean = np.average(posts["Average Response Time"], weights=posts["Request Count"])
    assert total["Average Response Time"] == pytest.approx(mean)


SLOW_START = """
import gevent
from kvbench.load.locustfile import *
from kvbench.load import locustfile
draw = locustfile._drawn
def draw_slowly(environment):
    gevent.sleep(1.5)
    return draw(environment)
locustfile._drawn = draw_slowly
"""


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_run_time_counts_from_the_first_request(steady_url: str, tmp_path: Path, processes: int) -> None:
    """The requests take longer to draw than the test may take."""
    (tmp_path / "slow.py").write_text(SLOW_START)
    words = ("--host", steady_url, "--kvbench-at", "c4", "--run-time", "1s", *sharing(processes))
    _, _, said = ended(start(tmp_path, *words, number=5000, file=tmp_path / "slow.py"))
    assert 0 < len(stamps_of(steady_url)) < 5000 and "used up" not in said, said
    assert "counts from now" in said


@pytest.mark.full
def test_a_worker_that_comes_late_takes_no_part_and_holds_nobody_up(steady_url: str, tmp_path: Path) -> None:
    """16 requests at 2 users take 1.5 s; to a worker that comes meanwhile Locust would deal users out, too."""
    port, options = str(free_port()), ("--host", steady_url, "--kvbench-at", "c4")
    of_master = ("--expect-workers", "1", "--users", "2", "--csv", str(tmp_path / "out"))
    master = start(tmp_path, *options, "--master", "--master-bind-port", port, *of_master, number=16)
    early = start(tmp_path, *options, "--worker", "--master-port", port, number=16)
    while len(stamps_of(steady_url)) < 2:
        time.sleep(0.05)
    with RawWorker(port) as late:
        late.say("client_ready", importlib.metadata.version("locust"))
        heard = []
        for kind, _ in late.heard(120.0):
            heard.append(kind)
            if kind == "quit":
                break
    code, _, said = ended(master)
    assert code == 0, said
    ended(early)
    assert heard[0] == "ack" and heard[-1] == "quit" and "spawn" not in heard and "kvbench_shard" not in heard
    rows = pd.read_csv(tmp_path / "out_stats.csv").set_index("Name")
    assert rows.loc["Aggregated", ["Request Count", "Failure Count"]].tolist() == [16, 0]
    assert len(stamps_of(steady_url)) == 16


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_the_test_ends_with_the_server(tmp_path: Path, processes: int) -> None:
    with own_mock("--ttft-ms", "5", "--itl-ms", "5") as (server, url):
        running = start(tmp_path, "--host", url, "--kvbench-at", "c4", *sharing(processes), number=5000)
        while len(stamps_of(url)) < 50:
            assert running.poll() is None
            time.sleep(0.05)
        server.kill()
        code, _, said = ended(running)
    assert code == 4, said
    assert "kvbench: the server went away (" in said and "Traceback" not in said


def test_a_mistake_is_one_sentence(tmp_path: Path) -> None:
    code, out, err = ended(start(tmp_path, "--kvbench-at", "c99"))
    said = [line for line in err.splitlines() if line.startswith("kvbench: ")]
    assert code == 2 and len(said) == 1 and "its loads are c2, c4" in said[0]
    assert "Traceback" not in err and "Ramping" not in err and out == ""
