"""The table of benchmarks: from pytest-benchmark's JSON to Markdown and bars."""

import json
import math

import pytest

from kvbench.common.errors import UsageError
from tests.benchmarks.bench_bars import BARS, Bar, missed, swap_gb_per_s
from tests.benchmarks.bench_run import bar_lines, read_rows, to_markdown, write_table
from tests.benchmarks.bench_run import main as run_benchmarks

MANIFEST = {
    "started": "2026-01-01T00:00:00+00:00",
    "mode": "full",
    "git": {"short_sha": "1a2b3c4", "dirty": True},
    "cpu": {"model": "Some CPU", "cores": 2},
}


def entry(test, params, figures, *, file="kernels", group="decode", min_s=0.002, device="cpu", disturbed=False):
    """One benchmark as pytest-benchmark writes it."""
    name = test + (f"[{'-'.join(map(str, params.values()))}]" if params else "")
    return {
        "group": group,
        "name": name,
        "fullname": f"tests/benchmarks/test_{file}.py::{name}",
        "params": params or None,
        "extra_info": {**figures, "device": device, "foreign_cpu_cores": 0.02, "disturbed": disturbed},
        "stats": {"min": min_s, "median": 1.5 * min_s, "rounds": 7},
    }


def decode(page_size, ratio, **more):
    params = {"batch": 8, "context": 4096, "kv": "float32", "page_size": page_size}
    return entry("test_decode", params, {"ratio": ratio, "vs_gather_sdpa": 6.0}, **more)


@pytest.fixture
def read(tmp_path):
    def of(*entries):
        path = tmp_path / "bench.json"
        path.write_text(json.dumps({"benchmarks": list(entries)}))
        return read_rows(path)

    return of


def table_after(text, heading):
    """Cells of the first table after a heading, header first."""
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


def test_a_group_is_a_table_whose_columns_vary_and_whose_constants_stand_above_it(read):
    text = to_markdown(read(decode(16, 0.6), decode(0, 0.7, min_s=0.0005), decode(1, 0.25, min_s=3.0)), MANIFEST, ())
    assert table_after(text, "decode") == [
        ["page_size", "fastest", "median", "ratio", "vs_gather_sdpa"],
        ["16", "2 ms", "3 ms", "0.6", "6"],
        ["contiguous", "500 us", "750 us", "0.7", "6"],
        ["1", "3 s", "4.5 s", "0.25", "6"],
    ]
    assert "tests/benchmarks/test_kernels.py; batch 8, context 4096, kv float32\n" in text
    assert "commit 1a2b3c4 with local changes, mode full, 3 benchmarks; device cpu, Some CPU, 2 cores" in text
    assert "disturbed" not in text and "## Bars" not in text


def test_two_tests_of_one_group_are_named_and_disturbed_rows_are_marked(read):
    rows = read(entry("test_a", {"n": 0}, {"x": 1}), entry("test_b", {}, {"y": 2}, disturbed=True))
    text = to_markdown(rows, MANIFEST, ())
    assert table_after(text, "decode") == [
        ["test", "n", "fastest", "median", "x", "y"],
        ["test_a", "0", "2 ms", "3 ms", "1", ""],
        ["test_b", "", "2 ms!", "3 ms", "", "2"],
    ]
    assert "**1 of 2 benchmarks were disturbed**" in text


@pytest.mark.parametrize(
    ("ratios", "at_most", "shown", "verdict"),
    [
        ((0.6, 0.5), False, "0.5 to 0.6", "reached"),
        ((0.6, 0.499), False, "0.499 to 0.6", "MISSED"),
        ((0.5,), True, "0.5", "reached"),
        ((0.6, 0.4), True, "0.6 to 0.4", "MISSED"),
    ],
)
def test_the_worst_row_counts_for_a_bar(read, ratios, at_most, shown, verdict):
    bar = Bar("share", "cpu", "test_decode", {"page_size": lambda p: p >= 16}, "ratio", 0.5, at_most)
    rows = read(*(decode(16, ratio) for ratio in ratios), decode(1, 0.1 if not at_most else 9.9))
    assert bar_lines(rows, [bar]) == [["share", "<= 0.5" if at_most else ">= 0.5", shown, verdict]]


