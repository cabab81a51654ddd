"""A run of claims that is interrupted leaves claims.json beside what was measured."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvbench.claims import run
from kvbench.claims.catalogue import Claim, chosen, workloads_of
from kvbench.claims.judges import DID_NOT_HOLD, HELD, UNDECIDED, ClaimVerdict
from kvbench.claims.kernel_cost import IN_ORDER, MOST_TIMINGS, RESERVED, SCATTERED, KernelCost
from kvbench.claims.results import ClaimsResult, markdown
from kvbench.claims.run import ClaimsRun
from kvbench.common.errors import Interrupted, MeasurementError
from kvbench.common.records import read_record
from kvbench.lockstep.sitting import Sitting
from kvbench.targets.options import TargetOptions
from kvbench.targets.presets import PRESETS


def test_an_interrupted_run_has_claims_json_from_the_beginning(tmp_path, monkeypatch):
    def measure(name, target, design, folder, **options):
        folder.mkdir(parents=True)
        raise Interrupted("SIGTERM")

    monkeypatch.setattr(run, "measure", measure)
    claims = chosen(["reservation"])
    claims_run = ClaimsRun(
        tmp_path, claims, workloads_of(claims, "cpu"), 5.0, "cpu", show=print, say=print, check=lambda: None
    )
    with pytest.raises(Interrupted):
        claims_run.execute()
    stored = read_record(ClaimsResult, tmp_path / "claims.json")
    assert (tmp_path / "measured" / "reservation").is_dir() and not stored.finished and stored.claims == ()


@pytest.mark.parametrize("succeed", [2, 100])
def test_an_undecided_kernel_is_timed_again_until_it_fails_or_was_often_enough(succeed, tmp_path, monkeypatch):
    cost = KernelCost("cpu", "numba", 1, 16, 16, {RESERVED: [1.0, 1.0], IN_ORDER: [1.0, 1.1], SCATTERED: [1.0, 1.1]})
    calls = []

    def measured(folder, on_cpu, say, check):
        calls.append(folder)
        if len(calls) > succeed:
            raise MeasurementError("no room")
        return replace(cost, timings=len(calls))

    monkeypatch.setitem(run.OTHERS, "paging-cost", measured)
    said, claims = [], chosen(["paging-cost"])
    result = ClaimsRun(tmp_path, claims, {}, 0.5, "cpu", show=print, say=said.append, check=lambda: None).execute()
    (claim,) = result.claims
    assert len(calls) == min(succeed + 1, MOST_TIMINGS) and len(set(calls)) == 1
    assert claim.verdict == UNDECIDED and claim.evidence and "no room" not in claim.reason
    assert sum("no room" in line for line in said) == (succeed < MOST_TIMINGS)


def test_what_is_counted_comes_first_and_then_what_has_the_fewest_launches(tmp_path, monkeypatch):
    order = []

    def execute(sitting):
        name = sitting.run.path.name
        order.append(name)
        sitting.launches += 1 if name == "single-user" else 2
        sitting.elapsed_s += 1.0
        return SimpleNamespace(launches=sitting.launches)

    def judged(name, word, counted=False):
        return Claim(name, "", "", [name], lambda facts: ClaimVerdict(word, ""), counted=counted)

    monkeypatch.setattr(Sitting, "execute", execute)
    monkeypatch.setattr(run, "MOST_LAUNCHES", 4)
    claims = judged("uniform-lengths", UNDECIDED), judged("single-user", UNDECIDED), judged("reservation", HELD, True)
    workloads = workloads_of(claims, "cpu")
    ClaimsRun(tmp_path, claims, workloads, 5.0, "cpu", show=print, say=print, check=lambda: None).execute()
    assert order[:4] == ["reservation", "uniform-lengths", "single-user", "single-user"]
    assert order.count("uniform-lengths") == 2 and order.count("single-user") == 4


def test_another_engine_is_judged_only_where_it_can_have_what_the_claim_is_about(tmp_path, monkeypatch):
    """transformers always shares pages: nothing can be said of prefix caching, and other claims say what differs."""
    launched = []

    def execute(sitting):
        launched.append(sitting.stepped(sitting.baseline.settings))
        sitting.launches += 20
        return SimpleNamespace(launches=sitting.launches)

    monkeypatch.setattr(Sitting, "execute", execute)
    claims = [
        Claim(name, "", "", [name], lambda facts: ClaimVerdict(HELD, ""))
        for name in ("prefix-unshared", "max-num-batched-tokens")
    ]
    engine = TargetOptions(target="transformers", target_python=sys.executable)
    result = ClaimsRun(
        tmp_path, claims, workloads_of(claims, "cpu"), 5.0, "cpu", print, print, lambda: None, engine
    ).execute()
    (unshared, budget), (launch,) = result.claims, launched
    assert unshared.verdict == UNDECIDED and "enable_prefix_caching" in unshared.reason
    assert budget.verdict == HELD and str(PRESETS["transformers"].adapter) in launch.command
    assert [note.split(":")[0] for note in result.notes] == ["max-num-batched-tokens"]
    assert launch.scratch is not None and not launch.scratch.exists()
    assert "Engine: transformers (of an unknown version)." in markdown(result) and result.notes[0] in markdown(result)


def test_a_launch_that_fails_ends_a_measurement_and_only_other_verdicts_are_printed(tmp_path, monkeypatch):
    calls = []

    def execute(sitting):
        calls.append(sitting)
        if len(calls) < 3:
            sitting.launches += 1
        else:
            sitting.notes.append("engine time ended in launch 3: no room")
        sitting.elapsed_s += 0.01
        return SimpleNamespace(launches=sitting.launches)

    def judged(name, *words):
        def judge(facts):
            return ClaimVerdict(words[min(facts.launches, len(words)) - 1], f"{facts.launches} launches")

        return Claim(name, "", "", ["reservation"], judge)

    monkeypatch.setattr(Sitting, "execute", execute)
    claims = judged("decided", HELD), judged("open", UNDECIDED), judged("later", UNDECIDED, DID_NOT_HOLD)
    workloads, said = workloads_of(claims, "cpu"), []
    result = ClaimsRun(
        tmp_path, claims, workloads, 0.5, "cpu", show=print, say=said.append, check=lambda: None
    ).execute()
    assert len(calls) == 3 and all(claim.evidence == "2 launches" for claim in result.claims)
    assert said == [
        "decided: held. 1 launches",
        "open: undecided. 1 launches",
        "later: undecided. 1 launches",
        "later: did not hold. 2 launches",
        "reservation was not measured further: engine time ended in launch 3: no room",
    ]
