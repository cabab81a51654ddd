"""Other projects beside ours: kernels and vLLM's job on stand-ins, and the scripts that bring and unpack them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from ci.gpu import peer_kernels, tables
from ci.gpu.part import PartReport, Report
from ci.gpu.parts import ENTRIES
from ci.gpu.peer_kernels import PEERS, PeerKernels
from ci.gpu.tables import OURS
from ci.gpu.vllm_job import VllmJob
from tests.support.git_repo import commit_all, make_repo

ROOT = Path(__file__).resolve().parents[3]
FAKES = ROOT / "tests/support/fake_peers"


@pytest.fixture
def args(tmp_path):
    return Namespace(device="cpu", scratch=tmp_path, tiny=True, facts=None, own=[])


@pytest.fixture
def fakes(monkeypatch):
    """The stand-ins can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(FAKES))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "flashinfer")]:
        del sys.modules[name]


def test_kernels_are_compared_and_timed_on_the_same_tensors(args, fakes, tmp_path):
    part, report = PeerKernels(args), PartReport(tmp_path / "part.json", 60.0)
    for case in part.plan():
        part.run(case.name, report)
    assert not report.data["failures"] and not report.data["skipped"]
    assert [row["kernel"] for row in report.data["rows"]] == [OURS, *PEERS] * 2
    for row in report.data["rows"]:
        assert len(row["us_rounds"]) == 3 and sorted(row["us_rounds"])[1] == row["us"] and not row["graph"]
        with_fp8_queries = "fp8" in row["case"] and "vLLM" in row["kernel"]
        assert (1e-3 < row["error"] < 0.1) if with_fp8_queries else row["error"] < 2e-5
    tables.peers(report, args)
    (table,) = report.data["tables"]
    assert [row[0] for row in table["rows"]] == [OURS, *PEERS] and len(table["columns"]) == 3
    assert all("(1.00; –, launched)" in cell for cell in table["rows"][0][1:])


def late(x):
    """Right at first, and ever after the answer of before."""
    runs = []
    step = peer_kernels.vllm_triton(x)
    return lambda: runs.append(0 if len(runs) > 3 else step())


