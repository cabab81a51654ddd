"""Engines in lockstep for real: they generate what engines alone do, and ``kvbench compare`` compares them."""

from __future__ import annotations

import json
import math
import os
import random
import sys

import pandas as pd
import pytest
import yaml

from kvbench.cli import main as cli
from kvbench.gate.compare import lockstep_pairs
from kvbench.gate.compare.served_check import ServedCheck
from kvbench.lockstep import instrument as loads
from kvbench.lockstep.process import EngineProcess, open_all
from kvbench.lockstep.turns import TurnTaker, take_turns
from kvbench.targets.builtin import LOCKSTEP_COMMAND
from kvbench.workload.file import load_workload
from kvbench.workload.load_section import LoadConfig, load_point
from kvbench_engine.build import build_engine
from kvbench_engine.config import EngineConfig
from kvbench_engine.sequence import Request, SamplingParams
from tests.support.fake_lockstep import FakeProcess, fake_clock
from tests.support.sweep_parts import ROOT

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 300,
    "max_position_embeddings": 256, "initializer_range": 0.3, "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip
ENGINE = {"layout": "paged", "page_size": 16, "kv_budget": "1MiB", "max_model_len": 128, "num_threads": 1}
LOAD = {
    "mode": "closed", "concurrency": [3], "num_requests": [6], "ignore_eos": True, "temperature": 0.0,
    "prompts": {
        "kind": "synthetic",
        "shared_prefix": {"tokens": 32, "share": 0.5},
        "classes": [{"name": "chat", "share": 1.0, "prompt_tokens": [8, 40], "output_tokens": [8, 24]}],
    },
}  # fmt: skip


