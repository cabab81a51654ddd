"""The list of runs: what is in it, what is read again, and what is not followed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvbench.common.errors import UsageError
from kvbench.report import page as run_page
from kvbench.report.document import document
from kvbench.view import workspace as module
from kvbench.view.workspace import Filter, Workspace
from tests.support.synthetic_run import write_run


def states(workspace: Workspace) -> dict[str, str]:
    return {row.name[-7:]: row.state for row in workspace.rows()}


def test_every_run_is_a_row_the_newest_first_and_other_commands_are_counted(tmp_path: Path) -> None:
    write_run(tmp_path, 0, {"a-c3": [100.0]})
    write_run(tmp_path, 2, {"a-c3": [100.0]}, invalid=["a-c3"])
    write_run(tmp_path, 1, {"a-c3": [100.0]}, status="incomplete")
    write_run(tmp_path, 3, {}, kind="load")
    workspace = Workspace([tmp_path])
    assert list(states(workspace).items()) == [("0000002", "invalid"), ("0000001", "incomplete"), ("0000000", "valid")]
    assert "1 folder of `kvbench load`" in workspace.notes()[0]
    assert next(cell.value for row in workspace.rows() for cell in row.cells) == f"{workspace.rows()[0].slug}/a-c3"
    with pytest.raises(UsageError, match="there is no folder"):
        Workspace([tmp_path / "gone"])


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("manifest.json", '{"form'),
        ("manifest.json", '{"format": 99, "workload": {}, "plan": []}'),
        ("manifest.json", '{"format": 1, "workload": {"name": "x", "load": 3}, "plan": [], "cpu": "none"}'),
        ("cells/a-c3/summary.json", '{"repeats": [{"repeat": "x"}], "config_id": "a"}'),
    ],
)
def test_a_damaged_run_is_a_row_and_takes_no_other_away(tmp_path: Path, file: str, content: str) -> None:
    (write_run(tmp_path, 0, {"a-c3": [100.0]}) / file).write_text(content)
    write_run(tmp_path, 1, {"a-c3": [100.0]})
    workspace = Workspace([tmp_path])
    assert states(workspace) == {"0000000": "damaged", "0000001": "valid"}
    damaged = next(row for row in workspace.rows() if row.state == "damaged")
    assert damaged.sentence and "Traceback" not in damaged.sentence and str(tmp_path) not in damaged.sentence
    assert damaged.cells == () and damaged.started
    with pytest.raises(UsageError):
        workspace.run(damaged)


@pytest.mark.parametrize(("file", "content"), [("summary.json", "{"), ("server.parquet", "PAR1 nothing PAR1")])
def test_a_cell_that_is_damaged_leaves_the_run_readable(tmp_path: Path, file: str, content: str) -> None:
    folder = write_run(tmp_path, 0, {"a-c3": [100.0], "b-c3": [100.0]})
    (folder / "cells" / "a-c3" / file).write_text(content)
    (row,) = Workspace([tmp_path]).rows()
    assert row.state == "incomplete" and [cell.value for cell in row.cells] == [f"{row.slug}/b-c3"]


def test_a_run_is_read_again_only_when_its_files_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [write_run(tmp_path, day, {"a-c3": [100.0]}) for day in range(3)]
    read: list[Path] = []
    monkeypatch.setattr(module, "read_run", lambda folder, of=module.read_run: read.append(folder) or of(folder))
    workspace = Workspace([tmp_path])
    assert all(len(workspace.rows()) == 3 for _ in range(4)) and sorted(read) == sorted(folders)
    read.clear()
    os.utime(folders[1] / "manifest.json", (1, 1))
    summary = folders[2] / "cells" / "a-c3" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"valid": False, "invalid_reasons": ["late"]}))
    assert {row.state for row in workspace.rows()} == {"valid", "invalid"} and read == folders[1:]
    write_run(tmp_path, 9, {"a-c3": [1.0]})
    assert len(workspace.rows()) == 4


def test_addresses_are_plain_and_unique_and_stay(tmp_path: Path) -> None:
    for place in ("results", "copy", "<script>alert(1)</script>"):
        write_run(tmp_path / place, 0, {"a-c3": [100.0]})
    folders = [tmp_path / "results", tmp_path / "copy", tmp_path / "<script>alert(1)<"]
    slugs = [row.slug for row in Workspace(folders).rows()]
    assert len(set(slugs)) == 3 and all(set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789TZ._-") for slug in slugs)
    assert [row.slug for row in Workspace(folders).rows()] == slugs


def test_no_link_out_of_the_folders_is_followed(tmp_path: Path) -> None:
    outside = write_run(tmp_path / "outside", 0, {"a-c3": [100.0]})
    results = tmp_path / "results"
    run = write_run(results, 1, {"a-c3": [100.0]})
    (results / "mixed" / "linked").symlink_to(outside)
    (results / "elsewhere").symlink_to(tmp_path / "outside")
    workspace = Workspace([results])
    assert states(workspace) == {"0000001": "valid"}
    within = run / "cells" / "a-c3" / "samples.jsonl"
    within.symlink_to(run / "summary.csv")
    os.utime(run / "manifest.json", (1, 1))
    assert states(workspace) == {"0000001": "valid"}
    within.unlink()
    within.symlink_to(outside / "manifest.json")
    row = workspace.rows()[0]
    with pytest.raises(UsageError, match="link"):
        workspace.run(row)
    assert states(Workspace([results])) == {"0000001": "damaged"}
    (run / "manifest.json").unlink()
    (run / "manifest.json").symlink_to(outside / "manifest.json")
    assert "outside" not in Workspace([results]).rows()[0].sentence.replace("out of the folder", "")


def test_what_ships_is_neither_damaged_nor_unmeasured() -> None:
    workspace = Workspace([Path("results/reference")])
    rows = workspace.rows()
    assert rows and not [row.name for row in rows if row.state == "damaged"]
    assert any("`ci/gpu.sh`" in note for note in workspace.notes())
    for row in (row for row in rows if row.state == "empty"):
        run = workspace.run(row)
        page = run_page.page(document(run))
        assert ">not measured<" not in page and f"{len(run.missing)} cells are not kept" in page


def test_filters_go_by_what_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path, 0, {"a-c3": [100.0]}, device="H100", gpus=[{"name": "H100"}])
    write_run(tmp_path, 1, {"a-c3": [100.0]}, name="chat", model={"name": "qwen3-8b"})
    rows = Workspace([tmp_path]).rows()

    def matching(text: str = "", **facts: str) -> list[str]:
        return [row.workload for row in rows if Filter(text, **facts).selects(row)]

    assert matching() == ["chat", "mixed"] and matching("QWEN3 chat") == ["chat"] and matching("qwen3 mixed") == []
    assert matching(workload="mixed") == ["mixed"] and matching(state="invalid") == []
    assert matching(machine=rows[1].machine) == ["mixed"] and matching("h100") == ["mixed"]
