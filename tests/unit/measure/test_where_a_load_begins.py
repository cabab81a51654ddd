"""Every load begins in ``Instrument.measure``: a new instrument is one class, and a sweep and its report take it."""

from __future__ import annotations

import ast
import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from kvbench.cli.report import show_report
from kvbench.common.errors import MeasurementError
from kvbench.common.records import read_record
from kvbench.measure.instrument import Instrument, Job
from kvbench.metrics.definitions import ENGINE
from kvbench.metrics.model import LoadMetrics
from kvbench.runs.folder import DONE, RunFolder
from kvbench.runs.read import read_run
from kvbench.runs.results import LoadResult
from kvbench.sweep.run import Sweep
from kvbench.targets.choose import choose
from kvbench.targets.options import TargetOptions
from kvbench.workload.design import Cell
from kvbench.workload.file import load_workload
from tests.support.sweep_parts import ROOT, Bench
from tests.support.synthetic_run import make_run
from tests.support.toy_engine import Scenario


def replay_of(loads: dict[tuple[str, int], Path]) -> type[Instrument]:
    """An instrument that replays stored loads."""

    class Replay(Instrument):
        disturbed_by_machine = False

        def run(self, cell, repeat, out):
            if (cell.cell_id, repeat) not in loads:
                raise MeasurementError("nobody has stored it")
            shutil.copytree(loads[cell.cell_id, repeat], out, dirs_exist_ok=True)
            return read_record(LoadResult, out / DONE, "store it again")

    return Replay


@pytest.fixture
def sweep(tmp_path):
    """Sweeps two configurations with two repeats, replaying loads of a run that is stored; the code and the output."""
    stored = sorted(make_run(tmp_path / "stored", Scenario(repeats=2)).glob("cells/*/loads/1"))
    workload = load_workload(Bench(tmp_path).write(), profile="cpu")
    choice = choose(workload, TargetOptions())
    cells = choice.plan()[0].cells

    def run(*missing):
        keys = [(cell.cell_id, repeat) for cell in cells for repeat in (1, 2)]
        loads = {key: stored[place % len(stored)] for place, key in enumerate(keys) if key not in missing}
        console = Console(file=io.StringIO(), width=150)
        made = Sweep(
            choice, console, output_dir=tmp_path / "results", report=show_report, calibrate=False,
            lockstep_minutes=0.0, wait_idle_minutes=0.0, instrument=replay_of(loads),
        )  # fmt: skip
        return made.execute(), console.file.getvalue(), keys

    return run


def test_an_instrument_that_replays_a_stored_load_is_one_class_and_the_report_reads_it(sweep, tmp_path):
    code, printed, keys = sweep()
    (folder,) = (tmp_path / "results").glob("*/*")
    run = read_run(folder)
    assert code == 0 and {cell.cell_id for cell in run.cells} == {cell_id for cell_id, _ in keys}
    for cell_id, repeat in keys:  # as its own, not as the load that it was copied from
        done = RunFolder(folder).result(cell_id, repeat)
        assert (done.cell_id, done.repeat) == (cell_id, repeat) and done.metrics.completed > 0
    assert (folder / "report.html").is_file() and f"[{len(keys)}/{len(keys)}]" in printed


def test_a_load_that_an_instrument_cannot_measure_fails_alone_with_its_reason(sweep):
    _, _, keys = sweep()
    code, printed, _ = sweep(keys[0])
    assert code == 4 and f"{keys[0][0]} repeat {keys[0][1]} failed: nobody has stored it" in printed


def test_a_result_of_another_clock_is_refused_and_not_stored(tmp_path):
    class Stepped(Instrument):
        def run(self, cell, repeat, out):
            return LoadResult(metrics=LoadMetrics(), clock=ENGINE)

    folder = RunFolder(tmp_path)
    with pytest.raises(MeasurementError, match=r"engine time.*served"):
        Stepped(Job(None, folder)).measure(Cell("a-c3", None, None), 1)
    assert not folder.is_done("a-c3", 1)


def test_no_other_place_writes_the_result_of_a_load():
    """A load is stored where it begins; Ray's machines send a folder that was written so."""
    places = set()
    for path in (ROOT / "kvbench").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "scratch_load":
                places.add(path.relative_to(ROOT / "kvbench").as_posix())
    assert places == {"measure/instrument.py", "ray/machines.py"}
