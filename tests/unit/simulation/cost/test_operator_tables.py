"""Measured operator times: interpolation against closed formulas, what is refused, what is said of extrapolation."""

from __future__ import annotations

import csv
import itertools

import pytest

from kvbench.capacity.gpus import find_gpu
from kvbench.capacity.model import plan_model
from kvbench.common.errors import UsageError
from kvbench.simulation.cost.cost_model import active_experts
from kvbench.simulation.cost.machine import Machine
from kvbench.simulation.cost.tables import find_tables, grid_of, read_tables
from kvbench_engine.config import EngineConfig
from kvbench_engine.execution.simulated_executor import StepWork

SIZES = (16, 64, 256, 1024)
CONTEXTS = (16, 256, 1024, 4096)
BATCHES = (1, 8, 64)
GEMM, ELEMENT, HEAD = 0.5, 0.01, 2.0  # us a token; a sequence


def attention(chunk: float, before: float, decodes: float, context: float) -> float:
    """Linear in each of its arguments, so that multilinear interpolation must meet it everywhere."""
    return 4 + 0.02 * chunk + 1e-5 * chunk * before + 0.002 * decodes * context


def write(folder, name, columns, rows):
    with (folder / name).open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


@pytest.fixture
def folder(tmp_path):
    """Tables of made-up operators, each linear."""
    dense = [
        (layer, tokens, 100 + GEMM * tokens if layer.endswith("proj") else 1 + ELEMENT * tokens)
        for layer in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "act_fn", "layernorm", "embedding")
        for tokens in (1, 64, 2048)
    ]
    write(tmp_path, "dense.csv", ("layer", "tokens", "time_us"), dense)
    heads = [("lm_head", n, 400 + HEAD * n) for n in (1, 256)] + [("sampler", n, 100) for n in (1, 256)]
    write(tmp_path, "per_sequence.csv", ("layer", "sequences", "time_us"), heads)
    shapes = [(0, 0, n, kv) for n in BATCHES for kv in CONTEXTS]
    shapes += [(c, k, 0, 0) for c in SIZES for k in (0, *CONTEXTS)]
    shapes += list(itertools.product(SIZES, (0, *CONTEXTS), BATCHES, CONTEXTS))
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    write(tmp_path, "attention.csv", columns, [(*shape, attention(*shape)) for shape in shapes])
    return tmp_path


def seconds_of(folder, work, model="llama-3.1-8b", **settings):
    machine = Machine(plan_model(model), find_gpu("H200"), 1, read_tables(folder))
    timer = machine.step_timer(EngineConfig.from_mapping({"model": "any", **settings}))
    return timer(work).total, timer


@pytest.mark.parametrize(
    "work",
    [
        StepWork((), 20, 20 * 500, 500, 20),
        StepWork(((100, 300),), 0, 0, 0, 1),
        StepWork(((100, 300),), 5, 5 * 900, 900, 6),
        StepWork(((700, 0),), 50, 50 * 2000, 2000, 50),
    ],
)
def test_a_step_is_the_sum_of_its_operators(folder, work):
    chunk, before = work.prefills[0] if work.prefills else (0, 0)
    context = work.decode_context / work.decodes if work.decodes else 0
    tokens = work.tokens
    layer = 4 * (100 + GEMM * tokens) + 3 * (1 + ELEMENT * tokens)
    layer += attention(chunk, before, work.decodes, context)
    once = 1 + ELEMENT * tokens + 500 + HEAD * work.drawn
    seconds, timer = seconds_of(folder, work)
    assert seconds == pytest.approx((32 * layer + once) * 1e-6, rel=1e-6)
    assert sum(timer.seconds.values()) == pytest.approx(seconds) and not timer.notes()


def test_beyond_the_tables_is_continued_and_said(folder):
    seconds, timer = seconds_of(folder, StepWork((), 128, 128 * 8192, 8192, 128))
    layer = 4 * (100 + GEMM * 128) + 3 * (1 + ELEMENT * 128) + attention(0, 0, 128, 8192)
    once = 1 + ELEMENT * 128 + 500 + HEAD * 128
    assert seconds == pytest.approx((32 * layer + once) * 1e-6, rel=1e-6)
    notes = " ".join(timer.notes())
    assert len(timer.notes()) == 2 and "128" in notes and "64" in notes and "8,192" in notes and "4,096" in notes


def test_tables_of_another_gpu_or_model_are_refused_and_what_they_lack_is_said(folder):
    for meta in ("hardware: RTX4090", "model: Qwen/Qwen3-32B"):
        (folder / "meta.yaml").write_text(meta)
        with pytest.raises(UsageError):
            find_tables(folder, "H200", "Llama-3.1-8B", 1)
    (folder / "meta.yaml").write_text("hardware: H200\nmodel: meta-llama/Llama-3.1-8B\n")
    assert find_tables(folder, "H200", "llama-3.1-8b", 1) == folder
    write(folder, "per_sequence.csv", ("layer", "sequences", "time_us"), [("lm_head", n, 500) for n in (1, 256)])
    _, timer = seconds_of(folder, StepWork((), 20, 20 * 500, 500, 20))
    assert any("sampler" in note for note in timer.notes())


