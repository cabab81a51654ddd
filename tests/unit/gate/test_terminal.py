"""The verdict on a terminal: first line, worst first, commands whole, plain where nobody can see colours."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from kvbench.gate.terminal import print_verdict
from kvbench.gate.verdict import FAIL, PASS, Finding, Verdict
from kvbench.gate.wording import LABELS
from tests.support import verdicts


def printed(verdict: Verdict, width: int = 80, **options: object) -> str:
    file = io.StringIO()
    print_verdict(verdict, Console(file=file, width=width, **options))  # type: ignore[arg-type]
    return file.getvalue()


@pytest.mark.parametrize("name", verdicts.EVERY)
@pytest.mark.parametrize("width", [80, 200])
def test_the_verdict_comes_first_and_lines_keep_the_width(name: str, width: int) -> None:
    verdict = verdicts.EVERY[name]()
    text = printed(verdict, width)
    assert text.startswith(LABELS[verdict.outcome] + "  ")
    assert "\x1b" not in text  # no terminal, no colours
    commands = verdict.reproduce + (verdict.accept or "")
    too_long = [line for line in text.splitlines() if len(line) > width and line.split(": ")[-1] not in commands]
    assert not too_long or name == "hostile"


def test_the_command_is_one_line_however_long_it_is() -> None:
    assert "\nreproduce: " + verdicts.failed().reproduce + "\n" in printed(verdicts.failed(), 40)


def test_at_most_twenty_rows_worst_first_and_the_rest_counted() -> None:
    findings = (*(verdicts.timing(f"p{i}", PASS) for i in range(30)), verdicts.timing("bad", FAIL, 0.1))
    text = printed(Verdict("compare", FAIL, "s", findings))
    rows = re.findall(r"^ (FAIL|PASS) ", text, re.MULTILINE)
    assert rows == ["FAIL"] + ["PASS"] * 19
    assert "… and 11 more passed" in text


def test_passes_without_numbers_are_only_counted() -> None:
    same = (Finding(f"p{i}", "counters", f"p{i}", PASS, "same") for i in range(30))
    findings = (Finding("a", "counters", "a", FAIL, "s", base=3.0, candidate=4.0), *same)
    text = printed(Verdict("counters", FAIL, "s", findings))
    assert re.findall(r"^ (FAIL|PASS) ", text, re.MULTILINE) == ["FAIL"]
    assert "… and 30 more passed" in text


def test_what_moved_and_why_are_said() -> None:
    text = printed(verdicts.failed(), 120)
    assert text.index("decode time a step") < text.index("prefill time a step")
    assert re.search(r"decode time a step \(ms\).*12 +14\.0 +\+17\.0 % \[\+16\.0, \+18\.0\] +91\.0 %", text)
    counters = printed(verdicts.counters(), 120)
    assert "- 1 more preemption than locked" in counters and "    step 118: preempted [] -> [7]" in counters


def test_markup_of_others_is_shown_and_not_obeyed() -> None:
    finding = Finding("a", "cell", "[red]x[/red] :boom:", FAIL, "[bold]s[/bold] \x1b[31m\x07")
    text = printed(Verdict("compare", FAIL, "[link=x]v[/link]", (finding,), reproduce="k '[a]'"), force_terminal=True)
    for shown in ("[red]x[/red] :boom:", "[bold]s[/bold]", "[link=x]v[/link]", "k '[a]'"):
        assert shown in text
    assert "\x07" not in text and "\x1b[31m\x07" not in text


def test_colours_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[1;31mFAIL" in printed(verdicts.failed(), force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3\d", printed(verdicts.failed(), force_terminal=True))
