"""The checks find what is wrong: each fault is put into a backend that is right otherwise."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from ci.gpu import check_kernels, check_moves
from ci.gpu.kernel_problems import CONTIGUOUS, KernelProblem, draw
from ci.gpu.part import Report
from kvbench_engine.kv.mover import KVMover
from kvbench_kernels.quantized import QuantizedKV
from kvbench_kernels.reference import TorchBackend
from kvbench_kernels.tune.problems import FAR_OUTSIDE, as_float64

CASE = KernelProblem(dtype=torch.float32, dim=16, v_dim=24, group=2, page_size=8, tiny=True)


class SkipsOneMove(KVMover):
    def move(self, moves):
        super().move(moves[:-1])


class Faulty(TorchBackend):
    """Right, but for the ``fault``."""

    def __init__(self, fault: str):
        self.fault = fault

    def decode_attention(self, q, k, v, page_starts, seq_lens, page_size, options, *, out=None, plan=None):
        if self.fault == "sees one token too few":
            seq_lens = (seq_lens - 1).clamp_min(0)
        super().decode_attention(q, k, v, page_starts, seq_lens, page_size, options, out=out, plan=plan)
        if self.fault == "leaves a row unwritten":
            out[0, 0, 0] = float("nan")
        if self.fault == "decode: the longest sequence":
            out[seq_lens.argmax()] *= 1.1
        if self.fault == "decode: a sequence of nothing":
            out[seq_lens == 0] = 1e-9
        return out

    def prefill_attention(self, q, k, v, batch, options, *, out=None, **more):
        super().prefill_attention(q, k, v, batch, options, out=out, **more)
        if self.fault == "prefill: the last row of the longest sequence":
            last = int(batch.query_starts[1]) - 1  # the first sequence is the longest
            out[last] += 0.1 * out[last].flip(-1)
        return out

    def write_kv(self, k, v, k_cache, v_cache, slots):
        super().write_kv(k, v, k_cache, v_cache, slots)
        if self.fault == "writes a neighbour":
            cache = k_cache.codes if isinstance(k_cache, QuantizedKV) else k_cache
            cache[-1] = 1
        if self.fault == "writes the wrong rows":
            kept = slots >= 0
            super().write_kv(k[kept].flip(0), v[kept], k_cache, v_cache, slots[kept])


def run_case(monkeypatch, backend, **changes):
    monkeypatch.setattr(check_kernels, "get_backend", lambda name: backend)
    return check_kernels.run_case(replace(CASE, **changes), "cpu")


FULL = {"dtype": torch.bfloat16, "tiny": False}  # full lengths, bfloat16's limit


@pytest.mark.parametrize(
    "changes",
    [*({"kv": kv, "page_size": (8, CONTIGUOUS)[i % 2]} for i, kv in enumerate(check_kernels.KINDS)), FULL],
    ids=str,
)
def test_the_reference_itself_passes(monkeypatch, changes):
    result = run_case(monkeypatch, TorchBackend(), **changes)
    assert result["status"] == "passed", result
    assert 0 < result["decode"] < (1e-6 if changes is not FULL else 1e-2)


@pytest.mark.parametrize(
    ("fault", "said", "cases"),
    [
        *(
            (fault, said, [{"kv": kv} for kv in ("auto", "fp8_e4m3", "int4_per_token_head")])
            for fault, said in (
                ("sees one token too few", "decode is"),
                ("leaves a row unwritten", "decode is inf"),
                ("writes a neighbour", "a slot that was not asked for"),
                ("writes the wrong rows", "write: "),
            )
        ),
        # In one row only: that of 1030 tokens has a thousandth of the squared norm of them all.
        ("decode: the longest sequence", "decode is 0.1 ", [FULL]),
        ("prefill: the last row of the longest sequence", "prefill is 0.1 ", [FULL]),
        ("decode: a sequence of nothing", "decode is inf ", [FULL]),
    ],
)
def test_a_fault_is_found(monkeypatch, fault, said, cases):
    for changes in cases:
        result = run_case(monkeypatch, Faulty(fault), **changes)
        assert result["status"] == "failed" and said in result["reason"], result


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_moves_that_are_right_pass(layout):
    assert check_moves.moves_differ(layout, "cpu") is None


def test_what_a_backend_refuses_is_skipped_with_its_reason():
    result = check_kernels.run_case(replace(CASE, dim=1000, v_dim=1000), "cpu")
    assert result["status"] == "skipped" and "1000" in result["reason"]


def test_unused_slots_hold_nan_and_the_table_points_outside():
    for kv in check_kernels.KINDS:
        drawn = draw(replace(CASE, kv=kv), "cpu")
        held = torch.cat(drawn.slots)
        for cache in (drawn.k, drawn.v):
            wide = as_float64(cache)
            used = torch.zeros(len(wide), dtype=torch.bool)
            used[held] = True
            assert wide[used].isfinite().all() and wide[~used].isnan().all() and (~used).any()
        assert (drawn.page_starts >= FAR_OUTSIDE).any()


@pytest.mark.parametrize("quick", [True, False])
def test_kernels_come_first_and_what_reaches_far_comes_last_and_alone(quick):
    part = check_kernels.KernelChecks(Namespace(device="cuda", tiny=False, quick=quick))
    plan = part.plan()
    names = [case.name for case in plan]
    assert names[0] == KernelProblem().name and len(set(names)) == len(names) and part.workers >= 2
    assert len(names) == 4 + (check_kernels.QUICK_CASES if quick else len(check_kernels.all_cases()))
    far = [case for case in plan if "beyond 2^31" in case.name]
    assert far == plan[-2:] and [case.group for case in far] == [None, None]
    assert [case.group for case in plan[-5:-2]] == ["kernels", "moves", "moves"]


def test_a_check_of_the_plan_is_put_down_with_what_is_wrong(monkeypatch):
    part = check_kernels.KernelChecks(Namespace(device="cpu", tiny=True, quick=True))
    monkeypatch.setattr(check_kernels, "get_backend", lambda name: Faulty("writes a neighbour"))
    monkeypatch.setattr(check_moves, "KVMover", SkipsOneMove)
    for name in (part.plan()[0].name, "moves, paged", "moves, contiguous"):
        report = Report(600.0)
        part.run(name, report)
        assert [row["status"] for row in report.data["rows"]] == ["failed"]
        assert [failure["what"] for failure in report.data["failures"]] == [name]


def test_every_axis_is_in_the_full_set_and_the_quick_one_has_every_format():
    cases = check_kernels.all_cases()
    assert len(cases) == len(set(cases))
    assert {case.kv for case in cases[: check_kernels.QUICK_CASES]} == set(check_kernels.KINDS)
    assert {case.page_size for case in cases} >= {CONTIGUOUS, 1, 8, 16, 64, 256}
    assert {case.group for case in cases} >= {1, 7, 16}
    assert {case.dim for case in cases} >= {64, 256} and any(case.dim != case.v_dim for case in cases)
    assert {case.dtype for case in cases} == {torch.float16, torch.bfloat16, torch.float32}
