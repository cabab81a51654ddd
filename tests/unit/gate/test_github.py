"""The summary and the annotations of GitHub Actions: the verdict first, within GitHub's limits, nothing unescaped."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from kvbench.gate.verdict.github import annotations, escape_data, escape_property, publish
from kvbench.gate.verdict.summary import SUMMARY_BYTES, escape, fence, first_line, summary
from kvbench.gate.verdict.text import LABELS
from kvbench.gate.verdict.verdict import FAIL, INCONCLUSIVE, INVALID, PASS, Finding, Verdict
from tests.support import verdicts

COMMAND = re.compile(r"::(error|warning|notice) title=([^:,\r\n]+)::([^\r\n]+)")  # as actions/runner takes it apart


def unescaped(text: str) -> str:
    for code, mark in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, mark)
    return text


@pytest.mark.parametrize("name", verdicts.EVERY)
def test_the_first_line_is_the_verdict(name: str) -> None:
    verdict = verdicts.EVERY[name]()
    first = summary(verdict).split("\n")[0]
    assert first == first_line(verdict)
    assert first.startswith(f"**{LABELS[verdict.outcome]}** - ")


def test_a_failure_says_what_moved_shows_the_pairs_and_how_to_reproduce_it() -> None:
    verdict = verdicts.failed()
    text = summary(verdict)
    assert text.startswith(
        "**FAIL** - decode got 10.1 % slower: p95 ITL +10.1 % \\[9.2, 11.0\\] in every cell; 8 pairs\n"
    )
    order = ["### Failed (4)", "### Could not be told (1)", "### What moved with it", "### The pairs", "### Reproduce"]
    places = [text.index(title) for title in [*order, "<details><summary>3 passed</summary>"]]
    assert places == sorted(places)
    assert "| p95\\_itl\\_ms, overall | 20 ms | 22.0 ms | +10.1 % | [+9.20, +11.0] | 0.0039 | 2.00 % | 3.00 % |" in text
    moved = text.index(
        "| decode time a step | mixed/paged-p8-c8 | 12 ms | 14.0 ms | +17.0 % | [+16.0, +18.0] | 91.0 % |"
    )
    assert moved < text.index("| prefill time a step |")  # what explains most comes first
    assert f"```sh\n{verdict.reproduce}\n```" in text
    assert "the base was built with another compiler" in text
    assert text.count("p95_itl_ms, overall: FAIL") == 1


def test_what_failed_comes_by_width_then_by_size() -> None:
    text = summary(verdicts.failed())
    rows = re.findall(r"^\| p95\\_itl\\_ms, (\S+) \|", text, re.MULTILINE)
    assert rows == ["overall", "mixed/paged-p32-c8", "mixed/paged-p16-c8", "mixed/paged-p8-c8"]


def test_a_change_for_the_better_is_not_the_worst() -> None:
    lower, higher = (
        verdicts.timing(f"c{change}", FAIL, change, metric="output_throughput", unit="tokens/s", higher=True)
        for change in (-0.05, 0.5)
    )
    text = summary(Verdict("compare", FAIL, "s", (higher, lower)))
    assert text.index("c-0.05 |") < text.index("c0.5 |")


def test_the_first_line_is_not_said_again_below_a_table() -> None:
    finding = verdicts.timing("mixed/a", FAIL, 0.1, suite="cell")
    text = summary(Verdict("compare", FAIL, finding.sentence, (finding,)))
    assert "### Failed (1)" in text and "| p95\\_itl\\_ms, mixed/a |" in text and text.count("changed by") == 1
    unmeasured = Finding("a", "limit", "peak", INVALID, "peak of a: not measured")
    text = summary(Verdict("limits", INVALID, "1 of 1 limits: peak of a: not measured", (unmeasured,)))
    assert "- peak of a: not measured" in text  # no number, so no table: the sentence is all there is


def test_the_accept_command_is_shown_where_there_is_one() -> None:
    assert '```sh\nkvbench accept counters --reason "..."\n```' in summary(verdicts.counters())
    assert "### Accept" not in summary(verdicts.failed())


def test_an_empty_comparison_says_that_it_is_no_pass() -> None:
    assert "Nothing was compared, which is not a pass." in summary(verdicts.empty())


def test_limits_are_shown_with_their_units() -> None:
    finding = Finding("a", "limit", "peak", FAIL, "s", unit="bytes", candidate=3 * 2**30, figures={"max": 2 * 2**30})
    ratio = Finding("b", "limit", "ratio", FAIL, "s", candidate=0.8, figures={"min_ratio": 0.9})
    text = summary(Verdict("limits", FAIL, "s", (finding, ratio)))
    assert "| peak | 3 GiB | &lt;= 2 GiB |" in text
    assert "| ratio | 0.800 | &gt;= 0.900 |" in text


@pytest.mark.parametrize("room", [10**6, 100_000, 20_000, 5_000, 500, 100])
def test_a_summary_that_is_too_long_loses_its_tables_and_says_so(room: int) -> None:
    verdict = verdicts.huge()
    text = summary(verdict, room)
    assert len(text.encode()) <= room
    assert text.split("\n")[0] == "**FAIL** - all is slower"
    said = {100: "all is slower\n", 500: f"The rest was cut: a summary may have {room:,} bytes more"}
    assert said.get(room, "more that failed; verdict.json and junit.xml have all") in text
    if room >= 20_000:
        assert "kvbench compare a b" in text  # the command stays when the tables go
        assert "more that passed" in text and "more that moved" in text


def test_where_not_even_the_first_line_fits_there_is_nothing() -> None:
    assert summary(verdicts.failed(), 20) == ""


def test_text_of_others_cannot_break_the_markdown() -> None:
    text = summary(verdicts.hostile())
    outside = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)  # code blocks show all as it is
    assert "<b>" not in outside
    for row in (line for line in outside.split("\n") if line.startswith("|")):
        cells = re.split(r"(?<!\\)\|", row)
        assert len(cells) >= 4 and "" in (cells[0], cells[-1])
    heads = [line for line in outside.split("\n") if line.startswith("#")]
    assert all(head.startswith("### ") for head in heads)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe]", text)


def test_every_table_is_rectangular() -> None:
    for name, make in verdicts.EVERY.items():
        widths: list[int] = []
        for row in summary(make()).split("\n"):
            widths = [*widths, len(re.split(r"(?<!\\)\|", row))] if row.startswith("|") else []
            assert len(set(widths)) <= 1, name


def test_escape_and_fence() -> None:
    assert escape("a|b <i>*x*</i>\n_y_ & [z](u)") == r"a\|b &lt;i&gt;\*x\*&lt;/i&gt; \_y\_ &amp; \[z\](u)"
    assert fence(["a ``` b"], "sh") == ["````sh", "a ``` b", "````"]


def test_escapes_of_workflow_commands() -> None:
    assert escape_data("5 %: a,\r\nb") == "5 %25: a,%0D%0Ab"
    assert escape_property("5 %: a,\r\nb") == "5 %25%3A a%2C%0D%0Ab"


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


def test_publish_does_nothing_outside_of_github(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(verdicts.failed(), tmp_path, {})
    assert capsys.readouterr() == ("", "")


def test_publish_appends_the_summary_and_prints_annotations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "summary"
    path.write_text("before")
    verdict = verdicts.failed()
    publish(verdict, tmp_path, {"GITHUB_STEP_SUMMARY": str(path), "GITHUB_ACTIONS": "true"})
    assert path.read_text() == "before\n\n" + summary(verdict)
    printed = capsys.readouterr()
    assert printed.out.splitlines() == annotations(verdict, tmp_path) and printed.err == ""


@pytest.mark.parametrize("there", [0, SUMMARY_BYTES - 2_000, SUMMARY_BYTES - 200, SUMMARY_BYTES - 3, SUMMARY_BYTES])
def test_the_step_summary_stays_under_its_limit(there: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "summary"
    path.write_text("x" * there)
    publish(verdicts.huge(200), tmp_path, {"GITHUB_STEP_SUMMARY": str(path)})
    assert path.stat().st_size < max(SUMMARY_BYTES, there + 1)
    no_room = there > SUMMARY_BYTES - 100
    assert ("**FAIL** - all is slower" in path.read_text()) is not no_room
    assert ("no room for the verdict" in capsys.readouterr().err) is no_room


def test_a_summary_that_cannot_be_written_is_said_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(verdicts.failed(), tmp_path, {"GITHUB_STEP_SUMMARY": str(tmp_path), "GITHUB_ACTIONS": "true"})
    printed = capsys.readouterr()
    assert "warning: the step summary" in printed.err and "could not be written: Is a directory" in printed.err
    assert len(printed.out.splitlines()) == 5  # the annotations come all the same


def test_an_invalid_run_is_an_error_that_names_its_cause() -> None:
    verdict = dataclasses.replace(verdicts.passed(), outcome=INVALID, sentence="the machines differ: cores 2 and 8")
    assert annotations(verdict, Path("f")) == [
        "::error title=kvbench compare%3A INVALID::the machines differ: cores 2 and 8 (see f)"
    ]


def test_sentences_that_only_repeat_their_rows_are_left_out() -> None:
    text = summary(verdicts.failed())
    assert "- p95\\_itl\\_ms of overall changed" in text and "p95\\_itl\\_ms of mixed/paged-p32-c8 changed" not in text
    assert "- p95\\_ttft\\_ms of mixed/paged-p8-c8 changed" in text  # how many pairs it needs stands only here


def test_the_limit_is_in_bytes_of_utf8() -> None:
    findings = tuple(Finding(f"a{i}", "cell", "🚀" * 100, PASS, "s") for i in range(200))
    verdict = Verdict("compare", PASS, "fine", findings)
    text = summary(verdict)
    room = len(text) + 100  # enough for as many characters, not for their four bytes
    assert len(text.encode()) > room and len(summary(verdict, room).encode()) <= room


def test_findings_without_numbers_are_sentences_and_no_table() -> None:
    text = summary(verdicts.invalid())
    assert "### Invalid (1)\n\n- the load was not driven: 12 % late\n" in text
    assert "| peak memory | 1,024 MiB | &lt;= 2,048 MiB |" in text
    assert "| preemptions of paged-p8 |" in summary(verdicts.counters())  # a pass is named all the same


def test_details_are_shown_of_the_worst_and_cut_with_a_word() -> None:
    lines = tuple(f"line {i}" for i in range(20))
    findings = tuple(
        Finding(f"a{i}", "counters", f"a{i}", FAIL, f"s{i}", change=1 / (i + 1), details=lines) for i in range(6)
    )
    text = summary(Verdict("counters", FAIL, "s", findings))
    assert text.count("  - line 0\n") == 3 and "line 8" not in text
    assert text.count("  - … and 12 more lines; verdict.json and junit.xml have all.") == 3
    assert [f"- s{i}\n" in text for i in range(6)] == [True] * 6
