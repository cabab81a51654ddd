"""The batch job on a real, tiny engine."""

from __future__ import annotations

import time

import pytest

from ci.gpu import engine_job
from ci.gpu.engine_job import cost_of, run_job
from ci.gpu.nano_shape import ModelCost, draw_job
from engine.build import build_engine
from engine.config import EngineConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(engine_job._tiny_model(tmp_path_factory.mktemp("model")))


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
    assert sum(result.step_seconds) == pytest.approx(result.seconds)
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
    found = engine_job._quantiles([0.004, 0.001, 0.003, 0.002, 0.005], 1e3)
    assert found == pytest.approx({"p50": 3.0, "p90": 4.6, "p99": 4.96, "max": 5.0})
    assert engine_job._quantiles([0.002], 1e3) == {"p50": 2.0, "p90": 2.0, "p99": 2.0, "max": 2.0}