@pytest.mark.parametrize(
    ("peer", "kind", "reason"),
    [
        (lambda x: lambda: x.out.zero_(), "failures", "1 from float64, limit 2e-05"),
        (lambda x: lambda: None, "failures", "inf from float64"),
        (late, "failures", "inf from float64"),
        (lambda x: 1 // 0, "skipped", "ZeroDivisionError"),
    ],
)
def test_a_wrong_or_missing_peer_costs_its_own_row(args, fakes, monkeypatch, peer, kind, reason):
    monkeypatch.setitem(PEERS, "theirs", peer)
    part, report = PeerKernels(args), Report(60.0)
    part.run(part.plan()[0].name, report)
    (trouble,) = report.data["failures"] + report.data["skipped"]
    assert trouble in report.data[kind] and reason in trouble["reason"] and trouble["what"].endswith(": theirs")
    assert [row["kernel"] for row in report.data["rows"]] == [OURS, *(name for name in PEERS if name != "theirs")]


def test_a_kernel_that_took_its_process_along_is_not_tried_again(args, fakes, monkeypatch):
    def loses_the_device(x):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(PEERS, "theirs", loses_the_device)
    part, report = PeerKernels(args), Report(60.0)
    plain, fp8 = (case.name for case in part.plan())
    with pytest.raises(RuntimeError):
        part.run(plain, report)
    part.run(plain, report)
    (skip,) = report.data["skipped"]
    assert "did not survive" in skip["reason"] and len(report.data["rows"]) == 1 + len(PEERS) - 1
    with pytest.raises(RuntimeError):  # with FP8 it may be another kernel
        part.run(fp8, report)


def test_ours_alone_is_no_comparison(tmp_path):
    report = PartReport(tmp_path / "part.json", 60.0)
    report.skip("decode: FlashInfer", "it is not here")
    report.row(case="decode", kernel=OURS, us=10.0, ratio=0.9, graph=True)
    tables.peers(report, None)
    assert "it is not here" in report.data["not_run"] and report.data["tables"][0]["rows"][0][0] == OURS


def test_vllm_is_loaded_once_and_asked_for_the_job_again(args, fakes):
    args.own = ["--pair", "peers"]  # the turns tell every side all they were told
    part, report = VllmJob(args), Report(60.0)
    assert [case.name for case in part.plan()] == ["load", "job"] and len({c.group for c in part.plan()}) == 1
    for name in ("job", "load", "job", "job"):
        part.run(name, report)
    assert [skip["what"] for skip in report.data["skipped"]] == ["job"]
    config = report.data["config"]
    assert config["attention_backend"] == "FLASH_ATTN" and config["max_num_batched_tokens"] == 16384
    for row in report.data["rows"]:
        assert row["complete"] and row["output_tokens"] == part._job.output_tokens
        assert row["output_tokens_per_s"] == pytest.approx(row["output_tokens"] / row["seconds"])
    assert len(report.data["rows"]) == 2


def test_without_vllm_nothing_is_loaded(args):
    report = Report(60.0)
    VllmJob(args).run("load", report)
    (failure,) = report.data["failures"]
    assert failure["what"] == "load" and "bring.sh peers" in failure["reason"]


@pytest.fixture
def repository(tmp_path):
    """A repository with the two scripts, and commands run in it."""
    files = {f"ci/gpu/{name}": (ROOT / "ci/gpu" / name).read_text() for name in ("bring.sh", "queue.sh")}
    files |= {"engine/file.py": "engine", "engine/parent.py": "", "kernels/file.py": "kernels"}
    files[".gitignore"] = "/.bring/\n"
    files["ci/gpu.sh"] = '#!/bin/sh\necho "$KVBENCH_PEERS|$*"\n'
    home = make_repo(tmp_path / "repository", files)
    (home / "ci/gpu.sh").chmod(0o755)
    return home


def run(home: Path, script: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(home / "ci/gpu" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **more})


def test_bad_input_is_one_sentence_and_loses_nothing(repository):
    (repository / ".bring").mkdir()
    for arguments in ((), ("no-entry",), ("before-after",), ("before-after", "no-commit"), ("long", "x")):
        done = run(repository, "bring.sh", *arguments)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and (repository / ".bring").is_dir()


def test_an_earlier_commit_is_brought_alone_and_only_if_it_can_travel(repository):
    (repository / ".bring/wheels").mkdir(parents=True)
    (repository / "engine/file.py").write_text("changed")
    done = run(repository, "bring.sh", "before-after", "HEAD")
    assert done.returncode == 0, done.stderr
    before = repository / ".bring/before"
    assert sorted(path.name for path in repository.joinpath(".bring").iterdir()) == ["before"]
    assert sorted(path.name for path in before.iterdir()) == ["COMMIT", "engine", "kernels"]
    assert (before / "engine/file.py").read_text() == "engine" and len((before / "COMMIT").read_text()) == 41
    (repository / "engine/parent.py").unlink()
    commit_all(repository, "older")
    done = run(repository, "bring.sh", "before-after", "HEAD")
    assert done.returncode == 2 and "too old" in done.stderr and before.is_dir()
    with (repository / "large").open("wb") as file:
        file.truncate(65 * 2**20)
    done = run(repository, "bring.sh", "before-after", "HEAD~1")
    assert done.returncode == 1 and "together 2 MiB more than the 64" in done.stderr


JOIN = 'mkdir -p "$2" && cp "$1/part1" "$2"\n'


@pytest.mark.parametrize(("join", "trouble"), [(JOIN, ""), ("exit 1\n", "vLLM could not be unpacked")])
def test_the_queue_uses_what_was_brought(repository, tmp_path, join, trouble):
    peers = repository / ".bring/peers"
    peers.mkdir(parents=True)
    (peers / "join_peers.sh").write_text(join)
    (peers / "part1").write_text("vllm")
    (peers / "SHA256SUMS").write_text(join)
    compiled = tmp_path / "packed/flashinfer/data/aot"
    compiled.mkdir(parents=True)
    packing = ["tar", "-C", str(tmp_path / "packed"), "-cJf", str(peers / "flashinfer.tar.xz"), "flashinfer"]
    subprocess.run(packing, check=True)
    done = run(repository, "queue.sh", "peers", "out", "--quick", TMPDIR=str(tmp_path))
    folders, _, told = done.stdout.strip().partition("|")
    assert done.returncode == 0 and told == "out --entry peers --quick" and trouble in done.stderr
    site, flashinfer = map(Path, folders.split(":"))
    assert (site / "part1").is_file() is not bool(trouble) and (flashinfer / "flashinfer/data/aot").is_dir()
    compiled.rmdir()
    subprocess.run(packing, check=True)
    shutil.rmtree(site.parent)
    assert site.parent.parent == tmp_path and sorted(path.name for path in peers.parent.iterdir()) == ["peers"]
    done = run(repository, "queue.sh", "peers", "out", TMPDIR=str(tmp_path))
    assert done.stdout.startswith(f"{site}|") and "not compiled" in done.stderr
    (repository / ".bring/wheels").mkdir()
    done = run(repository, "queue.sh", "peers", "out", "--device", "cpu", "--tiny")
    assert done.stdout.startswith(
        f"{repository}/tests/support/fake_peers|out --entry peers --wheels {repository}/.bring"
    )
    assert run(repository, "queue.sh", "peers").returncode == 2
    helped = run(repository, "queue.sh", "--help")
    assert helped.returncode == 0 and all(name in helped.stdout for name in ENTRIES)