def test_prompts_side_by_side_take_less_than_one_of_all_their_tokens(folder):
    one, _ = seconds_of(folder, StepWork(((1024, 0),), 0, 0, 0, 1))
    four, _ = seconds_of(folder, StepWork(((256, 0),) * 4, 0, 0, 0, 1))
    single, _ = seconds_of(folder, StepWork(((256, 0),), 0, 0, 0, 1))
    assert single < four < one


def test_one_long_sequence_holds_a_decode_up(folder):
    even, _ = seconds_of(folder, StepWork((), 64, 64 * 256, 256, 64))
    uneven, _ = seconds_of(folder, StepWork((), 64, 64 * 256, 4096, 64))
    # a wave of an H200 is 0.87 x 132 / 8 sequences: 14.4 of the longest take longer than 64 of the mean
    assert even < uneven
    assert uneven - even == pytest.approx(32e-6 * 0.002 * (0.87 * 132 / 8 * 4096 - 64 * 256), rel=1e-6)


def test_two_sweeps_in_one_file_make_one_grid():
    def value(x, y):
        return 3 + 2 * x + 5 * y

    doubled, others = (1, 2, 4, 8, 16), (3, 6, 12)
    points = {(x, y): value(x, y) for x in doubled for y in doubled}
    points |= {(x, y): value(x, y) for x in others for y in (2, *others)}
    grid = grid_of(points)
    for x, y in [(1, 1), (3, 1), (3, 5), (5, 3), (6, 16), (12, 8), (16, 16), (7.5, 9.5), (20, 3)]:
        assert grid(x, y) == pytest.approx(value(x, y))


@pytest.mark.parametrize(
    ("spoil", "names"),
    [
        (lambda f: (f / "attention.csv").unlink(), "attention.csv"),
        (lambda f: (f / "dense.csv").write_text("layer,tokens,time_us\nqkv_proj,1,3\n"), "o_proj"),
        (lambda f: (f / "per_sequence.csv").write_text("layer,sequences,time_us\nlm_head,one,3\n"), "per_sequence.csv"),
        (lambda f: (f / "per_sequence.csv").write_text("layer,sequences,time_us\nlm_head,1,nan\n"), "nan"),
    ],
)
def test_broken_tables_are_refused_with_what_is_wrong(folder, spoil, names):
    spoil(folder)
    with pytest.raises(UsageError, match=names):
        read_tables(folder)


def test_tables_of_another_kind_of_model_are_refused(folder):
    with pytest.raises(UsageError, match=r"moe\.csv"):
        seconds_of(folder, StepWork((), 1, 1, 1, 1), model="Qwen3-30B-A3B")
    write(folder, "moe.csv", ("tokens", "activated_experts", "time_us"), [(1, 8, 50), (64, 8, 60), (64, 128, 800)])
    with pytest.raises(UsageError, match=r"moe\.csv"):
        seconds_of(folder, StepWork((), 1, 1, 1, 1))
    with pytest.raises(UsageError, match="kv_cache_dtype"):
        seconds_of(folder, StepWork((), 1, 1, 1, 1), model="Qwen3-30B-A3B", kv_cache_dtype="fp8")
    _, timer = seconds_of(folder, StepWork((), 1, 1, 1, 1), model="Qwen3-30B-A3B")
    assert timer.seconds["experts"] == pytest.approx(48 * 50e-6)


def test_tables_are_found_by_device_model_and_split(tmp_path, folder):
    collection = tmp_path / "ops"
    (collection / "RTXPRO6000" / "Llama-3.1-8B" / "tp2").mkdir(parents=True)
    (collection / "RTXPRO6000" / "Llama-3.1-8B" / "tp2" / "dense.csv").write_text("")
    actual = find_tables(collection, "RTX-PRO-6000", "llama-3.1-8b", 2)
    assert actual == collection / "RTXPRO6000" / "Llama-3.1-8B" / "tp2"
    assert find_tables(folder, "any", "any", 1) == folder
    with pytest.raises(UsageError, match="tp2"):
        find_tables(collection, "RTX-PRO-6000", "llama-3.1-8b", 1)


def test_experts_that_tokens_reach():
    """Against the share of even routing that was counted at Qwen3-30B-A3B's router, see ``cost_model.EVENNESS``."""

    def even(tokens):
        return 128 * (1 - (1 - 8 / 128) ** tokens)

    assert active_experts(1, 128, 8) == 8
    assert active_experts(16, 128, 8) / even(16) == pytest.approx(0.87, abs=0.01)
    assert active_experts(100, 128, 8) / even(100) == pytest.approx(0.94, abs=0.02)
    assert active_experts(40, 128, 8, evenness=1e9) == pytest.approx(even(40), rel=0.03)
    assert active_experts(10**6, 128, 8) <= 128
