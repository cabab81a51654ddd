"""The check of whole engines finds wrong tokens, and engines that did not do what they were to show."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from ci.gpu import check_tokens, tables
from ci.gpu.check_tokens import TokenChecks, Way, check_way, make_engine, ways
from ci.gpu.part import PartReport, Report
from kvbench_engine.config import EngineConfig
from kvbench_engine.model.loader import load_model
from tests.support.hf_parts import one_thread

EAGER = Way(graphs=False, overlapping=True, preemption="swap")
POOL = 160  # for these prompts as scarce as the part's own for its own


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    """A model's folder, and prompts with their tokens."""
    with pytest.MonkeyPatch.context() as patch, one_thread():
        patch.setattr(check_tokens, "LENGTHS", (70, 65, 64, 33, 17, 5))
        patch.setattr(check_tokens, "MAX_MODEL_LEN", 112)
        folder = check_tokens.save_model(tmp_path_factory.mktemp("tokens"))
        yield folder, check_tokens.make_problem(folder)


@pytest.fixture
def checked(problem):
    """The report on an engine of such a way and pool, its weights ``spoilt`` or not."""
    folder, answers = problem
    loaded = load_model(EngineConfig(model=folder, dtype="float32", device="cpu"))

    def of(way: Way, pool: int = POOL, claimed: Way | None = None, spoilt: bool = False) -> Report:
        report = Report(600.0)
        engine = make_engine(loaded, folder, way, pool)
        if spoilt:
            with torch.no_grad():
                loaded.model.model.norm.weight[:64] *= 0.5
        check_way(report, engine, claimed or way, answers)
        return report

    return of


def test_an_engine_that_is_right_passes(checked):
    report = checked(EAGER)
    assert not report.data["failures"], report.data
    (row,) = report.data["rows"]
    assert row["case"] == "eager, async, swap" and row["status"] == "passed"
    assert min(row["preemptions"], row["swapped_in_slots"], row["prefix_hits"]) > 0


def test_wrong_tokens_are_found(checked):
    (failure,) = checked(EAGER, spoilt=True).data["failures"]
    assert failure["what"] == EAGER.name
    assert "round 1, prompt of " in failure["reason"] and "differs from generate" in failure["reason"]


def test_an_engine_that_did_not_do_what_it_was_to_show_fails(checked):
    told = [
        checked(EAGER, pool=2048),
        checked(EAGER, claimed=replace(EAGER, graphs=True)),
        checked(EAGER, claimed=replace(EAGER, overlapping=False)),
        checked(replace(EAGER, preemption="recompute"), claimed=EAGER),
    ]
    reasons = [report.data["failures"][0]["reason"] for report in told]
    assert "to be preempted" in reasons[0] and reasons[0].endswith("and 1 more")  # nor swapped
    assert [reason.partition("to be ")[2].partition(",")[0] for reason in reasons[1:]] == [
        "with graphs", "in turn", "swapped"
    ]  # fmt: skip


def test_a_gpu_is_asked_for_all_ways_and_a_cpu_for_those_without_graphs():
    assert len(set(ways("cuda"))) == 8 and {(way.graphs, way.overlapping) for way in ways("cuda")} == {
        (True, True), (True, False), (False, True), (False, False)
    }  # fmt: skip
    assert set(ways("cpu")) == {way for way in ways("cuda") if not way.graphs}


def test_each_way_has_a_process_of_its_own_and_reads_the_answers_that_the_plan_wrote(problem, tmp_path, monkeypatch):
    answers = problem[1]
    monkeypatch.setattr(check_tokens, "make_problem", lambda folder: answers)
    monkeypatch.setitem(check_tokens.MODELS, "plain", (check_tokens.MODEL, POOL))
    part, other = (TokenChecks(Namespace(device="cpu", scratch=tmp_path, own=[])) for _ in range(2))
    plan = part.plan()
    assert [case.name for case in plan] == [way.name for way in ways("cpu")]
    assert {case.group for case in plan} == {None}
    told = json.loads((tmp_path / "tokens-llama" / "answers.json").read_text())
    assert {tuple(prompt): tokens for prompt, tokens in told} == answers
    good = PartReport(tmp_path / "part.json", 600.0)
    other.run(plan[0].name, good)
    good.put(cases=len(plan))
    tables.tokens(good, None)
    assert good.data["headline"].startswith("1 of 4 ways") and not good.data["failures"]
    assert good.data["tables"][0]["rows"][0][:2] == [plan[0].name, "passed"]
    told[0][1][-1] += 1
    (tmp_path / "tokens-llama" / "answers.json").write_text(json.dumps(told))
    report = Report(600.0)
    other.run(plan[0].name, report)
    assert "differs from generate" in report.data["failures"][0]["reason"]
