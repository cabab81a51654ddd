"""A run of claims that is interrupted leaves claims.json beside what was measured."""

from __future__ import annotations

import pytest

from kvbench.claims import run
from kvbench.claims.catalogue import chosen, workloads_of
from kvbench.claims.results import ClaimsResult
from kvbench.claims.run import ClaimsRun
from kvbench.common.errors import Interrupted
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
