"""``kvbench compare`` for real: launched servers with a known schedule, through the command line."""

from __future__ import annotations

import csv
import json
import sys
import xml.etree.ElementTree as ET

import pytest
import yaml

from kvbench.cli import main as cli
from kvbench.common import foreign_cpu
from kvbench.load import validity
from kvbench.measure import single_request
from tests.support.sweep_parts import ROOT

MOCK = f"{sys.executable} -m kvbench dev mock-server --port {{port}} --ttft-ms 30 --itl-ms "
STREAMS = {
    "name": "streams",
    "model": {"config": "llama-32m", "load_format": "dummy"},
    "load": {
        "mode": "closed", "concurrency": [4], "num_requests": [4], "cache_state": "steady", "ignore_eos": True,
        "timeout_s": 30,
        "prompts": {
            "kind": "synthetic",
            "classes": [{"name": "one", "share": 1.0, "prompt_tokens": 16, "output_tokens": 16}],
        },
    },
}  # fmt: skip
# Other tests run beside this one: what they take from the client is not what is tested here.
UNLIMITED = {
    foreign_cpu: ("MIN_FOREIGN_CORES", "MAX_STEAL_SHARE"),
    validity: ("MIN_LAG_LIMIT_MS", "MAX_SLIP_MS", "MAX_CPU_FRACTION", "MAX_COALESCED_SHARE", "MAX_TURNAROUND_SHARE"),
}


@pytest.fixture
def compare(tmp_path, monkeypatch, capfd):
    """Runs the command in this process; (exit code, its folder, its verdict, what it printed)."""
    for module, names in UNLIMITED.items():
        for name in names:
            monkeypatch.setattr(module, name, 1e6)
    monkeypatch.setattr(single_request, "_PAUSE_S", 0.01)  # before a request that failed is sent again
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the mock server is launched in another folder
    monkeypatch.chdir(tmp_path)
    (tmp_path / "streams.yaml").write_text(yaml.safe_dump(STREAMS))
    (tmp_path / "one.yaml").write_text("timing:\n  looks:\n    - {pairs: 5, alpha: 4%}\n")

    def run(*words):
        known = set(tmp_path.glob("results/compare/*"))
        with pytest.raises(SystemExit) as left:
            cli.main(["compare", *words])
        new = set(tmp_path.glob("results/compare/*")) - known
        folder = new.pop() if new else None
        verdict = json.loads((folder / "verdict.json").read_text()) if folder else None
        return left.value.code, folder, verdict, capfd.readouterr()

    return run


@pytest.mark.full
def test_a_candidate_that_streams_slower_fails_and_ci_is_told(compare):
    words = ("--workload", "streams.yaml", "--policy", "one.yaml", "--order-seed", "1")
    code, folder, verdict, said = compare(f"{MOCK}12", f"{MOCK}18", *words)
    assert (code, verdict["outcome"]) == (1, "fail"), said.out + said.err
    found = {finding["metric"]: finding for finding in verdict["findings"]}
    assert "fail" in (found["output_throughput"]["outcome"], found["p95_itl_ms"]["outcome"])
    assert found["output_throughput"]["change"] == pytest.approx(210 / 300 - 1, abs=0.1)  # 30 + 15 x 12 or 18 ms
    assert ET.parse(folder / "junit.xml").findall(".//failure")
    assert (folder / "summary.md").read_text().startswith("**FAIL**")
    with (folder / "pairs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["first"] for row in rows} == {"base", "candidate"}
    assert verdict["facts"]["pairs"] * 3 == len(rows)
    assert "kvbench compare" in verdict["reproduce"] and "FAIL" in said.out


@pytest.mark.full  # eight attempts; tests/unit/gate/test_served_check.py has them with fake servers
def test_a_candidate_that_never_serves_is_a_regression(compare):
    code, _, verdict, said = compare(f"{MOCK}12", f"{MOCK}12 --fail-rate 1", "--workload", "streams.yaml")
    assert code == 1, said.out + said.err
    (served,) = [finding for finding in verdict["findings"] if finding["id"] == "served"]
    assert (served["outcome"], served["candidate"], served["base"]) == ("fail", 8, 0)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("a",), "two sides"),
        ((f"{MOCK}20", f"{MOCK}21", "--workload", "streams.yaml", "--method", "twins"), "'twins' is not one of"),
        (("no-such-ref", "HEAD", "--workload", "streams.yaml"), "no-such-ref"),
        ((f"{MOCK}20", f"{MOCK}21"), "--workload"),
        ((f"{MOCK}20", f"{MOCK}21", "--workload", "streams.yaml", "--workload", "streams.yaml"), "'streams'"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_no_folder(compare, words, named):
    code, folder, _, said = compare(*words)
    assert (code, folder) == (2, None)
    assert named in said.err and len(said.err.strip().splitlines()) <= 2, said.err
