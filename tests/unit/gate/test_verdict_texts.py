"""What people read of a verdict: numbers in words, summary.md, the terminal, and what GitHub is told."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from kvbench.gate.verdict import wording
from kvbench.gate.verdict.markdown import SUMMARY_BYTES, escape, first_line, summary
from kvbench.gate.verdict.outputs import annotations, publish
from kvbench.gate.verdict.terminal import print_verdict
from kvbench.gate.verdict.verdict import FAIL, INCONCLUSIVE, PASS, Finding, Verdict
from tests.support import verdicts

WRITTEN = {
    wording.number: [
        (0, "0"), (3.0, "3"), (1234567.0, "1,234,567"), (12.345, "12.3"), (9.996, "10.0"), (99.96, "100"),
        (0.5, "0.500"), (0.00123, "0.00123"), (0.000012345, "1.23e-05"), (-7.126, "-7.13"), (2.5e20, "2.50e+20"),
        (None, "–"), (math.nan, "–"), (math.inf, "–"),
    ],
    wording.percent: [
        (0.1012, "+10.1 %"), (-0.0925, "-9.25 %"), (-0.00004, "0.00 %"), (1.5, "+150 %"), (0.9996, "+100 %"),
        (0.09996, "+10.0 %"), (12.5, "+1,250 %"), (None, "–"), (math.nan, "–"),
    ],
    wording.probability: [(0.00390625, "0.0039"), (1.0, "1"), (0.00001, "< 0.0001"), (None, "–")],
    lambda pair: wording.quantity(*pair): [
        ((12.34, "ms"), "12.3 ms"), ((2 * 2**30, "bytes"), "2 GiB"), ((3.0, None), "3"), ((None, "ms"), "–"),
        ((3, "count"), "3"), ((0.25, "share"), "25 %"),
    ],
    lambda value: wording.percent(value, signed=False): [(0.93, "93.0 %")],
    lambda pair: wording.fact(*pair): [  # a seed is written as it is pasted
        ((1905392412, "order_seed"), "1905392412"), ((1905392412, "steps"), "1,905,392,412"),
        (({"seed": 12345, "steps": 12345}, ""), "seed 12345, steps 12,345"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("write", WRITTEN)
def test_numbers_as_people_read_them(write):
    assert [write(value) for value, _ in WRITTEN[write]] == [words for _, words in WRITTEN[write]]


@settings(max_examples=50)
@given(st.floats(-1e300, 1e300), st.text(max_size=100), st.integers(5, 60))
def test_a_number_keeps_three_figures_and_a_line_and_a_name_keep_their_limit(value, text, limit):
    assert float(wording.number(value).replace(",", "")) == pytest.approx(value, rel=5.1e-3, abs=0)
    flat, cut, short = wording.line(text), wording.line(text, limit), wording.shortened(text, limit)
    assert len(cut) <= limit and len(short) <= limit and cut.splitlines() in ([cut], [])
    if len(flat) <= limit:
        assert short == flat == cut
    else:
        assert flat.endswith(short[-2:]) and flat.startswith(cut.removesuffix(" …"))


def test_clean_keeps_what_can_be_read_and_sides_are_named_once():
    for base, words in (
        ({"name": "main", "sha": "0123456789abcdef"}, "base main (0123456789ab)"),
        ({"name": "HEAD (0123456)", "sha": "0123456789abcdef"}, "base HEAD (0123456)"),
        ({"command": "x"}, ""),
    ):
        assert wording.sides(Verdict("compare", PASS, "s", base=base, candidate={"command": "x"})) == words
    assert wording.clean("a\r\nb\rc\td é 🚀") == "a\nb\nc\td é 🚀"
    assert wording.clean("\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x07link \x00\x7f\x85\ud800\uffff.") == "red link ."


def test_the_worst_comes_first_and_where_no_direction_is_better_the_greater_change():
    kwargs = {"metric": "output_throughput", "unit": "tokens/s", "higher": True}
    less, more = (verdicts.timing("a", FAIL, change, **kwargs) for change in (-0.05, 0.5))
    assert wording.worst_first([more, less]) == [less, more]
    up, down, small = (Finding(str(x), "counters", "t", FAIL, "s", change=x) for x in (0.3, -0.9, 0.1))
    fine = Finding("a", "counters", "t", PASS, "s", change=5.0)
    assert wording.worst_first([fine, small, up, down]) == [down, up, small, fine]


def printed(verdict: Verdict, width: int = 80, **options: object) -> str:
    file = io.StringIO()
    print_verdict(verdict, Console(file=file, width=width, **options))  # type: ignore[arg-type]
    return file.getvalue()


@pytest.mark.parametrize("name", verdicts.EVERY)
def test_the_verdict_comes_first_tables_are_rectangular_and_lines_keep_the_width(name):
    verdict = verdicts.EVERY[name]()
    label = wording.LABELS[verdict.outcome]
    lines = summary(verdict).split("\n")
    assert lines[0] == first_line(verdict) and lines[0].startswith(f"**{label}** - ")
    widths: list[int] = []
    for row in lines:
        widths = [*widths, len(re.split(r"(?<!\\)\|", row))] if row.startswith("|") else []
        assert len(set(widths)) <= 1
    text = printed(verdict)
    assert text.startswith(label + "  ") and "\x1b" not in text  # no terminal, no colours
    commands = verdict.reproduce + (verdict.accept or "")
    too_long = [line for line in text.splitlines() if len(line) > 80 and line.split(": ")[-1] not in commands]
    assert not too_long or name == "hostile"


def test_a_failure_shows_tables_what_moved_and_how_to_reproduce_it():
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
    shown = printed(verdict, 120)
    assert re.search(r"p95_itl_ms, overall +20 +22\.0 +\+10\.1 % +\[\+9\.20, \+11\.0\]", shown)
    assert re.search(r"decode time a step \(ms\) +\S+ +12 +14\.0 +\+17\.0 % +91\.0 %", shown)
    assert shown.index("decode time a step") < shown.index("prefill time a step")


RATIO = Finding("b", "limit", "ratio", FAIL, "s", candidate=0.8, figures={"min_ratio": 0.9})


@pytest.mark.parametrize(
    ("verdict", "there"),
    [
        (verdicts.counters(), '```sh\nkvbench accept counters --reason "..."\n```'),
        (verdicts.counters(), "| preemptions of paged-p8 |"),  # a pass without numbers is named
        (verdicts.empty(), "not a pass"),
        (verdicts.invalid(), "### Invalid (1)\n\n- the load was not driven: 12 % late\n"),  # no row without numbers
        (verdicts.invalid(), "| peak memory | 1,024 MiB | &lt;= 2,048 MiB |"),
        (Verdict("limits", FAIL, "s", (RATIO,)), "| ratio | 0.800 | &gt;= 0.900 |"),
        (Verdict("compare", PASS, "s", facts={"order_seed": 1905392412}), "| order seed | 1905392412 |"),
    ],
)
def test_what_each_kind_of_verdict_shows(verdict, there):
    assert there in summary(verdict)


@pytest.mark.parametrize("room", [100_000, 20_000, 500, 100])
def test_a_summary_that_is_too_long_loses_its_tables_and_says_so(room):
    text = summary(verdicts.huge(500), room)
    assert len(text.encode()) <= room
    assert text.split("\n")[0] == "**FAIL** - all is slower"
    assert ("verdict.json and junit.xml have all" in text) is (room > 100)
    if room >= 20_000:
        assert "kvbench compare a b" in text  # the command stays when the tables go
    rockets = tuple(Finding(f"a{i}", "cell", "🚀" * 100, PASS, "s") for i in range(200))  # four bytes a character
    assert len(summary(Verdict("compare", PASS, "fine", rockets), room).encode()) <= room
    assert summary(verdicts.failed(), 20) == ""


def test_text_of_others_cannot_break_the_markdown():
    text = summary(verdicts.hostile())
    outside = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)  # code blocks show all as it is
    assert "<b>" not in outside
    for row in (line for line in outside.split("\n") if line.startswith("|")):
        cells = re.split(r"(?<!\\)\|", row)
        assert len(cells) >= 4 and "" in (cells[0], cells[-1])
    assert all(line.startswith("### ") for line in outside.split("\n") if line.startswith("#"))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe]", text)
    assert escape("a|b <i>*x*</i>\n_y_ & [z](u)") == r"a\|b &lt;i&gt;\*x\*&lt;/i&gt; \_y\_ &amp; \[z\](u)"


def test_details_are_shown_of_the_worst_and_cut():
    lines = tuple(f"line {i}" for i in range(20))
    findings = tuple(
        Finding(f"a{i}", "counters", f"a{i}", FAIL, f"s{i}", change=1 / (i + 1), details=lines) for i in range(6)
    )
    text = summary(Verdict("counters", FAIL, "s", findings))
    assert text.count("  - line 0\n") == 3 and "line 8" not in text and text.count("12 more lines") == 3
    assert all(f"- s{i}\n" in text for i in range(6))


def test_a_command_is_one_line_however_long_it_is():
    way = "go on with: kvbench compare --resume results/compare/20260101T000000Z-1a2b3c4 --max-minutes 10"
    text = printed(dataclasses.replace(verdicts.failed(), notes=(way,)), 40)
    assert f"\nreproduce: {verdicts.failed().reproduce}\n" in text and f"\nnote: {way}\n" in text


@pytest.mark.parametrize(("with_numbers", "rows"), [(True, ["FAIL"] + ["PASS"] * 19), (False, ["FAIL"])])
def test_at_most_twenty_rows_worst_first_and_the_rest_counted(with_numbers, rows):
    passed = (
        verdicts.timing(f"p{i}", PASS) if with_numbers else Finding(f"p{i}", "counters", f"p{i}", PASS, "same")
        for i in range(30)
    )
    text = printed(Verdict("compare", FAIL, "s", (*passed, verdicts.timing("bad", FAIL, 0.1))))
    assert re.findall(r"^ (FAIL|PASS) ", text, re.MULTILINE) == rows
    assert f"{31 - len(rows)} more passed" in text


def test_details_stand_below_their_finding_and_the_verdicts_sentence_is_not_repeated():
    counters = printed(verdicts.counters(), 120)
    assert "- 1 more preemption than locked" in counters and "    step 118: preempted [] -> [7]" in counters
    finding = verdicts.timing("mixed/a", FAIL, 0.1, suite="cell")
    for sentence in (finding.sentence, "slower"):
        assert printed(Verdict("compare", FAIL, sentence, (finding,))).count("changed by") == 1
    with_details = dataclasses.replace(finding, details=("pair 3 was the worst",))
    text = printed(Verdict("compare", FAIL, f"{finding.sentence} 2 of 9 fail.", (with_details,)))
    assert text.count("changed by") == 1 and "- p95_itl_ms, mixed/a\n    pair 3 was the worst\n" in text


def test_colours_only_where_they_are_wanted_and_markup_of_others_as_text(monkeypatch):
    finding = Finding("a", "cell", "[red]x[/red] :boom:", FAIL, "[bold]s[/bold] \x1b[31m\x07")
    verdict = Verdict("compare", FAIL, "[link=x]v[/link]", (finding,), reproduce="k '[a]'")
    text = printed(verdict, force_terminal=True, color_system="standard")
    for shown in ("\x1b[1;31mFAIL", "[red]x[/red] :boom:", "[bold]s[/bold]", "[link=x]v[/link]", "k '[a]'"):
        assert shown in text
    assert "\x07" not in text
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3\d", printed(verdicts.failed(), force_terminal=True))


COMMAND = re.compile(r"::(error|warning|notice) title=([^:,\r\n]+)::([^\r\n]+)")  # as actions/runner takes it apart


def unescaped(text: str) -> str:
    for code, mark in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, mark)
    return text


@pytest.mark.parametrize("name", [*verdicts.EVERY, "huge"])
def test_annotations_are_few_parse_and_name_the_worst_first(name):
    verdict = verdicts.huge(50) if name == "huge" else verdicts.EVERY[name]()
    commands = annotations(verdict, Path("results/x"))
    matches = list(map(COMMAND.fullmatch, commands))
    assert 1 <= len(commands) <= 5 and None not in matches
    levels = [match[1] for match in matches]
    assert levels == sorted(levels, key=["error", "warning", "notice"].index)
    assert levels[0] == {PASS: "notice", INCONCLUSIVE: "warning"}.get(verdict.outcome, "error")
    assert name == "hostile" or verdict.sentence in unescaped(commands[0])
    if name == "failed":
        cells = ("overall", "mixed/paged-p32-c8", "mixed/paged-p16-c8", "mixed/paged-p8-c8")
        titles = ["kvbench compare: FAIL", *(f"FAIL: p95_itl_ms, {cell}" for cell in cells)]
        assert [unescaped(match[2]) for match in matches] == titles


def test_publish_appends_the_summary_and_prints_annotations_in_github(tmp_path, capsys):
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


@pytest.mark.parametrize("used", [SUMMARY_BYTES - 2_000, SUMMARY_BYTES - 3, SUMMARY_BYTES])
def test_the_step_summary_stays_under_its_limit(used, tmp_path, capsys):
    path = tmp_path / "summary"
    path.write_text("x" * used)
    publish(verdicts.huge(200), tmp_path, {"GITHUB_STEP_SUMMARY": str(path)})
    assert path.stat().st_size < max(SUMMARY_BYTES, used + 1)
    no_room = used > SUMMARY_BYTES - 100
    assert ("**FAIL** - all is slower" in path.read_text()) is not no_room
    assert (str(path) in capsys.readouterr().err) is no_room
