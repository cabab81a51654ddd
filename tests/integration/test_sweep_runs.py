"""A whole sweep against a fake server: what it writes, in what order, and how it goes on after being killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pandas as pd
import pytest

from kvbench.cli.main import main
from tests.support.sweep_parts import (
    FAKE,
    ROOT,
    Bench,
    alive,
    complaints,
    end,
    finished,
    manifest,
    wait_until,
)  # fmt: skip

ALL = {(cell, repeat) for cell in ("paged-p16-c2", "contiguous-c2") for repeat in ("1", "2")}


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One finished sweep: 2 configurations x 2 loads x 2 repeats."""
    bench = Bench(tmp_path_factory.mktemp("sweep"))
    path = bench.write(load={"concurrency": [1, 3], "num_requests": [3, 9], "slo": {"ttft_ms": 5000.0}})
    done = bench.sweep(str(path))
    assert done.returncode in (0, 4), done.stdout + done.stderr
    return bench, bench.only_run(), done


def test_every_cell_is_measured_in_every_repeat_and_nothing_but_the_client_may_complain(measured):
    _, run, done = measured
    cells = ("paged-p16-c1", "paged-p16-c3", "contiguous-c1", "contiguous-c3")
    assert set(finished(run)) == {(cell, repeat) for cell in cells for repeat in ("1", "2")}
    assert manifest(run)["status"] == "complete"
    assert complaints(run) == []
    assert (done.returncode == 4) == ("INVALID" in done.stdout)


def test_each_configuration_gets_a_fresh_server_in_each_repeat_with_its_own_settings(measured):
    bench, run, _ = measured
    launches = bench.launches
    assert len(launches) == 4
    assert all(not alive(launch["pid"]) for launch in launches)
    layouts = [launch["flags"][launch["flags"].index("--layout") + 1] for launch in launches]
    planned = [block["configuration"].split("-")[0] for block in manifest(run)["plan"]]
    assert layouts == planned
    for launch, layout in zip(launches, layouts, strict=True):
        assert ("--page-size" in launch["flags"]) == (layout == "paged")
        assert launch["flags"][launch["flags"].index("--kv-budget") + 1] == "65MiB"


def test_configurations_see_the_same_requests_and_repeats_see_others(measured):
    _, run, _ = measured
    digests = {
        p.parts[-4:-1:2]: json.loads(p.read_text())["requests_sha256"] for p in run.glob("cells/*/loads/*/done.json")
    }
    for load in ("c1", "c3"):
        for repeat in ("1", "2"):
            assert digests[f"paged-p16-{load}", repeat] == digests[f"contiguous-{load}", repeat]
        assert digests[f"paged-p16-{load}", "1"] != digests[f"paged-p16-{load}", "2"]


def test_the_folder_holds_raw_samples_counters_and_summaries(measured):
    _, run, _ = measured
    folder = run / "cells" / "paged-p16-c3"
    requests = pd.read_parquet(folder / "requests.parquet")
    assert len(requests) == 18 and set(requests["repeat"]) == {1, 2} and requests["ok"].all()
    server = pd.read_parquet(folder / "server.parquet")
    assert {"t", "repeat", "num_requests_running", "kv_pages_owned"} <= set(server.columns)
    summary = json.loads((folder / "summary.json").read_text())
    assert [r["repeat"] for r in summary["repeats"]] == [1, 2]
    for repeat in summary["repeats"]:
        mine = requests[requests["repeat"] == repeat["repeat"]]
        assert repeat["server"]["pages_owned_after"] == 0
        # the warm-up is not among them: counters are differences over the load
        assert repeat["server"]["generation_tokens_total"] == mine["output_tokens"].sum()
        assert repeat["server"]["prompt_tokens_total"] == mine["prompt_tokens"].sum()
        assert repeat["metrics"]["completed"] == 9
    values = summary["aggregate"]["output_throughput"]
    assert values["n"] == 2 and values["min"] <= values["median"] <= values["max"]
    assert values["values"] == [r["metrics"]["output_throughput"] for r in summary["repeats"]]
    assert summary["pooled"]["ttft_ms"]["n"] == 18
    assert summary["completed"] == 18 and summary["num_prompts"] == 18 and summary["max_concurrency"] == 3
    assert summary["median_ttft_ms"] == summary["pooled"]["ttft_ms"]["p50"]
    assert summary["capacity"]["kv_budget_bytes"] == 65 * 2**20
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert 1 <= len(samples) <= 8 and all(s["text"] for s in samples)
    assert "ready http://127.0.0.1" not in (folder / "server.log").read_text()  # the part of its own load only
    for name in ("report.html", "report.md"):
        assert (run / name).stat().st_size > 1000


