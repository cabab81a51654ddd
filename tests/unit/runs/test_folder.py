"""The results folder: atomic, locked, resumable."""

from __future__ import annotations

import errno
import os
import signal
import time

import pandas as pd
import pytest

from kvbench.common.errors import UsageError
from kvbench.common.files import write_json
from kvbench.runs.folder import RunFolder, create_run, latest_incomplete, open_run, read_table


def make_run(base, name, status, sha="abc"):
    run = create_run(base, name, sha)
    write_json(run.manifest_path, {"format": 1, "workload": {"name": name}, "plan": [], "status": status})
    return run


@pytest.mark.parametrize(
    ("error", "kept"),
    [(RuntimeError("killed"), True), (OSError(errno.ECHILD, ""), True), (OSError(errno.ENOSPC, ""), False)],
)
def test_a_load_appears_whole_or_not_at_all(tmp_path, error, kept):
    run = RunFolder(tmp_path)
    loads = tmp_path / "cells/cell/loads"
    (loads / "running-1").mkdir(parents=True)  # left over from a killed load
    (loads / "running-1" / "old.txt").touch()
    (loads / "1").mkdir()

    def broken():
        with run.scratch_load("cell", 1) as folder:
            assert list(folder.iterdir()) == []
            (folder / "done.json").write_text("{}")
            raise error

    with pytest.raises(type(error)):
        broken()
    assert not run.is_done("cell", 1)
    assert (loads / "failed-1/done.json").is_file() == kept  # for reading; on a full disk its space is needed
    with run.scratch_load("cell", 1) as folder:
        (folder / "done.json").write_text("{}")
        assert not run.is_done("cell", 1)
    assert run.is_done("cell", 1) and run.done_repeats("cell") == [1]
    assert [path.name for path in loads.iterdir()] == ["1"]


ROW = {"ok": [True], "t0": [0.0], "ts": [0.0], "class": ["a"], "chunk_times": [[0.1]]}
ROWS = pd.DataFrame(ROW | {"text": [None]})


def test_tables_may_lack_columns_that_came_later_and_a_missing_file_has_no_rows(tmp_path):
    assert read_table(tmp_path / "requests.parquet").empty
    ROWS.to_parquet(tmp_path / "requests.parquet")
    assert len(read_table(tmp_path / "requests.parquet")) == 1


@pytest.mark.parametrize(
    ("file", "column", "values", "why"),
    [
        ("requests.parquet", "ok", None, "no column 'ok'"),
        ("requests.parquet", "class", [["a"]], "column 'class' is of list"),
        ("requests.parquet", "chunk_times", [0.1], "column 'chunk_times' is of double"),
        ("requests.parquet", "t0", ["soon"], "column 't0' is of"),
        ("server.parquet", "t", ["soon"], "column 't' is of"),
    ],
)
def test_columns_of_another_kind_are_refused(tmp_path, file, column, values, why):
    rows = ROWS if file == "requests.parquet" else pd.DataFrame({"t": [0.5]})
    changed = rows.drop(columns=column) if values is None else rows.assign(**{column: values})
    changed.to_parquet(tmp_path / file)
    with pytest.raises(UsageError, match=why):
        read_table(tmp_path / file)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("done.json", b"{"),
        ("load.json", b""),
        ("requests.parquet", b""),
        ("server.parquet", b"PAR1 and no end"),
        ("server.parquet", b"PAR1 and no table PAR1"),
    ],
)
def test_a_finished_load_of_which_a_file_was_cut_short_is_not_finished(tmp_path, name, content):
    run = RunFolder(tmp_path)
    for repeat in (1, 2):
        with run.scratch_load("cell", repeat) as folder:
            for file in ("done.json", "load.json"):
                (folder / file).write_text("{}")
            for file in ("requests.parquet", "server.parquet"):
                pd.DataFrame({"t": [0.5]} if file == "server.parquet" else ROW).to_parquet(folder / file)
    assert run.done_repeats("cell") == [1, 2] and run.damaged_loads() == []
    (run.load("cell", 2) / name).write_bytes(content)
    assert run.done_repeats("cell") == [1] and not run.is_done("cell", 2)
    assert run.damaged_loads() == [run.load("cell", 2)]


def test_a_loads_bytes_are_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    run, flushed = RunFolder(tmp_path), set()
    final = run.load("cell", 1)
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.add((os.fstat(fd).st_ino, final.exists())))
    with run.scratch_load("cell", 1) as folder:
        (folder / "done.json").write_text("{}")
        (folder / "requests.parquet").write_bytes(b"PAR1")
    assert flushed == {(path.stat().st_ino, False) for path in final.iterdir()} and len(flushed) == 2


def test_two_runs_of_one_second_do_not_share_a_folder(tmp_path):
    assert len({create_run(tmp_path, "w", "abc").path for _ in range(5)}) == 5


def test_the_latest_incomplete_run_is_found(tmp_path):
    with pytest.raises(UsageError, match="no incomplete run of 'w'"):
        latest_incomplete(tmp_path, "w")
    make_run(tmp_path, "w", "incomplete")
    newer = make_run(tmp_path, "w", "running")  # killed outright: nobody holds its lock
    make_run(tmp_path, "w", "complete")
    make_run(tmp_path, "other", "incomplete")
    assert latest_incomplete(tmp_path, "w").path == newer.path


@pytest.mark.parametrize("text", ["{", "", "[]", '{"workload": 3, "plan": []}', "\x00"])
def test_a_manifest_that_cannot_be_read_is_skipped_with_a_warning(tmp_path, capsys, text):
    good = make_run(tmp_path, "w", "incomplete")
    broken = make_run(tmp_path, "w", "incomplete")
    broken.manifest_path.write_text(text)  # the newest of the two
    assert latest_incomplete(tmp_path, "w").path == good.path
    warning = capsys.readouterr().err
    assert str(broken.path) in warning and warning.count("\n") == 1
    with pytest.raises(UsageError):  # named by its user it is refused
        open_run(broken.path)


def test_a_run_in_progress_is_left_alone(tmp_path):
    run, (held, holds) = make_run(tmp_path, "w", "running"), os.pipe()
    if (holder := os.fork()) == 0:
        with run.locked():
            os.write(holds, b"1")
            time.sleep(60)
    assert os.read(held, 1) == b"1"
    with pytest.raises(UsageError, match=str(holder)), run.locked():
        pass
    with pytest.raises(UsageError, match="no incomplete run"):
        latest_incomplete(tmp_path, "w")
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    assert latest_incomplete(tmp_path, "w").path == run.path  # the lock went with its holder
    with run.locked():
        assert run.is_locked()
        with pytest.raises(UsageError, match=str(os.getpid())), RunFolder(run.path).locked():
            pass
    assert [path.name for path in run.path.iterdir()] == ["manifest.json"] and not run.is_locked()


def test_folders_that_are_no_run_or_cannot_be_written_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no run folder"):
        open_run(tmp_path / "nothing")
    with pytest.raises(UsageError, match=r"there is no .*manifest.json"):
        open_run(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be written .* another --output-dir"):
        create_run(tmp_path / "file", "w", "abc")
    with pytest.raises(UsageError, match="cannot be written"), RunFolder(tmp_path / "nothing").locked():
        pass
