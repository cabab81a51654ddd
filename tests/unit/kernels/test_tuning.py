"""Tables of tuned tiles: what is found for which shape, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench_kernels import resources, triton_decode, triton_prefill
from kvbench_kernels.launch import KernelShape, Tiles, short_tiles
from kvbench_kernels.tuning import (
    FOLDER,
    Entry,
    TuningTable,
    bucket_of,
    choose_decode,
    choose_prefill,
    nearest,
    read_table,
    shared_bytes_floor,
    table_path,
    unusable,
    write_table,
)

SHAPE = ("auto", 4, 128, 128, 2)  # kind, group, head dims, bytes of a value of q
ENTRY = Entry("decode", "auto", 16, 128, 128, 2, 16, 16, 32, 4, 8, 90.5, 100.0)
TABLE = TuningTable(
    90, "Some GPU", 132, "1.2", "3.9.0", "2026-01-01", (ENTRY, replace(ENTRY, page_size=256, block_n=64))
)


def choose(folder, page_size=16, shape=SHAPE, arch=90, choice=choose_decode) -> Tiles:
    return choice(arch, *shape, page_size, folder=folder)


@pytest.fixture
def folder(tmp_path):
    write_table(TABLE, tmp_path)
    return tmp_path


def test_table_round_trip_with_a_line_an_entry(folder):
    assert read_table(90, folder) == TABLE
    lines = [line for line in table_path(90, folder).read_text().splitlines() if '"kernel"' in line]
    assert len(lines) == 2 and '"device": "Some GPU"' in table_path(90, folder).read_text()


def test_measured_shapes_get_their_tiles_and_others_the_computed_ones(folder, tmp_path):
    computed = tmp_path / "none"
    assert choose(folder) == Tiles(16, 32, 128, 128, 4, 8)
    assert choose(folder, 4) == choose(folder, 32) == choose(folder)  # the nearest page
    assert choose(folder, 64).block_n == 32  # as near to 16 as to 256
    assert choose(folder, 65).block_n == choose(folder, 1 << 30).block_n == 64
    for other in [
        ("fp8_e4m3", 4, 128, 128, 2), ("auto", 32, 128, 128, 2), ("auto", 4, 256, 128, 2), ("auto", 4, 128, 64, 2),
        ("auto", 4, 128, 128, 4),
    ]:  # fmt: skip
        assert choose(folder, shape=other) == choose(computed, shape=other)
    assert choose(folder, arch=89) == choose(computed, arch=89)
    assert choose(folder, choice=choose_prefill) == choose(computed, choice=choose_prefill)


def test_what_compiles_to_the_same_tile_shares_an_entry(folder):
    for group, dim in ((1, 80), (16, 128), (8, 96)):
        assert choose(folder, shape=("auto", group, dim, dim, 2)) == choose(folder)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5, unique=True), st.integers(1, 1 << 14))
def test_nearest_page_size_by_ratio(exponents, page_size):
    entries = [replace(ENTRY, page_size=1 << e) for e in exponents]
    found = nearest(entries, ENTRY.bucket, page_size)

    def ratio(entry):
        return max(entry.page_size / page_size, page_size / entry.page_size)

    assert ratio(found) == min(map(ratio, entries))
    assert nearest(entries, bucket_of("prefill", *SHAPE), page_size) is None


@pytest.mark.parametrize(
    ("tiles", "words"),
    [
        (Tiles(16, 48, 128, 128, 2, 4), "block_n 48"),
        (Tiles(16, 8, 128, 128, 2, 4), "block_n 8"),
        (Tiles(16, 32, 128, 128, 2, 3), "num_warps 3"),
        (Tiles(16, 32, 128, 128, 0, 4), "num_stages 0"),
        (Tiles(8, 32, 128, 128, 2, 4), "block_m 8"),
        (Tiles(32, 32, 128, 128, 2, 4), None),
        (Tiles(32, 128, 128, 128, 4, 4), "196608 bytes of shared memory, and a block of sm_80 has 166912"),
    ],
)
def test_tiles_that_cannot_run_are_refused_by_arithmetic(tiles, words):
    reason = unusable(tiles, 16, "auto", 2, 80)
    assert reason is None if words is None else words in reason


def test_chips_and_kv_kinds_have_their_own_limits():
    tiles = Tiles(16, 128, 128, 128, 4, 4)  # 3 tiles in flight, of 32,768 values each
    for kind, tile_bytes in (("auto", 65536), ("int8_per_token_head", 32768), ("int4_per_token_head", 16384)):
        assert shared_bytes_floor(tiles, kind, 2) == 3 * tile_bytes
    assert unusable(tiles, 16, "auto", 2, 90) is None
    deep = tiles._replace(num_stages=5)
    assert unusable(deep, 16, "int8_per_token_head", 2, 80) is None
    assert "sm_89" in unusable(deep, 16, "int8_per_token_head", 2, 89)
    assert unusable(deep, 16, "int4_per_token_head", 2, 89) is None


@pytest.mark.skipif(not resources.TABLE.exists(), reason="the table of compiled kernels is not beside the package")
def test_arithmetic_never_says_more_than_the_compiler():
    """The floor against compiled kernels: if it said more, tiles that run would be thrown away untried."""
    checked = 0
    for chip, kernels in resources.read_table()["kernels"].items():
        for variant in resources.variants(int(chip.removeprefix("sm_"))):
            if variant.name not in kernels or "BLOCK_N" not in variant.constants:
                continue
            c = variant.constants
            tiles = Tiles(c["BLOCK_M"], c["BLOCK_N"], c["D_PAD"], c["DV_PAD"], c["num_stages"], c["num_warps"])
            itemsize = 4 if variant.default == "fp32" else 2
            floor = shared_bytes_floor(tiles, c.get("KIND", "auto"), itemsize)
            assert floor <= kernels[variant.name]["shared_bytes"], f"{chip}, {variant.name}"
            checked += 1
    assert checked > 50


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: "{", "is not a table"),
        (lambda t: json.dumps(t | {"colour": 1}), "colour"),
        (lambda t: json.dumps({k: v for k, v in t.items() if k != "driver"}), "driver"),
        (lambda t: json.dumps(t | {"entries": [t["entries"][0] | {"block_n": 31}]}), "block_n 31"),
        (lambda t: json.dumps(t | {"entries": [t["entries"][0] | {"kernel": "dcode"}]}), "'dcode'"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_its_path(folder, change, words):
    path = table_path(90, folder)
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(ValueError, match=r"sm_90\.json") as refused:
        choose(folder)
    assert words in str(refused.value)


def test_what_is_shipped_was_measured():
    """A table names the machine that it was measured on; one that could not be read would stop every launch."""
    for path in FOLDER.glob("*.json"):
        table = read_table(int(path.stem.removeprefix("sm_")))
        assert table.entries and all([table.device, table.num_sms, table.driver, table.triton, table.date])


def test_short_chunks_never_take_the_tiles_of_a_table(monkeypatch):
    """Nothing has tried a tuned decode's tiles with more rows: they might not launch."""
    tiles = Tiles(16, 128, 128, 128, 4, 4)
    monkeypatch.setattr(triton_decode, "choose_decode", lambda *key: tiles)
    monkeypatch.setattr(triton_prefill, "choose_prefill", lambda *key: tiles._replace(block_m=32))
    shape = KernelShape(32, 8, 128, 128, 2, 19)  # a page size of no other test: constants are cached
    assert triton_decode.decode_constants(shape, False)["BLOCK_N"] == 128
    assert triton_prefill.prefill_constants(shape, 1, False)["BLOCK_M"] == 32
    short = triton_prefill.prefill_constants(shape, 1, True)
    expected = short_tiles(4, 128, 128, 2)
    assert (short["BLOCK_M"], short["BLOCK_N"], short["num_stages"]) == (32, expected.block_n, expected.num_stages)
    for constants in (triton_decode.decode_constants, triton_prefill.prefill_constants):
        constants.cache_clear()
