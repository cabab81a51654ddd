"""A run is resumed only under the conditions it was started with, from any working folder."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
import yaml

from kvbench.cli.sweep import workload_and_run
from kvbench.common.errors import UsageError
from kvbench.common.machine import environment
from kvbench.common.packages import REPOSITORY
from kvbench.common.records import write_record
from kvbench.runs import manifest as manifests
from kvbench.runs.folder import RunFolder
from kvbench.runs.manifest import (
    accept_server,
    environment_differences,
    new_manifest,
    reopen,
    require_same_workload,
    with_server,
)
from kvbench.runs.results import Environment, Manifest, MeasuredTarget
from kvbench.runs.server_info import ServerInfo
from kvbench.sweep.requests import SweepRequest
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


def changed(section, **values):
    return copy.deepcopy(NOW) | {section: NOW[section] | values}


DIRTY = changed("git", dirty=True)


@pytest.mark.parametrize(
    ("before", "told"),
    [
        (NOW, []),
        (changed("git", sha="b" * 40, short_sha="bbbbbbb"), ["commit (bbbbbbb then, aaaaaaa now)"]),
        (DIRTY, ["uncommitted changes (some then, none now)"]),
        (changed("versions", torch="2.12.0"), ["torch (2.12.0 then, 2.13.0 now)"]),
        (changed("versions", triton="3.9"), ["triton (3.9 then, none now)"]),
        (changed("cpu", model="Slow 2"), ["processor model (Slow 2 then, Fast 1 now)"]),
        (changed("cpu", cores=8), ["processor cores (8 then, 2 now)"]),
        (NOW | {"gpus": [GPU]}, ["GPUs (H100 with driver 570 then, none now)"]),
        (NOW | {"memory_bytes": 2**35}, []),  # a container's, which changes nothing measured
        ({"git": NOW["git"]}, []),  # what was not recorded is not compared
    ],
)
def test_what_differs_is_named(before, told):
    assert environment_differences(Environment(**before), Environment(**NOW)) == (told, [])


def test_what_changes_nothing_measured_is_at_most_remarked():
    idle, busy = (Environment(**NOW | {"gpus": [gpu]}) for gpu in (GPU | {"clocks.sm": "345 MHz"}, GPU))
    assert environment_differences(idle, busy) == ([], [])
    differences, (remark,) = environment_differences(Environment(**DIRTY), Environment(**DIRTY))
    assert differences == [] and "uncommitted changes" in remark


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A run folder of WORKLOAD in ``there``, started under NOW from that folder, with relative paths all over."""
    monkeypatch.setattr(manifests, "environment", lambda: copy.deepcopy(NOW))
    there = tmp_path / "there"
    there.mkdir()
    (there / "lines.txt").write_text("one\ntwo\n")
    (there / "tiny.yaml").write_text(yaml.safe_dump(WORKLOAD))
    monkeypatch.chdir(there)
    workload = load_workload("tiny.yaml", profile="cpu")
    run = RunFolder(there / "results" / "tiny" / "1")
    write_record(run.manifest_path, new_manifest(Manifest, workload, [], **SERVED | NOW))
    return workload, run


def reopened(run, served, *, force=False):
    return reopen(run.path, run.manifest(), MeasuredTarget(**served), force=force)


def test_the_same_conditions_are_recorded(begun):
    manifest, remarks = reopened(begun[1], SERVED)
    (entry,) = manifest.resumed
    assert remarks == [] and manifest.status == "incomplete"
    assert entry.versions == NOW["versions"] and entry.differences == () and not entry.forced


@pytest.mark.parametrize(
    ("served", "words"),
    [
        ({}, "torch (2.13.0 then, 2.14.0 now)"),
        ({"target": "http://127.0.0.1:8000"}, "target (none then, http://127.0.0.1:8000 now)"),
        ({"target_args": "--enforce-eager"}, "target_args (none then, --enforce-eager now)"),
        ({"target_python": "/other/python"}, "target_python (none then, /other/python now)"),
        ({"preset": "vllm"}, "preset (none then, vllm now)"),
        ({"exact": True}, "exact (none then, True now)"),
        ({"target_options": {"model": "other"}}, "model (none then, other now)"),
    ],
)
def test_other_conditions_are_refused_unless_forced_and_then_kept(begun, monkeypatch, served, words):
    _, run = begun
    torch = "2.13.0" if served else "2.14.0"
    monkeypatch.setattr(manifests, "environment", lambda: changed("versions", torch=torch))
    with pytest.raises(UsageError) as error:
        reopened(run, SERVED | served)
    assert all(part in str(error.value) for part in (str(run.path), words, "--resume", "--force"))
    manifest, (remark,) = reopened(run, SERVED | served, force=True)
    (entry,) = manifest.resumed
    assert words in remark and entry.forced and entry.differences == (words,)
    assert (entry.versions["torch"], manifest.versions["torch"]) == (torch, "2.13.0")  # both environments
    write_record(run.manifest_path, manifest)
    assert len(reopened(run, SERVED | served, force=True)[0].resumed) == 2


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
    manifest = Manifest(servers={"paged": told()}, resumed=[{"differences": []}])
    if found:
        with pytest.raises(UsageError) as error:
            accept_server(manifest, config_id, ServerInfo.read(server), force=False)
        assert found[0] in str(error.value) and "--force" in str(error.value)
    (entry,) = accept_server(manifest, config_id, ServerInfo.read(server), force=bool(found)).resumed
    assert list(entry.differences) == found and bool(entry.servers) == bool(found)


def test_a_run_goes_on_from_any_working_folder(begun, tmp_path, monkeypatch):
    workload, run = begun
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lines.txt").write_text("another text\n")  # must not be taken for the one that was measured
    monkeypatch.chdir(elsewhere)
    stored, found = workload_and_run(SweepRequest(resume=str(run.path)))
    assert stored.load.prompts.file == str(tmp_path / "there" / "lines.txt") == workload.load.prompts.file
    assert stored.engine == workload.engine
    manifest = found.manifest()
    require_same_workload(found.path, manifest, stored)
    reopened(found, SERVED)
    by_file = load_workload(os.path.relpath(tmp_path / "there" / "tiny.yaml"), profile="cpu")
    require_same_workload(found.path, manifest, by_file)
    other = load_workload(tmp_path / "there" / "tiny.yaml", profile="cpu", seed=7)
    with pytest.raises(UsageError, match=r"another workload; it differs in seed"):
        require_same_workload(found.path, manifest, other)


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
    here = environment()["cpu"]["model"]
    begun = Manifest(cpu={"model": here}, shared_machine=True, device=None)
    manifest = with_server(begun, "a", ServerInfo.read(told()))
    assert manifest.device == here
    assert (manifest.dtype, manifest.kernel_backend, manifest.num_threads) == ("float32", "numba", None)
    on_gpu = told(device="cuda")
    on_gpu["resolved"] |= {"device_name": "NVIDIA H100", "kernel_backend": "triton", "num_threads": 2}
    manifest = with_server(manifest, "b", ServerInfo.read(on_gpu))
    assert manifest.device.endswith(", NVIDIA H100") and manifest.kernel_backend == "numba, triton"
    manifest = with_server(manifest, "b", ServerInfo.read(told()))  # the first one of a configuration stays
    assert manifest.to_json()["servers"]["b"] == on_gpu
    remote = Manifest(cpu={"model": "here"}, shared_machine=False)
    assert with_server(remote, "target", ServerInfo.read(told())).device == "cpu"
    silent = Manifest(cpu={"model": "here"}, shared_machine=True)
    assert with_server(silent, "target", ServerInfo()).device is None
