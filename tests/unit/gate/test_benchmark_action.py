"""github-action-benchmark's files: one a direction, in the form that the action reads."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.gate import results
from kvbench.gate.limits import sweep_benchmarks
from kvbench.gate.verdict.outputs import BIGGER, SMALLER, verdict_benchmarks, write_benchmarks
from kvbench.gate.verdict.verdict import FAIL, PASS, Verdict
from tests.support import verdicts

_RANGE = re.compile(r"(?P<prefix>(\+-|±)\s*)(?P<value>\d.*)")  # extractRangeInfo.js; the value must be a number


def check(path: Path) -> list[dict[str, Any]]:
    """The entries, each of the form that the action's extract.js takes; it refuses an empty list."""
    entries = json.loads(path.read_bytes())
    assert entries
    for entry in entries:
        assert {"name", "unit", "value"} <= set(entry) <= {"name", "unit", "value", "range", "extra"}
        assert isinstance(entry["value"], float) and isinstance(entry["name"], str) and entry["name"]
        if "range" in entry:
            match = _RANGE.search(entry["range"])
            assert match and float(match["value"]) > 0
    assert len({entry["name"] for entry in entries}) == len(entries)
    return entries


def test_candidate_values_go_to_the_file_of_their_direction(tmp_path: Path) -> None:
    written = write_benchmarks(verdict_benchmarks(verdicts.failed()), tmp_path)
    assert written == [tmp_path / BIGGER, tmp_path / SMALLER]
    bigger, smaller = (check(path) for path in written)
    assert {entry["unit"] for entry in bigger} == {"tokens/s"} and len(bigger) == 3
    assert {entry["unit"] for entry in smaller} == {"ms"} and len(smaller) == 5
    overall = next(entry for entry in smaller if entry["name"] == "overall/p95_itl_ms")
    assert overall["value"] == pytest.approx(22.02)
    assert overall["range"] == "± 0.18"  # 20 ms by (11.0 - 9.2) / 2 %
    assert overall["extra"].startswith("FAIL\n")
    assert write_benchmarks(verdict_benchmarks(verdicts.passed()), tmp_path) == [tmp_path / SMALLER]
    assert not (tmp_path / BIGGER).exists()  # a direction without values has no file


def test_what_is_no_timing_of_a_comparison_is_left_out() -> None:
    for name in ("counters", "invalid", "empty"):
        assert verdict_benchmarks(verdicts.EVERY[name]()) == []
    good, bad = verdicts.timing("a", PASS), verdicts.timing("b", FAIL, float("nan"))
    assert verdict_benchmarks(Verdict("limits", PASS, "s", (good,))) == []
    (entry,) = verdict_benchmarks(Verdict("compare", FAIL, "s", (bad, good)))
    assert entry.name == "a/p95_itl_ms"


def test_a_sweep_gives_its_valid_cells(tmp_path: Path) -> None:
    assert sweep_benchmarks(tmp_path / "summary.csv", "mixed") == []  # no table, nothing to chart
    rows = [
        {"cell_id": "p8-c8", "configuration": "paged", "valid": "True", "repeats": 3, "output_tokens_per_s": 221.5,
         "ttft_ms_p95": 4867.25, "itl_ms_p95": "", "output_tokens_per_s_min": 219.5, "output_tokens_per_s_max": 224.5,
         "output_tokens_per_s_window": "whole run"},
        {"cell_id": "p16-c8", "configuration": "paged", "valid": "False", "repeats": 3, "output_tokens_per_s": 1.0},
    ]  # fmt: skip
    with (tmp_path / "summary.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    write_benchmarks(sweep_benchmarks(tmp_path / "summary.csv", "mixed"), tmp_path)
    (throughput,), (ttft,) = check(tmp_path / BIGGER), check(tmp_path / SMALLER)
    assert throughput.pop("range") == "± 2.5"
    assert throughput.pop("extra") == "paged\n3 repeats; whole run"
    assert list(throughput.values()) == ["mixed/p8-c8/output_tokens_per_s", "tokens/s", 221.5]
    assert list(ttft.values()) == ["mixed/p8-c8/ttft_ms_p95", "ms", 4867.25, "paged\n3 repeats"]


def test_the_gate_of_a_stored_sweep_writes_its_charts(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text('limits: [{metric: output_throughput, min: 1, cells: "*"}]')
    sweep = Path("results/reference/vllm-cpu/sweep")
    assert (
        results.main(
            [str(sweep), "--policy", str(policy), "--output-dir", str(tmp_path / "out")], standalone_mode=False
        )
        == 0
    )
    with (sweep / "summary.csv").open(newline="") as file:
        valid = [row for row in csv.DictReader(file) if row["valid"] == "True"]
    for name, metrics in ((BIGGER, {"output_tokens_per_s"}), (SMALLER, {"ttft_ms_p95", "itl_ms_p95"})):
        entries = check(tmp_path / "out" / name)
        assert {entry["name"].split("/")[-1] for entry in entries} == metrics
        assert len(entries) == len(metrics) * len(valid) > 0
