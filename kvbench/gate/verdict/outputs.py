"""All files of a verdict in one folder, from the verdict alone.

verdict.json                        the whole of it, by kvbench/gate/verdict/verdict.schema.json
junit.xml                           one test case a finding
summary.md                          for people, the verdict in its first line
pairs.html                          the pairs drawn, where there are any
benchmark-{bigger,smaller}-is-better.json   for github-action-benchmark, where there are values
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvbench.common.files import write_json, write_text
from kvbench.gate.verdict.benchmark_action import verdict_points, write_benchmarks
from kvbench.gate.verdict.junit import junit
from kvbench.gate.verdict.pairs_page import pair_page
from kvbench.gate.verdict.summary import summary
from kvbench.gate.verdict.verdict import Verdict

VERDICT, JUNIT, SUMMARY, PAIRS = "verdict.json", "junit.xml", "summary.md", "pairs.html"


def write_outputs(verdict: Verdict, folder: Path) -> list[Path]:
    """Write the files and say which, verdict.json first. One of an earlier verdict that has no use now is removed.

    A later file that cannot be written leaves the earlier ones. Raises OSError.
    """
    write_json(folder / VERDICT, verdict.to_json())
    written = [folder / VERDICT]
    texts: tuple[tuple[str, Callable[[Verdict], str | None]], ...] = (
        (JUNIT, junit),
        (SUMMARY, summary),
        (PAIRS, pair_page),
    )
    for name, made in texts:
        if text := made(verdict):
            write_text(folder / name, text)
            written.append(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    return [*written, *write_benchmarks(verdict_points(verdict), folder)]
