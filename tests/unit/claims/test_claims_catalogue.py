"""Every claim can be measured: its workloads load, fit their budgets on a CPU and a GPU, and can be stepped."""

from __future__ import annotations

import json

import pytest

from kvbench.claims.catalogue import CLAIMS, MEASUREMENTS, OTHERS, WORKLOADS, chosen, workload_of
from kvbench.claims.results import FILE, ClaimsResult, markdown, page
from kvbench.common.errors import UsageError
from kvbench.common.packages import REPOSITORY
from kvbench.common.records import read_record, write_record
from kvbench.lockstep import instrument as loads
from kvbench.targets.builtin import check_configuration
from kvbench.targets.presets import PRESETS
from kvbench.workload.design import capacities, plan_sweep

COMMITTED = REPOSITORY / "results" / "reference" / "claims-cpu"


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
@pytest.mark.parametrize("name", MEASUREMENTS)
def test_a_workload_fits_and_can_be_measured_in_engine_time(name, profile):
    workload = workload_of(name, profile)
    design, _ = plan_sweep(workload, check=check_configuration)
    capacity = capacities(design, check_configuration)
    (point,) = workload.load_points
    limits = {key: min(getattr(known, key) for known in capacity.values()) for key in ("vocab_size", "max_model_len")}
    requests = loads.requests_of(workload.load, point, seed=workload.seed, repeat=1, **limits)
    assert len(design.configurations) > (0 if name.startswith("sharing") else 1)
    assert point.mode == "closed"
    assert loads.SteppedInstrument.why_not(workload.load, requests) is None


def test_claims_and_measurements_belong_together():
    used = {name for claim in CLAIMS.values() for name in claim.measured}
    assert used == {*MEASUREMENTS, *OTHERS}
    assert {row["workload"] for row in MEASUREMENTS.values()} == {p.stem for p in WORKLOADS.glob("*.yaml")}
    assert len({claim.name for claim in CLAIMS.values()}) == len(CLAIMS)
    assert [each.name for each in chosen(("page-16",))] == ["page-16"] and chosen(()) == tuple(CLAIMS.values())
    with pytest.raises(UsageError, match="page-17"):
        chosen(("page-16", "page-17"))


def test_another_engine_can_tell_claims_of_settings_that_every_engine_has():
    possible = chosen((), "vllm")
    workloads = [workload_of(name, "cpu") for claim in possible for name in claim.measured]
    settings = {name for workload in workloads for name in workload.sweep}
    assert settings == {"page_size", "enable_prefix_caching", "max_num_batched_tokens"}
    assert settings <= PRESETS["vllm"].settings.keys() and not any(claim.counted for claim in possible)
    with pytest.raises(UsageError, match=r"swap-by-page .*built-in engine.*page-16"):
        chosen(("page-16", "swap-by-page"), "vllm")


def test_the_committed_results_are_those_in_docs_and_are_stored_and_shown_whole(tmp_path):
    result = read_record(ClaimsResult, COMMITTED / FILE, "restore it")
    assert [each.name for each in result.claims] == [claim.name for claim in CLAIMS.values()]
    assert (REPOSITORY / "docs" / "claims.md").read_text(encoding="utf-8") == markdown(result)
    write_record(tmp_path / FILE, result)
    assert json.loads((tmp_path / FILE).read_text()) == json.loads((COMMITTED / FILE).read_text())
    first, *others = result.claims
    first = first.model_copy(update={"evidence": "<script>alert(1)</script>"})
    text = page(result.model_copy(update={"claims": (first, *others)}))
    assert "<script>alert(1)" not in text and all(f'id="{claim.name}"' in text for claim in CLAIMS.values())
