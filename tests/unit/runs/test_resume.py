"""A run is gone on with only under the conditions it was started with, wherever one stands."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
import yaml

from kvbench.cli.sweep import workload_and_run
from kvbench.common.errors import UsageError
from kvbench.common.files import write_json
from kvbench.common.machine import environment
from kvbench.common.packages import REPOSITORY
from kvbench.runs import resume
from kvbench.runs.folder import RunFolder
from kvbench.runs.manifest import add_server, build_manifest
from kvbench.runs.resume import accept_server, environment_differences, reopen, server_differences
from kvbench.workload.file import differing_keys, load_workload, resolve

NOW = {
    "git": {"sha": "a" * 40, "short_sha": "aaaaaaa", "dirty": False},
    "versions": {"kvbench": "0.1", "python": "3.11.7", "torch": "2.13.0", "triton": None, "numba": "0.68"},
    "cpu": {"model": "Fast 1", "architecture": "x86_64", "cores": 2, "cores_total": 4},
    "memory_bytes": 2**34,
    "os": "Linux 6",
    "gpus": [],
}
GPU = {"name": "H100", "driver_version": "570", "clocks.sm": "1200 MHz"}
SERVED = {"target": None, "serve_cmd": None}
WORKLOAD = {
    "name": "tiny",
    "model": {"config": "llama-32m"},
    "engine": {"kv_budget": "65MiB", "max_model_len": 256, "max_num_seqs": 8},
    "load": {
        "concurrency": [1],
        "num_requests": 2,
        "prompts": {"kind": "text", "file": "lines.txt", "prompt_tokens": 4, "output_tokens": 4},
    },
}


def changed(section, key=None, value=None):
    data = copy.deepcopy(NOW)
    if key is None:
        data[section] = value
    else:
        data[section][key] = value
    return data


@pytest.mark.parametrize(
    ("before", "told"),
    [
        (NOW, []),
        (
            changed("git", value={"sha": "b" * 40, "short_sha": "bbbbbbb", "dirty": False}),
            ["commit (bbbbbbb then, aaaaaaa now)"],
        ),
        (changed("git", "dirty", True), ["uncommitted changes (some then, none now)"]),
        (
            changed("git", value={"sha": None, "short_sha": "nogit", "dirty": None}),
            ["commit (nogit then, aaaaaaa now)"],
        ),
        (changed("versions", "torch", "2.12.0"), ["torch (2.12.0 then, 2.13.0 now)"]),
        (changed("versions", "triton", "3.9"), ["triton (3.9 then, none now)"]),
        (changed("versions", "python", "3.12.0"), ["python (3.12.0 then, 3.11.7 now)"]),
        (changed("cpu", "model", "Slow 2"), ["processor model (Slow 2 then, Fast 1 now)"]),
        (changed("cpu", "cores", 8), ["processor cores (8 then, 2 now)"]),
        (changed("gpus", value=[GPU]), ["GPUs (H100 with driver 570 then, none now)"]),
        (changed("memory_bytes", value=2**35), []),  # a container's, which changes nothing measured
        ({"git": NOW["git"]}, []),  # what was not recorded is not compared
    ],
)
def test_what_differs_is_named(before, told):
    assert environment_differences(before, NOW) == (told, [])


def test_a_gpu_that_clocks_down_is_the_same_gpu():
    idle = changed("gpus", value=[GPU | {"clocks.sm": "345 MHz"}])
    assert environment_differences(idle, changed("gpus", value=[GPU])) == ([], [])


def test_changes_on_the_same_commit_then_and_now_are_only_remarked():
    dirty = changed("git", "dirty", True)
    differences, (remark,) = environment_differences(dirty, dirty)
    assert differences == [] and "uncommitted changes" in remark


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A run folder of WORKLOAD in ``there``, started under NOW from that folder, with relative paths all over."""
    monkeypatch.setattr(resume, "environment", lambda: copy.deepcopy(NOW))
    there = tmp_path / "there"
    there.mkdir()
    (there / "lines.txt").write_text("one\ntwo\n")
    (there / "tiny.yaml").write_text(yaml.safe_dump(WORKLOAD))
    monkeypatch.chdir(there)
    workload = load_workload("tiny.yaml", profile="cpu")
    manifest = build_manifest(
        workload=workload.resolved, workload_file="tiny.yaml", profile="cpu", seed=0, plan=[], extra=SERVED
    )
    run = RunFolder(there / "results" / "tiny" / "1")
    write_json(run.manifest_path, manifest | NOW)
    return workload, run


