"""Engine time of settings: which are compared, what fits the card, and what is kept whenever a sitting ends."""

from __future__ import annotations

import json
import sys
from argparse import Namespace

import pytest

from ci.gpu import settings
from ci.gpu.part import PartReport
from kvbench.common.errors import MeasurementError
from kvbench.common.files import write_json
from kvbench.lockstep.process import EngineFailedError
from kvbench.runs.engine_time import EngineTime
from kvbench.targets.builtin import check_configuration
from kvbench.workload.design import capacities

MIB, GIB = 2**20, 2**30


def measurement(comparison, folder):
    return settings.GroupRun(comparison, Namespace(device="cuda", scratch=folder), PartReport(folder / "o.json", 60))


def test_every_setting_is_compared_with_paged_kv_of_page_16_on_the_8b_shape(tmp_path):
    compared = {"mixed": set(), "decode": set()}
    for comparison in settings.GROUPS:
        made = measurement(comparison, tmp_path)
        base, *others = made.design.configurations
        assert base.settings["model"] == "llama-3.1-8b" and base.settings["load_format"] == "dummy"
        assert [base.settings[name] for name in ("layout", "page_size", "kv_cache_dtype")] == ["paged", 16, "auto"]
        assert len(made.design.cells) == len(made.design.configurations)
        assert made.workload.load_points[0].concurrency == 64
        assert {each.settings["kv_budget"] for each in made.design.configurations} == {f"{comparison.budget_mib}MiB"}
        load = "decode" if comparison.overrides is settings.DECODE_HEAVY else "mixed"
        compared[load] |= {item for each in others for item in each.varied.items()}
        if load == "decode":  # so that there is something to swap
            held = capacities(made.design, check_configuration)[base.config_id].capacity_tokens
            assert held < 64 * (256 + 1024)
    dtypes = {("kv_cache_dtype", f"{name}") for name in ("fp8_e4m3", "int8_per_token_head", "int4_per_token_head")}
    pages = {("page_size", size) for size in (1, 64, 256)}
    fp8 = ("kv_cache_dtype", "fp8_e4m3")
    assert compared["mixed"] == {fp8, *pages, ("layout", "contiguous"), ("enable_prefix_caching", True)}
    assert compared["decode"] == {*dtypes, ("layout", "contiguous"), ("preemption_mode", "swap")}


@pytest.mark.parametrize("free_gib", [40, 78.5, 139])
def test_a_budget_is_the_largest_of_which_all_engines_fit(free_gib):
    for comparison in settings.GROUPS:
        engines = 1 + sum(map(len, comparison.sweep.values()))
        fitted = comparison.fit(int(free_gib * GIB)).budget_mib

        def needed(budget_mib, engines=engines):
            return 15 * GIB + 3 * GIB + engines * (budget_mib * MIB + 1.5 * GIB)

        assert fitted <= comparison.budget_mib and needed(fitted) <= free_gib * GIB
        assert fitted == comparison.budget_mib or needed(fitted + settings.MIB_STEP) > free_gib * GIB


COUNTERS = {
    "kv_slot_steps_total_tokens": 30.0, "kv_slot_steps_total_free": 70.0, "scheduled_tokens_total_decode": 90.0,
    "steps_total": 30.0, "num_preemptions_total": 2.0,
}  # fmt: skip


