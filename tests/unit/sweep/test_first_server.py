"""The first server of a configuration settles how much KV it has: a later one with another capacity fails its loads."""

import io

import pytest
from rich.console import Console

from kvbench.runs.folder import RunFolder
from kvbench.sweep.run import Sweep
from kvbench.targets.choose import choose
from kvbench.targets.options import TargetOptions
from kvbench.workload.file import load_workload
from tests.support.sweep_parts import Bench, Script, Up


@pytest.mark.parametrize(("shares", "code"), [((0.985, 0.99), 0), ((1.015, 1.0), 0), ((0.985, 1.015), 4)])
def test_each_server_of_a_configuration_has_the_capacity_of_the_first_one(tmp_path, shares, code):
    """All of them are as near to the arithmetic as they must be."""
    workload = load_workload(Bench(tmp_path).write(sweep={}), profile="cpu")
    choice, console = choose(workload, TargetOptions()), Console(file=io.StringIO(), width=1000)
    tokens = choice.check(workload.engine).capacity_tokens
    servers = iter([Up(int(tokens * share)) for share in shares])
    made = Sweep(
        choice, console, output_dir=tmp_path / "results", calibrate=False, lockstep_minutes=0.0, wait_idle_minutes=0.0,
        instrument=Script(target=lambda: next(servers)).instrument,
    )  # fmt: skip
    assert made.execute() == code, console.file.getvalue()
    (folder,) = (tmp_path / "results").glob("*/*")
    failures = [failure for failure in RunFolder(folder).manifest().failures if failure.repeat == 2]
    assert len(failures) == (code != 0)
    assert all("has other settings: its KV cache holds" in failure.reason for failure in failures)
