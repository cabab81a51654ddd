"""A whole sweep against a fake server: what it writes, in what order, and how it goes on after being killed."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import sys
from collections import Counter

import pandas as pd
import pytest

from kvbench.calibration import calibrate as calibration
from kvbench.calibration.calibrate import DEFAULT_ITL_MS, CalibrationSettings, ClientCalibration
from kvbench.common import foreign_cpu
from kvbench.measure.http import HttpInstrument
from tests.support.loads import fake_server
from tests.support.sweep_parts import FAKE, Bench, alive, complaints, end, finished, manifest, wait_until
from tests.unit.calibration.test_calibration import taken

EITHER = (0, 4)  # other work on this machine may make the loads of a process of its own invalid
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


def test_every_cell_is_measured_in_every_repeat_and_nothing_but_the_client_may_complain(measured):
    _, run, done = measured
    assert set(finished(run)) == {(cell, repeat) for cell in CELLS for repeat in ("1", "2")}
    assert manifest(run)["status"] == "complete"
    assert complaints(run) == [] and "INVALID" not in done.stdout


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
    for repeat in ("1", "2"):
        assert digests["paged-p16-c3", repeat] == digests["contiguous-c3", repeat]
    assert digests["paged-p16-c3", "1"] != digests["paged-p16-c3", "2"]


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
    assert found["workload"]["load"]["concurrency"] == [3]
    assert found["versions"]["torch"] and found["cpu"]["cores"] >= 1 and found["memory_bytes"] > 2**30
    assert found["model"]["vocab_size"] == 8192
    assert found["device"] == found["cpu"]["model"]  # the server says that it runs on the CPU
    assert (found["dtype"], found["kernel_backend"]) == ("float32", "fake")
    assert found["workload_file"] == "tiny.yaml"
    assert found["seeds"]["workload"] == 3
    assert found["started"] <= found["ended"]
    assert found["command"][0] == "kvbench"


def test_resuming_a_complete_run_measures_nothing_and_an_interrupted_report_is_not_half_there(
    measured, tmp_path, monkeypatch
):
    bench, folder = measured[0], shutil.copytree(measured[1], tmp_path / "run")
    launches, loads = len(bench.launches), finished(folder)
    reports = [folder / name for name in ("report.html", "report.md", "summary.csv")]
    for path in reports:
        path.unlink()
    before = sorted(folder.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr("kvbench.report.page.markdown", lambda run: os.kill(os.getpid(), signal.SIGINT) or "")
        stopped = bench.kvbench("sweep", "--resume", str(folder))
    assert stopped.returncode == 130 and "SIGINT" in stopped.stdout and "kvbench report " in stopped.stdout
    assert sorted(folder.iterdir()) == before and manifest(folder)["status"] == "complete"
    assert finished(folder) == loads and len(bench.launches) == launches
    assert bench.kvbench("report", str(folder)).returncode == 0
    assert all(path.stat().st_size for path in reports)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_sweep_goes_on_with_what_is_left(bench, number):
    """An impatient SIGINT comes twice."""
    path = bench.write(sweep={})
    process = bench.start(str(path), "--no-report", FAKE_TOKEN_S="0.03")
    wait_until(lambda: list(bench.results.glob("*/*/cells/*/loads/[0-9]*/done.json")))
    wait_until(lambda: list(bench.results.glob("*/*/cells/*/loads/running-*/spec.json")))  # in the middle of a load
    if number == signal.SIGINT:
        process.send_signal(number)
    code, output = end(process, number)
    run = bench.only_run()
    before = finished(run)
    assert len(before) == 1
    wait_until(lambda: not any(alive(launch["pid"]) for launch in bench.launches), 15)
    assert manifest(run)["status"] == "incomplete"  # from its first moment on
    if number == signal.SIGKILL:
        done = bench.sweep(str(path), "--resume", "--no-report")  # the latest incomplete run of this workload
    else:
        assert code == 130 and "--resume" in output and str(run.name) in output
        assert list(run.glob("cells/*/summary.json"))  # what was measured can be read
        done = bench.kvbench("sweep", "--resume", str(run), "--no-report")
    assert done.returncode in EITHER, done.stdout + done.stderr
    assert "1 finished load," in done.stdout
    after = finished(run)
    assert len(after) == 2 and manifest(run)["status"] == "complete" and complaints(run) == []
    assert {key: after[key] for key in before} == before  # none was run twice
    assert bench.only_run() == run


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
    at_first = [s.streams for s in calibrations if s.itl_ms == DEFAULT_ITL_MS]
    assert sorted(at_first) == [4, 16]
    assert len(set(calibrations)) == len(calibrations) > len(at_first)  # the fake server sends more chunks than that
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


OTHERS = "other processes used 0.50 of a core"


@pytest.fixture
def disturb(bench, monkeypatch):
    """Makes loads valid but for those of ``left``: how often each (cell, repeat) is still disturbed."""
    left: Counter[tuple[str, int]] = Counter()
    bench.again = True
    run = HttpInstrument.run

    def judged(instrument, cell, repeat, out):
        left[cell.cell_id, repeat] -= 1
        reasons = (OTHERS,) if left[cell.cell_id, repeat] >= 0 else ()
        told = {"valid": not reasons, "invalid_reasons": reasons, "disturbances": reasons, "server_faults": ()}
        return run(instrument, cell, repeat, out).model_copy(update=told)

    monkeypatch.setattr(HttpInstrument, "run", judged)
    monkeypatch.setattr(foreign_cpu, "waits_for_quiet", lambda limit_s, check, on_busy: True)
    return left


def summary(run, cell):
    return json.loads((run / "cells" / cell / "summary.json").read_text())


def test_a_disturbed_load_is_measured_again_and_left_out_if_it_stays_so(bench, disturb):
    once, always = (CELLS[0].replace("3", "2"), 1), (CELLS[1].replace("3", "2"), 2)
    disturb.update({once: 1, always: 9})
    path = bench.write()
    done = bench.sweep(str(path))
    run = bench.only_run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(bench.launches) == 4 + 1 + 2
    assert finished(run).keys() == {(cell, repeat) for cell, _ in (once, always) for repeat in ("1", "2")}
    aside = [(each["cell_id"], each["repeat"]) for each in manifest(run)["set_aside"]]
    assert Counter(aside) == {once: 1, always: 2}
    for entry in manifest(run)["set_aside"]:
        assert json.loads((run / entry["folder"] / "done.json").read_text())["invalid_reasons"] == [OTHERS]
    assert len(list((run / "set-aside" / "logs").iterdir())) == 3 and len(list((run / "logs").iterdir())) == 4
    found = {cell: summary(run, cell) for cell, _ in (once, always)}
    assert all(each["valid"] and not each["invalid_reasons"] for each in found.values())
    assert found[once[0]]["aggregate"]["completed"]["n"] == 2 and found[once[0]]["invalid_repeats"] == {}
    assert found[always[0]]["aggregate"]["completed"]["n"] == 1 and set(found[always[0]]["invalid_repeats"]) == {"2"}
    assert set(pd.read_parquet(run / "cells" / always[0] / "requests.parquet")["repeat"]) == {1}
    for text in (done.stdout.lower(), (run / "report.md").read_text().lower().replace("\\", "")):
        assert f"{always[0]}: 1 of 2 repeats" in text and f"{once[0]} repeat 1" in text and "measured again" in text

    disturb.clear()
    again = bench.kvbench("sweep", "--resume", str(run), "--no-report")
    assert again.returncode == 0 and len(bench.launches) == 8 and manifest(run)["status"] == "complete"
    assert summary(run, always[0])["aggregate"]["completed"]["n"] == 2


def test_a_cell_without_a_valid_load_is_invalid_and_a_resume_measures_it_again(bench, disturb):
    cell = "paged-p16-c2"
    disturb[cell, 1] = 9
    path = bench.write(load={"repeats": 1}, sweep={})
    done = bench.sweep(str(path), "--no-report")
    run = bench.only_run()
    assert done.returncode == 4 and f"{cell} is invalid: repeat 1: {OTHERS}" in done.stdout
    assert f"--resume {os.path.relpath(run)}" in done.stdout
    assert not summary(run, cell)["valid"]
    before = len(bench.launches)
    disturb.clear()
    assert bench.kvbench("sweep", "--resume", str(run), "--no-report").returncode == 0
    assert len(bench.launches) == before + 1 and summary(run, cell)["valid"]


def test_a_server_that_refuses_requests_is_a_finding_and_is_not_measured_again(bench):
    cell = "paged-p16-c2"
    rule = {"path": "stream", "do": "error_event", "first": 4, "count": 4}
    path = bench.write(load={"repeats": 1, "num_requests": 12}, sweep={})
    done = bench.sweep(str(path), "--no-calibration", FIRE=json.dumps([rule]))
    run, (told,) = bench.only_run(), summary(bench.only_run(), cell)["refused"]
    assert told == 'repeat 1: served 8 of 12 requests; 4 of 12: "out of pages"' and not summary(run, cell)["valid"]
    assert f"REFUSED: {told.removeprefix('repeat 1: ')}" in done.stdout  # as it is measured
    assert f"- {cell}: {told}" in done.stdout  # at the end
    assert '4 of 12 requests failed: "out of pages"' in (run / "report.md").read_text() and complaints(run) == []
    assert done.returncode == 0 and summary(run, cell)["invalid_reasons"] == []
    before = len(bench.launches)
    again = bench.kvbench("sweep", "--resume", str(run), "--no-report")
    assert again.returncode == 0 and len(bench.launches) == before and f"- {cell}: {told}" in again.stdout


def test_a_sweep_ends_after_a_first_load_without_an_answer(bench):
    rule = {"path": "stream", "do": "status", "status": 500}
    done = bench.sweep(str(bench.write(load={"concurrency": [2, 1]})), "--no-calibration", FIRE=json.dumps([rule]))
    run = bench.only_run()
    assert done.returncode == 4 and len(bench.launches) == len(finished(run)) == 1
    assert manifest(run)["status"] == "incomplete" and "ended early: no request has succeeded" in done.stdout
    assert "under fire" in done.stdout and "-o load.timeout_s=60 (it is 20)" in done.stdout
    bench.kvbench("sweep", "--resume", str(run), "--no-report")  # on a server that answers
    assert manifest(run)["status"] == "complete" and len(finished(run)) == 8


def busy(limit_s, check, on_busy):
    on_busy("0.52 of a core: firefox 0.50")
    return False


def test_while_other_programs_keep_the_machine_busy_a_disturbed_load_is_not_measured_again(bench, disturb, monkeypatch):
    monkeypatch.setattr(foreign_cpu, "waits_for_quiet", busy)
    cell = "paged-p16-c2"
    disturb[cell, 1] = 1
    path = bench.write(load={"repeats": 2}, sweep={}, max_minutes=60)
    done = bench.sweep(str(path), "--no-report")
    run = bench.only_run()
    assert done.returncode == 0 and len(bench.launches) == 2 and "firefox" in done.stdout
    assert manifest(run)["status"] == "complete" and manifest(run)["left_out"] == manifest(run)["set_aside"] == []
    assert set(summary(run, cell)["invalid_repeats"]) == {"1"} and summary(run, cell)["valid"]

    again = bench.kvbench("sweep", "--resume", str(run), "--no-report")
    assert again.returncode == 0 and len(bench.launches) == 3 and summary(run, cell)["invalid_repeats"] == {}


@pytest.mark.parametrize(("waits", "measured", "repeats"), [(busy, 2, 3), (lambda *args: True, 4, 5)])
def test_a_sweep_ends_early_on_a_machine_that_stays_busy(bench, disturb, monkeypatch, waits, measured, repeats):
    """After two disturbed loads in a row if it stays busy; after four if it is busy only while loads run."""
    monkeypatch.setattr(foreign_cpu, "waits_for_quiet", waits)
    disturb.update({("paged-p16-c2", repeat): 1 for repeat in range(1, 6)})
    path = bench.write(load={"repeats": repeats}, sweep={})
    done = bench.sweep(str(path))
    run = bench.only_run()
    assert done.returncode == 4 and len(bench.launches) == measured and "ended early" in done.stdout
    assert ("firefox" in done.stdout) == (waits is busy)
    assert manifest(run)["status"] == "incomplete" and (run / "report.md").is_file()

    if waits is busy:
        disturb.clear()
        again = bench.kvbench("sweep", "--resume", str(run), "--no-report")
        assert again.returncode == 0 and manifest(run)["status"] == "complete"
        assert len(bench.launches) == measured + repeats


def test_a_sweep_whose_last_loads_were_disturbed_has_nothing_to_wait_for(bench, disturb, monkeypatch):
    monkeypatch.setattr(foreign_cpu, "waits_for_quiet", busy)
    monkeypatch.setattr("kvbench.sweep.order.ATTEMPTS", 1)
    disturb.update({("paged-p16-c2", 2): 1, ("paged-p16-c2", 3): 1})
    done = bench.sweep(str(bench.write(load={"repeats": 3}, sweep={})), "--no-report")
    assert done.returncode == 0 and "ended early" not in done.stdout and "firefox" not in done.stdout
    assert manifest(bench.only_run())["status"] == "complete"


def test_a_valid_load_between_disturbed_ones_and_wait_idle_0_let_a_sweep_go_on(bench, disturb, monkeypatch):
    monkeypatch.setattr(foreign_cpu, "waits_for_quiet", busy)
    cell = "paged-p16-c2"
    disturb.update({(cell, 1): 1, (cell, 3): 1})
    path = bench.write(load={"repeats": 3}, sweep={})
    done = bench.sweep(str(path), "--no-report")
    assert done.returncode == 0 and "ended early" not in done.stdout and len(bench.launches) == 3
    disturb.update({(cell, repeat): 9 for repeat in range(1, 4)})
    bench.sweep(str(path), "--no-report", "--wait-idle", "0", "--repeats", "2")
    assert len(bench.launches) == 3 + 2 * 3  # six in a row, and four would end it


def no_room(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("what", ["result.ServerReadings.store", "instrument.write_record"])
def test_a_full_disk_does_not_take_a_finished_load_s_line_away(bench, monkeypatch, what):
    monkeypatch.setattr(f"kvbench.measure.{what}", no_room)
    done = bench.sweep(str(bench.write(sweep={}, load={"repeats": 1})), "--no-report")
    assert done.returncode == 4 and done.stderr.count("error: ") == 1 and "No space left" in done.stderr
    assert re.search(r"paged-p16-c2 repeat 1: \d+\.\d output tok/s", done.stdout)
    assert manifest(bench.only_run())["status"] == "incomplete" and finished(bench.only_run()) == {}


def test_a_report_that_cannot_be_written_is_printed_all_the_same(bench, monkeypatch):
    monkeypatch.setattr("kvbench.report.page.write_report", no_room)
    done = bench.sweep(str(bench.write(sweep={}, load={"repeats": 1})))
    assert done.returncode == 4 and "No space left" in done.stdout
    assert done.stdout.count("paged-p16") >= 2  # the load's line and the table's row


def test_max_minutes_leaves_repeats_out_and_a_resume_with_more_measures_them(bench, disturb):
    path = bench.write(load={"repeats": 3}, sweep={}, max_minutes=0.001)
    assert "repeat 2" not in bench.sweep(str(path), "--dry-run").stdout and not bench.results.exists()
    done = bench.sweep(str(path))
    run = bench.only_run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert {repeat for _, repeat in finished(run)} == {"1"} and manifest(run)["status"] == "complete"
    said = (run / "report.md").read_text().replace("\\", "")
    for text in (done.stdout, said):
        assert "paged-p16-c2: 1 of 3 repeats" in text and "--max-minutes 0.001" in text
    assert "incomplete" not in said.lower()
    nothing = bench.kvbench("sweep", "--resume", str(run), "--no-report")  # within the same time
    assert nothing.returncode == 0 and len(bench.launches) == 1
    more = bench.kvbench("sweep", "--resume", str(run), "--no-report", "--max-minutes", "60")
    assert more.returncode == 0 and len(finished(run)) == 3 and "1 of 3" not in more.stdout
    assert manifest(run)["left_out"] == [] and manifest(run)["status"] == "complete"
