"""``kvbench compare`` for real: launched servers with a known schedule, through the command line."""

from __future__ import annotations

import csv
import json
import sys
import xml.etree.ElementTree as ET

import pytest
import yaml

from kvbench.cli import main as cli
from kvbench.common import foreign_cpu as contention
from tests.support.sweep_parts import ROOT

MOCK = f"{sys.executable} -m kvbench.calibration.mock --port {{port}} --ttft-ms 50 --itl-ms "
STREAMS = {
    "name": "streams",
    "model": {"config": "llama-32m", "load_format": "dummy"},
    "load": {
        "mode": "closed", "concurrency": [4], "num_requests": [8], "cache_state": "steady", "ignore_eos": True,
        "timeout_s": 30,
        "prompts": {
            "kind": "synthetic",
            "classes": [{"name": "one", "share": 1.0, "prompt_tokens": 16, "output_tokens": 24}],
        },
    },
}  # fmt: skip


@pytest.fixture
def compare(tmp_path, monkeypatch, capfd):
    """Runs the command in this process; (exit code, its folder, what it printed)."""
    monkeypatch.setattr(contention, "MAX_FOREIGN_CORES", 1000.0)  # other tests run beside this one
    monkeypatch.setattr(contention, "MAX_STEAL_SHARE", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the mock server is launched in another folder
    monkeypatch.chdir(tmp_path)
    (tmp_path / "streams.yaml").write_text(yaml.safe_dump(STREAMS))

    def run(*words):
        known = set(tmp_path.glob("results/compare/*"))
        with pytest.raises(SystemExit) as left:
            cli.main(["compare", *words])
        new = set(tmp_path.glob("results/compare/*")) - known
        return left.value.code, new.pop() if new else None, capfd.readouterr()

    return run


def test_a_candidate_that_streams_5_percent_slower_fails_and_ci_is_told(compare):
    code, folder, said = compare(f"{MOCK}20", f"{MOCK}21", "--workload", "streams.yaml", "--order-seed", "1")
    assert code == 1, said.out + said.err
    verdict = json.loads((folder / "verdict.json").read_text())
    found = {finding["metric"]: finding for finding in verdict["findings"]}
    assert verdict["outcome"] == "fail"
    assert "fail" in (found["output_throughput"]["outcome"], found["p95_itl_ms"]["outcome"])
    assert found["output_throughput"]["change"] == pytest.approx(-0.044, abs=0.02)  # 50 + 23 x 20 to 50 + 23 x 21 ms
    assert found["p95_ttft_ms"]["outcome"] != "fail"
    assert ET.parse(folder / "junit.xml").findall(".//failure")
    assert (folder / "summary.md").read_text().startswith("**FAIL**")
    with (folder / "pairs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["first"] for row in rows} == {"base", "candidate"}
    assert verdict["facts"]["pairs"] * 3 == len(rows)
    assert "kvbench compare" in verdict["reproduce"] and "FAIL" in said.out


def test_an_identical_candidate_does_not_fail(compare, tmp_path):
    (tmp_path / "one.yaml").write_text("timing:\n  looks:\n    - {pairs: 8, alpha: 0.01}\n")
    code, folder, said = compare(f"{MOCK}20", f"{MOCK}20", "--workload", "streams.yaml", "--policy", "one.yaml")
    assert code in (0, 3), said.out + said.err
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["facts"]["pairs"] == 8
    assert not [f for f in verdict["findings"] if f["outcome"] == "fail"]
    assert any("A/A" in note for note in verdict["notes"])


def test_time_that_runs_out_ends_inconclusive_and_resume_goes_on(compare, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "no-git"))  # a commit while this runs must not keep it from resuming
    words = ("--workload", "streams.yaml", "--max-minutes", "0.15")
    code, folder, said = compare(f"{MOCK}20", f"{MOCK}20", *words)
    assert code == 3, said.out + said.err
    verdict = json.loads((folder / "verdict.json").read_text())
    pairs = verdict["facts"]["pairs"]
    assert 1 <= pairs < 8
    assert verdict["sentence"].startswith(f"--max-minutes 0.15 were over after {pairs} of up to 16 pairs. ")
    assert any(note.startswith("go on with: kvbench compare --resume") for note in verdict["notes"])
    if pairs > 1:
        assert all("pairs_needed" in f["figures"] for f in verdict["findings"])
    code, other, said = compare("--resume", str(folder), "--max-minutes", "0.4")
    assert other is None and code in (0, 3), said.out + said.err  # on a quick machine there is time for a look
    assert json.loads((folder / "verdict.json").read_text())["facts"]["pairs"] > pairs, said.out + said.err


def test_a_candidate_that_never_serves_is_a_regression(compare):
    code, folder, said = compare(f"{MOCK}20", f"{MOCK}20 --fail-rate 1", "--workload", "streams.yaml")
    assert code == 1, said.out + said.err
    assert "failed alone in 8 attempts and base's in 0" in json.loads((folder / "verdict.json").read_text())["sentence"]


def test_a_base_that_never_serves_is_no_measurement(compare):
    code, folder, said = compare(f"{sys.executable} -c 1 {{port}}", f"{MOCK}20", "--workload", "streams.yaml")
    assert code == 4, said.out + said.err
    assert ET.parse(folder / "junit.xml").findall(".//error")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("a",), "two sides are needed"),
        (("no-such-ref", "HEAD", "--workload", "streams.yaml"), "no-such-ref"),
        ((f"{MOCK}20", f"{MOCK}21"), "--workload is missing"),
        ((f"{MOCK}20", f"{MOCK}21", "--workload", "streams.yaml", "--only", "nothing*"), "matches no cell"),
        ((f"{MOCK}20", f"{MOCK}21", "--workload", "streams.yaml", "--workload", "streams.yaml"), "two workloads"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_no_folder(compare, words, sentence):
    code, folder, said = compare(*words)
    assert (code, folder) == (2, None)
    assert sentence in said.err and len(said.err.strip().splitlines()) <= 2, said.err
