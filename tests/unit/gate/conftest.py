"""``kvbench compare`` without servers: measuring is replaced, everything before and after it is real."""

from __future__ import annotations

import json

import pytest
import yaml

from kvbench.cli import main as cli
from kvbench.gate.compare import lanes
from kvbench.gate.compare import manifest as compare_manifest
from kvbench.gate.compare.run import Comparison
from tests.support.compare_folders import HERE, POLICY
from tests.support.sweep_parts import TINY


@pytest.fixture
def here(monkeypatch):
    """The machine and the code, to be changed."""
    now = json.loads(json.dumps(HERE))
    monkeypatch.setattr(compare_manifest, "environment", lambda: json.loads(json.dumps(now)))
    return now


@pytest.fixture
def compare(tmp_path, monkeypatch, capfd, here):
    """Runs the command: (exit code, its folder, stderr). Every Comparison that would have measured is in ``begun``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lanes.Lane, "warm", lambda self, folder, say: None)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    (tmp_path / "gates.yaml").write_text(POLICY)
    begun = []

    def interrupted(comparison):
        begun.append(comparison)
        comparison._write("incomplete")

    def run(*words, measure=interrupted):
        monkeypatch.setattr(Comparison, "execute", measure)
        known = set(tmp_path.glob("results/compare/*"))
        with pytest.raises(SystemExit) as left:
            cli.main(["compare", *words])
        new = set(tmp_path.glob("results/compare/*")) - known
        return left.value.code, new.pop() if new else None, capfd.readouterr().err

    run.begun = begun
    return run
