"""The verdict on a terminal: first line, worst first, commands whole, plain where nobody can see colours."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console

from kvbench.gate.verdict.terminal import print_verdict
from kvbench.gate.verdict.text import LABELS
from kvbench.gate.verdict.verdict import FAIL, INCONCLUSIVE, PASS, Finding, Verdict
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
    way = "go on with: kvbench compare --resume results/compare/20260101T000000Z-1a2b3c4 --max-minutes 10"
    assert f"\nnote: {way}\n" in printed(dataclasses.replace(verdicts.failed(), notes=(way,)), 40)


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
    assert re.search(r"decode time a step \(ms\).*12 +14\.0 +\+17\.0 % +91\.0 %", text)
    counters = printed(verdicts.counters(), 120)
    assert "- 1 more preemption than locked" in counters and "    step 118: preempted [] -> [7]" in counters


def compared(places: tuple[str, ...]) -> list[str]:
    """The lines at 80 columns, as CI logs have, of a comparison in which throughput failed and p95 ITL is open."""
    numbers = {"base": 1234.5, "candidate": 1111.1, "change": -0.1, "interval": (-0.119, -0.081)}
    findings = [
        Finding(f"cell/{place}/{name}", "cell", f"{title} of {place}", outcome, "s", unit=unit, **numbers)
        for place in places
        for name, title, unit, outcome in (
            ("output_throughput", "output throughput", "tokens/s", FAIL),
            ("p95_itl_ms", "p95 ITL", "ms", INCONCLUSIVE),
        )
    ]
    return [line.strip() for line in printed(Verdict("compare", FAIL, "v", tuple(findings))).splitlines()]


def test_the_metrics_of_an_only_cell_stand_under_it() -> None:
    lines = compared(("steady-stream/paged-p16-c32",))
    start = lines.index("steady-stream/paged-p16-c32")
    assert lines[start + 1] == "FAIL      output throughput (tok/s) 1,234     1,111 -10.0 % [-11.9, -8.10]"
    assert lines[start + 2] == "unclear   p95 ITL (ms)              1,234     1,111 -10.0 % [-11.9, -8.10]"


def test_many_cells_stand_under_their_metric_failures_first() -> None:
    cells = [f"steady-stream/paged-p16-c{load}" for load in (1, 8, 32)]
    lines = compared(tuple(cells))
    start = lines.index("output throughput (tok/s)")
    assert lines[start + 4] == "p95 ITL (ms)"
    assert lines[start + 1] == "FAIL      steady-stream/paged-p16-c1  1,234     1,111 -10.0 % [-11.9, -8.10]"
    assert [line.split()[:2] for line in lines[start + 1 : start + 8] if line != "p95 ITL (ms)"] == [
        [label, cell] for label in ("FAIL", "unclear") for cell in cells
    ]


def test_what_the_first_line_says_is_not_said_again() -> None:
    finding = verdicts.timing("mixed/a", FAIL, 0.1, suite="cell")
    assert printed(Verdict("compare", FAIL, finding.sentence, (finding,))).count("changed by") == 1
    with_details = dataclasses.replace(finding, details=("pair 3 was the worst",))
    text = printed(Verdict("compare", FAIL, f"{finding.sentence} 2 of 9 fail.", (with_details,)))
    assert text.count("changed by") == 1
    assert "- p95_itl_ms, mixed/a\n    pair 3 was the worst\n" in text
    assert printed(Verdict("compare", FAIL, "slower", (finding,))).count("changed by") == 1


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