def test_a_bar_without_rows_is_not_measured_and_one_of_another_device_is_not_shown(read):
    bars = [
        Bar("elsewhere", "cuda", "test_decode", {}, "ratio", 0.5),
        Bar("no such figure", "cpu", "test_decode", {}, "speed", 1),
        Bar("no such parameter", "cpu", "test_decode", {"sequences": 1}, "ratio", 1),
    ]
    assert [line[::3] for line in bar_lines(read(decode(16, 0.6)), bars)] == [
        ["no such figure", "not measured"],
        ["no such parameter", "not measured"],
    ]
    assert bar_lines(read(decode(16, 0.6, device="Some GPU")), bars) == [["elsewhere", ">= 0.5", "0.6", "reached"]]


GOOD = {"lag_p99_ms": 0.7, "itl_error_p99_ms": 0.5, "cpu_us_per_event": 30.0, "coalesced_pct": 0.1}


def missed_by_client(streams=64, processes=1, device="cpu", **changed):
    return missed("test_load_client", {"streams": streams, "processes": processes}, GOOD | changed, device)


@pytest.mark.parametrize("shape", [(64, 1), (256, 4)])
def test_the_load_client_fails_over_its_bars_and_at_them_it_does_not(shape):
    assert missed_by_client(*shape) == []
    for figure, limit in GOOD.items():
        for value in (limit * 1.01, math.nan):
            (sentence,) = missed_by_client(*shape, **{figure: value})
            assert sentence.startswith(f"load client, {shape[0]} streams") and sentence.endswith(f"wanted <= {limit:g}")
    assert len(missed("test_load_client", {"streams": 64, "processes": 1}, {})) == len(GOOD)  # all missing
    assert missed_by_client(256, 1, lag_p99_ms=9.0) == missed_by_client(device="NVIDIA H100", lag_p99_ms=9.0) == []


def test_swaps_of_large_and_of_small_pages_have_bars_of_their_own(read):
    def swap(page_size, speed):
        params = {"kind": "swap_in", "kv": "bfloat16", "page_size": page_size}
        return entry("test_move", params, {"moved_gb_per_s": speed}, device="Some GPU")

    rows = read(swap(256, 44.0), swap(64, 46.0), swap(16, 31.0), swap(1, 29.0), swap(0, 1.0))
    lines = {title: rest for title, *rest in bar_lines(rows, BARS) if "swap" in title}
    assert lines == {
        "swap, pages of 2 MiB and more: GB/s": [">= 45", "44 to 46", "MISSED"],
        "swap, pages of 16 KiB to 2 MiB: GB/s": [">= 30", "29 to 31", "MISSED"],
    }
    assert [swap_gb_per_s(kib << 10) for kib in (8, 16, 2047, 2048)] == [None, 30.0, 30.0, 45.0]


def test_files_are_written_and_what_is_no_benchmark_is_refused(tmp_path):
    with pytest.raises(UsageError, match="there is no"):
        write_table(tmp_path, MANIFEST)
    (tmp_path / "bench.json").write_text('{"benchmarks": [{"name": "x"}]}')
    with pytest.raises(UsageError, match="not a JSON file of pytest-benchmark"):
        write_table(tmp_path, MANIFEST)
    (tmp_path / "bench.json").write_text(json.dumps({"benchmarks": [decode(16, 0.6)]}))
    assert [row.params["page_size"] for row in write_table(tmp_path, MANIFEST)] == [16]
    assert "| 16 |" not in (tmp_path / "table.md").read_text()  # alone, so it stands above the table
    assert "page_size 16" in (tmp_path / "table.md").read_text()


def test_an_unknown_mode_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBENCH_BENCH", "foo")
    with pytest.raises(UsageError, match="KVBENCH_BENCH cannot be 'foo': it is one of full, quick, smoke"):
        run_benchmarks([], tmp_path)
    assert not list(tmp_path.iterdir())
