"""kvbench's engine as a side of turns: the job, and steps of exactly as many tokens as their case says."""

from __future__ import annotations

from argparse import Namespace

import pytest

from ci.gpu.engine_turns import STEP_TOKENS, EngineTurns
from ci.gpu.part import Report


@pytest.fixture(scope="module")
def side(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("side")
    made = EngineTurns(
        Namespace(device="cpu", tiny=True, quick=False, facts=None, scratch=scratch, own=["--pair", "x"])
    )
    made.run("load", Report(600.0))
    return made


def test_the_plan_begins_with_loading(side):
    assert [case.name for case in side.plan()] == ["load", "job", *STEP_TOKENS]


def test_the_job_is_whole_and_may_be_run_again(side):
    for _ in range(2):
        report = Report(600.0)
        side.run("job", report)
        (row,) = report.data["rows"]
        assert row["output_tokens"] == sum(row["output_lengths"]) == sum(side.job.output_lengths)
        assert row["output_tokens_per_s"] == pytest.approx(row["output_tokens"] / row["seconds"])


@pytest.mark.parametrize(
    ("case", "tokens"), [("decode only", 2), ("steps of 512", 8), ("steps of 2048", 32), ("steps of 8192", 128)]
)
def test_every_measured_step_has_the_tokens_of_its_case(side, case, tokens):
    """Two sequences decode, and prompts fill the step up; tiny steps have a 64th of the tokens."""
    report = Report(600.0)
    side.run(case, report)
    (row,) = report.data["rows"]
    assert row["tokens_a_step"] == tokens and row["replayed_share"] == 0  # no graphs on a CPU
    phases = [row[f"{name}_ms"] for name in ("schedule", "prepare", "execute", "sample", "output")]
    assert all(value > 0 for value in phases) and row["median_step_ms"] > 0
    assert not side.engine.has_work() and side.engine.stats().kv.pages_owned == 0
