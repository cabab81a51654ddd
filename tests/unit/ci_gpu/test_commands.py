"""The parts that run kvbench commands: their time limit, what they keep of the results, and how they fail."""

from __future__ import annotations

import itertools
import json
import sys

import pandas as pd
import pytest

from ci.gpu import commands, sharpness
from kvbench.cli.main import cli

ENDS, ASKED, KILLED = "exit 3", "trap 'exit 130' INT; sleep 60 & wait", "trap '' INT; sleep 60"


@pytest.mark.parametrize(
    ("script", "seconds", "grace_s", "expected"),
    [(ENDS, 30, 30, (3, False)), (ASKED, 1, 30, (130, True)), (KILLED, 1, 0.5, (-9, True))],
)
def test_a_command_is_interrupted_as_by_ctrl_c_when_its_time_is_over(
    script, seconds, grace_s, expected, tmp_path, monkeypatch
):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(commands.sys, "executable", str(python))
    monkeypatch.setattr(commands, "END_GRACE_S", grace_s)
    assert commands.run_kvbench([], seconds) == expected


FIGURES = {
    "mean": 0.002, "mean_low": 0.001, "mean_high": 0.003, "perplexity_change": 0.0125,
    "greedy": {"agree": 8, "answers": 9}, "passkey": {"right": 6, "asked": 7},
}  # fmt: skip
QUALITY = {
    "model": "kvbench-tiny", "facts": {"device": "cuda"}, "control": FIGURES,
    "configurations": {"int4": FIGURES | {"full_pool": {"agree": 4, "answers": 5}, "outside": ["its p99 is off"]}},
}  # fmt: skip
CLAIMS = {"claims": [{"name": "paging-cost", "verdict": "undecided", "evidence": "+4 %", "reason": "too wide"}]}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a part's ``main`` with words of its own: its exit code and its JSON."""

    def of(module, *words, seconds="100"):
        out = tmp_path / "part.json"
        argv = ["part", *words, "--out", str(out), "--device", "cuda", "--seconds", seconds, "--scratch", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", argv)
        return module.main(), json.loads(out.read_text()) if out.exists() else {}

    return of


@pytest.mark.parametrize(
    ("command", "ending", "result", "outcome"),
    [
        ("quality", (0, False), QUALITY, (0, 2, 0)), ("quality", (2, False), None, (1, 0, 0)),
        ("quality", (130, True), None, (0, 0, 1)), ("quality", (0, False), None, (1, 0, 0)),
        ("claims", (3, False), CLAIMS, (0, 1, 0)), ("claims", (4, False), CLAIMS, (1, 1, 0)),
        ("claims", (130, True), CLAIMS, (0, 1, 1)),
    ],
)  # fmt: skip
def test_rows_come_from_the_result_whatever_became_of_the_command(run, monkeypatch, command, ending, result, outcome):
    def kvbench(words, seconds):
        assert seconds < 100 and cli.commands[words[0]].make_context(words[0], words[1:])  # options that it knows
        where = dict(itertools.pairwise(words))
        if result is not None and command == "quality":
            (commands.Path(where["--output"])).write_text(json.dumps(result))
        elif result is not None:
            folder = commands.Path(where["--output-dir"]) / "claims" / "now"
            folder.mkdir(parents=True)
            (folder / "claims.json").write_text(json.dumps(result))
        return ending

    monkeypatch.setattr(commands, "run_kvbench", kvbench)
    code, data = run(commands, command)
    assert (code, len(data["rows"]), "not_run" in data) == outcome and len(data["failures"]) == code
    if result is QUALITY:
        assert [row["configuration"] for row in data["rows"]] == ["control (A/A)", "int4"]
        assert data["tables"][0]["rows"][1] == [
            "int4", "0.002 (0.001 to 0.003)", "+1.25%", "8 of 9", "6 of 7", "4 of 5", "its p99 is off"
        ]  # fmt: skip
        assert data["headline"] == "1 configurations, 1 outside the limits"
    elif result is CLAIMS:
        assert data["tables"][0]["rows"] == [["paging-cost", "undecided", "+4 %", "too wide"]]


PAIRS = "pair,cell,first,metric,unit,base,candidate,log_ratio\n"


def run_sharpness(run, monkeypatch, method, count):
    """Code and JSON of the part where ``calibrate`` leaves ``count`` pairs, and the seconds that it was given."""
    given = []

    def measure(out, asked, number, minutes, words, limit_s):
        given.append(minutes * 60)
        (out / "log.txt").write_text("what calibrate said")
        if count == 0:
            raise SystemExit("round 1 of launched left no pairs")
        folder = out / f"{asked}-1" / "compare" / "x"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").write_text(json.dumps({"seconds": [20.0] * count}))
        rows = [f"{n},a,base,output_throughput,tokens/s,{100 + n % 2},200,0.0{n}" for n in range(1, count + 1)]
        (folder / "pairs.csv").write_text(PAIRS + "\n".join(rows))

    monkeypatch.setattr(sharpness, "measure", measure)
    code, data = run(sharpness, method, seconds="440")
    return code, data, given


def test_sharpness_keeps_every_pair_their_scatter_and_the_speeds_of_launches(run, monkeypatch):
    code, data, given = run_sharpness(run, monkeypatch, "launched", 4)
    assert code == 0 and len(data["rows"]) == 4 and data["headline"] == "4 pairs"
    assert given == [pytest.approx(440 - sharpness.END_SECONDS, abs=2)]
    assert data["launches_tokens_per_s"] == [100.0, 100.0, 101.0, 101.0, *[200.0] * 4]
    assert data["speeds_of_launches"] == "two speeds, 99% apart: 4 of 8 launches are slower"
    assert data["tables"][1]["rows"][0][:2] == ["8", "100 100 101 101 200 200 200 200"]


def test_lockstep_pairs_have_a_scatter_and_no_launches(run, monkeypatch):
    code, data, _ = run_sharpness(run, monkeypatch, "lockstep", 3)
    (scatter,) = data["precision"]
    assert code == 0 and scatter["sd"] == pytest.approx(0.01) and scatter["pair_s"] == 20.0
    assert scatter["standard_error"] == pytest.approx(0.01 / 15**0.5)  # 15 pairs in 5 minutes
    assert "speeds_of_launches" not in data and len(data["tables"]) == 1


def test_one_pair_has_no_scatter_and_none_is_said(run, monkeypatch):
    assert run_sharpness(run, monkeypatch, "lockstep", 1)[1]["tables"][0]["rows"][0][-2:] == ["–", "–"]
    code, data, _ = run_sharpness(run, monkeypatch, "launched", 0)
    assert code == 0 and "left no pairs" in data["not_run"]
    monkeypatch.setattr(sharpness, "read_pairs", lambda folder: pd.DataFrame(columns=PAIRS.strip().split(",")))
    assert "no pair was valid" in run_sharpness(run, monkeypatch, "lockstep", 1)[1]["not_run"]


def test_calibrate_takes_the_words_of_both_shapes():
    for words in (sharpness.FULL, sharpness.TINY, sharpness.VLLM, sharpness.TINY_VLLM):
        assert cli.commands["dev"].commands["calibrate"].make_context("calibrate", [*words, "--method", "launched"])
