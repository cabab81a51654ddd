"""Whole sweeps with scripted loads: what is measured again, left out or ends them, and what a resume does then."""

from __future__ import annotations

import errno
import json
import os
import re
from collections import Counter

import pandas as pd
import pytest

from kvbench.common import foreign_cpu
from tests.support.sweep_parts import DISTURBED, Bench, Script, finished, manifest

CELL, OTHER = "paged-p16-c2", "contiguous-c2"
ALONE = {"sweep": {}}  # the baseline is the only configuration


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def bench(tmp_path, script, monkeypatch):
    monkeypatch.setattr(foreign_cpu, "waits_for_quiet", lambda limit_s, check, on_busy: True)
    return Bench(tmp_path, script=script)


def busy(limit_s, check, on_busy):
    on_busy("0.52 of a core: firefox 0.50")
    return False


def sweep(bench, *words, load=None, **sections):
    """Sweeps the tiny workload without a report; what was printed, with the exit code, and the run."""
    path = bench.write(load=load or {}, **sections)
    done = bench.sweep(str(path), *(words or ["--no-report"]))
    return done, bench.only_run()


def resume(bench, run, *words):
    return bench.kvbench("sweep", "--resume", str(run), "--no-report", *words)


def summary(run, cell=CELL):
    return json.loads((run / "cells" / cell / "summary.json").read_text())


def test_a_disturbed_load_is_measured_again_and_left_out_if_it_stays_so(bench, script):
    once, always = (CELL, 1), (OTHER, 2)
    script.disturbed.update({once: 1, always: 9})
    done, run = sweep(bench, "--no-quality")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(script.launches) == 4 + 1 + 2
    assert finished(run).keys() == {(cell, repeat) for cell in (CELL, OTHER) for repeat in ("1", "2")}
    aside = manifest(run)["set_aside"]
    assert Counter((each["cell_id"], each["repeat"]) for each in aside) == {once: 1, always: 2}
    for entry in aside:
        assert json.loads((run / entry["folder"] / "done.json").read_text())["invalid_reasons"] == [DISTURBED]
    assert len(list((run / "set-aside" / "logs").iterdir())) == 3 and len(list((run / "logs").iterdir())) == 4
    assert all(summary(run, cell)["valid"] and not summary(run, cell)["invalid_reasons"] for cell in (CELL, OTHER))
    assert summary(run)["aggregate"]["completed"]["n"] == 2 and summary(run)["invalid_repeats"] == {}
    assert summary(run, OTHER)["aggregate"]["completed"]["n"] == 1
    assert set(summary(run, OTHER)["invalid_repeats"]) == {"2"}
    assert set(pd.read_parquet(run / "cells" / OTHER / "requests.parquet")["repeat"]) == {1}
    for text in (done.stdout.lower(), (run / "report.md").read_text().lower().replace("\\", "")):
        assert f"{OTHER}: 1 of 2 repeats" in text and f"{CELL} repeat 1" in text and "measured again" in text

    script.disturbed.clear()
    again = resume(bench, run)
    assert again.returncode == 0 and len(script.launches) == 8 and manifest(run)["status"] == "complete"
    assert summary(run, OTHER)["aggregate"]["completed"]["n"] == 2


def test_a_cell_without_a_valid_load_is_invalid_and_a_resume_measures_it_again(bench, script):
    script.disturbed[CELL, 1] = 9
    done, run = sweep(bench, load={"repeats": 1}, **ALONE)
    assert done.returncode == 4 and f"{CELL} is invalid: repeat 1: {DISTURBED}" in done.stdout
    assert f"--resume {os.path.relpath(run)}" in done.stdout and not summary(run)["valid"]
    before = len(script.launches)
    script.disturbed.clear()
    assert resume(bench, run).returncode == 0
    assert len(script.launches) == before + 1 and summary(run)["valid"]


def test_a_server_that_refuses_requests_is_a_finding_and_is_not_measured_again(bench, script):
    refused = "served 8 of 12 requests; 4 of 12: 'out of pages'"
    script.results[CELL, 1] = {"refused": refused, "valid": False}
    done, run = sweep(bench, load={"repeats": 1}, **ALONE)
    assert done.returncode == 0 and not summary(run)["valid"] and summary(run)["invalid_reasons"] == []
    assert f"REFUSED: {refused}" in done.stdout and f"- {CELL}: repeat 1: {refused}" in done.stdout
    again = resume(bench, run)
    assert again.returncode == 0 and len(script.launches) == 1 and f"- {CELL}: repeat 1: {refused}" in again.stdout


def test_wrong_answers_end_with_a_code_of_their_own(bench, script):
    script.results[CELL, 1] = {"wrong_answers": "1 of 9 canaries was answered wrongly", "valid": False}
    done, run = sweep(bench, load={"repeats": 1}, **ALONE)
    assert done.returncode == 1 and "1 of 9 canaries" in done.stdout and not summary(run)["valid"]


def test_while_other_programs_keep_the_machine_busy_a_disturbed_load_is_not_measured_again(bench, script, monkeypatch):
    monkeypatch.setattr(foreign_cpu, "waits_for_quiet", busy)
    script.disturbed[CELL, 1] = 1
    done, run = sweep(bench, max_minutes=60, **ALONE)
    assert done.returncode == 0 and len(script.launches) == 2 and "firefox" in done.stdout
    assert manifest(run)["status"] == "complete" and manifest(run)["left_out"] == manifest(run)["set_aside"] == []
    assert set(summary(run)["invalid_repeats"]) == {"1"} and summary(run)["valid"]

    assert resume(bench, run).returncode == 0
    assert len(script.launches) == 3 and summary(run)["invalid_repeats"] == {}


