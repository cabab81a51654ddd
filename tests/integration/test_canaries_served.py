"""Canaries over HTTP on the built-in server with a small pool: right answers pass, one that is wrong is found."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest
import yaml

from kvbench.cli.gate import gate
from kvbench.cli.main import cli
from kvbench.cli.run_guarded import guarded
from tests.support import verdicts
from tests.support.canaries import ANSWER, store, tiny_set
from tests.support.hf_parts import loaded, make_engine, model_folder, one_thread
from tests.support.http_server import running_server
from tests.support.sweep_parts import BUSY_MACHINE, Bench

PAGE = 8
SERVED = {"page_size": PAGE, "max_model_len": 96, "max_num_seqs": 6, "enable_prefix_caching": True}
WRONG, AT = "passkey-21", 2
LOAD = {
    "concurrency": [6], "num_requests": 24, "repeats": 1, "timeout_s": 60.0, "temperature": 1.0, "ignore_eos": False,
    "prompts": {"kind": "synthetic", "classes": [{"name": "a", "prompt_tokens": [20, 40], "output_tokens": [20, 30]}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with one_thread():
        yield model_folder(str(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def files(folder, tmp_path_factory):
    """(all right, one expected token changed)"""
    made, path = tiny_set(folder), tmp_path_factory.mktemp("sets")
    return store(made, path / "right.jsonl"), store(made, path / "wrong.jsonl", WRONG, AT)


@pytest.fixture(scope="module")
def server(folder):
    engine = make_engine(
        loaded(folder), folder, slots=112, swap_slots=256, preemption_mode="swap", max_num_batched_tokens=32, **SERVED
    )
    with running_server(engine) as running:
        yield running


def workload(path: Path, **sections: object) -> Path:
    model = {"config": "llama-32m"}
    (path / "w.yaml").write_text(yaml.safe_dump({"name": "birds", "seed": 3, "model": model, "load": LOAD} | sections))
    return path / "w.yaml"


def load(server, tmp_path: Path, *words: object) -> tuple[int, Path]:
    command = ["load", workload(tmp_path), "--url", server.base_url, "--no-calibration", "--output-dir"]
    code = guarded(lambda: cli.main([str(w) for w in (*command, tmp_path / "out", *words)], standalone_mode=False))
    return code, tmp_path / "out"


def test_right_answers_while_sequences_are_preempted_swapped_and_forked(server, files, tmp_path):
    code, out = load(server, tmp_path, "--canaries", f"0.5:{files[0]}")
    metrics = json.loads((out / "metrics.json").read_text())
    assert code in (0, 4), code
    assert not [r for r in metrics["invalid_reasons"] if not any(words in r for words in BUSY_MACHINE)]
    counts = metrics["metrics"]["canaries"]
    assert counts == {"sent": 24, "answered": 24, "wrong": 0, "distinct": 16}
    assert metrics["wrong_answers"] is None and not (out / "wrong_answers.jsonl").exists()
    counters = json.loads((out / "counters.json").read_text())
    assert min(counters[f"{name}_total"] for name in ("num_preemptions", "forks", "swapped_out_pages")) > 0
    rows = pd.read_parquet(out / "requests.parquet")
    assert rows["canary"].notna().sum() == 24 and rows["canary_wrong"].isna().all() and len(rows) == 48


def test_one_wrong_answer_is_found_and_fails_the_load(server, files, tmp_path, capsys):
    code, out = load(server, tmp_path, "--canaries", f"0.4:{files[1]}")
    assert code == 1
    metrics = json.loads((out / "metrics.json").read_text())
    assert not metrics["valid"] and metrics["metrics"]["canaries"]["wrong"] == 1
    assert "WRONG ANSWERS: 1 of 16 canaries" in capsys.readouterr().out
    rows = pd.read_parquet(out / "requests.parquet").set_index("index")
    (index,) = rows.index[rows["canary_wrong"].notna()]
    assert rows.loc[index, "canary"] == WRONG and rows.loc[index, "ok"]
    found = [json.loads(line) for line in (out / "wrong_answers.jsonl").read_text().splitlines()]
    assert [each["answer"] for each in found] == list(range(len(found))) and len(found) in (1, 2)  # of forks both
    for each in found:
        assert (each["canary"], each["kind"], each["index"], each["position"]) == (WRONG, "passkey", index, AT)
        assert (each["seed"], each["repeat"], each["prompt_tokens"], each["page_size"]) == (3, 1, 21, PAGE)
        right, got = each["expected_token_ids"], each["got_token_ids"]
        assert len(got) == ANSWER and [i for i in range(ANSWER) if right[i] != got[i]] == [AT]
        assert len(each["pages"]) == math.ceil((21 + ANSWER - 1) / PAGE) == len(set(each["pages"]))
        assert 1 <= each["first_step"] < each["last_step"] and each["forked"] == (len(found) == 2)
        assert each["request_id"] and min(each[k] for k in ("preemptions", "recomputed_tokens", "swapped_pages")) >= 0


def test_canaries_of_other_weights_are_refused_before_anything_is_sent(server, files, tmp_path):
    other = tmp_path / "other.jsonl"
    head, *lines = files[0].read_text().splitlines()
    other.write_text("\n".join([json.dumps(json.loads(head) | {"weights_fingerprints": ["0" * 32]}), *lines]) + "\n")
    code, out = load(server, tmp_path, "--canaries", f"0.5:{other}")
    assert code == 2 and not out.exists()


@pytest.mark.full
def test_a_sweep_with_a_wrong_answer_fails_and_so_does_its_gate(folder, files, tmp_path, capsys):
    bench = Bench(tmp_path)
    path = workload(
        tmp_path, model={"path": folder}, engine={**SERVED, "kv_budget": "64KiB", "num_threads": 1, "device": "cpu"},
        load={**LOAD, "num_requests": 16, "canaries": {"share": 0.5, "file": str(files[1])}},
    )  # fmt: skip
    done = bench.sweep(str(path), "--no-calibration", fake=False)
    assert done.returncode == 1, done.stdout + done.stderr
    run = bench.only_run()
    (cell,) = (run / "cells").iterdir()
    summary = json.loads((cell / "summary.json").read_text())
    assert not summary["valid"] and summary["canaries"]["wrong"] == 1
    assert {json.loads(line)["canary"] for line in (cell / "wrong_answers.jsonl").read_text().splitlines()} == {WRONG}
    assert "WRONG ANSWERS" in (run / "report.md").read_text()
    capsys.readouterr()
    assert guarded(lambda: gate.main([str(run), "--output-dir", str(tmp_path / "out")], standalone_mode=False)) == 1
    verdict = verdicts.read(tmp_path / "out")
    (finding,) = verdict.of("fail")
    assert finding.id == f"limit/birds/{cell.name}/canaries" and WRONG in finding.sentence
    assert finding.id in (tmp_path / "out" / "junit.xml").read_text()
