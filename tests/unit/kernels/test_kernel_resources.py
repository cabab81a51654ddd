"""The gate on registers, spills and shared memory of every kernel variant, compiled for chips that are not here."""

from __future__ import annotations

import os
from dataclasses import asdict, replace

import pytest
import triton
import triton.language as tl

from kvbench_kernels import resources, triton_common
from kvbench_kernels.compile_ahead import Resources, compile_for, read_resources
from kvbench_kernels.launch import shared_bytes_limit

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler"
)


def test_the_table_is_of_these_kernels():
    """All variants take minutes to compile: that is done when a kernel changes, and not in every run of the tests."""
    assert resources.read_table()["sources"] == resources.sources_hash(), f"kernels changed: {resources.COMMAND}"


@pytest.mark.full
def test_one_variant_of_each_kernel_compiled_now_takes_no_more_than_its_chip_has_and_the_table_says(monkeypatch):
    monkeypatch.setattr(resources, "in_processes", lambda read, variants: (read(*variant) for variant in variants))
    measured = resources.measure(resources.one_of_each_kernel())
    assert sum(map(len, measured.values())) == len(resources.one_of_each_kernel())
    table = resources.read_table()
    listed = {chip: {name: Resources(**row) for name, row in rows.items()} for chip, rows in table["kernels"].items()}
    problems = resources.beyond_limits(measured) + resources.beyond_limits(listed) + resources.compare(table, measured)
    assert not problems, "\n".join(problems)


def test_table_lists_every_variant_and_no_other():
    assert not (problems := resources.unlisted(resources.read_table(), resources.all_variants())), "\n".join(problems)


def test_the_hash_changes_with_a_kernel_and_with_a_constant(monkeypatch):
    before = resources.sources_hash()
    assert before == resources.sources_hash()
    with monkeypatch.context() as patch:
        patch.setattr(triton_common.columns, "raw_src", [*triton_common.columns.raw_src, "# more"])
        assert resources.sources_hash() != before
    arch, name = resources.all_variants()[0]
    variants = resources._variants_of(arch)
    monkeypatch.setitem(variants, name, replace(variants[name], constants={**variants[name].constants, "num_warps": 3}))
    assert resources.sources_hash() != before


SMALL = Resources(registers=40, spills=0, stack_bytes=0, shared_bytes=1024)
MEASURED = {"sm_80": {"a": SMALL, "b": SMALL}, "sm_90": {"a": SMALL}}


def table_of(measured) -> dict:
    return {"triton": "1.0", "kernels": {c: {n: asdict(r) for n, r in ks.items()} for c, ks in measured.items()}}


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (SMALL, None),
        (Resources(8, 0, 0, 0), None),
        (replace(SMALL, registers=48), None),  # within what is given out at once
        (replace(SMALL, registers=49), "registers 40 -> 49"),
        (replace(SMALL, spills=1), "spills 0 -> 1"),
        (replace(SMALL, stack_bytes=16), "stack_bytes 0 -> 16"),
        (replace(SMALL, shared_bytes=1025), "shared_bytes 1024 -> 1025"),
    ],
)
def test_what_grows_is_named_with_the_command(now, words):
    problems = resources.worse_than(table_of(MEASURED), MEASURED | {"sm_80": {"a": SMALL, "b": now}})
    assert len(problems) == (words is not None)
    for problem in problems:
        assert problem.startswith("sm_80, b: ") and words in problem and resources.COMMAND in problem


def test_another_compiler_may_take_more_but_not_begin_to_spill():
    spilling = replace(SMALL, spills=3)
    table = table_of(MEASURED | {"sm_90": {"a": spilling}})
    assert table["triton"] != triton.__version__
    more = replace(SMALL, registers=200, shared_bytes=9000)
    assert not resources.compare(table, {"sm_80": {"a": more, "b": SMALL}, "sm_90": {"a": replace(SMALL, spills=9)}})
    (problem,) = resources.compare(table, {"sm_80": {"a": more, "b": spilling}, "sm_90": {"a": spilling}})
    assert problem.startswith("sm_80, b: spills 0 -> 3") and resources.COMMAND in problem
    same = table | {"triton": triton.__version__}
    assert len(resources.compare(same, {"sm_80": {"a": more}})) == 2, "registers and shared memory"


def test_missing_and_surplus_variants_name_the_command():
    table = table_of(MEASURED)
    now = [(80, "a"), (80, "b"), (90, "c")]
    assert not resources.unlisted(table, [(80, "a"), (80, "b"), (90, "a")])
    surplus, missing = sorted(resources.unlisted(table, now))
    assert surplus == f"sm_90, a: in the table only: {resources.COMMAND}"
    assert missing == f"sm_90, c: in the kernels only: {resources.COMMAND}"
    assert not resources.worse_than(table, {"sm_80": MEASURED["sm_80"], "sm_90": {"c": SMALL}})


@pytest.mark.parametrize(
    ("chip", "kib"), [("sm_80", 163), ("sm_86", 99), ("sm_89", 99), ("sm_90", 227), ("sm_100", 227)]
)
def test_shared_memory_of_a_block(chip, kib):
    assert shared_bytes_limit(int(chip[3:])) == kib * 1024
    fits, over = replace(SMALL, shared_bytes=kib * 1024), replace(SMALL, shared_bytes=kib * 1024 + 1)
    assert not resources.beyond_limits({chip: {"a": fits}})
    (problem,) = resources.beyond_limits({chip: {"a": over}})
    assert problem.startswith(f"{chip}, a: {kib * 1024 + 1} bytes") and str(kib * 1024) in problem


def test_table_survives_writing(tmp_path):
    path = tmp_path / "ci" / "table.json"
    resources.write_table(MEASURED, path)
    table = resources.read_table(path)
    kernels = table_of(MEASURED)["kernels"]
    assert table == {"triton": triton.__version__, "sources": resources.sources_hash(), "kernels": kernels}
    assert sum('"registers": 40' in line for line in path.read_text().splitlines()) == 3
    with pytest.raises(ValueError, match=resources.COMMAND):
        resources.read_table(tmp_path / "none.json")


@triton.jit
def many_values_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.debug_barrier()  # all of x is held by then
    tl.store(out_ptr + N - 1 - i, x)


def test_spills_and_registers_are_read_from_the_machine_code():
    """A kernel that keeps 512 values a thread cannot have them all in 255 registers; with 16 it can."""
    types = {"x_ptr": "fp32", "out_ptr": "fp32"}
    large, small = (
        read_resources(compile_for(many_values_kernel, {"N": 32 * each, "num_warps": 1}, 90, types))
        for each in (512, 16)
    )
    assert large.spills > 512 and large.stack_bytes > 1024  # half of the values and more
    assert small.spills == 0 and small.stack_bytes == 0 and 16 <= small.registers < 80
