"""`kvbench sweep --simulate`: the folder and report of a measured sweep, marked; the same bytes each time."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from kvbench.cli.main import main
from kvbench.runs.stored import read_runs

CHAT = {"name": "chat", "share": 1.0, "prompt_tokens": [16, 48], "output_tokens": [4, 12]}
WORKLOAD: dict[str, Any] = {
    "name": "tiny",
    "simulate": {"device": "L4"},
    "model": {"config": "llama-3.1-8b"},
    "engine": {"page_size": 16, "max_num_seqs": 8, "max_model_len": 1024, "kv_budget": "1GiB", "num_threads": 1},
    "sweep": {"layout": ["contiguous", "paged"]},
    "load": {
        "concurrency": [2, 8],
        "num_requests": [4, 16],
        "repeats": 1,
        "slo": {"ttft_ms": 500},
        "prompts": {"kind": "synthetic", "shared_prefix": {"tokens": 64, "share": 0.5}, "classes": [CHAT]},
    },
}


def kvbench(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def write(path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump({**WORKLOAD, **changes}))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a simulated sweep, with its report."""
    folder = tmp_path_factory.mktemp("simulated")
    assert kvbench("sweep", write(folder / "tiny.yaml"), "--simulate", "--output-dir", folder) == 0
    return next((folder / "tiny").iterdir())


def test_the_folder_has_the_files_of_a_measured_one(run: Path) -> None:
    cell = run / "cells" / "paged-p16-c8"
    of_cell = {"requests.parquet", "server.parquet", "summary.json", "samples.jsonl"}
    of_load = {"requests.parquet", "server.parquet", "counters.json", "load.json", "done.json"}
    assert {"manifest.json", "summary.csv", "report.html", "report.md"} <= {path.name for path in run.iterdir()}
    assert of_cell <= {path.name for path in cell.iterdir()}
    assert of_load <= {path.name for path in (cell / "loads" / "1").iterdir()}
    assert len(pd.read_parquet(cell / "requests.parquet")) == 16


