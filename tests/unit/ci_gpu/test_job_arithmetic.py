"""The estimate of nano-vllm's job: every term counts, and once."""

from __future__ import annotations

import pytest

from ci.gpu.job_arithmetic import (
    AS_TRANSFORMERS,
    FUSED,
    OUTSIDE_MODEL,
    QWEN3_0_6B,
    QWEN3_LAYERS,
    AssumedGPU,
    Launches,
    job_seconds,
    table,
)
from ci.gpu.nano_shape import Job, ModelCost, draw_job, floor_seconds
from engine.model.spec import find_model

JOB = Job(((1,) * 5, (2,) * 3), (4, 2))
COST = ModelCost(weight_bytes=1000, matrix_parameters=10, kv_bytes=4)
PLAIN = AssumedGPU(
    "", 100.0, flop_per_s=50.0, node_s=0.0, launch_s=0.0, kv_share=1.0, weights_share=1.0, flop_share=1.0
)


def test_terms_of_a_small_job():
    """One step of 8 prompt tokens, then steps of 2, 1 and 1 sequences that read 10, 7 and 8 tokens of KV."""
    assert job_seconds(JOB, COST, PLAIN, 7) == pytest.approx(4 * 1000 / 100 + (6 + 4 + 7 + 8) * 4 / 100)
    slow = AssumedGPU("", 1e9, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0)
    assert job_seconds(JOB, COST, slow, 7) == pytest.approx(2 * 10 * (8 + 2 + 1 + 1), rel=1e-5)
    nodes = AssumedGPU("", 1e12, 1e12, 0.5, 0.0)
    assert job_seconds(JOB, COST, nodes, 7) == pytest.approx(4 * 7 * 0.5)
    host = AssumedGPU("", 1e12, 1e12, 0.0, 0.25)
    assert job_seconds(JOB, COST, host, 7) == pytest.approx(7 * 0.25), "graphs do not wait for the host"
    assert job_seconds(JOB, COST, host, 7, batched_tokens=3) == pytest.approx(3 * 7 * 0.25)


def test_without_launches_and_at_the_peaks_it_is_the_job_s_floor():
    job = draw_job()
    ideal = AssumedGPU("", 4.3e12, 790e12, 0.0, 0.0, 1.0, 1.0, 1.0)
    floor = floor_seconds(job, QWEN3_0_6B, 4.3e12, 790e12)["total"]
    assert job_seconds(job, QWEN3_0_6B, ideal, 0) == pytest.approx(floor, rel=0.02)


def test_the_model_is_qwen3_0_6b():
    spec = find_model("qwen3-0.6b")
    text = spec.text_config
    assert text["num_hidden_layers"] == QWEN3_LAYERS
    assert spec.kv_shape("bfloat16").bytes_per_slot == QWEN3_0_6B.kv_bytes
    assert QWEN3_0_6B.weight_bytes / 2 - QWEN3_0_6B.matrix_parameters == text["vocab_size"] * text["hidden_size"]


def test_all_launches_of_a_step():
    assert Launches(layer=5, step=3).total(layers=4) == 5 * 4 + 3 + OUTSIDE_MODEL


def test_the_table_has_a_row_a_gpu_and_way_and_fewer_launches_are_faster():
    rows = table(JOB, COST, 2, [("own", AS_TRANSFORMERS), ("fused", FUSED), ("none", Launches(0, -OUTSIDE_MODEL))])
    assert [row[:2] for row in rows] == [[gpu, way] for gpu in ("H100 SXM", "H200") for way in ("own", "fused", "none")]
    assert [row[2] for row in rows[:3]] == [str(AS_TRANSFORMERS.total(2)), str(FUSED.total(2)), "0"]
    fastest = [float(row[5].split(" to ")[1].replace(",", "")) for row in rows[:3]]
    assert fastest == sorted(fastest) and len(set(fastest)) == 3
