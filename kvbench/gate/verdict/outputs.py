"""The outputs of a verdict: its files in one folder, the terminal and GitHub Actions.

verdict.json                        all of it, by kvbench/gate/verdict/verdict.schema.json
junit.xml                           a test case for each finding
summary.md                          for people, the verdict in its first line
pairs.html                          the pairs drawn, where there are any
benchmark-{bigger,smaller}-is-better.json   for github-action-benchmark, where there are values

GitHub gets the step summary and annotations: workflow commands on stdout (docs.github.com, "Workflow commands for
GitHub Actions"), of which it shows at most ten of a kind for each step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvbench.common.console import print_plain
from kvbench.common.errors import say
from kvbench.common.files import write_json, write_text
from kvbench.common.secrets import hide_keys
from kvbench.gate.verdict import wording
from kvbench.gate.verdict.junit import junit
from kvbench.gate.verdict.markdown import SUMMARY_BYTES, summary
from kvbench.gate.verdict.pairs import pair_page
from kvbench.gate.verdict.terminal import print_verdict
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS, Verdict

BIGGER, SMALLER = "benchmark-bigger-is-better.json", "benchmark-smaller-is-better.json"
ANNOTATIONS = 5
_MESSAGE, _TITLE = 1_000, 150  # characters
_LEVELS = {FAIL: "error", INVALID: "error", EMPTY: "error", INCONCLUSIVE: "warning", PASS: "notice"}


def report_verdict(verdict: Verdict, folder: Path | None) -> int:
    """Prints the verdict, writes its files to ``folder``, if given, and tells GitHub. Returns the exit code."""
    console = Console()
    print_verdict(verdict, console)  # first: a full disk must not take it away
    if folder:
        for path in write_outputs(verdict, folder):
            print_plain(console, f"written: {path}")
    publish(verdict, folder)
    return verdict.exit_code


def write_outputs(verdict: Verdict, folder: Path) -> list[Path]:
    """Writes the files and returns their paths, verdict.json first; removes others of an earlier verdict."""
    written = [folder / "verdict.json"]
    write_json(written[0], verdict.to_json())
    for name, make in (("junit.xml", junit), ("summary.md", summary), ("pairs.html", pair_page)):
        if text := make(verdict):
            write_text(folder / name, text)
            written.append(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    return [*written, *write_benchmarks(verdict_benchmarks(verdict), folder)]


# --- github-action-benchmark


@dataclass(frozen=True)
class Benchmark:
    """A value of a chart. ``spread``: half of the width of its interval."""

    name: str
    unit: str
    value: float
    spread: float | None
    extra: str
    higher_is_better: bool

    def to_json(self) -> dict[str, str | float]:
        """The entry as the action's custom tools read it; a range is drawn only as ``± number``."""
        entry = {"name": wording.line(self.name), "unit": wording.line(self.unit), "value": self.value}
        if self.spread and wording.is_number(self.spread):
            entry["range"] = f"± {self.spread:.6g}"
        return {**entry, "extra": wording.clean(self.extra)}


def verdict_benchmarks(verdict: Verdict) -> list[Benchmark]:
    """The candidate's values of a comparison, named by the findings' ids; the other gates have no timings to chart."""
    benchmarks = []
    for f in verdict.findings:
        if verdict.kind != "compare" or not wording.is_number(f.candidate) or f.higher_is_better is None:
            continue
        low, high = f.interval or (None, None)
        has_interval = all(map(wording.is_number, (f.base, low, high)))
        half = abs(f.base) * (high - low) / 2 if has_interval else None
        extra = f"{wording.LABELS[f.outcome]}\n{wording.line(f.sentence)}"
        benchmarks.append(Benchmark(f.id, f.unit or "", f.candidate, half, extra, f.higher_is_better))
    return benchmarks


def write_benchmarks(benchmarks: Sequence[Benchmark], folder: Path) -> list[Path]:
    """A file for each direction with values, since the action fails with an empty list. Raises OSError.

    One of an earlier verdict that has none now is removed.
    """
    written = []
    for path, bigger in ((folder / BIGGER, True), (folder / SMALLER, False)):
        if entries := [benchmark.to_json() for benchmark in benchmarks if benchmark.higher_is_better == bigger]:
            write_json(path, entries)
            written.append(path)
        else:
            path.unlink(missing_ok=True)
    return written


# --- GitHub Actions


def publish(verdict: Verdict, folder: Path | None, environ: Mapping[str, str] = os.environ) -> None:
    """Appends to the file that ``$GITHUB_STEP_SUMMARY`` names, and prints annotations in GitHub Actions.

    ``folder``: where the verdict's files are, for the first annotation. If the summary cannot be written, that is a
    warning on stderr.
    """
    if named := environ.get("GITHUB_STEP_SUMMARY"):
        path = Path(named)
        try:
            used = path.stat().st_size if path.exists() else 0  # by earlier commands of the step
            gap = "\n\n" if used else ""
            if text := summary(verdict, max(0, SUMMARY_BYTES - used - len(gap) - 1)):
                with path.open("a", encoding="utf-8") as file:
                    file.write(gap + hide_keys(text))
            else:
                say(f"warning: {path} has {used:,} bytes and no room for the verdict: GitHub takes {SUMMARY_BYTES:,}")
        except OSError as error:
            say(f"warning: the step summary {path} could not be written: {error.strerror}")
    if environ.get("GITHUB_ACTIONS", "").lower() in ("true", "1"):
        print("\n".join(annotations(verdict, folder)), flush=True)


def annotations(verdict: Verdict, folder: Path | None) -> list[str]:
    """Makes at most five workflow commands: the verdict, then the worst findings."""
    title = f"kvbench {verdict.kind}: {wording.LABELS[verdict.outcome]}"
    ends = f" (see {folder})" if folder and verdict.outcome != PASS else ""
    commands = [_command(verdict.outcome, title, verdict.sentence, ends)]
    for finding in wording.worst_first(verdict.of(FAIL, INVALID, INCONCLUSIVE))[: ANNOTATIONS - 1]:
        title = f"{wording.LABELS[finding.outcome]}: {wording.line(finding.title or finding.id, _TITLE)}"
        commands.append(_command(finding.outcome, title, finding.sentence))
    return commands


def _command(outcome: str, title: str, sentence: str, ends: str = "") -> str:
    """Escapes a command as actions/toolkit does; a comma or a colon would end a property."""
    text = _escape(wording.line(sentence, _MESSAGE) + ends)
    return f"::{_LEVELS[outcome]} title={_escape(title).replace(':', '%3A').replace(',', '%2C')}::{text}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
