"""The options of ``kvbench bisect``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvbench.common.options import ExistingFolder, Positive, argument, option, switch
from kvbench.gate.compare.options import SeriesOptions


@dataclass(frozen=True, kw_only=True)
class BisectOptions(SeriesOptions, heading="The search"):
    """The options of ``kvbench bisect``."""

    good: str | None = argument("GOOD", None)
    bad: str | None = argument("BAD", None)
    by: Literal["timing", "counters", "start", "capacity", "answers"] = option(
        "What BAD does otherwise than GOOD: a metric is worse; a counter of the counter gate, the KV capacity or an "
        "answer changed; the server does not start.",
        default="timing",
    )
    metric: str | None = option(
        "The metric of --by timing, such as p95_itl_ms (default: output_throughput); of --by counters a glob of "
        "counters (default: all).",
        metavar="NAME",
    )
    first_parent: bool = switch("Follow only the first parents of merges: which merge, not which commit in it.")
    paths: tuple[str, ...] = option(
        "Test only commits that touch PATH. Repeatable.", "--path", default=(), metavar="PATH"
    )
    skip: tuple[str, ...] = option("Never test this commit. Repeatable.", default=(), metavar="REF")
    package: str | None = option(
        "Search the versions of this package instead of commits: GOOD..BAD, such as 0.28..0.32. Needs --target or "
        "--serve-cmd.",
        metavar="NAME",
    )
    max_minutes: Positive | None = option("Stop after about N minutes; --resume goes on.")
    output_dir: Path = option("The search goes to OUTPUT_DIR/bisect/<UTC time>-<git sha>/.", default=Path("results"))
    resume: ExistingFolder | None = option("Go on with the search in DIR. What was measured is kept.", metavar="DIR")
