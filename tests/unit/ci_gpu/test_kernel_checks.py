"""The checks find what is wrong: each fault is put into a backend that is right otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ci.gpu import check_kernels, check_moves
from ci.gpu.kernel_problems import CONTIGUOUS, Case, draw
from ci.gpu.part import PartReport
from engine.kv.mover import KVMover
from kernels import get_backend
from kernels.quantized import QuantizedKV
from kernels.reference import TorchBackend
from kernels.tune.problems import FAR_OUTSIDE, as_float64

CASE = Case(dtype=torch.float32, dim=16, v_dim=24, group=2, page_size=8, tiny=True)


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

    def prefill_attention(self, q, k, v, *args, out=None, **more):
        super().prefill_attention(q, k, v, *args, out=out, **more)
        if self.fault == "prefill: the last row of the longest sequence":
            last = int(args[1][1]) - 1  # the first sequence is the longest
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
    [*({"kv": kv, "page_size": size} for kv in check_kernels.KINDS for size in (8, CONTIGUOUS)), FULL],
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


def test_what_a_backend_refuses_is_skipped_with_its_reason():
    result = check_kernels.run_case(replace(CASE, dim=1000, v_dim=1000), "cpu")
    assert result["status"] == "skipped" and "1000" in result["reason"]


def test_after_a_cuda_error_a_process_says_so_and_checks_no_more(monkeypatch):
    def lost(name):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(check_kernels, "_poisoned", None)
    monkeypatch.setattr(check_kernels, "get_backend", lost)
    assert check_kernels.run_case(CASE, "cpu")["status"] == "failed"
    monkeypatch.setattr(check_kernels, "get_backend", get_backend)
    result = check_kernels.run_case(CASE, "cpu")
    assert result["status"] == "skipped" and CASE.name in result["reason"]


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


def test_cases_are_spread_over_processes(tmp_path):
    report = PartReport(tmp_path / "part.json", seconds=60)
    cases = [replace(CASE, page_size=size) for size in (8, 16, CONTIGUOUS)]
    check_kernels.run_cases(report, [*cases, replace(CASE, dim=1000)], "cpu", workers=2, reserve=0.0)
    assert sorted(row["status"] for row in report.data["rows"]) == ["passed"] * 3 + ["skipped"]
    assert not report.data["failures"] and len(report.data["skipped"]) == 1


def test_without_time_cases_are_skipped_not_failed(tmp_path):
    report = PartReport(tmp_path / "part.json", seconds=5)
    check_kernels.run_cases(report, [CASE], "cpu", workers=1, reserve=10.0)
    assert report.data["skipped"] == [{"what": "1 cases", "reason": "no time left"}] and not report.data["rows"]


def test_every_axis_is_in_the_full_set_and_the_quick_one_has_every_format():
    cases = check_kernels.all_cases()
    assert len(cases) == len(set(cases))
    assert {case.kv for case in cases[: check_kernels.QUICK_CASES]} == set(check_kernels.KINDS)
    assert {case.page_size for case in cases} >= {CONTIGUOUS, 1, 8, 16, 64, 256}
    assert {case.group for case in cases} >= {1, 7, 16}
    assert {case.dim for case in cases} >= {64, 256} and any(case.dim != case.v_dim for case in cases)
    assert {case.dtype for case in cases} == {torch.float16, torch.bfloat16, torch.float32}


class SkipsOneMove(KVMover):
    def move(self, moves):
        super().move(moves[:-1])


def test_a_move_that_is_not_done_is_found(monkeypatch):
    for layout in ("paged", "contiguous"):
        assert check_moves.moves_differ(layout, "cpu") is None
    monkeypatch.setattr(check_moves, "KVMover", SkipsOneMove)
    for layout in ("paged", "contiguous"):
        assert "differ" in check_moves.moves_differ(layout, "cpu")
