"""``kvbench compare`` of two runs that were measured before."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import yaml

from kvbench.common.files import read_json, write_json
from kvbench.gate.compare import lanes
from kvbench.runs.folder import RunFolder
from kvbench.workload.file import load_workload, resolve
from tests.support.compare_folders import HERE, write_load
from tests.support.sweep_parts import TINY


def stored_run(folder: Path, of, values, *, told=(), invalid=(), cells=None) -> Path:
    """A run of ``of`` with these output throughputs, a repeat each; ``told``: dtype; ``cells``: as with --only."""
    design = lanes.make_design(of.engine, of.sweep, of.load_points, of.design)
    ids = [cell.cell_id for cell in design.cells if cells is None or cells in cell.cell_id]
    servers = {c.config_id: {"resolved": dict(told)} for c in design.configurations}
    manifest = {"format": 1, "status": "complete", "workload": dict(of.resolved), "profile": "cpu", **HERE}
    plan = [
        {"configuration": c.config_id, "cells": [i for i in ids if i.startswith(f"{c.config_id}-c")]}
        for c in reversed(design.configurations)  # in a run their order is random
    ]
    write_json(folder / "manifest.json", manifest | {"plan": [b for b in plan if b["cells"]], "servers": servers})
    for repeat, value in enumerate(values, 1):
        for cell_id in ids:
            why = {"valid": False, "invalid_reasons": ["others used the machine"]} if repeat in invalid else {}
            path = folder / "cells" / cell_id / "loads" / str(repeat)
            write_load(path, cell_id, (value, 100.0, 10.0), **why)
    return folder


@pytest.fixture
def swept(tmp_path):
    (tmp_path / "swept.yaml").write_text(yaml.safe_dump(TINY))
    return load_workload(tmp_path / "swept.yaml", profile="cpu")


def test_stored_runs_that_were_measured_with_only(compare, tmp_path, swept):
    runs = [stored_run(tmp_path / n, swept, [v] * 8, cells="contiguous") for n, v in (("a", 100.0), ("b", 80.0))]
    code, folder, err = compare(*(f"run:{run.name}" for run in runs))
    assert code == 1, err
    verdict = read_json(folder / "verdict.json")
    assert "order was not random" in verdict["sentence"] and verdict["facts"]["pairs"] == 8
    assert len(read_json(folder / "manifest.json")["cells"]) == 1
    assert f"run:{tmp_path / 'a'}" == read_json(folder / "manifest.json")["options"]["base"]


def test_stored_runs_of_running_servers_are_paired_by_what_they_measured(compare, tmp_path, swept):
    for name, port, value in (("a", 8001, 100.0), ("b", 8002, 80.0)):
        of = dataclasses.replace(swept, engine={"target": f"http://127.0.0.1:{port}"}, sweep={})
        stored_run(tmp_path / name, of, [value] * 8)
    code, folder, err = compare("run:a", "run:b")
    assert code == 1, err
    (cell,) = read_json(folder / "manifest.json")["cells"]
    assert (cell["name"], cell["base"], cell["candidate"]) == ("tiny/target-c2", "target-c2", "target-c2")


def test_stored_runs_keep_the_order_of_their_workload_and_the_settings_that_were_measured(tmp_path, swept):
    run = stored_run(tmp_path / "a", swept, [100.0])
    for cell_id, page in (("paged-p16-c2", 16), ("contiguous-c2", None)):
        write_json(run / "cells" / cell_id / "summary.json", {"settings": {"page_size": page}, "label": cell_id})
    design = lanes._measured(RunFolder(run), swept)
    assert [cell.cell_id for cell in design.cells] == ["paged-p16-c2", "contiguous-c2"]
    assert [c.settings["page_size"] for c in design.configurations] == [16, None]
    more = resolve(
        swept.resolved | {"load": swept.resolved["load"] | {"concurrency": [2, 4]}}, profile="cpu", source=None
    )
    one_load = stored_run(tmp_path / "b", more, [100.0], cells="-c4")
    assert [c.cell_id for c in lanes._measured(RunFolder(one_load), more).cells] == ["paged-p16-c4", "contiguous-c4"]


def test_stored_runs_without_their_loads_say_what_is_missing(compare, tmp_path, swept):
    run = stored_run(tmp_path / "a", swept, [])
    code, folder, _ = compare(str(run), str(run))
    verdict = read_json(folder / "verdict.json")
    assert (code, verdict["exit_code"]) == (5, 5)
    assert f"base has no {run}/cells/paged-p16-c2/loads/1/done.json" in verdict["sentence"]


def test_stored_runs_whose_first_repeat_is_invalid_are_no_measurement(compare, tmp_path, swept):
    good = stored_run(tmp_path / "a", swept, [100.0] * 4)
    bad = stored_run(tmp_path / "b", swept, [100.0] * 4, invalid=(1,))
    code, folder, err = compare(str(good), str(bad))
    assert code == 4 and "repeat 1 of " in err and "others used the machine" in err
    assert read_json(folder / "verdict.json")["outcome"] == "invalid"
    shutil.rmtree(bad)
    stored_run(bad, swept, [100.0] * 4, invalid=(3,))
    code, folder, err = compare(str(good), str(bad))
    assert code == 3, err
    assert any("repeat 3 of " in note for note in read_json(folder / "verdict.json")["notes"])


def test_stored_runs_of_other_servers_or_requests_need_force(compare, tmp_path, swept):
    one = stored_run(tmp_path / "a", swept, [100.0] * 3, told={"dtype": "float32"})
    two = stored_run(tmp_path / "b", swept, [100.0] * 3, told={"dtype": "bfloat16"})
    for run in (one, two):
        for path in run.glob("cells/*/loads/2/done.json"):
            write_json(path, read_json(path) | {"requests_sha256": run.name})
    code, folder, err = compare(str(one), str(two))
    assert (code, folder) == (2, None)
    assert "dtype (float32 and bfloat16)" in err and "requests of tiny/" in err
    code, folder, err = compare(str(one), str(two), "--force")
    assert code == 3 and any("dtype" in note for note in read_json(folder / "verdict.json")["notes"])
