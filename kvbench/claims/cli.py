"""``kvbench claims``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvbench.common.options import Options, Positive, option, switch, takes


@dataclass(frozen=True, kw_only=True)
class ClaimsRequest(Options):
    """The request of ``kvbench claims``."""

    only: tuple[str, ...] = option("Measure this claim only. Repeatable.", default=(), metavar="NAME")
    list_only: bool = switch("Print the claims and measure nothing.", "--list")
    minutes: Positive = option(
        "Stop after about N minutes for all claims together; an undecided claim says so. Each measurement gets at "
        "least one launch, of up to 90 s, so a small N takes longer.",
        default=15.0,
    )
    profile: str | None = option("cpu or gpu: which profile of the claims' workloads (default: gpu if there is one).")
    target: str | None = option(
        "Measure vllm, sglang or transformers instead, by those claims that need nothing of the built-in engine's own.",
        metavar="NAME",
    )
    target_python: str | None = option("The Python that has the package of --target.", metavar="PATH")
    target_args: str | None = option("More words for the command line of --target's server.", metavar="WORDS")
    output_dir: Path = option("The folder for results.", default=Path("results"))


@takes(ClaimsRequest)
def claims(request: ClaimsRequest) -> int:
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
      kvbench claims --target vllm --target-python ~/vllm/bin/python --minutes 30
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
    from kvbench.common.packages import require_engine
    from kvbench.runs.folder import create_run
    from kvbench.targets.choose import BUILTIN, check_target_options, engine_with_adapter
    from kvbench.targets.options import TargetOptions
    from kvbench.workload.file import default_profile

    console, selected = Console(), chosen(request.only, request.target)
    if request.list_only:
        print_table(console, make_table(("claim", "what it says"), [(claim.name, claim.says) for claim in selected]))
        return 0
    if request.target is not None:
        engine_with_adapter(request.target, request.target_python)
    else:
        check_target_options([BUILTIN], request.given)
        require_engine("`kvbench claims` without --target")
    names = {name: getattr(request, name) for name in ("target", "target_python", "target_args")}
    workloads = workloads_of(selected, request.profile)
    profile = request.profile or default_profile()
    folder = create_run(request.output_dir, "claims", git_state()["short_sha"]).path
    print_plain(console, f"results: {folder}")
    with Interruption() as interruption, status_line(console, "starting") as show:
        say, check = partial(print_plain, console), interruption.check
        run = ClaimsRun(
            folder, selected, workloads, request.minutes, profile, show=show, say=say, check=check,
            engine=TargetOptions(**names),
        )  # fmt: skip
        try:
            result = run.execute()
        finally:
            if run.result is not None and run.result.claims:
                write_text(folder / "report.md", markdown(run.result))
                write_text(folder / "report.html", page(run.result))
                print_plain(console, f"report: {folder / 'report.html'}")
    print_plain(console, result.summary)
    return 3 if any(claim.verdict == UNDECIDED for claim in result.claims) else 0
