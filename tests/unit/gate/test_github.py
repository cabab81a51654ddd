"""The step summary and the annotations of GitHub Actions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvbench.gate.verdict.markdown import SUMMARY_BYTES, summary
from kvbench.gate.verdict.outputs import annotations, publish
from kvbench.gate.verdict.verdict import INCONCLUSIVE, PASS
from tests.support import verdicts

COMMAND = re.compile(r"::(error|warning|notice) title=([^:,\r\n]+)::([^\r\n]+)")  # as actions/runner takes it apart


def unescaped(text: str) -> str:
    for code, mark in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, mark)
    return text


@pytest.mark.parametrize("name", [*verdicts.EVERY, "huge"])
def test_annotations_are_few_and_parse(name: str) -> None:
    verdict = verdicts.huge(50) if name == "huge" else verdicts.EVERY[name]()
    commands = annotations(verdict, Path("results/x"))
    assert 1 <= len(commands) <= 5
    levels = [match[1] for match in map(COMMAND.fullmatch, commands) if match]
    assert len(levels) == len(commands)
    rank = ["error", "warning", "notice"]
    assert levels == sorted(levels, key=rank.index)
    assert levels[0] == {PASS: "notice", INCONCLUSIVE: "warning"}.get(verdict.outcome, "error")
    if name != "hostile":
        assert verdict.sentence in unescaped(commands[0])


def test_annotations_name_the_worst_first() -> None:
    titles = [unescaped(match[2]) for match in map(COMMAND.match, annotations(verdicts.failed(), Path("x"))) if match]
    cells = ("overall", "mixed/paged-p32-c8", "mixed/paged-p16-c8", "mixed/paged-p8-c8")
    assert titles == ["kvbench compare: FAIL", *(f"FAIL: p95_itl_ms, {cell}" for cell in cells)]


def test_publish_appends_the_summary_and_prints_annotations_in_github(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = verdicts.failed()
    publish(verdict, tmp_path, {})
    assert capsys.readouterr() == ("", "")  # outside of GitHub
    path = tmp_path / "summary"
    path.write_text("before")
    publish(verdict, tmp_path, {"GITHUB_STEP_SUMMARY": str(path), "GITHUB_ACTIONS": "true"})
    assert path.read_text() == "before\n\n" + summary(verdict)
    printed = capsys.readouterr()
    assert printed.out.splitlines() == annotations(verdict, tmp_path) and printed.err == ""
    publish(verdict, tmp_path, {"GITHUB_STEP_SUMMARY": str(tmp_path), "GITHUB_ACTIONS": "true"})
    printed = capsys.readouterr()  # a summary that cannot be written changes nothing
    assert "Is a directory" in printed.err and len(printed.out.splitlines()) == 5


@pytest.mark.parametrize("used", [0, SUMMARY_BYTES - 2_000, SUMMARY_BYTES - 3, SUMMARY_BYTES])
def test_the_step_summary_stays_under_its_limit(used: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "summary"
    path.write_text("x" * used)
    publish(verdicts.huge(200), tmp_path, {"GITHUB_STEP_SUMMARY": str(path)})
    assert path.stat().st_size < max(SUMMARY_BYTES, used + 1)
    no_room = used > SUMMARY_BYTES - 100
    assert ("**FAIL** - all is slower" in path.read_text()) is not no_room
    assert (str(path) in capsys.readouterr().err) is no_room
