"""A run of claims that is interrupted leaves claims.json beside what was measured."""

from __future__ import annotations

import pytest

from kvbench.claims import run
from kvbench.claims.catalogue import chosen, workloads_of
from kvbench.claims.kernel_cost import IN_ORDER, RESERVED, SCATTERED, KernelCost
from kvbench.claims.results import ClaimsResult
from kvbench.claims.run import ClaimsRun
from kvbench.common.errors import Interrupted, MeasurementError
from kvbench.common.records import read_record


def test_an_interrupted_run_has_claims_json_from_the_beginning(tmp_path, monkeypatch):
    def measure(name, workload, folder, **options):
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


def test_an_undecided_claim_is_measured_further_and_a_failure_leaves_what_is_there(tmp_path, monkeypatch):
    costs = [KernelCost("cpu", "numba", 1, 16, 16, {RESERVED: [1.0, 1.0], IN_ORDER: [1.0, 1.1], SCATTERED: [1.0, 1.1]})]
    costs += [MeasurementError("no room")]

    def measured(folder, on_cpu, say, check):
        cost = costs.pop(0)
        if isinstance(cost, Exception):
            raise cost
        return cost

    monkeypatch.setitem(run.OTHERS, "paging-cost", measured)
    said, claims = [], chosen(["paging-cost"])
    result = ClaimsRun(tmp_path, claims, {}, 1.0, "cpu", show=print, say=said.append, check=lambda: None).execute()
    (claim,) = result.claims
    assert not costs and claim.verdict == "undecided" and claim.evidence  # it was tried again once, and not forever
    assert any("no room" in line for line in said) and "no room" not in claim.reason