def test_all_that_a_reader_may_open_says_that_it_is_simulated(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    load = run / "cells" / "contiguous-c2" / "loads" / "1"
    done = json.loads((load / "done.json").read_text())
    report = (run / "report.md").read_text().splitlines()
    assert manifest["simulated"]["device"] == "L4" and manifest["backend"] == "simulated"
    assert json.loads((load / "load.json").read_text())["clock"] == done["clock"] == "simulated"
    assert json.loads((load.parent.parent / "summary.json").read_text())["simulated"]["tensor_parallel"] == 1
    assert set(pd.read_csv(run / "summary.csv")["clock"]) == {"simulated"}
    assert "simulated" in report[0] and report[2].startswith("**Simulated: ")
    captions = [line for line in (run / "report.html").read_text().splitlines() if "<figcaption>" in line]
    assert len(captions) >= 3 and all("Simulated on L4" in line for line in captions)
    stated = "\n".join(report).split("<summary>Manifest</summary>")[0]
    assert not any(word in stated for word in (manifest["cpu"]["model"], "as served", "Served"))


def test_contiguous_reservations_limit_what_pages_do_not(run: Path) -> None:
    """1 GiB holds 8 reservations of 1,024 tokens less one for the page table's bytes; pages hold all 8 requests."""
    running = {
        layout: pd.read_parquet(run / "cells" / f"{layout}-c8" / "server.parquet")["num_requests_running"].max()
        for layout in ("contiguous", "paged-p16")
    }
    assert running["contiguous"] < running["paged-p16"] == 8


def digests(run: Path) -> dict[str, str]:
    """Of everything but times of day."""
    actual = {}
    for path in sorted((run / "cells").rglob("*")):
        if path.name in ("requests.parquet", "server.parquet", "counters.json", "load.json"):
            actual[str(path.relative_to(run))] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.name == "summary.json":
            summary = json.loads(path.read_text())
            kept = [summary["aggregate"], summary["pooled"], [one["metrics"] for one in summary["repeats"]]]
            actual[str(path.relative_to(run))] = json.dumps(kept, sort_keys=True)
    return actual


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(run: Path, tmp_path: Path) -> None:
    workload = write(tmp_path / "tiny.yaml")
    for seed in (0, 1):
        code = kvbench(
            "sweep", workload, "--simulate", "--no-report", "--seed", seed, "--output-dir", tmp_path / str(seed)
        )
        assert code == 0
    again, other = (digests(next((tmp_path / str(seed) / "tiny").iterdir())) for seed in (0, 1))
    assert again == digests(run) and len(again) == 32
    assert all(other[path] != again[path] for path in again if path.endswith("requests.parquet"))


def test_a_run_goes_on_as_it_was_begun(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(copy / "cells" / "paged-p16-c8")
    assert kvbench("sweep", "--resume", copy, "--no-report") == 0
    assert digests(copy) == digests(run)
    assert kvbench("sweep", "--resume", copy, "--device", "H200") == 2


def test_simulated_runs_are_not_held_against_measured_ones(run: Path, tmp_path: Path) -> None:
    measured = shutil.copytree(run, tmp_path / "measured")
    manifest = json.loads((measured / "manifest.json").read_text())
    del manifest["simulated"]
    (measured / "manifest.json").write_text(json.dumps(manifest | {"backend": "kvbench"}))
    assert kvbench("compare", run, measured, "--output-dir", tmp_path) == 2
    assert kvbench("compare", run, run.parent / run.name, "--output-dir", tmp_path) != 2
    places = {one.place for folder in (run, measured) for one in read_runs([folder])[0]}
    assert len(places) == 2


def test_limits_hold_on_a_simulated_run_and_say_so(run: Path, tmp_path: Path) -> None:
    policy = tmp_path / "gates.yaml"
    policy.write_text("limits: [{metric: p95_ttft_ms, max: 60000}]")
    assert kvbench("gate", run, "--policy", policy, "--output-dir", tmp_path) == 0
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["sentence"].startswith("simulated: ") and "simulated" in verdict["facts"]["workload"]


@pytest.mark.parametrize(
    "wrong",
    [
        ("--device", "L4"),  # without --simulate
        ("--simulate", "--device", "H2OO"),
        ("--simulate", "--model", "llama-3.1-70b"),  # does not fit
        ("--simulate", "--device", "2xL4", "--tensor-parallel", "4"),
        ("--simulate", "--target", "vllm"),
        ("--simulate", "-o", "sweep={kernel_backend: [torch, numba]}"),
        ("--simulate", "-o", "simulate=null"),  # and no --device
    ],
    ids=" ".join,
)
def test_what_cannot_be_is_one_sentence_before_anything_is_written(
    wrong: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = write(tmp_path / "tiny.yaml")
    assert kvbench("sweep", workload, "--output-dir", tmp_path / "out", *wrong) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1 and not (tmp_path / "out").exists()


def test_a_simulated_machine_has_no_other_kv_of_latent_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model without latent attention is simulated all the same."""
    workload = write(tmp_path / "tiny.yaml", engine={"latent_kv": False, "max_model_len": 1024}, sweep={})
    options = ("--simulate", "--device", "H200", "--no-report", "--only", "*c2", "--output-dir", tmp_path / "out")
    assert kvbench("sweep", workload, *options, "--model", "DeepSeek-V2-Lite") == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert "latent_kv" in said and "DeepSeek-V2-Lite" in said and not (tmp_path / "out").exists()
    assert kvbench("sweep", workload, *options) == 0


@pytest.mark.parametrize(
    ("given", "kept"),
    [((), True), (("--device", "H200"), False), (("--device", "H200", "-o", "engine.kv_budget=1GiB"), True)],
    ids=["as the workload has it", "another device", "set by the user"],
)
def test_a_kv_budget_is_that_of_the_machine_it_was_written_for(
    given: tuple[str, ...], kept: bool, tmp_path: Path
) -> None:
    workload = write(tmp_path / "tiny.yaml", sweep={})
    options = ("--simulate", "--no-report", "--only", "*c2", "--output-dir", tmp_path / "out")
    assert kvbench("sweep", workload, *options, *given) == 0
    manifest = json.loads(next((tmp_path / "out" / "tiny").glob("*/manifest.json")).read_text())
    (capacity,) = manifest["capacity"].values()
    assert (capacity["kv_budget_bytes"] == 2**30) == kept
    assert any("kv_budget" in note for note in manifest["notes"]) != kept


def write_tables(folder: Path) -> Path:
    """Operator times of steps with up to 16 tokens and 4 sequences, a microsecond each."""
    folder.mkdir()
    layers = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "act_fn", "layernorm", "rotary_emb")
    dense = [f"{layer},{tokens},{tokens}" for layer in layers for tokens in (1, 16)]
    (folder / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *dense]))
    (folder / "per_sequence.csv").write_text("layer,sequences,time_us\nlm_head,1,1\nlm_head,4,4\n")
    prefill = [f"{chunk},{before},0,0,{chunk}" for chunk in (1, 16) for before in (0, 16)]
    decode = [f"0,0,{n},{kv},{n}" for n in (1, 4) for kv in (16, 64)]
    mixed = [f"{c},{b},{n},{kv},{n}" for c in (1, 16) for b in (0, 16) for n in (1, 4) for kv in (16, 64)]
    rows = ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", *prefill, *decode, *mixed]
    (folder / "attention.csv").write_text("\n".join(rows))
    return folder


def test_measured_operators_are_named_with_how_far_a_load_went_beyond_them(tmp_path: Path) -> None:
    workload = write(tmp_path / "tiny.yaml", sweep={"kv_cache_dtype": ["fp8_e4m3"]})
    tables = write_tables(tmp_path / "measured-operators")
    assert kvbench("sweep", workload, "--simulate", "--ops", tables, "--output-dir", tmp_path / "out") == 0
    run = next((tmp_path / "out" / "tiny").iterdir())
    manifest, report = json.loads((run / "manifest.json").read_text()), (run / "report.md").read_text()
    assert manifest["simulated"]["ops"] == str(tables) and "tokens a step went up to" in report
    assert [path.name for path in (run / "cells").glob("*fp8*")] == []
    assert any(note.startswith("skipped paged-p16-fp8_e4m3") for note in manifest["notes"])
