"""The command line. Imports are lazy, so that ``kvbench --help`` does not wait for torch or pandas."""

from __future__ import annotations

import pkgutil
import sys

import click

from kvbench import __version__
from kvbench.cli.run_guarded import guarded
from kvbench.common.packages import check_packages

_COMMANDS = (
    "init:init", "plan:plan", "sweep:sweep", "simulate:simulate", "report:report", "recommend:recommend",
    "predict:predict", "claims:claims", "load:load", "compare:compare", "gate:gate", "gate_counters:accept",
    "compare:calibrate", "history:history", "view:view", "quality:quality", "canaries:canaries", "engine:serve",
    "engine:bench_engine", "tune:tune", "trace:trace", "cache_sim:cache_sim", "mock_server:mock_server",
    "calibrate_client:calibrate_client", "calibrate_model:calibrate_model", "doctor:doctor", "help:help_command",
)  # fmt: skip
"""The file in this folder and the name of each command, in the order of --help."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kvbench")
def cli() -> None:
    """Measure what a paged KV-cache engine buys and what it costs.

    \b
    The usual way:
      kvbench init my.yaml                            a short workload from a few answers
      kvbench plan my.yaml                            what memory holds of it
      kvbench sweep workloads/mixed.yaml              run every cell, print the table, write the report
      kvbench sweep workloads/mixed.yaml --dry-run    what would run, in which order, for how long
      kvbench report results/mixed/<run>              the report again from stored results
      kvbench recommend results/mixed/<run>           the settings it supports, and when not to page
      kvbench claims                                  what is said of paged KV caches, measured here
      kvbench view results/                           all runs in a browser, any cells side by side
      kvbench load workloads/mixed.yaml --url URL     one load on a server that runs already
      kvbench simulate FILE --device 4xA100-80GB      one load on GPUs that are not here
      kvbench gate counters                           has the engine's bookkeeping changed?
      kvbench compare main HEAD --workload FILE       is HEAD slower than main?

    What was interrupted goes on with `sweep --resume [RUN_DIR]` or, the rest of the command as it was, with
    `load --output-dir DIR --resume`. Results of a sweep go to results/<workload>/<run>/.

    Servers that kvbench launches listen on 127.0.0.1, and nothing leaves this machine unless you say so: with a URL of
    another machine, with --host of serve and mock-server, or with --bind-host and --master-host of load.

    \b
    Exit codes:
      0    done
      1    a regression (gate, compare, history --fail-on-drift), or a limit was missed (bench-engine, calibrate-client)
      2    usage or bad input; nothing was measured
      3    inconclusive (gate, compare), or `load --find-max-rate` ended before the tolerance was reached
      4    the measurement is invalid, a server died, or something unexpected went wrong
      5    nothing was compared (gate, compare, history)
      130  interrupted
    """


for _command in _COMMANDS:
    cli.add_command(pkgutil.resolve_name(f"{__package__}.{_command}"))


def main(argv: list[str] | None = None) -> None:
    """The entry point of the ``kvbench`` script."""

    def run() -> int:
        arguments = list(sys.argv[1:] if argv is None else argv)
        if arguments[:1] != ["doctor"]:  # which reports a foreign package instead of stopping at it
            check_packages()
        result = cli.main(args=arguments, prog_name="kvbench", standalone_mode=False)
        return result if isinstance(result, int) else 0

    sys.exit(guarded(run))


if __name__ == "__main__":
    main()