def test_the_same_conditions_are_gone_on_with_and_put_down(begun):
    workload, run = begun
    manifest, remarks = reopen(run, workload, SERVED, force=False, something_left=True)
    assert remarks == [] and manifest["status"] == "incomplete"
    (entry,) = manifest["resumed"]
    assert entry["versions"] == NOW["versions"] and entry["differences"] == [] and not entry["forced"]


def test_other_conditions_are_refused_unless_forced_and_then_kept(begun, monkeypatch):
    workload, run = begun
    monkeypatch.setattr(resume, "environment", lambda: changed("versions", "torch", "2.14.0"))
    with pytest.raises(UsageError) as error:
        reopen(run, workload, SERVED, force=False, something_left=True)
    for words in (str(run.path), "torch (2.13.0 then, 2.14.0 now)", "start a new run", "--force"):
        assert words in str(error.value)
    manifest, (remark,) = reopen(run, workload, SERVED, force=True, something_left=True)
    assert "torch (2.13.0 then, 2.14.0 now)" in remark
    (entry,) = manifest["resumed"]
    assert entry["forced"] and entry["differences"] == ["torch (2.13.0 then, 2.14.0 now)"]
    assert entry["versions"]["torch"] == "2.14.0" and manifest["versions"]["torch"] == "2.13.0"  # both environments
    write_json(run.manifest_path, manifest)
    again, _ = reopen(run, workload, SERVED, force=True, something_left=True)
    assert len(again["resumed"]) == 2


def test_another_server_to_measure_is_another_condition(begun):
    workload, run = begun
    with pytest.raises(UsageError, match=r"target \(none then, http://127\.0\.0\.1:8000 now\)"):
        reopen(run, workload, SERVED | {"target": "http://127.0.0.1:8000"}, force=False, something_left=True)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("target_args", "--enforce-eager", "target_args (none then, --enforce-eager now)"),
        ("target_python", "/other/python", "target_python (none then, /other/python now)"),
        ("preset", "vllm", "preset (none then, vllm now)"),
        ("exact", True, "exact (none then, True now)"),
        ("target_options", {"model": "other"}, "model (none then, other now)"),
    ],
)
def test_an_option_that_was_not_given_at_the_start_is_another_condition(begun, key, value, words):
    workload, run = begun
    with pytest.raises(UsageError) as error:
        reopen(run, workload, SERVED | {key: value}, force=False, something_left=True)
    assert words in str(error.value)
    manifest, (remark,) = reopen(run, workload, SERVED | {key: value}, force=True, something_left=True)
    assert words in remark and manifest["resumed"][0]["differences"] == [words]


def test_a_finished_run_is_opened_under_any_conditions(begun, monkeypatch):
    workload, run = begun
    monkeypatch.setattr(resume, "environment", lambda: changed("versions", "torch", "2.14.0"))
    manifest, _ = reopen(run, workload, SERVED, force=False, something_left=False)
    assert "resumed" not in manifest  # nothing of the present goes into it


def told(fingerprint="f1", device="cpu", torch="2.13.0", **engine):
    return {
        "engine": {"model": "m", "seed": 0, "device": "auto", "layout": "paged"} | engine,
        "model": {"name": "m", "weights_fingerprint": fingerprint},
        "resolved": {"device": device, "device_name": None, "dtype": "float32", "kernel_backend": "numba"},
        "versions": {"torch": torch},
    }


