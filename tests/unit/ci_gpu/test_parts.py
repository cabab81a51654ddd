"""Which parts run, for how long, and what they need; the tuning part."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from ci.gpu import __main__ as runner_module
from ci.gpu import tune
from ci.gpu.part import PartReport
from ci.gpu.parts import ENTRIES, PARTS, plan_seconds, select_parts
from ci.gpu.requirements import BROUGHT, read_requirements
from kvbench.cli.main import cli
from kvbench_kernels import tuning


def test_which_parts_run():
    def names(*asked, quick=False):
        return [part.name for part in select_parts(list(asked), quick)]

    assert names() == [part.name for part in PARTS if part.full_s]
    assert names("before-after") == ["facts", "before-after"]  # of an entry of the queue, and by name
    assert "tune" not in names(quick=True) and "sweep" in names(quick=True)
    assert names("kernels") == ["facts", "kernels"]
    assert names("tune", quick=True) == ["facts", "tune"]
    assert names("engine", quick=True) == ["facts", "engine-qwen3-0.6b", "engine-llama-3.1-8b"]
    assert {"variants", "memcheck", "tests"} <= set(names(quick=True))
    assert "engine-qwen3-14b" in names("engine")
    assert names("sweep", "check") == ["facts", "check", "sweep"]


def test_a_quick_run_fits_its_limit_and_saved_time_goes_to_later_parts():
    parts = select_parts([], quick=True)
    assert sum(part.quick_s for part in parts) < runner_module.QUICK_LIMIT_S - 60 < 600 - 60
    first = parts[0].quick_s
    assert plan_seconds(parts, True, 100.0) == first  # late already: not more than its own
    assert first < plan_seconds(parts, True, 10_000.0) <= 2 * first
    assert plan_seconds(parts[-1:], True, 300.0) > 250
    assert plan_seconds(parts, True, 10.0) < 0


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_begins_with_the_ceilings_and_fits_a_command_of_ten_minutes(name, tmp_path):
    _, parts = runner_module.parse([str(tmp_path / "out"), "--entry", name])
    assert [part.name for part in parts] == list(ENTRIES[name].seconds) and parts[0].name == "facts"
    assert all(part.seconds(quick=False) == ENTRIES[name].seconds[part.name] for part in parts)
    assert sum(ENTRIES[name].seconds.values()) < ENTRIES[name].limit_s <= 575


def test_an_entry_may_be_narrowed_to_some_of_its_parts(tmp_path):
    _, parts = runner_module.parse([str(tmp_path / "out"), "--entry", "long", "--part", "quality"])
    assert [(part.name, part.full_s) for part in parts] == [
        (name, ENTRIES["long"].seconds[name]) for name in ("facts", "quality")
    ]


def test_the_page_of_the_queue_has_every_entry_in_its_order_with_its_seconds():
    page = Path("docs/gpu.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [f"| `{name}`" for name in ENTRIES]
    assert [row[2] for row in rows] == [f"{entry.limit_s:.0f} s" for entry in ENTRIES.values()]
    assert [line[4:] for line in page.splitlines() if line.startswith("### ")][: len(ENTRIES)] == list(ENTRIES)


WHEELS = {  # import name -> the wheel that is it or brings it
    "yaml": "pyyaml", "prometheus_client": "prometheus-client", "gevent": "locust"
}  # fmt: skip


def test_what_parts_need_is_there_or_among_the_wheels_and_their_modules_exist():
    listed = set(read_requirements())
    for part in PARTS:
        module = importlib.import_module(f"ci.gpu.{part.module}")
        assert hasattr(module, "CASES") is part.isolated and hasattr(module, "main") is not part.isolated
        for device in ("cuda", "cpu"):
            assert {WHEELS.get(name, name) for name in part.needed(device)} <= {*BROUGHT, *listed}
    assert not listed & set(BROUGHT)  # never one that could replace the machine's own


def test_requirements_are_pyprojects_less_what_the_machine_brings(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["Some-Thing>=1; platform_system == \'Linux\'", "numpy", "rich"]\n'
        '[project.optional-dependencies]\nengine = ["torch>=2", "numba"]\n'
        'test = ["pytest>=8", "pytest-timeout", "hypothesis", "ruff"]\n'
    )
    found = read_requirements(tmp_path / "pyproject.toml")
    assert list(found) == ["some-thing", "rich", "numba", "pytest", "pytest-timeout", "hypothesis"]
    assert found["some-thing"] == "Some-Thing>=1; platform_system == 'Linux'"


def test_tune_reports_what_was_gained(tmp_path):
    entry = tuning.Entry(
        "decode", "auto", rows=16, d_pad=128, v_pad=128, itemsize=2, page_size=16, block_m=16, block_n=64,
        num_stages=3, num_warps=4, microseconds=90.0, default_microseconds=100.0,
    )  # fmt: skip
    table = tuning.TuningTable(90, "a GPU", 132, "1", "3.6", "2026-01-01", (entry,))
    path = tuning.write_table(table, tmp_path)
    report = PartReport(tmp_path / "part.json", seconds=60)
    tune.summarise(report, json.loads(path.read_text()))
    assert report.data["headline"] == "1 of 1 faster; to use it: kernels/tuned/sm_90.json"
    assert report.data["tables"][0]["rows"][0][2:] == ["100.0", "90.0", "10.0%"]


def test_tune_asks_for_what_kvbench_knows(tmp_path):
    """It fails for want of a GPU, not for an option that is not there."""
    command = tune.tune_command(tmp_path, True, 100.0)
    assert command[command.index("--max-minutes") + 1] == "1.333"
    known = {option for parameter in cli.commands["dev"].commands["tune"].params for option in parameter.opts}
    assert {word for word in command if word.startswith("--")} <= known
