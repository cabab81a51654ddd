"""summary.md: the verdict first, within GitHub's limits, nothing unescaped."""

from __future__ import annotations

import re

import pytest

from kvbench.gate.verdict.markdown import escape, first_line, summary
from kvbench.gate.verdict.verdict import FAIL, INVALID, PASS, Finding, Verdict
from kvbench.gate.verdict.wording import LABELS
from tests.support import verdicts

RATIO = Finding("b", "limit", "ratio", FAIL, "s", candidate=0.8, figures={"min_ratio": 0.9})


@pytest.mark.parametrize("name", verdicts.EVERY)
def test_the_first_line_is_the_verdict_and_tables_are_rectangular(name: str) -> None:
    verdict = verdicts.EVERY[name]()
    lines = summary(verdict).split("\n")
    assert lines[0] == first_line(verdict) and lines[0].startswith(f"**{LABELS[verdict.outcome]}** - ")
    widths: list[int] = []
    for row in lines:
        widths = [*widths, len(re.split(r"(?<!\\)\|", row))] if row.startswith("|") else []
        assert len(set(widths)) <= 1


def test_a_failure_shows_tables_what_moved_the_pairs_and_how_to_reproduce_it() -> None:
    verdict = verdicts.failed()
    text = summary(verdict)
    order = ["### Failed (4)", "### Inconclusive (1)", "### What moved with it", "### Reproduce"]
    places = [text.index(title) for title in [*order, "<details><summary>3 passed</summary>"]]
    assert places == sorted(places)
    rows = {row.split(" | ")[0].removeprefix("| "): row.split(" | ")[1:] for row in text.split("\n")}
    assert rows["p95\\_itl\\_ms, overall"] == [
        "20 ms", "22.0 ms", "+10.1 %", "\\[+9.20, +11.0\\]", "0.0039", "2.00 %", "3.00 % |",
    ]  # fmt: skip
    assert rows["decode time a step"] == [
        "mixed/paged-p8-c8", "12 ms", "14.0 ms", "+17.0 %", "91.0 %", "\\[+16.0, +18.0\\] |",
    ]  # fmt: skip
    named = re.findall(r"^\| p95\\_itl\\_ms, (\S+) \|", text, re.MULTILINE)
    assert named == ["overall", "mixed/paged-p32-c8", "mixed/paged-p16-c8", "mixed/paged-p8-c8"]  # width, then size
    assert f"```sh\n{verdict.reproduce}\n```" in text and verdict.notes[0] in text
    assert "- p95\\_itl\\_ms of overall changed" in text  # the first; the other rows say the same as their sentences
    assert "p95\\_itl\\_ms of mixed/paged-p32-c8 changed" not in text
    assert "- p95\\_ttft\\_ms of mixed/paged-p8-c8 changed" in text  # how many pairs it needs is only here


def test_a_finding_without_numbers_is_a_sentence_instead_of_a_row() -> None:
    unmeasured = Finding("a", "limit", "peak", INVALID, "peak of a: not measured")
    text = summary(Verdict("limits", INVALID, "1 of 1 limits: peak of a: not measured", (unmeasured,)))
    assert "- peak of a: not measured" in text and "| peak |" not in text


@pytest.mark.parametrize(
    ("verdict", "there"),
    [
        (verdicts.counters(), '```sh\nkvbench accept counters --reason "..."\n```'),
        (verdicts.counters(), "| preemptions of paged-p8 |"),  # a pass without numbers is named
        (verdicts.empty(), "not a pass"),
        (verdicts.invalid(), "### Invalid (1)\n\n- the load was not driven: 12 % late\n"),
        (verdicts.invalid(), "| peak memory | 1,024 MiB | &lt;= 2,048 MiB |"),
        (Verdict("limits", FAIL, "s", (RATIO,)), "| ratio | 0.800 | &gt;= 0.900 |"),
        (Verdict("compare", PASS, "s", facts={"order_seed": 1905392412}), "| order seed | 1905392412 |"),
    ],
)  # fmt: skip
def test_what_each_kind_of_verdict_shows(verdict: Verdict, there: str) -> None:
    assert there in summary(verdict)


@pytest.mark.parametrize("room", [100_000, 20_000, 500, 100])
def test_a_summary_that_is_too_long_loses_its_tables_and_says_so(room: int) -> None:
    text = summary(verdicts.huge(500), room)
    assert len(text.encode()) <= room
    assert text.split("\n")[0] == "**FAIL** - all is slower"
    assert ("verdict.json and junit.xml have all" in text) is (room > 100)
    if room >= 20_000:
        assert "kvbench compare a b" in text  # the command stays when the tables go
    rockets = tuple(Finding(f"a{i}", "cell", "🚀" * 100, PASS, "s") for i in range(200))  # four bytes a character
    assert len(summary(Verdict("compare", PASS, "fine", rockets), room).encode()) <= room
    assert summary(verdicts.failed(), 20) == ""


def test_text_of_others_cannot_break_the_markdown() -> None:
    text = summary(verdicts.hostile())
    outside = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)  # code blocks show all as it is
    assert "<b>" not in outside
    for row in (line for line in outside.split("\n") if line.startswith("|")):
        cells = re.split(r"(?<!\\)\|", row)
        assert len(cells) >= 4 and "" in (cells[0], cells[-1])
    assert all(line.startswith("### ") for line in outside.split("\n") if line.startswith("#"))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe]", text)
    assert escape("a|b <i>*x*</i>\n_y_ & [z](u)") == r"a\|b &lt;i&gt;\*x\*&lt;/i&gt; \_y\_ &amp; \[z\](u)"


def test_details_are_shown_of_the_worst_and_cut() -> None:
    lines = tuple(f"line {i}" for i in range(20))
    findings = tuple(
        Finding(f"a{i}", "counters", f"a{i}", FAIL, f"s{i}", change=1 / (i + 1), details=lines) for i in range(6)
    )
    text = summary(Verdict("counters", FAIL, "s", findings))
    assert text.count("  - line 0\n") == 3 and "line 8" not in text
    assert text.count("12 more lines") == 3
    assert all(f"- s{i}\n" in text for i in range(6))