@pytest.mark.parametrize(
    ("config_id", "server", "found"),
    [
        ("paged", told(), []),
        ("paged", told("f2"), ["weights_fingerprint (f1 then, f2 now)"]),
        ("contiguous", told("f2", layout="contiguous"), ["weights_fingerprint (f1 then, f2 now)"]),
        ("paged", told(device="cuda"), ["the server's device (cpu then, cuda now)"]),
        ("paged", told(torch="2.14.0"), ["the server's torch (2.13.0 then, 2.14.0 now)"]),
        ("seed1", told("f2", seed=1), []),  # a sweep over seeds has other weights by intent
        ("paged", told(""), []),
        ("paged", {}, []),
    ],
)
def test_a_server_is_compared_with_those_measured_before(config_id, server, found):
    manifest = {"servers": {"paged": told()}, "resumed": [{"differences": []}]}
    assert server_differences(manifest, config_id, server) == found
    accept_server(manifest, config_id, server, force=True)
    (entry,) = manifest["resumed"]
    assert entry["differences"] == found and ("servers" in entry) == bool(found)
    if found:
        with pytest.raises(UsageError) as error:
            accept_server(manifest, config_id, server, force=False)
        assert found[0] in str(error.value) and "--force" in str(error.value)


def test_a_run_goes_on_from_any_working_folder(begun, tmp_path, monkeypatch):
    workload, run = begun
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lines.txt").write_text("another text\n")  # must not be taken for the one that was measured
    monkeypatch.chdir(elsewhere)
    nothing = {"profile": None, "seed": None, "repeats": None, "overrides": (), "output_dir": Path("results")}
    stored, found = workload_and_run(None, str(run.path), nothing)
    assert stored.load.prompts.file == str(tmp_path / "there" / "lines.txt") == workload.load.prompts.file
    assert stored.engine == workload.engine
    reopen(found, stored, SERVED, force=False, something_left=True)
    by_file = load_workload(os.path.relpath(tmp_path / "there" / "tiny.yaml"), profile="cpu")
    reopen(found, by_file, SERVED, force=False, something_left=True)


def test_a_shipped_workload_leaves_no_private_path_in_the_manifest():
    workload = load_workload(REPOSITORY / "workloads" / "sonnet.yaml", profile="cpu")
    assert workload.resolved["load"]["prompts"]["file"] == "workloads/text/sonnets.txt"
    assert str(REPOSITORY) not in json.dumps(workload.resolved)
    assert Path(workload.load.prompts.file) == REPOSITORY / "workloads" / "text" / "sonnets.txt"


def test_a_model_folder_and_a_tokenizer_are_found_again(begun, tmp_path, monkeypatch):
    there = tmp_path / "there"
    (there / "model").mkdir()
    (there / "words").mkdir()
    data = WORKLOAD | {"model": {"path": "model", "tokenizer": "words"}}
    (there / "own.yaml").write_text(yaml.safe_dump(data))
    workload = load_workload("own.yaml", profile="cpu")
    monkeypatch.chdir(tmp_path)
    stored = resolve(json.loads(json.dumps(workload.resolved)), profile="cpu", source=None)
    assert stored.engine["model"] == str(there / "model") and stored.engine["tokenizer"] == str(there / "words")
    assert differing_keys(stored.resolved, workload.resolved) == []


def test_the_manifest_names_the_device_that_the_servers_found():
    manifest = build_manifest(
        workload={"name": "w", "model": {}}, workload_file=None, profile="gpu", seed=0, plan=[], extra={}
    )
    assert manifest["device"] is None  # not a guess from the profile
    add_server(manifest, "a", told())
    assert manifest["device"] == environment()["cpu"]["model"]
    assert (manifest["dtype"], manifest["kernel_backend"], manifest["num_threads"]) == ("float32", "numba", None)
    on_gpu = told(device="cuda")
    on_gpu["resolved"] |= {"device_name": "NVIDIA H100", "kernel_backend": "triton", "num_threads": 2}
    add_server(manifest, "b", on_gpu)
    assert manifest["device"].endswith(", NVIDIA H100") and manifest["kernel_backend"] == "numba, triton"
    add_server(manifest, "b", told())  # the first one of a configuration stays
    assert manifest["servers"]["b"] == on_gpu
    remote = {"cpu": {"model": "here"}, "shared_machine": False}
    add_server(remote, "target", told())
    assert remote["device"] == "cpu"
    silent = {"cpu": {"model": "here"}, "shared_machine": True}
    add_server(silent, "target", {})
    assert silent["device"] is None
