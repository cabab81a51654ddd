"""What GitHub Actions shows of a verdict: the step summary and a few annotations.

Annotations are workflow commands on stdout (docs.github.com, "Workflow commands for GitHub Actions"); GitHub shows at
most ten of a kind for each step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvbench.common.errors import say
from kvbench.common.secrets import hide_keys
from kvbench.gate.verdict import wording
from kvbench.gate.verdict.markdown import SUMMARY_BYTES, summary
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS, Verdict

ANNOTATIONS = 5
_MESSAGE, _TITLE = 1_000, 150  # characters
_LEVELS = {FAIL: "error", INVALID: "error", EMPTY: "error", INCONCLUSIVE: "warning", PASS: "notice"}


def publish(verdict: Verdict, folder: Path | None, environ: Mapping[str, str] = os.environ) -> None:
    """Appends to the file that ``$GITHUB_STEP_SUMMARY`` names, and prints annotations in GitHub Actions.

    ``folder``: where the verdict's files are, for the first annotation. If the summary cannot be written, that is a
    warning on stderr.
    """
    if path := environ.get("GITHUB_STEP_SUMMARY"):
        try:
            _append_summary(verdict, Path(path))
        except OSError as error:
            say(f"warning: the step summary {path} could not be written: {error.strerror}")
    if environ.get("GITHUB_ACTIONS", "").lower() in ("true", "1"):
        print("\n".join(annotations(verdict, folder)), flush=True)


def _append_summary(verdict: Verdict, path: Path) -> None:
    """Appends as much of the summary as fits below what earlier commands of the step wrote. Raises OSError."""
    used = path.stat().st_size if path.exists() else 0
    gap = "\n\n" if used else ""
    text = summary(verdict, max(0, SUMMARY_BYTES - used - len(gap) - 1))
    if not text:
        say(f"warning: {path} has {used:,} bytes and no room for the verdict: GitHub takes {SUMMARY_BYTES:,}")
        return
    with path.open("a", encoding="utf-8") as file:
        file.write(gap + hide_keys(text))


def annotations(verdict: Verdict, folder: Path | None) -> list[str]:
    """At most five workflow commands: the verdict, then the worst findings."""
    title = f"kvbench {verdict.kind}: {wording.LABELS[verdict.outcome]}"
    ends = f" (see {folder})" if folder and verdict.outcome != PASS else ""
    commands = [_command(verdict.outcome, title, verdict.sentence, ends)]
    for finding in wording.worst_first(verdict.of(FAIL, INVALID, INCONCLUSIVE))[: ANNOTATIONS - 1]:
        title = f"{wording.LABELS[finding.outcome]}: {wording.line(finding.title or finding.id, _TITLE)}"
        commands.append(_command(finding.outcome, title, finding.sentence))
    return commands


def _command(outcome: str, title: str, sentence: str, ends: str = "") -> str:
    """Escaped as actions/toolkit does; a comma or a colon would end a property."""
    text = escape(wording.line(sentence, _MESSAGE) + ends)
    return f"::{_LEVELS[outcome]} title={escape(title).replace(':', '%3A').replace(',', '%2C')}::{text}"


def escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
