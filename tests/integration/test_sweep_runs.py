"""A whole sweep against a fake server: what it writes, in what order, and how it goes on after being killed."""

from __future__ import annotations

import errno
import json
import os
import re
import sys

import pandas as pd
import pytest

from kvbench.calibration import calibrate as calibration
from kvbench.calibration.calibrate import CalibrationSettings, ClientCalibration, ClientLoad, settings_for
from kvbench.common import foreign_cpu
from tests.support.loads import fake_server
from tests.support.sweep_parts import FAKE, Bench, alive, complaints, finished, manifest
from tests.unit.calibration.test_calibration import taken

CELLS = ("paged-p16-c3", "contiguous-c3")


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One finished sweep: 2 configurations x 1 load x 2 repeats."""
    bench = Bench(tmp_path_factory.mktemp("sweep"))
    path = bench.write(load={"concurrency": [3], "num_requests": [9], "slo": {"ttft_ms": 5000.0}})
    done = bench.sweep(str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    return bench, bench.only_run(), done


def test_each_configuration_gets_a_fresh_server_with_its_own_settings_in_each_repeat(measured):
    bench, run, done = measured
    assert set(finished(run)) == {(cell, repeat) for cell in CELLS for repeat in ("1", "2")}
    assert complaints(run) == [] and "INVALID" not in done.stdout
    launches = bench.launches
    assert len(launches) == 4 and not any(alive(launch["pid"]) for launch in launches)
    flags = [launch["flags"] for launch in launches]
    layouts = [each[each.index("--layout") + 1] for each in flags]
    assert layouts == [block["configuration"].split("-")[0] for block in manifest(run)["plan"]]
    assert [("--page-size" in each) for each in flags] == [layout == "paged" for layout in layouts]
    assert {each[each.index("--kv-budget") + 1] for each in flags} == {"65MiB"}


def test_configurations_see_the_same_requests_and_repeats_see_others(measured):
    files = measured[1].glob("cells/*/loads/*/done.json")
    digests = {p.parts[-4:-1:2]: json.loads(p.read_text())["requests_sha256"] for p in files}
    for repeat in ("1", "2"):
        assert digests["paged-p16-c3", repeat] == digests["contiguous-c3", repeat]
    assert digests["paged-p16-c3", "1"] != digests["paged-p16-c3", "2"]


def test_the_folder_holds_raw_samples_counters_and_summaries(measured):
    _, run, _ = measured
    folder = run / "cells" / "paged-p16-c3"
    requests, server = (pd.read_parquet(folder / f"{name}.parquet") for name in ("requests", "server"))
    assert len(requests) == 18 and set(requests["repeat"]) == {1, 2} and requests["ok"].all()
    assert {"t", "repeat", "num_requests_running", "kv_pages_owned"} <= set(server.columns)
    summary = json.loads((folder / "summary.json").read_text())
    assert [r["repeat"] for r in summary["repeats"]] == [1, 2]
    for repeat in summary["repeats"]:
        mine = requests[requests["repeat"] == repeat["repeat"]]
        # the warm-up is not among them: counters are differences over the load
        assert repeat["server"]["generation_tokens_total"] == mine["output_tokens"].sum()
        assert repeat["server"]["prompt_tokens_total"] == mine["prompt_tokens"].sum()
        assert repeat["server"]["pages_owned_after"] == 0 and repeat["metrics"]["completed"] == 9
    values = [r["metrics"]["output_throughput"] for r in summary["repeats"]]
    assert summary["aggregate"]["output_throughput"]["values"] == values
    assert summary["pooled"]["ttft_ms"]["n"] == summary["completed"] == summary["num_prompts"] == 18
    assert summary["max_concurrency"] == 3 and summary["capacity"]["kv_budget_bytes"] == 65 * 2**20
    assert summary["median_ttft_ms"] == summary["pooled"]["ttft_ms"]["p50"]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert 1 <= len(samples) <= 8 and all(s["text"] for s in samples)
    assert "ready http://127.0.0.1" not in (folder / "server.log").read_text()  # the part of its own load only
    assert all((run / name).stat().st_size > 1000 for name in ("report.html", "report.md"))


def test_the_manifest_says_what_was_measured_on_what(measured):
    found = manifest(measured[1])
    assert found["status"] == "complete" and found["workload"]["load"]["concurrency"] == [3]
    assert found["versions"]["torch"] and found["memory_bytes"] > 2**30 and found["model"]["vocab_size"] == 8192
    assert found["device"] == found["cpu"]["model"]  # the server says that it runs on the CPU
    assert (found["dtype"], found["kernel_backend"]) == ("float32", "fake")
    assert (found["workload_file"], found["seeds"]["workload"]) == ("tiny.yaml", 3)
    assert found["started"] <= found["ended"] and found["command"][0] == "kvbench"


def test_a_server_that_dies_costs_its_load_only_and_resume_mends_it_from_any_folder(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(foreign_cpu, "busy_notice", lambda: "this machine is busy: test")
    (tmp_path / "lines.txt").write_text("one two three four five six\n" * 40)
    prompts = {"kind": "text", "file": "lines.txt", "prompt_tokens": 8, "output_tokens": 4}
    bench.write(load={"repeats": 1, "prompts": prompts})
    fault = {"FAKE_FAULT": "die:4", "FAKE_FAULT_ONCE": str(tmp_path / "spent")}
    command = ("sweep", "tiny.yaml", "--serve-cmd", f"{sys.executable} {FAKE}", "--no-report")
    done = bench.kvbench(*command, cwd=tmp_path, **fault)
    run = bench.only_run()
    assert done.returncode == 4 and len(bench.launches) == 2  # the other block was run
    assert done.stdout.count("note: this machine is busy: test") == 1
    assert "fake engine: out of memory, dying" in done.stdout and "--resume" in done.stdout  # its last words
    before, begun = finished(run), manifest(run)
    assert len(before) == 1 and begun["status"] == "incomplete"
    (failure,) = begun["failures"]
    assert "dying" in failure["reason"]

    (tmp_path / "other").mkdir()
    resume = ("sweep", "--resume", str(run), "--no-report")
    (run / "manifest.json").write_text(json.dumps(begun | {"versions": begun["versions"] | {"torch": "1.0"}}))
    done = bench.kvbench(*resume)
    assert done.returncode == 2 and "torch (1.0 then, " in done.stderr and "--force" in done.stderr
    assert len(bench.launches) == 2  # nothing was launched
    (run / "manifest.json").write_text(json.dumps(begun))
    done = bench.kvbench(*resume, FAKE_WEIGHTS="beef")
    assert done.returncode == 2 and "weights_fingerprint (f00d then, beef now)" in done.stderr
    assert finished(run) == before and not any(alive(launch["pid"]) for launch in bench.launches)
    done = bench.kvbench(*resume, "--force", cwd=tmp_path / "other", FAKE_WEIGHTS="beef")
    assert done.returncode == 0, done.stdout + done.stderr
    found, after = manifest(run), finished(run)
    assert len(after) == 2 and {key: after[key] for key in before} == before
    assert (found["status"], found["failures"], complaints(run)) == ("complete", [], [])
    assert found["resumed"][-1]["differences"] == ["weights_fingerprint (f00d then, beef now)"]
    assert "busy" not in done.stdout and list((tmp_path / "other").iterdir()) == []


def test_a_running_server_can_be_measured_as_it_is(bench):
    path = bench.write(load={"repeats": 1})
    with fake_server() as (server, url):
        done = bench.sweep(str(path), "--target", url + "/v1", "--no-report", fake=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert set(finished(bench.only_run())) == {("target-c2", "1")}
        assert server.poll() is None  # it is not ours to stop


# fault: (repeats, options, exit code, what is said, loads that are measured, launches at most)
START_FAULTS = {
    "exit_at_start": (1, [], 4, ["exit code 1 before it was ready", "a library is missing"], 1, 2),  # the first time
    "never_ready": (5, ["--start-timeout", "1"], 4, ["not ready after 1 s", "still loading", "nothing was"], 0, 2),
    "refuse": (2, [], 2, ["error: kv_budget 1 is too small for this fake engine: raise kv_budget\n"], 0, 1),
    "leak:3": (1, ["--only", "paged*"], 4, ["6 KV pages were still owned 0.5 s after the last request ended"], 1, 1),
}


@pytest.mark.parametrize("fault", START_FAULTS)
def test_a_server_that_does_not_start_or_keeps_pages(bench, monkeypatch, fault):
    monkeypatch.setattr("kvbench.measure.server_state.RELEASE_BOUND_S", 0.5)
    repeats, options, code, said, loads, launches = START_FAULTS[fault]
    path = str(bench.write(load={"repeats": repeats}))
    env = {"FAKE_FAULT": fault, "FAKE_FAULT_ONCE": str(bench.folder / "spent")}
    done = bench.sweep(path, "--no-report", *options, **env)
    assert done.returncode == code and all(words in done.stdout + done.stderr for words in said)
    assert len(list(bench.results.glob("*/*/cells/*/loads/[0-9]*/done.json"))) == loads
    assert bool(list(bench.results.glob("*/*"))) == (code != 2), "a run that was refused leaves no folder to resume"
    assert 1 <= len(bench.launches) <= launches and not any(alive(launch["pid"]) for launch in bench.launches)


def test_each_value_of_a_sweep_is_a_launch_of_its_own_with_its_own_command(bench):
    """page_size is passed to the mock server as the time between its chunks: what is measured must follow it."""
    engine = {"layout": "paged", "page_size": 4, "kv_budget": "1MiB", "max_model_len": 256, "max_num_seqs": 8}
    engine["num_threads"] = 3
    path = bench.write(engine=engine, sweep={"page_size": [4, 24]}, load={"repeats": 1, "cache_state": "steady"})
    words = "--port {port} --vocab-size 512 --ttft-ms 5 --itl-ms {page_size}"
    serve = f"{sys.executable} -m kvbench dev mock-server {words}"
    core = min(os.sched_getaffinity(0))
    line = f"sh -c 'taskset -c {core} {serve} & wait # {{num_threads}} threads'"
    done = bench.sweep(str(path), "--no-report", "--serve-cmd", line, fake=False)
    assert done.returncode == 0, done.stdout + done.stderr
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
        assert f"--itl-ms {size} &" in facts["servers"][f"launched-p{size}"]["server"]["command"][-1]
    assert facts["servers"]["launched-p24"]["engine"] == {"page_size": 24, "num_threads": 3}
    if len(os.sched_getaffinity(0)) > 1:  # which cores it computes on is looked up, whatever it was told
        bound = f"has bound its threads to core {core}, and was asked for 3 threads"
        assert facts["num_threads"] == 1 and done.stdout.count(bound) == 1
        assert [note.endswith(bound) for note in facts["notes"]].count(True) == 1


WHY = "the load client does not keep up with the mock server"


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch) -> list[CalibrationSettings]:
    """What was asked for; the answer is that the client is good up to 4 streams."""
    asked: list[CalibrationSettings] = []

    def calibrate(settings: CalibrationSettings, attempts: int) -> ClientCalibration:
        asked.append(settings)
        return taken(settings, () if settings.streams <= 4 else (WHY,))

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    monkeypatch.setenv("KVBENCH_NO_CALIBRATION", "")
    return asked


def test_a_sweep_calibrates_once_per_setting_and_believes_it(bench, calibrations) -> None:
    path = bench.write(load={"concurrency": [2, 3, 6], "repeats": 1}, sweep={})
    done = bench.sweep(str(path), "--no-report")
    said, folder = done.stdout, bench.only_run()
    assert done.returncode == 4, said
    at_first = [settings_for(ClientLoad(streams)) for streams in (3, 6)]
    assert set(calibrations) >= set(at_first)  # more where the fake server sends more chunks than that
    assert len(set(calibrations)) == len(calibrations)
    rows = [json.loads(p.read_text()) for p in folder.glob("cells/*/loads/*/done.json")]
    loads = {row["cell_id"].rsplit("-", 1)[-1]: row for row in rows}
    streams = {name: row["calibration"]["settings"]["streams"] for name, row in loads.items()}
    assert streams == {"c2": 4, "c3": 4, "c6": 16}
    assert WHY in loads["c6"]["invalid_reasons"] and f"loads of 16 streams will be invalid: {WHY}" in said
    assert not any(WHY in loads[name]["invalid_reasons"] for name in ("c2", "c3"))
    told = json.loads((folder / "manifest.json").read_text())["calibration"]
    assert told["left_out"] is False
    assert {c["settings"]["streams"] for c in told["measured"]} == {4, 16}
    assert len(told["measured"]) == len(calibrations)
    for name, row in loads.items():
        settings, metrics = CalibrationSettings(**row["calibration"]["settings"]), row["metrics"]
        assert 1.26 * settings.events_per_s >= metrics["client"]["chunks"] / metrics["duration_s"], name


def test_a_full_disk_does_not_take_a_finished_load_s_line_away(bench, monkeypatch):
    def no_room(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvbench.measure.result.ServerReadings.store", no_room)
    done = bench.sweep(str(bench.write(sweep={}, load={"repeats": 1})), "--no-report")
    assert done.returncode == 4 and done.stderr.count("error: ") == 1 and "No space left" in done.stderr
    assert re.search(r"paged-p16-c2 repeat 1: \d+\.\d output tok/s", done.stdout)
    assert manifest(bench.only_run())["status"] == "incomplete" and finished(bench.only_run()) == {}


def test_a_sweep_ends_after_a_first_load_without_an_answer(bench):
    rule = {"path": "stream", "do": "status", "status": 500}
    done = bench.sweep(str(bench.write(load={"concurrency": [2, 1]})), "--no-calibration", FIRE=json.dumps([rule]))
    assert done.returncode == 4 and len(bench.launches) == len(finished(bench.only_run())) == 1
    assert manifest(bench.only_run())["status"] == "incomplete" and "ended early: no request" in done.stdout
    assert "under fire" in done.stdout and "-o load.timeout_s=60 (it is 20)" in done.stdout
