"""The first server of a configuration settles how much KV it has: a later one with another capacity fails its loads."""

import dataclasses
import io
import shutil

import pytest
from rich.console import Console

from kvbench.common.records import read_record
from kvbench.measure.http import TargetInstrument
from kvbench.runs.folder import DONE, RunFolder
from kvbench.runs.results import LoadResult
from kvbench.runs.server_info import KVRoom, ServerInfo
from kvbench.sweep.run import Sweep
from kvbench.targets.base import ModelFacts, Target
from kvbench.targets.choose import choose
from kvbench.targets.options import TargetOptions
from kvbench.workload.file import load_workload
from tests.support.sweep_parts import Bench
from tests.support.synthetic_run import make_run
from tests.support.toy_engine import Scenario


class Sized(Target):
    """A server that is there, with room for ``tokens``."""

    starts_cold = True

    def __init__(self, tokens):
        super().__init__("http://127.0.0.1:1")
        self.model, self.info = ModelFacts("m", 100, 256), ServerInfo(capacity=KVRoom(capacity_tokens=tokens))

    def start(self, settings, log):
        pass

    def server_info(self):
        return self.info


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The folder of a load."""
    return next(make_run(tmp_path_factory.mktemp("stored"), Scenario()).glob("cells/*/loads/1"))


@pytest.mark.parametrize(("shares", "code"), [((0.985, 0.99), 0), ((1.015, 1.0), 0), ((0.985, 1.015), 4)])
def test_each_server_of_a_configuration_has_the_capacity_of_the_first_one(tmp_path, stored, shares, code):
    """All of them are as near to the arithmetic as they must be."""
    workload = load_workload(Bench(tmp_path).write(sweep={}), profile="cpu")
    choice, console = choose(workload, TargetOptions()), Console(file=io.StringIO(), width=1000)
    tokens = choice.check(workload.engine).capacity_tokens
    servers = iter([Sized(int(tokens * share)) for share in shares])

    class Replay(TargetInstrument):
        disturbed_by_machine = False

        def send(self, point, requests, requests_file, out):
            shutil.copytree(stored, out, dirs_exist_ok=True)
            return read_record(LoadResult, out / DONE)

    made = Sweep(
        dataclasses.replace(choice, new_target=lambda: next(servers)), console, output_dir=tmp_path / "results",
        calibrate=False, lockstep_minutes=0.0, wait_idle_minutes=0.0, instrument=Replay,
    )  # fmt: skip
    assert made.execute() == code, console.file.getvalue()
    (folder,) = (tmp_path / "results").glob("*/*")
    failures = [failure for failure in RunFolder(folder).manifest().failures if failure.repeat == 2]
    assert len(failures) == (code != 0)
    assert all("has other settings: its KV cache holds" in failure.reason for failure in failures)
