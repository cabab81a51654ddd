"""Which kernels are timed, the bytes they are said to move, and how figures are held against aims."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from ci.gpu import kernel_cases, tables, time_kernels
from ci.gpu.kernel_cases import CONTIGUOUS, AttentionHeads, Decode, Prefill
from ci.gpu.part import PartReport
from ci.gpu.time_kernels import KernelTimes
from kvbench_kernels.quantized import raw_tensors

LLAMA = AttentionHeads(32, 8, 128)


@pytest.mark.parametrize(
    ("kv", "expected"),
    [("auto", 4096), ("fp8_e4m3", 2048), ("int8_per_token_head", 2048 + 64), ("int4_per_token_head", 1024 + 64)],
)
def test_bytes_of_one_tokens_kv_count_codes_and_scales(kv, expected):
    """8 KV heads x 128 x (K, V); int8 and int4 with one float32 a head and side."""
    assert kernel_cases.row_bytes(kv, LLAMA, torch.bfloat16) == expected


@pytest.mark.parametrize("page_size", [1, 16, CONTIGUOUS])
@pytest.mark.parametrize("kv", ["auto", "fp8_e5m2", "int4_per_token_head"])
def test_a_decode_case_holds_what_it_says_it_reads(page_size, kv):
    heads = AttentionHeads(4, 2, 32)
    t = kernel_cases.make_decode(Decode(3, 40, page_size, kv), heads, torch.float32, "cpu")
    raw = sum(tensor.nbytes for cache in (t.k, t.v) for tensor in raw_tensors(cache))
    slots = t.k.shape[0]
    assert t.kv_bytes * slots == raw * 3 * 40  # the share of the slots that hold a token
    tokens = torch.arange(40)
    used = (t.page_starts[:, tokens // t.page_size] + tokens % t.page_size).flatten()
    assert len(set(used.tolist())) == 3 * 40 and int(used.max()) < slots and int(t.seq_lens.sum()) == 120


def test_a_skewed_case_has_pages_for_what_each_sequence_holds():
    case = Decode(4, 20, longest=100)
    t = kernel_cases.make_decode(case, AttentionHeads(4, 2, 32), torch.float32, "cpu")
    assert t.seq_lens.tolist() == case.lengths == [20, 20, 20, 100] and case.name.startswith("decode auto, 1 x 100 amo")
    used = [starts[: -(-n // 16)].tolist() for starts, n in zip(t.page_starts, case.lengths, strict=True)]
    pages = sorted(start for starts in used for start in starts)
    assert pages == list(range(0, 13 * 16, 16)) and len(t.k) == 13 * 16
    assert t.kv_bytes == 160 * 2 * 2 * 32 * 4


def test_cases_have_names_of_their_own_and_what_they_are_compared_with_comes_first():
    for quick in (True, False):
        cases = kernel_cases.decode_cases(quick)
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)
        for case in cases:
            assert case.against is None or case.against in names[: names.index(case.name)]
    quick, full = kernel_cases.decode_cases(True), kernel_cases.decode_cases(False)
    assert set(quick) < set(full)
    assert {(c.batch, c.context, c.bar) for c in quick} >= {(64, 4096, 0.85), (64, 8192, 0.90), (1, 32768, 0.75)}
    assert (64, 512, 32768) in {(c.batch, c.context, c.longest) for c in quick}
    assert {c.page_size for c in quick} == {CONTIGUOUS, 1, 8, 16, 32, 64, 128, 256}


@pytest.mark.parametrize(("case", "pairs"), [(Prefill(1, 4, 0), 10), (Prefill(2, 3, 5), 2 * (15 + 6))])
def test_prefill_counts_the_pairs_under_the_causal_mask(case, pairs):
    mask = torch.ones(case.new, case.context + case.new).tril(case.context)
    assert case.pairs == pairs == case.batch * int(mask.sum())


def rows_of(report: PartReport) -> dict[str, str]:
    return {row[0]: row[4] for row in report.data["tables"][0]["rows"]}


def test_aims_are_met_or_missed(tmp_path):
    report = PartReport(tmp_path / "part.json", seconds=60)
    plain = {"us": 10.0, "gb_per_s": 900.0}
    report.row(case="good", **plain, ratio=0.85, bar=0.85)
    report.row(case="slow", **plain, ratio=0.849, bar=0.85)
    report.row(case="fp8", **plain | {"us": 6.0}, ratio=0.9, bar=0.8, against="good", bar_time=0.58)
    report.row(case="page", **plain | {"us": 10.4}, ratio=None, against="good", bar_time=1.05)
    report.row(case="lost", **plain, ratio=0.9, against="one that failed", bar_time=1.05)
    report.row(case="swap", **plain, ratio=0.9, bar=None, bar_gb_per_s=45.0)
    report.row(case="prefill", us=5.0, tflop_per_s=300.0, ratio=0.4, of_torch_speed=0.7, bar_torch=0.8)
    tables.kernels(report, Namespace(device="cuda"))
    told = rows_of(report)
    assert report.data["missed"] == ["slow", "fp8", "prefill"]
    assert told["good"] == "ratio 0.85 meets ≥ 0.85" and told["slow"] == "ratio 0.849 MISSES ≥ 0.85"
    assert told["fp8"] == "ratio 0.9 meets ≥ 0.8; time_ratio 0.6 MISSES ≤ 0.58"
    assert told["lost"] == "" and "meets ≤ 1.05" in told["page"]
    assert "meets ≥ 45" in told["swap"] and "MISSES ≥ 0.8" in told["prefill"]
    tables.kernels(report, Namespace(device="cpu"))
    shown = "".join(rows_of(report).values())
    assert not report.data["missed"] and "meets" not in shown and "MISSES" not in shown


@pytest.fixture
def planned(monkeypatch):
    """(name, group) of what the part times."""
    monkeypatch.setattr(time_kernels, "get_backend", lambda name: None)
    return lambda **given: [(case.name, case.group) for case in KernelTimes(Namespace(facts=None, **given)).plan()]


def test_what_goes_beyond_a_quick_run_is_timed_last_and_in_another_process(planned):
    full, quick = (planned(device="cuda", tiny=False, quick=quick, own=[]) for quick in (False, True))
    assert full[: len(quick)] == quick and {group for _, group in quick} == {"main"}
    assert {group for _, group in full[len(quick) :]} == {"extreme"} and len(set(full)) == len(full)
    cases = (*kernel_cases.decode_cases(False), *kernel_cases.prefill_cases(False))
    assert {name for name, _ in full} >= {case.name for case in cases}


@pytest.mark.parametrize("tiny", [False, True])
def test_long_decodes_are_timed_alone(planned, tiny):
    long = planned(device="cpu" if tiny else "cuda", tiny=tiny, quick=False, own=["--decode-from", "32768"])
    cases = kernel_cases.tiny_decode_cases() if tiny else [
        Decode(1, 32768), Decode(64, 512, longest=32768), Decode(8, 32768), Decode(1, 131072),
        Decode(1, 32768, kv="fp8_e4m3"),
    ]  # fmt: skip
    assert sorted(name for name, _ in long) == sorted(case.name for case in cases)
