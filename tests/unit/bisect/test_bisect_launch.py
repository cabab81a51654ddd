"""Searches whose commits are built and launched: a start that fails, answers that changed; versions of a package."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import yaml

from kvbench.bisect import history
from kvbench.cli import main as cli
from kvbench.common.files import read_json
from tests.support.git_repo import FAKE_SERVER, commit_all, git, make_tiny_kvbench
from tests.support.sweep_parts import TINY

SERVER = "engine/server/__main__.py"


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A repository of a tiny engine; ``change`` commits its server with a text replaced."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    repo = make_tiny_kvbench(tmp_path / "repo")

    def change(subject, old="", new=""):
        path = repo / SERVER
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1) if old else path.read_text() + f"# {subject}\n")
        return commit_all(repo, subject)

    change.repo, change.good = repo, git(repo, "rev-parse", "HEAD")
    return change


def bisect(engine, capfd, *words, workload=True):
    files = ["--workload", "tiny.yaml", "--profile", "cpu", "--repo", str(engine.repo)] if workload else []
    with pytest.raises(SystemExit) as left:
        cli.main(["bisect", *map(str, words), *files])
    said = "".join(capfd.readouterr())
    assert left.value.code != 2, said
    (path,) = engine.repo.parent.glob("results/bisect/*/verdict.json")
    return left.value.code, read_json(path), said


def test_the_commit_whose_server_does_not_start_is_named(engine, capfd):
    engine("nothing")
    culprit = engine("break the start", "from __future__ import annotations\n", "raise SystemExit(3)\n")
    bad = engine("more")
    code, verdict, said = bisect(engine, capfd, engine.good, bad, "--by", "start", "--start-timeout", "20")
    assert code == 1, said
    assert verdict["findings"][0]["id"] == f"culprit/{culprit}"
    assert "starts -> does not start" in verdict["sentence"]


def test_the_commit_that_changed_the_answers_is_named(engine, capfd):
    engine("nothing")
    culprit = engine("answer otherwise", '"text": " x" * count', '"text": " y" * count')
    bad = engine("more")
    code, verdict, said = bisect(engine, capfd, engine.good, bad, "--by", "answers")
    assert code == 1, said
    assert verdict["findings"][0]["id"] == f"culprit/{culprit}" and "answer 1" in verdict["sentence"]


def test_a_kv_capacity_that_nobody_tells_is_no_search(engine, capfd):
    bad = engine("nothing")
    code, verdict, said = bisect(engine, capfd, engine.good, bad, "--by", "capacity")
    assert code == 4 and "capacity" in verdict["sentence"], said


@pytest.mark.full
def test_the_version_that_does_not_start_is_named(engine, capfd, tmp_path, monkeypatch):
    pip = tmp_path / "python"
    pip.write_text("#!/bin/sh\necho 'Available versions: 1.3, 1.2, 1.1, 1.0'\n")
    pip.chmod(0o755)
    monkeypatch.setattr(history, "sys", SimpleNamespace(executable=str(pip)))
    serve = tmp_path / "serve.sh"  # version 1.2 lost its server
    serve.write_text(f'grep -q "==1.[01]$" "$1"/requirements.txt && exec {sys.executable} {FAKE_SERVER} --port "$2"\n')
    how = ["--package", "toy", "--build-cmd", "true", "--serve-cmd", f"sh {serve} {{worktree}} {{port}}"]
    words = ["1.0..1.3", *how, "--by", "start", "--workload", "tiny.yaml", "--profile", "cpu", "--start-timeout", "10"]
    code, verdict, said = bisect(engine, capfd, *words, "-o", "sweep={}", workload=False)
    assert code == 1, said
    assert "'toy 1.2' changed start starts -> does not start" in verdict["sentence"]
    with pytest.raises(SystemExit) as left:
        cli.main(["bisect", "1.0..1.3", "--package", "toy", "--by", "start", "--workload", "tiny.yaml"])
    assert left.value.code == 2 and "--target" in capfd.readouterr().err
