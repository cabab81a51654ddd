"""A sitting of several configurations, with engines whose steps take chosen times."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections import Counter
from types import SimpleNamespace
from typing import ClassVar

import pandas as pd
import pytest

from kvbench.common.errors import MeasurementError
from kvbench.common.records import read_record
from kvbench.lockstep import sitting
from kvbench.lockstep.process import EngineFailedError
from kvbench.lockstep.sitting import Sitting
from kvbench.runs.engine_time import EFFECTS, FOLDER, read_engine_time
from kvbench.runs.folder import DONE, RunFolder
from kvbench.runs.results import Capacity, LoadResult
from kvbench.targets.base import SteppedLaunch
from kvbench.workload.design import make_design
from kvbench.workload.file import resolve
from tests.support.fake_lockstep import FakeProcess, fake_clock

LIMITS = Capacity(vocab_size=300, max_model_len=128)
BUDGETED = LIMITS.model_copy(update={"kv_budget_bytes": 1 << 30})
DATA = {
    "name": "tiny",
    "seed": 0,
    "model": {"config": "llama-32m", "load_format": "dummy"},
    "engine": {"page_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128},
    "load": {
        "mode": "closed",
        "concurrency": [2, 4],
        "num_requests": [6, 20],
        "prompts": {
            "kind": "synthetic",
            "classes": [{"name": "chat", "share": 1.0, "prompt_tokens": [8, 40], "output_tokens": [16, 24]}],
        },
    },
}


@pytest.fixture
def sit(tmp_path, monkeypatch):
    """Makes a sitting of the baseline and ``sweep`` over the scripted engines."""
    monkeypatch.setattr(sitting, "EngineProcess", FakeProcess)
    fake_clock(monkeypatch)

    def make(limit_s, is_enough=None, launches=sitting.MOST_LAUNCHES, **sweep):
        monkeypatch.setattr(sitting, "MOST_LAUNCHES", launches)
        workload = resolve(json.loads(json.dumps(DATA)), profile="cpu", source=None)
        design = make_design(workload.engine, sweep, workload.load_points, "one_at_a_time")
        capacity = {each.config_id: LIMITS for each in design.configurations}
        done = Sitting(
            RunFolder(tmp_path), workload, design, capacity, limit_s, 60, lambda _: None, lambda: None, is_enough
        )
        assert (done.why_not() is None) == bool(sweep or is_enough)
        return done

    return make


def test_effects_are_those_of_the_engines_and_the_sitting_stops_when_all_are_decided(sit, tmp_path):
    found = sit(300, max_num_batched_tokens=[48], page_size=[8]).execute()
    stored = read_engine_time(tmp_path)
    by_cell = {effect.cell: effect for effect in stored.effects if effect.metric == "output_throughput"}
    assert len(by_cell) == 4  # two configurations, two loads
    for cell, effect in by_cell.items():
        truth = 1 / 1.2 if "48" in cell else 1.0
        assert effect.low < truth * 1.005 and effect.high > truth * 0.995, effect
        assert effect.call == ("worse" if "48" in cell else "level")
    assert found.launches < sitting.MOST_LAUNCHES and found.seconds < 300
    row = json.loads((tmp_path / FOLDER / EFFECTS).read_text())["effects"][0]
    assert row.keys() == {
        "cell", "metric", "higher_is_better", "base", "value", "call", "decided", "ratio", "low", "high", "launches",
        "within_launch", "smallest_seen", "pooled",
    }  # fmt: skip
    latency = next(e for e in stored.effects if e.metric == "p95_itl_ms" and "48" in e.cell)
    assert latency.ratio == pytest.approx(1.2, abs=0.03) and latency.call == "worse"


def test_launches_compute_side_by_side_where_each_has_cores_and_each_is_stored(sit, monkeypatch):
    monkeypatch.setitem(DATA["engine"], "num_threads", 1)
    monkeypatch.setattr(sitting, "usable_cores", lambda: 2)
    told, made = [], sit(300, launches=4, page_size=[8], max_num_batched_tokens=[48])
    made.on_effects = lambda measured: told.append(measured.launches)
    found = made.execute()
    assert (found.launches, told, made.at_once) == (4, [2, 4], 2)
    throughput = {e.cell: e for e in found.effects if e.metric == "output_throughput" and e.cell.endswith("c4")}
    assert {e.launches for e in throughput.values()} == {4}
    slower = next(e for cell, e in throughput.items() if "48" in cell)
    assert slower.call == "worse" and slower.ratio == pytest.approx(1 / 1.2, abs=0.01)
    seconds = [sum(pd.read_parquet(load / "steps.parquet")["seconds"]) for load in made.loads_of("paged-p8-c4", 4)]
    assert len(set(seconds)) == 4  # each launch has steps of its own


@pytest.mark.parametrize(("settings", "cores", "at_once"), [
    ({"num_threads": 1, "device": "cpu"}, 2, 2),
    ({"num_threads": 1, "device": "cpu"}, 16, 2),
    ({"num_threads": 2, "device": "cpu"}, 3, 1),
    ({"device": "cpu"}, 16, 1),  # it takes all cores
    ({"num_threads": 1, "device": "cuda"}, 16, 1),
])  # fmt: skip
def test_launches_share_no_core_and_no_gpu(settings, cores, at_once, monkeypatch):
    monkeypatch.setattr(sitting, "usable_cores", lambda: cores)
    assert sitting.launches_at_once(settings) == at_once


def test_a_launch_ends_however_short_the_time_is(sit):
    assert sit(0.001, page_size=[8]).execute().launches == 1


def test_launches_are_alone_where_no_other_may_disturb_them(sit, monkeypatch):
    monkeypatch.setitem(DATA["engine"], "num_threads", 1)
    monkeypatch.setattr(sitting, "usable_cores", lambda: 2)
    made = sit(300, launches=2, page_size=[8])
    made.most_at_once = 1
    assert made.execute().at_once == 1


@pytest.mark.parametrize(("wanted", "engine", "forked"), [
    (True, {"device": "cpu"}, True),
    (False, {"device": "cpu"}, False),
    (True, {"device": "cpu", "torch_compile": True}, False),  # its model needs modules that no fork has
])  # fmt: skip
def test_engines_are_forked_where_that_is_wanted_and_serves_all(sit, monkeypatch, wanted, engine, forked):
    for setting, value in engine.items():
        monkeypatch.setitem(DATA["engine"], setting, value)
    made = sit(300, launches=1, page_size=[8])
    made.forked = wanted
    made.execute()
    (load,) = made.loads_of("paged-p8-c4", 1)
    assert read_record(LoadResult, load / DONE).server_forked == forked


def test_a_sitting_goes_on_with_further_launches(sit):
    made = sit(300, is_enough=lambda launches: launches % 2 == 0, page_size=[8])
    assert made.execute().launches == 2
    found = made.execute()
    assert found.launches == 4 and {effect.launches for effect in found.effects} == {4}
    assert found.seconds == pytest.approx(made.elapsed_s)


def test_one_configuration_alone_is_measured_only_for_a_question_of_its_own(sit):
    alone = sit(300, is_enough=lambda launches: launches == 2)
    found = alone.execute()
    assert (found.launches, found.effects) == (2, ())
    (cell,) = {each.cell_id for each in alone.design.cells if each.load.concurrency == 2}
    assert all((load / "steps.parquet").is_file() for load in alone.loads_of(cell, 2))
    assert sit(300).why_not()


def test_the_status_line_follows_a_load_to_its_end(sit):
    shares, shown, making = [], [""], sit(300, launches=1, page_size=[8])

    def show(text):
        shown[0] = text
        if callable(text):
            shares.append([])
        look()

    def look():  # as a display does, several times a second
        if callable(shown[0]):
            shares[-1].append(shown[0]())

    making.show, making.check = show, look
    making.execute()
    assert len(shares) == 2  # loads
    for of_load in shares:
        found = [int(re.search(r"2 engines, (\d+) % done", each)[1]) for each in of_load]
        assert found[0] == 0 and found[-1] == 100 and found == sorted(found)


def test_engines_that_both_keep_up_with_the_arrivals_have_the_same_throughput(sit, tmp_path, monkeypatch):
    arrivals = {"mode": "open", "concurrency": None, "request_rate": [2.0], "num_requests": [12]}
    monkeypatch.setitem(DATA, "load", DATA["load"] | arrivals)
    sit(20, max_num_batched_tokens=[48]).execute()
    (found,) = (each for each in read_engine_time(tmp_path).effects if each.metric == "output_throughput")
    assert found.call == "level"  # though a step takes 1.2 times as long


def test_time_that_is_over_ends_it_after_few_launches_of_the_highest_load(sit, tmp_path, monkeypatch):
    monkeypatch.setattr(sitting, "_MOST_LIMITS", 1e6)  # the limit is over in the first launch
    found = sit(0.001, page_size=[8]).execute()
    assert found.launches == 3
    assert {effect.cell.rsplit("-", 1)[1] for effect in read_engine_time(tmp_path).effects} == {"c4"}
    assert len(found.notes) == 1 and "c2" in found.notes[0] and "--lockstep-minutes" in found.notes[0]


def test_a_load_that_the_time_holds_once_but_not_in_enough_launches_is_left_out(sit, tmp_path, monkeypatch):
    began, asked = time.monotonic(), itertools.count()
    slow = SimpleNamespace(monotonic=lambda: began + next(asked))  # a second passes whenever the sitting asks
    monkeypatch.setattr(sitting, "time", slow)
    found = sit(20, page_size=[8]).execute()
    assert [note for note in found.notes if "c2 was not measured in engine time" in note]
    assert {effect.cell.rsplit("-", 1)[1] for effect in found.effects} == {"c4"}


@pytest.mark.parametrize(
    ("limit_s", "page_size", "error", "words"),
    [
        (0.001, 8, MeasurementError, r"c4 .*--lockstep-minutes"),  # a load that never ends is given up
        (20, 64, MeasurementError, "page_size cannot be 64"),  # no second engine opens
        (300, 32, EngineFailedError, "exit code 3"),  # it dies
    ],
)
def test_what_ends_a_sitting_is_said(sit, tmp_path, monkeypatch, limit_s, page_size, error, words):
    monkeypatch.setattr(sitting, "LEAST_END_S", 0.0)
    with pytest.raises(error, match=words):
        sit(limit_s, page_size=[page_size]).execute()
    assert read_engine_time(tmp_path) is None


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_configuration_that_is_refused_is_named_and_the_others_are_measured(sit, tmp_path, monkeypatch, at_once):
    monkeypatch.setitem(DATA["engine"], "num_threads", 1)
    monkeypatch.setattr(sitting, "usable_cores", lambda: at_once)
    found = sit(20, launches=1, page_size=[64, 8], max_num_batched_tokens=[48]).execute()
    assert found.at_once == at_once
    cells = {effect.cell for effect in read_engine_time(tmp_path).effects}
    assert any("p8" in cell for cell in cells) and any("48" in cell for cell in cells)
    assert not any("p64" in cell for cell in cells)
    assert any("page_size cannot be 64" in note for note in found.notes)


def test_only_what_fits_beside_the_others_takes_part(sit, tmp_path, monkeypatch):
    monkeypatch.setattr(sitting, "free_memory", lambda: 3 << 30)
    made = sit(20, launches=1, page_size=[8], max_num_batched_tokens=[48])
    made.capacity = {each.config_id: BUDGETED for each in made.design.configurations}
    by_size = next(each for each in made.design.configurations if "48" in each.config_id)
    made.capacity[by_size.config_id] = LIMITS.model_copy(update={"kv_budget_bytes": 5 << 29})  # 2.5 GiB
    [note] = [each for each in made.execute().notes if "48" in each]
    assert "2.5 GiB" in note
    assert {effect.cell.split("-c")[0] for effect in read_engine_time(tmp_path).effects} == {"paged-p8"}
    monkeypatch.setattr(sitting, "free_memory", lambda: 7 << 29)  # 3.5 GiB: of the baseline and one more
    others, warmed, real = LIMITS.model_copy(update={"kv_budget_bytes": 3 << 29}), Counter(), sitting.warm_up

    def warm_up(engines, *args):
        warmed.update({id(engine.process) for engine in engines})
        alive.extend(engines)  # so that no id is used twice
        return real(engines, *args)

    alive = []
    monkeypatch.setattr(sitting, "warm_up", warm_up)
    made = sit(60, launches=3, page_size=[8], max_num_batched_tokens=[48])
    made.capacity = {each.config_id: BUDGETED if each.is_baseline else others for each in made.design.configurations}
    found = made.execute()
    assert found.configurations == 3 and found.launches > 1 and "memory holds 2 engines at once" in found.notes[0]
    assert len(warmed) == 2 * found.launches  # each process, of either round
    throughput = {effect.cell: effect for effect in found.effects if effect.metric == "output_throughput"}
    slower = throughput["paged-p16-tokens48-c4"]
    assert slower.ratio == pytest.approx(1 / 1.2, abs=0.01) and slower.launches == found.launches
    assert throughput["paged-p8-c4"].ratio == pytest.approx(1.0, abs=0.01)
    folders = sorted(path.parent.parent.name for path in (tmp_path / FOLDER).glob("**/cells/*p16-c4"))
    assert folders == [FOLDER, "round-2"]  # the baseline computed in both
    assert sitting.begin_anew(RunFolder(tmp_path)) and not list((tmp_path / FOLDER).glob("round-*"))


def test_on_a_gpu_each_engine_needs_a_budget_and_the_hosts_memory_is_not_asked(sit, monkeypatch):
    monkeypatch.setattr(sitting, "free_memory", lambda: 1 << 20)
    monkeypatch.setattr(sitting, "runs_on_cpu", lambda device: False)
    with pytest.raises(MeasurementError, match="set kv_budget"):
        sit(20, page_size=[8]).execute()
    monkeypatch.setitem(DATA["engine"], "kv_budget", "1MiB")
    made = sit(20, launches=1, page_size=[8])
    made.capacity = {each.config_id: BUDGETED for each in made.design.configurations}
    found = made.execute()
    assert found.effects and not any("room" in note for note in found.notes)


def test_engines_on_other_threads_than_the_baseline_are_left_out_in_any_order(sit, tmp_path):
    found = sit(20, launches=1, num_threads=[2, 3], page_size=[8]).execute()
    cells = {effect.cell.split("-c")[0] for effect in read_engine_time(tmp_path).effects}
    assert found.configurations == 2 and cells == {"paged-p8"}
    assert sum("num_threads" in note for note in found.notes) == 2


def test_an_engine_that_fails_in_a_later_launch_leaves_what_was_measured_before(sit, tmp_path, monkeypatch):
    launches = []

    class FailsLater(FakeProcess):
        def __init__(self, *args, **kwargs):
            launches.append(args)
            if len(launches) == 3:
                raise MeasurementError("the machine went down")
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(sitting, "EngineProcess", FailsLater)
    found = sit(300, page_size=[8]).execute()
    assert found.finished and found.launches == 2 and "the machine went down" in found.notes[-1]
    assert {effect.launches for effect in read_engine_time(tmp_path).effects} == {2}


class OwnProcess(FakeProcess):
    """An engine of another project: one a process, which takes 1 GiB. ``started``: the cores that each was kept on."""

    started: ClassVar[dict[OwnProcess, list[int]]] = {}
    fails: ClassVar[list[int]] = []  # max_num_batched_tokens
    exits, stopped_early = 0, False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.started[self] = []

    def __exit__(self, *exc):
        self.stopped_early |= not exc
        self.exits = 1

    def memory(self):
        return 1 << 30

    def stay_on(self, cores):
        self.started[self] += cores

    def receive(self, limit_s):
        opens = self._answers[0]["do"] == "open"
        if opens and self._commands.engines:
            raise AssertionError("one engine a process")
        settings = self._answers[0].get("settings", {})
        if opens and (settings["page_size"] == 8 or settings["max_num_batched_tokens"] in self.fails):
            raise EngineFailedError("the engine did not answer within 900 s", self)
        return super().receive(limit_s)


@pytest.fixture
def own(sit, monkeypatch):
    """Makes a sitting of engines that have a process each."""
    monkeypatch.setattr(sitting, "EngineProcess", OwnProcess)
    monkeypatch.setattr(OwnProcess, "started", {})
    monkeypatch.setattr(OwnProcess, "fails", [])

    def make(*args, **sweep):
        made = sit(*args, **sweep)
        made.stepped = lambda settings: SteppedLaunch(("engine",), shared=False)
        return made

    return make


def test_engines_of_other_projects_have_a_process_each_on_the_same_cores(own, monkeypatch):
    monkeypatch.setitem(DATA["engine"], "num_threads", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    found = own(300, launches=3, max_num_batched_tokens=[48], max_num_seqs=[5]).execute()
    assert found.at_once == 1 and len(OwnProcess.started) == 9
    cores = list(OwnProcess.started.values())
    assert all(cores[i] == cores[i + 1] == cores[i + 2] and len(cores[i]) == 1 for i in (0, 3, 6))
    throughput = {effect.cell: effect for effect in found.effects if effect.metric == "output_throughput"}
    assert throughput["paged-p16-tokens48-c4"].ratio == pytest.approx(1 / 1.2, abs=0.01)


def test_an_engine_of_its_own_process_that_hangs_or_refuses_leaves_the_others(own):
    found = own(300, launches=1, page_size=[8, 64], max_num_batched_tokens=[48]).execute()
    assert {effect.cell for effect in found.effects} == {"paged-p16-tokens48-c2", "paged-p16-tokens48-c4"}
    assert [word for note in found.notes for word in ("within 900 s", "cannot be 64") if word in note]


def test_an_engine_that_does_not_open_in_a_later_launch_leaves_what_was_measured_before(own, tmp_path):
    made = own(300, launches=4, max_num_batched_tokens=[48])
    made.on_effects = lambda measured: OwnProcess.fails.append(48) if measured.launches == 2 else None
    found = made.execute()
    assert found.launches == 2 and "within 900 s" in found.notes[-1]
    assert {effect.launches for effect in read_engine_time(tmp_path).effects} == {2}


def test_a_process_that_does_not_open_is_stopped(own):
    own(300, launches=1, page_size=[8], max_num_batched_tokens=[48]).execute()
    assert [process.exits for process in OwnProcess.started] == [1, 1, 1]  # the exit stack's is one of them
    assert sum(process.stopped_early for process in OwnProcess.started) == 1


def test_sizes_that_only_a_server_tells_are_said(own):
    made = own(300, page_size=[4])
    made.capacity = {name: Capacity(max_model_len=128) for name in made.capacity}
    assert "not known" in made.why_not()


def test_processes_that_memory_does_not_hold_take_part_in_rounds(own, monkeypatch):
    monkeypatch.setattr(sitting, "free_memory", lambda: 3 << 29)  # beside the baseline's process: one more
    found = own(300, launches=1, max_num_batched_tokens=[48], max_num_seqs=[5, 6]).execute()
    assert found.configurations == 4 and len(OwnProcess.started) == 6
    assert len({effect.cell for effect in found.effects}) == 6


def test_on_a_gpu_an_engine_that_does_not_open_beside_others_is_tried_alone(own, monkeypatch):
    monkeypatch.setattr(sitting, "runs_on_cpu", lambda device: False)
    monkeypatch.setitem(DATA["engine"], "kv_budget", "1MiB")
    found = own(300, launches=1, page_size=[64], max_num_batched_tokens=[48]).execute()
    assert found.configurations == 2 and len(OwnProcess.started) == 5  # the refused one, and its baseline, once more


def test_requests_that_an_engine_does_not_take_are_said(own, monkeypatch):
    monkeypatch.setattr(OwnProcess, "greet", lambda process: setattr(process, "greedy_only", True))
    monkeypatch.setitem(DATA["load"], "temperature", 0.5)
    with pytest.raises(MeasurementError, match=r"load\.temperature=0"):
        own(300, max_num_batched_tokens=[48]).execute()
