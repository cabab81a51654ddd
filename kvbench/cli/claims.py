"""``kvbench claims``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from kvbench.cli.options import PROFILE, FiniteRange


@click.command()
@click.option("--only", multiple=True, metavar="NAME", help="Measure this claim only; repeatable.")
@click.option("--list", "list_only", is_flag=True, help="Print the claims and measure nothing.")
@click.option("--minutes", type=FiniteRange(min=0, min_open=True), default=24, show_default=True,
              help="For all together; what is undecided then says so.")  # fmt: skip
@PROFILE
@click.option("--output-dir", type=click.Path(path_type=Path), default="results", show_default=True,
              help="Where runs go.")  # fmt: skip
def claims(only: tuple[str, ...], list_only: bool, minutes: float, profile: str | None, output_dir: Path) -> int:
    """Measure what is said of paged KV caches.

    Each claim gets a verdict for this machine.

    Each claim has a small workload (workloads/claims), which `kvbench sweep` runs, too. What takes time is measured in
    engine time: engines take turns step by step. Launches go on until the claim is decided: held, did not hold, or it
    depends, and on what. A claim that stays undecided says why.

    \b
    Examples:
      kvbench claims
      kvbench claims --list
      kvbench claims --only page-16 --only small-pages
    \b
    Files written, in results/claims/<UTC time>-<git sha>/:
      claims.json                 the verdicts and what they were measured on
      report.html, report.md      the same to read
      measured/                   every launch and request
    Exit codes: 0 every claim is decided, 2 bad input, 3 a claim is undecided, 130 interrupted: claims.json and the
    report have what was measured.
    """
    from rich.console import Console

    from kvbench.claims.catalogue import chosen, workloads_of
    from kvbench.claims.judges import UNDECIDED
    from kvbench.claims.results import markdown, page
    from kvbench.claims.run import ClaimsRun
    from kvbench.common.console import make_table, print_plain, print_table, status_line
    from kvbench.common.errors import Interruption
    from kvbench.common.files import write_text
    from kvbench.common.git import git_state
    from kvbench.runs.folder import create_run
    from kvbench.workload.file import default_profile

    console, selected = Console(), chosen(only)
    if list_only:
        print_table(console, make_table(("claim", "what it says"), [(claim.name, claim.says) for claim in selected]))
        return 0
    workloads, profile = workloads_of(selected, profile), profile or default_profile()
    folder = create_run(output_dir, "claims", git_state()["short_sha"]).path
    print_plain(console, f"results: {folder}")
    with Interruption() as interruption, status_line(console, "starting") as show:
        say, check = partial(print_plain, console), interruption.check
        run = ClaimsRun(folder, selected, workloads, minutes, profile, show=show, say=say, check=check)
        try:
            result = run.execute()
        finally:
            if run.result is not None and run.result.claims:
                write_text(folder / "report.md", markdown(run.result))
                write_text(folder / "report.html", page(run.result))
                print_plain(console, f"report: {folder / 'report.html'}")
    print_plain(console, result.summary)
    return 3 if any(claim.verdict == UNDECIDED for claim in result.claims) else 0
