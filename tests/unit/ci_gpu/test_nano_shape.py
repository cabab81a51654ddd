"""The nano-vllm job and its floor, against the figures that its authors and others published."""

from __future__ import annotations

import pytest

from ci.gpu.nano_shape import ModelCost, NanoJob, draw_job, floor_seconds, model_cost
from kvbench_engine.model.spec import find_model

H200_READ, H200_FLOPS = 4.3e12, 790e12  # bytes/s and FLOP/s for which the floors below were published


def test_the_job_is_exactly_the_published_one():
    """142,827 prompt and 133,966 output tokens come out only if every draw is made in nano-vllm's order."""
    job = draw_job()
    assert len(job.prompts) == len(job.output_lengths) == 256
    assert (job.input_tokens, job.output_tokens) == (142_827, 133_966)
    lengths = [*map(len, job.prompts), *job.output_lengths]
    assert min(lengths) >= 100 and max(lengths) <= 1024
    assert all(0 <= token <= 10_000 for prompt in job.prompts for token in prompt)


def test_kv_tokens_read_are_what_a_decode_loop_counts():
    job = NanoJob(((1,) * 5, (2,) * 3), (4, 1))
    counted = sum(len(prompt) + step for prompt, out in zip(job.prompts, job.output_lengths, strict=True)
                  for step in range(out))  # fmt: skip
    assert job.kv_tokens_read == counted == (5 + 6 + 7 + 8) + 3


@pytest.mark.parametrize(
    ("model", "parameters", "published"), [("qwen3-0.6b", 596_049_920, 36_500), ("qwen3-14b", 14_768_307_200, 8_200)]
)
def test_the_floor_is_the_published_one(model, parameters, published):
    spec = find_model(model)
    text = spec.text_config
    embedding, kv_bytes = text["vocab_size"] * text["hidden_size"], spec.kv_shape("bfloat16").bytes_per_slot
    cost, job = model_cost(parameters, embedding, text["tie_word_embeddings"], 2, kv_bytes), draw_job()
    floor = floor_seconds(job, cost, H200_READ, H200_FLOPS)
    assert job.output_tokens / floor["total"] == pytest.approx(published, rel=0.025)


def test_an_untied_input_embedding_is_looked_up_and_not_read():
    tied, untied = model_cost(100, 20, True, 2, 8), model_cost(120, 20, False, 2, 8)
    assert tied == ModelCost(weight_bytes=200, matrix_parameters=80, kv_bytes=8)
    assert untied == tied


def test_the_floor_falls_with_faster_hardware_term_by_term():
    job, cost = NanoJob(((1,) * 10,), (5,)), ModelCost(weight_bytes=1000, matrix_parameters=500, kv_bytes=4)
    floor = floor_seconds(job, cost, read_bytes_per_s=100.0, flop_per_s=1000.0)
    assert floor == {"kv": 60 * 4 / 100, "weights": 5 * 1000 / 100, "prefill": 2 * 500 * 10 / 1000,
                     "total": 2.4 + 50.0 + 10.0}  # fmt: skip
    faster = floor_seconds(job, cost, read_bytes_per_s=200.0, flop_per_s=1000.0)
    assert faster["kv"] == floor["kv"] / 2 and faster["prefill"] == floor["prefill"]
