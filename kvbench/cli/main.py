"""The command line. Imports are lazy, so that ``kvbench --help`` does not wait for torch or pandas."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import click

from kvbench import __version__
from kvbench.cli.calibrate import NO_CALIBRATION, calibrate_client
from kvbench.cli.compare import calibrate, compare
from kvbench.cli.gate import gate
from kvbench.cli.gate_counters import accept
from kvbench.cli.history import history
from kvbench.cli.load import load
from kvbench.cli.mock_server import mock_server
from kvbench.cli.option_types import FiniteRange
from kvbench.cli.quality import quality
from kvbench.cli.run_guarded import guarded
from kvbench.cli.target_options import target_options
from kvbench.cli.tools import cache_sim, tune
from kvbench.cli.trace import trace
from kvbench.common.packages import check_house

_EXIT_CODES = """\b
Exit codes:
  0    all loads were measured
  2    usage or bad input, or another workload, code or machine at --resume
  4    a load is invalid or a server died; the results are kept
  130  interrupted; go on with the printed --resume command"""


def _with_exit_codes(text: str) -> Any:
    def set_help(function: Any) -> Any:
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{text}"
        return function

    return set_help


_PROFILE = click.option(
    "--profile", metavar="NAME", help="cpu or gpu: which of the file's profiles to use (default: gpu if there is one)."
)
_OVERRIDE = click.option(
    "-o", "--override", "overrides", multiple=True, metavar="KEY=VALUE",
    help="Set a value of the workload after the profile, e.g. -o engine.kv_budget=64MiB. Repeatable.",
)  # fmt: skip
_SEED = click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), help="Seed of prompts and order (default: the file's)."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kvbench")
def cli() -> None:
    """Measure what a paged KV-cache engine buys and what it costs.

    \b
    The usual way:
      kvbench sweep workloads/mixed.yaml              run every cell, print the table, write the report
      kvbench sweep workloads/mixed.yaml --dry-run    what would run, in which order, for how long
      kvbench report results/mixed/<run>              the report again from stored results
      kvbench load workloads/mixed.yaml --url URL     one load on a server that runs already
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


@cli.command()
@click.argument("workload", required=False, type=click.Path())
@_PROFILE
@_OVERRIDE
@_SEED
@click.option("--repeats", type=click.IntRange(1, 1000), help="Repeats of every cell, each on a fresh server.")
@click.option(
    "--only", multiple=True, metavar="GLOB", help="Only cells whose id matches, e.g. 'paged-*-c32'. Repeatable."
)
@click.option(
    "--resume", is_flag=False, flag_value="latest", metavar="[RUN_DIR]",
    help="Go on with an interrupted run: the folder, or the latest incomplete run of WORKLOAD.",
)  # fmt: skip
@click.option(
    "--force", is_flag=True, help="With --resume: go on though code, versions or machine differ from the run's start."
)
@click.option("--dry-run", is_flag=True, help="Check everything, print cells, order and time; launch nothing.")
@NO_CALIBRATION
@click.option("--no-report", is_flag=True, help="Keep the raw results only; `kvbench report` can follow later.")
@click.option(
    "--output-dir", type=click.Path(path_type=Path), default="results", show_default=True, help="Where runs go."
)
@target_options
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port of the launched server (default: a free one)."
)
@click.option(
    "--start-timeout",
    type=FiniteRange(min=1),
    help="Seconds to be ready (default: 180; 900 for other engines, which may compile first).",
)
@_with_exit_codes(_EXIT_CODES)
def sweep(**options: Any) -> int:
    """Run every cell of WORKLOAD (a YAML file) and report what was found.

    A cell is one engine configuration under one load. Each configuration is measured on a fresh server in every
    repeat, in random order, and its prefix cache is reset between loads.

    \b
    Examples:
      kvbench sweep workloads/mixed.yaml
      kvbench sweep workloads/mixed.yaml --only 'paged-p16-c*' --repeats 5
      kvbench sweep workloads/mixed.yaml -o engine.kv_budget=64MiB -o 'load.concurrency=[2, 8]'
      kvbench sweep workloads/mixed.yaml --resume
      kvbench sweep --resume results/mixed/20260101T120000Z-1a2b3c4
      kvbench sweep workloads/mixed.yaml --target http://127.0.0.1:8000
      kvbench sweep workloads/mixed.yaml --target vllm
      kvbench sweep W.yaml --preset vllm --serve-cmd 'vllm serve {model} --port {port} --dtype {dtype}
          --block-size {page_size} --kv-cache-memory-bytes {kv_budget}' -o 'sweep={page_size: [16, 32]}'
                  (what is swept must be in the command; -o 'sweep={}' measures the baseline alone)

    \b
    Files written, in results/<workload>/<UTC time>-<git sha>/:
      manifest.json               what was measured, with what, on what
      cells/<cell>/summary.json   metrics per repeat, aggregated and pooled; requests.parquet: raw samples
      summary.csv                 one row a cell
      report.html, report.md      the report
    """
    from kvbench.cli.commands import sweep_command

    return sweep_command(**options)


