"""kvbench and its load process under fire: killed, signalled twice, left alone by terminal or reader, without disk.

A sweep whose server hangs waits meanwhile for its time-outs; the last test looks at what became of it.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from tests.support.fire_bench import EITHER, QUIET, Ended, FireBench, resumed_as_it_should
from tests.support.sweep_parts import ROOT, end, finished, manifest, wait_until

Answer = TypeVar("Answer")
ENDLESS = json.dumps([{"path": "stream", "do": "hang", "first": 3}])  # a load that waits for its time-outs


@pytest.fixture(scope="module", autouse=True)
def hung(tmp_path_factory) -> Iterator[tuple[FireBench, Future[Ended]]]:
    """A sweep whose server stands still in the middle of a stream: it holds every connection and answers none."""
    bench = FireBench(tmp_path_factory.mktemp("hung"))
    rule = {"path": "stream", "do": "mid_stop", "first": 3}
    with ThreadPoolExecutor(1) as pool:
        yield bench, pool.submit(bench.fire, bench.workload(repeats=1), rules=[rule])


@pytest.fixture
def bench(tmp_path):
    return FireBench(tmp_path)


def started(bench: FireBench, **load) -> subprocess.Popen[str]:
    """A sweep in the middle of its first load."""
    arguments = [bench.workload(timeout_s=60.0, **{"repeats": 1} | load), *QUIET]
    process = bench.start(*arguments, FIRE=ENDLESS)
    wait_until(lambda: any(if_alive(child.net_connections, ()) for child in load_processes(process)))
    return process


def if_alive(ask: Callable[[], Answer], otherwise: Answer) -> Answer:
    """What a process tells of itself; one that has just ended, and is gone or a zombie, tells nothing."""
    try:
        return ask()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return otherwise


def load_processes(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = if_alive(lambda: psutil.Process(process.pid).children(recursive=True), [])
    return [child for child in children if "kvbench.load" in if_alive(child.cmdline, [])]


def test_a_load_process_that_is_killed_costs_its_load(bench):
    process = started(bench)
    load_processes(process)[0].kill()
    output, _ = process.communicate(timeout=120)
    found = manifest(bench.only_run())
    assert process.returncode == 4 and found["status"] == "incomplete" and not bench.left()
    assert "the load client was killed by signal 9" in found["failures"][0]["reason"]
    assert "the load client was killed by signal 9" in output and "Traceback" not in output
    resumed_as_it_should(bench, loads=1)


@pytest.mark.parametrize("numbers", [[signal.SIGINT, signal.SIGINT], [signal.SIGHUP]], ids=["twice", "terminal"])
def test_signals_end_a_sweep_once(bench, numbers):
    process = started(bench)
    for number in numbers[:-1]:
        process.send_signal(number)
    code, output = end(process, numbers[-1])
    assert code == 130 and f"stopped by {numbers[0].name}" in output and "--resume" in output
    assert "Traceback" not in output
    assert manifest(bench.only_run())["status"] == "incomplete" and not bench.left()


def test_a_sweep_whose_output_nobody_reads_stops_and_says_so_on_stderr(bench):
    command = [*bench.command(bench.workload(repeats=3)), *QUIET]
    process = subprocess.Popen(
        command, cwd=ROOT, env=bench.environment(FIRE="[]"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not process.stdout.readline().startswith("results:"):
        pass
    process.stdout.close()
    complaint = process.stderr.read()
    assert process.wait(120) == 130
    process.stderr.close()
    assert "nobody reads the output" in complaint and "--resume" in complaint and "Traceback" not in complaint
    assert len(finished(bench.only_run())) == 1 and not bench.left()
    assert manifest(bench.only_run())["status"] == "incomplete"


def test_another_command_whose_output_nobody_reads_did_not_succeed(bench):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "kvbench", "plan", bench.workload()]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, timeout=120, check=False)
    os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE and b"Traceback" not in done.stderr


def small_files(most_bytes: int):
    """What a child runs before its program: no file can grow beyond ``most_bytes``."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))


def test_samples_that_cannot_be_written_are_a_sentence_and_the_load_is_resumed(bench):
    out = bench.folder / "out"
    with bench.server([]) as url:
        path = bench.workload(num_requests=8, timeout_s=20.0)
        command = [sys.executable, "-m", "kvbench", "load", path, "--url", url, "--output-dir", str(out)]
        command += ["--no-calibration"]
        done = subprocess.run(
            command, cwd=ROOT, env=bench.environment(), capture_output=True, text=True, timeout=120, check=False,
            preexec_fn=small_files(5 * 1024),
        )  # fmt: skip
        assert done.returncode == 4 and "Traceback" not in done.stderr
        assert f"{out}" in done.stderr and "File too large" in done.stderr and "--resume" in done.stderr
        assert manifest(out)["status"] == "incomplete" and not (out / "metrics.json").exists()
        again = bench.end([*command, "--resume"])
        assert again.code in EITHER, again.output
    assert manifest(out)["status"] == "complete"
    assert json.loads((out / "metrics.json").read_text())["completed"] == 8


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for a manifest and little more."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a file system of a few KiB")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "none", str(folder)], check=False)
    if mounted.returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def test_a_full_disk_ends_a_sweep_with_its_path_and_what_was_written_is_resumed(bench, small_disk):
    class OnSmallDisk(FireBench):
        results = small_disk / "results"

    bench = OnSmallDisk(bench.folder)
    done = bench.fire(bench.workload(repeats=1, num_requests=40, timeout_s=20.0))
    run = bench.only_run()
    assert done.code == 4 and not done.left
    assert str(run) in done.output and "No space left on device; free some space" in done.output
    assert "what was measured is kept. Go on with:\n  kvbench sweep --resume" in done.output
    assert manifest(run)["status"] == "incomplete" and not finished(run)
    remount(small_disk, "ro")
    refused = bench.resume()
    assert refused.code == 2 and "cannot be written: Read-only file system" in refused.output
    remount(small_disk, "rw,size=20m")
    resumed_as_it_should(bench, loads=1)


def test_a_hung_server_and_a_hung_load_process_end_with_a_kvbench_that_is_killed(bench):
    process = started(bench)
    (server,) = bench.launches
    for hung in (psutil.Process(server["pid"]), *load_processes(process)):
        hung.send_signal(signal.SIGSTOP)
    process.kill()
    process.communicate(timeout=120)
    assert not bench.left()
    assert manifest(bench.only_run())["status"] == "incomplete"


def test_a_server_that_hangs_is_given_up_and_stopped(hung):
    bench, pending = hung
    done = pending.result(timeout=300)
    found = manifest(bench.only_run())
    assert done.code == 4 and not done.left
    assert found["status"] == "incomplete"
    assert "/metrics did not answer" in found["failures"][0]["reason"]