class FakeSitting:
    """A sitting of as many launches as ``script`` says; then it ends, or raises what follows."""

    def __init__(self, run, workload, design, capacity, limit_s, open_limit_s, show, check, is_enough, option):
        self.path, self.design, self.is_enough, self.limit_s = run.path / "lockstep", design, is_enough, limit_s
        FakeSitting.made.append(self)

    def execute(self):
        *launches, end = FakeSitting.script[len(FakeSitting.made) - 1]
        self.predicted = json.loads(FakeSitting.out.read_text())["predictions"]
        for number in launches:
            rows = []
            for cell in self.design.cells:
                load = self.path / "cells" / cell.cell_id / "loads" / "1"
                load.mkdir(parents=True, exist_ok=True)
                write_json(load / "done.json", {"metrics": {"output_throughput": 100.0, "ttft_ms": {"p95": 20.0}}})
                write_json(load / "counters.json", COUNTERS)
                if not cell.configuration.is_baseline:
                    effect = {"ratio": 1.25, "low": 1.2, "high": 1.3, "base": 96.0, "value": 120.0}
                    rows.append({"cell": cell.cell_id, "metric": "output_throughput", **effect})
            write_json(self.path / "effects.json", {"launches": number, "effects": rows})
            assert self.is_enough(number) is (number >= settings.LAUNCHES)
        if isinstance(end, Exception):
            raise end
        return EngineTime(notes=tuple(end))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the part with sittings by ``script`` and made-up simulations: its exit code and JSON."""
    monkeypatch.setattr(settings, "Sitting", FakeSitting)

    def simulate(words, seconds):
        folder = settings.Path(words[words.index("--output-dir") + 1]) / "mixed" / "now" / "cells"
        for cell, speed in (("paged-p16-c4", 50.0), ("contiguous-c4", 25.0), ("paged-p64-c4", 55.0)):
            load = folder / cell / "loads" / "1"
            load.mkdir(parents=True, exist_ok=True)
            write_json(load / "done.json", {"metrics": {"output_throughput": speed}})
        return 0, False

    monkeypatch.setattr(settings, "run_kvbench", simulate)

    def of(*script, seconds=100):
        FakeSitting.script, FakeSitting.made, FakeSitting.out = list(script), [], tmp_path / "part.json"
        argv = ["settings", "--out", str(FakeSitting.out), "--device", "cpu", "--seconds", str(seconds), "--tiny",
                "--facts", str(tmp_path / "none"), "--scratch", str(tmp_path)]  # fmt: skip
        monkeypatch.setattr(sys, "argv", argv)
        return settings.main(), json.loads(FakeSitting.out.read_text())

    return of


def test_predictions_are_on_disk_before_anything_is_measured_and_stand_beside_it(run):
    code, data = run([1, 2, []], [1, 2, ["page 64: no room"]])
    assert code == 0 and [made.predicted.keys() for made in FakeSitting.made] == [{"memory", "format"}] * 2
    assert data["predictions"]["memory"]["contiguous-c4"] == {"output_throughput": 0.5}
    rows = {(row["sitting"], row["cell"]): row for row in data["rows"]}
    assert len(rows) == len(data["rows"]) == 5 and data["headline"] == "3 comparisons"
    contiguous = rows["memory", "contiguous-c4"]
    assert contiguous["predicted"] == {"output_throughput": 0.5} and contiguous["launches"] == 2
    assert (contiguous["decoding"], contiguous["kv_usage"], contiguous["preemptions"]) == (3.0, 0.3, 2.0)
    table = data["tables"][0]
    assert "49 MiB" in table["title"] and table["columns"][3] == "predicted, H200"
    assert table["rows"][0][1] == "96"  # means over the launches, of which 100 is the first
    shown = ["contiguous", "120", "1.250 (1.200 to 1.300)", "0.500", "20", *"–––––", "3.0", "30%", "2", "2"]
    assert table["rows"][1] == shown
    assert data["skipped"] == [{"what": "format", "reason": "page 64: no room"}]


@pytest.mark.parametrize(
    ("end", "code"),
    [(MeasurementError("c4 did not end"), 0), (EngineFailedError("it crashed", None), 1), (KeyError("x"), 1)],
)
def test_what_was_measured_before_a_sitting_broke_is_kept_and_the_next_one_begins(run, end, code):
    told, data = run([1, end], [1, 2, []])
    assert told == code and [row["launches"] for row in data["rows"]] == [1, 1, 2, 2, 2]
    assert data["tables"][0]["rows"][0][-1].startswith("1 (") and data["tables"][1]["rows"][0][-1] == "2"
    assert str(end) in (data["failures"] if code else data["skipped"])[0]["reason"]
    told, data = run([end], [1, 2, []])
    assert told == code and {row["sitting"] for row in data["rows"]} == {"format"} and "not_run" not in data
    assert run([end], [end])[1]["not_run"]


@pytest.mark.parametrize(("seconds", "first"), [(400, 400 - 8 - 110), (158, 75), (60, 26)])
def test_a_sitting_leaves_time_for_a_launch_of_each_that_follows_or_its_share(run, seconds, first):
    run([1, 2, []], [1, 2, []], seconds=seconds)
    limits = [made.limit_s * settings.LONGEST for made in FakeSitting.made]
    assert limits == [pytest.approx(first, abs=2), pytest.approx(seconds - 8, abs=2)]


def test_without_room_or_predictions_it_says_so(run, tmp_path, monkeypatch):
    (tmp_path / "none").write_text(json.dumps({"device": {"name": "L4", "memory_free_bytes": 22 * GIB}}))
    small = settings.GROUPS[0].fit(22 * GIB)
    monkeypatch.setattr(settings, "TINY", (small, settings.TINY[0]))
    monkeypatch.setattr(settings, "run_kvbench", lambda words, seconds: (2, False))
    code, data = run([1, []])
    assert code == 0 and "22 GiB" in data["skipped"][0]["reason"] and "L4" in data["skipped"][1]["reason"]
    assert [row["predicted"] for row in data["rows"]] == [{}, {}] and data["tables"][0]["rows"][1][3] == "–"