@pytest.fixture
def workload_file(tmp_path):
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    model = {"config": str(tmp_path / "tiny.json"), "load_format": "dummy", "dtype": "float32"}
    path = tmp_path / "tiny.yaml"
    engine = {**ENGINE, "device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 64}
    path.write_text(yaml.safe_dump({"name": "tiny", "model": model, "engine": engine, "load": LOAD}))
    return path


SHARING = LOAD | {
    "temperature": 1.0, "concurrency": [1],
    "prompts": {"kind": "synthetic", "classes": [
        {"name": "samples", "share": 0.5, "prompt_tokens": 40, "output_tokens": 12, "n": 3},
        {"name": "beams", "share": 0.5, "prompt_tokens": 20, "output_tokens": 8, "n": 2, "beam_width": 3},
    ]},
}  # fmt: skip
ENGINES = {
    "base": {},
    "contiguous": {"layout": "contiguous", "page_size": 16},
    "int8": {"kv_cache_dtype": "int8_per_token_head"},
    "prefix": {"enable_prefix_caching": True, "page_size": 8},
}


def alone(settings, requests, temperature):
    """What an engine that runs by itself generates, one request at a time."""
    engine, tokens = build_engine(EngineConfig.from_mapping(settings)), []
    for spec in requests:
        params = SamplingParams(spec.max_tokens, temperature, ignore_eos=True, n=spec.n, beam_width=spec.beam_width)
        engine.add_request(Request(str(spec.index), spec.prompt_token_ids, params))
        found = {index: [] for index in range(spec.n)}
        while engine.has_work():
            for output in engine.step():
                found[output.index] += output.token_ids
        assert spec.cls != "samples" or len(set(map(tuple, found.values()))) == 3
        tokens.append([token for index in range(spec.n) for token in found[index]])
    return tokens


@pytest.mark.full
@pytest.mark.parametrize(("section", "names"), [(LOAD, list(ENGINES)), (SHARING, ["base", "contiguous"])])
def test_engines_that_share_weights_and_take_turns_generate_what_each_generates_alone(
    workload_file, tmp_path, section, names
):
    workload = load_workload(workload_file, profile="cpu")
    load = LoadConfig.model_validate(section)
    settings = {name: {**workload.engine, **ENGINES[name]} for name in names}
    point = load_point("closed", concurrency=section["concurrency"][0], rate=None, num_requests=6)
    requests = loads.requests_of(load, point, vocab_size=300, max_model_len=128, seed=0, repeat=1)
    with EngineProcess(LOCKSTEP_COMMAND, tmp_path / "log") as process:
        process.greet()
        open_all([(process, name, each) for name, each in settings.items()])
        seats = [TurnTaker(process, name) for name in settings]
        before = [loads.begin(seat, load, point, requests, math.inf) for seat in seats]
        take_turns(seats, random.Random(3), 2, math.inf)
        results = {}
        for seat, metrics in zip(seats, before, strict=True):
            (tmp_path / seat.name).mkdir()
            repetition = loads.Repetition.of(seat)
            results[seat.name] = loads.store(tmp_path / seat.name, [repetition], load, point, requests, metrics)
    wanted, tables, saved = sum(spec.max_tokens * spec.n for spec in requests), {}, {}
    for name, result in results.items():
        assert result.valid, result.invalid_reasons
        tables[name] = pd.read_parquet(tmp_path / name / "requests.parquet")
        generated = [list(ids) for ids in tables[name]["output_token_ids"]]
        assert generated == alone(settings[name], requests, load.temperature), name
        metrics = result.metrics
        assert metrics.total_output_tokens == wanted and metrics.completed == 6
        # the definition, from the file of the steps
        steps = pd.read_parquet(tmp_path / name / "steps.parquet")
        assert metrics.duration_s == pytest.approx(steps["seconds"].sum())
        assert metrics.output_throughput == pytest.approx(wanted / steps["seconds"].sum())
        assert steps["output_tokens"].sum() == wanted
        counters = json.loads((tmp_path / name / "counters.json").read_text())
        logical, owned = (counters[f"kv_page_steps_total_{kind}"] for kind in ("logical", "physical"))
        saved[name] = 1 - owned / logical
        if section is SHARING:
            assert metrics.per_class["samples"].tpot_ms.n == 9 and metrics.per_class["beams"].itl_ms.n == 0
            assert counters["copied_pages_total"] > 0 and counters["forks_total"] >= 3 * 2
    if section is SHARING:
        assert saved["contiguous"] == 0 < 0.3 < saved["base"] < 0.7
    else:
        assert tables["prefix"]["cached_tokens"].sum() > 0 == tables["base"]["cached_tokens"].sum()


@pytest.fixture
def compare(workload_file, tmp_path, monkeypatch, capfd):
    """Runs ``kvbench compare`` with short pairs in this process; (exit code, manifest, verdict, what it printed)."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lockstep_pairs, "_LEAST_S", 0.2)
    monkeypatch.setattr(lockstep_pairs, "PAIR_S", 0.4)
    (tmp_path / "five.yaml").write_text("timing:\n  looks: [{pairs: 5, alpha: 4%, alpha_pass: 4%}]\n")

    def run(*words):
        with pytest.raises(SystemExit) as left:
            cli.main(["compare", *words, "--workload", "tiny.yaml", "--policy", "five.yaml"])
        if left.value.code == 2:
            return 2, None, None, capfd.readouterr()
        (folder,) = tmp_path.glob("results/compare/*")
        manifest, verdict = (json.loads((folder / name).read_text()) for name in ("manifest.json", "verdict.json"))
        return left.value.code, manifest, verdict, capfd.readouterr()

    return run


@pytest.mark.full
def test_a_pair_of_the_real_engine_is_measured_in_engine_time(compare, tmp_path):
    _, manifest, verdict, said = compare("max_num_seqs=4", "max_num_seqs=1")
    assert manifest["method"] == "lockstep", said.out + said.err
    (turn,) = manifest["lockstep"]["turn_lengths"].values()
    assert turn in (1, 2, 4, 8)
    (change,) = (f["change"] for f in verdict["findings"] if f["metric"] == "output_throughput")
    assert change < -0.15
    for side in ("base", "candidate"):
        (server,) = manifest["servers"][side].values()
        assert server["served_model"]["vocab_size"] == TINY["vocab_size"]
        (done,) = tmp_path.glob(f"results/compare/*/{side}/tiny/cells/*/loads/1/done.json")
        assert json.loads(done.read_text())["clock"] == "engine"


@pytest.fixture
def scripted(compare, monkeypatch):
    """The same with engines whose steps take chosen times; without the served check, whose servers take real ones."""
    monkeypatch.setattr(lockstep_pairs, "EngineProcess", FakeProcess)
    fake_clock(monkeypatch)
    monkeypatch.setattr(lockstep_pairs, "_LEAST_S", 3.0)
    monkeypatch.setattr(ServedCheck, "run", lambda check, workloads: None)
    return compare


def test_a_slower_engine_fails_and_an_equal_one_passes(scripted):
    code, _, verdict, said = scripted("max_num_batched_tokens=64", "max_num_batched_tokens=48")
    assert (code, verdict["outcome"]) == (1, "fail"), said.out + said.err
    changes = {f["metric"]: f["change"] for f in verdict["findings"]}
    assert changes["output_throughput"] == pytest.approx(1 / 1.2 - 1, abs=0.02)
    assert changes["p95_itl_ms"] == pytest.approx(0.2, abs=0.03)


def test_an_unchanged_engine_passes_and_both_sides_of_a_pair_stay_on_the_same_cores(scripted, monkeypatch):
    cores = []
    monkeypatch.setattr(FakeProcess, "stay_on", lambda process, on: cores.append(tuple(on)))
    code, _, verdict, said = scripted("page_size=16", "page_size=16", "--order-seed", "1")  # draws both of two cores
    assert (code, verdict["outcome"]) == (0, "pass"), said.out + said.err
    if len(os.sched_getaffinity(0)) > 1:
        assert len(cores) == 2 * verdict["facts"]["pairs"] and cores[::2] == cores[1::2]
        assert all(len(on) == ENGINE["num_threads"] for on in cores) and len(set(cores)) > 1


def test_an_engine_that_dies_is_the_fault_of_its_side(scripted):
    code, manifest, verdict, said = scripted("page_size=16", "page_size=32")
    assert (code, verdict["outcome"]) == (1, "fail"), said.out + said.err
    assert all(each["faults"]["candidate"] and not each["reasons"]["base"] for each in manifest["voids"])


def test_settings_that_the_engine_refuses_are_a_usage_error(scripted):
    code, _, _, said = scripted("page_size=16", "page_size=64")
    assert code == 2 and "page_size cannot be 64" in said.err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((f"{sys.executable} -m kvbench dev mock-server --port {{port}}", "page_size=16"), "has no adapter"),
        (("page_size=8", "page_size=16", "-o", "load.mode=open", "-o", "load.concurrency=null", "-o",
          "load.request_rate=[5]", "-o", "load.max_concurrency=2"), "max_concurrency"),
    ],
)  # fmt: skip
def test_what_cannot_be_stepped_is_refused_when_lockstep_is_asked_for(compare, words, reason):
    code, _, _, said = compare(*words, "--method", "lockstep")
    assert code == 2 and reason in said.err
