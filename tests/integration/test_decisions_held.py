"""The data stored in results/reference gives the decisions that it always gave: verdicts, choices, calls, exit codes.

tests/data/decisions.json holds those of commit 11496389, before results had types and calls had one vocabulary, which
tests/support/decisions.py read off the commands' files. A difference is a changed decision, a changed number, or in a
section's digest changed words. Where one is meant, store the decisions anew and read the difference line by line.
"""

from __future__ import annotations

import json

import pytest

from tests.support.decisions import STORED, decide, part_names

HELD = json.loads(STORED.read_text())
OF_RUNS = ("report", "limits")
MAIN_RUNS = ("mixed-cpu", "mixed-cpu-quality", "llamacpp-cpu/llamacpp", "vllm-cpu/sweep")


def in_rings():
    """The parts; of each run's decisions those of four runs in the main ring."""
    for part in part_names():
        kind, name = part.split(": ")
        rest = (kind in OF_RUNS and name.split()[0] not in MAIN_RUNS) or part == "pairs: gate/pairs"
        yield pytest.param(part, marks=[pytest.mark.full] * rest)


def test_no_part_is_left_out():
    assert part_names() == list(HELD)


@pytest.mark.parametrize("part", in_rings())
def test_decisions_are_held(part, tmp_path):
    decided = json.loads(json.dumps(decide(part, tmp_path)))
    assert decided == HELD[part]
