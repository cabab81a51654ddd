"""The audit of some files as a verdict, for the terminal, programs, CI and pull requests."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kvbench.audit.checks import BROKEN, OK, OPEN, CheckAnswer, audit, check_names
from kvbench.audit.compare import comparable, pairs_to_compare, repeats_of, shared_figures
from kvbench.audit.readers import read_results
from kvbench.audit.result import AuditedResult
from kvbench.audit.sentences import say
from kvbench.common.console import make_table, print_plain, print_table
from kvbench.common.errors import EXIT_USAGE, UsageError
from kvbench.common.errors import say as warn
from kvbench.common.files import check_output_dir
from kvbench.common.text import did_you_mean, plural, significant
from kvbench.gate.verdict.outputs import publish, write_outputs
from kvbench.gate.verdict.verdict import FAIL, INVALID, PASS, Finding, Verdict, worst

Compared = tuple[AuditedResult, AuditedResult, CheckAnswer]
_WORDS = {OK: ("ok", "green"), BROKEN: ("broken", "bold red"), OPEN: ("undecided", "yellow"), INVALID: ("empty", "red")}


def report_audit(paths: Sequence[Path], allowed: Sequence[str], folder: Path | None, *, as_json: bool) -> int:
    """Audits the files, prints and writes what was found, and returns the exit code. Raises UsageError."""
    names = [*check_names(), "compare"]
    for name in allowed:
        if name not in names:
            raise UsageError(say("verdict.no_check", name=name, near=did_you_mean(name, names)))
    if folder:
        check_output_dir(folder)
    groups, refused = [], []
    for path in paths:
        try:
            groups.append(read_results(path))
        except UsageError as error:  # the others are audited all the same
            refused.append(error)
    if not groups:
        raise refused[0]
    results = _named_apart([result for group in groups for result in group])
    results = [replace(result, runs=max(result.runs, repeats_of(result, results))) for result in results]
    answers = {result.name: _audited(result, allowed) for result in results}
    rest = iter(results)
    pairs = pairs_to_compare([[next(rest) for _ in group] for group in groups])
    compared = []
    for a, b in pairs:
        answer = comparable(a, b, (answers[a.name], answers[b.name]))
        compared.append((a, b, _allowed([answer], allowed)[0]))
    verdict = _verdict(answers, compared)
    if as_json:
        print(json.dumps(verdict.to_json(), indent=1))
    else:
        _print(Console(), verdict, results, answers, compared)
    if folder:
        for path in write_outputs(verdict, folder):
            if not as_json:
                print_plain(Console(), f"written: {path}")
    if not as_json:  # annotations are lines of the output, too
        publish(verdict, folder)
    for error in refused:
        warn(f"error: {error}")
    return EXIT_USAGE if refused else verdict.exit_code


def _named_apart(results: Sequence[AuditedResult]) -> list[AuditedResult]:
    """Numbers results of the same name: files in folders that are called alike."""
    names = [result.name for result in results]
    return [
        replace(result, name=f"{name} ({names[:i].count(name) + 1})") if names.count(name) > 1 else result
        for i, (name, result) in enumerate(zip(names, results, strict=True))
    ]


def _audited(result: AuditedResult, allowed: Sequence[str]) -> list[CheckAnswer]:
    lacks_duration = result.duration_s is not None and result.duration_s <= 0
    if (not result.completed and not result.failed and not result.latencies) or lacks_duration:
        return [CheckAnswer("empty", INVALID, say("empty.broken"))]
    return _allowed(audit(result), allowed)


def _allowed(answers: Sequence[CheckAnswer], allowed: Sequence[str]) -> list[CheckAnswer]:
    return [
        replace(a, outcome=OK, sentence=say("verdict.allowed", text=a.sentence))
        if a.check in allowed and a.outcome == BROKEN
        else a
        for a in answers
    ]


def _verdict(answers: dict[str, list[CheckAnswer]], compared: Sequence[Compared]) -> Verdict:
    findings = [_finding(name, answer) for name, every in answers.items() for answer in every]
    for number, (first, second, answer) in enumerate(compared, 1):
        finding = _finding(f"{first.name} | {second.name}", answer)
        details = tuple(
            say("verdict.figure", name=f.name, first=significant(f.first), second=significant(f.second),
                ratio=f.second / f.first, definition=f.definition)
            for f in shared_figures(first, second)
        )  # fmt: skip
        findings.append(replace(finding, id=f"compare/{number}", details=details))
    outcomes = [finding.outcome for finding in findings]
    failed = [finding for finding in findings if finding.outcome in (FAIL, INVALID)]
    count, open_checks = plural(len(answers), "result"), outcomes.count(OPEN)
    if failed:
        text = say("verdict.found", results=count, broken=plural(len(failed), "broken check"), worst=failed[0].sentence)
    else:
        text = say("verdict.nothing", results=count, open=say("verdict.open", n=open_checks))
    outcome = worst([outcome for outcome in outcomes if outcome != OPEN]) if failed else PASS
    again = shlex.join(["kvbench", *sys.argv[1:]])
    return Verdict("audit", outcome, text, tuple(findings), reproduce=again, facts={"results": len(answers)})


def _finding(name: str, answer: CheckAnswer) -> Finding:
    title = say("verdict.title", check=say(f"{answer.check}.title"), name=name)
    text = say("verdict.finding", name=name, check=answer.check, text=answer.text)
    return Finding(f"{answer.check}/{name}", name, title, answer.outcome, text)


def _print(
    console: Console,
    verdict: Verdict,
    results: Sequence[AuditedResult],
    answers: dict[str, list[CheckAnswer]],
    compared: Sequence[Compared],
) -> None:
    for result in results:
        about = filter(None, [result.tool, result.version, result.model, result.date])
        print_table(console, _table(f"{result.name} ({', '.join(about)})", answers[result.name]))
    for first, second, answer in compared:
        print_table(console, _table(f"{first.name} | {second.name}", [answer]))
        rows = [
            [f.name, significant(f.first), significant(f.second), f"{f.second / f.first:.3f}", f.definition]
            for f in shared_figures(first, second)
        ]
        heads = ("figure", first.name, second.name, "ratio", "definition")
        print_table(console, make_table(heads, rows, tight=True), drop_first=("definition",))
    word, style = _WORDS[verdict.outcome]
    console.print(Text.assemble((word.upper(), style), "  ", verdict.sentence))


def _table(title: str, answers: Sequence[CheckAnswer]) -> object:
    rows = []
    for answer in answers:
        word, style = _WORDS[answer.outcome]
        title_of_check = f"{say(f'{answer.check}.title')} ({answer.check})"
        rows.append([title_of_check, Text(word, style=style), answer.text])
    return make_table(("check", "answer", "why"), rows, numbers_from=3, title=title, tight=True)