@cli.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(arguments: tuple[str, ...]) -> int:
    """Run the built-in engine as an OpenAI-compatible server (see: kvbench serve --help)."""
    check_house()
    from kvbench.cli.commands import serve_command

    return serve_command(list(arguments))


@cli.command(name="bench-engine", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench_engine(arguments: tuple[str, ...]) -> int:
    """Time the engine alone, without HTTP, beside its peers (see: kvbench bench-engine --help).

    \b
    Example:
      kvbench bench-engine --sides kvbench,hf-continuous --repeats 5 --require hf-continuous=5
    \b
    Exit codes: 0 measured, 1 a --require was missed, 2 bad input, 4 the sides did not do the same work or
    other processes took the machine.
    """
    check_house()
    from kvbench.cli.commands import bench_engine_command

    return bench_engine_command(list(arguments))


@cli.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
def report(run_dir: Path) -> int:
    """Write the report of a run again from its stored results, and print table and conclusion.

    \b
    Example:
      kvbench report results/mixed/20260101T120000Z-1a2b3c4
    \b
    Files written in RUN_DIR: report.html (works offline), report.md, summary.csv (one row a cell).
    Exit codes: 0 written, 2 not a run folder.
    """
    from kvbench.cli.commands import report_command

    return report_command(run_dir)


@cli.command()
@click.argument("workload", type=click.Path())
@_PROFILE
@_OVERRIDE
def plan(workload: str, profile: str | None, overrides: tuple[str, ...]) -> int:
    """Show what each configuration of WORKLOAD gets for its KV budget: arithmetic only, nothing is launched.

    Bytes a token (scales of a quantised KV among them), pages or reservations, tokens, page-table bytes, how many
    sequences of max_model_len tokens fit at once, and what the swap space holds.

    \b
    Examples:
      kvbench plan workloads/mixed.yaml
      kvbench plan workloads/mixed.yaml -o engine.kv_budget=1GiB
    \b
    Exit codes: 0 printed, 2 a configuration is impossible. No files are written.
    """
    from kvbench.cli.commands import plan_command

    return plan_command(workload, profile, overrides)


cli.add_command(load)
cli.add_command(compare)
cli.add_command(gate)
cli.add_command(accept)
cli.add_command(calibrate)
cli.add_command(history)
cli.add_command(quality)
cli.add_command(cache_sim)
cli.add_command(tune)
cli.add_command(trace)
cli.add_command(mock_server)
cli.add_command(calibrate_client)


@cli.command()
def doctor() -> int:
    """Show what this machine has for benchmarking: versions, cores, memory and its read bandwidth, GPUs.

    \b
    Exit codes: 0 ready, 2 something that kvbench needs is missing. No files are written.
    """
    from kvbench.cli.doctor import doctor_command

    return doctor_command()


def main(argv: list[str] | None = None) -> None:
    """The entry point of the ``kvbench`` script."""

    def run() -> int:
        arguments = list(sys.argv[1:] if argv is None else argv)
        if arguments[:1] != ["doctor"]:  # which reports a foreign package instead of stopping at it
            check_house()
        result = cli.main(args=arguments, prog_name="kvbench", standalone_mode=False)
        return result if isinstance(result, int) else 0

    sys.exit(guarded(run))


if __name__ == "__main__":
    main()
