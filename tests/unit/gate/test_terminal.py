"""The verdict on a terminal: first line, worst first, commands whole, plain where nobody can see colours."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console

from kvbench.gate.verdict.terminal import print_verdict
from kvbench.gate.verdict.verdict import FAIL, PASS, Finding, Verdict
from kvbench.gate.verdict.wording import LABELS
from tests.support import verdicts


def printed(verdict: Verdict, width: int = 80, **options: object) -> str:
    file = io.StringIO()
    print_verdict(verdict, Console(file=file, width=width, **options))  # type: ignore[arg-type]
    return file.getvalue()


@pytest.mark.parametrize("name", verdicts.EVERY)
def test_the_verdict_comes_first_and_lines_keep_the_width(name: str) -> None:
    verdict = verdicts.EVERY[name]()
    text = printed(verdict, 80)
    assert text.startswith(LABELS[verdict.outcome] + "  ")
    assert "\x1b" not in text  # no terminal, no colours
    commands = verdict.reproduce + (verdict.accept or "")
    too_long = [line for line in text.splitlines() if len(line) > 80 and line.split(": ")[-1] not in commands]
    assert not too_long or name == "hostile"


def test_a_command_is_one_line_however_long_it_is() -> None:
    assert "\nreproduce: " + verdicts.failed().reproduce + "\n" in printed(verdicts.failed(), 40)
    way = "go on with: kvbench compare --resume results/compare/20260101T000000Z-1a2b3c4 --max-minutes 10"
    assert f"\nnote: {way}\n" in printed(dataclasses.replace(verdicts.failed(), notes=(way,)), 40)


@pytest.mark.parametrize(("with_numbers", "rows"), [(True, ["FAIL"] + ["PASS"] * 19), (False, ["FAIL"])])
def test_at_most_twenty_rows_worst_first_and_the_rest_counted(with_numbers: bool, rows: list[str]) -> None:
    passed = (
        verdicts.timing(f"p{i}", PASS) if with_numbers else Finding(f"p{i}", "counters", f"p{i}", PASS, "same")
        for i in range(30)
    )
    text = printed(Verdict("compare", FAIL, "s", (*passed, verdicts.timing("bad", FAIL, 0.1))))
    assert re.findall(r"^ (FAIL|PASS) ", text, re.MULTILINE) == rows
    assert f"{31 - len(rows)} more passed" in text


def test_numbers_reasons_and_what_moved() -> None:
    text = printed(verdicts.failed(), 120)
    assert re.search(r"p95_itl_ms, overall +20 +22\.0 +\+10\.1 % +\[\+9\.20, \+11\.0\]", text)
    assert re.search(r"decode time a step \(ms\) +\S+ +12 +14\.0 +\+17\.0 % +91\.0 %", text)
    assert text.index("decode time a step") < text.index("prefill time a step")
    counters = printed(verdicts.counters(), 120)
    assert "- 1 more preemption than locked" in counters and "    step 118: preempted [] -> [7]" in counters


def test_the_verdicts_sentence_is_not_repeated() -> None:
    finding = verdicts.timing("mixed/a", FAIL, 0.1, suite="cell")
    for sentence in (finding.sentence, "slower"):
        assert printed(Verdict("compare", FAIL, sentence, (finding,))).count("changed by") == 1
    with_details = dataclasses.replace(finding, details=("pair 3 was the worst",))
    text = printed(Verdict("compare", FAIL, f"{finding.sentence} 2 of 9 fail.", (with_details,)))
    assert text.count("changed by") == 1 and "- p95_itl_ms, mixed/a\n    pair 3 was the worst\n" in text


def test_colours_only_where_they_are_wanted_and_markup_of_others_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding("a", "cell", "[red]x[/red] :boom:", FAIL, "[bold]s[/bold] \x1b[31m\x07")
    verdict = Verdict("compare", FAIL, "[link=x]v[/link]", (finding,), reproduce="k '[a]'")
    text = printed(verdict, force_terminal=True, color_system="standard")
    for shown in ("\x1b[1;31mFAIL", "[red]x[/red] :boom:", "[bold]s[/bold]", "[link=x]v[/link]", "k '[a]'"):
        assert shown in text
    assert "\x07" not in text and "\x1b[31m\x07" not in text
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3\d", printed(verdicts.failed(), force_terminal=True))
