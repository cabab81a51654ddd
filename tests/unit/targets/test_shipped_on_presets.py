"""Every shipped workload on every preset: what `kvbench sweep W --target NAME` would do, as a table.

A cell of the table is what becomes of the baseline: "" as it is, else the settings that change, or "refused".
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvbench.targets.choose import _arithmetic
from kvbench.targets.launched import Launcher
from kvbench.targets.presets import PRESETS
from kvbench.workload.design import make_design
from kvbench.workload.file import load_workload
from kvbench.workload.plan import without_refused

WORKLOADS = Path(__file__).parents[3] / "workloads"
NAMES = sorted(path.stem for path in WORKLOADS.glob("*.yaml") if path.stem != "ci_counters")  # which sweeps nothing
COLUMNS = ("vllm", "sglang", "tgi", "llamacpp", "transformers")
# transformers serve: no limit of sequences but the load's own, and prefix caching cannot be switched off
USUAL = {
    "cpu": ("page_size", "", "refused", "page_size", "enable_prefix_caching max_num_seqs"),
    "gpu": ("", "", "page_size", "page_size", "enable_prefix_caching max_num_seqs"),
}
CONTIGUOUS = "layout reservation"  # its baseline is the contiguous layout, and it says nothing of prefix caching
TABLE = {(name, profile): row for name in NAMES for profile, row in USUAL.items()} | {
    ("reservations", "cpu"): (
        f"{CONTIGUOUS} page_size", CONTIGUOUS, "refused", f"{CONTIGUOUS} page_size", f"{CONTIGUOUS} max_num_seqs"
    ),
    ("reservations", "gpu"): (
        CONTIGUOUS, CONTIGUOUS, f"{CONTIGUOUS} page_size", f"{CONTIGUOUS} page_size", f"{CONTIGUOUS} max_num_seqs"
    ),
}  # fmt: skip


def launched(name, profile, preset):
    """The workload's engine section with its device said, and the launcher for it."""
    workload = load_workload(WORKLOADS / f"{name}.yaml", profile=profile)
    settings = {**workload.engine, "device": "cpu" if profile == "cpu" else "cuda"}
    return workload, settings, Launcher(PRESETS[preset], "program", _arithmetic)


def becomes(name, profile, preset):
    _, settings, launcher = launched(name, profile, preset)
    if launcher.refusal(settings) is None:
        return ""
    near, changes = launcher.nearest(settings)
    if launcher.refusal(near) is not None:
        return "refused"
    changed = {key for key in settings if near.get(key) != settings[key]}
    assert changed == {re.match(r"\w+", change)[0] for change in changes}  # each is said
    return " ".join(sorted(changed))


@pytest.mark.parametrize("preset", COLUMNS)
def test_the_first_command_a_user_types(preset):
    column = COLUMNS.index(preset)
    found = {row: becomes(*row, preset) for row in TABLE}
    assert found == {row: " ".join(sorted(cells[column].split())) for row, cells in TABLE.items()}


def test_a_server_for_gpus_says_so_on_a_machine_without():
    _, settings, launcher = launched("mixed", "cpu", "tgi")
    left = launcher.refusal(launcher.nearest(settings)[0])
    assert "TGI cannot have device cpu: its launcher needs an accelerator" in left
    assert "seed" not in left and "preemption_mode" not in left  # they change nothing there


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("preset", "cells"),
    [
        ("vllm", {"cpu": ["paged-p32", "paged-p64", "paged-p32-prefix", "paged-p32-fp8_e4m3"],
                  "gpu": ["paged-p16", "paged-p64", "paged-p16-prefix", "paged-p16-fp8_e4m3",
                          "paged-p16-int8_per_token_head"]}),
        ("sglang", {"cpu": ["paged-p16", "paged-p8", "paged-p64", "paged-p16-prefix", "paged-p16-fp8_e4m3"],
                    "gpu": ["paged-p16", "paged-p8", "paged-p64", "paged-p16-prefix", "paged-p16-fp8_e4m3"]}),
    ],
)  # fmt: skip
def test_what_is_left_of_the_mixed_sweep(preset, cells, profile):
    workload, settings, launcher = launched("mixed", profile, preset)
    near, _ = launcher.nearest(settings)
    design = without_refused(make_design(near, workload.sweep, workload.load_points, workload.design), launcher.refusal)
    assert sorted(c.config_id for c in design.configurations) == sorted(cells[profile])
    assert all(note.startswith("skipped ") and "cannot have" in note for note in design.notes)
