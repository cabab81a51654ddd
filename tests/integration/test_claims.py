"""``kvbench claims`` for real: a claim is measured and judged, however little time it has."""

from __future__ import annotations

import json

import pytest

from kvbench.cli import main as cli

pytestmark = pytest.mark.full


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["claims", *map(str, arguments)])
    return ended.value.code


def test_a_claim_is_measured_and_shown(tmp_path):
    assert run("--only", "reservation", "--output-dir", tmp_path) == 0
    (folder,) = (tmp_path / "claims").iterdir()
    found = json.loads((folder / "claims.json").read_text())
    (claim,) = found["claims"]
    assert (claim["name"], claim["verdict"]) == ("reservation", "held")
    assert claim["measured"]["reservation"] in (1, 2)  # launches: two where the machine has two cores
    assert found["finished"]
    assert claim["evidence"] in (folder / "report.md").read_text()
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_a_claim_without_time_is_launched_and_says_why_if_that_decides_nothing(tmp_path):
    code = run("--only", "single-user", "--minutes", "0.01", "--output-dir", tmp_path)
    (folder,) = (tmp_path / "claims").iterdir()
    (claim,) = json.loads((folder / "claims.json").read_text())["claims"]
    assert claim["measured"]["single-user"] >= 1
    assert code == (3 if claim["verdict"] == "undecided" else 0)
    assert bool(claim["reason"]) == (code == 3)


def test_a_claim_that_is_not_known_exits_2(tmp_path, capsys):
    assert run("--only", "page-17", "--output-dir", tmp_path) == 2
    assert "page-16" in capsys.readouterr().err
    assert not (tmp_path / "claims").exists()
