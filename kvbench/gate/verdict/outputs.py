"""The outputs of a verdict: its files in one folder, the terminal and GitHub.

verdict.json                        all of it, by kvbench/gate/verdict/verdict.schema.json
junit.xml                           a test case for each finding
summary.md                          for people, the verdict in its first line
pairs.html                          the pairs drawn, where there are any
benchmark-{bigger,smaller}-is-better.json   for github-action-benchmark, where there are values
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from kvbench.common.console import print_plain
from kvbench.common.files import write_json, write_text
from kvbench.gate.verdict.benchmark_action import verdict_entries, write_benchmarks
from kvbench.gate.verdict.github import publish
from kvbench.gate.verdict.junit import junit
from kvbench.gate.verdict.markdown import summary
from kvbench.gate.verdict.pairs import pair_page
from kvbench.gate.verdict.terminal import print_verdict
from kvbench.gate.verdict.verdict import Verdict


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
    return [*written, *write_benchmarks(verdict_entries(verdict), folder)]


def report_verdict(verdict: Verdict, folder: Path | None) -> int:
    """Prints the verdict, writes its files to ``folder``, if given, and tells GitHub. Returns the exit code."""
    console = Console()
    print_verdict(verdict, console)  # first: a full disk must not take it away
    for path in write_outputs(verdict, folder) if folder else ():
        print_plain(console, f"written: {path}")
    publish(verdict, folder)
    return verdict.exit_code
