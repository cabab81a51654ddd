"""What GitHub Actions shows of a verdict: the step summary and a few annotations.

Annotations are workflow commands on stdout (docs.github.com, "Workflow commands for GitHub Actions"); GitHub shows at
most ten of a kind a step, and a page of them is read by nobody.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from kvbench.common.errors import say
from kvbench.gate.verdict import wording
from kvbench.gate.verdict.markdown import SUMMARY_BYTES, summary
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS, Verdict

ANNOTATIONS = 5
_MESSAGE, _TITLE = 1_000, 150  # characters
_LEVELS = {FAIL: "error", INVALID: "error", EMPTY: "error", INCONCLUSIVE: "warning", PASS: "notice"}


def publish(verdict: Verdict, folder: Path | None, environ: Mapping[str, str] = os.environ) -> None:
    """Write the step summary to the file that ``$GITHUB_STEP_SUMMARY`` names, and print annotations in GitHub Actions.

    ``folder``: where the verdict's files are, named in the first annotation. What cannot be written becomes a warning
    on stderr; verdict and exit code stay.
    """
    if path := environ.get("GITHUB_STEP_SUMMARY"):
        _attempt(f"the step summary {path}", lambda: append_summary(verdict, Path(path)))
    if environ.get("GITHUB_ACTIONS", "").lower() in ("true", "1"):
        lines = "\n".join(annotations(verdict, folder))
        _attempt("the annotations", lambda: print(lines, flush=True))


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
    """At most five workflow commands: the verdict, then the worst findings."""
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


def _attempt(what: str, write: Callable[[], None]) -> None:
    """Call ``write``; an error of the operating system becomes a warning, but a closed pipe ends the command."""
    try:
        write()
    except BrokenPipeError:
        raise
    except (OSError, UnicodeError) as error:
        say(f"warning: {what} could not be written: {getattr(error, 'strerror', None) or error}")