def test_the_manifest_says_what_was_measured_on_what(measured):
    _, run, _ = measured
    found = manifest(run)
    assert found["workload"]["load"]["concurrency"] == [1, 3]
    assert found["versions"]["torch"] and found["cpu"]["cores"] >= 1 and found["memory_bytes"] > 2**30
    assert found["model"]["vocab_size"] == 8192
    assert found["device"] == found["cpu"]["model"]  # the server told that it runs on the CPU
    assert (found["dtype"], found["kernel_backend"]) == ("float32", "fake")
    assert found["workload_file"] == "tiny.yaml"
    assert found["seeds"]["workload"] == 3
    assert found["started"] <= found["ended"]
    assert found["command"][:2] == ["kvbench", "sweep"]


def test_without_a_terminal_there_is_one_line_a_load_with_progress_and_time_left(measured):
    _, _, done = measured
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert [line.split("]")[0] for line in lines] == [f"[{n}/8" for n in range(1, 9)]
    assert all("output tok/s" in line and "left)" in line for line in lines)
    assert "report.html" in done.stdout


def test_an_interrupted_report_is_not_half_there_and_its_command_is_named(measured, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(measured[1], tmp_path / "run")
    reports = [folder / name for name in ("report.html", "report.md", "summary.csv")]
    for path in reports:
        path.unlink()
    before = sorted(folder.iterdir())

    def interrupted(run):
        os.kill(os.getpid(), signal.SIGINT)
        return ""

    with monkeypatch.context() as patch:
        patch.setattr("kvbench.report.write.markdown", interrupted)
        with pytest.raises(SystemExit) as stopped:
            main(["sweep", "--resume", str(folder)])
    assert stopped.value.code == 130
    assert (
        "stopped by SIGINT; everything is measured. Write the report with:\n  kvbench report "
        in capsys.readouterr().out
    )
    assert sorted(folder.iterdir()) == before and manifest(folder)["status"] == "complete"
    with pytest.raises(SystemExit) as written:
        main(["report", str(folder)])
    assert written.value.code == 0 and all(path.stat().st_size for path in reports)


def test_resuming_a_complete_run_measures_nothing_again(measured):
    bench, run, _ = measured
    before, launches = finished(run), len(bench.launches)
    done = bench.sweep("--resume", str(run), "--no-report")
    assert done.returncode in (0, 4)
    assert finished(run) == before and len(bench.launches) == launches


def test_the_report_command_writes_it_again(measured):
    bench, run, _ = measured
    (run / "report.md").unlink()
    done = bench.run([sys.executable, "-m", "kvbench", "report", str(run)])
    assert done.returncode == 0 and (run / "report.md").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_sweep_goes_on_with_what_is_left(bench, number):
    path = bench.write()
    process = bench.start(str(path), "--no-report", FAKE_TOKEN_S="0.03")
    wait_until(lambda: len(list(bench.results.glob("*/*/cells/*/loads/[0-9]*/done.json"))) >= 1)
    wait_until(lambda: list(bench.results.glob("*/*/cells/*/loads/running-*/spec.json")))  # in the middle of a load
    code, output = end(process, number)
    run = bench.only_run()
    before = finished(run)
    assert 1 <= len(before) < len(ALL)
    wait_until(lambda: not any(alive(launch["pid"]) for launch in bench.launches), 15)
    if number == signal.SIGKILL:
        assert manifest(run)["status"] == "incomplete"  # from its first moment on
        done = bench.sweep(str(path), "--resume", "--no-report")  # the latest incomplete run of this workload
    else:
        assert code == 130 and manifest(run)["status"] == "incomplete"
        assert "--resume" in output and str(run.name) in output
        assert list(run.glob("cells/*/summary.json"))  # what was measured can be read
        done = bench.run([sys.executable, "-m", "kvbench", "sweep", "--resume", str(run), "--no-report"])
    assert done.returncode in (0, 4), done.stdout + done.stderr
    assert f"{len(before)} loads are finished" in done.stdout
    after = finished(run)
    assert set(after) == ALL and manifest(run)["status"] == "complete" and complaints(run) == []
    assert {key: after[key] for key in before} == before  # none was run twice
    assert bench.only_run() == run


def test_resume_refuses_another_workload_and_says_what_differs(bench):
    path = bench.write()
    first = bench.sweep(str(path), "--only", "paged*", "--repeats", "1", "--no-report")
    assert first.returncode in (0, 4)
    run = bench.only_run()
    done = bench.sweep(str(path), "--resume", str(run), "--repeats", "1", "-o", "load.timeout_s=9.0", "--seed", "4")
    assert done.returncode == 2
    assert "differs in load.timeout_s, seed" in done.stderr


def test_resume_refuses_other_versions_and_other_weights_unless_forced(bench):
    path = bench.write(load={"repeats": 1})
    first = bench.sweep(str(path), "--no-report", FAKE_FAULT="die:2", FAKE_FAULT_ONCE=str(bench.folder / "spent"))
    run = bench.only_run()
    assert first.returncode == 4 and len(finished(run)) == 1
    begun = manifest(run)
    (run / "manifest.json").write_text(json.dumps(begun | {"versions": begun["versions"] | {"torch": "1.0"}}))
    resume = [sys.executable, "-m", "kvbench", "sweep", "--resume", str(run), "--no-report"]
    done = bench.run(resume)
    assert done.returncode == 2 and "torch (1.0 then, " in done.stderr and "--force" in done.stderr
    assert len(bench.launches) == 2  # nothing was launched
    (run / "manifest.json").write_text(json.dumps(begun))
    done = bench.run(resume, FAKE_WEIGHTS="beef")
    assert done.returncode == 2 and "weights_fingerprint (f00d then, beef now)" in done.stderr
    assert len(finished(run)) == 1 and not any(alive(launch["pid"]) for launch in bench.launches)
    done = bench.run([*resume, "--force"], FAKE_WEIGHTS="beef")
    assert done.returncode in (0, 4), done.stdout + done.stderr
    found = manifest(run)
    assert len(finished(run)) == 2 and found["status"] == "complete"
    assert found["resumed"][-1]["differences"] == ["weights_fingerprint (f00d then, beef now)"]


def test_a_run_is_resumed_from_another_folder_and_says_once_that_the_machine_is_busy(bench, tmp_path):
    (tmp_path / "lines.txt").write_text("one two three four five six\n" * 40)
    prompts = {"kind": "text", "file": "lines.txt", "prompt_tokens": 8, "output_tokens": 4}
    bench.write(load={"repeats": 1, "prompts": prompts})
    environment = bench.environment(PYTHONPATH=str(ROOT), FAKE_FAULT="die:2", FAKE_FAULT_ONCE=str(tmp_path / "spent"))
    program = (
        "from kvbench.cli import main; from kvbench.common import foreign_cpu; "
        "foreign_cpu.busy_notice = lambda: 'this machine is busy: test'; main.main()"
    )

    def sweep(folder, *arguments):
        command = [sys.executable, "-c", program, "sweep", *arguments, "--no-report"]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
        )

    first = sweep(tmp_path, "tiny.yaml", "--serve-cmd", f"{sys.executable} {FAKE}")
    assert first.returncode == 4, first.stdout + first.stderr
    assert first.stdout.count("note: this machine is busy: test") == 1
    run = bench.only_run()
    assert len(finished(run)) == 1
    (tmp_path / "other").mkdir()
    done = sweep(tmp_path / "other", "--resume", str(run))
    assert done.returncode in (0, 4) and len(finished(run)) == 2, done.stdout + done.stderr
    assert manifest(run)["status"] == "complete" and "busy" not in done.stdout
    assert list((tmp_path / "other").iterdir()) == []


def test_a_running_server_can_be_measured_as_it_is(bench):
    path = bench.write(load={"repeats": 1})
    server = subprocess.Popen([sys.executable, str(FAKE)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().split()[1]
        done = bench.sweep(str(path), "--target", url + "/v1", "--no-report", fake=False)
        assert done.returncode in (0, 4), done.stdout + done.stderr
        assert set(finished(bench.only_run())) == {("target-c2", "1")}
        assert server.poll() is None  # it is not ours to stop
        out = bench.folder / "one"
        command = [sys.executable, "-m", "kvbench", "load", str(path), "--url", url, "--output-dir", str(out)]
        done = bench.run(command)
        assert done.returncode in (0, 4) and "6 completed, 0 failed" in done.stdout
        assert json.loads((out / "metrics.json").read_text())["completed"] == 6
    finally:
        server.terminate()
        server.wait(10)
        server.stdout.close()
