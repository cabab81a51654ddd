"""What GitHub Actions shows of a verdict: the step summary and a few annotations.

Annotations are workflow commands on stdout (docs.github.com, "Workflow commands for GitHub Actions"); GitHub shows at
most ten of a kind a step, and a page of them is read by nobody.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from kvbench.common.errors import say
from kvbench.gate.verdict import text as wording
from kvbench.gate.verdict.summary import SUMMARY_BYTES, summary
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS, Verdict

ANNOTATIONS = 5
_MESSAGE, _TITLE = 1_000, 150  # characters
_LEVELS = {FAIL: "error", INVALID: "error", EMPTY: "error", INCONCLUSIVE: "warning", PASS: "notice"}
_YES = {"true", "1"}


def publish(verdict: Verdict, folder: Path | None, environ: Mapping[str, str] = os.environ) -> None:
    """The step summary, where ``$GITHUB_STEP_SUMMARY`` names its file, and annotations, where GitHub Actions runs.

    ``folder``: where the verdict's files lie, if anywhere; the first annotation names it. What cannot be written is
    said on stderr and changes nothing else: the verdict and its exit code stand.
    """
    if path := environ.get("GITHUB_STEP_SUMMARY"):
        _attempt(f"the step summary {path}", lambda: append_summary(verdict, Path(path)))
    if environ.get("GITHUB_ACTIONS", "").lower() in _YES:
        _attempt("the annotations", lambda: _print(annotations(verdict, folder)))


def append_summary(verdict: Verdict, path: Path) -> None:
    """Append the summary, as much of it as fits beside what earlier commands of the step wrote. Raises OSError."""
    there = path.stat().st_size if path.exists() else 0
    gap = "\n\n" if there else ""
    text = summary(verdict, max(0, SUMMARY_BYTES - there - len(gap) - 1))
    if not text:
        say(f"warning: {path} has {there:,} bytes and no room for the verdict: GitHub takes {SUMMARY_BYTES:,}")
        return
    with path.open("a", encoding="utf-8") as file:
        file.write(gap + text)


def annotations(verdict: Verdict, folder: Path | None) -> list[str]:
    """At most five workflow commands, worst first: the verdict, then what failed, was invalid or could not be told."""
    level = _LEVELS[verdict.outcome]
    title = f"kvbench {verdict.kind}: {wording.LABELS[verdict.outcome]}"
    ends = f" (see {folder})" if folder and verdict.outcome != PASS else ""
    commands = [_command(level, title, wording.line(verdict.sentence, _MESSAGE) + ends)]
    bad = wording.worst_first(verdict.of(FAIL, INVALID, INCONCLUSIVE))
    for finding in bad[: ANNOTATIONS - 1]:
        found = f"{wording.LABELS[finding.outcome]}: {wording.line(finding.title or finding.id, _TITLE)}"
        commands.append(_command(_LEVELS[finding.outcome], found, wording.line(finding.sentence, _MESSAGE)))
    return commands


def _command(level: str, title: str, message: str) -> str:
    return f"::{level} title={escape_property(title)}::{escape_data(message)}"


def escape_data(text: str) -> str:
    """The message of a workflow command, as actions/toolkit escapes it."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    """A property of a workflow command, which a comma or a colon would end."""
    return escape_data(text).replace(":", "%3A").replace(",", "%2C")


def _print(lines: list[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _attempt(what: str, write: Callable[[], None]) -> None:
    """``write()``; an error of the operating system becomes a warning. A reader that has gone is not one of those."""
    try:
        write()
    except BrokenPipeError:
        raise
    except (OSError, UnicodeError) as error:
        say(f"warning: {what} could not be written: {getattr(error, 'strerror', None) or error}")
