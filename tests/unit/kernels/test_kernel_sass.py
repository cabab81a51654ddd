"""The gate on main loops: its arithmetic, how it reads listings, and a few variants compiled now."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import triton

from kvbench_kernels import resources, sass
from kvbench_kernels.compile_ahead import Resources
from kvbench_kernels.variants import COMMON, VariantOptions, decode, prefill

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler"
)
SAMPLE = [
    f"decode, {kind}, D 128, group 4, split" for kind in ("fp8_e4m3", "int8_per_token_head", "int4_per_token_head")
]
TAKEN = Resources(registers=122, spills=0, stack_bytes=0, shared_bytes=38912)


def listing(*blocks: list[str]) -> str:
    """Machine code as cuobjdump prints it: each block is a loop."""
    lines, at = [], 0x100
    for block in blocks:
        first = at
        for text in [*block, f"@!P0 BRA 0x{first:x}"]:
            lines.append(f"        /*{at:04x}*/                   {text} ;   /* 0x0000000000000918 */")
            at += 16
    return "\n".join(lines)


SEARCH = ["IADD3 R1, R1, 0x1, RZ"] * 20
WHOLE = ["@!P1 LDGSTS.E.BYPASS.128 [R4], desc[UR4][R2.64]"] * 4 + ["HMMA.16816.F32.BF16 R8, R4, R8, R8"] * 60
MASKED = ["LDG.E.128 R4, desc[UR4][R2.64]"] * 80


def test_the_table_is_of_these_kernels_under_both_compilers():
    problems = sass.out_of_date(sass.read_table())
    assert not problems, "\n".join(problems)


def test_no_row_is_bound_by_instructions_and_all_variants_have_one():
    for version, rows in sass.read_table().items():
        loops = {name: sass.Loop(**row) for name, row in rows["loops"].items()}
        assert not (problems := sass.slow_loops(loops)), f"Triton {version}: " + "\n".join(problems)
        assert list(loops) == sass.loop_variants()


@pytest.mark.full
def test_a_few_loops_compiled_now_are_as_the_table_says():
    loops = sass.measure(SAMPLE)
    rows = sass.read_table().get(triton.__version__, {}).get("loops", {})
    assert not (problems := sass.slow_loops(loops) + sass.worse_than(rows, loops)), "\n".join(problems)
    assert all(loop.mma == "HMMA" and loop.cp_async_16 >= 4 for loop in loops.values())


@pytest.mark.parametrize(
    ("tile_bytes", "instructions", "memory", "issue"),
    [(32768, 431, 2386, 690), (16384, 899, 1193, 1438), (20480, 1038, 1491, 1661), (12288, 1566, 895, 2506)],
)
def test_cycles_of_the_loops_before_words_were_read(tile_bytes, instructions, memory, issue):
    """bf16, fp8, int8 and int4 with a tile of 64 tokens, 4 warps, and a sector of 32 bytes for each scale."""
    assert round(sass.memory_cycles(tile_bytes)) == memory
    assert round(sass.issue_cycles(instructions, 4)) == issue


@pytest.mark.parametrize(
    ("kind", "of_a_token"),
    [("bf16", 512), ("fp32", 1024), ("fp8_e5m2", 256), ("int8_per_token_head", 264), ("int4_per_token_head", 136)],
)
def test_bytes_of_a_tile(kind, of_a_token):
    variant = decode(90, kind, COMMON, VariantOptions())
    assert sass.tile_bytes(variant) == of_a_token * variant.constants["BLOCK_N"]


@pytest.mark.parametrize(
    ("taken", "warps", "blocks"),
    [
        (TAKEN, 4, 4),  # 128 registers x 128 threads: four times in 65536
        (replace(TAKEN, registers=129), 4, 3),
        (replace(TAKEN, registers=32, shared_bytes=56 * 1024), 4, 4),  # 57 KiB each of 228
        (replace(TAKEN, registers=32, shared_bytes=0), 4, 16),  # 64 warps
        (replace(TAKEN, registers=16, shared_bytes=0), 1, 32),
    ],
)
def test_blocks_that_fit_a_multiprocessor(taken, warps, blocks):
    assert sass.resident_blocks(taken, warps) == blocks


def test_the_main_loop_is_the_one_that_copies_ahead():
    assert len(sass.main_loop(listing(SEARCH, WHOLE, MASKED))) == len(WHOLE) + 1
    assert len(sass.main_loop(listing(SEARCH, MASKED, WHOLE))) == len(WHOLE) + 1
    assert len(sass.main_loop(listing(SEARCH, MASKED))) == len(MASKED) + 1, "none copies: the first of some length"
    with pytest.raises(ValueError, match="no loop"):
        sass.main_loop(listing(SEARCH))


def test_a_loop_that_unpacks_bytes_one_by_one_is_named():
    """As it was when Triton moved the conversion of layouts above that of the codes."""
    variant = decode(90, "fp8_e4m3", COMMON, VariantOptions())
    body = WHOLE + ["LDS.U8 R1, [R2]"] * 64 + ["F2F.BF16.F32 R1, R2"] * 128 + ["IMAD R1, R2, R3, R4"] * 642
    loop = sass.describe(variant, listing(SEARCH, body), TAKEN)
    assert (loop.instructions, loop.lds_u8, loop.f2f, loop.cp_async_16, loop.mma) == (899, 64, 128, 4, "HMMA")
    assert (loop.memory_cycles, loop.issue_cycles, loop.warps) == (1193, 1438, 16)
    assert loop.bandwidth_share == pytest.approx(0.92 * 1193 / 1438, abs=1e-3)
    one_by_one, bound = sass.slow_loops({variant.name: loop})
    assert "64 LDS.U8 and 128 F2F" in one_by_one
    assert "1438 issue cycles" in bound and "1193" in bound
    assert sass.describe(prefill(90, "bf16", COMMON, VariantOptions()), listing(WHOLE), TAKEN).bandwidth_share is None


def test_few_loads_in_flight_limit_the_bandwidth():
    variant = decode(80, "bf16", COMMON, VariantOptions())  # its tiles are computed ones
    stages = {**variant.constants, "num_stages": 2, "BLOCK_N": 16}
    one_block = replace(TAKEN, shared_bytes=200 * 1024)
    loop = sass.describe(replace(variant, constants=stages), listing(WHOLE), one_block)
    in_flight, needed = 16 * 512, sass.LATENCY_S * sass.HBM_BYTES_PER_S * 0.92 / sass.SMS
    assert loop.warps == 4 and loop.bandwidth_share == pytest.approx(0.92 * in_flight / needed, abs=1e-3)


LOOP = sass.Loop(300, 0, 0, 8, "HMMA", 16, 1193, 480, 0.92)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (LOOP, None),
        (replace(LOOP, instructions=309, warps=20, cp_async_16=16), None),
        (replace(LOOP, instructions=310), "instructions 300 -> 310"),
        (replace(LOOP, lds_u8=1), "lds_u8 0 -> 1"),
        (replace(LOOP, f2f=2), "f2f 0 -> 2"),
        (replace(LOOP, cp_async_16=4), "cp_async_16 8 -> 4"),
        (replace(LOOP, warps=12), "warps 16 -> 12"),
        (replace(LOOP, mma="none"), "mma HMMA -> none"),
    ],
)
def test_what_gets_worse_is_named_with_the_command(tmp_path, now, words):
    sass.write_table({"a": LOOP}, tmp_path / "table.json")
    rows = sass.read_table(tmp_path / "table.json")[triton.__version__]["loops"]
    problems = sass.worse_than(rows, {"a": now, "new": now})
    assert len(problems) == (words is not None)
    assert all(words in problem and sass.COMMAND in problem for problem in problems)


def test_writing_keeps_the_rows_of_the_other_compiler_only(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    for version in (*sass.COMPILERS, "1.0"):
        monkeypatch.setattr(triton, "__version__", version)
        sass.write_table({"a": LOOP}, path)
    assert set(json.loads(path.read_text())) == {*sass.COMPILERS, "1.0"}
    monkeypatch.setattr(triton, "__version__", sass.COMPILERS[1])
    sass.write_table({"a": LOOP}, path)
    table = json.loads(path.read_text())
    assert set(table) == set(sass.COMPILERS) and not sass.out_of_date(table)
    table[sass.COMPILERS[0]]["sources"] = "of other kernels"
    (problem,) = sass.out_of_date(table)
    assert sass.COMPILERS[0] in problem and sass.COMMAND in problem


def test_another_kernel_changes_the_hash(monkeypatch):
    before = sass.sources_hash()
    monkeypatch.setattr(resources, "sources_hash", lambda: "another")
    assert sass.sources_hash() != before