@pytest.mark.parametrize(("waits", "measured", "repeats"), [(busy, 2, 3), (lambda *args: True, 4, 5)])
def test_a_sweep_ends_early_on_a_machine_that_stays_busy(bench, script, monkeypatch, waits, measured, repeats):
    """After two disturbed loads in a row if it stays busy; after four if it is busy only while loads run."""
    monkeypatch.setattr(foreign_cpu, "waits_for_quiet", waits)
    script.disturbed.update({(CELL, repeat): 1 for repeat in range(1, 6)})
    done, run = sweep(bench, load={"repeats": repeats}, **ALONE)
    assert done.returncode == 4 and len(script.launches) == measured and "ended early" in done.stdout
    assert ("firefox" in done.stdout) == (waits is busy) and manifest(run)["status"] == "incomplete"
    assert "cells are left; go on with" in done.stdout

    script.disturbed.clear()
    assert resume(bench, run).returncode == 0 and manifest(run)["status"] == "complete"
    assert len(script.launches) == measured + repeats


def test_a_sweep_whose_last_loads_were_disturbed_has_nothing_to_wait_for(bench, script, monkeypatch):
    monkeypatch.setattr(foreign_cpu, "waits_for_quiet", busy)
    monkeypatch.setattr("kvbench.sweep.order.ATTEMPTS", 1)
    script.disturbed.update({(CELL, 2): 1, (CELL, 3): 1})
    done, run = sweep(bench, load={"repeats": 3}, **ALONE)
    assert done.returncode == 0 and "ended early" not in done.stdout and "firefox" not in done.stdout
    assert manifest(run)["status"] == "complete"


def test_a_valid_load_between_disturbed_ones_and_wait_idle_0_let_a_sweep_go_on(bench, script, monkeypatch):
    monkeypatch.setattr(foreign_cpu, "waits_for_quiet", busy)
    script.disturbed.update({(CELL, 1): 1, (CELL, 3): 1})
    done, _ = sweep(bench, load={"repeats": 3}, **ALONE)
    assert done.returncode == 0 and "ended early" not in done.stdout and len(script.launches) == 3
    script.disturbed.update({(CELL, repeat): 9 for repeat in range(1, 4)})
    bench.sweep(str(bench.folder / "tiny.yaml"), "--no-report", "--wait-idle", "0", "--repeats", "2")
    assert len(script.launches) == 3 + 2 * 3  # six in a row, and four would end it


def no_room(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_does_not_take_a_finished_load_s_line_away(bench, monkeypatch):
    monkeypatch.setattr("kvbench.measure.instrument.write_record", no_room)
    done, run = sweep(bench, load={"repeats": 1}, **ALONE)
    assert done.returncode == 4 and done.stderr.count("error: ") == 1 and "No space left" in done.stderr
    assert re.search(rf"{CELL} repeat 1: \d+\.\d output tok/s", done.stdout)
    assert manifest(run)["status"] == "incomplete" and finished(run) == {}


def test_a_report_that_cannot_be_written_is_printed_all_the_same(bench, monkeypatch):
    monkeypatch.setattr("kvbench.report.page.write_report", no_room)
    done, _ = sweep(bench, "--no-quality", load={"repeats": 1}, **ALONE)
    assert done.returncode == 4 and "No space left" in done.stdout
    assert done.stdout.count("paged-p16") >= 2  # the load's line and the table's row


def test_max_minutes_leaves_repeats_out_and_a_resume_with_more_measures_them(bench, script):
    path = bench.write(load={"repeats": 3}, max_minutes=0.001, **ALONE)
    assert "repeat 2" not in bench.sweep(str(path), "--dry-run").stdout and not bench.results.exists()
    done = bench.sweep(str(path))
    run = bench.only_run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert {repeat for _, repeat in finished(run)} == {"1"} and manifest(run)["status"] == "complete"
    said = (run / "report.md").read_text().replace("\\", "")
    for text in (done.stdout, said):
        assert f"{CELL}: 1 of 3 repeats" in text and "--max-minutes 0.001" in text
    assert "incomplete" not in said.lower()
    assert resume(bench, run).returncode == 0 and len(script.launches) == 1  # within the same time
    more = resume(bench, run, "--max-minutes", "60")
    assert more.returncode == 0 and len(finished(run)) == 3 and "1 of 3" not in more.stdout
    assert manifest(run)["left_out"] == [] and manifest(run)["status"] == "complete"


def test_the_time_of_a_resumed_run_counts_from_its_first_beginning(bench, script):
    done, run = sweep(bench, load={"repeats": 3}, max_minutes=30, **ALONE)
    assert done.returncode == 0 and len(finished(run)) == 3
    stored = manifest(run)
    (run / "manifest.json").write_text(json.dumps(stored | {"measured_s": 60 * 30}))
    for repeat in ("2", "3"):
        (run / "cells" / CELL / "loads" / repeat / "done.json").unlink()
    assert resume(bench, run).returncode == 0 and len(finished(run)) == 1
