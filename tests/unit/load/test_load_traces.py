"""The Azure trace reader, on a small file with the format's quirks and on the real slices where they are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from kvbench.load.prompts import build_requests
from kvbench.load.schema import LoadConfig
from kvbench.load.traces import Trace, read_azure, select

ROOT = Path(__file__).resolve().parents[3]
TRACES = Path(os.environ.get("KVBENCH_TRACES", ROOT.parent / "shared" / "traces"))
SLICES = ("azure2023/azure2023_conv_300s-900s.csv", "azure2023/azure2023_code_300s-900s.csv")

QUIRKS = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:20:46.8440170,1000,500\n"
    "2023-11-16 18:20:46.8440179+00:00,20,4\n"
    "2023-11-16 18:20:48.3440170,300,8\n"
    "2023-11-16 18:20:56,7,1"  # no decimals, and no newline at the end
)


@pytest.fixture
def quirky(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(QUIRKS)
    return path


def replay(path: Path, **prompts: object) -> LoadConfig:
    return LoadConfig.model_validate(
        {"mode": "open", "arrivals": "trace", "prompts": {"kind": "trace", "path": str(path)} | prompts}
    )


def test_reads_seven_decimals_zones_and_a_last_line_without_newline(quirky: Path) -> None:
    trace = read_azure(quirky)
    assert trace.arrival_s == pytest.approx([0, 9e-7, 1.5, 9.155983], abs=1e-9)
    assert trace.prompt_tokens.tolist() == [1000, 20, 300, 7]
    assert trace.output_tokens.tolist() == [500, 4, 8, 1]


def test_selection_is_rebased_and_rescaled(quirky: Path) -> None:
    part = select(read_azure(quirky), start_s=1.0, duration_s=9.0, rate_scale=2.0)
    assert part.arrival_s == pytest.approx([0, 3.8279915])
    assert part.prompt_tokens.tolist() == [300, 7]
    assert len(select(read_azure(quirky), max_requests=2)) == 2
    with pytest.raises(ValueError, match=r"spans 0 to 9\.2 s"):
        select(read_azure(quirky), start_s=100)


def test_replayed_lengths_fit_and_the_scale_is_told(quirky: Path) -> None:
    requests = build_requests(replay(quirky), vocab_size=500, max_model_len=300, seed=0)
    assert requests.notes["length_scale"] == pytest.approx(0.2)
    assert [len(r.prompt_token_ids) for r in requests] == [200, 4, 60, 1]
    assert [r.max_tokens for r in requests] == [100, 1, 1, 1]
    assert [r.arrival_s for r in requests] == pytest.approx([0, 9e-7, 1.5, 9.155983], abs=1e-9)


def test_a_model_that_is_large_enough_gets_the_lengths_unscaled(quirky: Path) -> None:
    requests = build_requests(replay(quirky), vocab_size=500, max_model_len=4096, seed=0)
    assert requests.notes["length_scale"] == 1.0
    assert [len(r.prompt_token_ids) for r in requests] == [1000, 20, 300, 7]


def test_missing_or_foreign_files_say_where_the_trace_is_had(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"AzurePublicDataset.*-o load.prompts.path=PATH"):
        read_azure(tmp_path / "none.csv")
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no column TIMESTAMP"):
        read_azure(other)
    other.write_text(QUIRKS.replace("300,8", "three hundred,8"))
    with pytest.raises(ValueError, match="line 4 cannot be read"):
        read_azure(other)
    other.write_text("")
    with pytest.raises(ValueError, match="not a CSV file"):
        read_azure(other)


def statistics(trace: Trace) -> dict:
    """The figures of expected_stats.json, computed anew."""

    def spread(values: np.ndarray) -> dict:
        p50, p90, p99 = np.percentile(values, [50, 90, 99])
        return {"p50": p50, "p90": p90, "p99": p99, "max": values.max(), "mean": values.mean(), "min": values.min()}

    gaps = np.diff(trace.arrival_s)
    return {
        "prompt": spread(trace.prompt_tokens),
        "output": spread(trace.output_tokens),
        "arrivals": {"span_s": trace.arrival_s[-1], "rate": len(gaps) / gaps.sum(), "cv": gaps.std() / gaps.mean()},
    }


@pytest.mark.parametrize("name", SLICES)
def test_statistics_of_the_public_slices(name: str) -> None:
    if not (TRACES / name).is_file():
        pytest.skip(f"no trace slices in {TRACES}; set KVBENCH_TRACES to their folder")
    wanted = json.loads((TRACES / "expected_stats.json").read_text())[name]
    trace = read_azure(TRACES / name)
    got = statistics(trace)
    assert len(trace) == wanted["n"]
    assert int(trace.prompt_tokens.sum()) == wanted["prompt_tokens_total"]
    assert int(trace.output_tokens.sum()) == wanted["output_tokens_total"]
    for part in ("prompt", "output"):
        assert got[part] == pytest.approx(wanted[part], abs=0.06)
    for figure, value in got["arrivals"].items():
        assert value == pytest.approx(wanted["arrivals"][figure], rel=2e-3, abs=6e-3), figure
