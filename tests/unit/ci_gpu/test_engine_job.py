"""The batch job on a real, tiny engine."""

from __future__ import annotations

import time
from argparse import Namespace

import pytest

from ci.gpu import engine_job, tables
from ci.gpu.engine_job import VARIANTS, EngineJob, cost_of, run_job
from ci.gpu.nano_shape import ModelCost, draw_job
from ci.gpu.part import PartReport, Report
from kvbench_engine.build import build_engine
from kvbench_engine.config import EngineConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(engine_job.tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def engine(model):
    return build_engine(
        EngineConfig(
            model=model, load_format="dummy", device="cpu", kv_budget=2 * 2**20, max_model_len=96, max_num_seqs=4,
            max_num_batched_tokens=32,
        )
    )  # fmt: skip


def test_every_request_brings_what_it_asked_for(engine):
    job = draw_job(4, 8, 24)
    before = engine.stats().steps
    result = run_job(engine, job, "whole")
    assert result.output_lengths == list(job.output_lengths)
    assert min(result.first_token) > 0 and max(result.finished) <= result.seconds
    assert all(first <= last for first, last in zip(result.first_token, result.finished, strict=True))
    assert 0.9 * result.seconds < sum(result.step_seconds) < result.seconds  # adding the requests counts, too
    assert len(result.step_seconds) == engine.stats().steps - before
    assert set(result.phases) == {"schedule", "prepare", "execute", "sample", "output"}
    assert 0 < sum(result.phases.values()) < result.seconds
    assert not engine.has_work()


def test_out_of_time_the_rest_is_aborted_and_the_lengths_show_it(engine):
    job = draw_job(4, 40, 48)
    result = run_job(engine, job, "late", ends=time.monotonic())
    assert all(got < wanted for got, wanted in zip(result.output_lengths, job.output_lengths, strict=True))
    assert not engine.has_work() and engine.stats().kv.pages_owned == 0


def test_the_cost_is_that_of_the_loaded_model(engine, model):
    """2 layers of 64 x (64 + 32 + 32 + 64) attention and 3 x 64 x 128 MLP with norms; vocabulary 10,001, untied."""
    blocks = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64) + 64
    output = 10_001 * 64
    assert cost_of(engine, model) == ModelCost((blocks + output) * 4, blocks, 2 * 2 * (16 + 16) * 4)


def test_quantiles_are_of_the_samples():
    found = engine_job.quantiles([0.004, 0.001, 0.003, 0.002, 0.005], 1e3)
    assert found == pytest.approx({"p50": 3.0, "p90": 4.6, "p99": 4.96, "max": 5.0})
    assert engine_job.quantiles([0.002], 1e3) == {"p50": 2.0, "p90": 2.0, "p99": 2.0, "max": 2.0}


def job_of(scratch, *own: str, **values) -> EngineJob:
    given = {"device": "cpu", "tiny": True, "quick": True, "facts": None, "scratch": scratch} | values
    return EngineJob(Namespace(own=["--model", "qwen3-0.6b", *own], **given))


def test_a_quick_job_has_all_the_sequences_and_the_profile_comes_last(tmp_path):
    job = job_of(tmp_path, device="cuda", tiny=False)
    assert len(job.job.prompts) == 256 and sum(job.job.output_lengths) == 133_966
    assert [case.name for case in job.plan()] == ["run 0", "profile of decode"]


def test_variants_have_the_same_prompts_short_outputs_and_a_process_each(tmp_path):
    job = job_of(tmp_path, "--variants", device="cuda", tiny=False)
    assert job.job.prompts == draw_job().prompts and max(job.job.output_lengths) == engine_job.VARIANT_OUTPUT
    plan = job.plan()
    assert [case.name for case in plan] == list(VARIANTS) and {case.group for case in plan} == {None}
    assert not next(iter(VARIANTS.values()))  # the others are held against it
    for settings in VARIANTS.values():
        EngineConfig(model="qwen3-0.6b", device="cuda", **settings)


def test_a_variant_is_measured_with_its_setting_and_told_beside_the_first(tmp_path, monkeypatch):
    monkeypatch.setitem(VARIANTS, "unheard of", {"no_such_setting": True})
    job, report = job_of(tmp_path, "--variants"), PartReport(tmp_path / "part.json", 600.0)
    for name in ("as it is", "CUDA graphs off", "unheard of"):
        job.run(name, report)
    assert [row["variant"] for row in report.data["rows"]] == ["as it is", "CUDA graphs off"]
    assert job.engine.config.cuda_graphs is False
    assert report.data["skipped"] == [{"what": "unheard of", "reason": "this engine has no setting no_such_setting"}]
    tables.engine(report, Namespace(tiny=True))
    (table,) = report.data["tables"]
    first, second = (row["output_tokens_per_s"] for row in report.data["rows"])
    assert [row[:3] for row in table["rows"]] == [
        ["as it is", f"{first:,.0f}", "1.00"], ["CUDA graphs off", f"{second:,.0f}", f"{second / first:.2f}"]
    ]  # fmt: skip


def test_the_largest_kernels_are_shown_with_their_share(tmp_path):
    report = PartReport(tmp_path / "part.json", 600.0)
    kernels = [{"name": f"kernel {us}", "count": 2.0, "us": float(us)} for us in range(30, 0, -1)]
    report.put(kernels_of_a_decode_step=kernels, other_kernels_us=535.0, kernels_a_decode_step=71.0, profiled="m")
    tables.engine(report, Namespace(tiny=False))
    (table,) = report.data["tables"]
    assert table["rows"][0] == ["kernel 30", "2.0", "30.0", "3%"] and len(table["rows"]) == tables.SHOWN_KERNELS
    assert "71 kernels" in table["title"] and "1,000 us" in table["title"]


def test_a_warning_of_the_engine_fails_the_case_that_runs(tmp_path):
    job, reports = job_of(tmp_path), [Report(600.0), Report(600.0)]
    for report in reports:
        job.run("run 0", report)
    engine_job.logging.getLogger("kvbench_engine.x").warning("no graphs")
    assert [len(report.data["failures"]) for report in reports] == [0, 1]
    assert [len(report.data["rows"]) for report in reports] == [1, 1]
